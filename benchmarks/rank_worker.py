"""One rank of the check that loss, gradient and update do not depend on ranks, micro-batches or backend.

Started by `benchmarks/loss.py` and the tests under torchrun or accelerate; `run` is also called in one process.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import sapo.packing as packing
from sapo.batch import Minibatch, plan_step
from sapo.distributed import Distributed, Updater, setup
from sapo.loss import policy_loss
from sapo.policy import Policy
from sapo.types import Batch, Question, Trajectory

VOCABULARY, QUESTIONS, GROUP_SIZE = 61, 5, 2  # five questions: two ranks hold different numbers of responses
# Of both signs, but their sum is far from 0: the relative error of a loss that cancels would measure nothing.
ADVANTAGES = (1.1, -0.4, 0.7, -0.6, 0.0, 1.9, -0.2, 1.6, 1.4, 0.5)
OFFSETS = (0.3, -0.05, 0.05, -0.3, 1.2)  # old - new log-ratio: no token within 1e-4 of a gate or clip edge

MAX_GRAD_NORM = 0.3  # clips every update


def tiny_model(dtype: torch.dtype) -> PreTrainedModel:
    """Qwen2 in float32. In float64 GPT-2, because Qwen2 computes its norms in float32 whatever its dtype."""
    torch.manual_seed(0)
    if dtype == torch.float64:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2,
                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            )
        ).to(dtype)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )


def trajectories(policy: Policy) -> list[Trajectory]:
    """Ragged trajectories with masked observations; a question's share its prompt.

    `sampling_logprobs` serve as old_logprobs.
    """
    rng, made = random.Random(0), []
    for index in range(QUESTIONS * GROUP_SIZE):
        of_question = random.Random(index // GROUP_SIZE)
        prompt, response = of_question.randint(2, 6), rng.randint(3, 30)
        ids = [of_question.randrange(VOCABULARY) for _ in range(prompt)]
        ids += [rng.randrange(VOCABULARY) for _ in range(response)]
        mask = [int(rng.random() < 0.7 or t == 0) for t in range(response)]
        with torch.no_grad():
            logprobs = policy(torch.tensor([ids]), torch.tensor([[0] * prompt + mask]))[0][0, prompt:].tolist()
        made.append(
            Trajectory(
                question=Question(f"q{index // GROUP_SIZE}", "", ()), sample=index % GROUP_SIZE,
                prompt_ids=ids[:prompt], response_ids=ids[prompt:], loss_mask=mask, turns=(), answer=None,
                sampling_logprobs=[lp + OFFSETS[(index + t) % len(OFFSETS)] for t, lp in enumerate(logprobs)],
            )
        )
    return made


def plan(dist: Distributed, policy: Policy, rows: int, minibatch_responses: int) -> list[Minibatch]:
    """This rank's part of the step: question q lives on rank q mod world size."""
    mine = [
        (trajectory, advantage)
        for index, (trajectory, advantage) in enumerate(zip(trajectories(policy), ADVANTAGES))
        if index // GROUP_SIZE % dist.world_size == dist.rank
    ]
    return plan_step(
        [trajectory for trajectory, _ in mine],
        [advantage for _, advantage in mine],
        [f"q{index}" for index in range(QUESTIONS)],
        group_size=GROUP_SIZE,
        minibatch_responses=minibatch_responses,
        micro_batch_tokens=10_000,
        micro_batch_responses=rows,
        packed=policy.packed,
        attention_cost=policy.attention_cost,
        gather_ranks=dist.gather_ranks,
        device=dist.device,
    )


