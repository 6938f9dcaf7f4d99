"""Compare the memory that `sapo/plan.py` predicts with measured peaks, and with DeepSpeed's own estimators.

    make bench-plan          (or: python benchmarks/plan.py [--only update|rollout])

Peaks are the high-water mark of resident memory (Linux VmHWM) of a process of its own, less what it held before the
model was made; malloc gives freed tensors back at once. float32, one process, random weights, on the CPU:

update_error
    Largest |predicted / measured - 1| of the second update (AdamW's state exists, two micro-batches, the second adds to
    the gradients of the first): models of 30 M and 135 M parameters (SmolLM2's shape), with and without gradient
    checkpointing.
rollout_error
    The same of a rollout of 20 rows over two turns up to the planned length.
zero2_vs_deepspeed, zero3_vs_deepspeed
    Predicted bytes of weights, gradients and optimiser state of Qwen2.5-7B on 8 GPUs (at stage 3 with the weights that
    are gathered in training) over those of DeepSpeed's estimator. It counts gradients in bfloat16 beside the float32
    ones, which DeepSpeed 0.19 does not keep at stage 2.

Nothing here runs on a GPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.head import resident_bytes
from sapo.config import load_config
from sapo.distributed import Updater, setup
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.plan import CPU_BYTES, GB, Setup, make_plan, memory, shape_of, state_bytes
from sapo.policy import Policy

ROOT = Path(__file__).parent.parent
MODELS = {
    "30M": dict(hidden_size=320, num_hidden_layers=12, num_attention_heads=5, num_key_value_heads=5,
                intermediate_size=1024, vocab_size=32000, tie_word_embeddings=False),
    "135M": dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                 intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True),
}  # fmt: skip
# Model, gradient checkpointing, tokens of a micro-batch.
UPDATES = (("30M", False, 1024), ("30M", True, 1024), ("135M", False, 512), ("135M", True, 512))
PROMPT, OBSERVATION, TURN, GROUP, ROWS = 256, 256, 24, 5, 20
TRAJECTORY = PROMPT + 2 * TURN + OBSERVATION


def planned(model: str, **settings: object) -> Setup:
    """Return the setup of one float32 process on a CPU."""
    defaults = dict(
        shape=shape_of(LlamaConfig(**MODELS[model])), zero_stage=0, ranks=1, ranks_per_node=1, on_gpu=False,
        dtype_bytes=4, offload_optimizer=False, offload_params=False, reference="none", offload_reference=False,
        checkpointing=False, micro_batch_tokens=1024, micro_batch_responses=1024, max_rows=ROWS, group_size=GROUP,
        prefill_tokens=4096, max_prompt_tokens=PROMPT, max_observation_tokens=OBSERVATION,
        max_trajectory_tokens=TRAJECTORY, schedule="lockstep", engine_share=0.0, engine_sleeps=True,
        engine_update_bytes=0, async_save=False, index_bytes=0,
    )  # fmt: skip
    return Setup(**(defaults | settings))


def measure_update(model: str, checkpointing: bool, tokens: int) -> int:
    """Return the additional peak bytes of two updates."""
    dist = setup()
    torch.randn(8, 8, requires_grad=True).square().sum().backward()  # what autograd itself loads
    before = resident_bytes("VmRSS")
    network = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[model]))
    if checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    updater = Updater(dist, Policy(network, packed=True))
    rows = 4
    batches = []
    for _ in range(2):
        ids = torch.randint(MODELS[model]["vocab_size"], (rows, tokens // rows))
        mask = torch.ones(rows, tokens // rows)
        mask[:, 0] = 0
        batches.append((ids, mask))

    def loss_share(scorer: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return -scorer(*batch, 1.0, True)[0].mean()

    for _ in range(2):
        updater.update(batches, loss_share, lr=1e-6)
    return resident_bytes("VmHWM") - before


def measure_rollout(model: str) -> int:
    """Return the additional peak bytes of two turns of ROWS rows, prompts in groups of GROUP."""
    vocabulary = MODELS[model]["vocab_size"]
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    before = resident_bytes("VmRSS")
    network = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[model]))
    engine = HFEngine(network, tokenizer, prefill_tokens=4096)
    session = engine.session(range(ROWS), Sampling(), ["</answer>"])
    prompts = torch.randint(1, vocabulary, (ROWS // GROUP, PROMPT)).repeat_interleave(GROUP, 0).tolist()
    session.generate(range(ROWS), prompts, [TURN] * ROWS)
    observations = torch.randint(1, vocabulary, (ROWS, OBSERVATION)).tolist()
    session.generate(range(ROWS), observations, [TURN] * ROWS)
    return resident_bytes("VmHWM") - before


def in_a_process(*arguments: str) -> int:
    """Run one measurement in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", *arguments]
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(ran.stdout.split()[-1])


def compare(name: str, predicted: int, measured: int) -> float:
    ratio = predicted / measured
    print(f"{name:48} planned {predicted / GB:6.3f} GB, measured {measured / GB:6.3f} GB, ratio {ratio:.3f}")
    return abs(ratio - 1)


def main() -> None:
    """Measure each case, then compare with DeepSpeed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("update", "rollout"))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, *rest = options.worker
        print(measure_rollout(*rest) if kind == "rollout" else measure_update(rest[0], rest[1] == "1", int(rest[2])))
        return
    result: dict[str, float] = {}
    if options.only != "rollout":
        errors = []
        for model, checkpointing, tokens in UPDATES:
            case = planned(model, checkpointing=checkpointing, micro_batch_tokens=tokens)
            predicted = sum(memory(case, 0).update.values()) - CPU_BYTES
            measured = in_a_process("update", model, str(int(checkpointing)), str(tokens))
            name = f"update, {model}, {tokens} tokens, checkpointing {checkpointing}"
            errors.append(compare(name, predicted, measured))
        result["update_error"] = round(max(errors), 3)
    if options.only != "update":
        errors = []
        for model in MODELS:
            states = {"optimizer state": 0}  # none before the first update
            parts = memory(planned(model), 0).rollout | states
            predicted = sum(parts.values()) - CPU_BYTES
            errors.append(compare(f"rollout, {model}, {ROWS} rows", predicted, in_a_process("rollout", model)))
        result["rollout_error"] = round(max(errors), 3)
    config = load_config(ROOT / "configs" / "qwen7b.yaml")
    for stage, estimate in ((2, estimate_zero2_model_states_mem_needs), (3, estimate_zero3_model_states_mem_needs)):
        plan = make_plan(config, gpus=8, device_bytes=80 * GB)
        case = dataclasses.replace(plan.setup, zero_stage=stage, reference="none")
        shape = case.shape
        largest = [shape.head_parameters] if stage == 3 else []
        theirs = estimate(shape.parameters, *largest, num_gpus_per_node=8, cpu_offload=False)[1]
        ours = sum(state_bytes(case).values()) + memory(case, 80 * GB).update.get("gathered weights", 0)
        print(f"ZeRO-{stage}, Qwen2.5-7B on 8 GPUs: {ours / GB:.2f} GB, DeepSpeed's estimator {theirs / GB:.2f} GB")
        result[f"zero{stage}_vs_deepspeed"] = round(ours / theirs, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
