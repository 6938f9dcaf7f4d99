"""Train a search agent with SAPO (Search Agent Policy Optimization, arXiv 2603.10069).

    accelerate launch train.py --config configs/quickstart.yaml [key.sub=value ...] [--resume [CHECKPOINT]] [--dry-run]

One step, top to bottom in `train`: questions -> rollouts (policy and retriever) -> rewards -> group advantages ->
old logprobs -> SAPO updates -> metrics -> evaluation -> checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
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
    sampling_with,
    source_commit,
    start_vllm,
)
from sapo.baselines import LOSSES
from sapo.batch import Minibatch, level_ranks, plan_step
from sapo.checkpoint import (
    CheckpointWriter,
    Score,
    checkpoint_step,
    fault,
    list_checkpoints,
    load_checkpoint,
    lock_file,
    locked,
    rewind,
)
from sapo.config import Config, batch_plan, config_warnings, load_config, to_yaml
from sapo.data import spare_questions, step_questions
from sapo.diagnostics import MAX_TURN, RULES, Alarm, DriftAlarm, DriftStop, StepStats, judge, token_kinds
from sapo.distributed import Distributed, Updater, frozen_reference, setup, warmup_lr
from sapo.engine.hf import HFEngine
from sapo.engine.vllm import LAUNCHER_VARIABLES, Engine, VLLMEngine, require_vllm
from sapo.evaluation import trajectory_row, write_atomically, write_rows
from sapo.launch import check_agreement, overruled, source_hashes
from sapo.lora import add_adapters, require_peft
from sapo.loss import policy_loss
from sapo.metrics import MetricsLogger, finalise, rollout_metrics
from sapo.plan import plan_here
from sapo.policy import Policy, load_policy, load_tokenizer
from sapo.protocol import PROTOCOLS
from sapo.report import write_report
from sapo.reward import reward
from sapo.rollout import RolloutTimes, rollout
from sapo.types import Batch, Question, Trajectory
from sapo.warm_start import show_progress, warm_start
from sapo.watch import Watch

# A resumed run may differ from its first part in these keys only: none changes what a step computes, up to
# rounding (but for drift.rollback_lr_factor once there was a rollback).
MAY_CHANGE = (
    "output_dir", "optim.steps", "optim.micro_batch", "optim.packing", "optim.max_nonfinite", "eval.", "checkpoint.",
    "logging.", "distributed.", "model.threads", "model.gradient_checkpointing", "rollout.prefill_tokens",
    "rollout.max_rows", "rollout.vllm.", "retriever.url", "retriever.token_env", "retriever.node_server",
    "retriever.timeout_s", "drift.",
)  # fmt: skip

DRIFT_STATUS = 3  # exit status of a run that the drift alarm stopped


@dataclass
class Trainer:
    """What a step needs, assembled once."""

    config: Config
    dist: Distributed
    sources: Sources
    retriever: Retriever
    tokenizer: Any
    updater: Updater
    # opens a block in which the starting model scores; None when ref_kl_beta is 0
    reference: Callable[[], AbstractContextManager[torch.nn.Module]] | None
    engine: Engine
    alarm: DriftAlarm
    writer: CheckpointWriter
    start_model: str
    steps_done: int


def train(trainer: Trainer, logger: MetricsLogger, stop: StopRequest) -> None:
    """Run the steps after `trainer.steps_done`, and count them there."""
    config, dist, updater, writer = trainer.config, trainer.dist, trainer.updater, trainer.writer
    if trainer.steps_done == 0 and config.eval.at_start:
        logger.log(0, evaluate(trainer, logger, 0)[0])
    stopping = False
    while trainer.steps_done < config.optim.steps and not stopping:
        step = trainer.steps_done + 1
        started = time.perf_counter()
        sampled = sample_groups(trainer, step)
        trajectories, rewards = sampled.trajectories, sampled.rewards
        group_ids = [t.question.id for t in trajectories]
        advantages = group_advantages(rewards, group_ids, config.rollout.group_size, config.advantage.estimator)
        layout = {
            "question_ids": [question.id for question in sampled.questions],
            "group_size": config.rollout.group_size,
            "minibatch_responses": config.optim.minibatch_responses,
            "packed": updater.policy.packed,
            "attention_cost": updater.policy.attention_cost,
        }
        minibatches = plan_step(
            *level_ranks(trajectories, advantages, **layout, rank=dist.rank, gather_objects=dist.gather_objects),
            **layout,
            micro_batch_tokens=config.optim.micro_batch_tokens,
            micro_batch_responses=config.optim.micro_batch_responses,
            gather_ranks=dist.gather_ranks,
            device=dist.device,
            token_kinds=partial(
                token_kinds, tokenizer=trainer.tokenizer, think_aware=config.protocol.think_aware
            ),
        )

        if not any(minibatch.counts.tokens for minibatch in minibatches):
            raise ValueError(
                f"nothing was sampled in step {step}: each of its prompts is longer than rollout.max_prompt_tokens = "
                f"{config.rollout.max_prompt_tokens}; raise it or shorten the questions"
            )

        updating = time.perf_counter()
        minibatches = score_minibatches(trainer, minibatches)
        stats = StepStats(config.drift.underflow_ratio)
        for epoch in range(config.optim.epochs):
            for minibatch in minibatches:
                update(trainer, minibatch, step, stats)
        update_s = time.perf_counter() - updating

        metrics, update_metrics = step_metrics(trainer, trajectories, rewards, sampled.times, minibatches, stats)
        if config.rollout.resample_tries:
            metrics["group/resample_tries"] = float(sampled.tries)
            metrics["group/replaced_questions"] = float(sampled.replaced)
        metrics["time/update_s"] = update_s
        metrics["time/step_s"] = time.perf_counter() - started
        if due(config.logging.trajectories_every_steps, step):
            save_trajectories(trainer, logger, trajectories, step)
        stopping = any(map(any, dist.gather_ranks([float(stop.requested)])))
        last = step == config.optim.steps or stopping
        score = None
        if due(config.eval.every_steps, step) or last:
            heldout, score = evaluate(trainer, logger, step)
            metrics |= heldout
        alarms = dist.gather_objects(trainer.alarm.check(step, metrics))[0]
        metrics["drift/alarms"] = float(len(alarms))
        logger.log(step, metrics, update_metrics)
        trainer.steps_done = step
        if due(config.checkpoint.every_steps, step) or last or (alarms and config.drift.action == "stop"):
            state = {"skipped_updates": updater.skipped, "drift": trainer.alarm.state()}
            drifting = not trainer.alarm.calm  # then what is from before stays
            writer.save(step, state, score, keep_all=drifting)
        if updater.skipped > config.optim.max_nonfinite:
            writer.finish()
            raise RuntimeError(
                f"{updater.skipped} updates had a loss or gradient that is not finite (optim.max_nonfinite = "
                f"{config.optim.max_nonfinite}): the run has diverged. Start another (name=...) with a lower optim.lr, "
                f"from the beginning or with model.path=<an earlier step>/model of {config.run_dir / 'checkpoints'}"
            )
        if alarms and not stopping:
            if config.drift.action != "warn":
                writer.finish()
            answer_alarms(trainer, logger, alarms)
    writer.finish()


@dataclass(frozen=True)
class StepGroups:
    """What a step trains on. questions: of all ranks, in order; the rest is this rank's, whole groups in that order."""

    questions: list[Question]
    trajectories: list[Trajectory]
    rewards: list[float]
    times: RolloutTimes
    tries: int  # rollouts made to replace groups; the same on every rank
    replaced: int  # questions whose groups were dropped, over all ranks


