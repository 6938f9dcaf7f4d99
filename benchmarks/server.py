"""The retrieval server under load: requests in batches against one request at a time.

    PYTHONPATH=. python benchmarks/server.py [--minutes 2] [--clients 64] [--passages 100000] [--threads 1]

Both servers are `python -m retriever.server` on the same index with the same threads; the second one is started with
--max-batch 1. The clients, in one other process, each send one query a request and the next one as soon as the answer
is there. Passages are random words; the weight-free encoder makes 1024 numbers of each.

The last line is one JSON object: server_vs_single (requests/s over requests/s), p50_ms and p99_ms of a request,
rss_slope_bytes_per_s (least squares over the resident memory of the server, after every query has been asked once),
equal (both servers and the index in this process found the same passages for every query, scores to 1e-5).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retriever.client import RetrieverClient, start_server, stop_server
from retriever.service import open_retriever
from retriever.types import Passage

TOP_K = 3
QUERIES = 1024
WORDS = 20_000  # in the vocabulary, used by Zipf's law
PASSAGE_WORDS = 40
QUERY_WORDS = 8
SINGLE_SHARE = 0.25  # of the time is given to the server that answers one request at a time

Found = list[list[Passage]]


@dataclass(frozen=True)
class Served:
    """What one server did. latencies: seconds of each request. resident: [samples, 2] seconds and bytes."""

    found: Found
    latencies: np.ndarray
    elapsed_s: float
    resident: np.ndarray

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.elapsed_s


def write_corpus(path: Path, passages: int) -> list[str]:
    """Write passages of random words; return queries, each of words of one passage."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(10, WORDS + 10)
    cumulated = np.cumsum(weights / weights.sum())
    queries = []
    with path.open("w") as file:
        for row in range(passages):
            drawn = [f"w{n}" for n in np.searchsorted(cumulated, random.random(PASSAGE_WORDS))]
            file.write(json.dumps({"id": str(row), "contents": f'"T{row}"\n{" ".join(drawn)}'}) + "\n")
            if row % max(1, passages // QUERIES) == 0:
                queries.append(" ".join(drawn[:QUERY_WORDS]))
    return queries[:QUERIES]


def answers(url: str, queries: list[str], clients: int) -> Found:
    """Return what concurrent clients find, one query a request."""
    with closing(RetrieverClient(url, cached_queries=0)) as client, ThreadPoolExecutor(clients) as pool:
        return [found for (found,) in pool.map(lambda query: client.search([query], TOP_K), queries)]


def load(url: str, queries: list[str], clients: int, seconds: float) -> tuple[list[float], float]:
    """Ask for so long; return the seconds of each request and of all together."""

    def ask(n: int) -> list[float]:
        latencies = []
        with closing(RetrieverClient(url, cached_queries=0)) as client:
            for turn in itertools.count(n, clients):
                start = time.perf_counter()
                if start > end:
                    return latencies
                client.search([queries[turn % len(queries)]], TOP_K)
                latencies.append(time.perf_counter() - start)
        raise AssertionError

    begin = time.perf_counter()
    end = begin + seconds
    with ThreadPoolExecutor(clients) as pool:
        latencies = [latency for many in pool.map(ask, range(clients)) for latency in many]
    return latencies, time.perf_counter() - begin


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, mapped files included (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmRSS: this benchmark measures memory on Linux")


def serve(
    corpus: Path, index: Path, queries: list[str], clients: int, seconds: float, **options: float
) -> Served:
    """Start a server with these options and measure it, from when every query has been asked once."""
    process, url = start_server(corpus, index, **options)
    try:
        found = answers(url, queries, clients)
        resident = []
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(int).result()  # the clients' process has started
            loaded: Future[tuple[list[float], float]] = pool.submit(load, url, queries, clients, seconds)
            while not loaded.done():
                resident.append((time.perf_counter(), resident_bytes(process.pid)))
                time.sleep(min(1.0, seconds / 20))
            latencies, elapsed_s = loaded.result()
        return Served(found, np.array(latencies), elapsed_s, np.array(resident))
    finally:
        stop_server(process)


def equal(one: Found, other: Found) -> bool:
    """Whether the same passages were found for every query, in the same order, scores to 1e-5."""
    return [[p.id for p in found] for found in one] == [[p.id for p in found] for found in other] and all(
        abs(a.score - b.score) < 1e-5 for left, right in zip(one, other) for a, b in zip(left, right)
    )


def measure(
    minutes: float = 2.0, clients: int = 64, passages: int = 100_000, threads: int = 1
) -> dict[str, float | bool]:
    """Run the benchmark, print what it measures, and return the keys of the last line."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, index = Path(folder) / "corpus.jsonl", Path(folder) / "index"
        queries = write_corpus(corpus, passages)
        start = time.perf_counter()
        alone = open_retriever(corpus, index)
        print(f"{passages} passages indexed in {time.perf_counter() - start:.0f} s; {alone.info().encoder}")
        expected = [found for query in queries for found in alone.search([query], TOP_K)]
        del alone
        setting = (corpus, index, queries, clients)
        batched = serve(*setting, 60 * minutes, threads=threads)
        single = serve(*setting, 60 * minutes * SINGLE_SHARE, threads=threads, max_batch=1, batch_wait_ms=0)
    for name, served in (("batched", batched), ("one request at a time", single)):
        p50, p99 = np.percentile(served.latencies, [50, 99]) * 1000
        print(f"{name}: {clients} clients, {len(served.latencies)} requests, {served.rate:.1f} requests/s, "
              f"p50 {p50:.0f} ms, p99 {p99:.0f} ms")  # fmt: skip
    seconds, resident = batched.resident.T
    slope = float(np.polyfit(seconds - seconds[0], resident, 1)[0])
    print(f"resident: {resident[0] / 2**20:.1f} MiB, at the end {resident[-1] / 2**20:.1f} MiB, {slope:.0f} bytes/s")
    p50, p99 = np.percentile(batched.latencies, [50, 99]) * 1000
    return {
        "server_vs_single": round(batched.rate / single.rate, 2),
        "requests_per_s": round(batched.rate, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "rss_slope_bytes_per_s": round(slope, 1),
        "equal": equal(batched.found, expected) and equal(single.found, expected),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="time under load of the batching server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a search, the same for both servers")
    options = parser.parse_args(argv)
    print(json.dumps(measure(options.minutes, options.clients, options.passages, options.threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
