"""One rank that goes on from a checkpoint, or from the beginning, makes two updates and saves another."""

import argparse
from pathlib import Path

import torch

from benchmarks.rank_worker import tiny_model
from sapo.checkpoint import CheckpointWriter, load_checkpoint
from sapo.distributed import Distributed, Updater, setup
from sapo.policy import Policy
from tests.tiny import tiny_tokenizer


def make_updater(dist: Distributed) -> Updater:
    """The same at each call."""
    # a large eps: with the usual one a gradient of rounding noise moves a weight by the learning rate
    return Updater(dist, Policy(tiny_model(dist.weights_dtype).to(dist.weights_dtype), packed=False), eps=1e-3)


def make_update(updater: Updater, number: int) -> None:
    """Of two responses of the number's own, in turn on the ranks, so that the sum over ranks is always the same."""
    dist = updater.dist

    def loss_share(model, row):
        ids = torch.randint(0, 60, (1, 9), generator=torch.Generator().manual_seed(2 * number + row))
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        return -model(ids, mask, 1.0, True)[0].sum() / 100

    rows = [0, 1] if dist.world_size == 1 else [dist.rank]
    updater.update(rows, loss_share, lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--offload-optimizer", action="store_true")
    parser.add_argument("--from-step", type=int, help="step of the checkpoint to go on from")
    parser.add_argument("--as-step", type=int, required=True, help="step to save as, after two updates")
    args = parser.parse_args()
    dist = setup(zero_stage=args.zero_stage, dtype=args.dtype, offload_optimizer=args.offload_optimizer)
    updater = make_updater(dist)
    if args.from_step is not None:
        load_checkpoint(args.run_dir / "checkpoints" / f"step_{args.from_step}", dist, updater)
    for number in (1, 2):
        make_update(updater, (args.from_step or 0) + number)
    writer = CheckpointWriter(args.run_dir, dist, updater, tiny_tokenizer())
    writer.save(args.as_step, {})
    make_update(updater, args.as_step + 1)  # while it is written
    writer.finish()
    # one that is restored goes on as this one did, bit for bit, also in place
    restored = make_updater(dist)
    make_update(restored, 100)
    for each in (restored, updater):
        load_checkpoint(args.run_dir / "checkpoints" / f"step_{args.as_step}", dist, each)
        make_update(each, args.as_step + 1)
    fresh = make_updater(dist)
    load_checkpoint(args.run_dir / "checkpoints" / f"step_{args.as_step}", dist, fresh)
    make_update(fresh, args.as_step + 1)
    for each in (restored, fresh):
        for piece, own in zip(each.pieces(), updater.pieces(), strict=True):
            assert torch.equal(piece.data, own.data), piece.name
        if dist.zero_stage < 3:  # sharded weights are what the pieces are
            for name, weight in each.policy.named_parameters():
                assert torch.equal(weight, dict(updater.policy.named_parameters())[name]), name
    dist.end()


if __name__ == "__main__":
    main()