def sample_groups(trainer: Trainer, step: int) -> StepGroups:
    """Roll out and score this rank's groups of a step; replace those whose rewards are all equal, in bounded tries.

    Place q of the step's questions belongs to rank q mod world size, whatever stands there: a group stays whole, each
    rank keeps its share of every minibatch, and the n-th group to be replaced, counted over all ranks, gets the n-th
    spare question, so the batch does not depend on the number of ranks. Every rank makes the same number of tries, also
    one that has nothing left to replace. Groups that are still equal after the last try stay, with advantage 0.
    """
    config, dist = trainer.config, trainer.dist
    size, per_step = config.rollout.group_size, config.rollout.questions_per_step
    seed = config.seed if config.data.shuffle else None
    questions = step_questions(trainer.sources.train, step, per_step, seed)
    spare = spare_questions(trainer.sources.train, step, per_step, seed)
    mine = range(dist.rank, per_step, dist.world_size)
    groups: dict[int, list[Trajectory]] = {}
    rewards: dict[int, list[float]] = {}
    all_times = []
    places: Sequence[int] = range(per_step)  # to be rolled out, over all ranks
    tries = replaced = 0
    while True:
        own = [place for place in places if place % dist.world_size == dist.rank]
        trajectories, times = roll_out(trainer, [questions[place] for place in own], step)
        all_times.append(times)
        for n, place in enumerate(own):
            groups[place] = trajectories[n * size : (n + 1) * size]
            rewards[place] = [trajectory_reward(trainer, trajectory) for trajectory in groups[place]]
        if tries == config.rollout.resample_tries:
            break
        equal = dist.gather_ranks([float(min(rewards[place]) == max(rewards[place])) for place in mine])
        places = [place for place in range(per_step) if equal[place % dist.world_size][place // dist.world_size]]
        fresh = list(itertools.islice(spare, len(places)))
        if not fresh:
            break
        places = places[: len(fresh)]
        for place, question in zip(places, fresh):
            questions[place] = question
        tries, replaced = tries + 1, replaced + len(fresh)
    return StepGroups(
        questions=questions,
        trajectories=[trajectory for place in mine for trajectory in groups[place]],
        rewards=[value for place in mine for value in rewards[place]],
        times=total_times(all_times),
        tries=tries,
        replaced=replaced,
    )


def trajectory_reward(trainer: Trainer, trajectory: Trajectory) -> float:
    """Return the reward that the config asks for."""
    settings = trainer.config.reward
    return reward(
        trajectory,
        settings.name,
        decode=trainer.tokenizer.decode,
        format_weight=settings.format_weight,
        reasoning=PROTOCOLS[trainer.config.protocol.template].reasoning,
    )


def total_times(parts: Sequence[RolloutTimes]) -> RolloutTimes:
    """Add up rollouts made one after another; of the cache's peak bytes the largest counts."""
    names = [field.name for field in dataclasses.fields(RolloutTimes)]
    total = RolloutTimes(**{name: sum(getattr(part, name) for part in parts) for name in names})
    return dataclasses.replace(total, cache_bytes=max(part.cache_bytes for part in parts))


def roll_out(trainer: Trainer, questions: Sequence[Question], step: int) -> tuple[list[Trajectory], RolloutTimes]:
    """Sample this rank's trajectories of a step with the current weights."""
    config = trainer.config
    with sampling_with(trainer.engine, trainer.updater):
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
    """Fill in old_logprobs (and ref_logprobs) of every micro-batch, with the packing of the updates to come.

    The first minibatch stays without old_logprobs: its update computes them, with the weights that sampled.
    """
    temperature = trainer.config.rollout.temperature

    def fill_in(name: str, model: torch.nn.Module, minibatch: Minibatch) -> Minibatch:
        return dataclasses.replace(
            minibatch,
            micro_batches=[
                dataclasses.replace(batch, **{name: model(batch.input_ids, batch.loss_mask, temperature)[0]})
                for batch in minibatch.micro_batches
            ],
        )

    first, *others = minibatches
    minibatches = [first, *(fill_in("old_logprobs", trainer.updater.model, minibatch) for minibatch in others)]
    if trainer.reference is not None:
        with trainer.reference() as model:
            minibatches = [fill_in("ref_logprobs", model, minibatch) for minibatch in minibatches]
    return minibatches


def update(trainer: Trainer, minibatch: Minibatch, step: int, stats: StepStats) -> None:
    """Make one optimiser update on a minibatch. Micro-batches without old_logprobs get those of this forward."""
    config, loss = trainer.config, trainer.config.loss
    scored: list[Batch] = []
    objective = partial(LOSSES[loss.name], **loss.parameters)

    def loss_share(model: torch.nn.Module, batch: Batch) -> Tensor:
        logprobs, entropy = model(batch.input_ids, batch.loss_mask, config.rollout.temperature, True)
        if batch.old_logprobs is None:
            batch = dataclasses.replace(batch, old_logprobs=logprobs.detach())
        scored.append(batch)
        result = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            minibatch.counts,
            objective=objective,
            reduction=loss.reduction,
            constant_tokens=(config.rollout.max_searches + 1) * config.rollout.max_turn_tokens,
            dual_clip_bound=loss.dual_clip,
            off_policy_delta=loss.off_policy_delta,
            mismatch=loss.mismatch,
            mismatch_cap=loss.mismatch_cap,
            sampling_logprobs=batch.sampling_logprobs,
            ref_logprobs=batch.ref_logprobs,
            ref_kl_coef=loss.ref_kl_beta,
            entropy=entropy,
            entropy_coef=loss.entropy_bonus,
        )
        stats.add(batch, result)
        return result.loss

    skipped = trainer.updater.skipped
    stats.begin(minibatch.counts)
    grad_norm = trainer.updater.update(minibatch.micro_batches, loss_share, lr=learning_rate(trainer, step))
    minibatch.micro_batches[:] = scored
    stats.end(grad_norm if trainer.updater.skipped == skipped else None)


def learning_rate(trainer: Trainer, step: int) -> float:
    """Return the learning rate of a step: warm-up, then constant, lowered by each rollback."""
    config = trainer.config
    factor = config.drift.rollback_lr_factor**trainer.alarm.rollbacks
    return factor * warmup_lr(step, peak=config.optim.lr, warmup_updates=config.optim.warmup_steps)


def step_metrics(
    trainer: Trainer,
    trajectories: list[Trajectory],
    rewards: list[float],
    times: RolloutTimes,
    minibatches: list[Minibatch],
    stats: StepStats,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the metrics of a step and of each of its updates: sums over counts, quantiles over every sampled token."""
    config, dist = trainer.config, trainer.dist
    sums = rollout_metrics(trajectories, rewards, config.rollout.group_size)
    turns = range(1, min(config.rollout.max_searches + 1, MAX_TURN) + 1)
    mismatch = torch.zeros(len(turns) + 1, 2, dtype=torch.float64)  # by turn: sum over tokens, number of tokens
    for batch in (batch for minibatch in minibatches for batch in minibatch.micro_batches):
        apart = (batch.old_logprobs - batch.sampling_logprobs).abs() * batch.loss_mask
        columns = torch.stack([apart.flatten(), batch.loss_mask.flatten()], 1).double()
        mismatch += columns.new_zeros(mismatch.shape).index_add_(0, batch.turn.flatten().long(), columns).cpu()
    sums |= {f"mismatch_{n}_{i}": float(mismatch[n, i]) for n in turns for i in (0, 1)}
    sums |= {"queries": times.queries, "unique_queries": times.unique_queries}
    sums["drawn_tokens"] = times.sampled_tokens  # also of groups that were replaced
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

    of_step, of_updates = stats.metrics(config.rollout.max_searches + 1, dist.sum_tensor)
    apart, tokens = (sum(total[f"mismatch_{n}_{i}"] for n in turns) for i in (0, 1))
    by_turn = {n: (total[f"mismatch_{n}_0"], total[f"mismatch_{n}_1"]) for n in turns}
    metrics |= {f"turn/engine_mismatch_{n}": summed / count for n, (summed, count) in by_turn.items() if count}
    metrics |= of_step | {
        "policy/engine_mismatch": apart / max(tokens, 1),
        "optim/lr": learning_rate(trainer, trainer.steps_done + 1),
        "optim/skipped_updates": float(trainer.updater.skipped),
        "rollout/unique_query_frac": total["unique_queries"] / max(total["queries"], 1),
        "rollout/tokens_per_s": total["drawn_tokens"] / metrics["time/rollout_s"],
    }
    return metrics, of_updates


def answer_alarms(trainer: Trainer, logger: MetricsLogger, alarms: list[Alarm]) -> None:
    """Do what drift.action says: warn, stop, or go back to the last checkpoint from before the drift.

    Raises DriftStop when the run is not to go on.
    """
    drift, run_dir = trainer.config.drift, trainer.config.run_dir
    since = min(alarm.since for alarm in alarms)
    good: list[Path] = []
    if drift.action != "warn":
        found = trainer.dist.gather_objects(list_checkpoints(run_dir))[0]
        good = [checkpoint for checkpoint in found if checkpoint_step(checkpoint) < since]
    while good and (harm := damage(good[-1], trainer.dist)):
        logger.message(f"warning: {good.pop()} is damaged: {harm}")
    verdict = judge(
        alarms,
        trainer.steps_done,
        action=drift.action,
        good_step=checkpoint_step(good[-1]) if good else None,
        rollback=trainer.alarm.rollbacks + 1,
        max_rollbacks=drift.max_rollbacks,
        lr_factor=drift.rollback_lr_factor,
    )
    if verdict.roll_back:
        roll_back(trainer, logger, good[-1])
    if verdict.stop:
        raise DriftStop(verdict.text)
    if verdict.text:
        logger.message(f"warning: {verdict.text}")


def roll_back(trainer: Trainer, logger: MetricsLogger, checkpoint: Path) -> None:
    """Make everything what it was at a checkpoint, but count the rollback, which lowers the learning rate.

    What was done since is kept in the run's folder rollback_<n>, but for the checkpoints, which are deleted.
    """
    rollbacks = trainer.alarm.rollbacks + 1
    restore(trainer, checkpoint)
    trainer.alarm.rollbacks = rollbacks
    undo_later_steps(trainer, logger, f"rollback_{rollbacks}", keep_checkpoints=False)


def undo_later_steps(trainer: Trainer, logger: MetricsLogger, folder: str, *, keep_checkpoints: bool) -> None:
    """Move what the run wrote after the steps that the trainer has done to a folder of the run."""
    dist, run_dir = trainer.dist, trainer.config.run_dir
    dist.barrier()
    if dist.is_main:
        state = {"drift": trainer.alarm.state()}
        rewind(run_dir, trainer.steps_done, run_dir / folder, state, keep_checkpoints)
        logger.rewind(trainer.steps_done, run_dir / folder)
    dist.barrier()


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Restore the weights, the trainer's state and its counters from a checkpoint."""
    state = load_checkpoint(checkpoint, trainer.dist, trainer.updater)
    trainer.updater.skipped = state["skipped_updates"]
    trainer.alarm.restore(state.get("drift", {}))
    trainer.steps_done = checkpoint_step(checkpoint)


def evaluate(trainer: Trainer, logger: MetricsLogger, step: int) -> tuple[dict[str, float], Score | None]:
    """Score the current policy on held-out questions, as configured, and write the results.

    Returns the metrics, and of the first decoding the EM that checkpoints are compared by; None without questions.
    """
    config, dist = trainer.config, trainer.dist
    questions = trainer.sources.heldout[: config.eval.questions]
    metrics: dict[str, float] = {}
    score: Score | None = None
    if not questions:
        return metrics, score
    model = trainer.start_model if step == 0 else str(config.run_dir / "checkpoints" / f"step_{step}" / "model")
    for name, sampling in eval_decodings(config).items():
        conditions = evaluation_conditions(config, questions, sampling, model, step, trainer.retriever.info())
        with sampling_with(trainer.engine, trainer.updater):
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
        metrics |= {f"eval/heldout/{figure}{suffix}": result[figure] for figure in ("em", "f1", "searches")}
        if score is None:
            measured = json.dumps(conditions | {"step": None, "model": None}, sort_keys=True)
            score = Score(result["em"], hashlib.sha256(measured.encode()).hexdigest(), f"eval/heldout/em{suffix}")
        logger.message(f"step {step}: held-out EM {result['em']:.3f}, F1 {result['f1']:.3f} ({name}, n={result['n']})")
    return metrics, score


def save_trajectories(trainer: Trainer, logger: MetricsLogger, trajectories: list[Trajectory], step: int) -> None:
    """Write the first groups of rank 0 as readable rows, to a file and to wandb."""
    if trainer.dist.is_main:
        rows = [trajectory_row(t) for t in trajectories[: 4 * trainer.config.rollout.group_size]]
        write_rows(trainer.config.run_dir / "trajectories" / f"step_{step}.jsonl", rows)
        again = f"_rollback_{trainer.alarm.rollbacks}" if trainer.alarm.rollbacks else ""
        logger.table(f"trajectories/step_{step}{again}", step, rows)


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
            if beside is not None and beside.poll() is None:
                print("waiting for the warm start without faults, which is only compared with", flush=True)
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


def open_run(config: Config, resume: str | None, force: bool, dist: Distributed) -> Path | None:
    """Check that the run folder may be used; return the checkpoint to resume from (None: from the start).

    resume: None, "latest", or a checkpoint of this run. The latest that is whole is taken, with a warning when there is
    a later one. All ranks must call. Raises ValueError when the folder exists and was not to be resumed, holds a run of
    other settings that `force` does not accept, or has not the checkpoint asked for. A run that failed before it had
    anything to lose does not count.
    """
    run_dir = config.run_dir
    if not run_dir.exists() or has_nothing(run_dir):
        if resume not in (None, "latest"):
            raise ValueError(f"there is no run {run_dir} that could go on from {resume}: check output_dir and name")
        return None
    if resume is None:
        raise ValueError(
            f"{run_dir} exists: go on with that run by --resume, or give this one another name (name=...); "
            "a run is never overwritten"
        )
    changed = changed_settings(config)
    if changed and not force:
        lines = "; ".join(f"{key} was {before!r}, is {now!r}" for key, (before, now) in changed.items())
        raise ValueError(
            f"{run_dir} was started with other settings ({lines}): resume it with its own, saved in "
            f"{run_dir / 'config.yaml'}, accept these by --force, or give this run another name (name=...)"
        )
    checkpoints = list_checkpoints(run_dir)
    if resume != "latest":
        places = [checkpoint.resolve() for checkpoint in checkpoints]
        if (asked := Path(resume).resolve()) not in places:
            names = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
            raise ValueError(
                f"--resume {resume} is no complete checkpoint of {run_dir / 'checkpoints'}, which has {names}; to "
                f"start another run from its weights, set model.path={resume}/model"
            )
        checkpoints = checkpoints[: places.index(asked) + 1]
    while checkpoints:
        checkpoint = checkpoints.pop()
        found = damage(checkpoint, dist)
        if found is None:
            return checkpoint
        before = checkpoints[-1] if checkpoints else None
        if resume != "latest" or before is None:
            way = f"from the one before, by --resume {before}" if before else "under another name (name=...), anew"
            raise ValueError(f"{checkpoint} is damaged: {found}. Go on {way}")
        if dist.is_main:
            print(f"warning: {checkpoint} is damaged: {found}; going on from {before}", file=sys.stderr)
    return None


def has_nothing(run_dir: Path) -> bool:
    """Return whether a run was started in this folder that left neither metrics nor a checkpoint."""
    metrics = run_dir / "metrics.jsonl"
    rows = metrics.stat().st_size if metrics.exists() else 0
    return (run_dir / "run.json").is_file() and not rows and not list_checkpoints(run_dir)


def damage(checkpoint: Path, dist: Distributed) -> str | None:
    """Return what is wrong with a checkpoint, None when nothing is; each rank reads its share, and all must call."""
    return next(filter(None, dist.gather_objects(fault(checkpoint, dist.rank, dist.world_size))), None)


def changed_settings(config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that the run was started with and its present ones, where a resume may not change them."""
    saved = config.run_dir / "config.yaml"
    if not saved.exists():
        return {}
    before, now = flat(load_config(saved).model_dump(mode="json")), flat(config.model_dump(mode="json"))
    keys = [key for key in now | before if before.get(key) != now.get(key) and not key.startswith(MAY_CHANGE)]
    return {key: (before.get(key), now.get(key)) for key in keys}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def write_run_record(config: Config, **fields: Any) -> None:
    """Update runs/<name>/run.json: commit, versions, status."""
    write_atomically(config.run_dir / "run.json", json.dumps(run_record(config) | fields, indent=1) + "\n")


def end_record(config: Config) -> None:
    """Record a run that ended before it could say how as failed."""
    if run_record(config)["status"] == "running":
        write_run_record(config, status="failed")


def run_record(config: Config) -> dict[str, Any]:
    path = config.run_dir / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def run(config: Config, watch: Watch, *, resume: str | None, force: bool, dry_run: bool) -> None:
    """Check everything, then train, and leave a report whatever happens."""
    began = time.monotonic()
    watch.silence_s = config.distributed.silence_s
    warnings = config_warnings(config) + overruled(
        os.environ,
        **config.distributed.model_dump(include={"zero_stage", "offload_optimizer", "offload_params"}),
        dtype=config.model.dtype,
        max_grad_norm=config.optim.max_grad_norm,
        gpus=torch.cuda.device_count(),
    )
    if dry_run:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    dist = setup(  # a dry run computes nothing, so it needs neither DeepSpeed nor a GPU
        zero_stage=0 if dry_run else config.distributed.zero_stage,
        dtype="float32" if dry_run else config.model.dtype,
        max_grad_norm=config.optim.max_grad_norm,
        offload_optimizer=config.distributed.offload_optimizer,
        offload_params=config.distributed.offload_params,
        timeout_s=config.distributed.timeout_s,
        seed=config.seed,
    )
    held = contextlib.ExitStack()
    try:
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)
        check_ranks(config, dist)
        plan = batch_plan(config, dist.world_size)
        if config.model.lora is not None:
            require_peft()
        if config.rollout.engine == "vllm":
            require_vllm()
        if dist.is_main and not dry_run:
            held.enter_context(locked(config.run_dir))
        check_shared(config, dist)
        existed = config.run_dir.exists()
        checkpoint = open_run(config, resume, force, dist)
        if checkpoint is not None and checkpoint_step(checkpoint) >= config.optim.steps:
            if dist.is_main:
                steps = checkpoint_step(checkpoint)
                print(f"{config.run_dir} is finished: {steps} steps; report {config.run_dir / 'report.html'}")
            return
        if dist.is_main:
            print(plan)
            for warning in warnings:
                print(f"warning: {warning}", file=sys.stderr)
        sources = load_sources(config, write=dist.is_main)
        dist.barrier()
        retriever = connect_retriever_in_turn(config, sources, dist)
        check_data(dist, sources, retriever)
        if dry_run or checkpoint is None:
            check_model(config)
        if dry_run:
            if dist.is_main:
                print(plan_here(config, dist.world_size))
                print(f"dry run: {len(sources.train)} training and {len(sources.heldout)} held-out questions, "
                      f"{retriever.info().passages} passages; nothing was trained")  # fmt: skip
            return
        if dist.is_main:
            if force and (changed := changed_settings(config)):
                forced = {"from": str(checkpoint), "changed": changed}
                write_run_record(config, forced=[*run_record(config).get("forced", []), forced])
            try:
                config.run_dir.mkdir(parents=True, exist_ok=existed)
            except FileExistsError:
                raise ValueError(f"{config.run_dir} was made by another process: use another name (name=...)") from None
            write_atomically(config.run_dir / "config.yaml", to_yaml(config))
            write_run_record(
                config,
                name=config.name,
                commit=source_commit(),
                versions=package_versions(),
                world_size=dist.world_size,
                started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                status="running",
                stopped_by=None,
            )
            held.callback(end_record, config)
            watch.on_end = lambda reason: write_run_record(config, status="failed", stopped_by=reason)
        dist.barrier()
        models = prepare_models(config, dist)
        if dist.is_main:
            write_run_record(config, **models)
        trainer = assemble(config, dist, sources, retriever, models["start_model"], checkpoint)
        wandb = config.logging.wandb
        latest = max(map(checkpoint_step, list_checkpoints(config.run_dir)), default=-1)
        aside = checkpoint is not None and (resume != "latest" or trainer.steps_done < latest)
        with MetricsLogger(
            config.run_dir,
            config.optim.steps,
            resume_step=sys.maxsize if aside else latest,  # -1: the row of step 0 is made again
            enabled=dist.is_main,
            console=config.logging.console,
            wandb={"mode": wandb.mode, "project": wandb.project, "entity": wandb.entity, "group": wandb.group},
            config=config.model_dump(mode="json"),
        ) as logger:
            status = "failed"
            try:
                if aside:
                    stamp = datetime.now(timezone.utc).strftime("%Y%m%d_%H%M%S")
                    undo_later_steps(trainer, logger, f"undone_{stamp}", keep_checkpoints=True)
                with StopRequest(show=dist.is_main) as stop:
                    train(trainer, logger, stop)
                status = "finished" if trainer.steps_done >= config.optim.steps else "interrupted"
            except DriftStop as error:
                status = "stopped"
                if dist.is_main:
                    write_run_record(config, stopped_by=str(error))
                raise
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            except Exception:
                trainer.writer.wait()
                raise
            finally:
                if isinstance(trainer.engine, VLLMEngine):
                    trainer.engine.close()
                if dist.is_main:
                    done, seconds = trainer.steps_done, round(time.monotonic() - began, 1)
                    write_run_record(config, status=status, steps_done=done, wall_s=seconds)
                    report = write_report(config.run_dir)
                    logger.message(f"{status} after {done} steps, {seconds:.0f} s; report {report}")
    finally:
        held.close()
        if sys.exc_info()[0] in (None, DriftStop):  # where all ranks come; a launcher ends the others after the first
            dist.end()


def check_ranks(config: Config, dist: Distributed) -> None:
    """Raise RuntimeError when ranks differ in code, settings or packages: they would train apart or hang."""
    facts: dict[str, Any] = {f"setting {key}": value for key, value in flat(config.model_dump(mode="json")).items()}
    facts |= {f"package {name}": version for name, version in package_versions().items()}
    facts |= {f"file {name}": content for name, content in source_hashes().items()}
    fix = "Start every node in the same environment, from the same checkout, with the same command"
    check_agreement(facts, dist.gather_objects, fix)


def check_shared(config: Config, dist: Distributed) -> None:
    """Raise RuntimeError when ranks see different run folders: some would resume, some start, or wait for ever."""
    dist.barrier()  # the lock names this start by now
    run_dir, lock = config.run_dir, lock_file(config.run_dir)
    facts = {
        f"folder {run_dir}": "there" if run_dir.exists() else "not there",
        f"lock {lock}": lock.read_text(encoding="utf-8").strip() if lock.exists() else "not there",
        "list of checkpoints": ", ".join(path.name for path in list_checkpoints(run_dir)) or "empty",
    }
    fix = f"output_dir = {config.output_dir} must be one folder that every node sees, under the same path"
    check_agreement(facts, dist.gather_objects, fix)


def check_data(dist: Distributed, sources: Sources, retriever: Retriever) -> None:
    """Raise RuntimeError when ranks hold different questions or passages."""
    facts = {f"retriever's {name}": value for name, value in dataclasses.asdict(retriever.info()).items()}
    for name, questions in (("training", sources.train), ("held-out", sources.heldout)):
        content = hashlib.sha256(repr(questions).encode()).hexdigest()[:8]
        facts[f"number and hash of the {name} questions"] = f"{len(questions)} {content}"
    check_agreement(facts, dist.gather_objects, "Give all nodes the same files under data and retriever")


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
    lora = config.model.lora
    path = start_model if checkpoint is None or lora else str(checkpoint / "model")
    model, tokenizer = load_policy(path, gradient_checkpointing=config.model.gradient_checkpointing, **loading)
    if lora is not None:
        add_adapters(model, **lora.model_dump(), seed=config.seed, base=start_model)
    updater = Updater(
        dist,
        Policy(model, packed=config.optim.packing == "packed"),
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
    )
    reference = None
    if config.loss.ref_kl_beta and lora is not None:
        reference = updater.without_adapters
    elif config.loss.ref_kl_beta:
        frozen = Policy(load_policy(start_model, **loading)[0], packed=config.optim.packing == "packed")
        reference = frozen_reference(dist, frozen, offload=config.distributed.offload_reference)
    engine: Engine
    if config.rollout.engine == "vllm":
        engine = start_vllm(config, updater, tokenizer)
    else:
        engine = HFEngine(model, tokenizer, prefill_tokens=config.rollout.prefill_tokens)
    drift = config.drift
    alarm = DriftAlarm(drift.model_dump(include=set(RULES)), drift.window, drift.patience)
    kept = config.checkpoint.model_dump(exclude={"every_steps"})
    writer = CheckpointWriter(config.run_dir, dist, updater, tokenizer, **kept)
    trainer = Trainer(
        config, dist, sources, retriever, tokenizer, updater, reference, engine, alarm, writer, start_model, 0
    )
    if checkpoint is not None:
        restore(trainer, checkpoint)
    return trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file, for example configs/quickstart.yaml")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="CHECKPOINT",
        help="go on with the run folder of this config, from the latest checkpoint or from this one",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="resume with settings that differ from the run's")
    parser.add_argument("--dry-run", action="store_true", help="check everything, train nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that differ from the file")
    options = parser.parse_intermixed_args(arguments)
    if "=" in (options.resume or ""):  # --resume key=value
        options.overrides.insert(0, options.resume)
        options.resume = "latest"
    quieten()
    keep_freed_memory()
    with Watch() as watch:
        try:
            config = load_config(options.config, options.overrides)
            run(config, watch, resume=options.resume, force=options.force, dry_run=options.dry_run)
        except DriftStop as error:
            if watch.rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            return DRIFT_STATUS
        except Exception as error:
            return print_user_error(error) if watch.fail(error) else 1
        except KeyboardInterrupt as error:
            watch.fail(error)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
