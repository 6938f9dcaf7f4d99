import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from sapo.config import Config, ConfigError, _section_class, batch_plan, config_warnings, load_config, to_yaml

ROOT = Path(__file__).parent.parent
MINIMAL = """
name: tiny
model: {path: some/model}
data: {train: [a.jsonl]}
retriever: {url: "http://127.0.0.1:8000"}
"""


def write(tmp_path: Path, text: str = MINIMAL, name: str = "c.yaml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_settings_of_the_paper(tmp_path):
    config = load_config(write(tmp_path))
    rollout, loss, optim = config.rollout, config.loss, config.optim
    assert (rollout.questions_per_step, rollout.group_size, optim.minibatch_responses) == (256, 10, 256)
    assert (loss.gamma, loss.tau, loss.gate, loss.reduction) == (0.1, 1.0, "equation", "sequence_mean")
    assert (optim.lr, optim.steps, config.retriever.top_k) == (1e-6, 420, 3)
    assert config.rollout.max_trajectory_tokens == 2048 + 6 * 512 + 5 * 512 == 7680
    assert config.run_dir == Path("runs/tiny")
    assert not any("truncated" in warning for warning in config_warnings(config))


def test_later_layers_win(tmp_path):
    write(tmp_path, "optim: {lr: 1e-3, eps: 1e-4, steps: 7}\nloss: {gate: listing}", "presets/p.yaml")
    path = write(tmp_path, MINIMAL + "preset: presets/p\noptim: {lr: 2e-3, weight_decay: 0.5}")
    config = load_config(path, ["optim.weight_decay=0.25", "optim.steps=9"])
    assert (config.optim.eps, config.optim.lr, config.optim.weight_decay, config.optim.steps) == (1e-4, 2e-3, 0.25, 9)
    assert (config.loss.gate, config.optim.epochs) == ("listing", 1)
    assert load_config(write(tmp_path), ["preset=presets/p.yaml"]).optim.eps == 1e-4


def test_scalars_are_read_as_yaml_1_2(tmp_path):
    config = load_config(write(tmp_path), ["optim.lr=5e-4", "optim.eps=1.E-9", "logging.wandb.project=off"])
    assert (config.optim.lr, config.optim.eps, config.logging.wandb.project) == (5e-4, 1e-9, "off")


def test_override_forms(tmp_path):
    overrides = [
        "data.train=one.jsonl",
        "data.eval=[a.jsonl, b.parquet]",
        "eval.every_steps=null",
        "rollout.top_p=1",
        "protocol={template: plain}",
        "logging.wandb.project=a=b",
        "model.path=",
        "model.path=x",
    ]
    config = load_config(write(tmp_path), overrides)
    assert config.data.train == [Path("one.jsonl")]
    assert config.data.eval == [Path("a.jsonl"), Path("b.parquet")]
    assert config.eval.every_steps is None
    assert (config.protocol.template, config.protocol.think_aware) == ("plain", False)
    assert (config.logging.wandb.project, config.model.path, config.rollout.top_p) == ("a=b", "x", 1.0)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("eval.temprature", "eval.temperature"),
        ("optim.learning_rate", "optim.lr"),
        ("loss.lr", "warm_start.lr' or 'optim.lr"),
        ("gamma", "loss.gamma"),
        ("loss.gama", "loss.gamma"),
        ("rolout", "rollout"),
        ("logging.wandb.projet", "logging.wandb.project"),
        ("optim.batch_tokens", "optim.micro_batch_tokens"),
        ("world.distractor", "world.distractors"),
    ],
)
def test_a_wrong_key_names_the_nearest_right_one(tmp_path, key, meant):
    with pytest.raises(ConfigError, match=rf"^override '{key}=1': unknown key '{key}'; did you mean '{meant}'\?"):
        load_config(write(tmp_path), [f"{key}=1"])


