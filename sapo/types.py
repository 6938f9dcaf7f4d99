"""The records that move through a step: questions -> trajectories -> batch.

Dims: `B` responses, `T` tokens, `G` group size. A token-aligned sequence has one entry per token *of the whole
trajectory or of its response*, as its field says; nothing is shifted: entry t belongs to token t.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from retriever.types import Passage

Action = Literal["search", "answer", "invalid"]


@dataclass(frozen=True)
class Question:
    """One data item. `id` is unique over the whole concatenated data set: groups are keyed by it, never by text."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    source: str = ""  # data set it came from, for example "nq"
    hops: int | None = None  # number of facts needed, where it is known


@dataclass(frozen=True)
class Turn:
    """One generation and what followed it. `start:end` are the sampled tokens, as offsets into the response."""

    start: int
    end: int
    text: str  # decoded sampled tokens, for parsing and reading only: never encoded again
    action: Action
    content: str  # the query or the answer, stripped; "" when invalid
    finish: Literal["stop", "eos", "length"]
    forged: bool = False  # the model wrote an observation block of its own
    passages: tuple[Passage, ...] = ()
    observation: str = ""  # text appended after the turn: documents, feedback, or "" after the last one
    observation_tokens: int = 0


@dataclass(frozen=True)
class Trajectory:
    """Prompt + turns of one sample. The three response lists have one entry per response token.

    loss_mask: 1 = sampled by the policy, 0 = observation or feedback, set when the token was appended.
    sampling_logprobs: nats, of the distribution sampled from; 0.0 where the mask is 0.
    answer: content of the answer action that ended it, or None. truncated: a budget ended it.
    """

    question: Question
    sample: int
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    sampling_logprobs: list[float]
    turns: tuple[Turn, ...]
    answer: str | None
    truncated: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def searches(self) -> int:
        """Search actions that were answered with passages."""
        return sum(turn.action == "search" and turn.observation_tokens > 0 for turn in self.turns)

    @property
    def invalid_turns(self) -> int:
        return sum(turn.action == "invalid" for turn in self.turns)


@dataclass(frozen=True)
class Batch:
    """B trajectories as right-padded tensors; T is the longest trajectory, prompt included.

    input_ids [B, T] int64, padded with any id · lengths [B] int64, real tokens per row · loss_mask [B, T] float32,
    1 = sampled by the policy · sampling_logprobs [B, T] float32 nats · turn [B, T] int8, from 1, 0 = not sampled · kind
    [B, T] int8, of `sapo.diagnostics.KINDS` · advantages [B] float32, one per response · old_logprobs, ref_logprobs [B, T]
    float32 nats or None until the trainer has computed them.
    Every [B, T] entry belongs to the token at the same place; entry 0 is never sampled.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    sampling_logprobs: torch.Tensor
    turn: torch.Tensor
    kind: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor | None = field(default=None)
    ref_logprobs: torch.Tensor | None = field(default=None)
