"""Trajectories -> tensors: minibatches that do not depend on the number of ranks, token-budget micro-batches.

Dims: `B` responses, `T` tokens. Nothing here communicates: the one exchange between ranks is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapo.loss import Counts
from sapo.types import Batch, Trajectory

GatherRanks = Callable[[list[int]], list[list[float]]]  # the numbers of this rank -> those of every rank


@dataclass(frozen=True)
class Minibatch:
    """What one optimiser update trains on: this rank's micro-batches and the global counts.

    Every rank has the same number of micro-batches; ranks with fewer get dummies (`dummy_batch`).
    """

    micro_batches: list[Batch]
    counts: Counts


def make_batch(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], device: str | torch.device = "cpu"
) -> Batch:
    """Lay trajectories out as one right-padded batch, T = the longest. advantages: one per trajectory.

    Ids are padded with 0 and every mask is set by position, so no id has a special meaning here.
    Raises ValueError when a trajectory's response lists differ in length or its prompt is empty.
    """
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    shape = (len(trajectories), max(lengths))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask, sampling_logprobs = torch.zeros(shape), torch.zeros(shape)
    for row, (trajectory, length) in enumerate(zip(trajectories, lengths, strict=True)):
        if not len(trajectory.response_ids) == len(trajectory.loss_mask) == len(trajectory.sampling_logprobs):
            raise ValueError(
                f"sample {trajectory.sample} of question {trajectory.question.id!r} has {len(trajectory.response_ids)} "
                f"response ids, {len(trajectory.loss_mask)} mask entries and {len(trajectory.sampling_logprobs)} "
                "logprobs: each response token needs one of each"
            )
        if not trajectory.prompt_ids:
            raise ValueError(
                f"question {trajectory.question.id!r} has an empty prompt: its first sampled token follows nothing"
            )
        response = slice(len(trajectory.prompt_ids), length)
        input_ids[row, :length] = torch.tensor(trajectory.ids)
        loss_mask[row, response] = torch.tensor(trajectory.loss_mask, dtype=torch.float32)
        sampling_logprobs[row, response] = torch.tensor(trajectory.sampling_logprobs, dtype=torch.float32)
    return Batch(
        input_ids=input_ids.to(device),
        lengths=torch.tensor(lengths).to(device),
        loss_mask=loss_mask.to(device),
        sampling_logprobs=sampling_logprobs.to(device),
        advantages=torch.as_tensor(advantages, dtype=torch.float32).to(device),
    )


def dummy_batch(device: str | torch.device = "cpu") -> Batch:
    """Return a batch of one row of two tokens with an empty mask: it adds exactly 0 to every loss and count.

    A rank that has run out of micro-batches passes it through the model, so that all ranks make the same collectives.
    """
    zeros = torch.zeros(1, 2, device=device)
    return Batch(
        input_ids=zeros.long(),
        lengths=torch.full((1,), 2, device=device),
        loss_mask=zeros,
        sampling_logprobs=zeros,
        advantages=zeros[:, 0],
    )


def minibatch_rows(
    trajectories: Sequence[Trajectory], question_ids: Sequence[str], group_size: int, minibatch_responses: int
) -> list[list[int]]:
    """Return for each minibatch of the step the indices of `trajectories` (this rank's) that belong to it.

    question_ids: all questions of the step over all ranks, in step order. The responses of the step, ordered by
    (sample, question), are cut into consecutive minibatches, so a response's minibatch depends on neither the number
    of ranks nor what the other ranks hold; the last minibatch may be smaller. With whole groups dealt to ranks in
    turn (question q on rank q mod world size) every rank gets an equal part of each minibatch.
    Raises ValueError for an id that is repeated or missing in `question_ids` and for a sample outside 0 .. G - 1.

    >>> from sapo.types import Question
    >>> def t(id, sample): return Trajectory(Question(id, "", ()), sample, [], [], [], [], (), None)
    >>> minibatch_rows([t("b", 0), t("b", 1)], ["a", "b"], group_size=2, minibatch_responses=2)
    [[0], [1]]
    """
    order = {question_id: index for index, question_id in enumerate(question_ids)}
    if len(order) != len(question_ids):
        raise ValueError("two questions of a step have the same id: ids must be unique in the concatenated data set")
    minibatches = [[] for _ in range(-(-len(order) * group_size // minibatch_responses))]
    positions = []
    for row, trajectory in enumerate(trajectories):
        if trajectory.question.id not in order or not 0 <= trajectory.sample < group_size:
            raise ValueError(
                f"sample {trajectory.sample} of question {trajectory.question.id!r} is not of this step: it has "
                f"{len(order)} questions with samples 0 to {group_size - 1} each"
            )
        positions.append((trajectory.sample * len(order) + order[trajectory.question.id], row))
    for position, row in sorted(positions):
        minibatches[position // minibatch_responses].append(row)
    return minibatches


def pack(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Cut rows into micro-batches, longest first: rows x longest row <= max_tokens and rows <= max_rows.

    lengths: tokens of each row. A row longer than `max_tokens` gets a micro-batch of its own.

    >>> pack([3, 9, 4, 12, 4], max_tokens=8, max_rows=8)
    [[3], [1], [2, 4], [0]]
    """
    micro_batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        last = micro_batches[-1] if micro_batches else []
        if last and len(last) < max_rows and (len(last) + 1) * lengths[last[0]] <= max_tokens:
            last.append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def plan_step(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | Tensor,
    question_ids: Sequence[str],
    *,
    group_size: int,
    minibatch_responses: int,
    micro_batch_tokens: int,
    micro_batch_responses: int,
    gather_ranks: GatherRanks = lambda values: [values],
    device: str | torch.device = "cpu",
) -> list[Minibatch]:
    """Pack this rank's trajectories of a step into minibatches of micro-batches, once for the whole step.

    The packing must not change between the forward that gives `old_logprobs` and the updates: other padding moves a
    logprob by about 3e-6, enough to open the gate at tau = 1. advantages: one per trajectory. micro_batch_tokens counts
    padded tokens. gather_ranks is called once, by every rank; the default is that of a single process.
    """
    advantages = torch.as_tensor(advantages, dtype=torch.float32).tolist()  # the signs that the loss will see
    minibatches = minibatch_rows(trajectories, question_ids, group_size, minibatch_responses)
    packed: list[list[Batch]] = []
    numbers: list[int] = []  # four per minibatch: its counts and its micro-batches on this rank
    for rows in minibatches:
        rows = [row for row in rows if any(trajectories[row].loss_mask)]  # one without a sampled token adds nothing
        chosen = [trajectories[row] for row in rows]
        packed.append([
            make_batch([chosen[i] for i in micro], [advantages[rows[i]] for i in micro], device)
            for micro in pack([len(t.ids) for t in chosen], micro_batch_tokens, micro_batch_responses)
        ])
        sampled = [sum(t.loss_mask) for t in chosen]
        nonneg = sum(tokens for row, tokens in zip(rows, sampled) if advantages[row] >= 0)
        numbers += [sum(tokens > 0 for tokens in sampled), sum(sampled), nonneg, len(packed[-1])]
    columns = [[int(number) for number in column] for column in zip(*gather_ranks(numbers))]  # [4 x minibatches][ranks]
    plan = []
    for index, micro_batches in enumerate(packed):
        responses, tokens, nonneg, sizes = columns[4 * index : 4 * index + 4]
        dummies = [dummy_batch(device) for _ in range(max(1, *sizes) - len(micro_batches))]
        plan.append(Minibatch(micro_batches + dummies, Counts(sum(responses), sum(tokens), sum(nonneg))))
    return plan
