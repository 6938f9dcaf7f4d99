"""What can be evaluated: the search agent itself, and the baselines it is compared with. Each is an `Answer`.

`rollout_agent` is the agent of the project, token by token as in training. The others talk in texts, through a
`Completer`: a model in this process (`EngineCompleter`) or one behind an OpenAI-compatible server (`sapo/endpoint.py`).
Direct answer and naive RAG are the usual baselines; `ircot_agent` follows IRCoT (Trivedi et al., ACL 2023): retrieve by
the question, write a sentence of reasoning, retrieve by it, and so on. Their prompts are ours, without examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from retriever.types import Passage, Retriever
from sapo.engine.sampling import Sampling, trajectory_key
from sapo.engine.vllm import Engine
from sapo.evaluation import Answer, Row, prediction_row, trajectory_row
from sapo.protocol import PROTOCOLS, neutralise, parse_turn
from sapo.protocol import Protocol as Template
from sapo.rollout import Budget, check_stop_strings, encode, rollout, special_strings
from sapo.types import Question

AGENTS = ("search", "direct", "rag", "ircot")
IRCOT_PASSAGES = 15  # of the last step's prompt, as in the paper of IRCoT

_FORM = (
    "Put the answer, without detailed illustrations, inside <answer> and </answer>. "
    "For example, <answer> Beijing </answer>."
)
DIRECT_PROMPT = f"Answer the given question. {_FORM} Question: {{question}}\n"
RAG_PROMPT = (
    f"Answer the given question with the help of the documents, which may or may not be useful. {_FORM}\n\n"
    "Documents:\n{documents}\n\nQuestion: {question}\n"
)
IRCOT_PROMPT = (
    "Answer the given question with the help of the documents, which may or may not be useful. Reason step by step, "
    f"one sentence at a time, going on from the reasoning so far. When you know the answer, end. {_FORM}\n\n"
    "Documents:\n{documents}\n\nQuestion: {question}\nReasoning so far: {reasoning}\n"
)
_ANSWER_STOP = ("</answer>",)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


@dataclass(frozen=True)
class Request:
    """One call of a model: chat messages, texts whose completion ends it, and what its random numbers depend on."""

    messages: tuple[dict[str, str], ...]
    stop: tuple[str, ...]
    question_id: str
    sample: int
    call: int


@dataclass(frozen=True)
class Completion:
    """What a model wrote, a completed stop text included. Token counts are the model's own."""

    text: str
    finish: Literal["stop", "eos", "length"]
    prompt_tokens: int
    sampled_tokens: int


class Completer(Protocol):
    """A model that continues chats."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return a completion for each request, in order."""
        ...

    def clean(self, text: str) -> str:
        """Return retrieved text that cannot speak for the model."""
        ...


class EngineCompleter:
    """Completes with a model in this process, through its chat template where it has one, else on the bare text.

    A prompt that leaves no room for max_turn_tokens in max_trajectory_tokens is not continued.
    """

    def __init__(self, engine: Engine, sampling: Sampling, budget: Budget, seed: int) -> None:
        self.engine = engine
        self.sampling = sampling
        self.budget = budget
        self.seed = seed
        self.special = special_strings(engine.tokenizer)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        tokenizer, limit = self.engine.tokenizer, self.budget.max_turn_tokens
        prompts = [encode(tokenizer, self._render(request)) for request in requests]
        room = self.budget.max_trajectory_tokens - limit
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
        completions = [Completion("", "length", len(prompt), 0) for prompt in prompts]
        if not fitting:
            return completions
        stop = requests[0].stop
        check_stop_strings(tokenizer, stop)
        keys = [trajectory_key(self.seed, r.call, r.question_id, r.sample) for r in (requests[i] for i in fitting)]
        session = self.engine.session(keys, self.sampling, stop)
        rows = range(len(fitting))
        generations = session.generate(rows, [prompts[i] for i in fitting], [limit] * len(fitting))
        session.free(rows)
        for i, generation in zip(fitting, generations):
            ids = generation.ids[:-1] if generation.finish == "eos" else generation.ids
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            completions[i] = Completion(text, generation.finish, len(prompts[i]), len(generation.ids))
        return completions

    def clean(self, text: str) -> str:
        return neutralise(text, self.special)

    def _render(self, request: Request) -> str:
        if self.engine.tokenizer.chat_template:
            return self.engine.tokenizer.apply_chat_template(
                list(request.messages), add_generation_prompt=True, tokenize=False
            )
        return "".join(message["content"] for message in request.messages)


