"""Trajectories -> tensors: minibatches that do not depend on the number of ranks, token-budget micro-batches.

Dims: `B` responses, `T` tokens. Nothing here communicates: the exchanges between ranks are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapo.diagnostics import TokenKinds, no_kinds, turn_numbers
from sapo.loss import Counts
from sapo.packing import shared_prefix
from sapo.types import Batch, Trajectory

GatherRanks = Callable[[list[int]], list[list[float]]]  # the numbers of this rank -> those of every rank
GatherObjects = Callable[[Any], list[Any]]  # an object of this rank -> those of every rank

LEVEL = 0.02  # loads of two ranks that differ by less than this share of the mean count as even


@dataclass(frozen=True)
class Minibatch:
    """What one optimiser update trains on: this rank's micro-batches and the global counts.

    Every rank has the same number of micro-batches; ranks with fewer get dummies (`dummy_batch`).
    """

    micro_batches: list[Batch]
    counts: Counts


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    device: str | torch.device = "cpu",
    token_kinds: TokenKinds = no_kinds,
) -> Batch:
    """Lay trajectories out as one right-padded batch, T = the longest. advantages: one per trajectory.

    token_kinds(trajectory): the kind of each response token, for the diagnostics.

    Ids are padded with 0 and every mask is set by position, so no id has a special meaning here.
    Raises ValueError when a trajectory's response lists differ in length or its prompt is empty.
    """
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    shape = (len(trajectories), max(lengths))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask, sampling_logprobs = torch.zeros(shape), torch.zeros(shape)
    turn, kind = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.int8)
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
        turn[row, response] = torch.from_numpy(turn_numbers(trajectory))
        kind[row, response] = torch.from_numpy(token_kinds(trajectory))
    return Batch(
        input_ids=input_ids.to(device),
        lengths=torch.tensor(lengths).to(device),
        loss_mask=loss_mask.to(device),
        sampling_logprobs=sampling_logprobs.to(device),
        turn=turn.to(device),
        kind=kind.to(device),
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
        turn=zeros.to(torch.int8),
        kind=zeros.to(torch.int8),
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


@dataclass(frozen=True)
class Rows:
    """The rows of a minibatch on this rank, in the order in which they are cut into micro-batches.

    rows: numbers of trajectories. lengths: tokens that each forwards. shared: how many of them the row before it has
    too, or None where rows are padded, longest first. attention_cost: cost of attention in a row of one token, in units
    of the rest of the model's; it grows with the square of the length.
    """

    rows: list[int]
    lengths: list[int]
    shared: list[int] | None
    attention_cost: float

    def cut(self, max_tokens: int, max_rows: int, max_cost: float = math.inf) -> list[list[int]]:
        """Cut the order into micro-batches as long as the limits allow; a row beyond them gets one of its own.

        max_tokens counts forwarded tokens, padding included. Returns places in the order.

        >>> Rows([5, 6, 7, 8, 9], [12, 9, 4, 4, 3], None, 0.0).cut(max_tokens=8, max_rows=8)
        [[0], [1], [2, 3], [4]]
        >>> Rows([5, 6, 7, 8, 9], [12, 9, 4, 4, 3], [0, 7, 0, 2, 2], 0.0).cut(max_tokens=14, max_rows=8)
        [[0, 1], [2, 3, 4]]
        """
        runs: list[list[int]] = []
        tokens = cost = 0.0
        for place, length in enumerate(self.lengths):
            width = self.lengths[runs[-1][0]] if runs and self.shared is None else length
            added = width - self.shared[place] if self.shared is not None else width
            added_cost = self._cost(width, width - added)
            fits = tokens + added <= max_tokens and cost + added_cost <= max_cost
            if runs and len(runs[-1]) < max_rows and fits:
                runs[-1].append(place)
                tokens, cost = tokens + added, cost + added_cost
            else:
                runs.append([place])
                tokens, cost = float(length), self._cost(length, 0)
        return runs

    def costs(self) -> list[tuple[float, float]]:
        """Return what each row costs beside the others, and what it would cost where it shares nothing; no padding."""
        shared = self.shared or [0] * len(self.lengths)
        return [(self._cost(length, known), self._cost(length, 0)) for length, known in zip(self.lengths, shared)]

    def _cost(self, length: int, shared: int) -> float:
        """a*L + b*L^2 of a row, less that of the tokens it shares."""
        return length - shared + self.attention_cost * (length**2 - shared**2)

    def cut_evenly(self, parts: int, max_tokens: int, max_rows: int) -> list[list[int]]:
        """Cut the order into at most `parts` micro-batches whose most expensive one costs least.

        `parts` must not be less than `cut` needs.
        """
        low, high = 0.0, sum(self._cost(length, 0) for length in self.lengths) * len(self.lengths)
        for _ in range(40):
            middle = (low + high) / 2
            if len(self.cut(max_tokens, max_rows, middle)) <= parts:
                high = middle
            else:
                low = middle
        return self.cut(max_tokens, max_rows, high)


def arrange(
    rows: Sequence[int], trajectories: Sequence[Trajectory], *, packed: bool, attention_cost: float = 0.0
) -> Rows:
    """Order rows for `Rows.cut`: padded ones by length, packed ones so that equal beginnings follow each other.

    A packed row forwards the tokens before its last sampled one (see `sapo/packing.py`).
    """
    if not packed:
        order = sorted(rows, key=lambda row: (-len(trajectories[row].ids), row))
        return Rows(order, [len(trajectories[row].ids) for row in order], None, attention_cost)
    forwarded = {}
    for row in rows:
        trajectory = trajectories[row]
        after = trajectory.loss_mask[::-1].index(1)  # tokens behind the last sampled one
        forwarded[row] = np.array(trajectory.ids[: len(trajectory.ids) - after - 1])
    order = sorted(rows, key=lambda row: (trajectories[row].ids, row))
    shared = [0] * len(order)
    for place, (before, row) in enumerate(zip(order, order[1:]), start=1):
        shared[place] = shared_prefix(forwarded[before], forwarded[row])
    return Rows(order, [len(forwarded[row]) for row in order], shared, attention_cost)


def moves(costs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[int, int, int]]:
    """Return which rows to move so that the ranks' loads become even, as (from rank, its row, to rank).

    costs: of every rank's rows: what the row adds to the load of its own rank, and what it would add to another. The
    rank with most gives the one with least the row that leaves the larger of their two loads smallest, until they are
    even or no row helps. No row moves twice. All ranks find the same moves from the same costs.

    >>> moves([[(5.0, 6.0), (3.0, 3.0), (2.0, 2.0)], [(2.0, 2.0)]])
    [(0, 1, 1)]
    """
    loads = [sum(own for own, _ in rows) for rows in costs]
    staying = [dict(enumerate(rows)) for rows in costs]
    tolerance = LEVEL * sum(loads) / len(loads)
    moved = []
    while True:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        larger = {
            row: max(loads[full] - own, loads[empty] + elsewhere) for row, (own, elsewhere) in staying[full].items()
        }
        best = min(larger, key=larger.__getitem__, default=None)
        if best is None or larger[best] >= loads[full] or loads[full] - loads[empty] <= tolerance:
            return moved
        own, elsewhere = staying[full].pop(best)
        loads[full] -= own
        loads[empty] += elsewhere
        moved.append((full, best, empty))


def level_ranks(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | Tensor,
    question_ids: Sequence[str],
    *,
    group_size: int,
    minibatch_responses: int,
    packed: bool,
    attention_cost: float,
    rank: int,
    gather_objects: GatherObjects,
) -> tuple[list[Trajectory], list[float]]:
    """Move trajectories between ranks until every rank's part of each minibatch costs about the same to train on.

    Ranks wait for each other at every update, and responses differ in length many times over. A row stays in its
    minibatch, so a move changes no more than the order of a sum. Arguments as for `plan_step`; every rank must call.
    Returns the trajectories that this rank trains on, and their advantages.
    """
    rows = list(zip(trajectories, torch.as_tensor(advantages, dtype=torch.float32).tolist()))
    arranged = [
        arrange(_trained(members, trajectories), trajectories, packed=packed, attention_cost=attention_cost)
        for members in minibatch_rows(trajectories, question_ids, group_size, minibatch_responses)
    ]
    ranks = gather_objects([part.costs() for part in arranged])
    found = [moves(costs) for costs in zip(*ranks)]  # of each minibatch
    if not any(found):
        return [trajectory for trajectory, _ in rows], [advantage for _, advantage in rows]
    leaving = {
        part.rows[place]: to
        for part, of_minibatch in zip(arranged, found)
        for source, place, to in of_minibatch
        if source == rank
    }
    sent = gather_objects([(to, rows[row]) for row, to in leaving.items()])
    kept = [row for index, row in enumerate(rows) if index not in leaving]
    kept += [row for from_rank in sent for to, row in from_rank if to == rank]
    return [trajectory for trajectory, _ in kept], [advantage for _, advantage in kept]


def _trained(rows: Sequence[int], trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the rows that have a sampled token: the others add nothing to a loss."""
    return [row for row in rows if any(trajectories[row].loss_mask)]


