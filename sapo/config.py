"""The whole configuration: schema, YAML files, overrides, validation, batch arithmetic.

Four layers, later ones win: defaults here < the file named by the config's `preset` key < the config file <
`key.sub=value` overrides. Every problem is found before a model is loaded and raised as one `ConfigError` paragraph.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sapo.warm_start import WarmStartSettings
from sapo.world import WorldSettings


class ConfigError(ValueError):
    """A configuration that cannot work; the message names file and key and says what to change."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable, attribute docstrings are descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Paths = Annotated[list[Path], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class ModelSettings(Section):
    path: str = ""
    """Hugging Face folder or hub id of the policy. Empty: the model that `warm_start` makes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the forward and backward pass. bfloat16 is slower than float32 on most CPUs."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of training and generation; both take the per-row masks that the engine needs."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time for far less memory."""
    threads: Count | None = None
    """CPU threads of each process; null leaves torch's default. With one process per core, 1 is fastest."""


class DataSettings(Section):
    train: Paths = []
    """Question files to train on (.jsonl or .parquet), concatenated in this order. Empty with a `world`."""
    eval: Paths = []
    """Held-out question files, concatenated in this order. Empty with a `world`."""
    train_questions: Count | None = None
    """Use only the first so many training questions; null uses all."""
    eval_questions: Count | None = None
    """Use only the first so many held-out questions; null uses all."""
    shuffle: bool = True
    """Draw questions in an order shuffled anew each epoch; false keeps the order of the files."""


class ProtocolSettings(Section):
    template: Literal["sapo", "search_r1", "plain"] = "sapo"
    """Prompt and observation tags; a checkpoint must be used with the template it was trained with."""
    think_aware: bool = False
    """Ignore search and answer tags inside an open <think>; false lets tags act anywhere, as in Search-R1."""


class RetrieverSettings(Section):
    url: str = ""
    """Base URL of a running retrieval server. Empty: `corpus` and `index` are opened, or a `world` brings its own."""
    corpus: Path | None = None
    """Passages, JSONL of {id, contents} with contents = "Title"<newline>text."""
    index: Path | None = None
    """Index folder over `corpus`; a small one is made at the first start, others by `python -m retriever.build`."""
    encoder: str = "hashed"
    """Query encoder: `hashed` (built in, no weights) or a Hugging Face folder; must be the index's own."""
    top_k: Count = 3
    """Passages returned for each search."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for one retrieval call, retries included, before the run stops with an error."""
    max_query_chars: Count = 1000
    """Longer queries are cut to so many characters before they are sent."""


class RolloutSettings(Section):
    engine: Literal["hf"] = "hf"
    """What samples tokens; `hf` is the exact reference on transformers."""
    questions_per_step: Count = 256
    """Questions drawn in one step, over all ranks."""
    group_size: Count = 10
    """Trajectories sampled for each question (G)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; logits are divided by it."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with at least this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from so many most likely tokens; 0 is off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens below this fraction of the most likely token's probability; 0 is off."""
    max_prompt_tokens: Count = 2048
    """Tokens of a prompt; a question with a longer one is not rolled out, its trajectories are marked truncated."""
    max_turn_tokens: Count = 512
    """Sampled tokens of one turn."""
    max_observation_tokens: Count = 512
    """Tokens of one observation with its wrapper; documents are cut to fit, the wrapper never."""
    max_searches: Annotated[int, Field(ge=0)] = 5
    """Turns that may search; one more turn may only answer."""
    max_trajectory_tokens: Count = 7680
    """Tokens of prompt, turns and observations together; a trajectory that would exceed it ends, marked truncated."""
    prefill_tokens: Count = 16384
    """Tokens in one forward that fills the cache (prompts, observations); bounds its peak memory."""
    schedule: Literal["lockstep", "async"] = "lockstep"
    """`lockstep`: all trajectories go from turn to turn together; repeats bit for bit. `async`: those whose documents
    have come go on while others write; the same trajectories up to float rounding, so not bit-equal between runs."""
    max_rows: Count | None = None
    """Trajectories that a rank holds in its cache at once, in whole groups; null is all of them. Bounds the cache to
    max_rows * max_trajectory_tokens tokens."""
    logprobs: Literal["sampled", "full"] = "sampled"
    """Distribution that sampling_logprobs are of: after temperature, top_p, top_k and min_p, or the full softmax."""

    @model_validator(mode="after")
    def _fits(self) -> RolloutSettings:
        if self.max_rows is not None and self.max_rows < self.group_size:
            raise ValueError(
                f"rollout.max_rows = {self.max_rows} cannot hold a group of rollout.group_size = {self.group_size}: "
                "raise it to at least the group size"
            )
        needed = self.max_prompt_tokens + self.max_turn_tokens
        if needed > self.max_trajectory_tokens:
            raise ValueError(
                f"rollout.max_trajectory_tokens = {self.max_trajectory_tokens} is less than rollout.max_prompt_tokens "
                f"+ rollout.max_turn_tokens = {needed}: raise it or lower the other two"
            )
        return self


