"""The contestants of `benchmarks/rollout.py`: ours, `generate` on the whole context every turn, and TRL's tool loop.

A schedule of recorded turns is forced on all of them. Each runs its own sampler on its own logits, then takes the
scripted id instead: filler, then what ends the turn in its protocol. So all sample the same number of tokens in the
same turns of the same rows, and read observations of the same length.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils.chat_template_utils import render_jinja_template

from retriever.types import Retriever
from sapo.engine.hf import HFEngine, Session
from sapo.engine.sampling import Sampling
from sapo.protocol import Protocol, parse_turn
from sapo.rollout import Budget, encode, encode_observation, encode_prompt, rollout, special_strings
from sapo.types import Action, Question, Trajectory

FILLER = " The passages do not say it, so I will look for the next fact and then read on."
Ids = list[int]


class PlannedTurn(NamedTuple):
    """One turn of a schedule: how many tokens it samples, and what it does."""

    tokens: int
    action: Action


Schedule = list[list[PlannedTurn]]  # trajectories, ordered by question, then sample


@dataclass(frozen=True)
class Contest:
    """What all contestants get: `group_size` rows a question, one trajectory of the schedule and its queries a row.

    queries: one text a planned turn, used where the turn searches. budget: its max_searches is the most turns less one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    retriever: Retriever
    protocol: Protocol
    questions: list[Question]
    group_size: int
    schedule: Schedule
    queries: list[list[str]]
    budget: Budget
    top_k: int

    @property
    def row_questions(self) -> list[Question]:
        """The question of each row."""
        return [question for question in self.questions for _ in range(self.group_size)]


@dataclass(frozen=True)
class Run:
    """What one contestant did: seconds of its whole rollout phase, and tokens by row and turn."""

    seconds: float
    prompts: list[int]
    sampled: list[list[int]]
    observed: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second."""
        return sum(map(sum, self.sampled)) / self.seconds


def load_schedule(path: Path, rollouts: int) -> Schedule:
    """Read the first `rollouts` trajectories of a schedule: JSON lists of {"tokens", "action"}.

    Raises ValueError, naming the trajectory, where the schedule cannot be forced.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    if len(rows) < rollouts:
        raise ValueError(f"{path} holds {len(rows)} trajectories, fewer than the {rollouts} asked for: record more")
    schedule = [[PlannedTurn(turn["tokens"], turn["action"]) for turn in turns] for turns in rows[:rollouts]]
    most = max(map(len, schedule))
    for row, turns in enumerate(schedule):
        actions = [turn.action for turn in turns]
        if not turns or "answer" in actions[:-1] or (len(turns) < most and actions[-1] != "answer"):
            raise ValueError(
                f"{path}: trajectory {row} has the actions {actions}: an answer must be its last turn, and without one "
                f"it must have {most} turns, the most of all"
            )
        if min(turn.tokens for turn in turns) < 1:
            raise ValueError(f"{path}: trajectory {row} has a turn without tokens: each turn samples at least one")
    return schedule


