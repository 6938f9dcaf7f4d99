"""Keys and values of the rows of a session, and the attention that reads them.

One rule: **the slot of a token is its position**. A row's tokens lie at slots 0..length-1, without holes or padding,
and a query at position p sees the slots <= p. What lies beyond a row's length is zero or stale, and no query sees it.

Rows of similar length share a `Block`, one dense tensor of keys and one of values a layer, so that the padding of a
ragged batch costs neither memory nor time. New tokens are forwarded packed, [1, N] without padding; `attend` reads the
blocks in a few calls of scaled_dot_product_attention and never repeats the heads of grouped-query attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from sapo.attention import refuse_more_than_causal

ATTENTION = "sapo_kv_cache"  # name under which models find `cached_attention`
CALL_BYTES = 1 << 20  # keys and values read in the time that one more attention call costs (80 us at 12 GB/s)
MOST_PADDED = 1.25  # slots of a layout for each one that is needed
COMPACT_AFTER = 8  # a dead row is moved out of the way after costing so many reads: moving is worth about that many
SPAN_TOKENS = 512  # queries of one attention call in a prefill; bounds its mask


@dataclass
class Block:
    """Rows of similar length.

    rows [n]: the session row at each place, -1 for none. tensors: keys and values, for each layer
    [n, kv heads, slots, D]. wasted: row-reads spent on places that no longer take part in decoding.
    """

    rows: np.ndarray
    slots: int
    tensors: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    wasted: int = 0


@dataclass(frozen=True)
class Span:
    """One attention call of a forward: `width` queries for each of the m rows at `places` of a block.

    tokens: where the m * width queries lie among the packed tokens; padded ones point anywhere. kept: which of them are
    real, None for all. mask [m, 1, 1 or groups * width, slots]: added to the scores. written: index of the real tokens'
    keys in a layer's tensor, (places, all heads, positions).
    """

    block: Block
    places: slice
    tokens: slice | Tensor
    kept: Tensor | None
    width: int
    slots: int
    mask: Tensor
    written: tuple[Tensor, slice, Tensor]


def partition(lengths: np.ndarray, call_slots: float) -> list[slice]:
    """Cut descending `lengths` into runs so that sum(rows * longest of the run) + call_slots * runs is least.

    Where that pads the lengths by more than a quarter, calls count for less until it does not.

    >>> partition(np.array([900, 890, 100, 90, 80]), call_slots=60)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    count = len(lengths)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        costs = best[:stop] + call_slots + (stop - np.arange(stop)) * lengths[:stop]
        start_of[stop] = costs.argmin()
        best[stop] = costs[start_of[stop]]
    runs, stop = [], count
    while stop:
        runs.append(slice(int(start_of[stop]), stop))
        stop = runs[-1].start
    slots = sum((run.stop - run.start) * lengths[run.start] for run in runs)
    return partition(lengths, call_slots / 4) if slots > MOST_PADDED * lengths.sum() else runs[::-1]