def run(dist: Distributed, rows: int, packed: bool) -> dict[str, Any]:
    """Make one update on the whole step, then three on its minibatches, one with an infinite loss on the last rank.

    rows: responses per micro-batch; packed: without padding. Returns loss, gradient (before and, without ZeRO, after
    clipping) and norm of the first update, and the weights after all; then those after one more update, made by this
    updater and by one restored from its pieces.
    """
    options = dict(packed=packed, head_chunk_logits=16 * VOCABULARY)
    policy = Policy(tiny_model(dist.weights_dtype), **options)
    whole, halves = plan(dist, policy, rows, 10), plan(dist, policy, rows, 5)
    # a large eps: with the usual one a gradient of rounding noise moves a weight by the learning rate
    settings = dict(eps=1e-3, max_grad_norm=MAX_GRAD_NORM)
    updater = Updater(dist, policy, **settings)
    gradient: dict[str, torch.Tensor] = {}
    clipped: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []

    def record(into: dict[str, torch.Tensor]) -> None:
        if not into:  # of the first update
            into |= {name: full_gradient(dist, p) for name, p in updater.policy.named_parameters()}

    if dist.zero_stage:
        step = updater.model.step
        updater.model.step = lambda: (record(gradient), step())
    else:
        clip = nn.utils.clip_grads_with_norm_
        nn.utils.clip_grads_with_norm_ = lambda *arguments: (record(gradient), clip(*arguments))[1]
        updater.optimizer.register_step_pre_hook(lambda *_: record(clipped))

    def share(model: nn.Module, item: tuple[Minibatch, Batch, bool]) -> torch.Tensor:
        minibatch, batch, infinite = item
        logprobs, entropy = model(batch.input_ids, batch.loss_mask, 0.9, True)
        loss = policy_loss(
            logprobs, batch.sampling_logprobs, batch.advantages, batch.loss_mask, minibatch.counts,
            ref_logprobs=batch.sampling_logprobs, ref_kl_coef=0.1, entropy=entropy, entropy_coef=0.01,
        ).loss
        losses.append(loss.detach())
        return loss + float("inf") if infinite else loss  # its gradient stays finite

    def update(updater: Updater, minibatch: Minibatch, infinite: bool = False) -> float:
        infinite = infinite and dist.rank == dist.world_size - 1
        return updater.update([(minibatch, batch, infinite) for batch in minibatch.micro_batches], share, lr=1e-3)

    norms = [update(updater, whole[0])]
    loss = dist.reduce({"loss": float(sum(losses))})["loss"]
    norms += [update(updater, halves[0]), update(updater, halves[1], infinite=True), update(updater, halves[1])]
    weights = copy_of(updater.state_dict())

    resumed = Updater(dist, Policy(tiny_model(dist.weights_dtype), **options), **settings)
    with resumed.restoring(updater.updates) as pieces:  # a new updater goes on where this one is
        for piece, own in zip(pieces, updater.pieces()):
            piece.data.copy_(own.data)
    for each in (updater, resumed):
        update(each, whole[0])
    return {
        "loss": loss, "gradient": gradient, "clipped": clipped, "norms": norms, "weights": weights,
        "after": copy_of(updater.state_dict()), "resumed": copy_of(resumed.state_dict()),
        "counts": [minibatch.counts for minibatch in whole + halves],
        "sizes": [len(minibatch.micro_batches) for minibatch in whole + halves],
        "ranks": dist.gather_objects((dist.rank, updater.skipped)),
        "reduced": dist.reduce({"sum": dist.rank + 1}, {"max": dist.rank}, {"min": dist.rank}),
    }


def copy_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def full_gradient(dist: Distributed, parameter: nn.Parameter) -> torch.Tensor:
    if dist.zero_stage:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).clone()
    return parameter.grad.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file for the results of rank 0")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="responses per micro-batch")
    parser.add_argument("--packed", action="store_true", help="without padding, equal beginnings of 2 tokens shared")
    parser.add_argument("--offload-optimizer", action="store_true")
    args = parser.parse_args()
    packing.LEAST_SHARED = 2
    dist = setup(
        zero_stage=args.zero_stage, dtype=args.dtype, max_grad_norm=MAX_GRAD_NORM,
        offload_optimizer=args.offload_optimizer,
    )
    results = [run(dist, rows, args.packed) for rows in args.rows]
    if dist.is_main:
        torch.save(results, args.out)
    dist.end()


if __name__ == "__main__":
    main()
