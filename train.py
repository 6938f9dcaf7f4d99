"""Train a search agent with SAPO (Search Agent Policy Optimization, arXiv 2603.10069).

    accelerate launch train.py --config configs/quickstart.yaml [key.sub=value ...] [--resume] [--dry-run]

One step, top to bottom in `train`: questions -> rollouts (policy and retriever) -> rewards -> group advantages ->
old logprobs -> SAPO updates -> metrics -> evaluation -> checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the other process's core; before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor
from transformers import AutoConfig

from retriever.types import Retriever
from sapo.advantage import group_advantages
from sapo.assemble import (
    Sources,
    connect_retriever_in_turn,
    eval_decodings,
    evaluate_engine,
    evaluation_conditions,
    keep_freed_memory,
    load_sources,
    package_versions,
    print_user_error,
    quieten,
    rollout_budget,
    rollout_sampling,
    source_commit,
)
from sapo.batch import Minibatch, plan_step
from sapo.checkpoint import checkpoint_step, list_checkpoints, load_checkpoint, save_checkpoint
from sapo.config import Config, batch_plan, config_warnings, load_config, to_yaml
from sapo.data import step_questions
from sapo.distributed import Distributed, Updater, setup, warmup_lr
from sapo.engine.hf import HFEngine
from sapo.evaluation import trajectory_row, write_atomically, write_rows
from sapo.loss import policy_loss
from sapo.metrics import MetricsLogger, finalise, rollout_metrics, token_quantile
from sapo.policy import Policy, load_policy, load_tokenizer
from sapo.protocol import PROTOCOLS
from sapo.report import write_report
from sapo.reward import reward
from sapo.rollout import RolloutTimes, rollout
from sapo.types import Batch, Trajectory
from sapo.warm_start import show_progress, warm_start

# A resumed run may differ from its first part in these keys only: none changes what a step computes.
MAY_CHANGE = (
    "output_dir", "optim.steps", "optim.micro_batch", "optim.max_nonfinite", "eval.", "checkpoint.", "logging.",
    "distributed.offload", "distributed.timeout_s", "model.threads", "model.gradient_checkpointing",
    "rollout.prefill_tokens", "rollout.max_rows", "retriever.url", "retriever.timeout_s",
)  # fmt: skip

# What a launcher sets for its own processes; a process started beside the run must not take itself for one of them.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Trainer:
    """What a step needs, assembled once."""

    config: Config
    dist: Distributed
    sources: Sources
    retriever: Retriever
    tokenizer: Any
    updater: Updater
    reference: Policy | None  # frozen starting model; None when ref_kl_beta is 0
    engine: HFEngine
    start_model: str
    steps_done: int


def train(trainer: Trainer, logger: MetricsLogger, stop: StopRequest) -> None:
    """Run the steps after `trainer.steps_done`, and count them there."""
    config, dist, updater = trainer.config, trainer.dist, trainer.updater
    if trainer.steps_done == 0 and config.eval.at_start:
        logger.log(0, evaluate(trainer, logger, 0))
    for step in range(trainer.steps_done + 1, config.optim.steps + 1):
        started = time.perf_counter()
        seed = config.seed if config.data.shuffle else None
        questions = step_questions(trainer.sources.train, step, config.rollout.questions_per_step, seed)

        trajectories, times = roll_out(trainer, questions[dist.rank :: dist.world_size], step)
        rewards = [reward(config.reward.name, t.answer, t.question.golden_answers) for t in trajectories]
        group_ids = [t.question.id for t in trajectories]
        advantages = group_advantages(rewards, group_ids, config.rollout.group_size)
        minibatches = plan_step(
            trajectories,
            advantages,
            [question.id for question in questions],
            group_size=config.rollout.group_size,
            minibatch_responses=config.optim.minibatch_responses,
            micro_batch_tokens=config.optim.micro_batch_tokens,
            micro_batch_responses=config.optim.micro_batch_responses,
            gather_ranks=dist.gather_ranks,
            device=dist.device,
        )

        if not any(minibatch.counts.tokens for minibatch in minibatches):
            raise ValueError(
                f"nothing was sampled in step {step}: each of its prompts is longer than rollout.max_prompt_tokens = "
                f"{config.rollout.max_prompt_tokens}; raise it or shorten the questions"
            )

        updating = time.perf_counter()
        minibatches = score_minibatches(trainer, minibatches)
        stats = StepStats()
        for epoch in range(config.optim.epochs):
            for minibatch in minibatches:
                update(trainer, minibatch, step, stats)
        update_s = time.perf_counter() - updating

        metrics = step_metrics(trainer, trajectories, rewards, times, minibatches, stats)
        metrics["time/update_s"] = update_s
        metrics["time/step_s"] = time.perf_counter() - started
        if due(config.logging.trajectories_every_steps, step):
            save_trajectories(trainer, trajectories, step)
        stopping = any(map(any, dist.gather_ranks([float(stop.requested)])))
        last = step == config.optim.steps or stopping
        if due(config.eval.every_steps, step) or last:
            metrics |= evaluate(trainer, logger, step)
        logger.log(step, metrics)
        trainer.steps_done = step
        if due(config.checkpoint.every_steps, step) or last:
            state = {"skipped_updates": updater.skipped}
            save_checkpoint(config.run_dir, step, dist, updater, trainer.tokenizer, state, config.checkpoint.keep)
        if updater.skipped > config.optim.max_nonfinite:
            raise RuntimeError(
                f"{updater.skipped} updates had a loss or gradient that is not finite (optim.max_nonfinite = "
                f"{config.optim.max_nonfinite}): the run has diverged. Start another (name=...) with a lower optim.lr, "
                f"from the beginning or with model.path=<an earlier step>/model of {config.run_dir / 'checkpoints'}"
            )
        if stopping:
            break


def roll_out(trainer: Trainer, questions: Sequence, step: int) -> tuple[list[Trajectory], RolloutTimes]:
    """Sample this rank's trajectories of a step with the current weights."""
    config = trainer.config
    with trainer.updater.generation():
        return rollout(
            trainer.engine,
            trainer.retriever,
            trainer.tokenizer,
            PROTOCOLS[config.protocol.template],
            questions,
            group_size=config.rollout.group_size,
            budget=rollout_budget(config),
            sampling=rollout_sampling(config),
            top_k=config.retriever.top_k,
            seed=config.seed,
            step=step,
            think_aware=config.protocol.think_aware,
            schedule=config.rollout.schedule,
            max_rows=config.rollout.max_rows,
        )


