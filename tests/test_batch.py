import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sapo.batch import Rows, arrange, dummy_batch, level_ranks, make_batch, minibatch_rows, moves, plan_step
from sapo.loss import Counts
from sapo.types import Question, Trajectory


def trajectory(question_id, sample, prompt, response, mask=None):
    return Trajectory(
        question=Question(question_id, "", ()), sample=sample, prompt_ids=list(prompt), response_ids=list(response),
        loss_mask=[1] * len(response) if mask is None else list(mask),
        sampling_logprobs=[-0.5 - i for i in range(len(response))], turns=(), answer=None,
    )


def test_make_batch_by_hand():
    # id 0 pads, and occurs in the text: the mask knows the difference
    batch = make_batch([trajectory("a", 0, [5, 0], [0, 7, 0], [1, 0, 1]), trajectory("b", 0, [3], [0])], [1.5, -0.5])
    assert batch.input_ids.tolist() == [[5, 0, 0, 7, 0], [3, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [5, 2]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.sampling_logprobs.tolist() == [[0, 0, -0.5, -1.5, -2.5], [0, -0.5, 0, 0, 0]]
    assert batch.advantages.tolist() == [1.5, -0.5]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)
    assert batch.old_logprobs is None


def test_a_response_with_no_tokens_is_an_empty_row():
    batch = make_batch([trajectory("a", 0, [5, 6, 7], [])], [0.0])
    assert batch.loss_mask.tolist() == [[0, 0, 0]]


def test_uneven_response_lists_are_refused():
    with pytest.raises(ValueError, match="sample 1 of question 'a' has 2 response ids, 1 mask entries"):
        make_batch([trajectory("a", 1, [5], [6, 7], mask=[1])], [0.0])


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="question 'a' has an empty prompt"):
        make_batch([trajectory("a", 0, [], [6])], [0.0])


def test_minibatches_do_not_depend_on_ranks():
    questions, group_size, size = [f"q{i}" for i in range(6)], 3, 5
    everything = [trajectory(q, s, [1], [2]) for q in questions for s in range(group_size)]

    def members(world_size):
        parts = [set() for _ in range(4)]
        for rank in range(world_size):
            mine = [t for i, t in enumerate(everything) if i // group_size % world_size == rank]
            for minibatch, rows in enumerate(minibatch_rows(mine, questions, group_size, size)):
                parts[minibatch] |= {(mine[row].sample, mine[row].question.id) for row in rows}
        return parts

    # (sample, question) order, cut into 5 + 5 + 5 + 3
    expected = [(s, q) for s in range(3) for q in questions]
    assert members(1) == [set(expected[i : i + 5]) for i in (0, 5, 10, 15)]
    assert members(1) == members(2) == members(3)


def test_one_sample_of_every_question_per_minibatch_spread_evenly():
    questions = [f"q{i}" for i in range(8)]
    mine = [trajectory(q, s, [1], [2]) for q in questions[1::2] for s in range(3)]
    minibatches = minibatch_rows(mine, questions, group_size=3, minibatch_responses=8)
    assert [[mine[row].sample for row in rows] for rows in minibatches] == [[0] * 4, [1] * 4, [2] * 4]


def test_trajectories_that_are_not_of_the_step_are_refused():
    with pytest.raises(ValueError, match="same id"):
        minibatch_rows([], ["a", "a"], 2, 2)
    with pytest.raises(ValueError, match="sample 0 of question 'c' is not of this step"):
        minibatch_rows([trajectory("c", 0, [1], [2])], ["a", "b"], 2, 2)
    with pytest.raises(ValueError, match="sample 2 of question 'a' is not of this step"):
        minibatch_rows([trajectory("a", 2, [1], [2])], ["a", "b"], 2, 2)


def cost(lengths, shared, attention_cost, places):
    """a*L + b*L^2 of a micro-batch, by hand; padded rows are as long as the first."""
    if shared is None:
        return len(places) * (lengths[places[0]] + attention_cost * lengths[places[0]] ** 2)
    known = [0] + [shared[place] for place in places[1:]]
    return sum(
        lengths[place] - n + attention_cost * (lengths[place] ** 2 - n**2) for place, n in zip(places, known)
    )


def forwarded_tokens(lengths, shared, places):
    return cost(lengths, shared, 0.0, places)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100), st.integers(1, 5), st.booleans(),
    st.data(),
)
def test_cutting_keeps_order_and_both_budgets(lengths, max_tokens, max_rows, packed, data):
    if packed:
        shared = [0] + [data.draw(st.integers(0, min(pair))) for pair in zip(lengths, lengths[1:])]
    else:
        lengths, shared = sorted(lengths, reverse=True), None
    rows = Rows(list(range(len(lengths))), lengths, shared, 0.01)
    cut = rows.cut(max_tokens, max_rows)
    assert [place for places in cut for place in places] == list(range(len(lengths)))
    for places in cut:
        assert len(places) <= max_rows
        assert len(places) == 1 or forwarded_tokens(lengths, shared, places) <= max_tokens
    for before, after in zip(cut, cut[1:]):  # the next row would not have fitted
        assert len(before) == max_rows or forwarded_tokens(lengths, shared, [*before, after[0]]) > max_tokens

    even = rows.cut_evenly(len(cut), max_tokens, max_rows)
    assert [place for places in even for place in places] == list(range(len(lengths))) and len(even) <= len(cut)
    worst = max(cost(lengths, shared, 0.01, places) for places in even)
    assert worst <= max(cost(lengths, shared, 0.01, places) for places in cut) * (1 + 1e-9)


