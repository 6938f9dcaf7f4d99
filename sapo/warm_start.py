"""Warm start of the tiny policy: a tokenizer and a small Qwen2 fine-tuned on imperfect demonstrations.

A demonstration answers a question about entities that exist only in it, so nothing can be learnt by heart: not a single
fact, only how to search, read and copy. The faults are in behaviour (stopping early, asking for the wrong relation,
guessing) and leave reinforcement learning something to repair; the same demonstrations without faults are the reference.

    python -m sapo.warm_start --config configs/quickstart.yaml [--no-faults] [--out DIR]

The result is an ordinary Hugging Face folder: nothing downstream knows that the policy is tiny.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from retriever.types import Passage
from sapo.protocol import PROTOCOLS, Protocol
from sapo.world import (
    Fact,
    Relation,
    World,
    WorldSettings,
    ask_path,
    make_world,
    passage_text,
    relation_paths,
    relations_of,
)

PAD, EOS = "<|pad|>", "<|eos|>"
_BATCHES_PER_DRAW = 32  # demonstrations are drawn and encoded this many batches at a time
_TOKENIZER_DEMONSTRATIONS = 3000

Progress = Callable[[int, int, float, float], None]  # (step, steps, loss in nats, tokens per second)


class WarmStartSettings(BaseModel):
    """The tiny policy and its supervised fine-tuning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(1280, ge=300, description="largest vocabulary of the byte-level BPE, tokens")
    hidden_size: int = Field(128, ge=16, description="width of the residual stream")
    layers: int = Field(2, ge=1, description="transformer layers")
    heads: int = Field(4, ge=1, description="attention heads")
    intermediate_size: int = Field(384, ge=16, description="width of the MLP")
    rope_theta: float = Field(100.0, gt=1, description="base of the rotary positions; small suits short contexts")
    max_position_embeddings: int = Field(2048, ge=128, description="longest trajectory, tokens")
    demonstrations: int = Field(16000, ge=1, description="demonstrations in all, each one seen once")
    batch_size: int = Field(8, ge=1, description="demonstrations per optimiser step")
    matrix_lr: float = Field(0.02, gt=0, description="peak Muon learning rate of the weight matrices")
    lr: float = Field(1e-2, gt=0, description="peak AdamW learning rate of everything else")
    warmup_steps: int = Field(50, ge=0, description="steps of linear warm-up; linear decay to zero follows")
    document_weight: float = Field(0.3, ge=0, le=1, description="loss weight of a document token; a turn token has 1")
    stop_early: float = Field(0.6, ge=0, le=1, description="probability of answering after the first of several hops")
    wrong_relation: float = Field(0.1, ge=0, le=1, description="probability, per search, of asking for another fact")
    guess: float = Field(0.05, ge=0, le=1, description="probability of answering without a search")

    @model_validator(mode="after")
    def _check(self) -> WarmStartSettings:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"warm_start.hidden_size={self.hidden_size} must be a multiple of 2 * heads = {2 * self.heads}"
            )
        return self


def demonstrate(
    world: World, settings: WarmStartSettings, protocol: Protocol, rng: random.Random, faults: bool
) -> list[str]:
    """Draw one demonstration: [prompt, turn, observation, turn, ..., turn].

    Its entities are invented on the spot from the world's name words; none has the name of a held-out entity. Each
    piece is encoded apart, as in a rollout: a turn ends with the closing tag of its action.
    """
    names = _fresh_names(world, rng)
    path = _draw_path(world.hop_shares, rng)
    subject = names(path[0].subject)
    pieces = [protocol.prompt(ask_path(subject, path))]
    if faults and rng.random() < settings.guess:
        return [*pieces, _answer_turn("I guess", names(path[-1].object))]
    thought = f"I need the {path[0].name}"
    for hop, relation in enumerate(path, start=1):
        asked = relation
        if faults and rng.random() < settings.wrong_relation:
            asked = rng.choice([other for other in relations_of(relation.subject) if other is not relation])
        facts = [Fact(subject, known, names(known.object)) for known in relations_of(relation.subject)]
        rng.shuffle(facts)
        pieces += [
            f"<think> {thought} </think><search> {asked.name} of {subject} </search>",
            protocol.observation([Passage("", f'"{subject}"', passage_text(facts), 0.0)]),
        ]
        found = next(fact for fact in facts if fact.relation is asked)
        thought = passage_text([found]).removesuffix(".")  # quoting the evidence makes the copy that follows easy
        subject = found.object
        if asked is not relation or (faults and hop == 1 < len(path) and rng.random() < settings.stop_early):
            break
    return [*pieces, _answer_turn(thought, subject)]


