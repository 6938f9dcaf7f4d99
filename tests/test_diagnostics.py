import json
import math
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from sapo.batch import dummy_batch, make_batch
from sapo.diagnostics import (
    KINDS,
    RULES,
    Alarm,
    DriftAlarm,
    StepStats,
    TokenValues,
    judge,
    ranked_values,
    ratio_metrics,
    sort_tokens,
    string_kinds,
    token_kinds,
    turn_numbers,
)
from sapo.loss import Counts, PolicyLoss
from sapo.types import Question, Trajectory, Turn
from tests.real_tokenizers import NAMES, pieces, real_tokenizer, split
from tests.tiny import tiny_tokenizer


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def letters(strings: list[str | None], think_aware: bool = False) -> str:
    return "".join("otqa#"[kind] for kind in string_kinds(strings, think_aware))


# Kinds and turns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strings", "kinds"),
    [
        ([], ""),
        (["Hm", "<think>", "a", "b", "</think>", "c", "<search>", "q", "</search>"], "o#tt#o#q#"),
        (["<", "think", ">", "a", ".</", "think", ">Ċ", "b"], "###t###o"),
        (["Ġ<answer>Par", "is", "Ġ", "</answer>"], "#aa#"),  # merged with what stands beside it
        (["<think>", "a", "<search>", "q", "</search>", "b"], "#t#q#t"),  # the action inside counts
        (["<answer>", "a", "<answer>", "b", "</answer>", "c"], "#a#a#o"),
        (["<search>", "q", "</answer>", "x"], "#q#o"),
        (["</search>", "x", "</think>", "y"], "#o#o"),
        (["<documents>", "x", "</documents>", "<refine>", "y", "</refine>"], "#o##o#"),
        (["<Think>", "a", "<search >", "b", "<think", "c"], "oooooo"),  # no tags
        (["<0x3C>", "think", "<0x3E>", "a", "<0xE6>", "<0x9D>"], "###ttt"),  # byte fallback
        (["<search>", None, "q", None], "#qqq"),  # ids beyond the vocabulary
        (["<think>", "a", "</think>", None], "#t#o"),
    ],
)
def test_kinds_of_tokens_by_hand(strings: list[str | None], kinds: str) -> None:
    assert letters(strings) == kinds


def test_with_think_aware_an_action_inside_thinking_is_thinking() -> None:
    strings = ["<think>", "use", "<search>", "and", "</search>", "</think>", "<search>", "q"]
    assert letters(strings, think_aware=True) == "#t#t##" + "#q"
    assert letters(strings) == "#t#q##" + "#q"


@pytest.mark.parametrize("name", NAMES)
def test_kinds_on_real_tokenizers_however_the_text_is_split(name: str) -> None:
    """Against a scalar reading of the bytes: what was opened last before each token."""
    rng = random.Random(name)
    length = {token: len(spelled) for spelled, tokens in pieces(name).items() for token in tokens}
    parts = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<documents>"]
    parts += ["Who? ", "é", "東京", "🙂", " <", ">\n", "</", "think", ".", "search>"]
    for _ in range(60):
        spelled = "".join(rng.choices(parts, k=rng.randint(1, 14))).encode()
        ids = split(name, spelled, rng)
        ends = np.cumsum([length[token] for token in ids])
        expected = [_scalar_kind(spelled, end - length[token], end) for token, end in zip(ids, ends)]
        turn = Turn(2, 2 + len(ids), "", "invalid", "", "length")
        trajectory = _trajectory([7, 7, *ids, 7], [turn])
        kinds = token_kinds(trajectory, real_tokenizer(name))
        assert kinds.dtype == np.int8
        assert [KINDS[kind] for kind in kinds] == ["other", "other", *expected, "other"], spelled


def _scalar_kind(text: bytes, start: int, end: int) -> str:
    names = ("think", "search", "answer", "documents", "information", "refine")
    tags = [f"<{slash}{name}>".encode() for name in names for slash in ("", "/")]
    for place in range(end):
        for tag in tags:
            if text.startswith(tag, place) and place + len(tag) > start:
                return "tags"
    before = text[:start]
    opened = {kind: before.rfind(f"<{name}>".encode()) for name, kind in (("search", "query"), ("answer", "answer"))}
    closed = max(before.rfind(b"</search>"), before.rfind(b"</answer>"))
    action, place = max(opened.items(), key=lambda item: item[1])
    if place > closed:
        return action
    return "think" if before.rfind(b"<think>") > before.rfind(b"</think>") else "other"


