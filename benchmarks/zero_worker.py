"""One rank of `benchmarks/zero.py` and tests/test_zero.py: the same updates, whatever holds the weights.

Started alone or under torchrun. Each variant of --variants runs in turn in the same processes; rank 0 writes one JSON
object a variant into --out. --state is the file of what all are compared with: the run that finds none writes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.head import resident_bytes
from benchmarks.loss import relative_error
from sapo import distributed
from sapo.baselines import LOSSES
from sapo.batch import Minibatch, plan_step
from sapo.distributed import Distributed, Updater, frozen_reference, setup
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.lora import add_adapters, merged_weights
from sapo.loss import policy_loss, sapo
from sapo.policy import Policy, load_policy, load_tokenizer
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget, rollout
from sapo.types import Batch, Question, Trajectory

SCHEDULE = Path(__file__).with_name("rollout_schedule.json")
STAGES = ("ddp", "zero1", "zero2", "zero3")
GROUP_SIZE = 2
ADVANTAGES = (1.1, -0.4, 0.7, -0.6, 1.9, -0.2)  # of both signs; their sum is far from 0, or the loss would cancel
REF_KL = 0.1  # a hundred times the usual, so that an error in the reference shows
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def recorded_batch(vocabulary: int, args: argparse.Namespace) -> list[Trajectory]:
    """Return trajectories with the turns of rollout_schedule.json, one to four each, over random ids."""
    rng = random.Random(0)
    schedule = json.loads(SCHEDULE.read_text(encoding="utf-8"))
    made = []
    for row, turns in enumerate(schedule[: args.questions * GROUP_SIZE]):
        if row % GROUP_SIZE == 0:
            shared = [rng.randrange(vocabulary) for _ in range(args.prompt_tokens)]
        mask = [1] * turns[0]["tokens"]
        for turn in turns[1:]:
            mask += [0] * args.observation_tokens + [1] * turn["tokens"]
        made.append(
            Trajectory(
                question=Question(f"q{row // GROUP_SIZE}", "", ()), sample=row % GROUP_SIZE, prompt_ids=shared,
                response_ids=[rng.randrange(vocabulary) for _ in mask], loss_mask=mask,
                sampling_logprobs=[0.0] * len(mask), turns=(), answer=None,
            )
        )  # fmt: skip
    return made


def plan(
    policy: Policy, trajectories: list[Trajectory], dist: Distributed | None, micro_batch_responses: int = 2
) -> Minibatch:
    """Return this rank's part of one minibatch: question q lives on rank q mod world size. dist None: all of it."""
    mine = [
        (trajectory, ADVANTAGES[row % len(ADVANTAGES)])
        for row, trajectory in enumerate(trajectories)
        if dist is None or row // GROUP_SIZE % dist.world_size == dist.rank
    ]
    (minibatch,) = plan_step(
        [trajectory for trajectory, _ in mine],
        [advantage for _, advantage in mine],
        list(dict.fromkeys(trajectory.question.id for trajectory in trajectories)),
        group_size=GROUP_SIZE,
        minibatch_responses=len(trajectories),
        micro_batch_tokens=4096,
        micro_batch_responses=micro_batch_responses,
        packed=True,
        attention_cost=policy.attention_cost,
        **({} if dist is None else {"gather_ranks": dist.gather_ranks}),
    )
    return minibatch