def test_a_wrong_key_names_its_file(tmp_path):
    path = write(tmp_path, MINIMAL + "optim: {lrr: 1}")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    start = f"{path}: unknown key 'optim.lrr'; did you mean 'optim.lr'? Keys of 'optim': lr, warmup_steps, "
    assert str(error.value).startswith(start)
    preset = write(tmp_path, "optim: {lrr: 1}", "p.yaml")
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, MINIMAL + "preset: p"))
    assert str(error.value).startswith(f"{preset}: unknown key 'optim.lrr'")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.top_p=1.5", "'rollout.top_p' is 1.5: input should be less than or equal to 1"),
        ("rollout.temperature=0", "'rollout.temperature' is 0: input should be greater than 0"),
        ("optim.lr=.nan", "'optim.lr' is NaN: input should be a finite number"),
        ("optim.steps=3.5", "'optim.steps' is 3.5: input should be a valid integer"),
        ("optim.steps=true", "'optim.steps' is true: input should be a valid integer"),
        ("optim.steps='3'", "'optim.steps' is \"3\": input should be a valid integer"),
        ("optim.betas=[0.9]", "'optim.betas.1' is missing and has no default"),
        ("optim.lr.x=3", "'optim.lr' is {\"x\": 3}: input should be a valid number"),
        ("reward.format_weight=1", "'reward.format_weight' is 1: input should be less than 1"),
        ("rollout.resample_tries=-1", "'rollout.resample_tries' is -1: input should be greater than or equal to 0"),
        (
            "advantage.estimator=std",
            "'advantage.estimator' is \"std\": input should be 'zscore', 'mean' or 'leave_one_out'",
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size = 1 leaves nothing to compare a response with: its mean is its own reward and its "
            "standard deviation, like the mean of the others, does not exist, so no advantage.estimator can tell good "
            "from bad: raise it to at least 2",
        ),
        ("loss.gate=code", "'loss.gate' is \"code\": input should be 'equation' or 'listing'"),
        ("name=../x", "'name' is \"../x\": string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
        ("reward=f1", "'reward' is \"f1\": input should be an object"),
        (
            "distributed.offload_params=true",
            "distributed.offload_params needs distributed.zero_stage 3, which is 0: only stage 3 takes weights away "
            "between their uses; raise it, or set offload_params to false",
        ),
        (
            "distributed.offload_optimizer=true",
            "distributed.offload_optimizer needs distributed.zero_stage 1, 2 or 3, which is 0: raise it, or set "
            "offload_optimizer to false",
        ),
        ("model.lora.rank=0", "'model.lora.rank' is 0: input should be greater than or equal to 1"),
        (
            "rollout.max_turn_tokens=5633",
            "rollout.max_trajectory_tokens = 7680 is less than rollout.max_prompt_tokens + rollout.max_turn_tokens = "
            "7681: raise it or lower the other two",
        ),
        (
            "model.attn_implementation=flash_attention_2",
            "'model.attn_implementation' is \"flash_attention_2\": input should be 'sdpa' or 'eager'",
        ),
    ],
)
def test_a_wrong_value_names_its_key_and_source(tmp_path, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path), [override])
    assert str(error.value) == f"override '{override}': {message}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.ref_kl_beta=0"], "loss.ref_kl_beta = 0 keeps none: set it to false"),
        (["loss.ref_kl_beta=0.1", "model.lora={}"], "model.lora needs none: set it to false"),
        (["loss.ref_kl_beta=0.1", "distributed.zero_stage=3"], "zero_stage 3 shards the reference: set it to false"),
    ],
)
def test_a_reference_that_is_no_copy_is_not_offloaded(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path), ["distributed.offload_reference=true", *overrides])
    config = load_config(write(tmp_path), ["distributed.offload_reference=true", "loss.ref_kl_beta=0.1"])
    assert config.distributed.offload_reference


