"""Race the vLLM engine against the Hugging Face engine on this machine's CPU.

    make bench-vllm          (or: python benchmarks/vllm_engine.py [--models tiny 135m] [--threads N] [--rounds N] [--eager])

Two models in float32: `tiny`, an untrained one of the quick start's shape, and `135m`, SmolLM2-135M-Instruct
(models/smollm2-135m-instruct, from `make smollm2`). 32 rows, 4 prompts of 256 tokens for 8 rows each, write two turns
of 64 tokens with 64 given tokens between them. Both engines get the same weights and rows, in turns; each has one round
to warm up. Needs vLLM (requirements-vllm.txt).

hf_tok_s, vllm_tok_s
    Sampled tokens a second of the two turns, prefill included; the best of --rounds.
update_s
    Seconds to push changed weights into vLLM, prefix cache dropped; the mean over --rounds.
logprob_err_after_update
    Largest difference in nats between vLLM's logprob of a sampled token and that of one forward of the changed model,
    over all tokens of the rows after each of these updates.

The last line is one JSON object; each figure is given by model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.engine.vllm import Engine, VLLMEngine
from sapo.policy import Policy, load_policy

SMOLLM2 = Path("models/smollm2-135m-instruct")
ROWS, GROUP, PROMPT, TURN, GIVEN = 32, 8, 256, 64, 64


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model by the name it has here, and SmolLM2's tokenizer, of which the tiny one has the first tokens."""
    model, tokenizer = load_policy(SMOLLM2)
    if name == "tiny":
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=1280,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                intermediate_size=384,
                max_position_embeddings=2048,
                tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    return model.eval(), tokenizer


def two_turns(engine: Engine, seed: int) -> tuple[list[list[int]], list[list[float]], float, int]:
    """Return the ids of the rows, the logprob of each (nan where it was given), the seconds and the tokens sampled."""
    generator = torch.Generator().manual_seed(seed)

    def given(rows: int, count: int) -> list[list[int]]:
        return torch.randint(3, 400, (rows, count), generator=generator).tolist()

    prompts = [prompt for prompt in given(ROWS // GROUP, PROMPT) for _ in range(GROUP)]
    between = given(ROWS, GIVEN)
    nan = float("nan")
    ids, logprobs = [list(p) for p in prompts], [[nan] * PROMPT for _ in prompts]
    started, sampled = time.perf_counter(), 0
    with engine.inference():
        session = engine.session([seed * ROWS + row for row in range(ROWS)], Sampling(), ("</search>",))
        for new in (prompts, between):
            for row, turn in enumerate(session.generate(range(ROWS), new, [TURN] * ROWS)):
                if new is between:
                    ids[row] += new[row]
                    logprobs[row] += [nan] * GIVEN
                ids[row] += turn.ids
                logprobs[row] += turn.logprobs
                sampled += len(turn.ids)
    return ids, logprobs, time.perf_counter() - started, sampled


@torch.no_grad()
def largest_error(policy: Policy, ids: list[list[int]], logprobs: list[list[float]]) -> float:
    """Return the largest difference of the logprobs to those of one forward of each row."""
    worst = 0.0
    for row, found in zip(ids, logprobs):
        recorded = torch.tensor([found])
        mask = ~recorded.isnan()
        trained: Tensor = policy(torch.tensor([row]), mask.float())[0]
        worst = max(worst, (trained - recorded)[mask].abs().max().item())
    return worst


def race(name: str, threads: int, rounds: int, eager: bool) -> dict[str, float]:
    """Return the figures of one model."""
    torch.set_num_threads(threads)
    model, tokenizer = load(name)
    policy = Policy(model)
    started = time.perf_counter()
    vllm = VLLMEngine(
        model, tokenizer, dtype=torch.float32, max_rows=ROWS, max_trajectory_tokens=PROMPT + 2 * TURN + GIVEN,
        prefill_tokens=4096, memory_fraction=0.3, eager=eager,
    )  # fmt: skip
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights, vLLM started in "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    exact = HFEngine(model, tokenizer)

    def weights() -> list[dict[str, Tensor]]:
        return [{key: p.detach() for key, p in model.named_parameters(remove_duplicate=False)}]

    vllm.push(weights())
    for engine in (exact, vllm):
        two_turns(engine, seed=0)
    rates: dict[Engine, float] = {exact: 0.0, vllm: 0.0}
    pushes, error = [], 0.0
    for number in range(1, rounds + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-2 * parameter.std(correction=0).item())
        pushes.append(vllm.push(weights()))
        for engine in (exact, vllm):
            ids, logprobs, seconds, sampled = two_turns(engine, seed=number)
            rates[engine] = max(rates[engine], sampled / seconds)
        error = max(error, largest_error(policy, ids, logprobs))
    vllm.close()
    figures = {
        "hf_tok_s": rates[exact],
        "vllm_tok_s": rates[vllm],
        "update_s": sum(pushes) / len(pushes),
        "logprob_err_after_update": error,
    }
    print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("tiny", "135m"), default=["tiny", "135m"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile the model")
    options = parser.parse_args()
    found = {name: race(name, options.threads, options.rounds, options.eager) for name in options.models}
    keys = next(iter(found.values()))
    result = {key: {name: figures[key] for name, figures in found.items()} for key in keys}
    print(json.dumps(result | {"threads": options.threads, "eager": options.eager}))


if __name__ == "__main__":
    main()