def test_each_turn_is_read_on_its_own_and_numbered() -> None:
    tokenizer = tiny_tokenizer()
    first = tokenizer("<think>a<search>b", add_special_tokens=False)["input_ids"]
    second = tokenizer("c<answer>d", add_special_tokens=False)["input_ids"]
    turns = [
        Turn(0, len(first), "", "invalid", "", "length"),
        Turn(len(first) + 2, len(first) + 2 + len(second), "", "invalid", "", "length"),
    ]
    trajectory = _trajectory([*first, 5, 5, *second], turns)
    kinds = [KINDS[kind] for kind in token_kinds(trajectory, tokenizer)]
    assert kinds[len(first) - 1] == "query" and kinds[len(first) : len(first) + 3] == ["other"] * 3
    assert kinds[-1] == "answer"
    assert turn_numbers(trajectory).tolist() == [1] * len(first) + [0, 0] + [2] * len(second)


def test_late_turns_count_as_the_eighth() -> None:
    turns = [Turn(n, n + 1, "", "invalid", "", "length") for n in range(10)]
    assert turn_numbers(_trajectory([3] * 10, turns)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_a_batch_carries_turns_and_kinds_at_their_tokens() -> None:
    turn = Turn(0, 2, "", "invalid", "", "length")
    batch = make_batch([_trajectory([5, 6, 7], [turn])], [1.0], token_kinds=lambda t: np.array([4, 1, 0], np.int8))
    assert batch.turn.tolist() == [[0, 0, 1, 1, 0]] and batch.kind.tolist() == [[0, 0, 4, 1, 0]]
    assert batch.turn.dtype == batch.kind.dtype == dummy_batch().kind.dtype == torch.int8


# Quantiles ---------------------------------------------------------------------------------------------------------


def test_ranked_values_are_exact_over_ranks_for_any_floats() -> None:
    rng = np.random.default_rng(0)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    cells = [
        rng.standard_normal(1001).astype(np.float32) * 1e-3,
        np.repeat(np.float32([-1.5, 2.0]), 50),
        rng.permutation(np.concatenate([special, -special, rng.integers(0, 2**32, 500, np.uint32).view(np.float32)])),
        np.float32([7.0]),
        np.float32([]),
        np.float32([np.nan] * 3),
    ]
    quantiles = [0.0, 0.01, 0.25, 0.5, 0.99, 1.0]
    shares = [[np.sort(cell[rank::3]) for cell in cells] for rank in range(3)]
    results = _on_ranks(3, lambda rank, sum_ranks: ranked_values(shares[rank], quantiles, sum_ranks))
    for cell, found in zip(cells, results[0]):
        ordered = sorted(cell, key=_order) or [math.nan]
        expected = [ordered[max(1, math.ceil(q * len(cell))) - 1] for q in quantiles]
        np.testing.assert_array_equal(found, np.float32(expected))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def _order(value: np.float32) -> tuple[bool, float]:
    return bool(np.isnan(value)), 0.0 if np.isnan(value) else float(value)


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.01, 3.0), (0.5, 101.0), (0.99, 199.0), (1.0, 201.0)])
def test_a_quantile_is_the_ceil_of_q_times_n_th_value(q: float, expected: float) -> None:
    assert ranked_values([np.arange(1, 202, dtype=np.float32)], [q], alone) == [[expected]]


# Ratios ------------------------------------------------------------------------------------------------------------


def _tokens(rows: list[tuple[float, bool, int, int]]) -> TokenValues:
    log_ratio, positive, turn, kind = zip(*rows)
    return TokenValues(
        np.float32(log_ratio), np.array(positive), np.array(turn, np.int8), np.array(kind, np.int8)
    )


