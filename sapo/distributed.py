"""Processes and the update: accelerate for one process and DDP, DeepSpeed ZeRO for sharding.

The update never averages: each micro-batch's loss is its share of a global sum (`sapo/loss.py`), so the gradient of a
minibatch is the plain sum over micro-batches and ranks, whatever the backend.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    set_seed,
)
from torch import Tensor, nn

from sapo.lora import adapters_off
from sapo.policy import Policy
from sapo.shards import Piece

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True)
class Distributed:
    """The processes of a run. Every method that communicates must be called by all ranks."""

    accelerator: Accelerator
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    zero_stage: int  # 0: no DeepSpeed
    weights_dtype: torch.dtype  # to load the model in; bfloat16 without ZeRO computes under autocast on float32 weights

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_ranks(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, [world size][N], in one collective. All ranks give the same N."""
        if self.world_size == 1:
            return [list(values)]
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        torch.distributed.all_gather(rows, row)
        return torch.stack(rows).tolist()

    def reduce(
        self,
        sums: Mapping[str, float] | None = None,
        maxima: Mapping[str, float] | None = None,
        minima: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Return sums, maxima and minima over ranks under their names, in one collective.

        All ranks give the same names in the same order; a name stands in one mapping only.
        """
        groups = [(sum, sums or {}), (max, maxima or {}), (min, minima or {})]
        columns = zip(*self.gather_ranks([float(value) for _, group in groups for value in group.values()]))
        return {name: operation(next(columns)) for operation, group in groups for name in group}

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of one shape on all of them, on the CPU, in one collective."""
        if self.world_size == 1:
            return values.cpu()
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.cpu()

    def gather_objects(self, value: T) -> list[T]:
        """Return the picklable `value` of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Leave the process group; call it once, last."""
        self.barrier()
        self.accelerator.end_training()
        if self.world_size > 1:
            # gloo's threads drop the tensors of the last collective a moment later; an interpreter that is shutting
            # down by then ends in an abort
            gc.collect()
            time.sleep(0.2)


def setup(
    *,
    zero_stage: int = 0,
    dtype: Dtype = "float32",
    max_grad_norm: float = 1.0,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    timeout_s: float = 1800.0,
    seed: int = 0,
) -> Distributed:
    """Join the processes that the launcher started (none: a run of one process) and seed all generators.

    zero_stage: 1-3 shard with DeepSpeed, from a configuration built here, whatever the launcher; 0 is DDP.
    offload_optimizer: needs a stage above 0. offload_params: needs stage 3. timeout_s: how long a rank waits for the
    others.
    dtype: of the computation. bfloat16 keeps float32 master weights, by ZeRO or autocast; float64 needs zero_stage 0.
    max_grad_norm: 0 switches clipping off. Call it before the model is loaded: ZeRO-3 shards a model while it loads.
    Raises ValueError for settings that cannot be combined or that the device cannot do, RuntimeError without DeepSpeed
    for ZeRO, or when the launcher started fewer processes than were asked for.
    """
    if dtype == "float64" and zero_stage:
        raise ValueError("ZeRO computes in float32 or bfloat16: set distributed.zero_stage 0 for model.dtype float64")
    on_cpu = not torch.cuda.is_available()
    if not on_cpu and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"model.dtype = bfloat16, but {torch.cuda.get_device_name()} does not compute in it (GPUs of compute "
            "capability 8.0 and above do): set model.dtype to float32"
        )
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "this process was started as one of several (MASTER_ADDR is set) but is alone (WORLD_SIZE is not): "
            "`accelerate launch` with --cpu, or on nodes of one GPU each, starts a single process that knows no other. "
            "Add --multi_gpu (also on a CPU, without --cpu), as in `accelerate launch --multi_gpu --num_processes 2 "
            "--num_machines 1 train.py ...`, or use `torchrun --nproc_per_node 2 train.py ...`; for a run of one "
            "process unset MASTER_ADDR."
        )
    options: dict[str, Any] = {}
    handlers: list[Any] = []
    timeout = timedelta(seconds=timeout_s)
    if zero_stage:
        _prepare_deepspeed(on_cpu, zero_stage)
        # the process group must be gloo on CPU, or accelerate believes that each rank is alone
        handlers.append(InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=timeout))
        options["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config=zero_config(zero_stage, dtype, max_grad_norm, offload_optimizer, offload_params)
        )
    else:
        options["cpu"] = on_cpu
        handlers.append(InitProcessGroupKwargs(timeout=timeout))
        handlers.append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    precision = "bf16" if dtype == "bfloat16" else "no"
    try:
        accelerator = Accelerator(
            mixed_precision=precision, dynamo_backend="no", kwargs_handlers=handlers, **options
        )
    except torch.distributed.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(
            f"the processes cannot meet at {address} ({str(error).splitlines()[0]}): where that port is in use, choose "
            "another on all nodes (--main_process_port of accelerate launch, --master_port of torchrun); where it is "
            "not reached, check --main_process_ip or --master_addr"
        ) from None
    started = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if not accelerator.num_processes == started == asked:
        raise RuntimeError(
            f"the launcher asked for {asked} processes, torch.distributed has {started} and accelerate counts "
            f"{accelerator.num_processes}: the ranks would train apart. Start with `torchrun --nproc_per_node N "
            "train.py ...` or `accelerate launch --multi_gpu --num_processes N train.py ...`."
        )
    sharded = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
    if not zero_stage and accelerator.distributed_type in sharded:
        raise RuntimeError(
            f"the launcher set up {accelerator.distributed_type.value}, but this program configures sharding itself: "
            "set distributed.zero_stage to 1, 2 or 3, or start without --use_deepspeed, --use_fsdp or their config."
        )
    set_seed(seed)
    return Distributed(
        accelerator=accelerator,
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
        world_size=started,
        device=torch.device("cpu") if on_cpu else accelerator.device,  # on CPU it may say cpu:0
        zero_stage=zero_stage,
        weights_dtype=torch.float32 if dtype == "bfloat16" and not zero_stage else getattr(torch, dtype),
    )