@torch.no_grad()
def score_minibatches(trainer: Trainer, minibatches: list[Minibatch]) -> list[Minibatch]:
    """Fill in old_logprobs (and ref_logprobs) of every micro-batch, with the packing of the updates to come."""
    temperature = trainer.config.rollout.temperature

    def score(batch: Batch) -> Batch:
        old_logprobs, _ = trainer.updater.model(batch.input_ids, batch.loss_mask, temperature)
        ref_logprobs = None
        if trainer.reference is not None:
            ref_logprobs, _ = trainer.reference(batch.input_ids, batch.loss_mask, temperature)
        return dataclasses.replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    return [dataclasses.replace(m, micro_batches=[score(batch) for batch in m.micro_batches]) for m in minibatches]


class StepStats:
    """What the updates of a step add up: sums, and per-token values for quantiles."""

    def __init__(self) -> None:
        self.updates = 0
        self.applied = 0
        self.tokens = 0
        self.grad_norm = 0.0
        self.lr = 0.0
        self.terms: dict[str, Tensor] = {}
        self.token_sums: dict[str, Tensor] = {}
        self.log_ratios: list[Tensor] = []
        self.positive: list[Tensor] = []


def update(trainer: Trainer, minibatch: Minibatch, step: int, stats: StepStats) -> None:
    """Make one optimiser update on a minibatch."""
    config, loss = trainer.config, trainer.config.loss

    def loss_share(model: torch.nn.Module, batch: Batch) -> Tensor:
        logprobs, entropy = model(batch.input_ids, batch.loss_mask, config.rollout.temperature, True)
        result = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            minibatch.counts,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            gamma=loss.gamma,
            tau=loss.tau,
            gate=loss.gate,
            reduction=loss.reduction,
            constant_tokens=(config.rollout.max_searches + 1) * config.rollout.max_turn_tokens,
            ref_logprobs=batch.ref_logprobs,
            ref_kl_coef=loss.ref_kl_beta,
            entropy=entropy,
            entropy_coef=loss.entropy_bonus,
        )
        for total, part in ((stats.terms, result.terms), (stats.token_sums, result.token_sums)):
            for name, value in part.items():
                total[name] = total.get(name, 0) + value
        stats.log_ratios.append(result.log_ratio)
        stats.positive.append(result.positive)
        return result.loss

    skipped = trainer.updater.skipped
    stats.lr = warmup_lr(step, peak=config.optim.lr, warmup_updates=config.optim.warmup_steps)
    grad_norm = trainer.updater.update(minibatch.micro_batches, loss_share, lr=stats.lr)
    stats.updates += 1
    stats.tokens += minibatch.counts.tokens
    if trainer.updater.skipped == skipped:
        stats.applied += 1
        stats.grad_norm += grad_norm