def round_up(slots: int) -> int:
    return -(-slots // 16) * 16


class KVCache:
    """The blocks of a session's rows. length [rows]: tokens each one has here; room [rows]: slots of its block.

    slot_bytes: bytes of one token's key and value in one layer, an estimate for planning. peak_bytes and
    peak_live_bytes are measured: the most memory that blocks held, and the most that the tokens in them needed.
    """

    def __init__(self, rows: int, slot_bytes: int) -> None:
        self.blocks: list[Block] = []
        self.length = np.zeros(rows, dtype=np.int64)
        self.block_of = np.full(rows, -1)
        self.place = np.full(rows, -1)
        self.room = np.zeros(rows, dtype=np.int64)
        self.call_slots = CALL_BYTES / slot_bytes
        self.layers: list[tuple[Tensor, ...]] = []  # an empty key and value of each layer: heads, D, dtype, device
        self.spans: list[Span] = []  # of the forward that runs
        self.layout = 0  # grows whenever a row changes its place
        self.calls = 0  # of `attend` in the forward that runs
        self.bytes = 0
        self.peak_bytes = 0
        self.peak_live_bytes = 0

    # -- layout

    def hold(self, rows: np.ndarray, needed: np.ndarray) -> None:
        """Make room for `needed[i]` tokens of rows[i]. Rows that have it stay; the others move to new blocks.

        All rows are laid out again when the layout would waste a quarter of what it holds.
        """
        moving = needed > self.room[rows]
        if not moving.any():
            return
        target = self.length.copy()
        target[rows] = np.maximum(target[rows], needed)
        held = np.flatnonzero((self.block_of >= 0) | np.isin(np.arange(len(target)), rows))
        movers = rows[moving]
        kept = [block for block in self.blocks if (~np.isin(block.rows, movers) & (block.rows >= 0)).any()]
        slots = sum(block.slots * len(block.rows) for block in kept) + target[movers].sum()
        if slots > MOST_PADDED * target[held].sum():
            movers, kept = held, []
        movers = movers[np.argsort(-target[movers], kind="stable")]
        new = []
        for run in partition(target[movers], self.call_slots):
            longest = int(target[movers[run.start]])
            new.append(Block(movers[run], round_up(longest + max(16, longest // 16))))
        self._move(kept + new)

    def widen(self, rows: np.ndarray) -> None:
        """Give the full blocks among those of `rows` more slots, so that each row has room for one more token."""
        full = rows[self.length[rows] >= self.room[rows]]
        if len(full):
            blocks = list(self.blocks)
            for index in np.unique(self.block_of[full]):
                block = blocks[index]
                slots = round_up(block.slots + max(32, block.slots // 8))
                blocks[index] = Block(block.rows, slots, wasted=block.wasted)
            self._move(blocks)

    def free(self, rows: Sequence[int]) -> None:
        """Forget rows; a block without rows gives its memory back."""
        for row in rows:
            if self.block_of[row] >= 0:
                self.blocks[self.block_of[row]].rows[self.place[row]] = -1
            self.block_of[row] = self.place[row] = -1
            self.room[row] = self.length[row] = 0
        self._move([block for block in self.blocks if (block.rows >= 0).any()])

    def _move(self, blocks: list[Block]) -> None:
        """Make `blocks` the layout: fill the new ones from the present ones, layer by layer, and drop those left out.

        Never more than one layer is held twice.
        """
        new = [block for block in blocks if not any(block is old for old in self.blocks)]
        dropped = [block for block in self.blocks if not any(block is kept for kept in blocks)]
        copies = []
        for block in new:
            for index, old in enumerate(self.blocks):
                target = np.flatnonzero((block.rows >= 0) & (self.block_of[block.rows] == index))
                if len(target) and len(self.layers):
                    moved = block.rows[target]
                    copies.append((block, old, target, self.place[moved], int(self.length[moved].max())))
        for layer, empty in enumerate(self.layers):
            for kind in (0, 1):
                for block in new:
                    self._allocate(block, kind, empty[kind])
                for block, old, target, source, slots in copies:
                    block.tensors[kind][layer][target, :, :slots] = old.tensors[kind][layer][source, :, :slots]
                for block in dropped:
                    self.bytes -= block.tensors[kind][layer].nbytes
                    block.tensors[kind][layer] = empty[kind]
        for index, block in enumerate(blocks):
            if not any(block is other for other in new):
                for other in new:
                    block.rows[np.isin(block.rows, other.rows)] = -1
            places = np.flatnonzero(block.rows >= 0)
            self.block_of[block.rows[places]] = index
            self.place[block.rows[places]] = places
            self.room[block.rows[places]] = block.slots
        self.blocks = blocks
        self.layout += 1

    def _allocate(self, block: Block, kind: int, empty: Tensor) -> None:
        heads, dim = empty.shape
        # Zeros, not empty memory: a NaN there would pass through the mask (0 * NaN).
        tensor = empty.new_zeros(len(block.rows), heads, block.slots, dim)
        block.tensors[kind].append(tensor)
        self.bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def fan_out(self, source: int, targets: Sequence[int]) -> None:
        """Copy the tokens of row `source` to the rows `targets`, which have room for them."""
        length = int(self.length[source])
        origin = self.blocks[self.block_of[source]]
        for index in np.unique(self.block_of[targets]):
            block = self.blocks[index]
            places = [int(self.place[row]) for row in targets if self.block_of[row] == index]
            for olds, news in zip(origin.tensors, block.tensors):
                for old, new in zip(olds, news):
                    new[places, :, :length] = old[self.place[source], :, :length]
        self.length[targets] = length

    def compact(self, live: np.ndarray) -> None:
        """Move rows outside `live` (bool [rows]) behind the others in blocks where reading them cost more than that.

        Called once a decoding step.
        """
        moved = False
        for block in self.blocks:
            alive = (block.rows >= 0) & live[block.rows]
            places = np.flatnonzero(alive)
            if not len(places) or places[-1] - places[0] + 1 == len(places):
                continue
            dead = np.flatnonzero(~alive[: len(places)])  # these places take the live rows behind them
            block.wasted += places[-1] - places[0] + 1 - len(places)
            if block.wasted < COMPACT_AFTER * len(dead):
                continue
            behind = places[places >= len(places)]
            source, target = np.concatenate([behind, dead]), np.concatenate([dead, behind])
            slots = int(self.length[block.rows[source[block.rows[source] >= 0]]].max())
            for tensors in block.tensors:
                for tensor in tensors:
                    tensor[target, :, :slots] = tensor[source, :, :slots]
            block.rows[target] = block.rows[source]
            block.wasted = 0
            moved = True
        if moved:
            self._move(self.blocks)

    # -- forward passes

    def decode_spans(
        self, rows: np.ndarray, positions: Tensor, dtype: torch.dtype, round_to: int = 1
    ) -> list[Span]:
        """Return the attention calls of a forward with one new token for each of `rows`, ordered by (block, place).

        positions [n] on the device: where each token goes. The shapes depend only on the layout and on lengths rounded
        up to `round_to` slots, the numbers only on `positions`: a CUDA graph can capture what is computed from them.
        """
        spans = []
        for index, (start, stop) in runs_of(self.block_of[rows]):
            block = self.blocks[index]
            places = self.place[rows[start:stop]]
            first, last = int(places[0]), int(places[-1]) + 1
            slots = int(self.length[rows[start:stop]].max()) + 1
            slots = min(block.slots, -(-slots // round_to) * round_to)
            tokens: slice | Tensor = slice(start, stop)
            kept = None
            if last - first > stop - start:
                where = np.full(last - first, start)
                where[places - first] = np.arange(start, stop)
                tokens = torch.from_numpy(where).to(positions.device)
                kept = torch.from_numpy(places - first).to(positions.device)
            mask = additive_mask(positions[tokens][:, None], slots, dtype)
            written = (torch.from_numpy(places).to(positions.device), slice(None), positions[start:stop])
            spans.append(Span(block, slice(first, last), tokens, kept, 1, slots, mask, written))
        return spans

    def prefill_spans(
        self, pieces: list[tuple[int, int, int]], groups: int, dtype: torch.dtype, device: torch.device
    ) -> list[Span]:
        """Return the attention calls of a forward over `pieces` (row, first position, tokens), packed in this order.

        A piece has at most SPAN_TOKENS tokens. Short pieces of neighbouring rows share a call.
        """
        spans, offset, begin = [], 0, 0
        while begin < len(pieces):
            row, _, width = pieces[begin]
            block, place = self.block_of[row], self.place[row]
            end = begin + 1
            while end < len(pieces):
                other, _, tokens = pieces[end]
                wider = max(width, tokens)
                neighbour = self.block_of[other] == block and self.place[other] == place + end - begin
                if not neighbour or (end + 1 - begin) * wider > SPAN_TOKENS:
                    break
                width, end = wider, end + 1
            part = pieces[begin:end]
            counts = np.array([count for _, _, count in part])
            column = np.minimum(np.arange(width), counts[:, None] - 1)  # padding repeats the last token
            positions = np.array([position for _, position, _ in part])[:, None] + column
            tokens = offset + np.cumsum(counts)[:, None] - counts[:, None] + column
            real = np.arange(width) < counts[:, None]
            places = np.repeat(np.arange(place, place + len(part)), counts)
            slots = int(positions.max()) + 1

            def on_device(array: np.ndarray) -> Tensor:
                return torch.from_numpy(array).to(device)

            mask = additive_mask(on_device(positions), slots, dtype)
            if width > 1:  # the queries of a group lie one after the other: [m, 1, groups * width, slots]
                mask = mask.expand(-1, groups, -1, -1).reshape(len(part), 1, groups * width, slots)
            count = int(counts.sum())
            spans.append(
                Span(
                    block=self.blocks[block],
                    places=slice(int(place), int(place) + len(part)),
                    tokens=slice(offset, offset + count) if real.all() else on_device(tokens.ravel()),
                    kept=None if real.all() else on_device(np.flatnonzero(real)),
                    width=width,
                    slots=slots,
                    mask=mask,
                    written=(on_device(places), slice(None), on_device(positions[real])),
                )
            )
            offset, begin = offset + count, end
        return spans

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new keys and values and return the attention output of their queries.

        query [1, heads, N, D], key and value [1, kv heads, N, D] of N packed tokens -> [1, N, heads, D].
        """
        self.calls += 1
        # Autocast leaves what rotary embeddings touch in float32; attention casts it to the type of the values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if layer == len(self.layers):
            self.layers.append(tuple(states.new_empty(states.shape[1], states.shape[3]) for states in (key, value)))
            for block in self.blocks:
                for kind in (0, 1):
                    self._allocate(block, kind, self.layers[layer][kind])
        if layer == 0:
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes())
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, heads, D]
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        out = query.new_empty(tokens, heads, value.shape[-1])
        for span in self.spans:
            keys, values = (tensors[layer] for tensors in span.block.tensors)
            new = span.tokens if span.kept is None else span.tokens[span.kept]
            keys[span.written] = key[new]
            values[span.written] = value[new]
            rows = span.places.stop - span.places.start
            grouped = query[span.tokens].view(rows, span.width, kv_heads, heads // kv_heads, dim)
            grouped = grouped.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
            seen = F.scaled_dot_product_attention(
                grouped,
                keys[span.places, :, : span.slots],
                values[span.places, :, : span.slots],
                attn_mask=span.mask.to(query.dtype),
                scale=scaling,
            )
            seen = seen.view(rows, kv_heads, heads // kv_heads, span.width, -1).permute(0, 3, 1, 2, 4)
            seen = seen.reshape(rows * span.width, heads, -1)
            out[new] = seen if span.kept is None else seen[span.kept]
        return out[None]

    def live_bytes(self) -> int:
        """Return the bytes that the keys and values of the tokens held now need."""
        per_token = sum(part.nbytes for layer in self.layers for part in layer)
        return int(self.length.sum()) * per_token


def additive_mask(positions: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Return [m, 1, W, slots]: 0 where a query at positions [m, W] sees a slot, -inf where it does not."""
    hidden = torch.arange(slots, device=positions.device) > positions[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -math.inf)


def runs_of(values: np.ndarray) -> list[tuple[int, tuple[int, int]]]:
    """Return (value, (start, stop)) of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(int(values[start]), (start, stop)) for start, stop in zip(edges, edges[1:]) if stop > start]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kv_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers model over the cache given to its forward as `kv_cache`."""
    refuse_more_than_causal(module, kwargs, "the engine does not compute")
    if kv_cache is None:
        raise ValueError(f"{type(module).__name__} does not get the keyword arguments of its model's forward")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kv_cache.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, cached_attention)
