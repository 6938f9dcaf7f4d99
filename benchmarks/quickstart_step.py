"""Measure where the time of a quick start step goes, and how far it is from the floor of its arithmetic.

    make bench-quickstart-step          (or: python benchmarks/quickstart_step.py [--steps 8] [key.sub=value ...])

Trains `--steps` steps of configs/quickstart.yaml from its warm start and times disjoint parts. "Model" is what runs in
tensors: forward passes of the rollout with their sampling, the old_logprobs pass, and the updates. The rest is not:
tokenising, parsing, retrieval, building batches, metrics, logging, Python between them. The floor is the
multiplications of every token (2 FLOPs a weight forward, 4 backward; attention left out) at the speed at which this
machine multiplies matrices of this model's shapes, measured in the same run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from collections import Counter
from typing import Any

import torch

import sapo.engine.hf as hf
import train
from sapo.assemble import connect_retriever, load_sources, quieten
from sapo.config import batch_plan, load_config
from sapo.distributed import setup
from sapo.metrics import MetricsLogger


def timed(owner: Any, name: str, part: str, seconds: Counter) -> None:
    """Replace `owner.name` by itself, adding the time of its calls to `seconds[part]`."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - started

    setattr(owner, name, wrapper)


def matmul_flops_per_s(hidden: int, intermediate: int, rows: int = 4096) -> float:
    """Return the best speed of this model's largest layer, [rows, hidden] x [hidden, intermediate]."""
    a, b = torch.randn(rows, hidden), torch.randn(hidden, intermediate)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * hidden * intermediate / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args()
    quieten()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["eval.fault_free=false", "eval.at_start=false", "eval.every_steps=null",
                    "checkpoint.every_steps=null", "logging.console=false", f"optim.steps={options.steps + 1}"]  # fmt: skip
        config = load_config("configs/quickstart.yaml", [*settings, *options.overrides])
        dist = setup(seed=config.seed)
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        sources = dataclasses.replace(load_sources(config), heldout=[])  # no evaluation inside the measurement
        start = train.prepare_models(config, dist)["start_model"]
        config = config.model_copy(update={"output_dir": train.Path(folder)})
        retriever = connect_retriever(config, sources)
        trainer = train.assemble(config, dist, sources, retriever, start, None)

        seconds: Counter = Counter()
        timed(hf.Session, "_forward", "rollout: model forward", seconds)
        timed(hf, "sample", "rollout: sampling", seconds)
        timed(trainer.engine.model.lm_head, "forward", "rollout: output head", seconds)
        timed(train, "score_minibatches", "old_logprobs", seconds)
        timed(train, "update", "updates", seconds)
        timed(retriever, "search", "retrieval", seconds)
        timed(train, "plan_step", "building batches", seconds)
        timed(train, "step_metrics", "metrics", seconds)
        timed(trainer.writer, "save", "checkpoint (not counted)", seconds)
        with MetricsLogger(config.run_dir, config.optim.steps, console=False) as logger, train.StopRequest() as stop:
            rows: list[dict[str, float]] = []
            log = logger.log

            def keep(step: int, metrics: dict[str, float], *of_updates: list[dict[str, float]]) -> None:
                rows.append(metrics)
                if step == 1:  # the first step also warms up allocators and kernels
                    seconds.clear()
                    keep.started = time.perf_counter()
                log(step, metrics, *of_updates)

            logger.log = keep
            train.train(trainer, logger, stop)
            total = time.perf_counter() - keep.started
    uncounted = sum(value for part, value in seconds.items() if "not counted" in part)
    total -= uncounted
    model_parts = [p for p in seconds if p.startswith("rollout: ")] + ["old_logprobs", "updates"]
    model_s = sum(seconds[part] for part in model_parts)
    counted = {part: value for part, value in seconds.items() if "not counted" not in part}
    counted["everything else"] = total - sum(counted.values())
    steps = options.steps

    weights = sum(p.numel() for n, p in trainer.engine.model.named_parameters() if "embed" not in n and p.ndim == 2)
    head = trainer.engine.model.get_output_embeddings().weight.numel()
    responses = batch_plan(config, 1).responses_per_step
    prompt_tokens = len(trainer.tokenizer(sources.train[0].question)["input_ids"]) + 4
    response_tokens = sum(r["rollout/response_tokens"] for r in rows[1:]) / steps
    sampled = sum(r["rollout/sampled_tokens"] for r in rows[1:]) / steps
    tokens = responses * (prompt_tokens + response_tokens)
    # Rollout: each token once, prompts once a group; old_logprobs: forward, but for the first minibatch; updates: forward
    # and backward. Prompts that rows of a micro-batch share count in full.
    prefill = responses * (response_tokens + prompt_tokens / config.rollout.group_size)
    scored = 1 - 1 / batch_plan(config, 1).minibatches_per_epoch
    flops = 2 * weights * (prefill + (scored + 3 * config.optim.epochs) * tokens)
    flops += 2 * head * responses * sampled * (1 + scored + 4 * config.optim.epochs)  # updates compute logits twice
    speed = matmul_flops_per_s(config.warm_start.hidden_size, config.warm_start.intermediate_size)
    floor_s = flops / speed

    print(f"one step: {total / steps:.2f} s, {responses} responses, {tokens:,.0f} tokens, {torch.get_num_threads()} threads")
    for part, value in sorted(counted.items(), key=lambda item: -item[1]):
        print(f"  {part:<24} {value / steps:7.3f} s  {value / total:6.1%}")
    print(f"not model: {1 - model_s / total:.1%} of the step")
    print(f"floor: {flops / 1e9:.0f} GFLOP at {speed / 1e9:.0f} GFLOP/s = {floor_s:.2f} s, {floor_s / (total / steps):.0%} of the step")
    result = {
        "step_s": total / steps,
        "non_model_frac": 1 - model_s / total,
        "floor_frac": floor_s / (total / steps),
        "gflops_per_s": speed / 1e9,
        "parts_s": {part: value / steps for part, value in counted.items()},
    }
    print(json.dumps(result))
    dist.end()


if __name__ == "__main__":
    main()
