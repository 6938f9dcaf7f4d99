"""Metrics of a step: sums that add up over ranks, the figures made of them, and where those are written.

A rank never averages. It counts and sums (`rollout_metrics`), the sums are added over the ranks, and `finalise` divides
them once, so a figure does not depend on how trajectories were spread. docs/metrics.md has every formula.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import yaml

from sapo.reward import score
from sapo.types import Trajectory

_log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent.parent
ROW_FILES = ("updates.jsonl", "metrics.jsonl")
# The first part of every metric's name, in the order of a dashboard. `update`: figures of single updates.
SECTIONS = (
    "reward", "eval", "policy", "kind", "turn", "drift", "loss", "optim", "rollout", "group", "update", "time",
    "memory", "trajectories",
)  # fmt: skip

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
    rows = {row["step"]: row for row in _read_rows(Path(path))}
    return [rows[step] for step in sorted(rows)]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


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
    """Writes one row a step to `run_dir`/metrics.jsonl, one an update to updates.jsonl, to wandb and to the console.

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
        self._run_dir = Path(run_dir)
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._console = console
        self._live = ""
        self._files: dict[str, FileIO] = {}  # empty: not enabled
        self._wandb: Any | None = None
        self._updates = 0  # sent to wandb, the x axis of its update charts
        # Of the latest steps: (step, seconds when it was logged), for the ETA.
        self._times: deque[tuple[int, float]] = deque([(max(resume_step or 0, 0), time.monotonic())], maxlen=20)
        if not enabled:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / "metrics.jsonl"
        if resume_step is not None:
            for name in ROW_FILES:
                _drop_rows_after(self._run_dir / name, resume_step)
            self._updates = len(_read_rows(self._run_dir / "updates.jsonl"))
        elif path.exists() and path.stat().st_size > 0:
            raise ValueError(f"{path} holds the metrics of an earlier run: resume that run or choose another run name")
        self._open()
        if wandb is not None and wandb.get("mode", "online") != "disabled":
            self._wandb = _start_wandb(self._run_dir, wandb, config or {})

    def log(
        self, step: int, metrics: Mapping[str, float | None], updates: Sequence[Mapping[str, float | None]] = ()
    ) -> None:
        """Record the metrics of one step, once everything of that step is known, and those of its updates."""
        if not self._files:
            return
        rows = [
            {"step": step, "update": number} | {name: _finite(value) for name, value in update.items()}
            for number, update in enumerate(updates, start=1)
        ]
        row: dict[str, float | None] = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self._files["updates.jsonl"].write("".join(json.dumps(r, allow_nan=False) + "\n" for r in rows).encode())
        self._files["metrics.jsonl"].write(json.dumps(row, allow_nan=False).encode() + b"\n")
        for update in rows:
            self._updates += 1
            charted = {_update_name(name): v for name, v in update.items() if v is not None and _is_charted(name)}
            self._to_wandb(lambda run, row=charted | {"update": self._updates}: run.log(row))
        self._to_wandb(lambda run: run.log({name: value for name, value in row.items() if value is not None}))
        if self._times[-1][0] == step:
            self._times.pop()
        self._times.append((step, time.monotonic()))
        if self._console:
            self._show(console_line(step, self._total_steps, row, self._eta()))

    def table(self, key: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send rows of equal keys to wandb as one table; what is no scalar becomes JSON.

        key: its own for every table, as in trajectories/step_<step>: a second one would replace the first on the page.
        """

        def send(run: Any) -> None:
            import wandb

            cells = [[_cell(value) for value in row.values()] for row in rows]
            run.log({key: wandb.Table(columns=list(rows[0]), data=cells), "step": step})

        if rows:
            self._to_wandb(send)

    def rewind(self, step: int, undone: str | Path) -> None:
        """Go back to `step`: later rows are moved to files in the folder `undone`. wandb shows both, by their step."""
        if not self._files:
            return
        for name, file in self._files.items():
            file.close()
            later = [row for row in _read_rows(self._run_dir / name) if row["step"] > step]
            if later:
                Path(undone).mkdir(parents=True, exist_ok=True)
                (Path(undone) / name).write_text("".join(json.dumps(row) + "\n" for row in later), encoding="utf-8")
            _drop_rows_after(self._run_dir / name, step)
        self._open()
        self._times.clear()
        self._times.append((step, time.monotonic()))

    def message(self, text: str) -> None:
        """Print a line of text above the live line."""
        if not self._files:
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
        for file in self._files.values():
            file.close()
        self._to_wandb(lambda run: run.finish())
        self._wandb = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._files = {name: (self._run_dir / name).open("ab", buffering=0) for name in ROW_FILES}

    def _to_wandb(self, call: Callable[[Any], None]) -> None:
        """Do something with the wandb run, if there is one; when that fails, say so and never try again."""
        if self._wandb is None:
            return
        try:
            call(self._wandb)
        except Exception as error:  # noqa: BLE001 - a run must not die of its logging service
            self._wandb = None
            self.message(f"warning: wandb failed and is off for the rest of this run: {error}")

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


def _is_charted(name: str) -> bool:
    """Whether a figure of single updates is sent to wandb: those by turn and kind stay in updates.jsonl."""
    return name.startswith(("loss/", "policy/", "optim/"))


def _update_name(name: str) -> str:
    return f"update/{name.partition('/')[2]}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cell(value: Any) -> str | float | None:
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False)


def _drop_rows_after(path: Path, step: int) -> None:
    """Rewrite a file of rows with those up to `step`, through a temporary file: a kill leaves the old or the new."""
    rows = [row for row in _read_rows(path) if row["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _start_wandb(run_dir: Path, options: Mapping[str, Any], config: Mapping[str, Any]) -> Any | None:
    """Return the wandb run of this run folder, a new one or the same again after a resume; None when it cannot."""
    try:
        import wandb  # slow to import and optional: only where it is wanted

        id_file = run_dir / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
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
        for section in SECTIONS:
            run.define_metric(f"{section}/*", step_metric="update" if section == "update" else "step")
        code = wandb.Artifact(f"code-{run.id}", type="code")
        for path in code_files():
            code.add_file(str(path), name=str(path.relative_to(PROJECT)))
        run.log_artifact(code)
        return run
    except Exception as error:  # noqa: BLE001 - no account, no network, no disk: no reason to stop training
        _log.warning(
            "wandb could not start, so this run is recorded in metrics.jsonl only: %s. Set logging.wandb.mode to "
            "offline (needs no account) or disabled, or run 'wandb login'.",
            error,
        )
        return None


def code_files() -> list[Path]:
    """Return the project's own source and settings files, which are recorded with a run."""
    patterns = ("*.py", "sapo/**/*.py", "retriever/**/*.py", "configs/**/*.yaml", "requirements*.txt")
    return sorted(path for pattern in patterns for path in PROJECT.glob(pattern))


def dashboard_panels(names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Group metric names into panels: section -> title -> the metrics drawn in it, in the order of `SECTIONS`.

    The turns and the kinds of token of one figure share a panel, and so do a ratio's quantiles.

    >>> dashboard_panels(["turn/ratio_p01_2", "turn/ratio_p01_1", "policy/ratio_p01", "policy/ratio_min"])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'policy': {'ratio': ['policy/ratio_min', 'policy/ratio_p01']},
     'turn': {'ratio_p01': ['turn/ratio_p01_1', 'turn/ratio_p01_2']}}
    """
    panels: dict[str, dict[str, list[str]]] = {section: {} for section in SECTIONS}
    for name in sorted(names):
        section, _, figure = name.partition("/")
        if section in ("turn", "kind"):
            title = figure.rpartition("_")[0]
        elif section in ("policy", "update"):
            title = re.sub(r"ratio_(mean|min|p\d\d)$", "ratio", figure)
        else:
            title = figure
        if section in panels:
            panels[section].setdefault(title, []).append(name)
    return {section: of_section for section, of_section in panels.items() if of_section}


def make_dashboard(run_dir: Path) -> str:
    """Save a workspace of the run's wandb project with a panel for each metric of the run; return its address.

    Raises ValueError when the run has no metrics or settings, wandb-workspaces is not installed, or wandb refuses.
    """
    names = {name for row in read_metrics(run_dir / "metrics.jsonl") for name in row if name != "step"}
    names |= {_update_name(name) for row in _read_rows(run_dir / "updates.jsonl") for name in row if _is_charted(name)}
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        settings = config["logging"]["wandb"]
        project, entity = settings["project"], settings["entity"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{run_dir} holds no config.yaml of a run ({error}): give one such as runs/<name>") from None
    if not names:
        raise ValueError(f"{run_dir / 'metrics.jsonl'} has no rows yet: make the dashboard after the first step")
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ValueError(
            f"dashboards are built by the package wandb-workspaces, which cannot be imported ({error}): run `pip "
            "install wandb-workspaces`; without it wandb's own page groups a panel for each metric by the same sections"
        ) from None
    sections = [
        workspaces.Section(
            name=section,
            panels=[
                reports.LinePlot(title=title, x="update" if section == "update" else "step", y=metrics)
                for title, metrics in panels.items()
            ],
            is_open=section in ("reward", "policy", "kind", "eval"),
        )
        for section, panels in dashboard_panels(names).items()
    ]
    try:
        import wandb

        workspace = workspaces.Workspace(
            entity=entity or wandb.Api().default_entity, project=project, name="sapo", sections=sections
        )
        workspace.save()
    except Exception as error:  # noqa: BLE001 - account, network and server: their errors have no common class
        raise ValueError(
            f"wandb did not save the dashboard of project {project} ({error}): it needs an account (wandb login), the "
            "network, and a run that is there already (logging.wandb.mode online, or `wandb sync`)"
        ) from None
    return workspace.url


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m sapo.metrics dashboard RUN_DIR`; return the exit status."""
    parser = argparse.ArgumentParser(description="Make the wandb dashboard of a run.")
    parser.add_argument("command", choices=["dashboard"])
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/quickstart")
    options = parser.parse_args(arguments)
    try:
        print(make_dashboard(options.run_dir))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