def test_ratios_of_six_tokens_by_hand() -> None:
    two, quarter = math.log(2), math.log(0.25)
    table = sort_tokens([_tokens([(0.0, True, 1, 1), (two, True, 1, 4), (quarter, True, 2, 2)]),
                         _tokens([(quarter, False, 1, 1), (0.0, False, 2, 3), (-math.inf, True, 2, 2)])])  # fmt: skip
    (row,) = ratio_metrics([table], 3, alone)
    expected = {
        "policy/ratio_mean": (1 + 2 + 0.25 + 0.25 + 1 + 0) / 6,
        "policy/ratio_min": 0.0, "policy/ratio_p01": 0.0, "policy/ratio_p50": 0.25, "policy/ratio_p99": 2.0,
        "policy/positive_ratio_mean": (1 + 2 + 0.25 + 0) / 4,
        "policy/positive_ratio_min": 0.0, "policy/positive_ratio_p01": 0.0, "policy/positive_ratio_p50": 0.25,
        "policy/positive_ratio_p99": 2.0,
        "policy/positive_drift_frac": 2 / 4,
        "turn/ratio_mean_1": 3.25 / 3, "turn/token_frac_1": 0.5, "turn/positive_drift_frac_1": 0.0,
        "turn/ratio_min_2": 0.0, "turn/positive_drift_frac_2": 1.0,
        "kind/ratio_p50_think": 0.25, "kind/positive_ratio_p50_think": 1.0, "kind/token_frac_think": 2 / 6,
        "kind/positive_ratio_mean_query": 0.125, "kind/ratio_mean_tags": 2.0, "kind/ratio_mean_answer": 1.0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-7)
    absent = ("kind/ratio_mean_other", "kind/positive_ratio_mean_answer", "turn/ratio_mean_3", "policy/token_frac")
    assert not set(absent) & set(row)


def test_ratios_do_not_depend_on_the_ranks_and_every_rank_makes_the_same_collectives() -> None:
    rng = np.random.default_rng(1)
    rows = [
        (float(rng.normal(-0.1, 0.5)), bool(rng.integers(2)), int(rng.integers(1, 4)), int(rng.integers(5)))
        for _ in range(200)
    ]
    empty = TokenValues(np.float32([]), np.array([], bool), np.array([], np.int8), np.array([], np.int8))
    whole = ratio_metrics([sort_tokens([_tokens(rows)]), empty], 4, alone)
    calls = []
    parts = [_tokens(rows[:7]), _tokens(rows[7:]), empty]
    found = _on_ranks(
        3, lambda rank, sum_ranks: ratio_metrics([sort_tokens([parts[rank]]), empty], 4, sum_ranks), calls
    )
    assert found[0] == found[1] == found[2] and whole[1] == found[0][1] == {}
    assert found[0][0] == pytest.approx(whole[0], rel=1e-12)
    assert [calls.count(rank) for rank in range(3)] == [6, 6, 6]


def _result(log_ratio: list[float], positive: list[bool], policy: float, clip: float) -> PolicyLoss:
    return PolicyLoss(
        torch.tensor(0.0),
        {"loss/policy": torch.tensor(policy)},
        {"policy/clip_frac": torch.tensor(clip)},
        torch.tensor(log_ratio),
        torch.tensor(positive, dtype=torch.bool),
    )


def test_a_step_of_two_updates_by_hand() -> None:
    """Three responses in the first update, in two micro-batches and a dummy; one in the second, which is skipped.

    Denominators are the counts given, as if the second had two more tokens on another rank.
    """
    turn = [Turn(0, 2, "", "invalid", "", "length")]
    one = [_trajectory([5, 6], turn)]
    stats = StepStats(underflow_ratio=0.1)
    stats.begin(Counts(responses=3, tokens=6, nonneg_tokens=6))
    # Cumulative ratios 0.2 * 0.2 and 0.2 * 5; then e^-2 * e^-2, all by one token of each response.
    fifth = math.log(0.2)
    two = _result([fifth, fifth, fifth, -fifth], [True, True, False, False], 0.5, 3.0)
    stats.add(make_batch(one * 2, [1.0, -1.0]), two)
    stats.add(make_batch(one, [1.0]), _result([-2.0, -2.0], [True] * 2, 0.25, 1.0))
    stats.add(dummy_batch(), _result([], [], 0.0, 0.0))
    stats.end(2.0)
    stats.begin(Counts(responses=1, tokens=4, nonneg_tokens=4))
    stats.add(make_batch(one, [1.0]), _result([0.0, 0.0], [True] * 2, 1.0, 1.0))
    stats.end(None)
    step, (first, second) = stats.metrics(2, alone)
    assert (first["loss/policy"], second["loss/policy"], step["loss/policy"]) == (0.75, 1.0, 0.875)
    assert first["policy/clip_frac"] == pytest.approx(4 / 6) and second["policy/clip_frac"] == 0.25
    assert step["policy/clip_frac"] == pytest.approx(5 / 10)
    assert first["policy/underflow_frac"] == pytest.approx(2 / 3) and step["policy/underflow_frac"] == 0.5
    assert first["optim/grad_norm"] == step["optim/grad_norm"] == 2.0 and "optim/grad_norm" not in second
    assert first["policy/positive_drift_frac"] == 1.0 and step["policy/positive_drift_frac"] == pytest.approx(4 / 6)
    assert first["policy/ratio_min"] == pytest.approx(math.exp(-2)) and second["policy/ratio_min"] == 1.0
    assert step["turn/token_frac_1"] == 1.0 and "turn/ratio_mean_2" not in step


