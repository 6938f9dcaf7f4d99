"""Is the policy drifting away from its own good samples? Ratios by turn and kind of token, and an alarm.

Token kinds come from the sampled tokens themselves; quantiles over all ranks are exact; the alarm depends on
nothing but the metrics of the steps so far. docs/metrics.md has every formula. Paper: arXiv 2603.10069.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sapo.loss import MAX_EXPONENT, Counts, PolicyLoss
from sapo.protocol import TAGS, spelled
from sapo.types import Batch, Trajectory

TokenKinds = Callable[[Trajectory], np.ndarray]  # trajectory -> int8 [response tokens], places in KINDS
SumRanks = Callable[[Tensor], Tensor]  # a tensor of this rank -> its sum over ranks, on the CPU

KINDS = ("other", "think", "query", "answer", "tags")
OTHER, THINK, QUERY, ANSWER, TAG = range(len(KINDS))  # TAG is the largest: it wins in a token that holds two kinds
MAX_TURN = 8  # later turns count as this one

DRIFTED = 0.5  # a token of positive advantage below this ratio has lost half of its probability
QUANTILES = {"ratio_min": 0.0, "ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}

_ACTIONS = {"search": QUERY, "answer": ANSWER}
_TAG = re.compile("<(/?)(" + "|".join(TAGS) + ")>")


# Labels of tokens -------------------------------------------------------------------------------------------------


def token_kinds(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, think_aware: bool = False
) -> np.ndarray:
    """Return the kind of each response token, int8 [response tokens], places in `KINDS`.

    tags: at least one character of the token belongs to a protocol tag. think, query, answer: it lies after <think>,
    <search>, <answer> and before the tag that closes it, or the end of the turn; an action inside a <think> counts as
    the action, with `think_aware` as thinking. other: everything else, observations included.
    Linear in the characters; nothing is encoded or decoded, so a tag may be split or merged over tokens in any way.
    """
    kinds = np.zeros(len(trajectory.response_ids), dtype=np.int8)
    for turn in trajectory.turns:
        strings = tokenizer.convert_ids_to_tokens(trajectory.response_ids[turn.start : turn.end])
        kinds[turn.start : turn.end] = string_kinds(strings, think_aware)
    return kinds


def string_kinds(strings: Sequence[str | None], think_aware: bool = False) -> np.ndarray:
    """Return the kinds of one turn's tokens from their strings in the vocabulary (None: an id without one).

    Tags are found in the vocabulary's own alphabet, where ASCII stands for itself: byte-level BPE maps only other
    bytes, SentencePiece only the space; its byte tokens are read as their byte.

    >>> [KINDS[kind] for kind in string_kinds(["<", "search", ">Who", "?</", "search", ">Ċ"])]
    ['tags', 'tags', 'tags', 'tags', 'tags', 'tags']
    >>> [KINDS[kind] for kind in string_kinds(["<think>", "Hm", "</think>", "Ġ", "<answer>", "42"])]
    ['tags', 'think', 'tags', 'other', 'tags', 'answer']
    """
    if not strings:
        return np.zeros(0, dtype=np.int8)
    pieces = [spelled(string) for string in strings]
    text = "".join(pieces)
    characters = np.empty(len(text) + 1, dtype=np.int8)  # the last entry gives a token without a string a place
    thinking, action, place = False, None, 0
    for tag in _TAG.finditer(text):
        characters[place : tag.start()] = _kind(thinking, action, think_aware)
        characters[tag.start() : tag.end()] = TAG
        place = tag.end()
        closing, name = bool(tag[1]), tag[2]
        if name == "think":
            thinking = not closing
        elif name in _ACTIONS:
            action = None if closing else _ACTIONS[name]
    characters[place:] = _kind(thinking, action, think_aware)
    ends = np.cumsum([len(piece) for piece in pieces])
    return np.maximum.reduceat(characters, np.concatenate(([0], ends[:-1])))


def _kind(thinking: bool, action: int | None, think_aware: bool) -> int:
    if thinking and (think_aware or action is None):
        return THINK
    return OTHER if action is None else action


def no_kinds(trajectory: Trajectory) -> np.ndarray:
    """Call every token `other`."""
    return np.zeros(len(trajectory.response_ids), dtype=np.int8)


def turn_numbers(trajectory: Trajectory) -> np.ndarray:
    """Return the turn of each response token, int8 [response tokens]: from 1, 0 where nothing was sampled."""
    numbers = np.zeros(len(trajectory.response_ids), dtype=np.int8)
    for number, turn in enumerate(trajectory.turns, start=1):
        numbers[turn.start : turn.end] = min(number, MAX_TURN)
    return numbers


# Ratios over all ranks ---------------------------------------------------------------------------------------------


def ranked_values(cells: Sequence[np.ndarray], quantiles: Sequence[float], sum_ranks: SumRanks) -> np.ndarray:
    """Return for each cell and quantile q the `ceil(q * N)`-th smallest of its N values over all ranks.

    cells: this rank's values of each cell, float32, sorted, NaN last; all ranks give the same number of cells. Returns
    float32 [cells, quantiles], NaN where N is 0. The values are exact, whatever their number: each of the four
    collectives settles eight bits of them by counting the values below 256 limits (2 KiB for a cell and quantile).
    """
    keys = [_sortable(cell) for cell in cells]
    sizes = sum_ranks(torch.tensor([len(cell) for cell in cells], dtype=torch.int64)).numpy()
    wanted = np.maximum(1, np.ceil(np.outer(sizes, quantiles))).astype(np.int64)  # [cells, quantiles]
    found = np.zeros(wanted.shape, dtype=np.uint64)
    digits = np.arange(256, dtype=np.uint64)
    for shift in (24, 16, 8, 0):
        # the largest value whose bits so far are those found and whose next eight are at most each digit
        limits = (found[..., None] + ((digits + np.uint64(1)) << np.uint64(shift)) - np.uint64(1)).astype(np.uint32)
        below = np.stack([np.searchsorted(key, limit, side="right") for key, limit in zip(keys, limits)])
        below = sum_ranks(torch.from_numpy(below.astype(np.int64))).numpy()  # [cells, quantiles, 256]
        digit = np.minimum((below < wanted[..., None]).sum(-1), 255).astype(np.uint64)  # 256 only where N is 0
        found += digit << np.uint64(shift)
    values = _unsortable(found.astype(np.uint32))
    values[sizes == 0] = np.nan
    return values


def _sortable(values: np.ndarray) -> np.ndarray:
    """Return uint32 in the order of the float32 values; -0 equals 0, every NaN is the largest."""
    bits = np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _unsortable(keys: np.ndarray) -> np.ndarray:
    return np.where(keys >> 31, keys & np.uint32((1 << 31) - 1), ~keys).astype(np.uint32).view(np.float32)


class TokenValues(NamedTuple):
    """This rank's sampled tokens, each [N], sorted by log_ratio (float32 nats, NaN last)."""

    log_ratio: np.ndarray
    positive: np.ndarray  # bool
    turn: np.ndarray
    kind: np.ndarray


