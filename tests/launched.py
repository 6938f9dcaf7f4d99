"""One rank of a run that ends badly, for tests/test_launch.py: `launched.py ZERO_STAGE {error,kill} FOLDER`.

Trains a tiny model for one update, writes what this rank holds, and then rank 1 fails while rank 0 computes on its own.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sapo.assemble import print_user_error
from sapo.data import load_questions
from sapo.distributed import Updater, setup
from sapo.policy import Policy
from sapo.watch import Watch


MODEL = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip


def held(zero_stage: int) -> dict[str, int]:
    """Make an update; return how many numbers of the model and of Adam's state this rank holds."""
    dist = setup(zero_stage=zero_stage)
    policy = Policy(Qwen2ForCausalLM(MODEL))
    updater = Updater(dist, policy)
    ids, mask = torch.ones(1, 8, dtype=torch.long), torch.tensor([[0.0] + [1.0] * 7])
    updater.update([ids], lambda model, ids: model(ids, mask, 1.0)[0].sum(), lr=1e-3)
    adam = updater.optimizer.optimizer.state.values()
    parameters = list(policy.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    return {
        "rank": dist.rank,
        "local_rank": dist.local_rank,
        "world_size": dist.world_size,
        "model": sum(sizes),
        "weights": sum(p.ds_tensor.numel() if zero_stage == 3 else p.numel() for p in parameters),
        # DeepSpeed keeps weights of fewer than 100,000 numbers also whole
        "whole": sum(p.numel() for p, size in zip(parameters, sizes) if size > 100_000),
        "exp_avg": sum(state["exp_avg"].numel() for state in adam),
    }


def main() -> int:
    zero_stage, ending, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with Watch(silence_s=4) as watch:
        try:
            (folder / f"rank_{watch.rank}.json").write_text(json.dumps(held(zero_stage)))
            if watch.rank == 0:
                time.sleep(120)
            elif ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                load_questions([folder / "missing.jsonl"])
        except Exception as error:
            return print_user_error(error) if watch.fail(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