def script(tokenizer: PreTrainedTokenizerBase, tokens: int, ending: str) -> Ids:
    """Return `tokens` ids: filler, then those of `ending`. Longer than asked only where the ending alone is."""
    end, filler = encode(tokenizer, ending), encode(tokenizer, FILLER)
    room = max(0, tokens - len(end))
    return (filler * (room // len(filler) + 1))[:room] + end


def protocol_scripts(contest: Contest) -> list[list[Ids]]:
    """Return the ids of each row and turn in the tags of the contest's protocol. An invalid turn ends with eos."""
    endings: dict[Action, str] = {
        "search": "<search> {query} </search>",
        "answer": "<answer> unknown </answer>",
        "invalid": contest.tokenizer.eos_token,
    }
    return [
        [script(contest.tokenizer, turn.tokens, endings[turn.action].format(query=query)) for turn, query in pairs]
        for pairs in map(zip, contest.schedule, contest.queries)
    ]


class Probe:
    """Forces scripts on sessions of our engine, and notes what they drew themselves and when.

    drawn, logprobs [rows, turns, tokens + 1]: the ids that the sampler drew in their places, and their logprobs.
    forward_s: seconds of each call of the model. drew_at, head_s: `perf_counter` at each draw, and the seconds of the
    output head in it.
    """

    def __init__(self, scripts: Sequence[Sequence[Ids]]) -> None:
        shape = (len(scripts), max(map(len, scripts)), max(len(ids) for turns in scripts for ids in turns) + 1)
        self.scripted = np.zeros(shape, dtype=np.int64)
        for row, turns in enumerate(scripts):
            for turn, ids in enumerate(turns):
                self.scripted[row, turn, : len(ids)] = ids
        self.drawn = np.zeros(shape, dtype=np.int64)
        self.logprobs = np.zeros(shape)
        self.turn = np.full(len(scripts), -1)
        self.forward_s: list[float] = []
        self.head_s: list[float] = []
        self.drew_at: list[float] = []
        self.session: Session | None = None

    def force(self, session: Session, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Note what `rows` drew and return the scripted ids [n] instead; the last script of a row is used again."""
        self.session = session
        sampled = session.sampled[rows]
        self.turn[rows[sampled == 0]] += 1
        # A row that ended may still be drawn for: its draws fall into the spare last column.
        at = (rows, np.minimum(self.turn[rows], self.drawn.shape[1] - 1), np.minimum(sampled, self.drawn.shape[2] - 1))
        self.drawn[at], self.logprobs[at] = ids, logprobs
        return self.scripted[at]


@contextmanager
def forced(model: PreTrainedModel, scripts: Sequence[Sequence[Ids]]) -> Iterator[Probe]:
    """Force `scripts[row][turn]` on the sessions that are used inside."""
    probe = Probe(scripts)
    draw = Session._draw
    head = model.get_output_embeddings()

    def forced_draw(session: Session, rows: np.ndarray, hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
        probe.drew_at.append(time.perf_counter())
        parts_s: list[float] = []
        with patch.object(head, "forward", timed(head.forward, parts_s)):
            ids, logprobs = draw(session, rows, hidden)
        probe.head_s.append(sum(parts_s))
        return probe.force(session, rows, ids, logprobs), logprobs

    with (
        patch.object(Session, "_draw", forced_draw),
        patch.object(Session, "_forward", timed(Session._forward, probe.forward_s)),
    ):
        yield probe


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return `function` so that each call appends its seconds."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return result

    return wrapper


def run_ours(contest: Contest, schedule: str) -> tuple[Run, Probe, list[Trajectory]]:
    """Roll out with our engine; schedule: "lockstep" or "async"."""
    with forced(contest.model, protocol_scripts(contest)) as probe:
        started = time.perf_counter()
        trajectories, _ = rollout(
            HFEngine(contest.model, contest.tokenizer),
            contest.retriever,
            contest.tokenizer,
            contest.protocol,
            contest.questions,
            group_size=contest.group_size,
            budget=contest.budget,
            sampling=Sampling(),
            top_k=contest.top_k,
            seed=0,
            step=1,
            schedule=schedule,
        )
        seconds = time.perf_counter() - started
    run = Run(
        seconds,
        prompts=[len(t.prompt_ids) for t in trajectories],
        sampled=[[turn.end - turn.start for turn in t.turns] for t in trajectories],
        observed=[[turn.observation_tokens for turn in t.turns[:-1]] for t in trajectories],
    )
    return run, probe, trajectories


class Scripted(LogitsProcessor):
    """Leave the scripted id of each row as the only one that `generate` can sample. first_s: when the first was due."""

    def __init__(self, scripts: Sequence[Ids]) -> None:
        width = max(map(len, scripts))
        self.ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in scripts])  # [rows, width]
        self.step = 0
        self.first_s = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.step == 0:
            self.first_s = time.perf_counter()
        forced = torch.full_like(scores, -torch.inf).scatter_(1, self.ids[:, self.step, None], 0.0)
        self.step += 1
        return forced


class ScriptEnded(StoppingCriteria):
    """End each row at the length of its script."""

    def __init__(self, scripts: Sequence[Ids]) -> None:
        self.lengths = torch.tensor(list(map(len, scripts)))
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.step += 1
        return self.step >= self.lengths


def forcing(scripts: Sequence[Ids]) -> dict[str, Any]:
    """Return the arguments of `generate` that force `scripts`."""
    return {
        "logits_processor": LogitsProcessorList([Scripted(scripts)]),
        "stopping_criteria": StoppingCriteriaList([ScriptEnded(scripts)]),
    }


def generate_forced(
    model: PreTrainedModel, contexts: Sequence[Ids], scripts: Sequence[Ids], pad_id: int
) -> tuple[list[Ids], float]:
    """Sample after `contexts` with `model.generate`; return the new ids of each row and `perf_counter` at the first."""
    width = max(map(len, contexts))
    arguments = forcing(scripts)
    out = model.generate(
        input_ids=torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in contexts]),
        attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts]),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(map(len, scripts)),
        pad_token_id=pad_id,
        **arguments,
    )
    new = [row[width : width + len(ids)] for row, ids in zip(out.tolist(), scripts)]
    return new, arguments["logits_processor"][0].first_s


def run_reprefill(contest: Contest, batch_rows: int) -> Run:
    """Roll out with `generate` on the whole context of every live row, each turn anew, `batch_rows` rows at a time."""
    tokenizer, protocol = contest.tokenizer, contest.protocol
    scripts = protocol_scripts(contest)
    contest.model.eval()
    started = time.perf_counter()
    special = special_strings(tokenizer)
    prompts = {q.id: encode_prompt(tokenizer, protocol, q.question) for q in contest.questions}
    contexts = [list(prompts[question.id]) for question in contest.row_questions]
    run = Run(0.0, list(map(len, contexts)), [[] for _ in contexts], [[] for _ in contexts])
    feedback_ids = encode(tokenizer, protocol.feedback)
    for turn in range(contest.budget.max_searches + 1):
        live = sorted((r for r, turns in enumerate(scripts) if turn < len(turns)), key=lambda r: len(contexts[r]))
        queries: dict[int, str] = {}
        for begin in range(0, len(live), batch_rows):
            batch = live[begin : begin + batch_rows]
            new, _ = generate_forced(
                contest.model, [contexts[r] for r in batch], [scripts[r][turn] for r in batch], tokenizer.pad_token_id
            )
            for r, ids, text in zip(batch, new, tokenizer.batch_decode(new)):
                contexts[r] += ids
                run.sampled[r].append(len(ids))
                parsed = parse_turn(text, protocol)
                if turn + 1 == len(scripts[r]):
                    continue
                if parsed.action == "search":
                    queries[r] = parsed.content
                else:
                    contexts[r] += feedback_ids
                    run.observed[r].append(len(feedback_ids))
        found = contest.retriever.search(list(queries.values()), contest.top_k)
        for r, passages in zip(queries, found):
            _, ids = encode_observation(tokenizer, protocol, passages, contest.budget.max_observation_tokens, special)
            contexts[r] += ids
            run.observed[r].append(len(ids))
    return Run(time.perf_counter() - started, run.prompts, run.sampled, run.observed)


def search_tool(find: Callable[[str], str]) -> Callable[[str], str]:
    """Return `find` as TRL's tool; its signature and docstring become the schema in the prompt."""

    def search(query: str) -> str:
        """Search.

        Args:
            query: words
        """
        return find(query)

    return search


def tool_call(query: str) -> str:
    """Return the call of the search tool in the words of TRL's chat template."""
    arguments = json.dumps({"query": query})
    return f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'


def trl_text() -> str:
    """Return a prompt and a call of TRL's loop, for the training of a tokenizer that takes few tokens for them."""
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    messages = [{"role": "user", "content": ""}]
    (prompt,), _ = render_jinja_template(
        [messages], tools=[search_tool(str)], chat_template=qwen3_instruct_2507_chat_template
    )
    return prompt + tool_call("founder of")


class TrlRollout:
    """TRL's GRPOTrainer with a search tool, of which only the generation phase is run.

    The tool's observations, with the turn markers that TRL puts around them, are as long as ours, and so are its
    prompts: tool schema and the end of the question. A turn that is not the last is a tool call, which takes more
    tokens than a short search turn: then it is longer than planned, and counted so.
    """

    def __init__(self, contest: Contest, output_dir: Path) -> None:
        # Only this contestant needs TRL, which takes seconds to import.
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen3_instruct_2507_chat_template

        self.contest = contest
        self.tool = search_tool(self.find)
        self.tokenizer = copy.deepcopy(contest.tokenizer)
        self.tokenizer.chat_template = qwen3_instruct_2507_chat_template  # ChatML with tools that TRL can parse
        rows = len(contest.schedule)
        self.trainer = GRPOTrainer(
            model=contest.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(output_dir),
                use_cpu=True,
                bf16=False,
                use_vllm=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=rows,
                num_generations=contest.group_size,
                max_completion_length=contest.budget.max_trajectory_tokens,
                max_tool_calling_iterations=contest.budget.max_searches,
                temperature=1.0,
                report_to="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "unused"}]}]),
            processing_class=self.tokenizer,
            tools=[self.tool],
        )
        # What TRL sets up for each batch before it generates.
        self.trainer._sync_tool_dicts = [{"search": self.tool}] * rows
        self.trainer._async_tool_dicts = [{}] * rows
        markers = self.trainer._get_tool_suffix_ids([{"role": "tool", "name": "search", "content": ""}])
        self.room = contest.budget.max_observation_tokens - len(markers)
        self.feedback = cut(
            self.tokenizer,
            contest.protocol.feedback,
            len(encode(self.tokenizer, contest.protocol.feedback)) - len(markers),
        )

    def find(self, query: str) -> str:
        """Return the text of an observation."""
        if not query:  # a planned invalid turn
            return self.feedback
        (passages,) = self.contest.retriever.search([query], self.contest.top_k)
        return cut(self.tokenizer, self.contest.protocol.documents(passages), self.room)

    def prompts(self) -> list[list[dict[str, str]]]:
        """Return the conversation of each row, its question cut at the head to the length of our prompt."""
        conversations = []
        for question in self.contest.row_questions:
            ids = encode(self.tokenizer, question.question)
            ours = len(encode_prompt(self.contest.tokenizer, self.contest.protocol, question.question))
            room = max(1, ours - len(self._prompt_ids("")))
            conversations.append([{"role": "user", "content": self.tokenizer.decode(ids[-room:]).strip()}])
        return conversations

    def _prompt_ids(self, content: str) -> Ids:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tools=[self.tool],
            add_generation_prompt=True,
            return_dict=False,
        )

    def scripts(self) -> list[list[Ids]]:
        """Return the ids of each row and turn: tool calls, at the end an answer; each ends with eos."""
        eos = self.tokenizer.eos_token
        rows = []
        for turns, queries in zip(self.contest.schedule, self.contest.queries):
            endings = []
            for turn, query in zip(turns[:-1], queries):
                endings.append(tool_call(query if turn.action == "search" else "") + eos)
            endings.append(f"<answer> unknown </answer>{eos}" if turns[-1].action == "answer" else eos)
            rows.append([script(self.tokenizer, turn.tokens, ending) for turn, ending in zip(turns, endings)])
        return rows

    def run(self) -> Run:
        """Roll out with the trainer's generation phase."""
        prompts, scripts = self.prompts(), self.scripts()
        turns = iter(range(self.contest.budget.max_searches + 1))
        generate = self.contest.model.generate

        def forced_generate(**arguments: Any) -> Tensor:
            turn = next(turns)
            live = [ids[turn] for ids in scripts if turn < len(ids)]
            if len(live) != len(arguments["input_ids"]):
                raise RuntimeError(f"TRL generates {len(arguments['input_ids'])} rows in turn {turn}, not {len(live)}")
            return generate(**arguments, **forcing(live))

        with patch.object(self.contest.model, "generate", forced_generate):
            started = time.perf_counter()
            prompt_ids, _, tool_mask, *_ = self.trainer._generate(prompts)
            seconds = time.perf_counter() - started
        runs = [[(sampled, len(list(group))) for sampled, group in groupby(mask)] for mask in tool_mask]
        return Run(
            seconds,
            prompts=list(map(len, prompt_ids)),
            sampled=[[length for sampled, length in row if sampled] for row in runs],
            observed=[[length for sampled, length in row if not sampled] for row in runs],
        )


def cut(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    """Return the first `tokens` tokens of a text."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: offsets[: max(1, tokens)][-1][1]]