@dataclass
class _State:
    """One sample of a question while it is answered."""

    question: Question
    sample: int
    messages: list[dict[str, str]] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    answer: str | None = None
    truncated: bool = False
    done: bool = False
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    def turn(self, text: str, action: str, content: str, finish: str, *, forged: bool = False) -> None:
        turn = {"text": text, "action": action, "content": content, "finish": finish, "forged": forged}
        self.turns.append(turn | {"passages": [], "observation": ""})

    def observe(self, text: str, passages: Sequence[Passage] = ()) -> None:
        self.turns[-1] |= {"passages": [passage.id for passage in passages], "observation": text}

    def row(self) -> Row:
        return prediction_row(
            self.question,
            self.sample,
            self.answer,
            self.turns,
            truncated=self.truncated,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.sampled_tokens,
            sampled_tokens=self.sampled_tokens,
        )


def rollout_agent(
    engine: Engine,
    retriever: Retriever,
    template: Template,
    *,
    budget: Budget,
    sampling: Sampling,
    top_k: int,
    seed: int,
    samples: int = 1,
    think_aware: bool = False,
) -> Answer:
    """Return the search agent of the project: `sapo.rollout.rollout`, at step 0."""

    def answer(questions: Sequence[Question]) -> list[Row]:
        trajectories, _ = rollout(
            engine,
            retriever,
            engine.tokenizer,
            template,
            questions,
            group_size=samples,
            budget=budget,
            sampling=sampling,
            top_k=top_k,
            seed=seed,
            step=0,
            think_aware=think_aware,
        )
        return [trajectory_row(trajectory) for trajectory in trajectories]

    return answer


def direct_agent(completer: Completer, *, samples: int = 1) -> Answer:
    """Return an agent that answers at once, without documents."""

    def answer(questions: Sequence[Question]) -> list[Row]:
        states = _start(questions, samples)
        _read_answers(states, _complete(completer, states, lambda state: _ask(DIRECT_PROMPT, state), _ANSWER_STOP))
        return [state.row() for state in states]

    return answer


def rag_agent(completer: Completer, retriever: Retriever, *, top_k: int, samples: int = 1) -> Answer:
    """Return naive RAG: the documents of the question itself stand in the prompt."""

    def answer(questions: Sequence[Question]) -> list[Row]:
        states = _start(questions, samples)
        _search(completer, retriever, states, [state.question.question for state in states], top_k)
        _read_answers(states, _complete(completer, states, lambda state: _ask(RAG_PROMPT, state), _ANSWER_STOP))
        return [state.row() for state in states]

    return answer


def ircot_agent(
    completer: Completer, retriever: Retriever, *, top_k: int, max_searches: int, samples: int = 1
) -> Answer:
    """Return the IRCoT-style agent: at most `max_searches` retrievals, the last call may only answer.

    Each call writes on freely and its first sentence is kept, as in IRCoT; documents pile up, the first
    `IRCOT_PASSAGES` of them in the prompt.
    """

    def answer(questions: Sequence[Question]) -> list[Row]:
        states = _start(questions, samples)
        queries = [state.question.question for state in states]
        live = states
        for call in range(max(max_searches, 1)):
            if call < max_searches:
                _search(completer, retriever, live, queries, top_k)
            completions = _complete(completer, live, lambda state: _ask(IRCOT_PROMPT, state), _ANSWER_STOP)
            if call >= max_searches - 1:
                _read_answers(live, completions)
                break
            for state, completion in zip(live, completions):
                sentence = _SENTENCE_END.split(completion.text.strip(), maxsplit=1)[0]
                if "<answer>" in sentence or not sentence:
                    _read_answers([state], [completion])
                    state.done = True
                else:
                    state.turn(completion.text, "search", sentence, completion.finish)
                    state.reasoning.append(sentence)
            live = [state for state in live if not state.done]
            queries = [state.reasoning[-1] for state in live]
            if not live:
                break
        return [state.row() for state in states]

    return answer


