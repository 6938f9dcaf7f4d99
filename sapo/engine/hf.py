"""The exact reference engine: token ids in, sampled ids and logprobs out, on a Hugging Face causal LM.

A session keeps the keys and values of its rows over turns (see `sapo/engine/kv_cache.py`), so each token is forwarded
once, packed without padding: prompts and observations in chunks of a token budget, then one token a step for the rows
that still write.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sapo.attention import require_interface
from sapo.engine.kv_cache import ATTENTION, SPAN_TOKENS, KVCache, additive_mask, runs_of
from sapo.engine.sampling import Sampling, keyed_uniform, sample
from sapo.engine.stopping import StopTags, Vocabulary
from sapo.policy import changed_logits

SAMPLE_LOGITS = 1 << 24  # logits sampled from at once: some 20 bytes each
STATIC_SLOTS = 128  # a static step reads whole multiples of so many slots
STATIC_LIVE_SHARE = 0.75  # and its batch is made again when fewer of its rows live: capturing costs a few steps


@dataclass(frozen=True)
class Generation:
    """What one turn sampled for one row: ids and logprobs [n] in nats, and why it ended.

    "stop": the last token completed a stop string (later characters of that token are kept); "eos": the last token
    is an end-of-sequence id; "length": the limit was reached.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "eos", "length"]


class HFEngine:
    """Sample from `model` in place: it always uses the current weights, and keeps nothing between sessions.

    prefill_tokens bounds the tokens of one forward, and so its memory, whatever the number of rows. Raises ValueError
    for a model whose logits or attention the engine would not compute exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prefill_tokens: int = 16384,
        static_decode: bool | None = None,
    ) -> None:
        """static_decode: decode with fixed shapes (see `StaticStep`); None means on a GPU."""
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
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"model type {config.model_type!r} has rope_type {rope_type!r}, whose rotations change with the longest "
                "position of a forward, so that cached keys go stale: use a model with another rope_type"
            )
        require_interface(
            model, "through which the engine reads its cache: use a model that does (Qwen2, Qwen3, Llama, Mistral, ...)"
        )
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_tokens = prefill_tokens
        self.static_decode = model.device.type == "cuda" if static_decode is None else static_decode
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.query_groups = heads // kv_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.slot_bytes = 2 * kv_heads * head_dim * model.dtype.itemsize
        self.vocabulary = Vocabulary(model, tokenizer)
        self.is_eos = self.vocabulary.is_eos

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Put the model in the state that sessions need: evaluation mode, no gradients, attention over their cache."""
        config = self.model.config.get_text_config()
        attention, training = config._attn_implementation, self.model.training
        self.model.eval()
        config._attn_implementation = ATTENTION
        try:
            with torch.no_grad():
                yield
        finally:
            config._attn_implementation = attention
            self.model.train(training)

    def session(
        self, keys: Sequence[int], sampling: Sampling, stop_strings: Sequence[str], think_aware: bool = False
    ) -> Session:
        """Open a session of `len(keys)` empty rows; row r draws its random numbers from keys[r]."""
        return Session(self, keys, sampling, stop_strings, think_aware)


