import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sapo.batch import dummy_batch, make_batch, minibatch_rows, pack, plan_step
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


@given(st.lists(st.integers(1, 40)), st.integers(1, 100), st.integers(1, 5))
def test_packing_keeps_every_row_once_and_both_budgets(lengths, max_tokens, max_rows):
    packed = pack(lengths, max_tokens, max_rows)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    for rows in packed:
        assert len(rows) <= max_rows
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= max_tokens


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


def test_a_dummy_has_no_tokens_to_learn_from():
    dummy = dummy_batch()
    assert dummy.input_ids.shape == dummy.loss_mask.shape == (1, 2)
    assert dummy.loss_mask.sum() == 0 and dummy.advantages.tolist() == [0.0]