# The alarm ---------------------------------------------------------------------------------------------------------

OFF: dict[str, float | None] = dict.fromkeys(RULES)


def _sound(alarm: DriftAlarm, metric: str, values: list[float], first: int = 1) -> list[list[Alarm]]:
    return [alarm.check(step, {metric: value}) for step, value in enumerate(values, start=first)]


def test_a_fixed_limit_sounds_after_patience_steps_in_a_row() -> None:
    alarm = DriftAlarm(OFF | {"clip_frac": 0.2}, window=10, patience=3)
    heard = _sound(alarm, "policy/clip_frac", [0.3, 0.3, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1, 0.9])
    assert [len(alarms) for alarms in heard] == [0, 0, 0, 0, 0, 1, 1, 0, 0]
    assert heard[5] == [
        Alarm("clip_frac", 4, True, "policy/clip_frac is above 0.2 (drift.clip_frac = 0.2): 0.3, 0.4, 0.5")
    ]
    assert (heard[6][0].since, heard[6][0].is_new) == (4, False)
    assert not alarm.calm


@pytest.mark.parametrize(
    ("rule", "limit", "within", "beyond"),
    [
        ("entropy_rise", 0.5, 1.5, 1.6),
        ("entropy_fall", 0.75, 0.25, 0.2),
        ("grad_norm_rise", 10.0, 10.0, 10.1),
        ("invalid_rise", 0.3, 1.3, 1.4),
        ("reward_fall", 0.5, 0.5, 0.4),
    ],
)
def test_a_relative_limit_is_measured_from_the_median_before(
    rule: str, limit: float, within: float, beyond: float
) -> None:
    metric = RULES[rule].metric
    before = [1.0, 0.9, 1.0, 1.1, 1.0]  # median 1
    quiet = DriftAlarm(OFF | {rule: limit}, window=5, patience=2)
    assert _sound(quiet, metric, [*before, within, within, within])[-1] == []
    alarm = DriftAlarm(OFF | {rule: limit}, window=5, patience=2)
    *_, first, second, third = _sound(alarm, metric, [*before, beyond, beyond, beyond])
    assert first == [] and (second[0].rule, second[0].since) == (rule, 6) and third[0].since == 6
    assert f"drift.{rule} = {limit:g}, 1 before" in second[0].text


def test_a_relative_limit_holds_once_there_are_patience_steps_and_forgets_old_ones() -> None:
    early = DriftAlarm(OFF | {"reward_fall": 0.5}, window=4, patience=2)
    # The second step is not measured yet; from the third on the limit is half of the median of 1 and 0.1.
    heard = _sound(early, "reward/mean", [1.0, 0.1, 0.1, 0.1, 0.1])
    assert [len(alarms) for alarms in heard] == [0, 0, 0, 1, 1] and heard[3][0].since == 3
    alarm = DriftAlarm(OFF | {"reward_fall": 0.5}, window=4, patience=2)
    slow = [1.0 * 0.9**n for n in range(30)]  # it never falls by half within the window
    assert not any(_sound(alarm, "reward/mean", slow))
    # The steps beyond the limit never become what is normal.
    fallen = _sound(alarm, "reward/mean", [0.0] * 20, first=31)
    assert [len(alarms) for alarms in fallen] == [0] + [1] * 19


def test_a_gradient_after_none_at_all_is_no_rise() -> None:
    alarm = DriftAlarm(OFF | {"grad_norm_rise": 10.0}, window=5, patience=1)
    assert not any(_sound(alarm, "optim/grad_norm", [0.0, 0.0, 0.5, 0.4]))


