"""What a run needs before it is started: memory of each GPU by part, what fits, and about how long a step takes.

    python -m sapo.plan --config configs/qwen7b.yaml --gpus 8 --gpu-memory-gb 80 [--nodes N] [--json] [key=value ...]

Bytes follow from the model's shapes, the settings and what our code, transformers and DeepSpeed 0.19 allocate; for the
longest trajectories that the settings allow, so an ordinary step needs less. GB are 2^30 bytes, as GPU memory is sold.
`benchmarks/plan.py` compares with measured peaks on a CPU; neither memory nor time has been compared with a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from sapo.assemble import print_user_error
from sapo.config import Config, ConfigError, LoraSettings, batch_plan, load_config
from sapo.distributed import zero_config
from sapo.engine.hf import SAMPLE_LOGITS
from sapo.policy import HEAD_CHUNK_LOGITS

GB = 1 << 30

# DeepSpeed's defaults at stage 3, in elements: weights that it keeps gathered in training, with those it fetches ahead,
# and weights whose gradients it copies for one part of its optimiser step.
LIVE_WEIGHTS = 1_000_000_000 + 50_000_000
SUB_GROUP = 1_000_000_000
BUCKET = zero_config(1, "float32", 1.0)["zero_optimization"]["reduce_bucket_size"]  # gradients reduced together

CUDA_BYTES = 2 * GB  # context, kernels, workspaces of cuBLAS and NCCL
FRAGMENTATION = 0.05  # share of a GPU's memory that its allocator loses between blocks
CPU_BYTES = GB // 2  # a process with its libraries
HOST_PROCESS_BYTES = 3 * GB  # the same with CUDA, its kernels and pinned buffers

# Most slots of the cache for each one that tokens need (`sapo/engine/kv_cache.py`): a full block grows by an eighth;
# with `async`, ended rows may hold a quarter more, in blocks a sixteenth longer than their rows.
CACHE_SLACK = {"lockstep": 9 / 8, "async": 5 / 4 * 17 / 16}
SAMPLE_BYTES = 20  # of each logit that is sampled from

WIKI_18 = (21_015_324, 768)  # passages and dim of the paper's index, assumed where the config's is not there yet

# Hub models whose shapes are known without the hub. intermediate_size and vocab_size are as in their config.json.
_QWEN: dict[str, dict[str, Any]] = {
    "1.5B": dict(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                 intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True),
    "3B": dict(hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
               intermediate_size=11008, vocab_size=151936, tie_word_embeddings=True),
    "7B": dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
               intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False),
    "14B": dict(hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
                intermediate_size=13824, vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip
_LLAMA_3B = dict(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
                 intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True)  # fmt: skip
KNOWN_MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    **{
        f"Qwen/Qwen2.5-{size}{kind}": (lambda shape=shape: Qwen2Config(**shape))
        for size, shape in _QWEN.items()
        for kind in ("", "-Instruct")
    },
    **{f"meta-llama/Llama-3.2-3B{kind}": (lambda: LlamaConfig(**_LLAMA_3B)) for kind in ("", "-Instruct")},
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers with a gated MLP.

    parameters: all of them, tied weights once, adapters too; trained: those that learn.
    """

    parameters: int
    trained: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Weights that a token is multiplied with; an embedding of its own is only looked up."""
        return self.parameters - (0 if self.tied else self.head_parameters)


def shape_of(config: PreTrainedConfig, lora: LoraSettings | None = None) -> ModelShape:
    """Return the shape of a model; its parameters are counted on an instance without memory (torch's meta device)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adapters = 0
    if lora is not None:
        for name, part in model.base_model.named_modules():
            if isinstance(part, torch.nn.Linear) and name.rpartition(".")[2] in lora.target_modules:
                adapters += lora.rank * (part.in_features + part.out_features)
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        parameters=parameters + adapters,
        trained=parameters if lora is None else adapters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    )


