"""Metrics of a step: sums that add up over ranks, the figures made of them, and where those are written.

A rank never averages. It counts and sums (`rollout_metrics`), the sums are added over the ranks, and `finalise` divides
them once, so a figure does not depend on how trajectories were spread. docs/metrics.md has every formula.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor

from sapo.reward import score
from sapo.types import Trajectory

_log = logging.getLogger(__name__)

# metric: (numerator, denominator), both keys of `rollout_metrics`
_MEANS = {
    "reward/mean": ("reward", "responses"),
    "reward/f1": ("f1", "responses"),
    "reward/em": ("em", "responses"),
    "rollout/searches": ("searches", "responses"),
    "rollout/turns": ("turns", "responses"),
    "rollout/response_tokens": ("response_tokens", "responses"),
    "rollout/sampled_tokens": ("sampled_tokens", "responses"),
    "rollout/turn_tokens": ("sampled_tokens", "turns"),
    "rollout/answered_frac": ("answered", "responses"),
    "rollout/truncated_frac": ("truncated", "responses"),
    "rollout/invalid_frac": ("invalid_turns", "turns"),
    "rollout/forged_frac": ("forged_turns", "turns"),
    "rollout/cut_turn_frac": ("cut_turns", "turns"),
    "group/zero_std_frac": ("equal_groups", "groups"),
}


def token_quantile(values: Tensor | Sequence[float], q: float) -> float:
    """Return the `ceil(q * N)`-th smallest of N values (the smallest for q = 0): one of them, never interpolated.

    values: [N] tensor of any float dtype, or a sequence; of all ranks when the figure is to be global. NaN when N is 0.
    Raises ValueError unless 0 <= q <= 1.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile needs 0 <= q <= 1, got {q}")
    values = torch.as_tensor(values).flatten()
    if values.numel() == 0:
        return math.nan
    # kthvalue has no size limit; torch.quantile refuses more than 16 million elements.
    return values.kthvalue(max(1, math.ceil(q * values.numel()))).values.item()


