"""Turn logits into sampled ids: keyed, truncated, exact. Pure functions on tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch each truncation off.

    logprobs: "sampled" records the logprob under the distribution sampled from (after temperature and truncation),
    "full" under the full softmax at the same temperature. Greedy records the full softmax at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logprobs: Literal["sampled", "full"] = "sampled"


GREEDY = Sampling(temperature=0.0)


def trajectory_key(seed: int, step: int, question_id: str, sample: int) -> int:
    """Return the 64-bit key of one trajectory's random numbers, whatever batch or rank it is drawn in."""
    name = f"{seed}|{step}|{question_id}|{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def keyed_uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one uniform number in [0, 1) for each (key, position): SplitMix64 as a counter-based generator.

    keys [n] uint64, positions [n] non-negative ints -> [n] float64. Source: Steele, Lea and Flood, OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def truncate(logprobs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set the logprobs [n, V] of tokens outside top-k, top-p and min-p to -inf, then normalise again.

    top-p keeps the smallest set of most likely tokens whose mass reaches top_p; min-p keeps tokens at least min_p
    times as likely as the likeliest. The likeliest token always stays.
    """
    keep = torch.ones_like(logprobs, dtype=torch.bool)
    if sampling.top_k:
        kth = logprobs.topk(min(sampling.top_k, logprobs.shape[-1]), dim=-1).values[:, -1:]
        keep &= logprobs >= kth
    if sampling.top_p < 1.0:
        ordered, order = logprobs.sort(dim=-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        keep &= torch.zeros_like(keep).scatter(-1, order, mass_before < sampling.top_p)
    if sampling.min_p > 0.0:
        keep &= logprobs >= logprobs.amax(-1, keepdim=True) + float(np.log(sampling.min_p))
    return torch.log_softmax(logprobs.masked_fill(~keep, -torch.inf), dim=-1)


def sample(logits: torch.Tensor, uniform: np.ndarray, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`.

    logits [n, V]; uniform [n] in [0, 1). Returns ids [n] int64 and logprobs [n] in nats (see Sampling.logprobs).
    Computes in float32, or float64 when the logits are. A row of NaN logits gives a NaN logprob.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0.0:
        logprobs = torch.log_softmax(logits, dim=-1)
        ids = logprobs.argmax(-1)
        return ids, logprobs.gather(-1, ids[:, None])[:, 0]
    full = torch.log_softmax(logits / sampling.temperature, dim=-1)
    truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    drawn_from = truncate(full, sampling) if truncated else full
    # float64 sums keep the draw independent of the order of additions; torch.multinomial is 17 times slower on CPU.
    cdf = drawn_from.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    target = torch.minimum(torch.as_tensor(uniform, device=logits.device) * total, total.nextafter(total.new_zeros(())))
    # The first entry above the target has a positive probability; only NaN rows can run past the end.
    ids = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    recorded = drawn_from if sampling.logprobs == "sampled" else full
    return ids, recorded.gather(-1, ids[:, None])[:, 0]