def test_all_wrong_values_are_named_in_one_paragraph(tmp_path):
    path = write(tmp_path, MINIMAL + "optim: {lr: -1}")
    with pytest.raises(ConfigError) as error:
        load_config(path, ["seed=-1"])
    assert str(error.value) == (
        "override 'seed=-1': 'seed' is -1: input should be greater than or equal to 0; "
        f"{path}: 'optim.lr' is -1: input should be greater than 0"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'name' is missing"),
        ("- a\n- b", "holds 'key: value' lines, this one holds a list"),
        ("name: [x", "not valid YAML: while parsing a flow sequence"),
        ("name: a\nseed: 1\nname: b", "key 'name' is repeated .* line 3"),
        ("name: a\nmodel: {path: m}\nretriever: {url: u}", "no training questions: set data.train"),
        ("name: a\nmodel: {path: m}\ndata: {train: [a.jsonl]}", "no retriever: set retriever.url"),
        ("name: a\ndata: {train: [a.jsonl]}\nretriever: {url: u}", "no policy: set model.path"),
        ("name: a\nwarm_start: {}\ndata: {train: [a.jsonl]}\nretriever: {url: u}", "warm_start learns from .* a world"),
        ("name: a\nmodel: {path: m}\ndata: {train: [a.jsonl]}\nretriever: {index: i}", "both retriever.corpus and"),
        ("name: a\nworld: {}\nwarm_start: {}\ndata: {train: [a.jsonl]}", "the world brings its own questions"),
        ("name: a\nworld: {}\nwarm_start: {}\ndata: {eval_questions: 9}", "the world brings its own questions"),
        ("name: a\nmodel: {path: m}\neval: {fault_free: true}", "eval.fault_free compares with another warm start"),
        ("preset: p\nname: a", "p.yaml: cannot read the config file: No such file"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


def test_search_r1_scoring_needs_a_prompt_with_examples(tmp_path):
    overrides = ["reward.name=search_r1_compat", "protocol.template=plain"]
    with pytest.raises(ConfigError, match="every single answer would score 0: use template search_r1, or reward.name"):
        load_config(write(tmp_path), overrides)
    for template in ("search_r1", "sapo", "refine"):
        assert load_config(write(tmp_path), [overrides[0], f"protocol.template={template}"])


def test_autorefine_is_the_released_recipe():
    config = load_config(ROOT / "configs/autorefine.yaml")
    assert (config.protocol.template, config.reward.name, config.reward.format_weight) == ("refine", "autorefine", 0.0)
    assert (config.rollout.questions_per_step, config.rollout.group_size, config.rollout.max_searches) == (256, 5, 5)
    assert (config.loss.name, config.loss.reduction, config.loss.ref_kl_beta) == ("grpo", "token_mean", 0.001)
    assert load_config(ROOT / "configs/autorefine.yaml", ["loss.name=sapo"]).loss.gamma == 0.1
    assert (config.optim.lr, config.optim.steps, config.retriever.top_k) == (1e-6, 300, 3)
    assert batch_plan(config, world_size=8).updates_per_step == 5
    assert config_warnings(config) == []


def test_a_preset_does_not_nest(tmp_path):
    write(tmp_path, "preset: q", "p.yaml")
    with pytest.raises(ConfigError, match="p.yaml: a preset cannot name another preset"):
        load_config(write(tmp_path, MINIMAL + "preset: p"))


@pytest.mark.parametrize("override", ["optim.lr", "=1", "optim..lr=1", ".lr=1"])
def test_an_override_without_key_or_value_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match="is not of the form key.sub=value"):
        load_config(write(tmp_path), [override])


def test_a_missing_config_file_is_named():
    with pytest.raises(ConfigError, match="^nowhere.yaml: cannot read the config file: No such file or directory$"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize(
    "file",
    sorted(file for file in (ROOT / "configs").glob("*.yaml") if not file.name.startswith("accelerate")),
    ids=lambda file: file.stem,
)
def test_a_resolved_config_reads_back_equal(tmp_path, file):
    config = load_config(file)
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_every_field_says_what_it_is():
    def undescribed(section: type[BaseModel], prefix: str) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            if not field.description:
                missing.append(prefix + name)
            child = _section_class(field.annotation)
            missing += undescribed(child, f"{prefix}{name}.") if child else []
        return missing

    assert undescribed(Config, "") == []


def test_qwen7b_has_the_settings_of_the_paper():
    config = load_config(ROOT / "configs/qwen7b.yaml")
    plan = batch_plan(config, world_size=8)
    assert (plan.questions_per_rank, plan.responses_per_step, plan.responses_per_rank) == (32, 2560, 320)
    assert (plan.minibatch_responses, plan.minibatch_responses_per_rank, plan.minibatches_per_epoch) == (256, 32, 10)
    assert (plan.updates_per_step, plan.total_updates) == (10, 4200)
    assert (config.loss.gamma, config.loss.tau, config.loss.ref_kl_beta) == (0.1, 1.0, 0.001)
    assert (config.loss.clip_low, config.loss.clip_high, config.optim.lr, config.optim.steps) == (0.2, 0.2, 1e-6, 420)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.max_searches) == (1.0, 0.95, 5)
    assert (config.retriever.top_k, config.retriever.url, config.rollout.engine) == (3, "", "hf")
    assert (config.distributed.zero_stage, config.model.dtype) == (3, "bfloat16")
    assert config.model.gradient_checkpointing
    assert (config.loss.gate, config.loss.entropy_bonus) == ("equation", 0.0)
    assert len(config_warnings(config)) == 1 and "engine_mismatch" in config_warnings(config)[0]


def test_the_released_code_is_a_preset_of_qwen7b():
    config = load_config(ROOT / "configs/qwen7b.yaml", ["preset=presets/paper_code"])
    assert (config.loss.gate, config.loss.reduction, config.loss.entropy_bonus) == ("listing", "token_mean", 0.001)
    assert (config.loss.ref_kl_beta, config.rollout.top_p, config.rollout.logprobs) == (0.001, 0.95, "full")


def test_each_loss_brings_its_own_parameters(tmp_path):
    def loss(*overrides):
        return load_config(write(tmp_path), overrides).loss

    assert loss("loss.name=dapo").parameters == {"clip_low": 0.2, "clip_high": 0.28}
    assert loss("loss.name=gspo", "loss.clip_high=1e-3").parameters == {"clip_low": 3e-4, "clip_high": 1e-3}
    assert loss("loss.name=llds").parameters["gamma"] == 0.2 and loss("loss.name=llds").tau is None
    assert loss("loss.name=cispo", "loss.gamma=null").parameters == {"ratio_max": 5.0}
    assert loss("loss.name=soft_sapo").parameters == {"temperature_pos": 1.0, "temperature_neg": 1.05}
    reductions = [loss(f"loss.name={name}").reduction for name in ("grpo", "gspo", "dapo", "cispo")]
    assert reductions == ["sequence_mean", "sequence_mean", "token_mean", "token_mean"]
    assert loss("loss.name=dr_grpo", "advantage.estimator=mean").reduction == "constant"
    assert (loss("loss.mismatch=tis").mismatch_cap, loss("loss.mismatch=mis").mismatch_cap) == (2.0, 3.0)
    plain = loss()
    assert (plain.mismatch, plain.mismatch_cap, plain.dual_clip, plain.off_policy_delta) == ("none", None, None, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.gamma=-0.1"], "'loss.gamma' is -0.1: input should be greater than or equal to 0"),
        (["loss.tau=0"], "'loss.tau' is 0: input should be greater than 0"),
        (["loss.clip_low=1"], "'loss.clip_low' is 1: input should be less than 1"),
        (["loss.clip_high=0"], "'loss.clip_high' is 0: input should be greater than 0"),
        (["loss.dual_clip=1"], "'loss.dual_clip' is 1: input should be greater than 1"),
        (["loss.name=cispo", "loss.ratio_max=0.5"], "'loss.ratio_max' is 0.5: input should be greater than or equal"),
        (["loss.mismatch=tis", "loss.mismatch_cap=0"], "'loss.mismatch_cap' is 0: input should be greater than or"),
        (["loss.name=gpso"], "'loss.name' is \"gpso\": input should be 'sapo', 'grpo', "),
        (["loss.name=[sapo]"], "'loss.name' is [\"sapo\"]: input should be 'sapo', 'grpo', "),
        (
            ["loss.name=gspo", "loss.tau=1.0"],
            "loss.tau is not a parameter of loss.name = gspo, which has clip_low, clip_high: remove it, set it to "
            "null, or choose one of the losses that have it, sapo, kl_ratio",
        ),
        (
            ["loss.temperature_pos=1.0"],
            "loss.temperature_pos is not a parameter of loss.name = sapo, which has gamma, tau, gate, clip_low, "
            "clip_high: remove it, set it to null, or choose one of the losses that have it, soft_sapo (sapo is "
            "Search Agent Policy Optimization, arXiv 2603.10069, soft_sapo Soft Adaptive Policy Optimization, "
            "2511.20347)",
        ),
        (
            ["loss.name=gspo", "loss.reduction=token_mean"],
            "loss.reduction = token_mean counts tokens, but loss.name = gspo has one ratio a response: set it to "
            "sequence_mean or remove it",
        ),
        (
            ["loss.name=dr_grpo", "loss.reduction=token_mean", "advantage.estimator=mean"],
            "loss.reduction = token_mean weighs tokens by length, which loss.name = dr_grpo is there to avoid",
        ),
        (
            ["loss.name=dr_grpo"],
            "advantage.estimator = zscore, but the advantage of loss.name = dr_grpo is R - group mean: set "
            "advantage.estimator to mean",
        ),
        (["loss.name=soft_sapo", "loss.dual_clip=3"], "loss.dual_clip goes with a clipped ratio, which loss.name = "),
        (["loss.mismatch_cap=2"], "loss.mismatch_cap without loss.mismatch does nothing: set loss.mismatch to tis or "),
        (
            ["loss.mismatch=tis", "rollout.top_p=0.9", "rollout.logprobs=full"],
            "loss.mismatch = tis divides by the probability that a token was sampled with, which rollout.logprobs = "
            "full does not record beside top_p, top_k or min_p: set rollout.logprobs to sampled",
        ),
    ],
)
def test_a_loss_that_cannot_work_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path), overrides)
    assert str(error.value).partition(": ")[2].startswith(message)