def rollout_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """Return one rank's sums and counts over its trajectories; sums of several ranks add up key by key.

    trajectories: whole groups, the `group_size` samples of a question side by side. rewards: one for each trajectory.
    The keys are the same for any input, an empty one included. Raises ValueError when the groups are not whole.
    """
    if len(rewards) != len(trajectories):
        raise ValueError(f"{len(trajectories)} trajectories need as many rewards, got {len(rewards)}")
    groups = range(0, len(trajectories), group_size)
    for start in groups:
        ids = [trajectory.question.id for trajectory in trajectories[start : start + group_size]]
        if len(ids) != group_size or len(set(ids)) != 1:
            raise ValueError(f"trajectories {start} to {start + group_size - 1} are not one group: questions {ids}")
    scores = [score(trajectory.answer, trajectory.question.golden_answers) for trajectory in trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "responses": float(len(trajectories)),
        "reward": float(sum(rewards)),
        "f1": sum((s.f1 for s in scores), 0.0),
        "em": sum((s.em for s in scores), 0.0),
        "searches": float(sum(t.searches for t in trajectories)),
        "response_tokens": float(sum(len(t.response_ids) for t in trajectories)),
        "sampled_tokens": float(sum(sum(t.loss_mask) for t in trajectories)),
        "answered": float(sum(t.answer is not None for t in trajectories)),
        "truncated": float(sum(t.truncated for t in trajectories)),
        "turns": float(len(turns)),
        "invalid_turns": float(sum(t.invalid_turns for t in trajectories)),
        "forged_turns": float(sum(turn.forged for turn in turns)),
        "cut_turns": float(sum(turn.finish == "length" for turn in turns)),
        "groups": float(len(groups)),
        "equal_groups": float(sum(len(set(rewards[start : start + group_size])) == 1 for start in groups)),
    }


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of all ranks into metrics; a metric whose count is 0 is left out."""
    return {
        name: sums[numerator] / sums[denominator]
        for name, (numerator, denominator) in _MEANS.items()
        if sums[denominator] > 0
    }


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl in the order of their steps; the last row of a step wins.

    A row that is not a JSON object with an integer `step`, such as the torn last line of a killed run, is passed over.
    A missing file has no rows.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def console_line(step: int, total_steps: int, metrics: Mapping[str, float | None], eta_s: float | None) -> str:
    """Return the progress line of one step; figures that `metrics` lacks are left out.

    >>> console_line(3, 60, {"reward/mean": 0.5, "policy/ratio_p01": 0.98, "rollout/tokens_per_s": 12345.6}, 125)
    'step  3/60  ETA 2m 05s  reward 0.500  ratio p01 0.980  12,346 tok/s'
    """
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("reward/em", "EM {:.3f}"),
        ("rollout/searches", "searches {:.2f}"),
        ("policy/ratio_p01", "ratio p01 {:.3f}"),
        ("rollout/tokens_per_s", "{:,.0f} tok/s"),
    )
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    if eta_s is not None:
        parts.append(f"ETA {format_duration(eta_s)}")
    parts += [text.format(metrics[name]) for name, text in shown if metrics.get(name) is not None]
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Return a duration for people.

    >>> [format_duration(s) for s in (7.4, 125, 7325, 200000)]
    ['7s', '2m 05s', '2h 02m', '2d 07h']
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600:02d}h"


class MetricsLogger:
    """Writes one row a step to `run_dir`/metrics.jsonl, to wandb where wanted, and to the console.

    A row is one JSON object, `step` first, written by a single append: a killed run leaves whole rows and at most one
    torn line. Values that are not finite are stored as null. wandb can fail in any way without harm to the run: a
    warning says so and it is not asked again. On a terminal the console line is redrawn in place, elsewhere each step
    is a plain line. With `enabled=False` (every rank but the first) nothing is written anywhere.
    """

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int,
        *,
        resume_step: int | None = None,
        enabled: bool = True,
        console: bool = True,
        wandb: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Open the log of a new run, or of one that goes on after `resume_step`, whose later rows are dropped.

        total_steps: for the ETA. wandb: keywords of `wandb.init`, with `mode` "disabled", "offline" or "online"; None
        is disabled. config: what wandb records as the run's configuration. stream: the console, by default stdout.
        Raises ValueError when `resume_step` is None and the log has rows already.
        """
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._console = console
        self._live = ""
        self._file: FileIO | None = None  # None: not enabled
        self._wandb: Any | None = None
        # Of the latest steps: (step, seconds when it was logged), for the ETA.
        self._times: deque[tuple[int, float]] = deque([(max(resume_step or 0, 0), time.monotonic())], maxlen=20)
        if not enabled:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        if resume_step is not None:
            _drop_rows_after(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            raise ValueError(f"{path} holds the metrics of an earlier run: resume that run or choose another run name")
        self._file = path.open("ab", buffering=0)
        if wandb is not None and wandb.get("mode", "online") != "disabled":
            self._wandb = _start_wandb(run_dir, wandb, config or {})

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of one step, once everything of that step is known."""
        if self._file is None:
            return
        row: dict[str, float | None] = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        if self._wandb is not None:
            try:
                self._wandb.log({name: value for name, value in row.items() if value is not None})
            except Exception as error:  # noqa: BLE001 - a run must not die of its logging service
                self.message(f"warning: wandb failed and is off for the rest of this run: {error}")
                self._wandb = None
        if self._times[-1][0] == step:
            self._times.pop()
        self._times.append((step, time.monotonic()))
        if self._console:
            self._show(console_line(step, self._total_steps, row, self._eta()))

    def message(self, text: str) -> None:
        """Print a line of text above the live line."""
        if self._file is None:
            return
        if self._live:
            self._stream.write("\r\x1b[K")
        self._stream.write(text + "\n" + self._live)
        self._stream.flush()

    def close(self) -> None:
        """Finish wandb and end the live line. Rows are on disk before that; calling it twice does no harm."""
        if self._live:
            self._stream.write("\n")
            self._stream.flush()
            self._live = ""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:  # noqa: BLE001 - as above
                self.message(f"warning: wandb failed to finish, its last rows may be missing there: {error}")
            self._wandb = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _eta(self) -> float | None:
        """Seconds to the last step at the mean pace of the latest steps; None before one is complete."""
        (first_step, first_s), (step, now_s) = self._times[0], self._times[-1]
        if step == first_step:
            return None
        return (self._total_steps - step) * (now_s - first_s) / (step - first_step)

    def _show(self, line: str) -> None:
        if not self._stream.isatty():
            self._stream.write(line + "\n")
        else:
            # A line that wraps cannot be redrawn in place.
            self._live = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r\x1b[K" + self._live)
        self._stream.flush()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _drop_rows_after(path: Path, step: int) -> None:
    """Rewrite metrics.jsonl with its rows up to `step`, through a temporary file: a kill leaves the old or the new."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _start_wandb(run_dir: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> Any | None:
    """Return the wandb run of this run folder, a new one or the same again after a resume; None when it cannot."""
    id_file = run_dir / "wandb_run_id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4), encoding="utf-8")
    try:
        import wandb  # slow to import and optional: only where it is wanted

        run = wandb.init(
            **options,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow" if options.get("mode") == "online" else None,
            name=run_dir.name,
            dir=run_dir,
            config=dict(config),
            settings=wandb.Settings(console="off", quiet=True, login_timeout=30, init_timeout=60, finish_timeout=120),
        )
        # Rows are placed by their own step: after a resume wandb's counter would refuse the steps done again.
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:  # noqa: BLE001 - no account, no network, no disk: no reason to stop training
        _log.warning(
            "wandb could not start, so this run is recorded in metrics.jsonl only: %s. Set logging.wandb.mode to "
            "offline (needs no account) or disabled, or run 'wandb login'.",
            error,
        )
        return None
