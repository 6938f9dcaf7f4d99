"""The whole configuration: schema, YAML files, overrides, validation, batch arithmetic.

Five layers, later ones win: defaults here < the file named by the config's `base` key < that named by `preset` < the
config file < `key.sub=value` overrides. Every problem is found before a model is loaded and raised as one `ConfigError`
paragraph.
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


class LoraSettings(Section):
    rank: Count = 16
    """Rank of the adapters (r)."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product of an adapter's two matrices is scaled by alpha / rank."""
    target_modules: Annotated[list[str], Field(min_length=1)] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]
    """Last part of the names of the linear layers that get an adapter; the output head takes none."""


class ModelSettings(Section):
    path: str = ""
    """Hugging Face folder or hub id of the policy. Empty: the model that `warm_start` makes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the forward and backward pass. bfloat16 is slower than float32 on most CPUs."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of training and generation; both take the per-row masks that the engine needs."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time for far less memory."""
    lora: LoraSettings | None = None
    """Train low-rank adapters (peft) and freeze the model, whose adapters off are then the reference of
    loss.ref_kl_beta; null trains all weights."""
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
    template: Literal["sapo", "refine", "search_r1", "plain"] = "sapo"
    """Prompt and observation tags; a checkpoint must be used with the template it was trained with."""
    think_aware: bool = False
    """Ignore search and answer tags inside an open <think>; false lets tags act anywhere, as in Search-R1."""


class RetrieverSettings(Section):
    url: str | list[str] = ""
    """Base URL of a running retrieval server, or a list of replicas that serve the same index. Empty: `corpus` and
    `index` are opened, or a `world` brings its own."""
    token_env: str = ""
    """Environment variable that holds the token of the servers of `url`; empty sends none."""
    corpus_id: str = ""
    """Beginning of the sha256 that the corpus of the servers of `url` must have; empty takes any."""
    corpus: Path | None = None
    """Passages, JSONL of {id, contents} with contents = "Title"<newline>text."""
    index: Path | None = None
    """Index folder over `corpus`; a small one is made at the first start, others by `python -m retriever.build`."""
    encoder: str | dict[str, str | bool | int] | None = None
    """Query encoder: `hashed` (built in, no weights), a Hugging Face folder or hub id; must be the index's own. null is
    the index's own, whatever it is, and `hashed` where an index is made. Servers of `url` must have what is set here,
    the folder of a name apart, where they can tell. A model other than E5, BGE, GTE and Contriever also needs its
    pooling and prefixes: {name: MODEL, pooling: mean, normalize: true, query_prefix: "", passage_prefix: ""}, and may
    have max_length (tokens)."""
    kind: Literal["dense", "bm25", "hybrid"] = "dense"
    """`dense` compares vectors, `bm25` counts words and needs no encoder, `hybrid` fuses the ranks of both."""
    reranker: str = ""
    """Hugging Face folder or hub id of a cross-encoder that puts the best 20 passages in order; empty is none."""
    search_effort: Count | None = None
    """Lists an IVF index looks into, or candidates an HNSW search keeps; null is as the index was built."""
    gpu: bool = False
    """Hold a copy of the index's vectors in float16, in equal parts on all visible GPUs (needs faiss-gpu)."""
    top_k: Count = 3
    """Passages returned for each search."""
    node_server: Literal["auto", "always", "never"] = "auto"
    """Without `url`: one server process for all ranks of a node (`always`), or the index opened by each rank (`never`).
    `auto` serves when a node has several ranks and the corpus is over 100 MB: then one encoder and joint batches are
    worth the way over HTTP. Vectors are memory-mapped, so a node holds them once in either case."""
    threads: Count = 1
    """CPU threads that FAISS takes for one search, in each process that has the index open; encoders have torch's."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for one retrieval call, retries included, before the run stops with an error; a server may be
    restarted meanwhile."""
    max_query_chars: Count = 1000
    """Longer queries are cut to so many characters before they are sent."""

    @model_validator(mode="after")
    def _left_to_the_server(self) -> RetrieverSettings:
        flags = {"kind": "--kind", "reranker": "--reranker", "search_effort": "--effort", "gpu": "--gpu"}
        for key, flag in flags.items():
            value = getattr(self, key)
            if self.url and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"retriever.{key} = {value!r} does nothing with retriever.url, its servers decide it: start them "
                    f"with {flag}{'' if value is True else f' {value}'} and leave retriever.{key} out"
                )
        return self


