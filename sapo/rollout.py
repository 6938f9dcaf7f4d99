"""The multi-turn loop: questions in, trajectories out. Owns the loss mask.

In lockstep every live row of a turn steps together: one batched generation, one retrieval call for all its queries.
Token in, token out: sampled ids are kept as they are, texts that are not sampled are tokenised once and appended.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from retriever.types import Passage, Retriever, RetrieverError
from sapo.engine.hf import Generation
from sapo.engine.sampling import Sampling, trajectory_key
from sapo.engine.vllm import Engine, EngineSession
from sapo.protocol import Protocol, neutralise, parse_turn, special_token_pattern
from sapo.types import Question, Trajectory, Turn

Schedule = Literal["lockstep", "async"]

KNOWN_QUERIES = 4096  # observations kept to answer repeated queries of a step
JOIN_SHARE = 0.125  # async: rows join the writing ones once there are so many for each of them


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
    """Seconds, counts and the cache's peak memory in bytes of one rollout, for metrics.

    retrieval_s: the time that generation waited for it. unique_queries: those sent to the retriever.
    """

    total_s: float = 0.0
    generate_s: float = 0.0
    retrieval_s: float = 0.0
    queries: int = 0
    unique_queries: int = 0
    sampled_tokens: int = 0
    cache_bytes: int = 0


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
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(encoding["input_ids"]) <= max_tokens:
        return text, encoding["input_ids"]
    empty = protocol.wrap("")
    empty_ids = encode(tokenizer, empty)
    if len(empty_ids) > max_tokens:
        raise ValueError(
            f"rollout.max_observation_tokens = {max_tokens} cannot hold an empty observation, which takes "
            f"{len(empty_ids)} tokens with this tokenizer: raise it"
        )
    begin = text.index(documents)
    ends = [end - begin for _, end in encoding["offset_mapping"]]
    room = max_tokens - sum(end > len(documents) for end in ends)
    # Tokens can merge at the cut in other ways than before, so the count is checked on the whole text.
    while room > 0 and ends[room - 1] > 0:
        text = protocol.wrap(documents[: ends[room - 1]].rstrip())
        ids = encode(tokenizer, text)
        if len(ids) <= max_tokens:
            return text, ids
        room -= max(1, len(ids) - max_tokens)
    return empty, empty_ids


def rollout(
    engine: Engine,
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
    schedule: Schedule = "lockstep",
    max_rows: int | None = None,
) -> tuple[list[Trajectory], RolloutTimes]:
    """Sample `group_size` trajectories for each question, ordered by question, then sample.

    schedule: "lockstep", all rows go from turn to turn together; or "async", rows whose documents have come go on while
    others write. Both sample the same trajectories up to float rounding; only lockstep repeats them bit for bit.
    max_rows: trajectories in work at once, which bounds the cache, None is all of them; in lockstep whole groups, at
    least one.
    Trajectories are scored by the caller. Raises what the retriever raises; FloatingPointError on NaN logits;
    ValueError when the tokenizer cannot write a stop string.
    """
    began = time.perf_counter()
    times = RolloutTimes()
    check_stop_strings(tokenizer, protocol.stop_strings)
    rows = []
    for question in questions:
        prompt_ids = encode_prompt(tokenizer, protocol, question.question)
        rows += [_Row(question, sample, prompt_ids, pending=prompt_ids) for sample in range(group_size)]
    for row in rows:
        too_long = len(row.prompt_ids) > budget.max_prompt_tokens or len(row) >= budget.max_trajectory_tokens
        row.done = row.truncated = too_long
    work = _Work(
        session=engine.session(
            [trajectory_key(seed, step, row.question.id, row.sample) for row in rows],
            sampling,
            protocol.stop_strings,
            think_aware,
        ),
        rows=rows,
        retriever=retriever,
        tokenizer=tokenizer,
        protocol=protocol,
        budget=budget,
        top_k=top_k,
        think_aware=think_aware,
        feedback_ids=encode(tokenizer, protocol.feedback),
        special=special_strings(tokenizer),
        times=times,
    )
    max_rows = max(group_size, max_rows or len(rows)) // group_size * group_size
    if schedule == "lockstep":
        for start in range(0, len(rows), max_rows):
            _lockstep(work, range(start, min(start + max_rows, len(rows))))
    else:
        with engine.inference():
            _async(work, max_rows)
    times.cache_bytes = work.session.cache.peak_bytes
    times.total_s = time.perf_counter() - began
    return [row.freeze() for row in rows], times


@dataclass
class _Work:
    """What the two schedules share. Rows are named by their number, in the session and in `rows` alike."""

    session: EngineSession
    rows: list[_Row]
    retriever: Retriever
    tokenizer: PreTrainedTokenizerBase
    protocol: Protocol
    budget: Budget
    top_k: int
    think_aware: bool
    feedback_ids: list[int]
    special: re.Pattern[str] | None
    times: RolloutTimes
    # Observations of the step by query, the least recently used first: (passages, text, ids).
    known: OrderedDict[str, tuple[tuple[Passage, ...], str, list[int]]] = field(default_factory=OrderedDict)

    def begin(self, numbers: Sequence[int]) -> tuple[Sequence[int], list[list[int]], list[int]]:
        """Return what the session needs to begin a turn of these rows: their numbers, new ids and limits."""
        rows = [self.rows[number] for number in numbers]
        room = [self.budget.max_trajectory_tokens - len(row) for row in rows]
        return numbers, [row.pending for row in rows], [min(self.budget.max_turn_tokens, tokens) for tokens in room]

    def take(self, generations: dict[int, Generation]) -> list[int]:
        """Append a turn to each row and act on it; return the rows that now wait for documents."""
        texts = self.tokenizer.batch_decode(
            [generation.ids for generation in generations.values()],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        searching = []
        for (number, generation), text in zip(generations.items(), texts):
            row = self.rows[number]
            parsed = parse_turn(text, self.protocol, self.think_aware)
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
            self.times.sampled_tokens += len(generation.ids)
            if parsed.action == "answer":
                row.answer, row.done = parsed.content, True
            elif len(row.turns) > self.budget.max_searches:
                row.done = row.truncated = True
            elif parsed.action == "search":
                searching.append(number)
            else:
                self.observe(number, (), self.protocol.feedback, self.feedback_ids)
        self.session.free([number for number in generations if self.rows[number].done])
        return searching

    def unknown(self, numbers: Sequence[int]) -> list[str]:
        """Return the queries of these rows that the step has not asked yet, each once."""
        queries = [self.rows[number].turns[-1].content for number in numbers]
        asked = [query for query in dict.fromkeys(queries) if query not in self.known]
        self.times.queries += len(queries)
        self.times.unique_queries += len(asked)
        return asked

    def search(self, queries: list[str]) -> list[list[Passage]]:
        found = self.retriever.search(queries, self.top_k) if queries else []
        if len(found) != len(queries):
            raise RetrieverError(
                f"the retriever returned {len(found)} results for {len(queries)} queries: it must return a list of "
                "passages for each query, in order"
            )
        return found

    def answer(self, numbers: Sequence[int], queries: list[str], found: list[list[Passage]]) -> None:
        """Append to each of these rows the documents of its query; `found` are those of `queries`."""
        for query, passages in zip(queries, found, strict=True):
            text, ids = encode_observation(
                self.tokenizer, self.protocol, passages, self.budget.max_observation_tokens, self.special
            )
            self.known[query] = (tuple(passages), text, ids)
        for number in numbers:
            query = self.rows[number].turns[-1].content
            self.known.move_to_end(query)
            self.observe(number, *self.known[query])
        while len(self.known) > KNOWN_QUERIES:
            self.known.popitem(last=False)
        self.session.free([number for number in numbers if self.rows[number].done])

    def observe(self, number: int, passages: tuple[Passage, ...], text: str, ids: list[int]) -> None:
        """Append an observation to a row, or end the row when no sampled token would fit after it."""
        row = self.rows[number]
        if len(row) + len(ids) >= self.budget.max_trajectory_tokens:
            row.done = row.truncated = True
            return
        row.append_observation(ids)
        row.turns[-1] = replace(row.turns[-1], passages=passages, observation=text, observation_tokens=len(ids))


def _lockstep(work: _Work, numbers: Sequence[int]) -> None:
    """Roll out these rows turn by turn: all write, all queries of the turn are one call, all read."""
    while live := [number for number in numbers if not work.rows[number].done]:
        started = time.perf_counter()
        generations = dict(zip(live, work.session.generate(*work.begin(live))))
        work.times.generate_s += time.perf_counter() - started
        searching = work.take(generations)
        queries = work.unknown(searching)
        started = time.perf_counter()
        found = work.search(queries)
        work.times.retrieval_s += time.perf_counter() - started
        work.answer(searching, queries, found)


def _async(work: _Work, max_rows: int) -> None:
    """Roll out all rows without waiting for each other, at most `max_rows` at a time.

    One thread searches: the queries that come in while it is busy are its next call. Rows that are ready to write join
    when they are enough to be worth a forward of their own, or when nobody writes.
    """
    unborn = deque(number for number, row in enumerate(work.rows) if not row.done)
    ready: list[int] = []
    asking: list[int] = []  # their queries have not been sent
    asked: tuple[list[int], list[str], Future[list[list[Passage]]]] | None = None
    writing = 0
    with ThreadPoolExecutor(max_workers=1) as searcher:
        while True:
            waiting = len(asking) + (len(asked[0]) if asked else 0)
            while unborn and writing + waiting + len(ready) < max_rows:
                ready.append(unborn.popleft())
            if asked and (asked[2].done() or not (writing or ready)):
                started = time.perf_counter()
                numbers, queries, future = asked
                work.answer(numbers, queries, future.result())
                work.times.retrieval_s += time.perf_counter() - started  # only what writing did not hide
                ready += [number for number in numbers if not work.rows[number].done]
                asked = None
            if asking and not asked:
                queries = work.unknown(asking)
                asked = (asking, queries, searcher.submit(work.search, queries))
                asking = []
            started = time.perf_counter()
            finished: dict[int, Generation] = {}
            if ready and len(ready) >= JOIN_SHARE * writing:
                writing += len(ready)
                finished |= work.session.start(*work.begin(ready))
                ready = []
            elif writing:
                finished |= work.session.step()
            elif not asked and not unborn:
                return
            work.times.generate_s += time.perf_counter() - started
            if finished:
                writing -= len(finished)
                searching = work.take(finished)
                asking += searching
                going_on = set(finished) - set(searching)
                ready += [number for number in sorted(going_on) if not work.rows[number].done]


def check_stop_strings(tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]) -> None:
    """Raise ValueError when a stop string does not survive the tokenizer: no turn could end with it."""
    for stop in stop_strings:
        written = tokenizer.decode(encode(tokenizer, stop), clean_up_tokenization_spaces=False)
        if stop not in written:
            raise ValueError(
                f"the tokenizer cannot write the tag {stop!r}: it encodes to tokens that read {written!r}. Use a "
                "tokenizer whose alphabet has these characters, and no special token there that decoding drops"
            )