def step_metrics(
    trainer: Trainer,
    trajectories: list[Trajectory],
    rewards: list[float],
    times: RolloutTimes,
    minibatches: list[Minibatch],
    stats: StepStats,
) -> dict[str, float]:
    """Reduce a step's figures over ranks: sums over counts, quantiles over every sampled token."""
    config, dist = trainer.config, trainer.dist
    sums = rollout_metrics(trajectories, rewards, config.rollout.group_size)
    mismatch = sum(
        float(((b.old_logprobs - b.sampling_logprobs).abs() * b.loss_mask).sum())
        for minibatch in minibatches
        for b in minibatch.micro_batches
    )
    sums |= {name: float(value) for name, value in (stats.terms | stats.token_sums).items()}
    sums |= {"mismatch": mismatch, "queries": times.queries, "unique_queries": times.unique_queries}
    peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak_bytes()
    maxima = {
        "time/rollout_s": times.total_s,
        "time/generate_s": times.generate_s,
        "time/retrieval_s": times.retrieval_s,
        "memory/peak_bytes": float(peak_bytes),
        "memory/kv_cache_bytes": float(times.cache_bytes),
    }
    total = dist.reduce(sums, maxima)
    metrics = finalise(total) | {name: total[name] for name in maxima}

    log_ratios, positive = torch.cat(stats.log_ratios), torch.cat(stats.positive)
    parts = dist.gather_objects((log_ratios.float().cpu().numpy(), positive.cpu().numpy()))
    all_ratios = torch.cat([torch.from_numpy(ratio) for ratio, _ in parts]).exp()
    all_positive = torch.cat([torch.from_numpy(flags) for _, flags in parts])
    sampled_tokens = sum(minibatch.counts.tokens for minibatch in minibatches)
    metrics |= {name: total[name] / max(stats.tokens, 1) for name in stats.token_sums}
    metrics |= {name: total[name] / stats.updates for name in stats.terms}
    metrics |= {
        "policy/ratio_min": token_quantile(all_ratios, 0.0),
        "policy/ratio_p01": token_quantile(all_ratios, 0.01),
        "policy/positive_ratio_p01": token_quantile(all_ratios[all_positive], 0.01),
        "policy/engine_mismatch": total["mismatch"] / max(sampled_tokens, 1),
        "optim/grad_norm": stats.grad_norm / max(stats.applied, 1),
        "optim/lr": stats.lr,
        "optim/skipped_updates": float(trainer.updater.skipped),
        "rollout/unique_query_frac": total["unique_queries"] / max(total["queries"], 1),
        "rollout/tokens_per_s": sampled_tokens / metrics["time/rollout_s"],
    }
    return metrics


def evaluate(trainer: Trainer, logger: MetricsLogger, step: int) -> dict[str, float]:
    """Score the current policy on held-out questions, greedy and as configured; write the results."""
    config, dist = trainer.config, trainer.dist
    questions = trainer.sources.heldout[: config.eval.questions]
    metrics: dict[str, float] = {}
    if not questions:
        return metrics
    model = trainer.start_model if step == 0 else str(config.run_dir / "checkpoints" / f"step_{step}" / "model")
    for name, sampling in eval_decodings(config).items():
        conditions = evaluation_conditions(config, questions, sampling, model, step, trainer.retriever.info())
        with trainer.updater.generation():
            result = evaluate_engine(
                config,
                dist,
                trainer.engine,
                trainer.retriever,
                questions,
                sampling,
                conditions,
                config.run_dir / "eval",
                f"step_{step}_{name}",
            )
        suffix = "" if name == "greedy" else f"_{name}"
        metrics |= {f"eval/heldout/{score}{suffix}": result[score] for score in ("em", "f1", "searches")}
        logger.message(f"step {step}: held-out EM {result['em']:.3f}, F1 {result['f1']:.3f} ({name}, n={result['n']})")
    return metrics