def test_a_mismatch_goes_with_recorded_probabilities(tmp_path):
    for overrides in (["rollout.top_p=0.9"], ["rollout.logprobs=full"]):
        assert load_config(write(tmp_path), ["loss.mismatch=mis", *overrides]).loss.mismatch == "mis"


@pytest.mark.parametrize("preset", sorted((ROOT / "configs/presets").glob("*.yaml")), ids=lambda file: file.stem)
def test_each_preset_names_its_loss_and_reads_back_equal(tmp_path, preset):
    config = load_config(write(tmp_path), [f"preset={preset}"])
    assert config.loss.name == {"paper": "sapo", "paper_code": "sapo", "search_r1": "sapo"}.get(preset.stem, preset.stem)
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_a_world_may_be_drawn_in_order(tmp_path):
    path = write(tmp_path, "name: a\nworld: {}\nwarm_start: {}\ndata: {shuffle: false}")
    assert load_config(path).data.shuffle is False


def test_quickstart_and_its_grpo_differ_in_one_line():
    config = load_config(ROOT / "configs/quickstart.yaml")
    grpo = load_config(ROOT / "configs/quickstart.yaml", ["loss.gamma=0"])
    left, right = to_yaml(config).splitlines(), to_yaml(grpo).splitlines()
    assert [pair for pair in zip(left, right, strict=True) if pair[0] != pair[1]] == [("  gamma: 0.1", "  gamma: 0.0")]
    assert config_warnings(config) == []