class RewardSettings(Section):
    name: Literal["f1", "em"] = "f1"
    """Reward of a trajectory: F1 or exact match of its answer with the best golden answer, 0 without an answer."""


class LossSettings(Section):
    name: Literal["sapo"] = "sapo"
    """Policy objective; with gamma = 0 it is GRPO."""
    gamma: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the drift penalty log(ratio) on the tokens the gate lets through; 0 is GRPO."""
    tau: Annotated[float, Field(gt=0)] = 1.0
    """The gate is open below this ratio of new to old probability."""
    gate: Literal["equation", "listing"] = "equation"
    """`equation`: ratio < tau and advantage > 0 (Eq. 11); `listing`: <= and >= (the released code)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    reduction: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """How token terms are averaged over the minibatch: mean of response means (Eq. 9), mean of all tokens, or mean of
    response sums over the constant (max_searches + 1) * max_turn_tokens."""
    ref_kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the frozen starting model; 0 keeps no copy of that model."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean token entropy (nats) added to the objective."""


class OptimSettings(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW after warm-up; constant from there on."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up over so many steps: step s (from 1) runs at lr * min(1, s / warmup_steps), so never at 0."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's term against division by zero."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The global gradient is scaled down to this norm."""
    steps: Count = 420
    """Training steps; one step = one rollout batch and its updates."""
    minibatch_responses: Count = 256
    """Trajectories, over all ranks, behind one optimiser update."""
    epochs: Count = 1
    """Passes over each rollout batch."""
    micro_batch_tokens: Count = 16384
    """Padded tokens in one forward and backward of one rank; bounds memory, does not change the result."""
    micro_batch_responses: Count = 8
    """Trajectories in one forward and backward of one rank, at most; does not change the result."""
    max_nonfinite: Annotated[int, Field(ge=0)] = 5
    """Updates that may be skipped for a loss or gradient that is not finite; one more stops the run."""


class DistributedSettings(Section):
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: 0 replicates, 1 shards optimiser state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimiser state in CPU memory (zero_stage 1 to 3)."""
    offload_params: bool = False
    """Keep the weights in CPU memory between uses (zero_stage 3)."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds a rank waits for the others in a collective call before the run stops."""

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> DistributedSettings:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("distributed.offload_optimizer needs distributed.zero_stage 1, 2 or 3")
        if self.offload_params and self.zero_stage != 3:
            raise ValueError("distributed.offload_params needs distributed.zero_stage 3")
        return self


class EvalSettings(Section):
    every_steps: Count | None = 20
    """Evaluate after each so many steps; null only at the end."""
    questions: Count = 500
    """Held-out questions of one evaluation during training (the first so many)."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of an evaluation; 0 is greedy."""
    at_start: bool = True
    """Evaluate also before the first step."""
    sampled: bool = False
    """Evaluate also with the rollout's own sampling settings."""
    fault_free: bool = False
    """Make the `warm_start` also from demonstrations without faults, and evaluate it beside the run."""


class CheckpointSettings(Section):
    every_steps: Count | None = 20
    """Save after each so many steps; null only at the end."""
    keep: Count | None = 2
    """Newest checkpoints kept; null keeps all."""


class WandbSettings(Section):
    mode: Literal["disabled", "offline", "online"] = "disabled"
    """`offline` needs no account; `online` needs a login."""
    project: str = "sapo"
    """Project the run is filed under."""
    entity: str | None = None
    """User or team; null is the account's default."""
    group: str | None = None
    """Group that joins related runs; null is none."""


class LoggingSettings(Section):
    wandb: WandbSettings = WandbSettings()
    """Weights & Biases; metrics.jsonl is written in any case."""
    trajectories_every_steps: Count | None = 10
    """Write readable trajectories after each so many steps; null never."""
    console: bool = True
    """Show a live line with step, reward and speed."""


class Config(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is <output_dir>/<name>. Letters, digits, dot, dash and underscore."""
    output_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: order of questions, sampling, warm start."""
    model: ModelSettings = ModelSettings()
    """The policy."""
    world: WorldSettings | None = None
    """Synthetic knowledge world that brings questions, passages and index; null uses `data` and `retriever`."""
    warm_start: WarmStartSettings | None = None
    """Make a tiny policy and train it on demonstrations of the `world`; null starts from `model.path`."""
    data: DataSettings = DataSettings()
    """Question files."""
    protocol: ProtocolSettings = ProtocolSettings()
    """How questions are put and actions read."""
    retriever: RetrieverSettings = RetrieverSettings()
    """Where passages come from."""
    rollout: RolloutSettings = RolloutSettings()
    """Sampling of trajectories."""
    reward: RewardSettings = RewardSettings()
    """Scoring of trajectories."""
    loss: LossSettings = LossSettings()
    """Policy objective."""
    optim: OptimSettings = OptimSettings()
    """Optimiser and update loop."""
    distributed: DistributedSettings = DistributedSettings()
    """Processes and sharding."""
    eval: EvalSettings = EvalSettings()
    """Evaluation during training."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saving."""
    logging: LoggingSettings = LoggingSettings()
    """What is recorded and shown."""

    @model_validator(mode="after")
    def _sources_are_complete(self) -> Config:
        if self.warm_start is not None and self.world is None:
            raise ValueError("warm_start learns from demonstrations of a world: add a 'world' section or remove it")
        if self.eval.fault_free and self.warm_start is None:
            raise ValueError("eval.fault_free compares with another warm start: add 'warm_start' or set it to false")
        if not self.model.path and self.warm_start is None:
            raise ValueError("no policy: set model.path to a Hugging Face folder or hub id, or add 'warm_start'")
        if self.world is not None:
            if self.data.model_copy(update={"shuffle": True}) != DataSettings():
                raise ValueError(
                    "the world brings its own questions (world.train_questions, world.heldout_questions): of 'data' "
                    "only 'shuffle' goes with it; remove the other keys or the world"
                )
            return self
        if not self.data.train:
            raise ValueError("no training questions: set data.train to .jsonl or .parquet files, or add a 'world'")
        if not self.retriever.url and (self.retriever.index is None or self.retriever.corpus is None):
            raise ValueError("no retriever: set retriever.url, or both retriever.corpus and retriever.index")
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.output_dir / self.name


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of one step. Responses are trajectories; `_per_rank` is the share of one process."""

    world_size: int
    questions_per_step: int
    questions_per_rank: int
    group_size: int
    responses_per_step: int
    responses_per_rank: int
    minibatch_responses: int
    minibatch_responses_per_rank: int
    minibatches_per_epoch: int
    epochs: int
    updates_per_step: int
    steps: int
    total_updates: int

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, each {self.questions_per_step} questions x {self.group_size} samples = "
            f"{self.responses_per_step} responses and {self.minibatches_per_epoch} minibatches of "
            f"{self.minibatch_responses} x epochs {self.epochs} = {self.updates_per_step} updates; "
            f"{self.total_updates} updates in all; processes {self.world_size}, each with {self.questions_per_rank} "
            f"questions and {self.minibatch_responses_per_rank} responses of a minibatch"
        )


def batch_plan(config: Config, world_size: int) -> BatchPlan:
    """Derive every batch count for `world_size` processes; raise ConfigError where something does not divide."""
    rollout, optim = config.rollout, config.optim
    responses = rollout.questions_per_step * rollout.group_size

    def divide(total: int, total_name: str, parts: int, parts_name: str, fix: str) -> int:
        if total % parts:
            raise ConfigError(f"{total_name} = {total} is not a multiple of {parts_name} = {parts}: {fix}")
        return total // parts

    questions_per_rank = divide(
        rollout.questions_per_step,
        "rollout.questions_per_step",
        world_size,
        "the number of processes",
        "a group stays whole on one process, so each must get the same number of questions",
    )
    minibatches = divide(
        responses,
        "rollout.questions_per_step x rollout.group_size",
        optim.minibatch_responses,
        "optim.minibatch_responses",
        "every trajectory belongs to exactly one minibatch of an epoch; it counts trajectories, not questions",
    )
    minibatch_per_rank = divide(
        optim.minibatch_responses,
        "optim.minibatch_responses",
        world_size,
        "the number of processes",
        "each process contributes the same share of a minibatch",
    )
    if optim.micro_batch_tokens < rollout.max_trajectory_tokens:
        raise ConfigError(
            f"optim.micro_batch_tokens = {optim.micro_batch_tokens} is less than rollout.max_trajectory_tokens = "
            f"{rollout.max_trajectory_tokens}: one trajectory must fit in a micro-batch"
        )
    available = config.data.train_questions
    if available is not None and available < rollout.questions_per_step:
        raise ConfigError(
            f"data.train_questions = {available} is less than rollout.questions_per_step = "
            f"{rollout.questions_per_step}: a step draws each question at most once"
        )
    updates = minibatches * optim.epochs
    return BatchPlan(
        world_size=world_size,
        questions_per_step=rollout.questions_per_step,
        questions_per_rank=questions_per_rank,
        group_size=rollout.group_size,
        responses_per_step=responses,
        responses_per_rank=responses // world_size,
        minibatch_responses=optim.minibatch_responses,
        minibatch_responses_per_rank=minibatch_per_rank,
        minibatches_per_epoch=minibatches,
        epochs=optim.epochs,
        updates_per_step=updates,
        steps=optim.steps,
        total_updates=updates * optim.steps,
    )


def config_warnings(config: Config) -> list[str]:
    """Return one sentence for each setting that is legal but probably not what was meant."""
    rollout, loss, optim = config.rollout, config.loss, config.optim
    warnings = []
    turns = rollout.max_searches + 1
    needed = (
        rollout.max_prompt_tokens
        + turns * rollout.max_turn_tokens
        + rollout.max_searches * rollout.max_observation_tokens
    )
    if needed > rollout.max_trajectory_tokens:
        warnings.append(
            f"rollout.max_trajectory_tokens = {rollout.max_trajectory_tokens} cannot hold a full prompt, {turns} full "
            f"turns and {rollout.max_searches} full observations ({needed} tokens): long trajectories end truncated"
        )
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    if truncated:
        recorded = "; with rollout.logprobs = full the recorded ones hide it" if rollout.logprobs == "full" else ""
        warnings.append(
            "rollout.top_p, top_k or min_p cut the distribution that is sampled from, while the loss uses the full "
            f"softmax: expect a constant policy/engine_mismatch{recorded}"
        )
    updates = rollout.questions_per_step * rollout.group_size // optim.minibatch_responses * optim.epochs
    if loss.gamma > 0 and loss.gate == "equation" and loss.tau <= 1 and updates <= 1:
        warnings.append(
            "one update per rollout batch leaves every ratio at exactly 1, so SAPO's gate (ratio < tau <= 1) never "
            "opens and the run is plain GRPO: lower optim.minibatch_responses or raise optim.epochs"
        )
    if rollout.group_size == 1:
        warnings.append("rollout.group_size = 1 has no group to compare with: the advantage is the reward itself")
    if optim.warmup_steps >= optim.steps:
        warnings.append(
            f"optim.warmup_steps = {optim.warmup_steps} is not less than optim.steps = {optim.steps}: "
            "the learning rate never stays at optim.lr"
        )
    return warnings


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a config file, its preset and `key.sub=value` overrides (values are YAML; nothing after = is "").

    A top-level `preset: presets/name` is looked up beside the config file, without or with `.yaml`.
    Raises ConfigError naming the file or override, the dotted key and the fix.
    """
    path = Path(path)
    layers = [(str(path), _read_yaml(path))]
    layers += [(f"override '{text}'", _parse_override(text)) for text in overrides]
    preset = None
    for _, tree in layers:
        preset = tree.pop("preset", preset)
    if preset is not None:
        preset_path = path.parent / str(preset)
        if preset_path.suffix != ".yaml":
            preset_path = preset_path.with_name(preset_path.name + ".yaml")
        tree = _read_yaml(preset_path)
        if "preset" in tree:
            raise ConfigError(f"{preset_path}: a preset cannot name another preset; merge the two files")
        layers.insert(0, (str(preset_path), tree))

    merged: dict[str, Any] = {}
    origins: list[tuple[str, str]] = []
    for source, tree in layers:
        _check_keys(tree, source)
        merged = _merge(merged, tree)
        origins += [(key, source) for key in _leaves(tree)]
    try:
        # JSON mode is strict about types ("3" is no number, true is no integer) yet takes lists and path strings.
        return Config.model_validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        problems = [_describe(problem, origins, str(path)) for problem in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from None


def to_yaml(config: Config) -> str:
    """Write the resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars (1e-6 is a number, `off` a word, 010 no octal) and without repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is repeated", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)", "-+0123456789."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot read the config file: {reason}") from None
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config file holds 'key: value' lines, this one holds a {type(tree).__name__}")
    return tree


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"override '{text}' is not of the form key.sub=value, for example optim.lr=1e-6")
    tree: Any = _parse_yaml(value, f"override '{text}'") if value.strip() else ""
    for name in reversed(names):
        tree = {name: tree}
    return tree


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the model class of a field annotated `Section` or `Section | None`, else None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        child = _section_class(field.annotation)
        if child is not None:
            keys += _all_keys(child, f"{prefix}{name}.")
    return keys


def _check_keys(tree: dict[str, Any], source: str, section: type[BaseModel] = Config, prefix: str = "") -> None:
    for key, value in tree.items():
        if key not in section.model_fields:
            right = " or ".join(f"'{path}'" for path in _nearest_keys(prefix, str(key)))
            where = f"'{prefix[:-1]}'" if prefix else "the top level"
            raise ConfigError(
                f"{source}: unknown key '{prefix}{key}'; did you mean {right}? "
                f"Keys of {where}: {', '.join(section.model_fields)}"
            )
        child = _section_class(section.model_fields[key].annotation)
        if child is not None and isinstance(value, dict):
            _check_keys(value, source, child, f"{prefix}{key}.")


def _nearest_keys(prefix: str, key: str) -> list[str]:
    """Return the dotted paths most likely meant: similar last name or same initials, rather in the same section."""
    initials = "".join(word[:1] for word in key.split("_"))

    def likeness(path: str) -> float:
        section, _, name = path.rpartition(".")
        same = 1.0 if name == initials else difflib.SequenceMatcher(None, key, name).ratio()
        return same + (0.2 if section == prefix.rstrip(".") else 0.0)

    paths = _all_keys()
    best = max(map(likeness, paths))
    return [path for path in paths if likeness(path) == best]


def _describe(problem: Any, origins: list[tuple[str, str]], file: str) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    source = file
    for set_key, setter in origins:
        if f"{key}.".startswith(f"{set_key}.") or f"{set_key}.".startswith(f"{key}."):
            source = setter
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{source}: '{key}' is missing and has no default"
    if problem["type"] == "value_error":  # raised by a validator, whose message names its keys
        return f"{source}: {message}"
    return f"{source}: '{key}' is {json.dumps(problem['input'], default=str)}: {message[0].lower()}{message[1:]}"