def plan_step(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | Tensor,
    question_ids: Sequence[str],
    *,
    group_size: int,
    minibatch_responses: int,
    micro_batch_tokens: int,
    micro_batch_responses: int,
    packed: bool = False,
    attention_cost: float = 0.0,
    gather_ranks: GatherRanks = lambda values: [values],
    device: str | torch.device = "cpu",
    token_kinds: TokenKinds = no_kinds,
) -> list[Minibatch]:
    """Cut this rank's trajectories of a step into minibatches of micro-batches, once for the whole step.

    The cut must not change between the forward that gives `old_logprobs` and the updates: other padding moves a
    logprob by about 3e-6, enough to open the gate at tau = 1. advantages: one per trajectory. micro_batch_tokens counts
    forwarded tokens, padding included. packed: for a `Policy` that forwards without padding. attention_cost: of
    `Policy.attention_cost`; ranks work in step, so each cuts its part into as many micro-batches as the rank that needs
    most, of costs as even as can be (`level_ranks` has made the parts so). gather_ranks is called once, by every rank;
    the default is that of a single process.
    """
    advantages = torch.as_tensor(advantages, dtype=torch.float32).tolist()  # the signs that the loss will see
    arranged: list[Rows] = []
    numbers: list[int] = []  # four per minibatch: its counts, and the micro-batches that this rank needs
    for members in minibatch_rows(trajectories, question_ids, group_size, minibatch_responses):
        rows = _trained(members, trajectories)
        arranged.append(arrange(rows, trajectories, packed=packed, attention_cost=attention_cost))
        sampled = [sum(trajectories[row].loss_mask) for row in rows]
        nonneg = sum(tokens for row, tokens in zip(rows, sampled) if advantages[row] >= 0)
        needed = arranged[-1].cut(micro_batch_tokens, micro_batch_responses)
        numbers += [len(rows), sum(sampled), nonneg, len(needed)]
    columns = [[int(number) for number in column] for column in zip(*gather_ranks(numbers))]  # [4 x minibatches][ranks]
    plan = []
    for index, part in enumerate(arranged):
        responses, tokens, nonneg, needed = columns[4 * index : 4 * index + 4]
        micro_batches = []
        for places in part.cut_evenly(max(needed), micro_batch_tokens, micro_batch_responses):
            rows = [part.rows[place] for place in places]
            chosen = [trajectories[row] for row in rows]
            micro_batches.append(make_batch(chosen, [advantages[row] for row in rows], device, token_kinds))
        dummies = [dummy_batch(device) for _ in range(max(1, *needed) - len(micro_batches))]
        plan.append(Minibatch(micro_batches + dummies, Counts(sum(responses), sum(tokens), sum(nonneg))))
    return plan