def sort_tokens(parts: Sequence[TokenValues]) -> TokenValues:
    """Return the tokens of all parts as one, sorted by log_ratio."""
    columns = [np.concatenate(column) for column in zip(*parts)]
    order = np.argsort(columns[0], kind="stable")
    return TokenValues(*(column[order] for column in columns))


def ratio_metrics(tables: Sequence[TokenValues], turns: int, sum_ranks: SumRanks) -> list[dict[str, float]]:
    """Return the ratio metrics of each table over all ranks: over all tokens, by turn, and by kind of token.

    tables: this rank's tokens, sorted; every rank gives as many. turns: the most a trajectory can have. A metric over
    no token is left out. Makes six collectives, whatever the tables hold.
    """
    turns = min(turns, MAX_TURN)
    groups = [("policy", ""), *(("turn", f"_{n}") for n in range(1, turns + 1)), *(("kind", f"_{k}") for k in KINDS)]
    cells = [cell for table in tables for cell in _cells(table, turns)]
    sums = torch.tensor([_sums(cell) for cell in cells], dtype=torch.float64)  # [cells, 3]
    sums = sum_ranks(sums).numpy().reshape(len(tables), len(groups), 2, 3)
    quantiles = ranked_values(cells, list(QUANTILES.values()), sum_ranks).reshape(len(tables), len(groups), 2, -1)
    rows = []
    for table in range(len(tables)):
        row: dict[str, float] = {}
        for (section, suffix), of_sign, ranked in zip(groups, sums[table], quantiles[table]):
            for sign, (tokens, ratios, drifted), values in zip(("", "positive_"), of_sign, ranked):
                if tokens == 0:
                    continue
                figures = {"ratio_mean": ratios / tokens} | dict(zip(QUANTILES, map(_ratio, values)))
                if sign:
                    figures["drift_frac"] = drifted / tokens
                elif suffix:
                    figures["token_frac"] = tokens / sums[table, 0, 0, 0]
                row |= {f"{section}/{sign}{name}{suffix}": float(value) for name, value in figures.items()}
        rows.append(row)
    return rows


