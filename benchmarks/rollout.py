"""Race our rollout against re-prefilling with `generate` and against TRL's tool loop, on one forced schedule.

    make bench-rollout          (or: python benchmarks/rollout.py [--full] [--threads N] [--only tiny])

All contestants roll out the same questions with the same model object, retriever, threads and process, one after the
other; `benchmarks/rollout_peers.py` says how the recorded turns of rollout_schedule.json are forced on them. malloc
keeps freed memory, as in our scripts: without that the peers' decoding, which copies every key head at every step, is
four times slower. Figures:

vs_reprefill, vs_trl, vs_lockstep_async
    Sampled tokens a second of the whole rollout phase: ours over theirs, and our async schedule over lockstep.
floor_frac
    Time of one forward over each new token once, over our time. Prompts (once a group) and observations cost their
    tokens at the best rate of the engine's own forward over chunks of 1, 2, 4 and 8 rows as long as them: prompts at
    context 0, observations at the mean context of the schedule's. Sampled tokens cost the best rate of forward and
    output head when all rows of the rollout decode together at the mean context of the schedule's sampled tokens.
    Seconds are those of the forward and the head alone, without sampling and bookkeeping.
group_prefill
    First turn (prefill and 1 token) of 40 rows with 40 different prompts of 512 tokens, over 8 prompts x 5 rows.
decode_vs_generate
    Tokens a second after the first one of each row, ours over `generate`, on the 32 ragged rows below.
overhead_frac
    Share of our rollout time outside the model's forward and its output head.
logprob_err_fp32
    Largest difference between a logprob that the engine recorded and that of one full forward over the trajectory, in
    nats, in the first trajectory of each question; logprob_err_fp32_mean is the mean. Both compare the ids that the
    sampler drew, not the scripted ones.
cache_bytes_ratio
    Most bytes that the cache held over the most bytes of keys and values of live tokens.

Top-level figures are SmolLM2-135M's, `tiny` those of an untrained model of the quick start's shape. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.rollout_peers import (
    Contest,
    Ids,
    Probe,
    Run,
    Schedule,
    TrlRollout,
    forced,
    generate_forced,
    load_schedule,
    run_ours,
    run_reprefill,
    script,
    trl_text,
)
from retriever.service import RetrieverService, open_retriever
from sapo.assemble import keep_freed_memory, quieten
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.policy import load_policy
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget, encode_prompt
from sapo.types import Question, Trajectory
from sapo.warm_start import WarmStartSettings, make_model, train_tokenizer
from sapo.world import World, WorldSettings, make_world

SMOLLM2 = Path("models/smollm2-135m-instruct")
SCHEDULE = Path(__file__).with_name("rollout_schedule.json")
GROUP_SIZE = 4
OBSERVATION_TOKENS = 450
PASSAGES_PER_DOCUMENT = 12  # passages of the world in one long document; three of them fill an observation
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# (prompt tokens, sampled tokens) of decode_vs_generate
RAGGED = (
    (64, 128), (81, 24), (98, 61), (116, 8), (133, 97), (150, 40), (168, 17), (185, 112),
    (202, 33), (220, 76), (237, 12), (254, 54), (271, 128), (289, 20), (306, 89), (323, 45),
    (341, 9), (358, 66), (375, 28), (393, 104), (410, 37), (427, 14), (444, 81), (462, 50),
    (479, 120), (496, 22), (514, 70), (531, 11), (548, 58), (566, 30), (583, 93), (600, 42),
)  # fmt: skip

BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Print a progress line with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def documents(world: World) -> list[str]:
    """Return contents of documents as long as those of a real corpus: a title line and the facts of many entities."""
    groups = [
        world.passages[i : i + PASSAGES_PER_DOCUMENT] for i in range(0, len(world.passages), PASSAGES_PER_DOCUMENT)
    ]
    return [
        f'"{group[0]["title"]}"\n' + " ".join(row["contents"].partition("\n")[2] for row in group) for group in groups
    ]


def make_retriever(contents: Sequence[str], folder: Path) -> RetrieverService:
    """Index documents in `folder` and open them."""
    corpus = folder / "corpus.jsonl"
    rows = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(contents)]
    corpus.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return open_retriever(corpus, folder / "index")


def make_questions(world: World, count: int) -> list[Question]:
    """Return questions of the world, each after a few facts: TRL's tool schema must fit into the length of a prompt."""
    rng = random.Random(0)
    questions = []
    for question in world.train_questions[:count]:
        facts = " ".join(row["contents"].partition("\n")[2] for row in rng.sample(world.passages, 3))
        questions.append(Question(question.id, f"{facts} {question.question}", question.golden_answers))
    return questions