def test_what_is_absent_or_nan_says_nothing() -> None:
    alarm = DriftAlarm(OFF | {"clip_frac": 0.2}, window=10, patience=2)
    assert alarm.check(1, {"policy/clip_frac": 0.3}) == []
    assert alarm.check(2, {}) == alarm.check(3, {"policy/clip_frac": math.nan}) == []
    assert alarm.check(4, {"policy/clip_frac": 0.3})[0].since == 1


def test_a_restored_alarm_goes_on_as_if_it_had_not_stopped() -> None:
    rng = random.Random(0)
    limits = {"positive_drift_frac": 0.5, "underflow_frac": None, "clip_frac": 0.5, "entropy_rise": 0.2}
    limits |= {"entropy_fall": 0.3, "grad_norm_rise": 1.5, "invalid_rise": 0.2, "reward_fall": 0.3}
    limits |= {"engine_mismatch": 0.5}
    steps = [{rule.metric: rng.random() for rule in RULES.values()} for _ in range(60)]
    whole = DriftAlarm(limits, window=4, patience=2)
    expected = [whole.check(number, metrics) for number, metrics in enumerate(steps)]
    assert any(expected)
    parts, found = DriftAlarm(limits, window=4, patience=2), []
    for number, metrics in enumerate(steps):
        found.append(parts.check(number, metrics))
        state = parts.state()
        saved = json.dumps(state)
        parts.check(number, metrics)  # what goes on leaves the state alone that is still being written
        assert json.dumps(state) == saved
        parts = DriftAlarm(limits, window=4, patience=2)
        parts.restore(json.loads(saved))
    assert found == expected


@pytest.mark.parametrize(
    ("action", "good_step", "rollback", "roll_back", "stop", "said"),
    [
        ("warn", 4, 1, False, False, "^drift alarm at step 9: a; b$"),
        ("stop", 4, 1, False, True, "saved at this step; checkpoint step_4 is from before it"),
        ("stop", None, 1, False, True, "no checkpoint is from before it"),
        ("rollback", 4, 1, True, False, r"step 4 \(rollback 1 of 2\); going on at 0.5 times"),
        ("rollback", 4, 2, True, False, r"step 4 \(rollback 2 of 2\); going on at 0.25 times"),
        ("rollback", 4, 3, True, True, "not going on: .*--resume and drift.max_rollbacks=3"),
        ("rollback", None, 1, False, True, "nothing to roll back to: .* began in step 6"),
    ],
)
def test_what_follows_an_alarm(
    action: Any, good_step: int | None, rollback: int, roll_back: bool, stop: bool, said: str
) -> None:
    alarms = [Alarm("x", 7, False, "a"), Alarm("y", 6, True, "b")]
    options = {"good_step": good_step, "rollback": rollback, "max_rollbacks": 2, "lr_factor": 0.5}
    verdict = judge(alarms, 9, action=action, **options)
    assert (verdict.roll_back, verdict.stop) == (roll_back, stop) and re.search(said, verdict.text)


def test_a_warning_is_given_once() -> None:
    old = [Alarm("x", 7, False, "a")]
    assert judge(old, 9, action="warn", good_step=4, rollback=1, max_rollbacks=2, lr_factor=0.5).text == ""


def _trajectory(ids: list[int], turns: list[Turn]) -> Trajectory:
    mask = [0] * len(ids)
    for turn in turns:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    return Trajectory(Question("q", "Who?", ("x",)), 0, [1, 2], ids, mask, [0.0] * len(ids), tuple(turns), None)


def _on_ranks(world_size: int, work: Callable[[int, Any], Any], calls: list[int] | None = None) -> list[Any]:
    """Run `work(rank, sum_ranks)` on threads whose sums meet as those of ranks do."""
    barrier, shared = threading.Barrier(world_size, timeout=30), [torch.empty(0)] * world_size

    def run(rank: int) -> Any:
        def sum_ranks(values: torch.Tensor) -> torch.Tensor:
            if calls is not None:
                calls.append(rank)
            shared[rank] = values
            barrier.wait()
            total = torch.stack(shared).sum(0)
            barrier.wait()
            return total

        return work(rank, sum_ranks)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