def _cells(table: TokenValues, turns: int) -> list[np.ndarray]:
    """Cut a sorted table: all tokens, each turn, each kind; of each first all, then those of positive advantage."""
    masks = [np.ones(len(table.turn), dtype=bool)]
    masks += [table.turn == number for number in range(1, turns + 1)]
    masks += [table.kind == kind for kind in range(len(KINDS))]
    return [table.log_ratio[m] for mask in masks for m in (mask, mask & table.positive)]


def _sums(log_ratio: np.ndarray) -> tuple[float, float, float]:
    """Number of tokens, sum of their ratios, number below `DRIFTED`."""
    ratio = np.exp(np.minimum(log_ratio, MAX_EXPONENT), dtype=np.float64)
    return float(len(ratio)), float(ratio.sum()), float((ratio < DRIFTED).sum())


def _ratio(log_ratio: float) -> float:
    return math.exp(min(log_ratio, MAX_EXPONENT)) if not math.isnan(log_ratio) else math.nan


# What the updates of a step add up ---------------------------------------------------------------------------------


@dataclass
class UpdateStats:
    """One optimiser update as this rank saw it: sums over its micro-batches, and its tokens."""

    counts: Counts
    terms: dict[str, Tensor] = field(default_factory=dict)
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    underflows: list[Tensor] = field(default_factory=list)
    tokens: list[tuple[Tensor, ...]] = field(default_factory=list)  # the columns of `TokenValues`
    grad_norm: float | None = None  # None: the update was skipped