def start(variant: str) -> Distributed:
    """Join the ranks for a variant: its stage, with -offload what that stage can keep in CPU memory, with -bf16."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the variant before
    backend, *options = variant.split("-")
    stage = STAGES.index(backend)
    offload = "offload" in options
    dtype = "bfloat16" if "bf16" in options else "float32"
    return setup(zero_stage=stage, dtype=dtype, offload_optimizer=offload, offload_params=offload and stage == 3)


def make_updates(dist: Distributed, args: argparse.Namespace, lora: bool) -> dict[str, Any]:
    """Make updates on the recorded batch; return what they were and how far they are from those of --state.

    lora: train adapters; the reference is then the model without them.
    """
    at_start = settled_bytes()
    policy = load(args, dist, lora)
    updater = Updater(dist, policy, eps=args.eps)
    read_weights(policy)
    without_reference = settled_bytes()
    reference = updater.without_adapters if lora else frozen_reference(dist, load(args, dist))
    minibatch = plan(policy, recorded_batch(policy.model.config.vocab_size, args), dist, args.micro_batch_responses)
    ref_logprobs = scores(reference, minibatch)
    reference_bytes = settled_bytes() - without_reference
    old_logprobs: list[Tensor] = []
    losses: list[float] = []
    # has neither gate nor clip: a token at an edge is on one side or the other by the rounding of its logprob
    smooth = partial(LOSSES["soft_sapo"], temperature_pos=1.0, temperature_neg=1.05)
    objective = smooth if args.no_edges else sapo

    def share(model: nn.Module, item: tuple[int, Batch]) -> Tensor:
        index, batch = item
        logprobs, _ = model(batch.input_ids, batch.loss_mask)
        if len(old_logprobs) == index:
            old_logprobs.append(logprobs.detach())
        loss = policy_loss(
            logprobs, old_logprobs[index], batch.advantages, batch.loss_mask, minibatch.counts,
            objective=objective, ref_logprobs=ref_logprobs[index], ref_kl_coef=REF_KL,
        ).loss  # fmt: skip
        losses[-1] += loss.item()
        return loss

    def update() -> float:
        losses.append(0.0)
        return updater.update(list(enumerate(minibatch.micro_batches)), share, lr=args.lr)

    reset_peak()
    norms, seconds = [], []
    for _ in range(args.updates):
        began = time.perf_counter()
        norms.append(update())
        seconds.append(time.perf_counter() - began)
    result = {
        "losses": [dist.reduce({"loss": loss})["loss"] for loss in losses],
        "norms": norms,
        "update_s": min(seconds),
        "peak_bytes": dist.gather_objects(peak_bytes() - at_start),
        "reference_bytes": dist.gather_objects(reference_bytes),
        "responses": dist.gather_objects(sum(int(b.loss_mask.any(1).sum()) for b in minibatch.micro_batches)),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters()),
        "ref_logprobs": total(dist, ref_logprobs),
    }
    if args.state:
        moments = moments_of(dist, updater)
        after = updater.state_dict()
        if dist.is_main:
            before = load_file(Path(args.model) / "model.safetensors")
            after = merged_weights(policy.model, after) if lora else after
            change = {name: after[name] - weight for name, weight in before.items()}
            file = args.state.with_name(f"{args.state.name}{'-lora' if lora else ''}")
            result |= compare(file, result, {"weight_change": change, **moments})
    if args.turns:
        result["turns"] = dist.gather_objects(uneven_turns(dist, updater, args.model))
        result["norm_after_rollout"] = update()
        result["ref_logprobs_again"] = total(dist, scores(reference, minibatch))
    return result


def scores(reference: Callable[[], AbstractContextManager[nn.Module]], minibatch: Minibatch) -> list[Tensor]:
    with torch.no_grad(), reference() as model:
        read_weights(model)
        return [model(batch.input_ids, batch.loss_mask)[0] for batch in minibatch.micro_batches]


def total(dist: Distributed, logprobs: list[Tensor]) -> float:
    return dist.reduce({"sum": sum(float(part.double().sum()) for part in logprobs)})["sum"]


def compare(file: Path, result: dict[str, Any], state: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Return the errors against the results in `file`, norm-wise and relative, or write it where there is none."""
    numbers = {name: result[name] for name in ("losses", "norms", "ref_logprobs")}
    if not file.exists():
        torch.save({"numbers": numbers, "state": state}, file)
        return {}
    expected = torch.load(file)
    errors = {f"{name}_err": relative_error(found, expected["state"][name]) for name, found in state.items()}
    for name, found in numbers.items():
        found, wanted = torch.tensor(found).view(-1).double(), torch.tensor(expected["numbers"][name]).view(-1).double()
        errors[f"{name}_err"] = ((found - wanted).abs() / wanted.abs()).max().item()
    return errors


def moments_of(dist: Distributed, updater: Updater) -> dict[str, dict[str, Tensor]]:
    """Return both moments of Adam by parameter; all ranks must call."""
    moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in updater.policy.named_parameters():
        for key, found in moments.items():
            if parameter.requires_grad and dist.zero_stage:
                from deepspeed.utils import safe_get_full_optimizer_state

                found[name] = safe_get_full_optimizer_state(parameter, key).flatten().cpu()
            elif parameter.requires_grad:
                found[name] = updater.optimizer.state[parameter][key].flatten()
    return moments


def uneven_turns(dist: Distributed, updater: Updater, model: str) -> list[int]:
    """Roll out for real with the current weights; return the turns of this rank's trajectories, 1 + 4 * rank.

    A random model never closes a tag: each turn is invalid, until the last one that its budget allows.
    """
    tokenizer = load_tokenizer(model)
    budget = Budget(
        max_prompt_tokens=400, max_turn_tokens=4, max_observation_tokens=200, max_searches=4 * dist.rank,
        max_trajectory_tokens=2000,
    )  # fmt: skip
    with updater.generation():
        trajectories, _ = rollout(
            HFEngine(updater.policy.model, tokenizer),
            SimpleNamespace(search=lambda queries, k: [[] for _ in queries]),
            tokenizer,
            PROTOCOLS["plain"],
            [Question("q0", "who founded it?", ("nobody",))],
            group_size=GROUP_SIZE,
            budget=budget,
            sampling=Sampling(),
            top_k=1,
            seed=0,
            step=1,
        )
    return [len(trajectory.turns) for trajectory in trajectories]


