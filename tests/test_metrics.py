import io
import itertools
import math
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from sapo import metrics
from sapo.metrics import (
    MetricsLogger,
    code_files,
    console_line,
    dashboard_panels,
    finalise,
    format_duration,
    read_metrics,
    rollout_metrics,
)
from sapo.types import Question, Trajectory, Turn

LONG_ROW = {f"name/{i}": i / 7 for i in range(300)}  # about 10 kB: a kill can fall inside its write


def test_rollout_metrics_of_two_hand_written_groups() -> None:
    expected = {
        "reward/mean": (1.0 + 0.0 + 0.5 + 0.5) / 4,
        "reward/f1": (1.0 + 0.0 + 2 / 3 + 0.0) / 4,
        "reward/em": 1 / 4,
        "rollout/searches": (1 + 0 + 2 + 0) / 4,
        "rollout/turns": (2 + 1 + 3 + 2) / 4,
        "rollout/response_tokens": (9 + 4 + 12 + 5) / 4,
        "rollout/sampled_tokens": (5 + 4 + 7 + 5) / 4,
        "rollout/turn_tokens": 21 / 8,
        "rollout/answered_frac": 2 / 4,
        "rollout/truncated_frac": 1 / 4,
        "rollout/invalid_frac": 3 / 8,
        "rollout/forged_frac": 1 / 8,
        "rollout/cut_turn_frac": 2 / 8,
        "group/zero_std_frac": 1 / 2,
    }
    assert finalise(rollout_metrics(_groups(), [1.0, 0.0, 0.5, 0.5], 2)) == pytest.approx(expected, abs=1e-15)


def test_rollout_metrics_add_up_over_ranks() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5]
    whole = rollout_metrics(_groups(), rewards, 2)
    ranks = [rollout_metrics(_groups()[:2], rewards[:2], 2), rollout_metrics(_groups()[2:], rewards[2:], 2)]
    ranks.append(rollout_metrics([], [], 2))  # a rank may have nothing
    assert all(list(rank) == list(whole) for rank in ranks)
    assert {key: sum(rank[key] for rank in ranks) for key in whole} == whole


def test_metrics_without_a_count_are_left_out() -> None:
    assert finalise(rollout_metrics([], [], 4)) == {}


def test_equal_rewards_are_told_by_value_not_by_a_rounded_deviation() -> None:
    group = [_trajectory("q", i, "", []) for i in range(10)]
    assert finalise(rollout_metrics(group, [2 / 3] * 10, 10))["group/zero_std_frac"] == 1.0
    assert finalise(rollout_metrics(group, [2 / 3] * 9 + [2 / 3 + 1e-9], 10))["group/zero_std_frac"] == 0.0


def test_broken_groups_are_refused() -> None:
    a, b = _trajectory("a", 0, "", []), _trajectory("b", 0, "", [])
    with pytest.raises(ValueError, match=r"trajectories 0 to 1 are not one group: questions \['a', 'b'\]"):
        rollout_metrics([a, b], [0.0, 0.0], 2)
    with pytest.raises(ValueError, match=r"trajectories 2 to 3 are not one group: questions \['a'\]"):
        rollout_metrics([a, a, a], [0.0] * 3, 2)
    with pytest.raises(ValueError, match="2 trajectories need as many rewards, got 1"):
        rollout_metrics([a, a], [0.0], 2)


def test_one_row_a_step_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLogger(tmp_path / "run", 3, stream=io.StringIO())
    log.log(1, {"reward/em": 0.25, "memory/peak_bytes": 7, "optim/grad_norm": math.inf, "policy/ref_kl": None})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # before close
    assert text == (
        '{"step": 1, "reward/em": 0.25, "memory/peak_bytes": 7, "optim/grad_norm": null, "policy/ref_kl": null}\n'
    )
    log.log(2, {"reward/em": math.nan})
    log.close()
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_resume_drops_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "a"')
    with MetricsLogger(tmp_path, 4, resume_step=2, stream=io.StringIO()) as log:
        assert path.read_bytes() == b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'
        log.log(3, {"a": 33})
    assert path.read_bytes() == b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 33}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "updates.jsonl"]


def test_updates_have_a_file_of_their_own_that_resumes_with_the_steps(tmp_path: Path) -> None:
    log = MetricsLogger(tmp_path, 4, stream=io.StringIO())
    log.log(1, {"a": 1.0}, [{"b": 0.5}, {"b": math.nan}])
    log.log(2, {"a": 2.0}, [{"b": 2.5}])
    log.close()
    path = tmp_path / "updates.jsonl"
    first = b'{"step": 1, "update": 1, "b": 0.5}\n{"step": 1, "update": 2, "b": null}\n'
    assert path.read_bytes() == first + b'{"step": 2, "update": 1, "b": 2.5}\n'
    MetricsLogger(tmp_path, 4, resume_step=1, stream=io.StringIO()).close()
    assert path.read_bytes() == first