class StepStats:
    """Collects the updates of a step and reduces them once, at its end."""

    def __init__(self, underflow_ratio: float) -> None:
        """underflow_ratio: a response whose cumulative ratio is below it has underflowed (Definition 1)."""
        self.updates: list[UpdateStats] = []
        self._underflow_nats = math.log(underflow_ratio)

    def begin(self, counts: Counts) -> None:
        """Start an update on a minibatch with these global counts."""
        self.updates.append(UpdateStats(counts))

    def add(self, batch: Batch, result: PolicyLoss) -> None:
        """Add a micro-batch of the update that was begun last. Nothing is moved off the device yet."""
        update, sampled = self.updates[-1], batch.loss_mask.bool()
        for total, part in ((update.terms, result.terms), (update.token_sums, result.token_sums)):
            for name, value in part.items():
                total[name] = total[name] + value if name in total else value
        log_ratio = result.log_ratio.float()
        cumulative = torch.zeros_like(batch.loss_mask, dtype=torch.float32).masked_scatter(sampled, log_ratio).sum(1)
        update.underflows.append((cumulative < self._underflow_nats).sum())
        update.tokens.append((log_ratio, result.positive, batch.turn[sampled], batch.kind[sampled]))

    def end(self, grad_norm: float | None) -> None:
        """Finish the update with its gradient norm before clipping, None when it was skipped."""
        self.updates[-1].grad_norm = grad_norm

    def metrics(self, turns: int, sum_ranks: SumRanks) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Return the metrics of the step and those of each update, over all ranks, which must all call.

        turns: the most a trajectory can have. In the step's metrics a token counts once for each update.
        """
        sums = [
            [float(v) for v in (*u.terms.values(), *u.token_sums.values(), sum(u.underflows))] for u in self.updates
        ]
        totals = sum_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
        tables = [
            sort_tokens([TokenValues(*(column.cpu().numpy() for column in part)) for part in u.tokens])
            for u in self.updates
        ]
        step_ratios, *ratios = ratio_metrics([sort_tokens(tables), *tables], turns, sum_ranks)
        rows = []
        for update, total, ratio in zip(self.updates, totals, ratios):
            names = (*update.terms, *update.token_sums)
            sizes = [1] * len(update.terms) + [max(update.counts.tokens, 1)] * len(update.token_sums)
            row = {name: value / size for name, value, size in zip(names, total, sizes)} | ratio
            row["policy/underflow_frac"] = total[-1] / max(update.counts.responses, 1)
            if update.grad_norm is not None:
                row["optim/grad_norm"] = update.grad_norm
            rows.append(row)
        return self._step(rows) | step_ratios, rows

    def _step(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Average the updates: terms of the loss over updates, token sums over tokens, underflows over responses."""
        first = self.updates[0]
        weights = {name: [1] * len(rows) for name in first.terms}
        weights |= {name: [u.counts.tokens for u in self.updates] for name in first.token_sums}
        weights["policy/underflow_frac"] = [u.counts.responses for u in self.updates]
        step = {
            name: sum(row[name] * w for row, w in zip(rows, weight)) / max(sum(weight), 1)
            for name, weight in weights.items()
        }
        norms = [u.grad_norm for u in self.updates if u.grad_norm is not None]
        return step | {"optim/grad_norm": sum(norms) / max(len(norms), 1)}


# The alarm ---------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A metric and how far it may go: to a fixed limit, or from the median of the steps before."""

    metric: str
    relation: Literal["above", "above by", "times", "below by share"]


# By the keys of the `drift` section of the config.
RULES = {
    "positive_drift_frac": Rule("policy/positive_drift_frac", "above"),
    "underflow_frac": Rule("policy/underflow_frac", "above"),
    "clip_frac": Rule("policy/clip_frac", "above"),
    "entropy_rise": Rule("policy/entropy_nats", "above by"),
    "entropy_fall": Rule("policy/entropy_nats", "below by share"),
    "grad_norm_rise": Rule("optim/grad_norm", "times"),
    "invalid_rise": Rule("rollout/invalid_frac", "above by"),
    "reward_fall": Rule("reward/mean", "below by share"),
    "engine_mismatch": Rule("policy/engine_mismatch", "above"),
}


class DriftStop(RuntimeError):
    """The drift alarm ended the run; the message says why and how to go on."""


class Alarm(NamedTuple):
    """One rule that is broken. since: first step in which it was. is_new: it sounds for the first time since then."""

    rule: str
    since: int
    is_new: bool
    text: str


class DriftAlarm:
    """Watches the metrics of the steps. It sounds for a rule that is broken `patience` steps in a row.

    A limit relative to the steps before is measured from the median of the latest `window` steps that did not break
    the rule, and holds once there are `patience` of them. The state is plain JSON and is part of a checkpoint, so a
    resumed run goes on as if it had not stopped.
    """

    def __init__(self, limits: Mapping[str, float | None], window: int, patience: int) -> None:
        """limits: a value, or None for off, for every key of `RULES`."""
        self.limits = {rule: limits[rule] for rule in RULES}
        self.window = window
        self.patience = patience
        self.rollbacks = 0
        self._steady: dict[str, list[float]] = {rule: [] for rule in RULES}
        self._broken: dict[str, list[tuple[int, float]]] = {rule: [] for rule in RULES}  # (step, value), without gap

    @property
    def calm(self) -> bool:
        """No rule was broken in the latest step."""
        return not any(self._broken.values())

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the metrics of a step; return the rules broken in it and in the `patience` - 1 before, or more.

        A metric that is absent or NaN says nothing: its rule stays as it was.
        """
        alarms = []
        for name, rule in RULES.items():
            limit, value = self.limits[name], metrics.get(rule.metric)
            if limit is None or value is None or math.isnan(value):
                continue
            steady, broken = self._steady[name], self._broken[name]
            base = median(steady) if len(steady) >= self.patience else None
            bound = limit if rule.relation == "above" else _bound(rule, limit, base)
            if bound is None or not (value < bound if rule.relation == "below by share" else value > bound):
                broken.clear()
                steady.append(value)
                del steady[: -self.window]
                continue
            broken.append((step, value))
            if len(broken) >= self.patience:
                text = _text(name, rule, limit, bound, base, [value for _, value in broken[-self.patience :]])
                alarms.append(Alarm(name, broken[0][0], len(broken) == self.patience, text))
        return alarms

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        steady, broken = ({rule: list(own) for rule, own in kept.items()} for kept in (self._steady, self._broken))
        return {"rollbacks": self.rollbacks, "steady": steady, "broken": broken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; an empty one is that of a new run."""
        self.rollbacks = state.get("rollbacks", 0)
        self._steady = {rule: list(state.get("steady", {}).get(rule, [])) for rule in RULES}
        self._broken = {rule: [(step, v) for step, v in state.get("broken", {}).get(rule, [])] for rule in RULES}