def _answer_turn(thought: str, answer: str) -> str:
    return f"<think> {thought} </think><answer> {answer} </answer>"


def _draw_path(hop_shares: Sequence[float], rng: random.Random) -> tuple[Relation, ...]:
    (hops,) = rng.choices(range(1, len(hop_shares) + 1), hop_shares)
    return rng.choice(relation_paths(hops))


def _fresh_names(world: World, rng: random.Random) -> Callable[[str], str]:
    """Return a source of names of a given type, distinct within one demonstration and never held-out."""
    used: set[str] = set()

    def fresh(kind: str) -> str:
        while True:
            name = " ".join(rng.choice(pool) for pool in world.pools[kind])
            if name not in used and name not in world.heldout_names:
                used.add(name)
                return name

    return fresh


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with distinct pad and end-of-sequence tokens; the tags of the protocol stay ordinary text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Sequence[str]], document_weight: float
) -> list[tuple[list[int], list[float]]]:
    """Return the token ids of each demonstration and the loss weight of each token.

    Pieces are encoded apart and concatenated. Weight: 0 prompt, 1 turn, `document_weight` observation.
    """
    pieces = [piece for pieces in demonstrations for piece in pieces]
    encoded = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])
    rows = []
    for pieces in demonstrations:
        ids: list[int] = []
        weights: list[float] = []
        for index in range(len(pieces)):
            piece_ids = next(encoded)
            weight = 0.0 if index == 0 else 1.0 if index % 2 else document_weight
            ids += piece_ids
            weights += [weight] * len(piece_ids)
        rows.append((ids, weights))
    return rows


def make_model(settings: WarmStartSettings, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 of the settings' shape, initialised from torch's current random state."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            intermediate_size=settings.intermediate_size,
            max_position_embeddings=settings.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def weighted_loss(model: Qwen2ForCausalLM, input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the next-token loss, in nats.

    input_ids [B, T] int64, right-padded · weights [B, T] float32, of the token at the same place, 0 on padding. Causal
    attention without a padding mask is exact here: no weighted token comes after padding.
    """
    hidden = model.model(input_ids=input_ids[:, :-1]).last_hidden_state
    weight = weights[:, 1:]
    counted = weight > 0
    losses = F.cross_entropy(model.lm_head(hidden[counted]), input_ids[:, 1:][counted], reduction="none")
    return (losses * weight[counted]).sum()


def fit(
    model: Qwen2ForCausalLM,
    draw: Callable[[int], list[tuple[list[int], list[float]]]],
    settings: WarmStartSettings,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place on `settings.demonstrations` encoded demonstrations taken from `draw(count)`."""
    # Muon forms the copying heads in about a quarter of the tokens AdamW needs; embeddings and vectors stay with AdamW.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    steps = -(-settings.demonstrations // settings.batch_size)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / max(1, settings.warmup_steps), 1 - step / steps)
        )
        for optimizer in optimizers
    ]
    model.train()
    started, tokens = time.perf_counter(), 0
    batches: list[list[tuple[list[int], list[float]]]] = []
    for step in range(steps):
        if not batches:
            count = min(_BATCHES_PER_DRAW, steps - step) * settings.batch_size
            rows = draw(count)
            batches = [rows[i : i + settings.batch_size] for i in range(0, count, settings.batch_size)]
            # One norm for all batches of a draw: its own weight would count the tokens of a short batch for more, and
            # so teach a guess more often than it is demonstrated.
            norm = sum(sum(weights) for _, weights in rows) / len(batches)
        # Batches mix short and long demonstrations. Both optimisers answer to the sign of a gradient more than to its
        # size: batches of one length, all stopping early or all going on, would make a habit of the majority's choice
        # instead of a probability. Halves of similar length save the padding.
        batch = sorted(batches.pop(), key=lambda row: len(row[0]))
        half = (len(batch) + 1) // 2
        total = 0.0
        for part in filter(None, (batch[:half], batch[half:])):
            input_ids, weights = _pad(part, model.config.pad_token_id)
            loss = weighted_loss(model, input_ids, weights) / norm
            loss.backward()
            total += loss.item()
            tokens += input_ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(step + 1, steps, total, tokens / (time.perf_counter() - started))