def tiny_model(texts: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return an untrained model of the quick start's shape with a ChatML tokenizer trained on `texts`."""
    settings = WarmStartSettings(max_position_embeddings=4096)
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    return make_model(settings, tokenizer), tokenizer


def make_contest(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    retriever: RetrieverService,
    world: World,
    schedule: Schedule,
) -> Contest:
    """Return the contest of one model: every planned turn has a query of its own, so that none is answered twice."""
    protocol = PROTOCOLS["search_r1"]
    questions = make_questions(world, len(schedule) // GROUP_SIZE)
    rng = random.Random(1)
    turns = max(map(len, schedule))
    names = iter(rng.sample([row["title"] for row in world.passages], sum(map(len, schedule))))
    turn_tokens = max(64, max(turn.tokens for row in schedule for turn in row))
    prompt_tokens = max(len(encode_prompt(tokenizer, protocol, q.question)) for q in questions)
    budget = Budget(
        max_prompt_tokens=prompt_tokens,
        max_turn_tokens=turn_tokens,
        max_observation_tokens=OBSERVATION_TOKENS,
        max_searches=turns - 1,
        max_trajectory_tokens=prompt_tokens + turns * (turn_tokens + OBSERVATION_TOKENS),
    )
    return Contest(
        model=model,
        tokenizer=tokenizer,
        retriever=retriever,
        protocol=protocol,
        questions=questions,
        group_size=GROUP_SIZE,
        schedule=schedule,
        queries=[[f"founder of {next(names)}" for _ in row] for row in schedule],
        budget=budget,
        top_k=3,
    )


def random_ids(model: PreTrainedModel, rng: random.Random, tokens: int) -> Ids:
    """Return ids of the first thousand, whose embeddings are as good as any."""
    return [rng.randrange(10, min(1000, model.config.vocab_size)) for _ in range(tokens)]


class Bench:
    """Measurements of our engine alone, on one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.engine = HFEngine(model, tokenizer)
        self.rng = random.Random(2)

    def prompts(self, count: int, tokens: int) -> list[Ids]:
        """Return `count` different random prompts."""
        return [random_ids(self.model, self.rng, tokens) for _ in range(count)]

    def generate(self, *calls: tuple[Sequence[Ids], Sequence[int]]) -> tuple[Probe, float]:
        """Make `calls` on one session: (ids to append to each row, tokens to sample in each row).

        Returns the probe and the seconds of the last call.
        """
        session = self.engine.session(range(len(calls[0][0])), Sampling(), PROTOCOLS["search_r1"].stop_strings)
        for new_ids, limits in calls:
            with forced(self.model, [[script(self.tokenizer, limit, "")] for limit in limits]) as probe:
                started = time.perf_counter()
                session.generate(list(range(len(new_ids))), new_ids, limits)
                seconds = time.perf_counter() - started
        return probe, seconds

    def prefill_rate(self, tokens: int, context: int) -> float:
        """Return the best tokens/s of the forward over chunks of 1, 2, 4, 8 rows of `tokens` new ids at `context`."""

        def rate(rows: int) -> float:
            new, ones = self.prompts(rows, tokens), [1] * rows
            if not context:
                probe, _ = self.generate((new, ones))
                return rows * tokens / sum(probe.forward_s)
            probe, _ = self.generate((self.prompts(1, context) * rows, ones), (new, ones))
            return rows * (tokens + 1) / sum(probe.forward_s)  # the token sampled before is forwarded too

        return max(rate(rows) for rows in (1, 2, 4, 8))

    def decode_rate(self, rows: int, context: int, steps: int = 16) -> float:
        """Return tokens/s of forward and output head while `rows` rows decode together at `context`."""
        shared = self.prompts(1, context - steps // 2) * rows
        probe, _ = self.generate((shared, [steps + 1] * rows))
        return rows * steps / (sum(probe.forward_s[-steps:]) + sum(probe.head_s[-steps:]))

    def group_prefill(self, prompts: int = 8, group_size: int = 5, tokens: int = 512) -> float:
        """Return the time of a first turn with all prompts different over that with `prompts` of them, in groups."""
        rows = prompts * group_size

        def seconds(different: int) -> float:
            drawn = [ids for ids in self.prompts(different, tokens) for _ in range(rows // different)]
            _, taken = self.generate((drawn, [1] * rows))
            return taken

        before, different, after = seconds(prompts), seconds(rows), seconds(prompts)
        return 2 * different / (before + after)

    def decode_vs_generate(self) -> float:
        """Return tokens/s after each row's first token, ours over `generate`, on the rows of RAGGED."""
        prompts = [self.prompts(1, tokens)[0] for tokens, _ in RAGGED]
        lengths = [length for _, length in RAGGED]
        probe, _ = self.generate((prompts, lengths))
        ours = time.perf_counter() - probe.drew_at[0]
        say(f"  decode, ragged lengths: ours {ours:.1f} s")
        scripts = [script(self.tokenizer, length, "") for length in lengths]
        _, first = generate_forced(self.model, prompts, scripts, self.tokenizer.pad_token_id)
        theirs = time.perf_counter() - first
        say(f"  decode, ragged lengths: generate {theirs:.1f} s")
        return theirs / ours


def floor_seconds(bench: Bench, run: Run, group_size: int) -> float:
    """Return the time of one forward over each new token of a rollout (see the module's docstring)."""
    observed = sum(map(sum, run.observed))
    sampled = sum(map(sum, run.sampled))
    prompt = sum(run.prompts[::group_size])
    before_observations: list[tuple[int, int]] = []  # (context, tokens) of each piece
    before_samples: list[tuple[int, int]] = []
    for prompt_tokens, turns, observations in zip(run.prompts, run.sampled, run.observed):
        context = prompt_tokens
        for turn, observation in zip(turns, [*observations, 0]):
            before_samples.append((context + turn // 2, turn))
            before_observations.append((context + turn, observation))
            context += turn + observation
    observation_context, sample_context = (
        round(statistics.fmean([c for c, _ in pieces], [tokens for _, tokens in pieces]))
        for pieces in (before_observations, before_samples)
    )
    prompt_rate = bench.prefill_rate(round(prompt / len(run.prompts[::group_size])), 0)
    observation_rate = bench.prefill_rate(OBSERVATION_TOKENS, observation_context)
    decode_rate = max(bench.decode_rate(len(run.prompts), sample_context) for _ in range(2))
    say(f"  floor: {prompt} prompt tokens at {prompt_rate:,.0f}/s, {observed} observation tokens at "
        f"{observation_rate:,.0f}/s (context {observation_context}), {sampled} sampled at {decode_rate:,.0f}/s "
        f"({len(run.prompts)} rows, context {sample_context})")  # fmt: skip
    return prompt / prompt_rate + observed / observation_rate + sampled / decode_rate


@torch.no_grad()
def logprob_errors(contest: Contest, probe: Probe, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return the absolute differences, in nats, between the engine's logprobs and those of a full forward."""
    errors = []
    for row in range(0, len(trajectories), contest.group_size):
        t = trajectories[row]
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        hidden = contest.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        sampled = len(t.prompt_ids) + torch.tensor(t.loss_mask).nonzero()[:, 0]
        logprobs = contest.model.get_output_embeddings()(hidden[sampled - 1]).double().log_softmax(-1)
        lengths = [turn.end - turn.start for turn in t.turns]
        drawn = np.concatenate([probe.drawn[row, turn, :length] for turn, length in enumerate(lengths)])
        engine = np.concatenate([probe.logprobs[row, turn, :length] for turn, length in enumerate(lengths)])
        full = logprobs.gather(1, torch.from_numpy(drawn)[:, None])[:, 0].numpy()
        errors.append(np.abs(full - engine))
    return np.concatenate(errors)


def check(name: str, contest: Contest, run: Run) -> Run:
    """Print what a contestant did and return its run; refuse one whose turns are not the schedule's."""
    planned = [[turn.tokens for turn in row] for row in contest.schedule]
    longer = sum(
        length > tokens for row, wanted in zip(run.sampled, planned) for length, tokens in zip(row, wanted, strict=True)
    )
    if any(length < tokens for row, wanted in zip(run.sampled, planned) for length, tokens in zip(row, wanted)):
        raise RuntimeError(f"{name}: a turn is shorter than planned, so it was not forced")
    observed = [length for row in run.observed for length in row]
    say(
        f"  {name}: {run.seconds:.1f} s, {run.tokens_per_s:.1f} tokens/s; {sum(map(sum, run.sampled))} tokens "
        f"sampled in {sum(map(len, run.sampled))} turns ({sum(map(sum, planned))} in {sum(map(len, planned))} planned; "
        f"{longer} turns longer), prompts {statistics.fmean(run.prompts):.0f}, {len(observed)} observations of "
        f"{statistics.fmean(observed):.0f} tokens"
    )
    return run


def measure(contest: Contest, folder: Path, *, threads: int, repeats: int, batch_rows: int) -> dict[str, float]:
    """Run all contestants and measurements on one model; return its figures."""
    model = contest.model.eval()
    bench = Bench(model, contest.tokenizer)
    bench.generate((bench.prompts(4, 64), [8] * 4))  # warms up allocators and kernels
    trl = TrlRollout(contest, folder)
    torch.set_num_threads(threads)  # whatever the set-up of TRL left

    ratios: dict[str, list[float]] = {"vs_reprefill": [], "vs_trl": [], "vs_lockstep_async": []}
    lockstep: list[tuple[Run, Probe, list[Trajectory]]] = []
    for repeat in range(repeats):
        say(f"  contest {repeat + 1} of {repeats}")
        reprefill = check("re-prefill", contest, run_reprefill(contest, batch_rows))
        trl_run = check("TRL", contest, trl.run())
        model.eval()
        in_async = check("ours, async", contest, run_ours(contest, "async")[0])
        lockstep.append(run_ours(contest, "lockstep"))
        ours = check("ours", contest, lockstep[-1][0])
        ratios["vs_reprefill"].append(ours.tokens_per_s / reprefill.tokens_per_s)
        ratios["vs_trl"].append(ours.tokens_per_s / trl_run.tokens_per_s)
        ratios["vs_lockstep_async"].append(in_async.tokens_per_s / ours.tokens_per_s)

    ours, probe, trajectories = min(lockstep, key=lambda result: result[0].seconds)
    model_s = sum(probe.forward_s) + sum(probe.head_s)
    cache = probe.session.cache
    floor_s = floor_seconds(bench, ours, contest.group_size)
    say(f"  ours {ours.seconds:.1f} s: forward {sum(probe.forward_s):.1f} s, head {sum(probe.head_s):.1f} s; "
        f"floor {floor_s:.1f} s")  # fmt: skip
    say("  logprobs, group prefill, ragged decoding")
    errors = logprob_errors(contest, probe, trajectories)
    figures = {
        **{name: statistics.median(values) for name, values in ratios.items()},
        "floor_frac": floor_s / ours.seconds,
        "overhead_frac": 1 - model_s / ours.seconds,
        "cache_bytes_ratio": cache.peak_bytes / cache.peak_live_bytes,
        "logprob_err_fp32": float(errors.max()),
        "logprob_err_fp32_mean": float(errors.mean()),
        "group_prefill": statistics.median(bench.group_prefill() for _ in range(repeats)),
        "decode_vs_generate": statistics.median(bench.decode_vs_generate() for _ in range(repeats)),
        "tokens_per_s": ours.tokens_per_s,
    }
    for name, value in figures.items():
        say(f"  {name:<20} {value:.3g}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="128 rollouts instead of 32")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="torch threads (default: 2)")
    parser.add_argument("--only", choices=("tiny", "smollm2"), help="measure one model")
    parser.add_argument("--schedule", type=Path, default=SCHEDULE, help="JSON file of recorded turns")
    parser.add_argument("--reprefill-rows", type=int, default=128, help="rows of a batch of `generate` (default: all)")
    args = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is missing: run this by `make bench-rollout`, which puts it where only this benchmark finds it")
    if args.only != "tiny" and not SMOLLM2.is_dir():
        sys.exit(f"{SMOLLM2} is missing: make it with `make smollm2`")
    quieten()
    keep_freed_memory()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)

    try:
        schedule = load_schedule(args.schedule, 128 if args.full else 32)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    world = make_world(WorldSettings(train_questions=200, heldout_questions=1), seed=0)
    contents = documents(world)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        retriever = make_retriever(contents, folder)
        for model_name in ("tiny", "smollm2"):
            if args.only not in (None, model_name):
                continue
            if model_name == "tiny":
                questions = make_questions(world, 64)
                prompts = [PROTOCOLS["search_r1"].prompt(q.question) for q in questions]
                texts = [*contents, *prompts, *[trl_text()] * len(prompts)]
                model, tokenizer = tiny_model(texts)
            else:
                model, tokenizer = load_policy(SMOLLM2)
            say(f"{model_name}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(schedule)} rollouts, "
                f"{args.threads} threads")  # fmt: skip
            results[model_name] = measure(
                make_contest(model, tokenizer, retriever, world, schedule),
                folder,
                threads=args.threads,
                repeats=3 if model_name == "tiny" else 1,
                batch_rows=args.reprefill_rows,
            )
    say("done")
    print(json.dumps({**results.get("smollm2", {}), "threads": args.threads, "tiny": results.get("tiny", {})}))


if __name__ == "__main__":
    main()
