"""Rows of tokens as one stream without padding, in which a beginning that rows have in common lies once.

The rows of a micro-batch are laid out one after the other, [1, S]. A row that begins with the same tokens as the one
before it does not bring them again: causal attention gives a token the same hidden state whatever follows, so all
samples of a question share its prompt, and prompts of one template share its instructions. What a row needs but does
not bring it reads, as keys and values, from where it lies. Loss and gradient are those of the padded rows.

Dims: `B` rows, `T` tokens of the longest, `S` tokens of the stream, `N` sampled tokens, `D` of an attention head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from sapo.attention import refuse_more_than_causal, require_interface

ATTENTION = "sapo_packed"  # name under which models find `packed_attention`
LEAST_SHARED = 16  # tokens: sharing fewer saves less than the copies of keys and values cost


@dataclass(frozen=True)
class PackedRow:
    """One row of the stream that brings tokens of its own.

    pieces: numbers of the pieces of the stream that hold its tokens, in order. own: how many of them, the last ones, it
    brings. shared, length: its tokens that lie in the others, and all. mask [length - shared, length] float32 or None:
    added to the scores of its own tokens, where that is cheaper than causal attention of the whole row.
    """

    pieces: list[int]
    own: int
    shared: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class PackedRows:
    """What attention needs to know of a stream. sizes: tokens of its pieces, S in all.

    keys [sum of row lengths] int64: where the tokens of each row lie in the stream, row after row.
    """

    sizes: list[int]
    rows: list[PackedRow]
    keys: Tensor


@dataclass(frozen=True)
class Layout:
    """A stream. tokens [S] int64: the place of its tokens in the flattened [B * T] batch; positions [S]: in their rows.

    before [N] int64: where in the stream the token before each sampled token lies, in the order of the batch.
    """

    tokens: Tensor
    positions: Tensor
    before: Tensor
    rows: PackedRows


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return with how many equal ids two rows begin; 0 where they are fewer than `LEAST_SHARED`."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    common = int(different[0]) if len(different) else size
    return common if common >= LEAST_SHARED else 0


def pack_rows(input_ids: Tensor, loss_mask: Tensor) -> Layout:
    """Lay out what the sampled tokens of a right-padded batch need: in each row, the tokens before the last of them.

    input_ids [B, T] int64; loss_mask [B, T], 1 = sampled, entry 0 of each row 0. A row shares with the one before it,
    so rows with equal beginnings should follow each other. A batch without sampled tokens becomes a stream of one.
    """
    device, width = input_ids.device, input_ids.shape[1]
    ids, sampled = input_ids.cpu().numpy(), loss_mask.cpu().numpy() > 0
    needed = np.where(sampled.any(1), width - 1 - sampled[:, ::-1].argmax(1), 0)
    if not needed.any():
        needed[0] = 1  # every rank forwards something
    places: list[np.ndarray] = []  # of each row, in the stream
    shared, tokens, positions, before = [], [], [], [np.zeros(0, dtype=np.int64)]
    cuts, end, last = {0}, 0, -1
    for row, length in enumerate(needed.tolist()):
        common = shared_prefix(ids[last, : needed[last]], ids[row, :length]) if last >= 0 else 0
        own = np.arange(end, end + length - common)
        places.append(np.concatenate([places[last][:common], own]) if common else own)
        shared.append(common)
        tokens.append(row * width + np.arange(common, length))
        positions.append(np.arange(common, length))
        before.append(places[row][np.flatnonzero(sampled[row]) - 1])
        cuts |= {end, int(places[row][common - 1]) + 1} if common else {end}
        end += len(own)
        last = row if length else last
    starts = np.array(sorted(cuts - {end}))
    rows = []
    for row, length in enumerate(needed.tolist()):
        if length == shared[row]:
            continue
        piece_of = np.searchsorted(starts, places[row], side="right") - 1
        own = len(np.unique(piece_of[shared[row] :]))
        mask = None
        if 2 * shared[row] >= length:
            mask = torch.full((length - shared[row], length), -torch.inf, device=device).triu_(shared[row] + 1)
        rows.append(PackedRow(np.unique(piece_of).tolist(), own, shared[row], length, mask))
    sizes = np.diff(np.append(starts, end)).tolist()
    keys = [places[row] for row, length in enumerate(needed) if length > shared[row]]
    tokens, positions, before, keys = (
        torch.from_numpy(np.concatenate(arrays)).to(device) for arrays in (tokens, positions, before, keys)
    )
    return Layout(tokens, positions, before, PackedRows(sizes, rows, keys))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a transformers model within each row of a stream, given to its forward as `packed_rows`.

    query [1, heads, S, D], key and value [1, kv heads, S, D]; returns [1, S, heads, D]. Raises ValueError for
    attention that is more than causal.
    """
    refuse_more_than_causal(module, kwargs, "packed rows do not compute: set optim.packing: padded")
    if packed_rows is None:
        raise ValueError(
            f"{type(module).__name__} was called without packed_rows, or its model does not hand keyword arguments on "
            "to it: call it through Policy, or set optim.packing: padded"
        )
    if _has_varlen_kernel(query):
        return _varlen_attention(query, key, value, packed_rows, scaling), None
    queries, keys, values = (states.split(packed_rows.sizes, dim=2) for states in (query, key, value))
    outputs = []
    for row in packed_rows.rows:
        asking = row.pieces if row.mask is None else row.pieces[-row.own :]
        seen = F.scaled_dot_product_attention(
            _joined(queries, asking),
            _joined(keys, row.pieces),
            _joined(values, row.pieces),
            attn_mask=None if row.mask is None else row.mask.to(query.dtype),
            is_causal=row.mask is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        outputs.append(seen[:, :, row.shared :] if row.mask is None else seen)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _joined(pieces: tuple[Tensor, ...], chosen: list[int]) -> Tensor:
    return pieces[chosen[0]] if len(chosen) == 1 else torch.cat([pieces[piece] for piece in chosen], dim=2)


def _has_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and is_flash_attn_2_available()


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scaling: float | None) -> Tensor:
    """The same by flash-attention's kernel for rows of any lengths, which aligns causality at the ends of the rows."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # [1, S, heads, D]
    if len(packed.keys) > key.shape[1]:
        key, value = key[:, packed.keys], value[:, packed.keys]
    own, whole = [row.length - row.shared for row in packed.rows], [row.length for row in packed.rows]
    ends = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=query.device) for n in (own, whole)]
    return _flash_attention_forward(
        query,
        key,
        value,
        attention_mask=None,
        query_length=query.shape[1],
        is_causal=True,
        softmax_scale=scaling,
        cu_seq_lens_q=ends[0],
        cu_seq_lens_k=ends[1],
        max_length_q=max(own),
        max_length_k=max(whole),
        attn_implementation="flash_attention_2",
    )


AttentionInterface.register(ATTENTION, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model attend by `packed_attention`. Raises ValueError for one that takes no attention from outside.

    It stays so: gradient checkpointing runs the layers again after the forward has returned.
    """
    require_interface(model, "which optim.packing: packed needs: set optim.packing: padded")
    model.config.get_text_config()._attn_implementation = ATTENTION