def save_trajectories(trainer: Trainer, trajectories: list[Trajectory], step: int) -> None:
    """Write the first groups of rank 0 as readable rows."""
    if trainer.dist.is_main:
        shown = trajectories[: 4 * trainer.config.rollout.group_size]
        write_rows(
            trainer.config.run_dir / "trajectories" / f"step_{step}.jsonl", [trajectory_row(t) for t in shown]
        )


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StopRequest:
    """Ctrl-C or SIGTERM asks for a stop after the current step; a second one stops at once."""

    def __init__(self, show: bool = True) -> None:
        self.requested = False
        self._show = show

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._show:
            print("\nstopping after this step, with a checkpoint and a report; once more to stop at once", flush=True)


def prepare_models(config: Config, dist: Distributed) -> dict[str, str]:
    """Return the path of the starting model, made by the warm start when there is one, and of its fault-free twin."""
    if config.warm_start is None:
        return {"start_model": config.model.path}
    if dist.is_main:
        beside = None
        if config.eval.fault_free:
            # The twin is only compared with, so it trains beside the other one, on a core of its own.
            command = [sys.executable, "-m", "sapo.warm_start", "--config", str(config.run_dir / "config.yaml")]
            command += ["--no-faults", "--quiet"]
            alone = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
            alone |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
            alone["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), alone.get("PYTHONPATH"))))
            beside = subprocess.Popen(command, env=alone)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            make_warm_start(config, faults=True, show=True)
            if beside is not None and beside.wait():
                raise RuntimeError("the fault-free warm start failed; its error is printed above")
        finally:
            torch.set_num_threads(threads)
            if beside is not None and beside.poll() is None:
                beside.terminate()
    dist.barrier()
    models = {"start_model": str(make_warm_start(config, faults=True))}
    return models | ({"fault_free_model": str(make_warm_start(config, faults=False))} if config.eval.fault_free else {})


def make_warm_start(config: Config, *, faults: bool, show: bool = False) -> Path:
    """Return the folder of a warm start; it is trained only when it is not in the cache."""
    return warm_start(
        config.warm_start,
        config.world,
        config.output_dir / "cache",
        config.seed,
        faults,
        PROTOCOLS[config.protocol.template],
        progress=show_progress if show else None,
    )


def open_run(config: Config, resume: bool) -> Path | None:
    """Check that the run folder may be used; return the checkpoint to resume from (None: from the start).

    Raises ValueError when the folder exists and was not to be resumed, or holds a run of other settings.
    """
    run_dir, saved = config.run_dir, config.run_dir / "config.yaml"
    if not run_dir.exists():
        return None
    if not resume:
        raise ValueError(
            f"{run_dir} exists: go on with that run by --resume, or give this one another name (name=...); "
            "a run is never overwritten"
        )
    if saved.exists():
        before, now = flat(load_config(saved).model_dump(mode="json")), flat(config.model_dump(mode="json"))
        changed = [key for key in now if before.get(key) != now[key] and not key.startswith(MAY_CHANGE)]
        if changed:
            raise ValueError(
                f"{run_dir} was started with other settings ({', '.join(changed)}): resume it with its own, saved in "
                f"{saved}, or give this run another name (name=...)"
            )
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1] if checkpoints else None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def write_run_record(config: Config, **fields: Any) -> None:
    """Update runs/<name>/run.json: commit, versions, status."""
    path = config.run_dir / "run.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_atomically(path, json.dumps(record | fields, indent=1) + "\n")