def test_even_cuts_are_the_best_there_are():
    """Six rows in three parts: all ten ways to cut them, tried."""
    lengths, attention_cost = [9, 7, 6, 3, 2, 2], 0.1
    rows = Rows(list(range(6)), lengths, [0] * 6, attention_cost)
    splits = [[list(range(a)), list(range(a, b)), list(range(b, 6))] for a in range(1, 5) for b in range(a + 1, 6)]
    best = min(max(cost(lengths, [0] * 6, attention_cost, part) for part in split) for split in splits)
    even = rows.cut_evenly(3, max_tokens=100, max_rows=6)
    assert max(cost(lengths, [0] * 6, attention_cost, part) for part in even) == pytest.approx(best)


def test_padded_rows_go_by_length_and_packed_ones_by_their_beginnings():
    prompts = [list(range(1, 50)), [7] * 40]
    made = [
        trajectory("a", 0, prompts[0], [60, 61, 62]), trajectory("b", 0, prompts[1], [60] * 20),
        trajectory("a", 1, prompts[0], [60, 61, 63, 64], mask=[1, 1, 1, 0]), trajectory("b", 1, prompts[1], [61]),
    ]  # fmt: skip
    padded = arrange([0, 1, 2, 3], made, packed=False)
    assert (padded.rows, padded.lengths, padded.shared) == ([1, 2, 0, 3], [60, 53, 52, 41], None)
    packed = arrange([0, 1, 2, 3], made, packed=True)
    assert packed.rows == [0, 2, 1, 3]
    assert packed.lengths == [51, 51, 59, 40]  # tokens before the last sampled one
    assert packed.shared == [0, 51, 0, 40]


def test_ranks_cut_evenly_into_as_many_as_the_rank_that_needs_most():
    everything = [trajectory(name, s, [1], [2] * n) for name, n in (("a", 9), ("b", 2)) for s in range(4)]
    limits = dict(minibatch_responses=8, micro_batch_tokens=20, micro_batch_responses=8)
    first, second = ranks_plan(everything, [1.0] * 8, ["a", "b"], 4, 2, **limits)
    assert [batch.input_ids.shape for batch in first[0].micro_batches] == [(2, 10), (2, 10)]
    assert [batch.input_ids.shape for batch in second[0].micro_batches] == [(2, 3), (2, 3)]  # one would have held them


