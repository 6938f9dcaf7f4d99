"""Race the logprob head against the same thing with all logits in memory.

    make bench-head          (or: python benchmarks/head.py [--tokens N] [--hidden H] [--vocabulary V] [--entropy])

logprobs of 2,048 tokens at Qwen2.5-0.5B's shape (H = 896, V = 151,936) in float32, forward and backward. Each version
runs in processes of its own, in turns with the other: a first step for its memory, a second for its time; the best of
--rounds counts.

memory_ratio
    Additional peak memory, ours over full. Peak: the high-water mark of resident memory (Linux VmHWM) of a process in
    its first forward and backward, less what is resident before it (weight, hidden states) and less the size of their
    gradients. That favours full, whose peak comes before the gradients exist. It includes what malloc keeps.
time_ratio
    Seconds of the same, ours over full.
grad_err, full_grad_err
    |gradient - exact| / |exact| of ours and of full, the larger of both gradients; exact is computed in float64. Full's
    is larger because float32 log_softmax is biased at this vocabulary.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sapo.policy import HEAD_CHUNK_LOGITS, TokenLogprobs


def resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the most so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark measures memory on Linux")


def full(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return logprobs and entropy [N] from all logits [N, V]."""
    logprobs = F.linear(hidden, weight).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return the same by the head that trains."""
    return TokenLogprobs.apply(hidden, weight, None, targets, 1.0, hidden.dtype, HEAD_CHUNK_LOGITS, with_entropy)


def make_inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden [N, H], weight [V, H], targets [N], and weights [2, N] of logprobs and entropy in the loss."""
    torch.manual_seed(0)
    # Logits of standard deviation 3: peaked, as those of language models are.
    hidden = 3 * torch.randn(options.tokens, options.hidden)
    weight = torch.randn(options.vocabulary, options.hidden).mul_(options.hidden**-0.5)
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    return hidden, weight, targets, torch.randn(2, options.tokens)


def exact_gradients(options: argparse.Namespace, rows: int = 256) -> list[Tensor]:
    """Return the gradients of hidden and weight in float64, `rows` tokens at a time."""
    hidden, weight, targets, weights = make_inputs(options)
    weight = weight.double().requires_grad_()
    parts = []
    for start in range(0, options.tokens, rows):
        part = slice(start, start + rows)
        parts.append(hidden[part].double().requires_grad_())
        logprobs, entropy = full(parts[-1], weight, targets[part], options.entropy)
        loss(logprobs, entropy, weights[:, part]).backward()
    return [torch.cat([part.grad for part in parts]), weight.grad]


def loss(logprobs: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    value = (logprobs * weights[0]).sum()
    return value if entropy is None else value + (entropy * weights[1]).sum()


def work(options: argparse.Namespace) -> None:
    """Run one version in this process; write memory, seconds and gradients to `options.out`."""
    hidden, weight, targets, weights = make_inputs(options)
    hidden.requires_grad_()
    weight.requires_grad_()
    head = {"full": full, "ours": ours}[options.version]
    torch.mm(torch.randn(64, 64), torch.randn(64, 64))  # what the first product loads is not counted

    def step() -> float:
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        logprobs, entropy = head(hidden, weight, targets, options.entropy)
        loss(logprobs, entropy if options.entropy else None, weights).backward()
        return time.perf_counter() - started

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident now
    before = resident_bytes("VmRSS")
    step()
    extra = resident_bytes("VmHWM") - before - hidden.grad.nbytes - weight.grad.nbytes
    seconds = step()
    torch.save({"extra": extra, "seconds": seconds, "gradients": [hidden.grad, weight.grad]}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--entropy", action="store_true", help="also the entropy and its gradient")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--version", choices=("full", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.version:
        work(options)
        return
    results: dict[str, list[dict]] = {"full": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for version, done in results.items():
                out = Path(folder) / f"{version}.pt"
                command = [sys.executable, __file__, *sys.argv[1:], "--version", version, "--out", str(out)]
                subprocess.run(command, check=True)
                done.append(torch.load(out, mmap=True))
                print(
                    f"{version:<5} additional peak {done[-1]['extra'] / 2**20:7.0f} MiB, {done[-1]['seconds']:6.2f} s",
                    flush=True,
                )
        exact = exact_gradients(options)
        errors = {
            version: max(((a - b).norm() / b.norm()).item() for a, b in zip(done[-1]["gradients"], exact))
            for version, done in results.items()
        }
    extra, seconds = ({v: min(r[key] for r in done) for v, done in results.items()} for key in ("extra", "seconds"))
    print(
        json.dumps(
            {
                "memory_ratio": extra["ours"] / extra["full"],
                "time_ratio": seconds["ours"] / seconds["full"],
                "grad_err": errors["ours"],
                "full_grad_err": errors["full"],
                "extra_bytes": extra,
                "seconds": seconds,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