def test_batch_plan_counts(tmp_path):
    rollout = "rollout={questions_per_step: 6, group_size: 4}"
    optim = "optim={minibatch_responses: 8, epochs: 2, steps: 5}"
    exact_fit = "optim.micro_batch_tokens=7680"
    plan = batch_plan(load_config(write(tmp_path), [rollout, optim, exact_fit]), world_size=2)
    assert str(plan) == (
        "5 steps, each 6 questions x 4 samples = 24 responses and 3 minibatches of 8 x epochs 2 = 6 updates; "
        "30 updates in all; processes 2, each with 3 questions and 4 responses of a minibatch"
    )


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["rollout.questions_per_step=6"],
            4,
            "rollout.questions_per_step = 6 is not a multiple of the number of processes = 4",
        ),
        (
            ["rollout.questions_per_step=6", "rollout.group_size=4", "optim.minibatch_responses=9"],
            3,
            "rollout.questions_per_step x rollout.group_size = 24 is not a multiple of optim.minibatch_responses = 9",
        ),
        (
            ["rollout.questions_per_step=6", "rollout.group_size=4", "optim.minibatch_responses=8"],
            3,
            "optim.minibatch_responses = 8 is not a multiple of the number of processes = 3",
        ),
        (
            ["optim.micro_batch_tokens=7679"],
            1,
            "optim.micro_batch_tokens = 7679 is less than rollout.max_trajectory_tokens = 7680",
        ),
        (
            ["data.train_questions=255"],
            1,
            "data.train_questions = 255 is less than rollout.questions_per_step = 256",
        ),
    ],
)
def test_impossible_arithmetic_names_both_keys(tmp_path, overrides, world_size, message):
    with pytest.raises(ConfigError) as error:
        batch_plan(load_config(write(tmp_path), overrides), world_size)
    assert str(error.value).startswith(message)