class VllmSettings(Section):
    memory_fraction: Fraction = 0.4
    """Share of the GPU's memory that each process's engine may take, its copy of the weights included; on a CPU of the
    machine's, of which it takes what rollout.max_rows trajectories need."""
    sleep: bool = True
    """Give that memory back while the trainer works, and take it again for each rollout; a CPU engine keeps it."""
    update_bytes: Count = 1 << 30
    """Bytes of weights on their way to the engine at a time; under ZeRO-3 so many are gathered."""
    eager: bool = False
    """Neither compile the model nor capture CUDA graphs: the engine starts sooner and decodes more slowly."""


class RolloutSettings(Section):
    engine: Literal["hf", "vllm"] = "hf"
    """What samples tokens: `hf`, the exact reference on transformers, or `vllm`, faster and with a copy of the weights
    (docs/gpu.md)."""
    vllm: VllmSettings = VllmSettings()
    """What only rollout.engine = vllm reads."""
    questions_per_step: Count = 256
    """Questions drawn in one step, over all ranks."""
    group_size: Count = 10
    """Trajectories sampled for each question (G), at least 2."""
    resample_tries: Annotated[int, Field(ge=0)] = 0
    """Times per step that questions whose G rewards are all equal, which teach nothing, are replaced by others (dynamic
    sampling of DAPO); 0 keeps them, and so does the last try. Each try costs a rollout of what it replaces."""
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
        if self.group_size == 1:
            raise ValueError(
                "rollout.group_size = 1 leaves nothing to compare a response with: its mean is its own reward and its "
                "standard deviation, like the mean of the others, does not exist, so no advantage.estimator can tell "
                "good from bad: raise it to at least 2"
            )
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
    name: Literal["f1", "em", "cover_em", "autorefine", "search_r1_compat"] = "f1"
    """Reward of a trajectory. `f1`, `em`, `cover_em`: of its answer with the best golden answer, 0 without an answer.
    `autorefine`: F1, or 0.1 where F1 is 0 and a <refine> block holds a golden answer. `search_r1_compat`: EM as
    Search-R1 scores, over prompt and response, example answers and documents included."""
    format_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share w of a well-formed trajectory (1 or 0) in the reward: (1 - w) * reward + w * format; 0 is off."""


class AdvantageSettings(Section):
    estimator: Literal["zscore", "mean", "leave_one_out"] = "zscore"
    """What a reward is compared with. `zscore`: (R - group mean) / (group std + 1e-6), as in GRPO; `mean`: R - group
    mean, as in Dr. GRPO; `leave_one_out`: R - mean of the group's other rewards, as in RLOO."""


# The parameters of each loss (keywords of its function in sapo/baselines.py) with their defaults, its paper's.
LOSS_PARAMETERS: dict[str, dict[str, float | str]] = {
    "sapo": {"gamma": 0.1, "tau": 1.0, "gate": "equation", "clip_low": 0.2, "clip_high": 0.2},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "kl_uncond": {"gamma": 0.1, "clip_low": 0.2, "clip_high": 0.2},
    "kl_ratio": {"gamma": 0.1, "tau": 1.0, "clip_low": 0.2, "clip_high": 0.2},
    "positive_nll": {"gamma": 0.1, "clip_low": 0.2, "clip_high": 0.2},
    "llds": {"gamma": 0.2, "gate_level": "response", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"ratio_max": 5.0},
    "soft_sapo": {"temperature_pos": 1.0, "temperature_neg": 1.05},
}
LOSS_REDUCTIONS = {"dapo": "token_mean", "cispo": "token_mean", "dr_grpo": "constant"}  # others: sequence_mean
MISMATCH_CAPS = {"none": None, "tis": 2.0, "mis": 3.0}