def test_a_rewound_log_keeps_the_rows_undone_elsewhere(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, 4, stream=io.StringIO()) as log:
        for step in (1, 2, 3):
            log.log(step, {"a": step}, [{"b": step}])
        log.rewind(1, tmp_path / "undone")
        log.log(2, {"a": 20}, [{"b": 20}])
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}, {"step": 2, "a": 20}]
    assert read_metrics(tmp_path / "undone" / "metrics.jsonl") == [{"step": 2, "a": 2}, {"step": 3, "a": 3}]
    assert read_metrics(tmp_path / "updates.jsonl")[-1] == {"step": 2, "update": 1, "b": 20}
    assert [row["b"] for row in read_metrics(tmp_path / "undone" / "updates.jsonl")] == [2, 3]


def test_a_new_run_never_continues_or_overwrites_an_old_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds the metrics of an earlier run: resume"):
        MetricsLogger(tmp_path, 4)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = MetricsLogger(tmp_path / "run", 4, enabled=False, wandb={"mode": "offline"}, stream=stream)
    log.log(1, {"reward/em": 1.0})
    log.message("hello")
    log.close()
    assert stream.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_whole_rows(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_log_forever, args=(tmp_path,))
    process.start()
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 20
    while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    rows = read_metrics(path)
    assert len(rows) > 10 and [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row == {"step": row["step"]} | LONG_ROW for row in rows)
    assert len(path.read_bytes().split(b"\n")) <= len(rows) + 1


