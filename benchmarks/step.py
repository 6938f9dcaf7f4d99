"""Race our forward and backward of a training step against padded micro-batches and against TRL's GRPO step.

    make bench-step          (or: python benchmarks/step.py [--responses N] [--versions ...])

SmolLM2-135M in float32 on one minibatch: groups of 4 with the turns of rollout_schedule.json, prompts of 650 tokens
(those of a group are one), observations of 450. Every version gets the same trajectories, advantages and GRPO loss (old
logprobs are those of the step itself, mean of response means), the same number of responses in a micro-batch, and
gradient checkpointing, TRL's default. Each runs in a process of its own, once, with malloc keeping freed memory, as in
`train.py`.

    packed     what trains by default: no padding, equal beginnings of rows once
    unshared   no padding, every row whole
    sorted     padded, longest rows first
    given      padded, in the order of the rollout
    exact      one response after another, in float64
    trl        GRPOTrainer.compute_loss of TRL 1.16 with its fused head, batches laid out as it does: prompts padded on
               the left, completions on the right to the longest of the step

vs_padded, vs_trl
    Tokens of the trajectories a second, packed over given and over trl.
vs_unshared, vs_sorted
    The same over the other two, where they were run.
memory_vs_trl
    Peak resident memory of the whole process, packed over trl.
max_grad_err
    Largest |gradient - gradient of given| / |gradient of given| of the other versions of ours. trl_grad_err: trl's.
exact_grad_err
    The same of every version against exact, where it was run.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import sapo.packing as packing
from benchmarks.head import resident_bytes
from benchmarks.loss import relative_error
from benchmarks.rollout_peers import load_schedule
from sapo.assemble import keep_freed_memory, quieten
from sapo.batch import make_batch, plan_step
from sapo.loss import Counts, policy_loss
from sapo.policy import Policy, load_policy
from sapo.protocol import PROTOCOLS
from sapo.rollout import encode, encode_prompt
from sapo.types import Question, Trajectory
from sapo.world import WorldSettings, make_world

SMOLLM2 = Path("models/smollm2-135m-instruct")
SCHEDULE = Path(__file__).with_name("rollout_schedule.json")
SCHEDULED = 128  # trajectories in it
GROUP_SIZE = 4
PROMPT_TOKENS, OBSERVATION_TOKENS = 650, 450
VERSIONS = ("packed", "unshared", "sorted", "given", "exact", "trl")


def make_trajectories(tokenizer: PreTrainedTokenizerBase, responses: int) -> list[Trajectory]:
    """Lay out trajectories of the schedule, taken at even distances, over text of the synthetic world."""
    world = make_world(WorldSettings(), 0)
    rng = random.Random(0)
    text = encode(tokenizer, " ".join(row["contents"] for row in world.passages))
    protocol = PROTOCOLS["search_r1"]
    made = []
    schedule = load_schedule(SCHEDULE, SCHEDULED)
    for row, turns in enumerate(schedule[:: SCHEDULED // responses][:responses]):
        if row % GROUP_SIZE == 0:
            question = world.train_questions[row // GROUP_SIZE]
            start = rng.randrange(len(text) // 2)
            room = PROMPT_TOKENS - len(encode_prompt(tokenizer, protocol, question.question))
            context = tokenizer.decode(text[start : start + room])
            prompt = encode_prompt(tokenizer, protocol, f"{context} {question.question}")
        ids: list[int] = []
        mask: list[int] = []
        for number, turn in enumerate(turns, start=1):
            observed = OBSERVATION_TOKENS if number < len(turns) else 0
            start = rng.randrange(len(text) - 2000)
            ids += text[start : start + turn.tokens + observed]
            mask += [1] * turn.tokens + [0] * observed
        made.append(
            Trajectory(
                Question(question.id, "", ()), row % GROUP_SIZE, prompt, ids, mask, [0.0] * len(ids), (), answer=None
            )
        )
    return made


def our_step(
    model: PreTrainedModel, version: str, trajectories: list[Trajectory], advantages: list[float], rows: int
) -> Callable[[], None]:
    """Return the forward and backward of a step in one of our layouts."""
    if version == "unshared":
        packing.LEAST_SHARED = sys.maxsize
    policy = Policy(model, packed=version in ("packed", "unshared")).train()
    counts = Counts(len(trajectories), sum(sum(t.loss_mask) for t in trajectories), 0)
    if version in ("given", "exact"):
        rows = 1 if version == "exact" else rows  # twice the memory for every number
        order = range(0, len(trajectories), rows)
        micro_batches = [make_batch(trajectories[i : i + rows], advantages[i : i + rows]) for i in order]
    else:
        (minibatch,) = plan_step(
            trajectories,
            advantages,
            list(dict.fromkeys(t.question.id for t in trajectories)),
            group_size=GROUP_SIZE,
            minibatch_responses=len(trajectories),
            micro_batch_tokens=rows * max(len(t.ids) for t in trajectories),
            micro_batch_responses=rows,
            packed=policy.packed,
            attention_cost=policy.attention_cost,
        )
        micro_batches = minibatch.micro_batches

    def step() -> None:
        for batch in micro_batches:
            logprobs, entropy = policy(batch.input_ids, batch.loss_mask, 1.0, True)
            policy_loss(
                logprobs, logprobs.detach(), batch.advantages, batch.loss_mask, counts, entropy=entropy
            ).loss.backward()

    return step


def trl_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trajectories: list[Trajectory],
    advantages: list[float],
    rows: int,
    folder: Path,
) -> Callable[[], None]:
    """Return the forward and backward of a step of TRL's trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    steps = len(trajectories) // rows
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            num_generations=GROUP_SIZE,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "unused"}]}]),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = steps
    trainer.model.train()
    prompt_ids, prompt_mask = padded([t.prompt_ids for t in trajectories], left=True)
    completion_ids, completion_mask = padded([t.response_ids for t in trajectories])
    tool_mask, _ = padded([t.loss_mask for t in trajectories])
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask, "tool_mask": tool_mask, "advantages": torch.tensor(advantages),
    }  # fmt: skip

    def step() -> None:
        for i in range(0, len(trajectories), rows):
            part = {name: tensor[i : i + rows] for name, tensor in inputs.items()}
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, part))

    return step