ONE_UPDATE = ["rollout.questions_per_step=4", "rollout.group_size=4", "optim.minibatch_responses=16"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], None),
        (["rollout.max_trajectory_tokens=7679"], "(7680 tokens): long trajectories end truncated"),
        (["rollout.top_p=0.95"], "policy/engine_mismatch"),
        (["rollout.top_k=50", "rollout.logprobs=full"], "the recorded ones hide it"),
        (["rollout.min_p=0.1"], "policy/engine_mismatch"),
        (ONE_UPDATE, "the run is plain GRPO"),
        ([*ONE_UPDATE, "optim.epochs=2"], None),
        ([*ONE_UPDATE, "loss.tau=1.2"], None),
        ([*ONE_UPDATE, "loss.gate=listing"], None),
        ([*ONE_UPDATE, "loss.gamma=0"], None),
        ([*ONE_UPDATE, "loss.name=kl_ratio"], "so the gate of kl_ratio (ratio < tau <= 1) never opens"),
        ([*ONE_UPDATE, "loss.name=kl_ratio", "loss.tau=1.1"], None),
        ([*ONE_UPDATE, "loss.name=llds"], "so the gate of llds (log-ratio < 0) never opens"),
        ([*ONE_UPDATE, "loss.name=kl_uncond"], None),
        ([*ONE_UPDATE, "loss.name=gspo"], None),
        (["reward.name=autorefine"], "that it is plain F1: set protocol.template to refine"),
        (["reward.name=autorefine", "protocol.template=refine"], None),
        (["optim.warmup_steps=420"], "never stays at optim.lr"),
        (["optim.warmup_steps=419"], None),
        (["checkpoint.every_steps=30", "eval.every_steps=20"], "some checkpoints have no EM by which"),
        (["checkpoint.every_steps=30", "eval.every_steps=20", "checkpoint.keep_best=false"], None),
    ],
)
def test_warnings(tmp_path, overrides, words):
    warnings = config_warnings(load_config(write(tmp_path), overrides))
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_the_accelerate_config_starts_two_processes(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, pathlib\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate_2cpu.yaml"]
    subprocess.run(
        [*launch, str(script)], cwd=ROOT, env={**os.environ, "ACCELERATE_USE_CPU": "true"}, check=True, timeout=120
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2", "2"]


def test_the_retriever_takes_an_encoder_with_settings(tmp_path):
    asked = "retriever: {kind: hybrid, encoder: {name: m, pooling: cls, normalize: true}, "
    text = MINIMAL.replace('retriever: {url: "http://127.0.0.1:8000"', asked + "corpus: c, index: i")
    settings = load_config(write(tmp_path, text)).retriever
    assert (settings.encoder, settings.kind) == ({"name": "m", "pooling": "cls", "normalize": True}, "hybrid")
    with pytest.raises(ConfigError, match="retriever.kind"):
        load_config(write(tmp_path), ["retriever.kind=sparse"])


@pytest.mark.parametrize(
    ("setting", "flag"),
    [("kind=bm25", "--kind bm25 "), ("reranker=r", "--reranker r "), ("search_effort=7", "--effort 7 "),
     ("gpu=true", "--gpu and ")],
)  # fmt: skip
def test_what_a_server_decides_is_not_set_beside_its_url(tmp_path, setting, flag):
    key = setting.split("=")[0]
    with pytest.raises(ConfigError, match=f"retriever.{key} = .* nothing with retriever.url.*start them with {flag}"):
        load_config(write(tmp_path), [f"retriever.{setting}"])
    own = ['retriever.url=""', "retriever.corpus=c", "retriever.index=i", f"retriever.{setting}"]
    load_config(write(tmp_path), own)