def chat_search_agent(
    completer: Completer,
    retriever: Retriever,
    template: Template,
    *,
    top_k: int,
    max_searches: int,
    samples: int = 1,
    think_aware: bool = False,
) -> Answer:
    """Return the search agent as a chat: each observation is a message of the user.

    For a model behind a server, which cannot be made to go on with its own message. Actions, feedback and the number of
    turns are those of `rollout`; a model trained on one growing response sees its documents in another place.
    """

    def answer(questions: Sequence[Question]) -> list[Row]:
        states = _start(questions, samples)
        for state in states:
            state.messages = [_user(template.prompt(state.question.question))]
        live = states
        while live:
            completions = _complete(completer, live, lambda state: state.messages, template.stop_strings)
            searching = []
            for state, completion in zip(live, completions):
                parsed = parse_turn(completion.text, template, think_aware)
                state.turn(completion.text, parsed.action, parsed.content, completion.finish, forged=parsed.forged)
                state.messages.append({"role": "assistant", "content": completion.text})
                if parsed.action == "answer":
                    state.answer, state.done = parsed.content, True
                elif len(state.turns) > max_searches:
                    state.truncated = state.done = True
                elif parsed.action == "search":
                    searching.append(state)
                else:
                    state.observe(template.feedback)
            found = retriever.search([state.turns[-1]["content"] for state in searching], top_k) if searching else []
            for state, passages in zip(searching, found, strict=True):
                state.observe(template.observation(_cleaned(completer, passages)), passages)
            live = [state for state in live if not state.done]
            for state in live:
                state.messages.append(_user(state.turns[-1]["observation"]))
        return [state.row() for state in states]

    return answer


def _start(questions: Sequence[Question], samples: int) -> list[_State]:
    return [_State(question, sample) for question in questions for sample in range(samples)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _ask(prompt: str, state: _State) -> list[dict[str, str]]:
    # The question last: it and the documents may hold braces, and text that looks like a placeholder.
    question = replace(PROTOCOLS["plain"], template="{question}").prompt(state.question.question)
    parts = {
        "documents": PROTOCOLS["sapo"].documents(state.passages),
        "reasoning": " ".join(state.reasoning),
        "question": question,
    }
    filled = re.sub(r"\{(documents|reasoning|question)\}", lambda match: parts[match[1]], prompt)
    return [_user(filled)]


def _complete(
    completer: Completer,
    states: Sequence[_State],
    messages: Callable[[_State], list[dict[str, str]]],
    stop: tuple[str, ...],
) -> list[Completion]:
    """Make the next call for each state and count its tokens. prompt_tokens: of the first call, as in a trajectory."""
    requests = [Request(tuple(messages(state)), stop, state.question.id, state.sample, state.calls) for state in states]
    completions = completer.complete(requests)
    for state, completion in zip(states, completions, strict=True):
        state.prompt_tokens = state.prompt_tokens or completion.prompt_tokens
        state.sampled_tokens += completion.sampled_tokens
        state.calls += 1
    return completions


def _read_answers(states: Sequence[_State], completions: Sequence[Completion]) -> None:
    """Append the last turn of each state: the first completed <answer> block, or an invalid turn."""
    for state, completion in zip(states, completions, strict=True):
        head, closing, _ = completion.text.partition("</answer>")
        content = head.rpartition("<answer>")[2].strip() if closing and "<answer>" in head else ""
        state.answer = content or None
        state.truncated = completion.finish == "length"
        state.turn(completion.text, "answer" if content else "invalid", content, completion.finish)


def _search(
    completer: Completer, retriever: Retriever, states: Sequence[_State], queries: Sequence[str], top_k: int
) -> None:
    """Search for each state; new documents join its own, up to IRCOT_PASSAGES. The first search is a turn by itself."""
    found = retriever.search(list(queries), top_k) if queries else []
    for state, query, passages in zip(states, queries, found, strict=True):
        if not state.turns:
            state.turn("", "search", query, "stop")
        cleaned = _cleaned(completer, passages)
        state.observe(PROTOCOLS["sapo"].documents(cleaned), passages)
        known = {passage.id for passage in state.passages}
        state.passages += [passage for passage in cleaned if passage.id not in known]
        del state.passages[IRCOT_PASSAGES:]


def _cleaned(completer: Completer, passages: Sequence[Passage]) -> list[Passage]:
    return [replace(p, title=completer.clean(p.title), text=completer.clean(p.text)) for p in passages]
