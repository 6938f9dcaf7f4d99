"""The exact reference engine: token ids in, sampled ids and logprobs out, on a Hugging Face causal LM.

A session keeps the keys and values of its rows over turns, so each token is forwarded once. The cache has one rule:
**the slot of a token is its position**. A row's tokens lie at slots 0..length-1 with no holes and no padding, whatever
the other rows do, and a query at position p sees the slots <= p. What a padded column wrote beyond a row's length is
overwritten by the row's next tokens before any query can see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from sapo.engine.sampling import Sampling, keyed_uniform, sample
from sapo.policy import changed_logits
from sapo.protocol import find_stop

STOP_WINDOW = 24  # tokens decoded to look for a stop string: more than the bytes of any, each token has at least one
COMPACT_BELOW = 0.75  # share of live rows in the decode batch below which the dead ones are moved out


@dataclass(frozen=True)
class Generation:
    """What one call sampled for one row: ids and logprobs [n] in nats, and why it ended.

    "stop": the last token completed a stop string (later characters of that token are kept); "eos": the last token
    is an end-of-sequence id; "length": the limit was reached.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "eos", "length"]


class KVCache(Cache):
    """Keys and values of R rows as two [R, heads, S, D] tensors a layer; slot = position (see the module docstring).

    `select` says which rows the next forward covers and where its tokens go; the model then calls `update`.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.capacity_rows = 0
        self.capacity_slots = 0

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for at least `rows` rows of `slots` slots; grows in steps of a quarter to bound copying."""
        if rows <= self.capacity_rows and slots <= self.capacity_slots:
            return
        self.capacity_rows = max(rows, self.capacity_rows)
        if slots > self.capacity_slots:
            self.capacity_slots = -(-max(slots, self.capacity_slots * 5 // 4) // 32) * 32
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                old_rows, heads, old_slots, dim = old.shape
                tensors[layer] = old.new_zeros(self.capacity_rows, heads, self.capacity_slots, dim)
                tensors[layer][:old_rows, :, :old_slots] = old

    def select(self, rows: slice | torch.Tensor, positions: torch.Tensor, slots: int) -> None:
        """Aim the next forward at `rows`: a slice (read in place) or an index [n] (read by copy).

        positions [n, W]: where the W new tokens of each row go. slots: how many slots its queries may see.
        """
        self.rows = rows
        index = torch.arange(rows.start, rows.stop, device=positions.device) if isinstance(rows, slice) else rows
        self.write_index = (index[:, None], slice(None), positions)  # of a tensor [n, W, heads, D]
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new [n, heads, W, D] states and return all visible ones, [n, heads, slots, D]."""
        if layer_idx == len(self.keys):
            for tensors, new in ((self.keys, key_states), (self.values, value_states)):
                tensors.append(new.new_zeros(self.capacity_rows, new.shape[1], self.capacity_slots, new.shape[3]))
        seen = []
        for tensors, new in ((self.keys, key_states), (self.values, value_states)):
            tensors[layer_idx][self.write_index] = new.transpose(1, 2)
            seen.append(tensors[layer_idx][self.rows, :, : self.slots])
        return seen[0], seen[1]

    def copy_rows(self, source: list[int], target: list[int], slots: int) -> None:
        """Copy the first `slots` slots of rows `source` over rows `target`; the two may overlap (a swap)."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :slots] = tensor[source, :, :slots]


class HFEngine:
    """Sample from `model` in place: it always uses the current weights, and keeps nothing between sessions.

    prefill_tokens bounds the padded tokens of one forward, and so its memory, whatever the number of rows.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, prefill_tokens: int = 16384
    ) -> None:
        config = model.config.get_text_config()
        if changed_logits(config):
            raise ValueError(
                f"model type {config.model_type!r} changes its logits after the output layer "
                f"({', '.join(changed_logits(config))}), which neither the engine nor the trainer's logprobs reproduce"
            )
        layer_types = getattr(config, "layer_types", None)
        # Mistral, Phi-3 and StarCoder2 have no layer_types: a window in their config holds for every layer.
        windowed = set(layer_types) != {"full_attention"} if layer_types else getattr(config, "sliding_window", None)
        if windowed:
            raise ValueError(
                f"model type {config.model_type!r} has layers without full attention (layer_types, sliding_window), "
                "which the engine's cache does not hold: use a model with full attention (for Qwen2 set "
                "use_sliding_window: false; where no trajectory exceeds the window, sliding_window: null)"
            )
        if config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"attention {config._attn_implementation!r} takes no per-row mask, which the engine needs: set "
                "model.attn_implementation to sdpa or eager"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_tokens = prefill_tokens
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        size = config.vocab_size
        self.is_eos = np.zeros(size, dtype=bool)
        self.is_eos[[i for i in eos_ids if i < size]] = True
        self.token_strings = [t or "" for t in tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))]

    def session(
        self, keys: Sequence[int], sampling: Sampling, stop_strings: Sequence[str], think_aware: bool = False
    ) -> Session:
        """Open a session of `len(keys)` empty rows; row r draws its random numbers from keys[r]."""
        return Session(self, keys, sampling, stop_strings, think_aware)


class Session:
    """Rows of tokens that grow turn by turn. Row numbers are the caller's; physical places move inside."""

    def __init__(
        self, engine: HFEngine, keys: Sequence[int], sampling: Sampling, stop_strings: Sequence[str], think_aware: bool
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.stop_strings = tuple(stop_strings)
        self.think_aware = think_aware
        last_characters = {stop[-1] for stop in stop_strings}
        # Only a token whose string holds the last character of a stop string can complete one; all others cost nothing.
        self.may_stop = np.zeros(len(engine.is_eos), dtype=bool)
        for i, string in enumerate(engine.token_strings):
            self.may_stop[i] = any(character in string for character in last_characters)
        self.keys = np.array(keys, dtype=np.uint64)
        self.cache = KVCache()
        self.cached = np.zeros(len(keys), dtype=np.int64)  # tokens of each row in the cache
        self.prompt_len = np.zeros(len(keys), dtype=np.int64)
        self.unforwarded: list[list[int]] = [[] for _ in keys]  # the last sampled token, until the next turn's prefill
        self.place = np.arange(len(keys))  # row -> physical row of the cache
        self.row_at = np.arange(len(keys))  # and back

    @torch.no_grad()
    def generate(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[Generation]:
        """Append `new_ids[i]` to row `rows[i]`, then sample up to `limits[i]` tokens after them.

        The first call for a row gives its prompt, and prompts that are equal are forwarded once. new_ids may be empty
        later on. Every limit is at least 1. Raises FloatingPointError when the model returns NaN.
        """
        if not len(rows):
            return []
        model = self.engine.model
        was_training = model.training
        model.eval()  # gradient checkpointing, active in training mode, would drop the cache
        try:
            return self._generate(rows, new_ids, limits)
        finally:
            model.train(was_training)

    def _generate(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[Generation]:
        rows = np.asarray(rows, dtype=np.int64)
        for i, row in enumerate(rows):
            if self.cached[row] == 0:
                self.prompt_len[row] = len(new_ids[i])
            if not len(new_ids[i]) and not self.unforwarded[row]:
                raise ValueError(f"row {row} has no token to go on from: its prompt is empty")
        pending = [self.unforwarded[row] + list(new_ids[i]) for i, row in enumerate(rows)]
        limits = np.asarray(limits, dtype=np.int64)
        longest = max(self.cached[row] + len(ids) for row, ids in zip(rows, pending))
        self.cache.reserve(len(self.keys), int(longest + limits.max()))
        hidden = self._prefill(rows, pending)
        return self._decode(rows, hidden, limits)

    def _forward(self, ids: np.ndarray, cache_rows: slice | np.ndarray, positions: np.ndarray, slots: int) -> torch.Tensor:
        """Run the base model on ids [n, W] at positions [n, W]; return its hidden states [n, W, H]."""
        model = self.engine.model
        device = model.device
        position_ids = torch.from_numpy(positions).to(device)
        if isinstance(cache_rows, np.ndarray):
            cache_rows = torch.from_numpy(cache_rows).to(device)
        self.cache.select(cache_rows, position_ids, slots)
        visible = torch.arange(slots, device=device)[None, None, None, :] <= position_ids[:, None, :, None]
        if model.config.get_text_config()._attn_implementation == "eager":  # adds its mask instead of selecting by it
            visible = torch.zeros(visible.shape, dtype=model.dtype, device=device).masked_fill(
                ~visible, torch.finfo(model.dtype).min
            )
        return model.base_model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=visible,
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _prefill(self, rows: np.ndarray, pending: list[list[int]]) -> torch.Tensor:
        """Forward the pending tokens of each row; return the hidden state [n, H] after the last one."""
        # A prompt shared by a group is forwarded for its first row and copied to the others.
        leader: dict[tuple[int, ...], int] = {}
        followers: dict[int, list[int]] = {}
        work = []
        for i, row in enumerate(rows):
            first = leader.setdefault(tuple(pending[i]), i) if self.cached[row] == 0 else i
            if first == i:
                work.append(i)
            else:
                followers.setdefault(first, []).append(i)
        hidden: list[torch.Tensor | None] = [None] * len(rows)
        work.sort(key=lambda i: len(pending[i]))
        start = 0
        while start < len(work):
            stop = start + 1
            while stop < len(work) and (stop + 1 - start) * len(pending[work[stop]]) <= self.engine.prefill_tokens:
                stop += 1
            self._prefill_chunk(work[start:stop], rows, pending, hidden)
            start = stop
        for first, others in followers.items():
            length = int(self.cached[rows[first]])
            targets = [int(self.place[rows[i]]) for i in others]
            self.cache.copy_rows([int(self.place[rows[first]])] * len(targets), targets, length)
            for i in others:
                hidden[i] = hidden[first]
                self.cached[rows[i]] = length
        return torch.stack(hidden)

    def _prefill_chunk(
        self, chunk: list[int], rows: np.ndarray, pending: list[list[int]], hidden: list[torch.Tensor | None]
    ) -> None:
        """Forward the pending tokens of the entries `chunk`, in blocks of columns within the token budget."""
        lengths = np.array([len(pending[i]) for i in chunk])
        ids = np.zeros((len(chunk), lengths.max()), dtype=np.int64)
        for r, i in enumerate(chunk):
            ids[r, : lengths[r]] = pending[i]
        begin = self.cached[rows[chunk]]
        width = max(1, self.engine.prefill_tokens // len(chunk))
        for left in range(0, ids.shape[1], width):
            block = ids[:, left : left + width]
            # Rows that end before this block are left out of it.
            live = np.flatnonzero(lengths > left)
            positions = begin[live, None] + left + np.arange(block.shape[1])
            slots = int((begin + np.minimum(lengths, left + block.shape[1]))[live].max())
            positions = np.minimum(positions, self.cache.capacity_slots - 1)
            out = self._forward(block[live], self.place[rows[[chunk[r] for r in live]]], positions, slots)
            for n, r in enumerate(live):
                if lengths[r] <= left + block.shape[1]:
                    hidden[chunk[r]] = out[n, lengths[r] - left - 1]
        self.cached[rows[chunk]] += lengths

    def _decode(self, rows: np.ndarray, hidden: torch.Tensor, limits: np.ndarray) -> list[Generation]:
        """Sample until each row stops. `order` holds the entries of the decode batch by physical row."""
        count = len(rows)
        ids_out = np.zeros((count, int(limits.max())), dtype=np.int64)
        logprobs_out = np.zeros(ids_out.shape, dtype=np.float64)
        lengths = np.zeros(count, dtype=np.int64)
        finish: list[str] = ["length"] * count
        head = self.engine.model.get_output_embeddings()
        alive = np.ones(count, dtype=bool)
        order = self._compact(rows, np.arange(count))
        hidden = hidden[torch.from_numpy(order).to(hidden.device)]
        step = 0
        while True:
            live = alive[order]
            positions = self.cached[rows[order]]
            uniform = keyed_uniform(self.keys[rows[order]], positions - self.prompt_len[rows[order]])
            ids, logprobs = sample(head(hidden), uniform, self.sampling)
            ids, logprobs = ids.cpu().numpy(), logprobs.cpu().numpy()
            if np.isnan(logprobs[live]).any():
                raise FloatingPointError("the model returned NaN logits during generation: its weights have diverged")
            active = order[live]
            ids_out[active, step] = ids[live]
            logprobs_out[active, step] = logprobs[live]
            lengths[active] = step + 1
            done = self.engine.is_eos[ids] | (step + 1 >= limits[order])
            for n in np.flatnonzero(live & (done | self.may_stop[ids])):
                i = order[n]
                if self.engine.is_eos[ids[n]]:
                    finish[i] = "eos"
                elif self.may_stop[ids[n]] and self._stops(ids_out[i, : step + 1]):
                    finish[i] = "stop"
                elif not done[n]:
                    continue
                alive[i] = False
                self.unforwarded[rows[i]] = [int(ids[n])]
            live = alive[order]
            if not live.any():
                break
            if live.sum() < COMPACT_BELOW * len(order):
                kept = {i: n for n, i in enumerate(order)}
                order = self._compact(rows, order[live])
                ids = ids[[kept[i] for i in order]]
                live = np.ones(len(order), dtype=bool)
            positions = self.cached[rows[order]]
            # Dead rows still in the batch write beyond their length, where nothing looks.
            hidden = self._forward(
                ids[:, None], slice(0, len(order)), positions[:, None], int(positions[live].max()) + 1
            )[:, 0]
            self.cached[rows[order[live]]] += 1
            step += 1
        return [
            Generation(ids_out[i, : lengths[i]].tolist(), logprobs_out[i, : lengths[i]].tolist(), finish[i])
            for i in range(count)
        ]

    def _compact(self, rows: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Bring the rows of `entries` to physical rows 0..n-1 by swaps; return the entries in physical order."""
        n = len(entries)
        wanted = set(rows[entries].tolist())
        out = [place for place in range(n) if int(self.row_at[place]) not in wanted]
        inn = [int(self.place[row]) for row in sorted(wanted) if self.place[row] >= n]
        if out:
            a, b = out + inn, inn + out
            touched = int(self.cached[self.row_at[a]].max())
            self.cache.copy_rows(a, b, touched)
            self.row_at[b] = self.row_at[a]
            self.place[self.row_at[b]] = b
        entry_of = {int(rows[i]): int(i) for i in entries}
        return np.array([entry_of[int(row)] for row in self.row_at[:n]], dtype=np.int64)

    def _stops(self, ids: np.ndarray) -> bool:
        """Tell whether the last token of a turn completed a stop string; looks at a bounded number of tokens."""
        window = ids if self.think_aware else ids[-STOP_WINDOW:]
        text = self.engine.tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return find_stop(text, self.stop_strings, self.think_aware) is not None