def padded(rows: Sequence[Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, T] of rows padded with 0 on the right, or on the left."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(list(tokens)), 1
    return ids, mask


def work(options: argparse.Namespace) -> None:
    """Run one version in this process; write seconds, peak memory and gradient to `options.out`."""
    quieten()
    keep_freed_memory()
    model, tokenizer = load_policy(SMOLLM2)
    if options.version == "exact":
        model.double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trajectories = make_trajectories(tokenizer, options.responses)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(options.responses, generator=generator).tolist()

    if options.version == "trl":
        step = trl_step(model, tokenizer, trajectories, advantages, options.rows, options.out.parent)
    else:
        step = our_step(model, options.version, trajectories, advantages, options.rows)
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    gradient = {name: p.grad for name, p in model.named_parameters()}
    peak = resident_bytes("VmHWM")
    tokens = sum(len(t.ids) for t in trajectories)
    torch.save({"seconds": seconds, "peak": peak, "tokens": tokens, "gradient": gradient}, options.out)


def gradient_errors(done: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    """Return the error of each other version's gradient against that of one, if that was run."""
    if name not in done:
        return {}
    expected = done[name]["gradient"]
    return {version: relative_error(run["gradient"], expected) for version, run in done.items() if version != name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="responses of a micro-batch, in every version")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=["packed", "unshared", "given", "trl"])
    parser.add_argument("--version", choices=VERSIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.version:
        work(options)
        return
    done = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in options.versions:
            out = Path(folder) / f"{version}.pt"
            command = [sys.executable, __file__, "--responses", str(options.responses), "--rows", str(options.rows)]
            subprocess.run([*command, "--version", version, "--out", str(out)], check=True)
            done[version] = run = torch.load(out, mmap=True)
            print(
                f"{version:<9} {run['tokens'] / run['seconds']:6.0f} tokens/s  {run['seconds']:6.1f} s  "
                f"peak {run['peak'] / 2**30:5.2f} GiB",
                flush=True,
            )
        exact = gradient_errors(done, "exact")
        errors = {version: error for version, error in gradient_errors(done, "given").items() if version != "exact"}
    seconds = {version: run["seconds"] for version, run in done.items()}
    names = {"given": "vs_padded", "trl": "vs_trl", "unshared": "vs_unshared", "sorted": "vs_sorted"}
    result = {name: seconds[version] / seconds["packed"] for version, name in names.items() if version in seconds}
    if "trl" in done:
        result["memory_vs_trl"] = done["packed"]["peak"] / done["trl"]["peak"]
        result["trl_grad_err"] = errors.pop("trl", None)
    result["max_grad_err"] = max(errors.values(), default=None)
    if exact:
        result["exact_grad_err"] = exact
    result |= {"seconds": seconds, "peak_bytes": {v: run["peak"] for v, run in done.items()}}
    print(json.dumps(result | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
