"""The scripts end to end, on a world and a policy small enough for seconds."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import sapo.checkpoint
import train
from retriever.client import RetrieverClient, start_server, stop_server
from retriever.types import RetrieverError
from sapo.baselines import llds
from sapo.batch import plan_step
from sapo.checkpoint import list_checkpoints, locked
from sapo.data import main as data_main
from sapo.loss import policy_loss
from sapo.metrics import SECTIONS
from sapo.rollout import RolloutTimes, rollout
from sapo.types import Question, Trajectory

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "world.entities=60", "world.distractors=12", "world.pool_words=12", "world.train_questions=60",
    "world.heldout_questions=20", "warm_start.vocab_size=420", "warm_start.hidden_size=64",
    "warm_start.intermediate_size=128", "warm_start.heads=2", "warm_start.demonstrations=2400", "world.hop_shares=[1.0]",
    "rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_tokens=30",
    "optim.minibatch_responses=8", "optim.steps=4", "eval.questions=12", "eval.every_steps=2", "eval.fault_free=false",
    "checkpoint.every_steps=2", "checkpoint.keep_last=null", "model.threads=1", "logging.trajectories_every_steps=2",
]  # fmt: skip


def arguments(tmp_path, *more):
    return ["--config", str(ROOT / "configs" / "quickstart.yaml"), f"output_dir={tmp_path}", *SMALL, *more]


def weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step}" / "model" / "model.safetensors")


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_two_processes(folder, *more):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate_2cpu.yaml",
        "--main_process_port", "0", "train.py", *arguments(folder, *more),
    ]  # fmt: skip
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)


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


def test_docs_define_every_metric_and_no_other(whole):
    documented = set(re.findall(r"`([a-z]+/(?!<figure>)[a-z0-9_<>/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    written = {name for row in rows(whole) for name in row} - {"step"}
    general = set()
    for name in written:
        section, figure = name.split("/")[0], name.split("/")[-1]
        assert section in SECTIONS, f"{name}: its section is not in sapo.metrics.SECTIONS"
        if section == "eval":
            name = f"eval/<benchmark>/{figure.removesuffix('_sampled')}"
        elif section in ("turn", "kind"):
            name = re.sub("_[a-z0-9]+$", "_<n>" if section == "turn" else "_<kind>", name)
        general.add(name)
    assert general - documented == set()
    optional = {"policy/ref_kl", "policy/mismatch_weight_mean", "policy/off_policy_frac", "group/resample_tries",
                "group/replaced_questions"}  # fmt: skip
    assert documented - general - optional == set()
    update = json.loads((whole / "updates.jsonl").read_text().splitlines()[0])
    assert {"update", "loss/policy", "policy/ratio_p50", "kind/ratio_mean_tags", "optim/grad_norm"} <= set(update)
    assert update["policy/ratio_min"] == update["policy/ratio_p99"] == 1.0  # before the first update


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


def test_adapters_train_against_the_model_without_them_and_resume_exactly(whole, tmp_path):
    """One process, the same in two parts, and two ranks of ZeRO-3; no second model is loaded as the reference."""
    folder = whole.parent
    settings = ["model.lora.rank=4", "loss.ref_kl_beta=0.1", "optim.lr=2e-2", "eval.at_start=false"]
    assert train.main(arguments(folder, "name=lora", *settings, "optim.steps=2")) == 0
    assert train.main(arguments(folder, "name=lora_resumed", *settings, "optim.steps=1")) == 0
    assert train.main(arguments(folder, "name=lora_resumed", *settings, "optim.steps=2", "--resume")) == 0
    run_two_processes(folder, "name=lora_two", *settings, "optim.steps=2", "distributed.zero_stage=3")
    one, resumed, two = (folder / name for name in ("lora", "lora_resumed", "lora_two"))
    start = load_file(Path(json.loads((one / "run.json").read_text())["start_model"]) / "model.safetensors")
    assert weights(one, 2).keys() == start.keys()  # an ordinary model, with the adapters added in
    changed = {name for name, weight in weights(one, 2).items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if "_proj.weight" in name}
    for name, weight in weights(one, 2).items():
        assert torch.equal(weights(resumed, 2)[name], weight), name
    adapter = "checkpoints/step_2/adapter/adapter_model.safetensors"
    assert load_file(one / adapter).keys() == load_file(two / adapter).keys()
    assert 0 < rows(one)[-1]["policy/ref_kl"] == pytest.approx(rows(two)[-1]["policy/ref_kl"], rel=1e-3)
    difference = sum((weights(two, 2)[n] - w).double().square().sum() for n, w in weights(one, 2).items())
    moved = sum((start[n] - w).double().square().sum() for n, w in weights(one, 2).items())
    assert (difference / moved).sqrt() < 1e-3


def test_the_reference_is_the_same_offloaded_and_sharded(whole):
    """One process, the same with the frozen model in CPU memory between its uses, and two ranks of ZeRO-3."""
    folder = whole.parent
    beta = ["loss.ref_kl_beta=0.1", "optim.steps=2", "eval.at_start=false"]
    assert train.main(arguments(folder, "name=ref", *beta)) == 0
    assert train.main(arguments(folder, "name=ref_offload", *beta, "distributed.offload_reference=true")) == 0
    run_two_processes(folder, "name=ref_two", *beta, "distributed.zero_stage=3")
    one, offloaded, two = (rows(folder / name)[-1] for name in ("ref", "ref_offload", "ref_two"))
    assert one["policy/ref_kl"] > 0
    for key in ("policy/ref_kl", "loss/policy", "optim/grad_norm"):
        assert offloaded[key] == one[key]
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-7), key


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
        (["retriever.url=[http://h:8, h:9]"], "retriever.url = 'h:9' is no server address"),
        (["retriever.url=http://h", "retriever.token_env=NO_SUCH"], "retriever.token_env = 'NO_SUCH': this environment"),
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


@pytest.mark.parametrize(("zero_stage", "node_server"), [(0, "always"), (3, "never")])
def test_two_processes_train_as_one(whole, zero_stage, node_server):
    """The same rollouts, losses and weights, through the launch command of `make quickstart-2`.

    The ranks roll out different questions, so they make different numbers of forwards. `always`: they search by one
    server, which the first of them starts.
    """
    two_dir = whole.parent / f"two_{zero_stage}"
    settings = [f"distributed.zero_stage={zero_stage}", f"retriever.node_server={node_server}"]
    run_two_processes(whole.parent, f"name={two_dir.name}", "optim.steps=2", *settings)
    assert json.loads((two_dir / "run.json").read_text())["world_size"] == 2
    one, two = rows(whole), rows(two_dir)
    for name in ("reward/mean", "rollout/searches", "eval/heldout/em"):
        assert [row.get(name) for row in two] == [row.get(name) for row in one[:3]], name
    for name in ("loss/policy", "loss/drift_penalty", "optim/grad_norm", "policy/ratio_p01", "policy/entropy_nats"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-4, abs=1e-7), name
    difference = sum((weights(whole, 2)[n] - w).double().square().sum() for n, w in weights(two_dir, 2).items())
    size = sum(w.double().square().sum() for w in weights(whole, 2).values())
    assert (difference / size).sqrt() < 1e-4


def test_a_run_goes_on_while_its_retrieval_server_is_restarted(whole, monkeypatch):
    """A server that is down for a while changes no trajectory and no weight."""
    (corpus,) = (whole.parent / "cache").glob("world-*/corpus.jsonl")
    process, url = start_server(corpus, corpus.parent / "index")
    processes, searches = [process], []
    ask = RetrieverClient.search

    def search(client, queries, k):
        searches.append(len(queries))
        if len(searches) == 3:
            stop_server(processes[0])
            again = partial(start_server, corpus, corpus.parent / "index", port=url.rsplit(":", 1)[1])
            threading.Timer(0.5, lambda: processes.append(again()[0])).start()
        return ask(client, queries, k)

    monkeypatch.setattr(RetrieverClient, "search", search)
    settings = ("name=restarted", f"retriever.url={url}", "optim.steps=2")
    assert train.main(arguments(whole.parent, *settings)) == 0
    assert len(processes) == 2 and len(searches) > 3
    stop_server(processes[1])
    for name, tensor in weights(whole, 2).items():
        assert torch.equal(tensor, weights(whole.parent / "restarted", 2)[name]), name


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

    def score(trajectory, reward_name, **options):
        return {"f1": 1.0, "em": -2.0}[reward_name] * len(trajectory.answer or "")  # unequal in groups that learn

    def spying_forward(policy, *args):
        forwards.append(torch.is_grad_enabled())
        return forward(policy, *args)

    planned, forwards, forward = [], [], train.Policy.forward
    monkeypatch.setattr(train.Policy, "forward", spying_forward)
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
        groups.setdefault(t.question.id, []).append(score(t, name))
    assert any(len(set(rewards)) > 1 for rewards in groups.values()), "no group teaches anything: use another seed"
    expected = {}
    for t in rolled:
        rewards = groups[t.question.id]
        own = score(t, name)
        spread = statistics.stdev(rewards)
        advantage = 0.0 if spread == 0 else (own - statistics.mean(rewards)) / (spread + 1e-6)
        expected.setdefault(tuple(t.ids), []).append((t.question.id, advantage))
    batches = [batch for minibatch in planned for batch in minibatch.micro_batches]
    assert len(batches) > 4 and len(seen) == 2 * len(batches)  # two epochs over every micro-batch
    # No logprob is computed twice: the first minibatch's old ones are those of its update.
    assert forwards.count(True) == len(seen)
    assert forwards.count(False) == len(batches) - len(planned[0].micro_batches)
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


def sampled_groups(monkeypatch, count, tries, world_size):
    """Step 1 of 4 places by `train.sample_groups` on every rank: of each its result and the questions of each rollout.

    Of the questions 0, 1, 2, ... every third has only right answers, the next only wrong ones, the next of both kinds.
    """
    questions = [Question(str(n), "", ("yes",)) for n in range(count)]
    config = types.SimpleNamespace(
        seed=0,
        data=types.SimpleNamespace(shuffle=False),
        rollout=types.SimpleNamespace(group_size=2, questions_per_step=4, resample_tries=tries),
        reward=types.SimpleNamespace(name="em", format_weight=0.0),
        protocol=types.SimpleNamespace(template="plain"),
    )
    barrier, shared, rolled = threading.Barrier(world_size), {}, [[] for _ in range(world_size)]

    def rank(number):
        def gather_ranks(values):
            shared[number] = values
            barrier.wait(10)
            rows = [shared[other] for other in range(world_size)]
            barrier.wait(10)
            return rows

        def answers(question):
            return {0: ("yes", "yes"), 1: ("no", None), 2: ("no", "yes")}[int(question.id) % 3]

        def roll_out(trainer, questions, step):
            rolled[number].append([question.id for question in questions])
            trajectories = [
                Trajectory(question, sample, [], [], [], [], (), answer)
                for question in questions
                for sample, answer in enumerate(answers(question))
            ]
            return trajectories, RolloutTimes(queries=len(questions), cache_bytes=len(questions))

        trainer = types.SimpleNamespace(
            config=config,
            sources=types.SimpleNamespace(train=questions),
            tokenizer=types.SimpleNamespace(decode=None),
            dist=types.SimpleNamespace(rank=number, world_size=world_size, gather_ranks=gather_ranks),
            roll_out=roll_out,
        )
        return train.sample_groups(trainer, 1)

    monkeypatch.setattr(train, "roll_out", lambda trainer, questions, step: trainer.roll_out(trainer, questions, step))
    with ThreadPoolExecutor(world_size) as pool:
        return list(zip(pool.map(rank, range(world_size)), rolled))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("count", "tries", "rollouts", "batch"),
    [
        (12, 0, ["0123"], [0, 1, 2, 3]),
        (12, 1, ["0123", "456"], [4, 5, 2, 6]),
        (12, 2, ["0123", "456", "78"], [7, 5, 2, 8]),
        (12, 9, ["0123", "456", "78", "9", ["10"], ["11"]], [11, 5, 2, 8]),  # until the batch is full
        (11, 9, ["0123", "456", "78", "9", ["10"]], [10, 5, 2, 8]),  # until no question is left
        (6, 9, ["0123", "45"], [4, 5, 2, 3]),
    ],
)
def test_equal_groups_are_replaced_in_bounded_tries(monkeypatch, count, tries, rollouts, batch, world_size):
    results = sampled_groups(monkeypatch, count, tries, world_size)
    for rank, (groups, rolled) in enumerate(results):
        assert [question.id for question in groups.questions] == [str(n) for n in batch]
        assert (groups.tries, groups.replaced) == (len(rollouts) - 1, sum(map(len, rollouts[1:])))
        mine = [str(n) for n in batch[rank::world_size]]
        assert [(t.question.id, t.sample) for t in groups.trajectories] == [(n, s) for n in mine for s in (0, 1)]
        assert groups.rewards == [float(t.answer == "yes") for t in groups.trajectories]
        assert (groups.times.queries, groups.times.cache_bytes) == (sum(map(len, rolled)), max(map(len, rolled)))
    # Every rank rolls out as often as the others, even if nothing.
    assert [sorted(n for _, rolled in results for n in rolled[i]) for i in range(len(rollouts))] == [
        sorted(questions) for questions in rollouts
    ]
    assert {len(rolled) for _, rolled in results} == {len(rollouts)}


def test_a_run_that_resamples_resumes_bit_equal_and_trains_as_one_on_two_processes(whole):
    folder, resample = whole.parent, "rollout.resample_tries=3"
    assert train.main(arguments(folder, "name=resampled", resample)) == 0
    assert train.main(arguments(folder, "name=again", resample, "optim.steps=2")) == 0
    assert train.main(arguments(folder, "name=again", resample, "--resume")) == 0
    for name, tensor in weights(folder / "resampled", 4).items():
        assert torch.equal(tensor, weights(folder / "again", 4)[name]), name
    names = ("group/resample_tries", "group/replaced_questions", "group/zero_std_frac", "reward/mean")
    one = [[row[name] for name in names] for row in rows(folder / "resampled")[1:]]
    assert one == [[row[name] for name in names] for row in rows(folder / "again")[1:]]
    assert all(1 <= tries <= 3 <= replaced for tries, replaced, *_ in one)  # what the seed gives: groups to replace
    without = [row["group/zero_std_frac"] for row in rows(whole)[1:]]
    assert sum(row[2] for row in one) < sum(without)
    run_two_processes(folder, "name=resampled-two", resample, "optim.steps=2")
    assert [[row[name] for name in names] for row in rows(folder / "resampled-two")[1:]] == one[:2]


def test_resampling_needs_other_questions(tmp_path, capsys):
    data = tmp_path / "four.jsonl"
    data.write_text('{"question": "who", "golden_answers": ["x"]}\n' * 4)
    settings = ["world=null", "warm_start=null", "model.path=m", "retriever.url=x", "rollout.resample_tries=1"]
    assert train.main(arguments(tmp_path, *settings, f"data.train={data}")) == 1
    assert "rollout.resample_tries has no other to replace one with" in capsys.readouterr().err


# With four trajectories a question and few questions these figures jump.
NO_RELATIVE_LIMITS = ["drift.entropy_rise=null", "drift.grad_norm_rise=null", "drift.invalid_rise=null",
                      "drift.reward_fall=null"]  # fmt: skip


def drift_alarm_at_steps_3_and_4(monkeypatch):
    """Two bad steps in a row, until the run has been rolled back."""

    def check(alarm, step, metrics, check=train.DriftAlarm.check):
        bad = step in (3, 4) and not alarm.rollbacks
        return check(alarm, step, metrics | ({"policy/clip_frac": 0.9} if bad else {}))

    monkeypatch.setattr(train.DriftAlarm, "check", check)


def test_a_drift_alarm_warns_once_and_a_healthy_run_has_none(whole, monkeypatch, capsys):
    assert [row.get("drift/alarms") for row in rows(whole)] == [None, 0.0, 0.0, 0.0, 0.0]
    drift_alarm_at_steps_3_and_4(monkeypatch)
    assert train.main(arguments(whole.parent, "name=warned", "drift.patience=1", *NO_RELATIVE_LIMITS)) == 0
    assert capsys.readouterr().out.count("warning: drift alarm at step 3: policy/clip_frac is above 0.1") == 1
    assert [row.get("drift/alarms") for row in rows(whole.parent / "warned")] == [None, 0.0, 0.0, 1.0, 1.0]
    assert all(torch.equal(weights(whole, 4)[n], w) for n, w in weights(whole.parent / "warned", 4).items())


def test_a_diverging_run_is_stopped_with_a_checkpoint_and_the_reason(whole, capsys):
    """With the limits as they are: a learning rate of 0.1 destroys the policy at once."""
    run = whole.parent / "diverged"
    settings = ["name=diverged", "optim.lr=0.1", "drift.action=stop", "optim.steps=20", "eval.every_steps=null",
                "checkpoint.every_steps=null"]  # fmt: skip
    assert train.main(arguments(whole.parent, *settings)) == train.DRIFT_STATUS == 3
    error = capsys.readouterr().err
    record = json.loads((run / "run.json").read_text())
    step = record["steps_done"]
    assert record["status"] == "stopped" and 3 <= step < 20
    assert record["stopped_by"] in error and f"drift alarm at step {step}: " in error and "--resume" in error
    assert [p.name for p in list_checkpoints(run)] == [f"step_{step}"] and (run / "report.html").is_file()


def test_a_rollback_goes_on_from_the_last_good_checkpoint_and_resumes_exactly(whole, monkeypatch, capsys):
    folder = whole.parent
    drift_alarm_at_steps_3_and_4(monkeypatch)
    settings = ["optim.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=1", "checkpoint.keep_best=false", "drift.action=rollback",
                "drift.patience=2"]  # fmt: skip
    assert train.main(arguments(folder, "name=rolled", *settings)) == 0
    run = folder / "rolled"
    assert "Rolled back to step 2 (rollback 1 of 2); going on at 0.5 times" in capsys.readouterr().out
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(run / "rollback_1")] == [3, 4]
    assert all((place / "eval" / "step_4_greedy.json").is_file() for place in (run, run / "rollback_1"))
    rate = rows(run)[2]["optim/lr"]
    assert [row["optim/lr"] / rate for row in rows(run)[1:]] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    # Stopped after the rollback and resumed, the run ends in the same place.
    assert train.main(arguments(folder, "name=rolled2", *settings, "drift.max_rollbacks=0")) == 3
    error = capsys.readouterr().err
    assert "Rolled back to step 2, but not going on" in error and "drift.max_rollbacks=1" in error
    assert [p.name for p in list_checkpoints(folder / "rolled2")] == ["step_2"]
    assert train.main(arguments(folder, "name=rolled2", *settings, "drift.max_rollbacks=1", "--resume")) == 0
    for name, tensor in weights(run, 6).items():
        assert torch.equal(tensor, weights(folder / "rolled2", 6)[name]), name
    timeless = [{k: v for k, v in row.items() if k.startswith(("reward/", "policy/", "kind/"))} for row in rows(run)]
    assert timeless == [{k: row[k] for k in expected} for row, expected in zip(rows(folder / "rolled2"), timeless)]


def test_a_rollback_passes_over_a_damaged_checkpoint(whole, monkeypatch, capsys):
    run = whole.parent / "harmed"
    drift_alarm_at_steps_3_and_4(monkeypatch)

    def harmed(checkpoint, *share, fault=train.fault):
        if checkpoint.name == "step_2":
            os.truncate(checkpoint / "trainer" / "rank0_0.safetensors", 100)
        return fault(checkpoint, *share)

    monkeypatch.setattr(train, "fault", harmed)
    settings = ["name=harmed", "checkpoint.every_steps=1", "drift.action=rollback", "drift.patience=2",
                "drift.max_rollbacks=0", "eval.every_steps=null"]  # fmt: skip
    assert train.main(arguments(whole.parent, *settings)) == 3
    said = capsys.readouterr()
    assert f"warning: {run / 'checkpoints' / 'step_2'} is damaged: " in said.out and "has 100 bytes" in said.out
    assert "Rolled back to step 1, but not going on" in said.err
    assert [row["step"] for row in rows(run)] == [0, 1]


def test_a_rollback_without_a_good_checkpoint_stops(whole, monkeypatch, capsys):
    drift_alarm_at_steps_3_and_4(monkeypatch)
    settings = ["name=nogood", "drift.action=rollback", "drift.patience=2", "checkpoint.every_steps=3"]
    assert train.main(arguments(whole.parent, *settings)) == 3
    assert "nothing to roll back to: no checkpoint is from before it, which began in step 3" in capsys.readouterr().err


def test_the_named_loss_and_its_settings_reach_every_update(whole, monkeypatch):
    seen = []

    def spying_loss(*args, **options):
        seen.append(options)
        return policy_loss(*args, **options)

    monkeypatch.setattr(train, "policy_loss", spying_loss)
    settings = [
        "name=other_loss", "optim.steps=1", "eval.at_start=false", "eval.questions=1", "loss.name=llds",
        "loss.gamma=0.3", "loss.tau=null", "loss.gate=null", "loss.gate_level=action", "loss.clip_high=0.28",
        "loss.reduction=constant", "loss.dual_clip=3", "loss.off_policy_delta=0.5", "loss.mismatch=mis",
    ]  # fmt: skip
    assert train.main(arguments(whole.parent, *settings)) == 0
    for options in seen:
        assert options["objective"].func is llds
        expected = {"gamma": 0.3, "gate_level": "action", "clip_low": 0.2, "clip_high": 0.28}
        assert options["objective"].keywords == expected
        assert (options["reduction"], options["constant_tokens"]) == ("constant", 4 * 30)
        assert (options["dual_clip_bound"], options["off_policy_delta"]) == (3.0, 0.5)
        assert (options["mismatch"], options["mismatch_cap"]) == ("mis", 3.0)
        assert options["sampling_logprobs"].min() < -0.01
    last = rows(whole.parent / "other_loss")[-1]
    assert last["policy/mismatch_weight_mean"] == pytest.approx(1, abs=1e-3) and last["policy/off_policy_frac"] == 0


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


def test_an_error_leaves_the_checkpoint_that_was_being_written(whole, monkeypatch):
    """Of a run whose evaluations sample: the EM of these is what its checkpoints are compared by."""

    def failing(trainer, questions, step, roll_out=train.roll_out):
        if step == 3:
            raise RetrieverError("http://127.0.0.1:9 did not answer for 60 s")
        return roll_out(trainer, questions, step)

    def slowly(*arguments, commit=sapo.checkpoint._commit):
        time.sleep(2)
        commit(*arguments)

    monkeypatch.setattr(train, "roll_out", failing)
    monkeypatch.setattr(sapo.checkpoint, "_commit", slowly)
    run = whole.parent / "unanswered"
    settings = ["name=unanswered", "eval.temperature=0.7", "eval.at_start=false", "eval.sampled=false"]
    with pytest.raises(RetrieverError):
        train.main(arguments(whole.parent, *settings))
    assert [path.name for path in list_checkpoints(run)] == ["step_2"]
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    em = rows(run)[1]["eval/heldout/em_sampled"]
    assert best == {"checkpoint": "step_2", "step": 2, "eval/heldout/em_sampled": em}


def test_a_run_that_failed_before_its_first_step_does_not_block_its_name(whole, monkeypatch, capsys):
    run = whole.parent / "unborn"
    no_model = ["warm_start=null", "eval.fault_free=false", "model.path=/no/such/folder"]
    assert train.main(arguments(whole.parent, "name=unborn", *no_model)) == 1
    assert "/no/such/folder" in capsys.readouterr().err and not run.exists()

    def out_of_memory(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(train, "assemble", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            train.main(arguments(whole.parent, "name=unborn"))
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    settings = ["name=unborn", "optim.steps=1", "eval.questions=1", "loss.gamma=0.5"]
    assert train.main(arguments(whole.parent, *settings)) == 0
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished" and "forced" not in record
    assert train.main(arguments(whole.parent, *settings)) == 1
    assert "is never overwritten" in capsys.readouterr().err


def test_a_run_is_not_started_or_resumed_twice_at_once(whole, monkeypatch, capsys):
    with locked(whole):
        assert train.main(arguments(whole.parent, "name=whole", "--resume")) == 1
        assert f"{whole} is in use by another process (host " in capsys.readouterr().err
    # on a file system without locks another start may come first
    run = whole.parent / "twice"

    def late(*arguments, connect=train.connect_retriever_in_turn):
        shutil.copytree(whole, run)
        return connect(*arguments)

    monkeypatch.setattr(train, "connect_retriever_in_turn", late)
    assert train.main(arguments(whole.parent, "name=twice")) == 1
    assert f"{run} was made by another process" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_ranks_that_see_different_run_folders_are_told_so(tmp_path, monkeypatch):
    config = types.SimpleNamespace(output_dir=Path("runs"), run_dir=Path("runs/x"))

    def check(*folders):
        """By one rank started in each of these folders, in turn; the last sees what all see."""
        ranks = []

        def gather_objects(own):
            ranks.append(own)
            return list(ranks)

        dist = types.SimpleNamespace(barrier=lambda: None, gather_objects=gather_objects)
        for folder in folders:
            monkeypatch.chdir(tmp_path / folder)
            train.check_shared(config, dist)

    a, b = tmp_path / "a" / "runs", tmp_path / "b" / "runs"
    for runs in (a, b):
        runs.mkdir(parents=True)
    check("a", "b")  # a dry run of what is not there
    with locked(a / "x"):
        check("a", "a")
        shared = r"lock runs/\.x\.lock is host .* and not there on rank 1 .*\. output_dir = runs must be one"
        with pytest.raises(RuntimeError, match=shared):
            check("a", "b")
    (b / ".x.lock").write_text("host b, pid 1")
    with pytest.raises(RuntimeError, match="and host b, pid 1 on rank 1"):
        check("a", "b")
    shutil.copy(a / ".x.lock", b)
    (a / "x").mkdir()
    with pytest.raises(RuntimeError, match="folder runs/x is there on rank 0 .* and not there on rank 1"):
        check("a", "b")
    (a / "x" / "checkpoints" / "step_2").mkdir(parents=True)
    (a / "x" / "checkpoints" / "step_2" / "state.json").touch()
    (b / "x").mkdir()
    with pytest.raises(RuntimeError, match="list of checkpoints is step_2 on rank 0 .* and empty on rank 1"):
        check("a", "b")


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


def test_a_checkpoint_is_evaluated_on_benchmarks(whole, tmp_path):
    rows = [json.dumps({"id": n, "question": f"who {n}", "golden_answers": ["x"]}) + "\n" for n in range(3)]
    (tmp_path / "nq.jsonl").write_text("".join(rows))
    options = ["--train", "", "--partial", f"--file=nq={tmp_path}/nq.jsonl"]
    assert data_main(["prepare", "--out", str(tmp_path / "data"), *options]) == 0
    assert evaluate.main(["--run", str(whole), "--benchmarks", "nq", "--data-dir", str(tmp_path / "data")]) == 0
    result = json.loads((whole / "benchmarks" / "step_4" / "search_greedy.json").read_text())
    assert (result["n"], result["step"], result["model"]) == (3, 4, str(whole / "checkpoints" / "step_4" / "model"))


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


def half_of(whole, tmp_path, *steps):
    """A copy of the run with the checkpoints of these steps only."""
    shutil.copytree(whole, tmp_path / "whole")
    (tmp_path / "cache").symlink_to(whole.parent / "cache")
    for checkpoint in list_checkpoints(tmp_path / "whole"):
        if checkpoint.name not in [f"step_{step}" for step in steps]:
            shutil.rmtree(checkpoint)
    return tmp_path / "whole"


def test_two_ranks_with_zero_go_on_from_a_run_of_one_process(whole, tmp_path):
    run = half_of(whole, tmp_path, 2)
    run_two_processes(tmp_path, "name=whole", "distributed.zero_stage=2", "--resume")
    difference = sum((weights(run, 4)[n] - w).double().square().sum() for n, w in weights(whole, 4).items())
    change = sum((weights(whole, 2)[n] - w).double().square().sum() for n, w in weights(whole, 4).items())
    assert (difference / change).sqrt() < 1e-2  # of what two steps change; AdamW magnifies rounding
    for name in ("reward/mean", "eval/heldout/em"):
        assert [row.get(name) for row in rows(run)] == [row.get(name) for row in rows(whole)], name
    # The same checkpoint still serves one process.
    shutil.rmtree(run / "checkpoints" / "step_4")
    (run / "config.yaml").write_text((whole / "config.yaml").read_text())
    assert train.main(arguments(tmp_path, "name=whole", "--resume")) == 0
    assert all(torch.equal(weights(run, 4)[name], w) for name, w in weights(whole, 4).items())


def test_a_run_goes_on_from_the_checkpoint_that_is_named_and_loses_nothing(whole, tmp_path, capsys):
    run = half_of(whole, tmp_path, 2, 4)
    with (run / "metrics.jsonl").open("a") as file:  # it was killed before the next checkpoint
        file.write('{"step": 5}\n')
    assert train.main(arguments(tmp_path, "name=whole", "--resume", str(run / "checkpoints" / "step_3"))) == 1
    assert "which has step_2, step_4" in capsys.readouterr().err
    resume = ["--resume", str(run / "checkpoints" / "step_2")]
    assert train.main(arguments(tmp_path, "name=whole", *resume)) == 0
    assert all(torch.equal(weights(run, 4)[name], w) for name, w in weights(whole, 4).items())
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    (undone,) = run.glob("undone_*")
    assert [p.name for p in list_checkpoints(undone)] == ["step_4"] and [r["step"] for r in rows(undone)] == [3, 4, 5]
    assert (undone / "eval" / "step_4_greedy.json").is_file() and (run / "eval" / "step_4_greedy.json").is_file()


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(whole, tmp_path, capsys):
    run = half_of(whole, tmp_path, 2, 4)
    file = run / "checkpoints" / "step_4" / "model" / "model.safetensors"
    os.truncate(file, 1000)
    assert train.main(arguments(tmp_path, "name=whole", "--resume", str(run / "checkpoints" / "step_4"))) == 1
    error = capsys.readouterr().err
    assert f"{file} has 1000 bytes instead of " in error and "--resume " + str(run / "checkpoints" / "step_2") in error
    assert train.main(arguments(tmp_path, "name=whole", "--resume", "latest")) == 0
    error = capsys.readouterr().err
    assert f"warning: {run / 'checkpoints' / 'step_4'} is damaged: {file}" in error and "from " + str(run) in error
    assert all(torch.equal(weights(run, 4)[name], w) for name, w in weights(whole, 4).items())
    os.truncate(run / "checkpoints" / "step_2" / "state.json", 20)
    os.truncate(run / "checkpoints" / "step_4" / "state.json", 20)
    assert train.main(arguments(tmp_path, "name=whole", "--resume")) == 1
    assert "state.json cannot be read" in (error := capsys.readouterr().err) and "name=..." in error


def test_a_resume_with_other_settings_needs_force(whole, tmp_path, capsys):
    run = half_of(whole, tmp_path, 2)
    other = ["name=whole", "--resume", "loss.gamma=0.25", "optim.lr=1e-5"]
    assert train.main(arguments(tmp_path, *other)) == 1
    error = capsys.readouterr().err
    assert re.search(r"loss.gamma was 0\.1, is 0\.25; optim.lr was [0-9.e-]+, is 1e-05", error) and "--force" in error
    assert train.main(arguments(tmp_path, *other, "--force")) == 0
    (forced,) = json.loads((run / "run.json").read_text())["forced"]
    assert forced["changed"]["loss.gamma"] == [0.1, 0.25] and forced["from"].endswith("step_2")
    assert not all(torch.equal(weights(run, 4)[name], w) for name, w in weights(whole, 4).items())


def test_only_whole_checkpoints_count_and_the_rests_of_a_kill_are_cleared(whole):
    folder = whole.parent
    assert train.main(arguments(folder, "name=kept", "optim.steps=2", "checkpoint.every_steps=1")) == 0
    checkpoints = folder / "kept" / "checkpoints"
    (checkpoints / "tmp_step_3" / "model").mkdir(parents=True)  # killed while it was saved
    (checkpoints / "step_9").mkdir()  # no state.json: not complete
    assert [p.name for p in list_checkpoints(folder / "kept")] == ["step_1", "step_2"]
    assert train.main(arguments(folder, "name=kept", "optim.steps=4", "checkpoint.keep_last=2", "--resume")) == 0
    assert sorted(p.name for p in checkpoints.iterdir()) == [
        "best.json", "step_2", "step_4", "step_9"
    ]  # fmt: skip
