"""The configs named after models: the paper's settings, a GRPO twin, and a dry run with tiny models in their places."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import train
from sapo.config import ConfigError, batch_plan, config_warnings, load_config
from sapo.plan import GB, KNOWN_MODELS, make_plan
from tests.real_tokenizers import real_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "qwen1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen3b-base": "Qwen/Qwen2.5-3B",
    "qwen3b-instruct": "Qwen/Qwen2.5-3B-Instruct",
    "qwen7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen14b": "Qwen/Qwen2.5-14B-Instruct",
    "llama3b-base": "meta-llama/Llama-3.2-3B",
    "llama3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
}


def config_of(name, *overrides):
    return load_config(ROOT / "configs" / f"{name}.yaml", overrides)


def different(left, right):
    """Return the dotted keys in which two configs differ."""
    left, right = (train.flat(config.model_dump(mode="json")) for config in (left, right))
    return {key for key in left | right if left.get(key) != right.get(key)}


@pytest.mark.parametrize("name", MODELS)
def test_each_config_has_the_settings_of_the_paper(name):
    config = config_of(name)
    plan = batch_plan(config, world_size=8)
    assert (config.name, config.model.path) == (name, MODELS[name])
    assert (plan.responses_per_step, plan.updates_per_step, plan.total_updates) == (2560, 10, 4200)
    assert (config.loss.name, config.loss.gamma, config.loss.tau, config.loss.ref_kl_beta) == ("sapo", 0.1, 1.0, 0.001)
    assert (config.loss.clip_low, config.loss.clip_high, config.optim.lr, config.optim.steps) == (0.2, 0.2, 1e-6, 420)
    assert (config.rollout.group_size, config.rollout.temperature, config.rollout.top_p) == (10, 1.0, 0.95)
    assert (config.rollout.max_searches, config.retriever.top_k, config.reward.name) == (5, 3, "f1")
    assert config.rollout.max_trajectory_tokens == 2048 + 6 * 512 + 5 * 512
    assert len(config_warnings(config)) == 1 and "engine_mismatch" in config_warnings(config)[0]


@pytest.mark.parametrize("name", MODELS)
def test_configs_differ_only_in_what_the_model_needs(name):
    assert different(config_of(name), config_of("qwen7b")) <= {
        "name", "model.path", "rollout.max_rows", "distributed.zero_stage", "distributed.offload_optimizer",
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("override", ["loss.name=grpo", "preset=presets/grpo"])
def test_one_override_makes_it_grpo_and_changes_only_the_loss(name, override):
    twin = config_of(name, override)
    assert different(config_of(name), twin) == {"loss.name", "loss.gamma", "loss.tau", "loss.gate"}
    assert (twin.loss.name, twin.loss.gamma, twin.loss.ref_kl_beta) == ("grpo", None, 0.001)


@pytest.mark.parametrize("name", MODELS)
def test_each_config_fits_the_hardware_that_it_names(name):
    assert MODELS[name] in KNOWN_MODELS
    plan = make_plan(config_of(name), gpus=8, device_bytes=80 * GB)
    assert plan.fits and plan.suggestion.zero_stage == plan.setup.zero_stage
    comment = (ROOT / "configs" / f"{name}.yaml").read_text().replace("\n# ", " ")
    assert f"A rank holds at most {plan.memory.peak / GB:.0f} GB," in comment
    assert f"an update takes {sum(plan.memory.update.values()) / GB:.0f} GB." in comment
    if plan.setup.offload_optimizer:
        host = plan.memory.host
        assert f"The node needs {sum(host.values()) / GB:.0f} GB of that: {host['optimizer'] / GB:.0f}" in comment
        assert f"{host['checkpoint'] / GB:.0f} for the copy" in comment and f"{host['index'] / GB:.0f} for" in comment


def test_a_preset_changes_the_base_and_the_file_both(tmp_path):
    for file, text in {
        "base": "optim: {lr: 1e-3, eps: 1e-4, steps: 7}",
        "preset": "optim: {lr: 2e-3, weight_decay: 0.5}",
        "c": 'base: base\nname: a\nmodel: {path: x}\ndata: {train: [a]}\nretriever: {url: "u"}\noptim: {steps: 9}',
        "wrong": "base: preset",
    }.items():
        (tmp_path / f"{file}.yaml").write_text(text)
    plain, changed = (load_config(tmp_path / "c.yaml", more).optim for more in ([], ["preset=preset"]))
    assert (plain.lr, plain.eps, plain.weight_decay, plain.steps) == (1e-3, 1e-4, 0.01, 9)
    assert (changed.lr, changed.eps, changed.weight_decay, changed.steps) == (2e-3, 1e-4, 0.5, 9)
    with pytest.raises(ConfigError, match="wrong.yaml: a base cannot name another base; merge the two files"):
        load_config(tmp_path / "c.yaml", ["base=wrong"])
    with pytest.raises(ConfigError, match="none.yaml: cannot read the config file"):
        load_config(tmp_path / "c.yaml", ["base=none"])


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders with a tiny model of each family, small question files and a small corpus."""
    folder = tmp_path_factory.mktemp("stand_ins")
    for family, model_class, config_class in (
        ("qwen", Qwen2ForCausalLM, Qwen2Config),
        ("llama", LlamaForCausalLM, LlamaConfig),
    ):
        tokenizer = real_tokenizer(family)
        torch.manual_seed(0)
        config = config_class(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=32, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        model_class(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    for name, count in (("train", 256), ("eval", 3)):
        rows = [{"id": f"{name}{i}", "question": f"Who is number {i}?", "golden_answers": ["me"]} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    passages = [{"id": str(i), "contents": f'"Title {i}"\nText of passage {i}.'} for i in range(20)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_passes_with_a_tiny_model_of_the_same_family(stand_ins, tmp_path, capsys, name):
    family = "llama" if name.startswith("llama") else "qwen"
    status = train.main(
        [
            "--config", str(ROOT / "configs" / f"{name}.yaml"), "--dry-run", f"output_dir={tmp_path}",
            f"model.path={stand_ins / family}", f"data.train=[{stand_ins / 'train.jsonl'}]",
            f"data.eval=[{stand_ins / 'eval.jsonl'}]", f"retriever.corpus={stand_ins / 'corpus.jsonl'}",
            f"retriever.index={stand_ins / 'index'}", "retriever.encoder=hashed",
        ]
    )  # fmt: skip
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "256 training and 3 held-out questions, 20 passages; nothing was trained" in captured.out
    assert "KV cache" in captured.out and "fits: " in captured.out
    assert list(tmp_path.iterdir()) == []