class LossSettings(Section):
    name: Literal[
        "sapo", "grpo", "kl_uncond", "kl_ratio", "positive_nll", "llds", "dapo", "dr_grpo", "gspo", "cispo", "soft_sapo"
    ] = "sapo"
    """Policy objective, a function of sapo/baselines.py. `sapo` is Search Agent Policy Optimization (arXiv 2603.10069),
    `soft_sapo` Soft Adaptive Policy Optimization (2511.20347). `dapo` takes its dynamic sampling from
    `rollout.resample_tries`; `dr_grpo` needs advantage.estimator `mean`. Parameters of other losses stay null."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Weight of the term that keeps likelihoods up: sapo, kl_uncond, kl_ratio, positive_nll (0.1), llds (its lambda,
    0.2). 0 is GRPO."""
    tau: Annotated[float, Field(gt=0)] | None = None
    """The gate is open below this ratio of new to old probability: sapo, kl_ratio (1.0)."""
    gate: Literal["equation", "listing"] | None = None
    """sapo: `equation` (default): ratio < tau and advantage > 0 (Eq. 11); `listing`: <= and >= (the released code)."""
    gate_level: Literal["response", "action"] | None = None
    """llds: the gate is open where the summed log-ratio of the `response` (default) or of the turn (`action`) is below
    0."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The ratio is clipped below at 1 - clip_low: all but cispo and soft_sapo (0.2; gspo 3e-4)."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The ratio is clipped above at 1 + clip_high: all but cispo and soft_sapo (0.2; dapo 0.28; gspo 4e-4)."""
    ratio_max: Annotated[float, Field(ge=1)] | None = None
    """cispo: cap of the ratio that weighs log-probabilities (5.0)."""
    temperature_pos: Annotated[float, Field(gt=0)] | None = None
    """soft_sapo: temperature of its sigmoid where the advantage is above 0 (1.0)."""
    temperature_neg: Annotated[float, Field(gt=0)] | None = None
    """soft_sapo: temperature of its sigmoid elsewhere (1.05)."""
    reduction: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """How token terms are averaged over the minibatch: mean of response means (Eq. 9), mean of all tokens, or mean of
    response sums over the constant (max_searches + 1) * max_turn_tokens. Left out, it is the loss's own: token_mean
    for dapo and cispo, constant for dr_grpo, sequence_mean for the others. gspo and dr_grpo take no other."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage A is below 0, a token's loss is at most -dual_clip * A (3 is usual); null is off. Not for
    cispo and soft_sapo, which do not clip the ratio."""
    off_policy_delta: Annotated[float, Field(gt=0)] | None = None
    """Leave out responses of negative advantage whose mean of old minus new logprobs is above this, in nats; null is
    off."""
    mismatch: Literal["none", "tis", "mis"] = "none"
    """Weigh each token by the ratio of the trainer's to the engine's probability of it: `tis` cuts the ratio at
    mismatch_cap, `mis` drops tokens above it. With top_p, top_k or min_p it needs rollout.logprobs `sampled`."""
    mismatch_cap: Annotated[float, Field(ge=1)] | None = None
    """Cap of that ratio (tis 2.0, mis 3.0)."""
    ref_kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the frozen starting model. 0 keeps no copy of that model, nor does model.lora;
    distributed.zero_stage 3 shards the copy, distributed.offload_reference keeps it in CPU memory."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean token entropy (nats) added to the objective."""

    @property
    def parameters(self) -> dict[str, float | str]:
        """The parameters of the loss, as keywords of its function."""
        return {key: getattr(self, key) for key in LOSS_PARAMETERS[self.name]}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_its_own(cls, given: Any) -> Any:
        """Give the parameters of the named loss their defaults, refuse those of other losses."""
        if not isinstance(given, dict):
            return given
        name, mismatch = given.get("name", "sapo"), given.get("mismatch", "none")
        if name not in list(LOSS_PARAMETERS) or mismatch not in list(MISMATCH_CAPS):
            return given  # the fields name their choices
        own = LOSS_PARAMETERS[name]
        for key in given:
            having = [other for other, parameters in LOSS_PARAMETERS.items() if key in parameters]
            if having and name not in having and given[key] is not None:
                clash = (
                    " (sapo is Search Agent Policy Optimization, arXiv 2603.10069, soft_sapo Soft Adaptive Policy "
                    "Optimization, 2511.20347)"
                    if "soft_sapo" in (name, *having)
                    else ""
                )
                raise ValueError(
                    f"loss.{key} is not a parameter of loss.name = {name}, which has {', '.join(own)}: remove it, set "
                    f"it to null, or choose one of the losses that have it, {', '.join(having)}{clash}"
                )
        defaults = {
            **own,
            "reduction": LOSS_REDUCTIONS.get(name, "sequence_mean"),
            "mismatch_cap": MISMATCH_CAPS[mismatch],
        }
        return given | {key: value for key, value in defaults.items() if given.get(key) is None}

    @model_validator(mode="after")
    def _belongs_together(self) -> LossSettings:
        if self.name == "gspo" and self.reduction != "sequence_mean":
            raise ValueError(
                f"loss.reduction = {self.reduction} counts tokens, but loss.name = gspo has one ratio a response: set "
                "it to sequence_mean or remove it"
            )
        if self.name == "dr_grpo" and self.reduction != "constant":
            raise ValueError(
                f"loss.reduction = {self.reduction} weighs tokens by length, which loss.name = dr_grpo is there to "
                "avoid: set it to constant or remove it; for other reductions use loss.name = grpo"
            )
        if self.dual_clip is not None and "clip_low" not in self.parameters:
            raise ValueError(
                f"loss.dual_clip goes with a clipped ratio, which loss.name = {self.name} does not have: remove it"
            )
        if self.mismatch == "none" and self.mismatch_cap is not None:
            raise ValueError("loss.mismatch_cap without loss.mismatch does nothing: set loss.mismatch to tis or mis")
        return self


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
    packing: Literal["packed", "padded"] = "packed"
    """`packed`: rows are forwarded without padding, and what rows of a micro-batch begin with in common (prompts) once;
    `padded`: as rectangles, for models whose attention cannot be replaced. The same result up to float rounding."""
    micro_batch_tokens: Count = 16384
    """Tokens in one forward and backward of one rank, padding included; bounds memory, does not change the result."""
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
    offload_reference: bool = False
    """Keep the frozen model of loss.ref_kl_beta in CPU memory while it does not score (zero_stage 0 to 2; stage 3
    shards it like the policy)."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds a rank waits for the others in a collective call before the run stops."""
    silence_s: Annotated[float, Field(ge=10)] = 120.0
    """Seconds without a sign of life after which a rank is lost and the others stop."""

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> DistributedSettings:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "distributed.offload_optimizer needs distributed.zero_stage 1, 2 or 3, which is 0: raise it, or set "
                "offload_optimizer to false"
            )
        if self.offload_params and self.zero_stage != 3:
            raise ValueError(
                f"distributed.offload_params needs distributed.zero_stage 3, which is {self.zero_stage}: only stage 3 "
                "takes weights away between their uses; raise it, or set offload_params to false"
            )
        if self.offload_reference and self.zero_stage == 3:
            raise ValueError(
                "distributed.offload_reference is for whole copies, but distributed.zero_stage 3 shards the reference: "
                "set it to false; offload_params keeps policy and reference in CPU memory"
            )
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
    keep_last: Count | None = 2
    """Newest checkpoints kept; null keeps all."""
    keep_best: bool = True
    """Keep also the one with the best EM on the held-out questions, of those saved in a step that evaluates them; it
    stands in checkpoints/best.json. Only EMs of the same questions and sampling are compared."""
    async_save: bool = True
    """Write while training goes on, from a copy in host memory: on each rank its part of the optimiser, on the first
    also the weights. Until it is complete, a kill goes back to the checkpoint before."""


