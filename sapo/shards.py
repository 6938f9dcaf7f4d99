"""Tensors that are cut over ranks, in safetensors files from which any other cut is read back.

A file holds flat pieces, each under <tensor>@<start>: the elements from `start` on of the flattened tensor. Whole
tensors of other safetensors files, in their own shape, serve as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 1 << 30  # of a file, and so of the copy that writing one makes of tensors on a GPU


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start` + n of the flattened tensor `name`. data: [n], a view where it is to be filled."""

    name: str
    start: int
    data: Tensor


@dataclass(frozen=True)
class Source:
    """A piece in a file. shape: [n], or of a whole tensor whatever it has."""

    file: Any  # an open safetensors file
    key: str
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def read(self, start: int, end: int) -> Tensor:
        """Return elements of the flattened tensor, [end - start]; no more of the file is read than their rows."""
        row = torch.Size(self.shape[1:]).numel()
        first, last = (start - self.start) // row, -((self.start - end) // row)
        rows = self.file.get_slice(self.key)[first:last].flatten()
        return rows[start - self.start - first * row :][: end - start]


def write_pieces(
    pieces: Iterable[Piece], folder: Path, prefix: str, metadata: Mapping[str, str], file_bytes: int = FILE_BYTES
) -> None:
    """Write pieces, in their order, into <prefix>_<n>.safetensors of about `file_bytes` each; at least one file."""
    batch: dict[str, Tensor] = {}
    number = size = 0

    def write() -> None:
        save_file(batch, folder / f"{prefix}_{number}.safetensors", metadata=dict(metadata))

    for piece in pieces:
        if batch and size + piece.data.nbytes > file_bytes:
            write()
            batch.clear()
            number, size = number + 1, 0
        batch[f"{piece.name}@{piece.start}"] = piece.data.detach().cpu()
        size += piece.data.nbytes
    write()


def open_pieces(files: Iterable[Path]) -> tuple[dict[str, list[Source]], dict[str, str]]:
    """Return the pieces of files that `write_pieces` wrote, by tensor, and the metadata, the same in all."""
    sources: dict[str, list[Source]] = {}
    metadata: dict[str, str] = {}
    for path in files:
        file = safe_open(path, framework="pt")
        metadata = file.metadata()
        for key in file.keys():
            name, _, start = key.rpartition("@")
            sources.setdefault(name, []).append(Source(file, key, int(start), tuple(file.get_slice(key).get_shape())))
    return sources, metadata


def open_tensors(files: Iterable[Path]) -> dict[str, Source]:
    """Return the tensors of ordinary safetensors files."""
    tensors = {}
    for path in files:
        file = safe_open(path, framework="pt")
        tensors |= {key: Source(file, key, 0, tuple(file.get_slice(key).get_shape())) for key in file.keys()}
    return tensors


def fill_pieces(pieces: Iterable[Piece], sources: Mapping[str, Sequence[Source]]) -> None:
    """Copy from the sources of each tensor into the pieces. Raises ValueError when they do not cover one."""
    for piece in pieces:
        end, filled = piece.start + len(piece.data), 0
        for source in sources.get(piece.name, ()):
            first, last = max(piece.start, source.start), min(end, source.end)
            if first < last:
                piece.data[first - piece.start : last - piece.start].copy_(source.read(first, last))
                filled += last - first
        if filled != len(piece.data):
            raise ValueError(f"only {filled} of {len(piece.data)} elements of {piece.name} are in the checkpoint")
