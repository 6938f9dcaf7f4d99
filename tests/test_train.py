"""The scripts end to end, on a world and a policy small enough for seconds."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import train
from sapo.batch import plan_step
from sapo.checkpoint import list_checkpoints
from sapo.loss import policy_loss
from sapo.rollout import rollout

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "world.entities=60", "world.distractors=12", "world.pool_words=12", "world.train_questions=60",
    "world.heldout_questions=20", "warm_start.vocab_size=420", "warm_start.hidden_size=64",
    "warm_start.intermediate_size=128", "warm_start.heads=2", "warm_start.demonstrations=2400", "world.hop_shares=[1.0]",
    "rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_tokens=30",
    "optim.minibatch_responses=8", "optim.steps=4", "eval.questions=12", "eval.every_steps=2", "eval.fault_free=false",
    "checkpoint.every_steps=2", "checkpoint.keep=null", "model.threads=1", "logging.trajectories_every_steps=2",
]  # fmt: skip


def arguments(tmp_path, *more):
    return ["--config", str(ROOT / "configs" / "quickstart.yaml"), f"output_dir={tmp_path}", *SMALL, *more]


def weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step}" / "model" / "model.safetensors")


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("runs")
    assert train.main(arguments(folder, "name=whole")) == 0
    return folder / "whole"


def test_a_run_leaves_everything_it_promises(whole):
    assert [row["step"] for row in rows(whole)] == [0, 1, 2, 3, 4]
    record = json.loads((whole / "run.json").read_text())
    assert (record["status"], record["steps_done"]) == ("finished", 4)
    assert {p.name for p in (whole / "eval").glob("*.json")} == {
        f"step_{step}_{decoding}.json" for step in (0, 2, 4) for decoding in ("greedy", "sampled")
    }
    assert (whole / "report.html").stat().st_size > 10_000 and (whole / "config.yaml").is_file()
    assert len((whole / "trajectories" / "step_2.jsonl").read_text().splitlines()) == 16
    last = rows(whole)[-1]
    for name in (
        "reward/f1", "reward/em", "rollout/searches", "rollout/turns", "rollout/truncated_frac", "rollout/invalid_frac",
        "rollout/tokens_per_s", "group/zero_std_frac", "loss/policy", "loss/drift_penalty", "policy/ratio_mean",
        "policy/ratio_min", "policy/ratio_p01", "policy/positive_ratio_p01", "policy/clip_frac", "policy/gate_frac",
        "policy/entropy_nats", "policy/approx_kl", "policy/engine_mismatch", "optim/grad_norm", "optim/lr",
        "time/rollout_s", "time/retrieval_s", "time/update_s", "memory/peak_bytes", "eval/heldout/em",
    ):  # fmt: skip
        assert name in last, name
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name in last:
        general = "eval/<benchmark>/" + name.split("/")[-1].removesuffix("_sampled") if name.startswith("eval/") else name
        assert name == "step" or f"`{general}`" in documented, f"docs/metrics.md does not define {name}"


def test_training_changes_the_weights_and_the_engine_agrees_with_the_trainer(whole):
    assert any(not torch.equal(weights(whole, 2)[name], weights(whole, 4)[name]) for name in weights(whole, 2))
    for row in rows(whole)[1:]:
        assert row["policy/engine_mismatch"] < 1e-5


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(whole):
    folder = whole.parent
    assert train.main(arguments(folder, "name=resumed", "optim.steps=2")) == 0
    assert train.main(arguments(folder, "name=resumed", "--resume")) == 0
    resumed = folder / "resumed"
    for name, tensor in weights(whole, 4).items():
        assert torch.equal(tensor, weights(resumed, 4)[name]), name
    timeless = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/")) and k != "rollout/tokens_per_s"}
        for row in rows(whole)
    ]
    assert timeless == [{k: row[k] for k in expected} for row, expected in zip(rows(resumed), timeless, strict=True)]


def test_a_finished_run_says_so_and_is_never_overwritten(whole, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    assert train.main(arguments(whole.parent, "name=whole", "--resume")) == 0
    assert "is finished: 4 steps" in capsys.readouterr().out
    assert train.main(arguments(whole.parent, "name=whole")) == 1
    assert "--resume" in capsys.readouterr().err
    assert train.main(arguments(whole.parent, "name=whole", "--resume", "loss.gamma=0")) == 1
    assert "loss.gamma" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_grpo_and_sapo_differ_in_one_line_of_the_config(whole):
    assert train.main(arguments(whole.parent, "name=grpo", "loss.gamma=0", "optim.steps=2")) == 0
    grpo, sapo = rows(whole.parent / "grpo"), rows(whole)
    assert grpo[1]["reward/f1"] == sapo[1]["reward/f1"]  # the same rollouts
    assert grpo[1]["loss/drift_penalty"] == 0.0
    assert any(row["loss/drift_penalty"] > 0 for row in sapo[1:])


def test_evaluate_reports_before_and_after_and_reuses_results(whole, capsys):
    assert evaluate.main(["--run", str(whole)]) == 0
    out = capsys.readouterr().out
    before, after = (rows(whole)[i]["eval/heldout/em"] for i in (0, -1))
    assert out.splitlines()[-1] == f"held-out EM: before {before:.3f} after {after:.3f} (greedy, n=12)"
    assert (whole / "eval" / "no_retrieval_greedy.json").is_file()
    stamp = (whole / "eval" / "step_4_greedy.json").stat().st_mtime_ns
    assert evaluate.main(["--run", str(whole), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {row["label"] for row in results} == {"before", "after 4 steps", "after, nothing retrieved"}
    assert (whole / "eval" / "step_4_greedy.json").stat().st_mtime_ns == stamp


def test_evaluate_takes_other_questions(whole, tmp_path, capsys):
    data = tmp_path / "mine.jsonl"
    data.write_text('{"id": 1, "question": "who", "golden_answers": ["x"]}\n' * 3)
    assert evaluate.main(["--run", str(whole), "--data", str(data), "--decoding", "greedy", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["n"] for row in results] == [3, 3]
    assert len((whole / "eval" / "mine_step_4_greedy.predictions.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["optim.minibatch_responses=7"], "optim.minibatch_responses = 7"),
        (["optim.minibatch=8"], "did you mean 'optim.minibatch_responses'"),
        (["retriever.url=http://127.0.0.1:9"], "127.0.0.1:9"),
        (["warm_start=null", "model.path=/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_settings_are_one_paragraph_before_any_work(tmp_path, capsys, override, message):
    assert train.main(arguments(tmp_path, "name=bad", "--dry-run", *override)) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "bad").exists()


def test_a_dry_run_of_the_paper_settings_stops_only_at_what_is_not_here(tmp_path, capsys):
    assert train.main(["--config", str(ROOT / "configs" / "qwen7b.yaml"), "--dry-run", f"output_dir={tmp_path}"]) == 1
    assert "data/" in capsys.readouterr().err


def test_ctrl_c_leaves_a_checkpoint_and_a_report(whole):
    folder = whole.parent
    command = [sys.executable, "train.py", *arguments(folder, "name=stopped", "optim.steps=500", "eval.every_steps=null")]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    run = folder / "stopped"
    for _ in range(600):
        if (run / "metrics.jsonl").is_file() and len(rows(run)) > 2:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
    record = json.loads((run / "run.json").read_text())
    done = record["steps_done"]
    assert record["status"] == "interrupted" and 2 <= done < 500
    assert (run / "checkpoints" / f"step_{done}" / "state.json").is_file() and (run / "report.html").is_file()


def test_two_processes_train_as_one(whole):
    """The same rollouts, losses and weights, through the launch command of `make quickstart-2`."""
    folder = whole.parent
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate_2cpu.yaml",
        "--main_process_port", "0", "train.py", *arguments(folder, "name=two", "optim.steps=2"),
    ]  # fmt: skip
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert json.loads((folder / "two" / "run.json").read_text())["world_size"] == 2
    one, two = rows(whole), rows(folder / "two")
    for name in ("reward/mean", "rollout/searches", "eval/heldout/em"):
        assert [row.get(name) for row in two] == [row.get(name) for row in one[:3]], name
    for name in ("loss/policy", "loss/drift_penalty", "optim/grad_norm", "policy/ratio_p01", "policy/entropy_nats"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-4, abs=1e-7), name
    difference = sum((weights(whole, 2)[n] - w).double().square().sum() for n, w in weights(folder / "two", 2).items())
    size = sum(w.double().square().sum() for w in weights(whole, 2).values())
    assert (difference / size).sqrt() < 1e-4


@pytest.mark.parametrize("name", ["f1", "em"])
def test_each_response_is_trained_with_its_own_advantage_and_the_trainers_own_logprobs(whole, monkeypatch, name):
    """What reaches the loss, against a scalar computation from the trajectories."""
    rolled, seen = [], []

    def spying_rollout(*args, **options):
        trajectories, times = rollout(*args, **options)
        rolled.extend(trajectories)
        return trajectories, times

    def spying_loss(logprobs, old_logprobs, advantages, mask, *args, **options):
        seen.append((logprobs.detach(), old_logprobs, advantages, mask))
        return policy_loss(logprobs, old_logprobs, advantages, mask, *args, **options)

    def spying_plan(*args, **options):
        planned.extend(minibatches := plan_step(*args, **options))
        return minibatches

    def score(reward_name, answer, golden_answers):
        assert golden_answers
        return {"f1": 1.0, "em": -2.0}[reward_name] * len(answer or "")  # unequal within every group that learns

    planned = []
    monkeypatch.setattr(train, "reward", score)
    monkeypatch.setattr(train, "rollout", spying_rollout)
    monkeypatch.setattr(train, "policy_loss", spying_loss)
    monkeypatch.setattr(train, "plan_step", spying_plan)
    settings = [f"name=spied_{name}", "optim.steps=1", "optim.epochs=2", f"reward.name={name}", "eval.at_start=false",
                "eval.questions=1", "optim.micro_batch_responses=3"]  # fmt: skip
    assert train.main(arguments(whole.parent, *settings)) == 0
    rolled = rolled[:16]  # the evaluation after the step goes another way, through sapo.evaluation

    groups: dict[str, list[float]] = {}
    for t in rolled:
        groups.setdefault(t.question.id, []).append(score(name, t.answer, t.question.golden_answers))
    assert any(len(set(rewards)) > 1 for rewards in groups.values()), "no group teaches anything: use another seed"
    expected = {}
    for t in rolled:
        rewards = groups[t.question.id]
        own = score(name, t.answer, t.question.golden_answers)
        spread = statistics.stdev(rewards)
        advantage = 0.0 if spread == 0 else (own - statistics.mean(rewards)) / (spread + 1e-6)
        expected.setdefault(tuple(t.ids), []).append((t.question.id, advantage))
    batches = [batch for minibatch in planned for batch in minibatch.micro_batches]
    assert len(batches) > 4 and len(seen) == 2 * len(batches)  # two epochs over every micro-batch
    rows = [
        (tuple(ids[:length].tolist()), float(advantage))
        for batch in batches
        for ids, length, advantage in zip(batch.input_ids, batch.lengths, batch.advantages)
    ]
    assert sorted(ids for ids, _ in rows) == sorted(tuple(t.ids) for t in rolled)
    for ids, advantage in rows:
        assert any(advantage == pytest.approx(a, abs=1e-6) for _, a in expected[ids])
    # Before the first update the ratio is exactly 1, in the packing of the updates.
    logprobs, old_logprobs, _, mask = seen[0]
    assert mask.any() and torch.equal(logprobs, old_logprobs)
    # The second epoch still compares with the logprobs of before the first update.
    for (_, first, advantages, _), (later, second, again, _) in zip(seen[: len(batches)], seen[len(batches) :]):
        assert torch.equal(first, second) and torch.equal(advantages, again) and not torch.equal(later, second)


def test_a_resume_before_the_first_checkpoint_starts_over(whole):
    folder = whole.parent
    assert train.main(arguments(folder, "name=early", "optim.steps=2")) == 0
    shutil.rmtree(folder / "early" / "checkpoints")
    assert train.main(arguments(folder, "name=early", "optim.steps=2", "--resume")) == 0
    assert [row["step"] for row in rows(folder / "early")] == [0, 1, 2]


def test_a_failed_run_records_the_steps_it_did(whole, monkeypatch):
    def failing(trainer, questions, step, roll_out=train.roll_out):
        if step == 4:
            raise ValueError("the retriever is down")
        return roll_out(trainer, questions, step)

    monkeypatch.setattr(train, "roll_out", failing)
    with pytest.raises(ValueError, match="is down"):
        train.main(arguments(whole.parent, "name=failed"))
    record = json.loads((whole.parent / "failed" / "run.json").read_text())
    assert (record["status"], record["steps_done"]) == ("failed", 3)


def test_prompts_that_never_fit_are_an_error(whole, capsys):
    assert train.main(arguments(whole.parent, "name=nofit", "rollout.max_prompt_tokens=2")) == 1
    assert "rollout.max_prompt_tokens = 2" in capsys.readouterr().err


def test_evaluate_never_reuses_the_result_of_other_questions(whole, tmp_path):
    for folder, question in (("a", "who"), ("b", "where")):
        (tmp_path / folder).mkdir()
        data = tmp_path / folder / "same.jsonl"
        data.write_text(json.dumps({"id": 1, "question": question, "golden_answers": ["x"]}) + "\n")
        assert evaluate.main(["--run", str(whole), "--data", str(data), "--decoding", "greedy"]) == 0
        saved = (whole / "eval" / "same_step_4_greedy.predictions.jsonl").read_text()
        assert json.loads(saved)["question"] == question


def test_evaluate_of_a_run_that_never_started_says_so(whole, capsys):
    folder = whole.parent / "unstarted"
    folder.mkdir()
    (folder / "config.yaml").write_text((whole / "config.yaml").read_text())
    assert evaluate.main(["--run", str(folder)]) == 1
    assert "--resume" in capsys.readouterr().err


def test_a_moved_run_resumes(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step_4")
    (tmp_path / "cache").symlink_to(whole.parent / "cache")
    assert train.main(arguments(tmp_path, "name=whole", "--resume")) == 0
    for name, tensor in weights(whole, 4).items():
        assert torch.equal(tensor, weights(tmp_path / "whole", 4)[name]), name


def test_a_resume_under_another_zero_stage_is_refused(whole, capsys):
    assert train.main(arguments(whole.parent, "name=whole", "--resume", "optim.steps=5", "distributed.zero_stage=2")) == 1
    assert "distributed.zero_stage" in capsys.readouterr().err


def test_only_whole_checkpoints_count_and_the_rests_of_a_kill_are_cleared(whole):
    folder = whole.parent
    assert train.main(arguments(folder, "name=kept", "optim.steps=2", "checkpoint.every_steps=1")) == 0
    checkpoints = folder / "kept" / "checkpoints"
    (checkpoints / "tmp_step_3" / "model").mkdir(parents=True)  # killed while it was saved
    (checkpoints / "step_9").mkdir()  # no state.json: not complete
    assert [p.name for p in list_checkpoints(folder / "kept")] == ["step_1", "step_2"]
    assert train.main(arguments(folder, "name=kept", "optim.steps=4", "checkpoint.keep=2", "--resume")) == 0
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_2", "step_4", "step_9"]
