"""The multi-turn loop: questions in, trajectories out. Owns the loss mask.

Every live row of a turn steps together: one batched generation, one retrieval call for all queries of the turn.
Token in, token out: sampled ids are kept as they are, texts that are not sampled are tokenised once and appended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from retriever.types import Passage, Retriever
from sapo.engine.hf import Generation, HFEngine
from sapo.engine.sampling import Sampling, trajectory_key
from sapo.protocol import Protocol, neutralise, parse_turn, special_token_pattern
from sapo.types import Question, Trajectory, Turn


@dataclass(frozen=True)
class Budget:
    """Token budgets of one trajectory; an observation counts with its wrapper.

    There are at most max_searches + 1 generations: each one that is not an answer uses one, and in the last only an
    answer counts. A trajectory that runs out of a budget ends, marked truncated; nothing is cut from its head.
    """

    max_prompt_tokens: int = 2048
    max_turn_tokens: int = 512
    max_observation_tokens: int = 512
    max_searches: int = 5
    max_trajectory_tokens: int = 7680


@dataclass
class RolloutTimes:
    """Seconds and counts of one rollout, for metrics."""

    total_s: float = 0.0
    generate_s: float = 0.0
    retrieval_s: float = 0.0
    queries: int = 0
    unique_queries: int = 0
    sampled_tokens: int = 0


@dataclass
class _Row:
    """A trajectory while it grows."""

    question: Question
    sample: int
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    truncated: bool = False
    done: bool = False
    pending: list[int] = field(default_factory=list)  # ids the engine has not seen yet

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def append_sampled(self, generation: Generation) -> None:
        self.response_ids += generation.ids
        self.loss_mask += [1] * len(generation.ids)
        self.sampling_logprobs += generation.logprobs

    def append_observation(self, ids: list[int]) -> None:
        self.response_ids += ids
        self.loss_mask += [0] * len(ids)
        self.sampling_logprobs += [0.0] * len(ids)
        self.pending = ids

    def freeze(self) -> Trajectory:
        return Trajectory(
            question=self.question,
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            loss_mask=self.loss_mask,
            sampling_logprobs=self.sampling_logprobs,
            turns=tuple(self.turns),
            answer=self.answer,
            truncated=self.truncated,
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` alone, without the tokenizer's own special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, protocol: Protocol, question: str) -> list[int]:
    """Return the prompt ids of a question, through the chat template whenever the tokenizer has one."""
    text = protocol.prompt(question)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return encode(tokenizer, text)


def special_strings(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of all strings that this tokenizer reads as one added or special token."""
    return special_token_pattern([*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens])


def encode_observation(
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    passages: Sequence[Passage],
    max_tokens: int,
    special: re.Pattern[str] | None,
) -> tuple[str, list[int]]:
    """Return the text and ids of a search's observation in at most `max_tokens`.

    Too long documents lose their end, the wrapper never does. Text that could speak for the model is neutralised.
    Raises ValueError when not even the empty wrapper fits.
    """
    safe = [replace(p, title=neutralise(p.title, special), text=neutralise(p.text, special)) for p in passages]
    documents = protocol.documents(safe)
    text = protocol.wrap(documents)
    ids = encode(tokenizer, text)
    if len(ids) <= max_tokens:
        return text, ids
    empty = protocol.wrap("")
    empty_ids = encode(tokenizer, empty)
    if len(empty_ids) > max_tokens:
        raise ValueError(
            f"rollout.max_observation_tokens = {max_tokens} cannot hold an empty observation, which takes "
            f"{len(empty_ids)} tokens with this tokenizer: raise it"
        )
    encoding = tokenizer(documents, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoding["offset_mapping"]]
    room = min(len(ends), max_tokens - len(empty_ids))
    # Tokens can merge across the seams in other ways than alone, so the count is checked on the whole text.
    while room > 0:
        text = protocol.wrap(documents[: ends[room - 1]].rstrip())
        ids = encode(tokenizer, text)
        if len(ids) <= max_tokens:
            return text, ids
        room -= max(1, len(ids) - max_tokens)
    return empty, empty_ids


