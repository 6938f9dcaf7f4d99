"""One rank under ZeRO-3 for tests/test_vllm.py: are the weights that go to the engine whole, in bounded parts?"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from sapo.distributed import Updater, setup
from sapo.policy import Policy
from tests.launched import MODEL

PART_BYTES = 1_500_000


def main() -> None:
    dist = setup(zero_stage=3)
    torch.manual_seed(1)  # every rank makes the same model, whatever it keeps
    policy = Policy(Qwen2ForCausalLM(MODEL))
    updater = Updater(dist, policy)
    ids, mask = torch.ones(1, 8, dtype=torch.long), torch.tensor([[0.0] + [1.0] * 7])
    updater.update([ids], lambda model, ids: model(ids, mask, 1.0)[0].sum(), lr=1e-2)
    with updater.generation() as model:
        expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    found, sizes, held = {}, [], []
    for part in updater.whole_weights(PART_BYTES):
        found |= {name: weight.clone() for name, weight in part.items()}
        sizes.append(sum(weight.nbytes for weight in part.values()))
        held.append(sum(weight.nbytes for weight in policy.parameters() if weight.numel() > 100_000))
    updater.update([ids], lambda model, ids: model(ids, mask, 1.0)[0].sum(), lr=1e-2)
    result = {
        "equal": found.keys() == expected.keys() and all(w.equal(expected[name]) for name, w in found.items()),
        "sizes": sizes,
        "held": max(held),
        "version": updater.version,
    }
    (Path(sys.argv[1]) / f"rank_{dist.rank}.json").write_text(json.dumps(result))
    dist.end()


if __name__ == "__main__":
    main()