def ranks_plan(everything, advantages, questions, group_size, world_size, **limits):
    """Plan of every rank; the exchange between them is played by two passes."""
    said = []

    def rank_plan(rank, gather):
        mine = [i for i in range(len(everything)) if i // group_size % world_size == rank]
        return plan_step(
            [everything[i] for i in mine], [advantages[i] for i in mine], questions, group_size=group_size,
            gather_ranks=gather, **limits,
        )

    for rank in range(world_size):
        rank_plan(rank, lambda values: said.append(values) or [values])
    return [rank_plan(rank, lambda values: said) for rank in range(world_size)]


def test_counts_are_global_and_ranks_have_equal_numbers_of_micro_batches():
    rng = random.Random(0)
    questions, group_size = [f"q{i}" for i in range(5)], 2
    everything = []
    for question in questions:
        for sample in range(group_size):
            length = rng.randint(1, 9)
            mask = [int(rng.random() < 0.6) for _ in range(length)]
            everything.append(trajectory(question, sample, [1] * rng.randint(1, 4), [2] * length, mask))
    everything[3] = trajectory("q1", 1, [1, 1], [])
    advantages = [1.0, -1.0, 0.0, 0.0, 0.5, -0.5, -2.0, 2.0, -1.0, 1.0]
    limits = dict(minibatch_responses=5, micro_batch_tokens=24, micro_batch_responses=2)
    by_sample = [everything[sample::2] for sample in (0, 1)]  # minibatch 0 is sample 0 of each question
    expected = [
        Counts(
            responses=sum(any(t.loss_mask) for t in rows),
            tokens=sum(sum(t.loss_mask) for t in rows),
            nonneg_tokens=sum(sum(t.loss_mask) for t, a in zip(rows, advantages[sample::2]) if a >= 0),
        )
        for sample, rows in enumerate(by_sample)
    ]
    for world_size in (1, 2, 3):
        plans = ranks_plan(everything, advantages, questions, group_size, world_size, **limits)
        for index in (0, 1):
            assert all(plan[index].counts == expected[index] for plan in plans)
            assert len({len(plan[index].micro_batches) for plan in plans}) == 1
            batches = [batch for plan in plans for batch in plan[index].micro_batches]
            assert sum(int(batch.loss_mask.sum()) for batch in batches) == expected[index].tokens
            rows = sorted(row[:n].tolist() for b in batches for row, n in zip(b.input_ids, b.lengths) if row[0])
            assert rows == sorted(t.ids for t in by_sample[index] if any(t.loss_mask))


def loads_after(costs, found):
    loads = [sum(own for own, _ in rows) for rows in costs]
    for source, row, to in found:
        loads[source] -= costs[source][row][0]
        loads[to] += costs[source][row][1]
    return loads


row_costs = st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(st.lists(row_costs, max_size=8), min_size=1, max_size=5))
def test_moves_never_make_the_fullest_rank_fuller(costs):
    found = moves(costs)
    assert len({(source, row) for source, row, _ in found}) == len(found)  # no row moves twice
    assert all(source != to and row < len(costs[source]) for source, row, to in found)
    assert max(loads_after(costs, found)) <= max(loads_after(costs, []))


def test_moves_make_ragged_ranks_even():
    rng = random.Random(0)
    costs = [[(n, n) for n in rng.choices(range(300, 7000), k=32)] for _ in range(8)]
    before, found = loads_after(costs, []), moves(costs)
    after = loads_after(costs, found)
    mean = sum(after) / 8
    assert max(before) > 1.1 * mean and max(after) < 1.02 * mean and len(found) < 32


def leveled(everything, questions, group_size, size, world_size, packed):
    """What each rank trains on, with its advantages (1, 2, 3, ... in the order of `everything`); ranks are threads."""
    shared, barrier = [None] * world_size, threading.Barrier(world_size)

    def rank(number):
        def gather_objects(value):
            shared[number] = value
            barrier.wait(10)
            values = list(shared)
            barrier.wait(10)
            return values

        mine = [i for i in range(len(everything)) if i // group_size % world_size == number]
        return level_ranks(
            [everything[i] for i in mine], [i + 1.0 for i in mine], questions, group_size=group_size,
            minibatch_responses=size, packed=packed, attention_cost=0.001, rank=number, gather_objects=gather_objects,
        )  # fmt: skip

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_leveling_moves_rows_with_their_advantages_within_their_minibatch(world_size, packed):
    rng = random.Random(1)
    questions, group_size, size = [f"q{i}" for i in range(6)], 4, 12
    # the questions of rank 0 have long responses, and one response has nothing to train on
    everything = [
        trajectory(q, s, [number + 1] * 5, [2] * rng.randint(*((60, 90) if number % world_size == 0 else (5, 40))))
        for number, q in enumerate(questions) for s in range(group_size)
    ]  # fmt: skip
    everything[5] = trajectory("q1", 1, [2] * 5, [3, 3], mask=[0, 0])
    parts = leveled(everything, questions, group_size, size, world_size, packed)
    rows = [(t, advantage) for trajectories, advantages in parts for t, advantage in zip(trajectories, advantages)]
    assert sorted(rows, key=lambda row: row[1]) == [(t, i + 1.0) for i, t in enumerate(everything)]

    def fullest(part_of_rank):
        loads = [[sum(len(t[row].ids) for row in minibatch)
                  for minibatch in minibatch_rows(t, questions, group_size, size)] for t in part_of_rank]  # fmt: skip
        return [max(of_ranks) for of_ranks in zip(*loads)]

    before = [[t for i, t in enumerate(everything) if i // group_size % world_size == r] for r in range(world_size)]
    after = [trajectories for trajectories, _ in parts]
    if world_size == 1:
        assert after == before
    else:
        assert all(b < 0.9 * a for a, b in zip(fullest(before), fullest(after)))


def test_a_dummy_has_no_tokens_to_learn_from():
    dummy = dummy_batch()
    assert dummy.input_ids.shape == dummy.loss_mask.shape == (1, 2)
    assert dummy.loss_mask.sum() == 0 and dummy.advantages.tolist() == [0.0]