class Verdict(NamedTuple):
    """What to do about alarms. text: the reason, for a warning or as the error of a run that stops; "" for neither."""

    roll_back: bool
    stop: bool
    text: str


def judge(
    alarms: Sequence[Alarm],
    step: int,
    *,
    action: Literal["warn", "stop", "rollback"],
    good_step: int | None,
    rollback: int,
    max_rollbacks: int,
    lr_factor: float,
) -> Verdict:
    """Decide what follows the alarms of a step, of which there is at least one.

    good_step: of the newest checkpoint from before the first step that broke a rule, None when there is none.
    rollback: number that the next rollback would have, from 1; the one after `max_rollbacks` also stops the run.
    lr_factor: what each rollback multiplies the learning rate by.
    """
    what = f"drift alarm at step {step}: " + "; ".join(alarm.text for alarm in alarms)
    if action == "warn":
        return Verdict(False, False, what if any(alarm.is_new for alarm in alarms) else "")
    before = f"{'no checkpoint' if good_step is None else f'checkpoint step_{good_step}'} is from before it"
    if action == "stop":
        return Verdict(
            False,
            True,
            f"{what}. The run is saved at this step; {before}. Start another (name=...) with a lower optim.lr, with "
            "model.path=<a checkpoint>/model or anew, or go on with --resume and drift.action=warn or rollback",
        )
    if good_step is None:
        since = min(alarm.since for alarm in alarms)
        return Verdict(
            False,
            True,
            f"{what}. There is nothing to roll back to: {before}, which began in step {since}. Start another run "
            "(name=...) with a lower optim.lr or a smaller checkpoint.every_steps",
        )
    if rollback > max_rollbacks:
        return Verdict(
            True,
            True,
            f"{what}. Rolled back to step {good_step}, but not going on: drift.max_rollbacks = {max_rollbacks}. Start "
            "another run (name=...) with a lower optim.lr, or go on from there with --resume and "
            f"drift.max_rollbacks={rollback}",
        )
    return Verdict(
        True,
        False,
        f"{what}. Rolled back to step {good_step} (rollback {rollback} of {max_rollbacks}); going on at "
        f"{lr_factor**rollback:g} times the learning rate",
    )


def _bound(rule: Rule, limit: float, base: float | None) -> float | None:
    if base is None or (rule.relation == "times" and base == 0):  # nothing was learned from before, as at A = 0
        return None
    return {"above by": base + limit, "times": base * limit, "below by share": base * (1 - limit)}[rule.relation]


def _text(name: str, rule: Rule, limit: float, bound: float, base: float | None, values: Sequence[float]) -> str:
    side = "below" if rule.relation == "below by share" else "above"
    before = "" if base is None or rule.relation == "above" else f", {base:.3g} before"
    shown = ", ".join(f"{value:.3g}" for value in values)
    return f"{rule.metric} is {side} {bound:.3g} (drift.{name} = {limit:g}{before}): {shown}"