def run(config: Config, *, resume: bool, dry_run: bool) -> None:
    """Check everything, then train, and leave a report whatever happens."""
    began = time.monotonic()
    dist = setup(  # a dry run computes nothing, so it needs neither DeepSpeed nor a GPU
        zero_stage=0 if dry_run else config.distributed.zero_stage,
        dtype="float32" if dry_run else config.model.dtype,
        max_grad_norm=config.optim.max_grad_norm,
        offload_optimizer=config.distributed.offload_optimizer,
        offload_params=config.distributed.offload_params,
        timeout_s=config.distributed.timeout_s,
        seed=config.seed,
    )
    try:
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        plan = batch_plan(config, dist.world_size)
        checkpoint = open_run(config, resume)
        if checkpoint is not None and checkpoint_step(checkpoint) >= config.optim.steps:
            if dist.is_main:
                steps = checkpoint_step(checkpoint)
                print(f"{config.run_dir} is finished: {steps} steps; report {config.run_dir / 'report.html'}")
            return
        if dist.is_main:
            print(plan)
            for warning in config_warnings(config):
                print(f"warning: {warning}", file=sys.stderr)
        sources = load_sources(config, write=dist.is_main)
        dist.barrier()
        retriever = connect_retriever_in_turn(config, sources, dist)
        if dry_run:
            check_model(config)
            if dist.is_main:
                print(f"dry run: {len(sources.train)} training and {len(sources.heldout)} held-out questions, "
                      f"{retriever.info().passages} passages; nothing was trained")  # fmt: skip
            return
        if dist.is_main:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(config.run_dir / "config.yaml", to_yaml(config))
            write_run_record(
                config,
                name=config.name,
                commit=source_commit(),
                versions=package_versions(),
                world_size=dist.world_size,
                started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                status="running",
            )
        dist.barrier()
        models = prepare_models(config, dist)
        if dist.is_main:
            write_run_record(config, **models)
        trainer = assemble(config, dist, sources, retriever, models["start_model"], checkpoint)
        wandb = config.logging.wandb
        with MetricsLogger(
            config.run_dir,
            config.optim.steps,
            resume_step=trainer.steps_done if checkpoint is not None else -1,  # -1: the row of step 0 is made again
            enabled=dist.is_main,
            console=config.logging.console,
            wandb={"mode": wandb.mode, "project": wandb.project, "entity": wandb.entity, "group": wandb.group},
            config=config.model_dump(mode="json"),
        ) as logger:
            status = "failed"
            try:
                with StopRequest(show=dist.is_main) as stop:
                    train(trainer, logger, stop)
                status = "finished" if trainer.steps_done >= config.optim.steps else "interrupted"
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            finally:
                if dist.is_main:
                    done, seconds = trainer.steps_done, round(time.monotonic() - began, 1)
                    write_run_record(config, status=status, steps_done=done, wall_s=seconds)
                    report = write_report(config.run_dir)
                    logger.message(f"{status} after {done} steps, {seconds:.0f} s; report {report}")
    finally:
        if sys.exc_info()[0] is None:
            dist.end()


def check_model(config: Config) -> None:
    """Load what of the model costs nothing: its configuration and tokenizer. Raises ValueError when one is missing."""
    if config.warm_start is None:
        try:
            AutoConfig.from_pretrained(config.model.path)
            load_tokenizer(config.model.path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model.path = {config.model.path!r} cannot be loaded: give an existing Hugging Face folder or a hub "
                f"name that this machine reaches ({str(error).splitlines()[0]})"
            ) from None


def assemble(
    config: Config,
    dist: Distributed,
    sources: Sources,
    retriever: Retriever,
    start_model: str,
    checkpoint: Path | None,
) -> Trainer:
    """Load the policy, from the checkpoint when there is one, and wrap it for training."""
    loading = {"dtype": dist.weights_dtype, "attn_implementation": config.model.attn_implementation}
    path = start_model if checkpoint is None else str(checkpoint / "model")
    model, tokenizer = load_policy(path, gradient_checkpointing=config.model.gradient_checkpointing, **loading)
    updater = Updater(
        dist,
        Policy(model),
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
    )
    if checkpoint is not None:
        updater.skipped = load_checkpoint(checkpoint, dist, updater)["skipped_updates"]
    reference = None
    if config.loss.ref_kl_beta:
        reference_model, _ = load_policy(start_model, **loading)
        reference = Policy(reference_model).to(dist.device).eval().requires_grad_(False)
    engine = HFEngine(model, tokenizer, prefill_tokens=config.rollout.prefill_tokens)
    steps_done = 0 if checkpoint is None else checkpoint_step(checkpoint)
    return Trainer(
        config, dist, sources, retriever, tokenizer, updater, reference, engine, start_model, steps_done
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file, for example configs/quickstart.yaml")
    parser.add_argument("--resume", action="store_true", help="go on with the run folder of this config")
    parser.add_argument("--dry-run", action="store_true", help="check everything, train nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that differ from the file")
    options = parser.parse_intermixed_args(arguments)
    quieten()
    keep_freed_memory()
    try:
        run(load_config(options.config, options.overrides), resume=options.resume, dry_run=options.dry_run)
    except Exception as error:
        return print_user_error(error)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