def _pad(rows: Sequence[tuple[list[int], list[float]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids [B, T] int64 and weights [B, T] float32."""
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [pad_id] * (length - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
    return input_ids, weights


def warm_start(
    settings: WarmStartSettings,
    world_settings: WorldSettings,
    out_dir: Path,
    seed: int,
    faults: bool = True,
    protocol: Protocol = PROTOCOLS["plain"],
    progress: Progress | None = None,
) -> Path:
    """Train the tiny policy, or find it already trained, and return its Hugging Face folder inside `out_dir`.

    The folder's name holds a hash of everything that the result depends on, so a changed setting trains anew and an
    unchanged one never does. The folder appears complete or not at all. Bit-equal for one seed on one thread.
    """
    target = Path(out_dir) / f"{'faulty' if faults else 'clean'}-{_fingerprint(settings, world_settings, protocol, seed)}"
    if target.is_dir():
        return target
    world = make_world(world_settings, seed)
    rng = random.Random(f"warm-start-{seed}")

    def draw(count: int) -> list[list[str]]:
        return [demonstrate(world, settings, protocol, rng, faults) for _ in range(count)]

    tokenizer_rng = random.Random(f"tokenizer-{seed}")  # its own, without faults: both warm starts get one tokenizer
    samples = (
        demonstrate(world, settings, protocol, tokenizer_rng, faults=False) for _ in range(_TOKENIZER_DEMONSTRATIONS)
    )
    tokenizer = train_tokenizer((piece for pieces in samples for piece in pieces), settings.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(settings, tokenizer)
    fit(
        model,
        lambda count: encode_demonstrations(tokenizer, draw(count), settings.document_weight),
        settings,
        progress,
    )
    _save(model.eval(), tokenizer, target)
    return target


def _fingerprint(settings: WarmStartSettings, world_settings: WorldSettings, protocol: Protocol, seed: int) -> str:
    sources = [Path(__file__), Path(sys.modules[make_world.__module__].__file__ or "")]
    inputs = [settings.model_dump_json(), world_settings.model_dump_json(), repr(protocol), str(seed)]
    inputs += [source.read_text(encoding="utf-8") for source in sources]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]


def _save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Write the folder beside its final place and rename it; a concurrent run that was faster wins."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(target)
    except OSError:
        shutil.rmtree(unfinished)
        if not target.is_dir():
            raise


def show_progress(step: int, steps: int, loss: float, tokens_per_s: float) -> None:
    """Print the progress of `fit`: a live line on a terminal, a line every tenth elsewhere."""
    live = sys.stdout.isatty()
    if step == steps or step % (20 if live else max(1, steps // 10)) == 0:
        line = f"warm start {step}/{steps}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        print(line, end="\r" if live and step < steps else "\n", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line of this module."""
    from sapo.config import load_config  # the only function here that sees the whole configuration

    parser = argparse.ArgumentParser(prog="python -m sapo.warm_start", description=main.__doc__)
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--out", help="folder that holds the trained policies; default: <output_dir>/cache")
    parser.add_argument("--no-faults", action="store_true", help="train on fault-free demonstrations")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    config = load_config(arguments.config, arguments.overrides)
    if config.warm_start is None:
        parser.error(f"{arguments.config} has no warm_start section")
    folder = warm_start(
        config.warm_start,
        config.world,
        Path(arguments.out) if arguments.out else config.output_dir / "cache",
        config.seed,
        not arguments.no_faults,
        PROTOCOLS[config.protocol.template],
        progress=None if arguments.quiet else show_progress,
    )
    if not arguments.quiet:
        print(f"warm start: {folder}")


if __name__ == "__main__":
    main()