def rollout(
    engine: HFEngine,
    retriever: Retriever,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    questions: Sequence[Question],
    *,
    group_size: int,
    budget: Budget,
    sampling: Sampling,
    top_k: int,
    seed: int,
    step: int,
    think_aware: bool = False,
) -> tuple[list[Trajectory], RolloutTimes]:
    """Sample `group_size` trajectories for each question, ordered by question, then sample.

    Trajectories are scored by the caller. Raises what the retriever raises; FloatingPointError on NaN logits.
    """
    began = time.perf_counter()
    times = RolloutTimes()
    special = special_strings(tokenizer)
    rows = []
    for question in questions:
        prompt_ids = encode_prompt(tokenizer, protocol, question.question)
        rows += [_Row(question, sample, prompt_ids, pending=prompt_ids) for sample in range(group_size)]
    for row in rows:
        too_long = len(row.prompt_ids) > budget.max_prompt_tokens or len(row) >= budget.max_trajectory_tokens
        row.done = row.truncated = too_long
    keys = [trajectory_key(seed, step, row.question.id, row.sample) for row in rows]
    session = engine.session(keys, sampling, protocol.stop_strings, think_aware)
    feedback_ids = encode(tokenizer, protocol.feedback)

    for turn_number in range(budget.max_searches + 1):
        live = [r for r, row in enumerate(rows) if not row.done]
        if not live:
            break
        limits = [min(budget.max_turn_tokens, budget.max_trajectory_tokens - len(rows[r])) for r in live]
        started = time.perf_counter()
        generations = session.generate(live, [rows[r].pending for r in live], limits)
        times.generate_s += time.perf_counter() - started
        texts = tokenizer.batch_decode(
            [generation.ids for generation in generations],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        is_last = turn_number == budget.max_searches
        searching: list[int] = []
        for r, generation, text in zip(live, generations, texts):
            row = rows[r]
            parsed = parse_turn(text, protocol, think_aware)
            start = len(row.response_ids)
            row.append_sampled(generation)
            turn = Turn(
                start=start,
                end=len(row.response_ids),
                text=text,
                action=parsed.action,
                content=parsed.content,
                finish=generation.finish,
                forged=parsed.forged,
            )
            row.turns.append(turn)
            times.sampled_tokens += len(generation.ids)
            if parsed.action == "answer":
                row.answer, row.done = parsed.content, True
            elif is_last:
                row.done = row.truncated = True
            elif parsed.action == "search":
                searching.append(r)
            else:
                _observe(row, protocol.feedback, feedback_ids, (), budget)

        queries = [rows[r].turns[-1].content for r in searching]
        started = time.perf_counter()
        unique = list(dict.fromkeys(queries))
        found = dict(zip(unique, retriever.search(unique, top_k), strict=True)) if unique else {}
        times.retrieval_s += time.perf_counter() - started
        times.queries += len(queries)
        times.unique_queries += len(unique)
        observations = {}
        for query in unique:
            encoded = encode_observation(tokenizer, protocol, found[query], budget.max_observation_tokens, special)
            observations[query] = encoded
        for r, query in zip(searching, queries):
            text, ids = observations[query]
            _observe(rows[r], text, ids, tuple(found[query]), budget)

    times.total_s = time.perf_counter() - began
    return [row.freeze() for row in rows], times


def _observe(row: _Row, text: str, ids: list[int], passages: tuple[Passage, ...], budget: Budget) -> None:
    """Append an observation to a row, or end the row when no sampled token would fit after it."""
    if len(row) + len(ids) >= budget.max_trajectory_tokens:
        row.done = row.truncated = True
        return
    row.append_observation(ids)
    row.turns[-1] = replace(row.turns[-1], passages=passages, observation=text, observation_tokens=len(ids))