def generate(dist: Distributed, args: argparse.Namespace, lora: bool) -> dict[str, Any]:
    """Time and peak memory of a rollout's forwards under ZeRO-3: weights gathered once, or layer by layer.

    Every rank decodes the same number of tokens, as it would have to with DeepSpeed's hooks.
    """
    updater = Updater(dist, load(args, dist, lora))
    engine = HFEngine(updater.policy.model, load_tokenizer(args.model))
    engine.is_eos[:] = False
    result = {}
    for name, block in (("gathered", updater.generation), ("hooks", contextlib.nullcontext)):
        before = settled_bytes()
        reset_peak()
        began = time.perf_counter()
        with block():
            session = engine.session(list(range(args.rows)), Sampling(), ())
            prompts = [[row + 1] * args.prompt_tokens for row in range(args.rows)]
            turns = session.generate(range(args.rows), prompts, [args.tokens] * args.rows)
        result[name] = {
            "s": max(dist.gather_objects(time.perf_counter() - began)),
            "bytes": max(dist.gather_objects(peak_bytes() - before)),
            "logprobs": sum(sum(turn.logprobs) for turn in turns),
        }
    return result


def rate(dist: Distributed, args: argparse.Namespace, lora: bool) -> dict[str, Any]:
    """Tokens a second of all ranks' updates, each rank on one core and the same trajectories: weak scaling."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.rank]})
    updater = Updater(dist, load(args, dist, lora))
    trajectories = recorded_batch(updater.policy.model.config.vocab_size, args)
    minibatch = plan(updater.policy, trajectories, None)

    def share(model: nn.Module, batch: Batch) -> Tensor:
        logprobs, _ = model(batch.input_ids, batch.loss_mask)
        return policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.loss_mask, minibatch.counts).loss

    seconds = []
    for _ in range(args.updates):
        dist.barrier()
        began = time.perf_counter()
        updater.update(minibatch.micro_batches, share, lr=1e-6)
        seconds.append(max(dist.gather_objects(time.perf_counter() - began)))
    tokens = sum(len(trajectory.ids) for trajectory in trajectories) * dist.world_size
    return {"tokens_per_s": tokens / min(seconds[1:]), "update_s": seconds}


def scaled_down(config: dict[str, Any], live_weights: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration whose limits are to a small model what the defaults are to a large one.

    Under the defaults a model of fewer than 1e9 weights stays whole from its forward to its backward pass.
    """
    limits = {
        "reduce_bucket_size": live_weights,
        "stage3_max_live_parameters": live_weights,
        "stage3_max_reuse_distance": live_weights,
        "stage3_prefetch_bucket_size": live_weights // 10,
        "stage3_param_persistence_threshold": live_weights // 10_000,
    }
    return config | {"zero_optimization": config["zero_optimization"] | limits}


def read_weights(model: nn.Module) -> None:
    """Bring the weights into memory: a model that was just loaded reads them from its file at their first use."""
    for parameter in model.parameters():
        parameter.detach().sum()


def load(args: argparse.Namespace, dist: Distributed, lora: bool = False) -> Policy:
    model, _ = load_policy(args.model, dtype=dist.weights_dtype, gradient_checkpointing=args.gradient_checkpointing)
    if lora:
        add_adapters(model, **LORA, seed=0, base=args.model)
    return Policy(model, packed=True)


def settled_bytes() -> int:
    """Return the memory of this process, after what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes("VmRSS")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak memory of this process since `reset_peak`."""
    return resident_bytes("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measure", choices=["updates", "generate", "rate"])
    parser.add_argument("out", type=Path, help="file for one JSON object a variant, in a list")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--variants", nargs="+", default=["ddp"], help="ddp, zero1, zero2-offload, zero3-lora, ...")
    parser.add_argument("--state", type=Path, help="file to compare with; written where there is none")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--live-weights", type=int, help="ZeRO's limits as if 1e9, its default, were so many weights")
    parser.add_argument("--turns", action="store_true", help="roll out with 1 and 5 turns, then update once more")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--no-edges", action="store_true", help="a loss without gate and clip")
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--micro-batch-responses", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--observation-tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="of generate")
    parser.add_argument("--tokens", type=int, default=16, help="of generate, a row")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--eps", type=float, default=1e-8, help="of AdamW")
    args = parser.parse_args()
    if args.live_weights is not None:
        ours = distributed.zero_config
        distributed.zero_config = lambda *given: scaled_down(ours(*given), args.live_weights)
    measures = {"updates": make_updates, "generate": generate, "rate": rate}
    results = []
    for variant in args.variants:
        dist = start(variant)
        measured = measures[args.measure](dist, args, "lora" in variant)
        results.append({"variant": variant, "ranks": dist.world_size} | measured)
    if dist.is_main:
        args.out.write_text(json.dumps(results))
    dist.end()


if __name__ == "__main__":
    main()