def test_read_metrics_takes_the_last_row_of_a_step_and_passes_over_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 2}\n[1]\n{"a": 1}\n\xff\xfe\n{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n{"step"')
    assert read_metrics(path) == [{"step": 1, "a": 2}, {"step": 2}]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_console_line_shows_what_is_known() -> None:
    row = {
        "reward/mean": 0.6124,
        "reward/em": 0.58,
        "rollout/searches": 1.708,
        "policy/ratio_p01": 0.9871,
        "rollout/tokens_per_s": 14230.4,
        "loss/policy": 1.0,
    }
    assert console_line(12, 60, row, 125.2) == (
        "step 12/60  ETA 2m 05s  reward 0.612  EM 0.580  searches 1.71  ratio p01 0.987  14,230 tok/s"
    )
    assert console_line(0, 420, {"reward/em": None}, None) == "step   0/420"


def test_format_duration() -> None:
    assert [format_duration(s) for s in (0, 59.4, 59.6, 3599.6, 86399.9)] == ["0s", "59s", "1m 00s", "1h 00m", "1d 00h"]


def test_plain_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    log = MetricsLogger(tmp_path, 10, stream=stream)
    for step, seconds in ((0, 5.0), (1, 3.0), (2, 5.0)):
        now[0] += seconds
        log.log(step, {})
        if step == 1:
            log.message("saved")
    log.close()
    # The pace starts at the row of step 0: 9 steps at 3 s, then 8 at (3 + 5) / 2 s.
    assert stream.getvalue() == "step  0/10\nstep  1/10  ETA 27s\nsaved\nstep  2/10  ETA 32s\n"


def test_eta_follows_the_latest_steps_and_counts_from_the_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    log = MetricsLogger(tmp_path, 100, resume_step=50, stream=stream)
    for step in range(51, 91):
        now[0] += 10.0 if step <= 70 else 1.0
        log.log(step, {})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step  51/100  ETA 8m 10s")  # 49 steps of 10 s
    assert lines[-1].startswith("step  90/100  ETA 10s")  # the slow ones are 20 rows back


def test_live_line_on_a_terminal_is_redrawn_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "23")
    stream = Terminal()
    log = MetricsLogger(tmp_path, 9, resume_step=0, stream=stream)
    log.log(0, {"reward/mean": 0.5, "reward/em": 0.25})
    log.message("saved")
    log.close()
    line = "step 0/9  reward 0.500"
    assert stream.getvalue() == f"\r\x1b[K{line}\r\x1b[Ksaved\n{line}\n"


def test_wandb_offline_needs_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    options = {"mode": "offline", "project": "p", "entity": None, "group": None}
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    table = [{"id": "q1", "em": 1, "turns": [{"text": "<search>é</search>"}]}]
    stream = io.StringIO()
    with MetricsLogger(tmp_path, 2, wandb=options, config={"seed": 0}, stream=stream) as log:
        for step in (1, 2):
            log.log(step, {"reward/em": 0.5, "optim/grad_norm": math.nan}, [{"policy/clip_frac": 0.25}])
            log.table(f"trajectories/step_{step}", step, table)
    assert "warning" not in stream.getvalue()
    run_id = (tmp_path / "wandb_run_id").read_text()
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    wanted = [b"reward/em", b"update/clip_frac", b"trajectories/step_1", b"trajectories/step_2"]
    wanted.append(b"code-" + run_id.encode())
    deadline = time.monotonic() + 20  # wandb's own process writes the file a moment later
    while not all(name in file.read_bytes() for name in wanted) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [name for name in wanted if name not in file.read_bytes()] == []
    assert len([*file.parent.glob("files/media/table/trajectories/*.table.json")]) == 2
    # Going on later is the same run.
    with MetricsLogger(tmp_path, 2, resume_step=1, wandb=options, stream=stream) as log:
        log.log(2, {"reward/em": 0.5})
    assert (tmp_path / "wandb_run_id").read_text() == run_id
    assert len({*tmp_path.glob("wandb/*run-*/run-*.wandb")}) == 2
    assert {path.name for path in tmp_path.glob("wandb/*run-*/run-*.wandb")} == {f"run-{run_id}.wandb"}


def test_the_recorded_code_is_the_projects_own() -> None:
    names = {str(path.relative_to(metrics.PROJECT)) for path in code_files()}
    assert {"train.py", "sapo/loss.py", "sapo/engine/hf.py", "retriever/index.py", "configs/quickstart.yaml"} <= names
    assert not [name for name in names if name.startswith((".", "runs", "models", "tests"))]


def test_a_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def fail(**options: object) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", fail)
    with MetricsLogger(tmp_path, 2, wandb={"mode": "online"}, stream=io.StringIO()) as log:
        log.log(1, {"reward/em": 0.5})
    assert "api_key not configured" in caplog.text and "logging.wandb.mode" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/em": 0.5}]


def test_a_wandb_that_breaks_later_is_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    class Broken:
        calls = 0

        id = "abc"

        def define_metric(self, name: str, step_metric: str) -> None:
            pass

        def log_artifact(self, artifact: object) -> None:
            pass

        def finish(self) -> None:
            raise AssertionError("it is not asked again")

        def log(self, row: dict[str, float]) -> None:
            Broken.calls += 1
            raise ConnectionError("service died")

    monkeypatch.setattr(wandb, "init", lambda **options: Broken())
    stream = io.StringIO()
    with MetricsLogger(tmp_path, 2, wandb={"mode": "offline"}, stream=stream) as log:
        log.log(1, {})
        log.table("trajectories/step_1", 1, [{"a": 1}])
        log.log(2, {}, [{"policy/clip_frac": 0.1}])
    assert Broken.calls == 1 and stream.getvalue().count("warning: wandb failed") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_a_dashboard_has_a_panel_for_every_figure() -> None:
    names = ["kind/ratio_p01_think", "kind/ratio_p01_query", "kind/ratio_p50_query", "update/ratio_p01", "reward/em"]
    assert dashboard_panels([*names, "mine/own"]) == {
        "reward": {"em": ["reward/em"]},
        "kind": {
            "ratio_p01": ["kind/ratio_p01_query", "kind/ratio_p01_think"],
            "ratio_p50": ["kind/ratio_p50_query"],
        },
        "update": {"ratio": ["update/ratio_p01"]},
    }


def test_a_dashboard_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert metrics.main(["dashboard", str(tmp_path)]) == 1
    assert "config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"logging": {"wandb": {"project": "p", "entity": None}}}))
    assert metrics.main(["dashboard", str(tmp_path)]) == 1
    assert "no rows yet" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/em": 1}\n')
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert metrics.main(["dashboard", str(tmp_path)]) == 1
    assert "pip install wandb-workspaces" in capsys.readouterr().err


def _log_forever(run_dir: Path) -> None:
    log = MetricsLogger(run_dir, 10**9, console=False)
    for step in itertools.count():
        log.log(step, LONG_ROW)


def _turn(action: str, mask_tokens: int = 0, finish: str = "stop", forged: bool = False, observation: int = 0) -> Turn:
    return Turn(0, mask_tokens, "", action, "", finish, forged, observation_tokens=observation)


def _trajectory(
    question: str, sample: int, mask: str, turns: list[Turn], answer: str | None = None, truncated: bool = False
) -> Trajectory:
    loss_mask = [int(char) for char in mask]
    return Trajectory(
        Question(question, "Who?", ("Ada Byron",)),
        sample,
        [1, 2],
        [5] * len(mask),
        loss_mask,
        [0.0] * len(mask),
        tuple(turns),
        answer,
        truncated,
    )


def _groups() -> list[Trajectory]:
    """Two groups of two samples."""
    search = _turn("search", observation=3)
    return [
        _trajectory("a", 0, "111000011", [search, _turn("answer")], answer="ada byron"),
        _trajectory("a", 1, "1111", [_turn("invalid", finish="length")], truncated=True),
        # The last search is the final turn: it has no observation and does not count.
        _trajectory("b", 0, "110001100111", [search, search, _turn("search", finish="length")], answer="Byron"),
        _trajectory("b", 1, "11111", [_turn("invalid", forged=True), _turn("invalid", finish="eos")]),
    ]