class Session:
    """Rows of tokens that grow turn by turn. Row numbers are the caller's; where their keys lie is the cache's affair.

    `generate` runs whole turns. `start` and `step` are its two halves, for a caller that lets rows join while others
    write; they must run inside `engine.inference()`.
    """

    def __init__(
        self, engine: HFEngine, keys: Sequence[int], sampling: Sampling, stop_strings: Sequence[str], think_aware: bool
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        count = len(keys)
        self.stops = StopTags(engine.vocabulary, stop_strings, think_aware, count)
        self.keys = np.array(keys, dtype=np.uint64)
        self.cache = KVCache(count, engine.slot_bytes)
        self.prompt_len = np.zeros(count, dtype=np.int64)
        self.running = np.zeros(count, dtype=bool)
        self.batch = np.zeros(0, dtype=np.int64)  # the rows of the next decoding step, by block and place
        self.layout = -1  # of the cache when the batch was made
        self.static: StaticStep | None = None
        self.last_id = np.full(count, -1)  # sampled, and not yet in the cache; -1 for none
        self.limits = np.zeros(count, dtype=np.int64)
        self.sampled = np.zeros(count, dtype=np.int64)  # tokens of this turn
        self.ids = np.zeros((count, 0), dtype=np.int64)
        self.logprobs = np.zeros((count, 0))

    def generate(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[Generation]:
        """Append `new_ids[i]` to row `rows[i]`, then sample up to `limits[i]` tokens after them.

        The first call for a row gives its prompt, and prompts that are equal are forwarded once. new_ids may be empty
        later on. Every limit is at least 1. Raises FloatingPointError when the model returns NaN.
        """
        with self.engine.inference():
            finished = dict(self.start(rows, new_ids, limits))
            while len(finished) < len(rows):
                finished |= self.step()
        return [finished[row] for row in rows]

    def start(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> dict[int, Generation]:
        """Begin a turn of `rows` as in `generate` and sample its first token; return the turns that end with it."""
        if not len(rows):
            return {}
        rows = np.asarray(rows, dtype=np.int64)
        if len(np.unique(rows)) < len(rows) or self.running[rows].any():
            raise ValueError(f"rows {rows.tolist()}: a row is given twice, or its last turn has not ended")
        first = self.cache.length[rows] == 0
        self.prompt_len[rows[first]] = [len(new_ids[i]) for i in np.flatnonzero(first)]
        pending = {}
        for row, ids in zip(rows.tolist(), new_ids):
            pending[row] = [self.last_id[row], *ids] if self.last_id[row] >= 0 else list(ids)
            if not pending[row]:
                raise ValueError(f"row {row} has no token to go on from: its prompt is empty")
        self.limits[rows] = limits
        self.sampled[rows] = 0
        self.stops.begin(rows)
        if self.limits[rows].max() > self.ids.shape[1]:
            more = ((0, 0), (0, int(self.limits[rows].max()) - self.ids.shape[1]))
            self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        hidden = self._prefill(rows, pending)
        self.running[rows] = True
        return self._record(rows, hidden)

    def step(self) -> dict[int, Generation]:
        """Sample one more token for every running row; return the turns that it ended."""
        rows = self._decode_batch()
        if not len(rows):
            return {}
        hidden = self._decode(rows)
        alive = self.running[rows]
        if not alive.all():
            rows, hidden = rows[alive], hidden[torch.from_numpy(alive).to(hidden.device)]
        self.cache.length[rows] += 1
        return self._record(rows, hidden)

    def free(self, rows: Sequence[int]) -> None:
        """Forget rows that will not go on, so that their memory can be used."""
        if not len(rows):
            return
        self.running[rows] = False
        self.last_id[rows] = -1
        self.cache.free(rows)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the base model on packed ids [N] at positions [N], over `cache.spans`; return hidden states [N, H]."""
        model = self.engine.model
        self.cache.calls = 0
        hidden = model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, kv_cache=self.cache
        ).last_hidden_state[0]
        layers = model.config.get_text_config().num_hidden_layers
        if self.cache.calls != layers:  # a layer that attends twice, or past the interface, would be silently wrong
            raise ValueError(
                f"model type {model.config.model_type!r} called its attention {self.cache.calls} times in a forward of "
                f"{layers} layers: the engine's cache holds one key and value of each layer"
            )
        return hidden

    def _prefill(self, rows: np.ndarray, pending: dict[int, list[int]]) -> Tensor:
        """Forward the pending tokens of each row; return the hidden state [n, H] after the last one."""
        cache, device = self.cache, self.engine.model.device
        # A prompt shared by a group is forwarded for its first row and copied to the others.
        leader: dict[tuple[int, ...], int] = {}
        followers: dict[int, list[int]] = {}
        work = []
        for row in rows.tolist():
            first = leader.setdefault(tuple(pending[row]), row) if cache.length[row] == 0 else row
            work += [row] if first == row else []
            followers.setdefault(first, []).append(row)
        cache.hold(rows, cache.length[rows] + [len(pending[row]) for row in rows.tolist()])
        work.sort(key=lambda row: (cache.block_of[row], cache.place[row]))
        hidden: dict[int, Tensor] = {}
        for pieces in self._chunks(work, pending):
            tokens = [pending[row][p - cache.length[row] :][:n] for row, p, n in pieces]
            ids = torch.tensor([token for part in tokens for token in part], device=device)
            positions = np.concatenate([np.arange(p, p + n) for _, p, n in pieces])
            cache.spans = cache.prefill_spans(pieces, self.engine.query_groups, self.engine.model.dtype, device)
            out = self._forward(ids, torch.from_numpy(positions).to(device))
            for (row, position, count), end in zip(pieces, np.cumsum([n for _, _, n in pieces]).tolist()):
                if position + count == cache.length[row] + len(pending[row]):
                    hidden[row] = out[end - 1]
        for row in work:
            cache.length[row] += len(pending[row])
            others = [other for other in followers[row] if other != row]
            if others:
                cache.fan_out(row, others)
            hidden |= dict.fromkeys(others, hidden[row])
        return torch.stack([hidden[row] for row in rows.tolist()])

    def _chunks(self, work: list[int], pending: dict[int, list[int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Cut the pending tokens of rows into pieces (row, first position, tokens); yield those of one forward."""
        chunk: list[tuple[int, int, int]] = []
        budget = self.engine.prefill_tokens
        for row in work:
            position = int(self.cache.length[row])
            stop = position + len(pending[row])
            while position < stop:
                count = min(stop - position, budget, SPAN_TOKENS)
                chunk.append((row, position, count))
                position += count
                budget -= count
                if not budget:
                    yield chunk
                    chunk, budget = [], self.engine.prefill_tokens
        if chunk:
            yield chunk

    def _decode_batch(self) -> np.ndarray:
        """Return the rows of the next step by block and place: those that run, and ended ones not yet taken out."""
        read = self.running.copy()
        if self.engine.static_decode:
            read[self.batch] = True  # its dead rows stay until the batch is made again
        self.cache.compact(read)
        live = int(self.running.sum())
        in_batch = int(self.running[self.batch].sum())
        share = STATIC_LIVE_SHARE if self.engine.static_decode else 1.0
        if self.layout != self.cache.layout or in_batch < live or live < share * len(self.batch):
            rows = np.flatnonzero(self.running)
            self.batch = rows[np.lexsort((self.cache.place[rows], self.cache.block_of[rows]))]
        self.cache.widen(self.batch)
        if self.layout != self.cache.layout:
            self.layout, self.static = self.cache.layout, None
        return self.batch

    def _decode(self, rows: np.ndarray) -> Tensor:
        """Forward the last sampled token of `rows`; return their hidden states [n, H]."""
        device, dtype = self.engine.model.device, self.engine.model.dtype
        ids = torch.from_numpy(self.last_id[rows]).to(device)
        positions = torch.from_numpy(self.cache.length[rows]).to(device)
        if not self.engine.static_decode:
            self.cache.spans = self.cache.decode_spans(rows, positions, dtype)
            return self._forward(ids, positions)
        if self.static is None or not self.static.fits(rows):
            self.static = StaticStep(self, rows, ids, positions)
        return self.static.run(ids, positions)

    def _draw(self, rows: np.ndarray, hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token after each hidden state [n, H] of `rows`; return ids [n] int64 and logprobs [n] float64."""
        head = self.engine.model.get_output_embeddings()
        uniform = keyed_uniform(self.keys[rows], self.cache.length[rows] - self.prompt_len[rows])
        part = max(1, SAMPLE_LOGITS // len(self.engine.is_eos))
        drawn = [
            sample(head(hidden[i : i + part]), uniform[i : i + part], self.sampling) for i in range(0, len(rows), part)
        ]
        ids, logprobs = (torch.cat(parts) for parts in zip(*drawn))
        return ids.cpu().numpy(), logprobs.cpu().double().numpy()

    def _record(self, rows: np.ndarray, hidden: Tensor) -> dict[int, Generation]:
        """Sample a token for each of `rows`, append it, and return the turns that end with it."""
        drawn, logprobs = self._draw(rows, hidden)
        if np.isnan(logprobs).any():
            raise FloatingPointError(
                "the model returned NaN or infinite logits during generation: its weights have diverged"
            )
        self.ids[rows, self.sampled[rows]] = drawn
        self.logprobs[rows, self.sampled[rows]] = logprobs
        self.sampled[rows] += 1
        self.last_id[rows] = drawn
        eos, full = self.engine.is_eos[drawn], self.sampled[rows] >= self.limits[rows]
        finished: dict[int, Generation] = {}
        for n in np.flatnonzero(eos | full | self.stops.may_complete[drawn]):
            row = int(rows[n])
            if eos[n]:
                finish = "eos"
            elif self.stops.may_complete[drawn[n]] and self.stops.complete(row, self.ids[row, : self.sampled[row]]):
                finish = "stop"
            elif full[n]:
                finish = "length"
            else:
                continue
            count = self.sampled[row]
            finished[row] = Generation(self.ids[row, :count].tolist(), self.logprobs[row, :count].tolist(), finish)
            self.running[row] = False
        return finished


class StaticStep:
    """A decoding step of one batch with fixed shapes: a CUDA graph on a GPU, the same computation eagerly elsewhere.

    It stays valid while the cache's layout and the batch stay the same and lengths stay within the slots read, which
    are rounded up so that many steps share one capture.
    """

    def __init__(self, session: Session, rows: np.ndarray, ids: Tensor, positions: Tensor) -> None:
        self.session = weakref.proxy(session)  # which holds this step: its graph's memory goes with it
        self.rows = rows
        self.ids, self.positions = ids.clone(), positions.clone()
        dtype = session.engine.model.dtype
        self.spans = session.cache.decode_spans(rows, self.positions, dtype, round_to=STATIC_SLOTS)
        self.graph: torch.cuda.CUDAGraph | None = None
        if ids.device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set up their workspaces outside the capture
                self._compute()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.hidden = self._compute()

    def fits(self, rows: np.ndarray) -> bool:
        """Tell whether a step of `rows` can run with these shapes."""
        if not np.array_equal(rows, self.rows):
            return False
        cache = self.session.cache
        needed = runs_of(cache.block_of[rows])
        return all(cache.length[rows[a:b]].max() < span.slots for span, (_, (a, b)) in zip(self.spans, needed))

    def run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states [n, H] after `ids` at `positions`."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        if self.graph is None:
            return self._compute()
        self.graph.replay()
        return self.hidden

    def _compute(self) -> Tensor:
        # The masks are computed again from the positions; all else in the spans is a view of them or does not change.
        self.session.cache.spans = [
            replace(span, mask=additive_mask(self.positions[span.tokens][:, None], span.slots, span.mask.dtype))
            for span in self.spans
        ]
        return self.session._forward(self.ids, self.positions)