def _prepare_deepspeed(on_cpu: bool, zero_stage: int) -> None:
    """Make DeepSpeed start under any launcher, or none. Raises RuntimeError where it cannot be imported."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # accelerate would ignore DeepSpeed
    for name in list(os.environ):
        if name.startswith("ACCELERATE_DEEPSPEED_") or name == "ACCELERATE_CONFIG_DS_FIELDS":
            del os.environ[name]  # a launcher's own DeepSpeed settings fill in, or clash with, the configuration
    if "WORLD_SIZE" not in os.environ:  # DeepSpeed needs a process group even for one process
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would search and warn
    try:
        importlib.import_module("deepspeed")
    except ImportError as error:
        raise RuntimeError(
            f"distributed.zero_stage = {zero_stage} shards by DeepSpeed, which cannot be imported here ({error}): run "
            "`DS_BUILD_OPS=0 pip install --no-build-isolation -r requirements.txt`, or set distributed.zero_stage to 0"
        ) from error
    if on_cpu:
        # by name: as an attribute `deepspeed.comm.torch` is torch itself
        backend = importlib.import_module("deepspeed.comm.torch")
        # an optional shared-memory reduction: a minute of compiling, and it needs a C++ compiler
        backend.build_shm_op = lambda: None


def zero_config(
    zero_stage: int,
    dtype: Dtype,
    max_grad_norm: float,
    offload_optimizer: bool = False,
    offload_params: bool = False,
) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a ZeRO stage (1-3) for a loop that sets its own accumulation boundary.

    What is left out is DeepSpeed's default, which suits 7B parameters on 8 GPUs by its sizes (not run on a GPU): at
    stage 3 the next 5e7 weights, a fifth of a layer, are fetched ahead of their use on a stream of their own
    (overlap_comm), weights of fewer than 1e5 numbers (norms, biases) stay whole, and 1e9 may be whole at a time, 2 GB.

    In bfloat16 gradients are summed in float32 over ranks too, where the default would round each partial sum to 8
    bits; stages 1 and 2 then make equal updates. Reductions send twice the bytes, and need a float32 copy of a bucket
    or of the gradient of the output head.
    """
    zero: dict[str, Any] = {
        "stage": zero_stage,
        # Numbers in the buffer that gradients are reduced in, which is always there. The default of 5e8 takes 2 GB in
        # float32; messages of 200 MB are as good.
        "reduce_bucket_size": 50_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,  # must be a number when no DataLoader is prepared; nothing reads it
        "gradient_accumulation_steps": 1,  # nor this: the update sets the boundary and divides by nothing
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": zero,
    }


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all tensors as one vector, summed in float64, as DeepSpeed does.

    On a CPU the float32 norm of the 28 million numbers of an embedding is off by up to 2e-3. In parts, because a CPU
    makes a float64 copy of what it sums.
    """
    parts = [part for tensor in tensors for part in tensor.flatten().split(1 << 24)]
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).norm()


def warmup_lr(update: int, *, peak: float, warmup_updates: int) -> float:
    """Return the learning rate of an update, counted from 1: linear up to `peak` at `warmup_updates`, then constant.

    >>> [warmup_lr(update, peak=1.0, warmup_updates=4) for update in (1, 2, 4, 5)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return peak * min(1.0, update / max(warmup_updates, 1))


def _declare_head(policy: Policy) -> None:
    """Tell ZeRO-3 that `Policy` uses the weight of the output head without calling the head."""
    import deepspeed

    deepspeed.zero.register_external_parameter(policy, policy.model.get_output_embeddings().weight)


def frozen_reference(
    dist: Distributed, policy: Policy, *, offload: bool = False
) -> Callable[[], contextlib.AbstractContextManager[nn.Module]]:
    """Freeze a second model and return what opens a block in which it scores; the block gives it, called like `Policy`.

    With ZeRO-3 it is sharded over the ranks like the policy, in CPU memory where the policy's weights are, and all
    ranks must make the same number of calls. Otherwise each rank holds a copy, with `offload` in CPU memory outside of
    the block.
    """
    policy.eval().requires_grad_(False)
    if dist.zero_stage == 3:
        import deepspeed

        _declare_head(policy)
        config = copy.deepcopy(dist.accelerator.deepspeed_plugin.deepspeed_config)
        config["zero_optimization"].pop("offload_optimizer", None)
        engine, *_ = deepspeed.initialize(model=policy, config=config)
        return lambda: contextlib.nullcontext(engine)

    @contextlib.contextmanager
    def scoring() -> Iterator[nn.Module]:
        policy.to(dist.device)
        with dist.accelerator.autocast():
            yield policy
        if offload:
            policy.to("cpu")

    policy.to("cpu" if offload else dist.device)
    return scoring


class Updater:
    """The policy, its AdamW optimiser and their parallel wrapper.

    policy: the unwrapped `Policy` on the device, for passes without gradient and for generation. Parameters that
    require no gradient stay as they are.
    skipped: updates skipped so far because of a non-finite loss or gradient.
    version: grows whenever the weights change.
    """

    def __init__(
        self,
        dist: Distributed,
        policy: Policy,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ) -> None:
        """max_grad_norm: 0 switches clipping off; with ZeRO it must be the one given to `setup`."""
        self.dist = dist
        self.policy = policy
        self.max_grad_norm = max_grad_norm
        self.skipped = 0
        self.version = 0
        if not dist.zero_stage:
            policy.to(dist.device)
        policy.train()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        if dist.zero_stage:
            if dist.zero_stage == 3:
                _declare_head(policy)
            self.model, _ = dist.accelerator.prepare(policy, optimizer)
            self.optimizer = self.model.optimizer
        else:
            self.model = dist.accelerator.prepare_model(policy)
            self.optimizer = optimizer

    def update(
        self, micro_batches: Sequence[T], loss_share: Callable[[nn.Module, T], Tensor], *, lr: float
    ) -> float:
        """Make one optimiser update on the sum of the micro-batches' losses over all ranks; return the gradient norm.

        micro_batches: this rank's; every rank must have the same number, at least one. loss_share(model, micro_batch):
        this micro-batch's share of the global loss, with the forward made through `model`, which is called like
        `Policy`. The norm is that before clipping. A loss or gradient that is not finite on any rank skips the update
        on all of them: the weights stay, `skipped` grows by one and the norm is returned as it is, not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self._accumulation(last):
                loss = loss_share(self.model, micro_batch)
                # the backends take the mean over ranks, we want the sum; a loss that is not finite must poison its
                # gradient, so that every rank sees it in the norm
                loss = loss * torch.where(loss.detach().isfinite(), float(self.dist.world_size), math.nan)
                if self.dist.zero_stage:
                    self.model.backward(loss, scale_wrt_gas=False)
                else:
                    loss.backward()
        grad_norm, applied = self._zero_step() if self.dist.zero_stage else self._step()
        self.skipped += not applied
        self.version += applied
        return grad_norm

    def _accumulation(self, last: bool) -> contextlib.AbstractContextManager:
        """Reduce gradients over ranks after the last micro-batch only (ZeRO-2 and 3 must reduce after each)."""
        if self.dist.zero_stage:
            self.model.set_gradient_accumulation_boundary(last)
        elif self.dist.world_size > 1 and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _step(self) -> tuple[float, bool]:
        norm = total_norm(parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None)
        applied = bool(norm.isfinite())
        if applied:
            nn.utils.clip_grads_with_norm_(self.policy.parameters(), self.max_grad_norm or math.inf, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item(), applied

    def _zero_step(self) -> tuple[float, bool]:
        self.model.step()  # clips, and skips itself where the norm is not finite
        applied = self.model.was_step_applied()
        if not applied and self.dist.zero_stage < 3:
            # DeepSpeed 0.19.8 leaves the NaN of a skipped step in the buffers of an offloaded optimiser
            gradients = getattr(self.optimizer, "averaged_gradients", {})
            gradients.update(dict.fromkeys(gradients))
        return float(self.model.get_global_grad_norm()), applied

    @contextlib.contextmanager
    def generation(self) -> Iterator[nn.Module]:
        """Give the Hugging Face model with whole weights, in the type that training computes in.

        Under ZeRO-3 the weights are gathered for the time of the block, in which ranks may make as many forwards as
        they like: DeepSpeed's hooks, which gather and release weights in every forward, are taken off. Decoding takes a
        fifth of the time that it takes with them (135M weights, two CPU ranks), and room for the whole weights.
        """
        if self.dist.zero_stage == 3:
            import deepspeed

            offload = self.model.optimizer.parameter_offload
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks.clear()
            offload.backward_hooks.clear()
            try:
                with deepspeed.zero.GatheredParameters(list(self.policy.parameters())):
                    yield self.policy.model
            finally:
                offload._register_deepspeed_module(offload.module)
        else:
            with self.dist.accelerator.autocast():
                yield self.policy.model

    def whole_weights(self, part_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the Hugging Face model's weights by name, in parts of at most so many bytes or of one weight.

        Tied weights come under each of their names. Under ZeRO-3 a part is gathered, and whole only until the next is
        taken; all ranks must take all parts.
        """
        parts: list[dict[str, nn.Parameter]] = [{}]
        size = 0
        for name, weight in self.policy.model.named_parameters(remove_duplicate=False):
            own = getattr(weight, "ds_numel", weight.numel()) * weight.element_size()
            if size + own > part_bytes and parts[-1]:
                parts.append({})
                size = 0
            parts[-1][name] = weight
            size += own
        for part in parts:
            whole: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self.dist.zero_stage == 3:
                import deepspeed

                once = {id(weight): weight for weight in part.values()}
                whole = deepspeed.zero.GatheredParameters(list(once.values()))
            with whole:
                yield {name: weight.detach() for name, weight in part.items()}

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[nn.Module]:
        """Give the model without its adapters, called like `Policy`, for forwards without gradient."""
        with adapters_off(self.policy.model):
            yield self.model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the Hugging Face model for `save_pretrained`; all ranks must call, rank 0 has them."""
        if self.dist.zero_stage < 3:
            return self.policy.model.state_dict()
        weights = self.dist.accelerator.get_state_dict(self.model) or {}
        return {name.removeprefix("model."): weight for name, weight in weights.items()}

    @property
    def updates(self) -> int:
        """Updates that AdamW has applied, as its bias correction counts them."""
        return max((int(state["step"]) for state in self._adam.state.values() if state), default=0)

    def pieces(self) -> list[Piece]:
        """Return this rank's part of the trainable weights and of AdamW's averages, as views in full precision.

        Names are <parameter>/weight, /exp_avg and /exp_avg_sq; there are no averages before the first update. With ZeRO
        the parts of all ranks make up the whole; without it every rank has all.
        """
        found = []
        for name, start, tensor, offset, length in self._parts():
            averages = {key: value for key, value in self._adam.state[tensor].items() if key.startswith("exp_avg")}
            for key, value in {"weight": tensor.detach(), **averages}.items():
                found.append(Piece(f"{name}/{key}", start, value.view(-1).narrow(0, offset, length)))
        return found

    @contextlib.contextmanager
    def restoring(self, updates: int) -> Iterator[list[Piece]]:
        """Give the pieces of an optimiser that has made `updates`, to be filled in the block. All ranks must call."""
        if self.dist.zero_stage == 3:
            self.optimizer.checkpoint_event_prologue()  # weights that are whole would hide the new ones
        for tensor in {id(part[2]): part[2] for part in self._parts()}.values():
            state = self._adam.state[tensor]
            if updates == 0:
                state.clear()
            elif not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
            if state:
                state["step"].fill_(updates)
        yield self.pieces()
        self.version += 1
        if self.dist.zero_stage == 3:
            whole, master = self.optimizer.fp16_partitioned_groups_flat, self.optimizer.fp32_partitioned_groups_flat
            for computed, own in zip(whole, master):
                computed.data.copy_(own.data)
            self.optimizer.checkpoint_event_epilogue()
        elif self.dist.zero_stage:
            self.optimizer.update_lp_params()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer if self.dist.zero_stage else self.optimizer

    def _parts(self) -> Iterator[tuple[str, int, Tensor, int, int]]:
        """Yield (name, start, tensor, offset, length) of this rank's part of each trainable parameter.

        From `start` on, the parameter's elements are those of the optimiser's own tensor from `offset` on.
        """
        for name, parameter in self.policy.named_parameters():
            if not parameter.requires_grad:
                continue
            if self.dist.zero_stage == 3:
                # equal parts, the last ones padded
                group, offset, size = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
                start = self.dist.rank * size
                length = min(size, parameter.ds_numel - start)
                if length > 0:
                    yield name, start, self.optimizer.fp32_partitioned_groups_flat[group], offset, length
            elif self.dist.zero_stage:
                # the parameters in a row are cut without regard to where one ends
                mapping = parameter._hp_mapping
                if mapping is not None:
                    tensor = self._adam.param_groups[mapping.param_group_index]["params"][0]
                    own = mapping.hp_fragment_address
                    yield name, mapping.lp_fragment_address.start, tensor, own.start, own.numel
            else:
                yield name, 0, parameter, 0, parameter.numel()