class DriftSettings(Section):
    action: Literal["warn", "stop", "rollback"] = "warn"
    """When the alarm sounds: `warn` and go on; `stop` with a checkpoint and exit status 3; `rollback` to the last
    checkpoint from before the drift and go on from there at a lower learning rate."""
    patience: Count = 3
    """The alarm sounds when the same limit is passed in so many steps in a row."""
    window: Count = 10
    """Limits relative to `before` are measured from the median of so many latest steps within the limit, and hold once
    there are `patience` of them."""
    positive_drift_frac: Fraction | None = 0.02
    """Limit of policy/positive_drift_frac, tokens of good responses that lost half of their probability; null: off."""
    underflow_frac: Fraction | None = 0.1
    """Limit of policy/underflow_frac: responses whose cumulative ratio underflows; null is off."""
    clip_frac: Fraction | None = 0.1
    """Limit of policy/clip_frac: tokens that clipping leaves without gradient; null is off."""
    entropy_rise: Annotated[float, Field(gt=0)] | None = 1.0
    """policy/entropy_nats may rise by so many nats above before; null is off."""
    entropy_fall: Fraction | None = None
    """policy/entropy_nats may fall by this share of before; null is off: entropy falls in healthy training too."""
    grad_norm_rise: Annotated[float, Field(gt=1)] | None = 10.0
    """optim/grad_norm may be so many times that of before; null is off."""
    invalid_rise: Fraction | None = 0.2
    """rollout/invalid_frac may rise by this much above before; null is off."""
    reward_fall: Fraction | None = 0.5
    """reward/mean may fall by this share of before; null is off."""
    engine_mismatch: Annotated[float, Field(gt=0)] | None = 0.1
    """Limit of policy/engine_mismatch, nats; null is off."""
    underflow_ratio: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """A response underflows when the product of its tokens' ratios is below this (eps of Definition 1)."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 2
    """`rollback` goes on so many times; the next alarm rolls back and stops the run with exit status 3."""
    rollback_lr_factor: Fraction = 0.5
    """Each rollback multiplies the learning rate of the rest of the run by this."""


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
    advantage: AdvantageSettings = AdvantageSettings()
    """From rewards to advantages."""
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
    drift: DriftSettings = DriftSettings()
    """Alarm on a policy that drifts away from its own samples."""
    logging: LoggingSettings = LoggingSettings()
    """What is recorded and shown."""

    @model_validator(mode="after")
    def _loss_gets_what_it_needs(self) -> Config:
        rollout, loss = self.rollout, self.loss
        truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        if rollout.engine == "vllm" and rollout.logprobs == "full" and truncated:
            raise ValueError(
                "rollout.logprobs = full is not recorded by rollout.engine = vllm beside top_p, top_k or min_p: set "
                "rollout.logprobs to sampled, or rollout.engine to hf"
            )
        if rollout.engine == "vllm" and self.model.lora is not None:
            raise ValueError(
                "rollout.engine = vllm takes whole weights, and model.lora keeps its adapters beside them: set "
                "rollout.engine to hf, or remove model.lora"
            )
        if loss.mismatch != "none" and rollout.logprobs == "full" and truncated:
            raise ValueError(
                f"loss.mismatch = {loss.mismatch} divides by the probability that a token was sampled with, which "
                "rollout.logprobs = full does not record beside top_p, top_k or min_p: set rollout.logprobs to sampled"
            )
        if loss.name == "dr_grpo" and self.advantage.estimator != "mean":
            raise ValueError(
                f"advantage.estimator = {self.advantage.estimator}, but the advantage of loss.name = dr_grpo is R - "
                "group mean: set advantage.estimator to mean"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_reference_to_offload(self) -> Config:
        if self.distributed.offload_reference and (self.model.lora is not None or not self.loss.ref_kl_beta):
            reason = "loss.ref_kl_beta = 0 keeps none" if self.model.lora is None else "model.lora needs none"
            raise ValueError(
                f"distributed.offload_reference is for the copy of the starting model, and {reason}: set it to false"
            )
        return self

    @model_validator(mode="after")
    def _sources_are_complete(self) -> Config:
        if self.warm_start is not None and self.world is None:
            raise ValueError("warm_start learns from demonstrations of a world: add a 'world' section or remove it")
        if self.eval.fault_free and self.warm_start is None:
            raise ValueError("eval.fault_free compares with another warm start: add 'warm_start' or set it to false")
        if self.optim.packing == "packed" and self.model.attn_implementation != "sdpa":
            raise ValueError(
                f"optim.packing = packed brings its own attention, so model.attn_implementation = "
                f"{self.model.attn_implementation} would not be used in training: set optim.packing = padded"
            )
        if not self.model.path and self.warm_start is None:
            raise ValueError("no policy: set model.path to a Hugging Face folder or hub id, or add 'warm_start'")
        if self.reward.name == "search_r1_compat" and self.protocol.template == "plain":
            raise ValueError(
                "reward.name = search_r1_compat reads only the last of two or more <answer> blocks and counts on those "
                "in the prompt, but the prompt of protocol.template = plain has none, so that every single answer "
                "would score 0: use template search_r1, or reward.name = em"
            )
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
    gates = {"kl_ratio": "the gate of kl_ratio (ratio < tau <= 1)", "llds": "the gate of llds (log-ratio < 0)"}
    if loss.gate == "equation":
        gates["sapo"] = "SAPO's gate (ratio < tau <= 1)"
    if loss.name in gates and loss.gamma > 0 and (loss.tau is None or loss.tau <= 1) and updates <= 1:
        warnings.append(
            f"one update per rollout batch leaves every ratio at exactly 1, so {gates[loss.name]} never opens and the "
            "run is plain GRPO: lower optim.minibatch_responses or raise optim.epochs"
        )
    if config.reward.name == "autorefine" and config.protocol.template != "refine":
        warnings.append(
            f"reward.name = autorefine rewards <refine> blocks, but protocol.template = {config.protocol.template} "
            "asks for none, so that it is plain F1: set protocol.template to refine"
        )
    saved, scored = config.checkpoint.every_steps, config.eval.every_steps
    if config.checkpoint.keep_best and saved and scored and saved % scored:
        warnings.append(
            f"checkpoint.every_steps = {saved} is no multiple of eval.every_steps = {scored}, so that some checkpoints "
            "have no EM by which checkpoint.keep_best could choose them"
        )
    if config.drift.action == "rollback" and config.drift.rollback_lr_factor == 1:
        warnings.append(
            "drift.rollback_lr_factor = 1 changes nothing after a rollback: on a CPU the same steps come again, bit "
            "for bit, and on a GPU nearly so; set it below 1"
        )
    if optim.warmup_steps >= optim.steps:
        warnings.append(
            f"optim.warmup_steps = {optim.warmup_steps} is not less than optim.steps = {optim.steps}: "
            "the learning rate never stays at optim.lr"
        )
    return warnings


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a config file, its base and preset, and `key.sub=value` overrides (values are YAML; nothing after = is "").

    The files named by a top-level `base: presets/name` and `preset: presets/name` are looked up beside the config file,
    without or with `.yaml`. A base holds what several configs share; a preset changes it, also as an override.
    Raises ConfigError naming the file or override, the dotted key and the fix.
    """
    path = Path(path)
    layers = [(str(path), _read_yaml(path))]
    layers += [(f"override '{text}'", _parse_override(text)) for text in overrides]
    below = []
    for key in ("base", "preset"):
        name = None
        for _, tree in layers:
            name = tree.pop(key, name)
        if name is not None:
            below.append(_read_below(path, key, str(name)))
    layers = below + layers

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


def _read_below(path: Path, key: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the path and content of the file that the config at `path` names by `base` or `preset`."""
    below = path.parent / name
    if below.suffix != ".yaml":
        below = below.with_name(below.name + ".yaml")
    tree = _read_yaml(below)
    for further in ("base", "preset"):
        if further in tree:
            raise ConfigError(f"{below}: a {key} cannot name another {further}; merge the two files")
    return str(below), tree


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
