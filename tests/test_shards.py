"""Pieces of tensors in files, read back in another cut."""

import pytest
import torch
from safetensors.torch import save_file

from sapo.shards import Piece, fill_pieces, open_pieces, open_tensors, write_pieces


def test_pieces_are_read_back_in_any_other_cut(tmp_path):
    a, b = torch.arange(10.0), torch.arange(100.0, 103.0)
    write_pieces([Piece("a", 0, a[:7]), Piece("b", 0, b)], tmp_path, "rank0", {"updates": "4"}, file_bytes=30)
    write_pieces([Piece("a", 7, a[7:])], tmp_path, "rank1", {"updates": "4"})
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n}.safetensors" for n in ("rank0_0", "rank0_1", "rank1_0")]
    sources, metadata = open_pieces(tmp_path.iterdir())
    assert metadata == {"updates": "4"}
    for cuts in ([0, 10], [0, 5, 10], [0, 1, 6, 8, 10]):
        pieces = [Piece("a", first, torch.zeros(last - first)) for first, last in zip(cuts, cuts[1:])]
        fill_pieces([*pieces, Piece("b", 1, rest := torch.zeros(2))], sources)
        assert torch.equal(torch.cat([piece.data for piece in pieces]), a) and rest.tolist() == [101.0, 102.0]


def test_a_piece_is_cut_out_of_a_whole_tensor_of_any_shape(tmp_path):
    whole = torch.arange(24.0).reshape(4, 3, 2)
    save_file({"w": whole, "v": torch.tensor([1.0, 2.0])}, tmp_path / "model.safetensors")
    tensors = open_tensors([tmp_path / "model.safetensors"])
    for first, last in ((0, 24), (0, 1), (5, 7), (6, 12), (11, 23), (23, 24)):
        fill_pieces([Piece("w", first, data := torch.zeros(last - first))], {"w": [tensors["w"]]})
        assert data.tolist() == list(range(first, last))
    fill_pieces([Piece("v", 1, data := torch.zeros(1))], {"v": [tensors["v"]]})
    assert data.tolist() == [2.0]


def test_a_rank_without_a_piece_writes_a_file_of_none(tmp_path):
    write_pieces([], tmp_path, "rank3", {"updates": "0"})
    assert open_pieces(tmp_path.iterdir()) == ({}, {"updates": "0"})


def test_what_no_file_holds_is_an_error(tmp_path):
    write_pieces([Piece("a", 0, torch.zeros(3))], tmp_path, "rank0", {})
    sources, _ = open_pieces(tmp_path.iterdir())
    for piece, count in ((Piece("a", 1, torch.zeros(4)), 2), (Piece("b", 0, torch.zeros(4)), 0)):
        with pytest.raises(ValueError, match=f"only {count} of 4 elements of {piece.name} "):
            fill_pieces([piece], sources)