def model_config(config: Config) -> PreTrainedConfig:
    """Return the config of the policy: of the warm start, of a hub model known here, or read from `model.path`.

    Raises ConfigError when it cannot be read.
    """
    if config.warm_start is not None:
        settings = config.warm_start
        return Qwen2Config(
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            intermediate_size=settings.intermediate_size,
            vocab_size=settings.vocab_size,
            tie_word_embeddings=True,
        )
    path = config.model.path
    if path in KNOWN_MODELS and not Path(path).exists():
        return KNOWN_MODELS[path]()
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = {path!r}: its config.json cannot be read, so its shapes are not known: give an existing "
            f"folder, a hub name that this machine reaches, or one of {', '.join(KNOWN_MODELS)} "
            f"({str(error).splitlines()[0]})"
        ) from None


@dataclass(frozen=True)
class Setup:
    """What memory depends on.

    dtype_bytes: 2 for bfloat16, 4 for float32. engine_share: of a GPU that vLLM takes, 0 with engine hf.
    engine_update_bytes: of weights on their way to it. index_bytes: of a node, 0 with a server.
    """

    shape: ModelShape
    zero_stage: int
    ranks: int
    ranks_per_node: int
    on_gpu: bool
    dtype_bytes: int
    offload_optimizer: bool
    offload_params: bool
    reference: Literal["none", "adapters off", "copy"]
    offload_reference: bool
    checkpointing: bool
    micro_batch_tokens: int
    micro_batch_responses: int
    max_rows: int
    group_size: int
    prefill_tokens: int
    max_prompt_tokens: int
    max_observation_tokens: int
    max_trajectory_tokens: int
    schedule: Literal["lockstep", "async"]
    engine_share: float
    engine_sleeps: bool
    engine_update_bytes: int
    async_save: bool
    index_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that the model is loaded with: bfloat16 without ZeRO is autocast on float32 weights."""
        return 4 if self.zero_stage == 0 else self.dtype_bytes

    @property
    def keeps_whole_gradients(self) -> bool:
        """DeepSpeed's BF16_Optimizer: stage 1 in bfloat16, unless the optimiser is offloaded."""
        return self.zero_stage == 1 and self.dtype_bytes == 2 and not self.offload_optimizer

    def share(self, count: int) -> int:
        """Return the part of `count` numbers that a rank holds when they are sharded."""
        return -(-count // self.ranks)

    @property
    def update_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return min(self.micro_batch_tokens, self.micro_batch_responses * self.max_trajectory_tokens)


@dataclass(frozen=True)
class Memory:
    """Bytes by part. rollout, scoring, update: at their peaks, of one rank's device; host: of a node's memory."""

    rollout: dict[str, int]
    scoring: dict[str, int]
    update: dict[str, int]
    host: dict[str, int]

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        return {"rollout": self.rollout, "scoring": self.scoring, "update": self.update}

    @property
    def peak(self) -> int:
        return max(sum(phase.values()) for phase in self.phases.values())


def state_bytes(setup: Setup) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimiser state on a rank's device, within an update.

    Per parameter, DeepSpeed keeps a float32 copy and AdamW's two moments (12 bytes) and sums gradients in float32; from
    stage 1 it shards the former, from stage 2 the latter, in stage 3 the weights. Stage 1 in bfloat16 holds gradients
    in both types. Without DeepSpeed gradients and moments have the type of the weights.
    """
    shape, stage = setup.shape, setup.zero_stage
    held = 0 if setup.offload_params else setup.share(shape.parameters) if stage == 3 else shape.parameters
    trained, own = shape.trained, setup.share(shape.trained)
    cast = trained if setup.checkpointing else shape.parameters  # of frozen weights only what a backward pass waits for
    states = {
        "parameters": setup.weight_bytes * held,
        "autocast copies": setup.dtype_bytes * cast if setup.dtype_bytes < setup.weight_bytes else 0,
        "gradients": (6 if setup.keeps_whole_gradients else 4) * (trained if stage < 2 else own),
        "optimizer state": 12 * own if stage else 8 * trained,
        "reference": setup.weight_bytes * held if setup.reference == "copy" else 0,
    }
    if setup.offload_optimizer:
        states["optimizer state"] = 0
        states["gradients"] = states["gradients"] if stage < 2 else 0
    if setup.offload_reference:
        states["reference"] = 0
    return states


def layer_bytes(shape: ModelShape, dtype_bytes: int, residual_bytes: int) -> int:
    """Return the bytes that one layer keeps of a token for its backward pass.

    residual_bytes: of a number between layers, those of the weights (autocast leaves it in float32). Two norms keep
    their input in float32, its normalised form and their output; attention its queries, its output twice (in the order
    of heads and of tokens), keys and values; the gated MLP four vectors of its width.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (4 + residual_bytes + dtype_bytes) * shape.hidden
    return norms + dtype_bytes * (3 * queries + 2 * keys + 4 * shape.intermediate)


def activation_bytes(setup: Setup) -> int:
    """Return the bytes of activations at the peak of an update: when the backward pass enters the last layer."""
    shape, size = setup.shape, setup.dtype_bytes
    layer = layer_bytes(shape, size, setup.weight_bytes)
    inputs = shape.layers * setup.weight_bytes * shape.hidden
    kept = inputs + layer if setup.checkpointing else shape.layers * layer
    gradients = size * (3 * shape.intermediate + 2 * shape.hidden)  # of the MLP, the widest part of a layer
    return setup.update_tokens * (kept + gradients)


def forward_bytes(shape: ModelShape, size: int) -> int:
    """Return the bytes of a token's activations in a forward without gradient: in the MLP, its widest part."""
    return size * 3 * (shape.intermediate + shape.hidden) + 4 * shape.hidden


def head_bytes(setup: Setup, *, backward: bool) -> int:
    """Return the bytes of the output head: a chunk of logits with what is computed from it, hidden states, gradients.

    The gradient of its weight is whole before it is added to that of earlier micro-batches.
    """
    shape, size, tokens = setup.shape, setup.dtype_bytes, setup.update_tokens
    most = HEAD_CHUNK_LOGITS * (16 if setup.on_gpu else 1)
    logits = min(max(most, tokens), tokens * shape.vocabulary)
    bytes_used = logits * (8 if size == 4 else 10) + tokens * size * shape.hidden
    if backward:
        bytes_used += tokens * (4 + size) * shape.hidden
        bytes_used += setup.weight_bytes * shape.head_parameters if shape.trained == shape.parameters else 0
    return bytes_used


def cache_bytes(setup: Setup) -> int:
    """Return the bytes of the KV cache with `max_rows` rows of the longest trajectories, one layer held twice."""
    shape = setup.shape
    token_layer = 2 * shape.kv_heads * shape.head_dim * setup.dtype_bytes
    slots = setup.max_rows * (CACHE_SLACK[setup.schedule] * setup.max_trajectory_tokens + 16)
    return math.ceil(slots * token_layer * (shape.layers + 1))


def prefill_bytes(setup: Setup) -> int:
    """Return the bytes of a forward that fills the cache: activations without gradient, and its attention masks.

    A mask has an entry for each query, each of the heads that share a key, and each slot up to the query.
    """
    shape, size = setup.shape, setup.dtype_bytes
    groups = shape.heads // shape.kv_heads
    prompts = min(setup.prefill_tokens, setup.max_rows // setup.group_size * setup.max_prompt_tokens)
    observations = min(setup.prefill_tokens, setup.max_rows * (setup.max_observation_tokens + 1))
    mask = max(prompts * setup.max_prompt_tokens, observations * setup.max_trajectory_tokens) * groups * size
    return max(prompts, observations) * forward_bytes(shape, size) + mask


def reduction_bytes(setup: Setup) -> int:
    """Return the bytes of buffers in which ZeRO reduces gradients: a bucket and a flat copy of it.

    Stage 2 has them in the type of the weights and a float32 copy, the others in float32. A gradient larger than the
    bucket is not copied into it, only to float32.
    """
    stage, size = setup.zero_stage, setup.dtype_bytes
    if not stage or setup.keeps_whole_gradients:  # DDP's buckets are the gradients; BF16_Optimizer reduces in place
        return 0
    if stage == 1 or size == 4:  # stage 1 reduces what it has summed in float32
        return 4 * 2 * BUCKET
    shape = setup.shape
    head = shape.head_parameters if shape.trained == shape.parameters else 0
    bucket, copies = (4, 4) if stage == 3 else (2, 2 + 4)
    return bucket * BUCKET + max(copies * BUCKET, 4 * head)


def memory(setup: Setup, device_bytes: int) -> Memory:
    """Return what a rank with `device_bytes` of memory holds in the phases of a step, and its node."""
    shape, size, stage = setup.shape, setup.dtype_bytes, setup.zero_stage
    own = setup.share(shape.trained)
    states = state_bytes(setup)
    live = size * min(shape.parameters, LIVE_WEIGHTS) if stage == 3 else 0
    bucket = 4 * BUCKET if stage == 3 else 0
    reserve = CUDA_BYTES + int(FRAGMENTATION * device_bytes) if setup.on_gpu else CPU_BYTES
    between = dict(states)  # updates
    if setup.keeps_whole_gradients:
        between["gradients"] = 4 * shape.trained
    elif stage in (1, 2) or setup.ranks == 1 and stage == 0:  # DDP and stage 3 keep theirs
        between["gradients"] = 0
    engine = int(setup.engine_share * device_bytes)
    between["vLLM"] = 0 if setup.engine_sleeps else engine

    sampled = min(max(SAMPLE_LOGITS, shape.vocabulary), setup.max_rows * shape.vocabulary)
    rollout = between | {
        "gathered weights": size * shape.parameters if stage == 3 else 0,
        "communication": bucket,
        "KV cache": cache_bytes(setup),
        "prefill": prefill_bytes(setup),
        "sampling": SAMPLE_BYTES * sampled,
        "reserve": reserve,
    }
    if engine:
        on_their_way = min(setup.engine_update_bytes, rollout["gathered weights"])
        rollout |= {"vLLM": engine, "gathered weights": on_their_way, "KV cache": 0, "prefill": 0, "sampling": 0}
    scoring = between | {
        "gathered weights": live,
        "communication": bucket,
        "activations": setup.update_tokens * forward_bytes(shape, size),
        "output head": head_bytes(setup, backward=False),
        "reserve": reserve,
    }
    if setup.offload_reference:
        scoring["reference"] = setup.weight_bytes * shape.parameters
    # The optimiser's copy of gradients comes when activations and gathered weights are gone.
    step = 4 * min(SUB_GROUP, own) if stage == 3 and not setup.offload_optimizer else 0
    head = head_bytes(setup, backward=True)
    update = states | {
        "vLLM": between["vLLM"],
        "gathered weights": live,
        "communication": reduction_bytes(setup),
        "activations": max(activation_bytes(setup), step - live - head),
        "output head": head,
        "reserve": reserve,
    }

    here = setup.ranks_per_node
    whole = setup.weight_bytes * shape.parameters
    offloaded = size * setup.share(shape.parameters) * here if setup.offload_params else 0
    copies = whole * here
    # A checkpoint has moments and, in bfloat16, float32 weights, from each rank its part; the first rank adds the
    # weights as they are, which stage 3 gathers in host memory before they are copied there.
    saved = (12 if setup.weight_bytes == 2 else 8) * own * here
    checkpoint = saved + whole if setup.async_save else 0
    checkpoint += whole if stage == 3 else 0
    training = {
        "optimizer": 16 * own * here if setup.offload_optimizer else 0,
        "parameters": offloaded,
        "reference": copies if setup.offload_reference else offloaded if setup.reference == "copy" else 0,
        "checkpoint": checkpoint if setup.on_gpu else 0,
    }
    host = {
        "index": setup.index_bytes,
        **training,
        # each rank reads all weights before they go to its GPU, when there is nothing of the former yet
        "loading": max(0, copies - sum(training.values())) if setup.on_gpu else 0,
        "processes": HOST_PROCESS_BYTES * here if setup.on_gpu else 0,
    }

    def without_zeros(parts: dict[str, int]) -> dict[str, int]:
        return {name: count for name, count in parts.items() if count}

    return Memory(*map(without_zeros, (rollout, scoring, update, host)))


@dataclass(frozen=True)
class Suggestion:
    """The lowest ZeRO stage that fits, and the largest micro-batch and cache that fit with it."""

    zero_stage: int
    micro_batch_tokens: int
    max_rows: int


def suggest(setup: Setup, device_bytes: int, responses_per_rank: int) -> Suggestion | None:
    """Return what fits, by preference with the settings as they are; None when no stage holds even the smallest.

    Stages 1 to 3, and 0 first for float32: bfloat16 without ZeRO holds float32 weights and copies of them.
    """
    least = dataclasses.replace(
        setup, micro_batch_tokens=setup.max_trajectory_tokens, max_rows=min(setup.group_size, setup.max_rows)
    )

    def fits(candidate: Setup) -> bool:
        return memory(candidate, device_bytes).peak <= device_bytes

    stages = [stage for stage in range(4) if stage or setup.dtype_bytes == 4]
    if setup.offload_params:
        stages = [3]
    for start in (setup, least):
        for stage in stages:
            candidate = dataclasses.replace(
                start,
                zero_stage=stage,
                offload_optimizer=setup.offload_optimizer and stage > 0,
                offload_reference=setup.offload_reference and stage < 3,
            )
            if not fits(candidate):
                continue
            small = dataclasses.replace(candidate, micro_batch_tokens=least.micro_batch_tokens, max_rows=least.max_rows)

            def largest(key: str, values: Sequence[int], small: Setup = small) -> int:
                return max([value for value in values if fits(dataclasses.replace(small, **{key: value}))])

            # activations and cache are not alive together, so each is found for itself
            most = setup.micro_batch_responses * setup.max_trajectory_tokens
            tokens = {*range(small.micro_batch_tokens, most, 1024), most}
            rows = {*range(small.max_rows, responses_per_rank, setup.group_size), responses_per_rank}
            return Suggestion(stage, largest("micro_batch_tokens", tokens), largest("max_rows", rows))
    return None


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one GPU by its data sheet: dense bfloat16 FLOP/s, bytes/s of memory and, each way, of links."""

    flops: float
    memory: float
    node_link: float  # to the GPUs of its node
    network: float  # its share of a node's link to others
    host_link: float


HARDWARE = {
    "h100": Hardware(flops=989e12, memory=3.35e12, node_link=450e9, network=50e9, host_link=55e9),
    "a100": Hardware(flops=312e12, memory=2.04e12, node_link=300e9, network=25e9, host_link=25e9),
}


@dataclass(frozen=True)
class Assumptions:
    """What a step's time is estimated from. Trajectories: means over a batch; shares: of the hardware's peak rates."""

    turns: float = 3.0
    turn_tokens: float = 150.0
    prompt_tokens: float = 250.0
    longest_turn: float = 3.0  # of the rows that write together, over the mean
    flops_share: float = 0.4  # of matrix products in training and prefill
    bandwidth_share: float = 0.6  # of memory in decoding, and of links
    layer_latency_s: float = 2.5e-5  # least time of a layer in a decoding step

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = 1 if name in ("turns", "longest_turn") else 0
            if not (least <= value < math.inf and value > 0):
                raise ConfigError(f"{name} = {value:g}: it must be {'at least 1' if least else 'more than 0'}")


def step_seconds(
    setup: Setup,
    hardware: Hardware,
    assumed: Assumptions,
    *,
    responses_per_rank: int,
    minibatches: int,
    epochs: int,
) -> dict[str, float]:
    """Estimate the seconds of one step by part, without retrieval and without overlap of communication and computation.

    Forward: 2 FLOPs per weight and token, and 2 for each number that causal attention reads; backward twice that, and
    once more with gradient checkpointing. A decoding step reads all weights and the cache. A group's prompt is
    forwarded once.
    """
    shape, size = setup.shape, setup.dtype_bytes
    nodes = setup.ranks // setup.ranks_per_node
    compute = hardware.flops * assumed.flops_share * (1 if size == 2 else 0.5)
    read = hardware.memory * assumed.bandwidth_share
    link = (hardware.network if nodes > 1 else hardware.node_link) * assumed.bandwidth_share
    shared = assumed.prompt_tokens / setup.group_size
    written = assumed.turns * assumed.turn_tokens
    retrieved = (assumed.turns - 1) * setup.max_observation_tokens
    length = assumed.prompt_tokens + written + retrieved
    tokens = responses_per_rank * (shared + written + retrieved)
    forward = 2 * shape.matrix_parameters + 2 * shape.layers * shape.heads * shape.head_dim * length  # FLOPs a token

    rows = min(setup.max_rows, responses_per_rank)
    waves = math.ceil(responses_per_rank / rows)
    steps = waves * assumed.turns * assumed.turn_tokens * assumed.longest_turn
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * size * length / 2
    cache_reads = responses_per_rank * written * cached
    decode = (steps * size * shape.matrix_parameters + cache_reads) / read
    decode += steps * shape.layers * assumed.layer_latency_s
    prefill = responses_per_rank * (shared + retrieved) * forward / compute

    old = epochs * minibatches > 1
    scored_reference = setup.reference != "none"
    scored = tokens * ((1 - 1 / minibatches if old else 0) + scored_reference)
    passes = 4 if setup.checkpointing else 3

    weights = size * shape.parameters * (1 - 1 / setup.ranks)
    per_minibatch = tokens / minibatches
    micro_batches = math.ceil(
        max(
            per_minibatch / setup.micro_batch_tokens,
            responses_per_rank / minibatches / setup.micro_batch_responses,
        )
    )
    updates = minibatches * epochs
    if setup.zero_stage == 3:
        gathers = 1 + micro_batches * (2 * updates + minibatches * (old + scored_reference))
        moved = (gathers + micro_batches * updates * 4 / size) * weights
    elif setup.zero_stage:
        reductions = updates * (micro_batches if setup.zero_stage == 2 else 1)  # to all ranks, twice the way
        moved = (reductions * 2 * 4 / size + updates) * weights
    else:
        moved = updates * 2 * 4 / size * weights
    share = shape.parameters / (setup.ranks if setup.zero_stage else 1)
    optimizer = updates * 28 * share / read  # reads weight, gradient and two moments, writes all but the gradient
    if setup.offload_optimizer:
        optimizer = updates * (4 + size) * share / (hardware.host_link * assumed.bandwidth_share)
    return {
        "decoding": decode,
        "prefill": prefill,
        "scoring": scored * forward / compute,
        "update": epochs * tokens * passes * forward / compute,
        "optimizer": optimizer,
        "communication": moved / link if setup.ranks > 1 else 0.0,
    }


@dataclass(frozen=True)
class Plan:
    """A run on given hardware. Bytes are of one GPU (`memory.host`: one node), seconds of one step."""

    model: str
    setup: Setup
    device_bytes: int
    memory: Memory
    suggestion: Suggestion | None
    seconds: dict[str, float] | None
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device_bytes

    def record(self) -> dict[str, Any]:
        """Return the plan as numbers and strings, for JSON."""
        setup = dataclasses.asdict(self.setup)
        return {
            "model": self.model,
            "parameters": self.setup.shape.parameters,
            "fits": self.fits,
            "peak_bytes": self.memory.peak,
            "device_bytes": self.device_bytes,
            **{f"{name}_bytes": parts for name, parts in self.memory.phases.items()},
            "host_bytes": self.memory.host,
            "suggested": None if self.suggestion is None else dataclasses.asdict(self.suggestion),
            "step_s": self.seconds,
            "setup": setup,
            "assumptions": list(self.assumptions),
        }

    def __str__(self) -> str:
        setup, memory = self.setup, self.memory
        device = "GPU" if setup.on_gpu else "process"
        nodes = setup.ranks // setup.ranks_per_node
        lines = [
            f"plan: {self.model}, {setup.shape.parameters:,} parameters; nodes {nodes} with {setup.ranks_per_node} x "
            f"{self.device_bytes / GB:.1f} GB, ZeRO stage {setup.zero_stage}, micro-batches of "
            f"{setup.update_tokens} tokens, {setup.max_rows} rows in the cache",
            f"{'GB of a ' + device:>20} " + " ".join(f"{name:>9}" for name in memory.phases),
        ]
        phases = list(memory.phases.values())
        for part in dict.fromkeys(name for phase in phases for name in phase):
            lines.append(f"{part:>20} " + " ".join(f"{phase.get(part, 0) / GB:9.2f}" for phase in phases))
        lines.append(f"{'sum':>20} " + " ".join(f"{sum(phase.values()) / GB:9.2f}" for phase in phases))
        spare = (self.device_bytes - memory.peak) / GB
        lines.append(f"fits: yes, {spare:.1f} GB to spare" if self.fits else f"fits: NO, {-spare:.1f} GB too much")
        if self.suggestion is None:
            lines.append(
                "no ZeRO stage fits: take more or larger GPUs, set distributed.offload_optimizer (and offload_params), "
                "or lower rollout.max_trajectory_tokens"
            )
        else:
            best = self.suggestion
            lines.append(
                f"lowest stage that fits: distributed.zero_stage={best.zero_stage}, there at most "
                f"optim.micro_batch_tokens={best.micro_batch_tokens} and rollout.max_rows={best.max_rows}"
            )
        if memory.host:
            parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in memory.host.items())
            lines.append(f"host memory of a node: {sum(memory.host.values()) / GB:.0f} GB ({parts})")
        if self.seconds is not None:
            parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in self.seconds.items())
            lines.append(f"a step takes about {sum(self.seconds.values()):.0f} s, retrieval not counted ({parts})")
        return "\n".join([*lines, *(f"assumed: {text}" for text in self.assumptions)])


def index_size(config: Config) -> tuple[int, str | None]:
    """Return the bytes of the index that a node opens, and what was assumed to know them."""
    index = config.retriever.index
    if config.retriever.url or index is None:
        return 0, None
    if index.is_dir():
        return sum(file.stat().st_size for file in index.iterdir() if file.is_file()), None
    passages, dim = WIKI_18
    return 4 * passages * dim, f"the index {index} is not there yet: {passages:,} float32 vectors of dim {dim}"


def make_plan(
    config: Config,
    *,
    gpus: int,
    device_bytes: int,
    nodes: int = 1,
    on_gpu: bool = True,
    hardware: str = "h100",
    assumed: Assumptions = Assumptions(),
) -> Plan:
    """Plan a run of `config` on `nodes` of `gpus` GPUs each (or processes, without `on_gpu`) of `device_bytes` each.

    Raises ConfigError for a batch that the ranks cannot share, a model whose shape cannot be read, and for hardware
    that is none.
    """
    if gpus < 1 or nodes < 1:
        raise ConfigError(f"{nodes} nodes with {gpus} GPUs each: both must be at least 1")
    if device_bytes <= 0:
        raise ConfigError(f"a GPU with {device_bytes / GB:g} GB of memory: it must be more than 0")
    ranks = gpus * nodes
    batch = batch_plan(config, ranks)
    rollout, optim, distributed = config.rollout, config.optim, config.distributed
    index_bytes, index_assumed = index_size(config)
    stage = distributed.zero_stage
    setup = Setup(
        shape=shape_of(model_config(config), config.model.lora),
        zero_stage=stage,
        ranks=ranks,
        ranks_per_node=gpus,
        on_gpu=on_gpu,
        dtype_bytes=2 if config.model.dtype == "bfloat16" else 4,
        offload_optimizer=distributed.offload_optimizer,
        offload_params=distributed.offload_params,
        reference="none" if not config.loss.ref_kl_beta else "adapters off" if config.model.lora else "copy",
        offload_reference=distributed.offload_reference,
        checkpointing=config.model.gradient_checkpointing,
        micro_batch_tokens=optim.micro_batch_tokens,
        micro_batch_responses=min(optim.micro_batch_responses, batch.minibatch_responses_per_rank),
        max_rows=min(rollout.max_rows or batch.responses_per_rank, batch.responses_per_rank),
        group_size=rollout.group_size,
        prefill_tokens=rollout.prefill_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
        max_trajectory_tokens=rollout.max_trajectory_tokens,
        schedule=rollout.schedule,
        engine_share=rollout.vllm.memory_fraction if rollout.engine == "vllm" and on_gpu else 0.0,
        engine_sleeps=rollout.vllm.sleep,
        engine_update_bytes=rollout.vllm.update_bytes,
        async_save=config.checkpoint.async_save,
        index_bytes=index_bytes,
    )
    assumptions = [
        "for memory, trajectories as long as the settings allow; neither memory nor time was compared with a GPU",
    ]
    if rollout.engine == "vllm":
        assumptions.append(
            "vLLM takes rollout.vllm.memory_fraction of a GPU, however many rows run at once in it; its time is "
            "reckoned as that of engine hf"
            if on_gpu
            else "rollout.engine = vllm on a CPU is not modelled: rollouts are reckoned as by engine hf"
        )
    if index_assumed is not None:
        assumptions.append(index_assumed)
    if config.warm_start is None and config.model.path in KNOWN_MODELS and not Path(config.model.path).exists():
        assumptions.append(f"the shapes of {config.model.path} as this program knows them")
    seconds = None
    if on_gpu:
        seconds = step_seconds(
            setup,
            HARDWARE[hardware],
            assumed,
            responses_per_rank=batch.responses_per_rank,
            minibatches=batch.minibatches_per_epoch,
            epochs=batch.epochs,
        )
        peak = HARDWARE[hardware]
        assumptions.append(
            f"for time, {hardware}: {peak.flops / 1e12:g} TFLOP/s, {peak.memory / 1e12:g} TB/s, links "
            f"{peak.node_link / 1e9:g} GB/s in a node and {peak.network / 1e9:g} between nodes; "
            f"{assumed.flops_share:g} of the FLOP/s, {assumed.bandwidth_share:g} of the bytes/s; {assumed.turns:g} "
            f"turns of {assumed.turn_tokens:g} tokens, prompts of {assumed.prompt_tokens:g}"
        )
    return Plan(
        model=config.model.path or "the warm start's model",
        setup=setup,
        device_bytes=device_bytes,
        memory=memory(setup, device_bytes),
        suggestion=suggest(setup, device_bytes, batch.responses_per_rank),
        seconds=seconds,
        assumptions=tuple(assumptions),
    )


def plan_here(config: Config, world_size: int) -> Plan:
    """Plan a run of `config` on the devices of this machine, as the launcher started it."""
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if on_gpu:
        device_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        device_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    plan = make_plan(config, gpus=local, nodes=world_size // local, device_bytes=device_bytes, on_gpu=on_gpu)
    if on_gpu:
        return plan
    elsewhere = (
        "no GPU here, so the plan is for this machine's processes, which share its memory; for GPUs: python -m "
        "sapo.plan --config FILE --gpus 8 --gpu-memory-gb 80"
    )
    return dataclasses.replace(plan, assumptions=(elsewhere, *plan.assumptions))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print the plan; return the exit status, 0 also for a plan that does not fit."""
    parser = argparse.ArgumentParser(prog="python -m sapo.plan", description="Memory and time of a run by part.")
    parser.add_argument("--config", required=True, help="YAML file, for example configs/qwen7b.yaml")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (1)")
    parser.add_argument("--gpu-memory-gb", type=float, default=80.0, help="memory of a GPU, GB of 2^30 bytes (80)")
    parser.add_argument("--hardware", choices=list(HARDWARE), default="h100", help="rates for the step time (h100)")
    for field in dataclasses.fields(Assumptions):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=float, default=field.default, help=f"for the step time ({field.default:g})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that differ from the file")
    options = parser.parse_intermixed_args(arguments)
    try:
        if not 0 < options.gpu_memory_gb < math.inf:
            raise ConfigError(f"a GPU with {options.gpu_memory_gb:g} GB of memory: it must be more than 0")
        plan = make_plan(
            load_config(options.config, options.overrides),
            gpus=options.gpus,
            nodes=options.nodes,
            device_bytes=int(options.gpu_memory_gb * GB),
            hardware=options.hardware,
            assumed=Assumptions(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Assumptions)}),
        )
    except Exception as error:
        return print_user_error(error)
    print(json.dumps(plan.record(), indent=1) if options.json else plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
