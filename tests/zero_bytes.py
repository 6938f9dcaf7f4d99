"""Bytes of all live tensors between two updates of one process at each ZeRO stage, for tests/test_plan.py."""

import gc
import json

import torch
from accelerate.state import AcceleratorState
from transformers import Qwen2Config, Qwen2ForCausalLM

from sapo.distributed import Dtype, Updater, setup
from sapo.policy import Policy

MODEL = Qwen2Config(
    vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return the memory of all tensors of this process by its address."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def bytes_after_updates(stage: int, dtype: Dtype) -> int:
    """Make two updates of two micro-batches; return the bytes that they leave."""
    AcceleratorState._reset_state(reset_partial_state=True)
    before = live_storages()  # of earlier models, which DeepSpeed does not let go of; held, so no address comes twice
    dist = setup(zero_stage=stage, dtype=dtype)
    updater = Updater(dist, Policy(Qwen2ForCausalLM(MODEL).to(dist.weights_dtype)))
    ids, mask = torch.ones(1, 9, dtype=torch.long), torch.tensor([[0.0] + [1.0] * 8])
    for _ in range(2):
        updater.update([ids, ids], lambda model, ids: model(ids, mask, 1.0)[0].sum(), lr=1e-3)
    return sum(storage.nbytes() for address, storage in live_storages().items() if address not in before)


if __name__ == "__main__":
    cases = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("bfloat16", "float32")]
    print(json.dumps({f"{stage} {dtype}": bytes_after_updates(stage, dtype) for stage, dtype in cases}))
