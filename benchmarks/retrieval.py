"""What the retriever finds, how fast, in how much memory.

    make bench-retrieval     (or: PYTHONPATH=. python benchmarks/retrieval.py [--full] [--only recall indexes server])

Recall: HotpotQA questions over Wikipedia passages (the folder of SAPO_TEST_DATA) with multilingual-e5-small; mean share
of a question's two gold passages among the first k, for vectors, BM25 and both fused. Encoding the passages takes
minutes on a CPU; the index is kept in runs/bench-retrieval, and a stopped run goes on.

Indexes: clustered random vectors of 768 numbers, 200,000 of them (a million with --full). For every kind of index:
seconds to build and to open, queries/s one by one and in batches, share of the three nearest that are found, bytes a
vector, and the resident memory of the process that has answered. Figures for 21 million vectors are computed from
these, not measured.

Server: benchmarks/server.py, two minutes (30 with --full).

The last line is one JSON object: recall {dense, bm25, hybrid: {k: recall}}, open_s (a fresh process opens corpus, index
and encoder of 200,000 passages and has answered one query), qps {kind: {batch: queries/s}}, recall_at_3 and
bytes_per_vector {kind: ...}, and what the server's benchmark measures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retriever.corpus import Corpus
from retriever.encoder import HashedEncoder, make_encoder
from retriever.index import (
    ENCODER_FILE,
    META_FILE,
    VECTORS_FILE,
    IndexMeta,
    IndexSpec,
    build_index,
    file_fingerprint,
    has_index,
    read_vectors,
)
from retriever.recall import read_gold, recall_at, search_ids
from retriever.service import open_retriever

KEPT = Path("runs/bench-retrieval")
DIM, K, QUERIES, PER_CLUSTER = 768, 3, 512, 100
BATCHES = (1, 32, 256)
WIKIPEDIA = 21_015_324  # passages of wiki-18
SECONDS = 2.0  # for each rate


def measure_recall(data: Path, encoder: str) -> dict[str, dict[int, float]]:
    """Return recall by kind of search and k; build the index first, or go on building it."""
    corpus, folder = data / "corpora/hotpotqa.jsonl", KEPT / f"hotpotqa-{Path(encoder).name}"
    questions, gold = read_gold(data / "qa/hotpotqa_ctx.jsonl")
    if not has_index(folder):
        print(f"encoding {corpus}", flush=True)
        start = time.perf_counter()
        build_index(corpus, folder, make_encoder({"name": encoder}), batch_size=256, shard_rows=1024, progress=show)
        print(f"encoded in {time.perf_counter() - start:.0f} s")
    recall = {}
    for kind in ("dense", "bm25", "hybrid"):
        retriever = open_retriever(corpus, folder, kind=kind)
        found = search_ids(retriever, questions, 10)
        recall[kind] = {k: round(recall_at(found, gold, k), 3) for k in (1, 3, 5, 10)}
        print(f"{kind}: " + "  ".join(f"@{k} {share:.3f}" for k, share in recall[kind].items()), flush=True)
    return recall


def show(done: int, total: int) -> None:
    print(f"{done} of {total} passages", flush=True)


def clustered(n: int, seed: int) -> Iterator[np.ndarray]:
    """Yield unit vectors [<= 10,000, DIM] float32, `n` in all, at a cosine of about .7 to n / PER_CLUSTER centres."""
    centres = np.random.default_rng(0).standard_normal((max(1, n // PER_CLUSTER), DIM), dtype=np.float32)
    random = np.random.default_rng(seed)
    for start in range(0, n, 10_000):
        rows = min(10_000, n - start)
        vectors = centres[random.integers(len(centres), size=rows)]
        vectors += random.standard_normal((rows, DIM), dtype=np.float32)
        yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_queries(n: int) -> np.ndarray:
    """Return [QUERIES, DIM] vectors at a cosine of about .9 to vectors of the index."""
    near = next(clustered(n, 1))[:QUERIES]
    noise = np.random.default_rng(2).standard_normal(near.shape, dtype=np.float32) / DIM**0.5
    queries = near + 0.48 * noise
    return queries / np.linalg.norm(queries, axis=1, keepdims=True)


def build(spec: IndexSpec, n: int, path: Path) -> float:
    """Write an index of `n` vectors; return the seconds, without those that making the vectors took."""
    vectors = spec.make(DIM)
    blocks = list(clustered(n, 1))
    start = time.perf_counter()
    if not vectors.is_trained:
        sample = np.concatenate(blocks)[:: max(1, n // max(100_000, 64 * spec.lists))]
        vectors.train(np.ascontiguousarray(sample))
    for block in blocks:
        vectors.add(block)
    faiss.write_index(vectors, str(path))
    return time.perf_counter() - start


def rate(search: Callable[[np.ndarray, int], Any], queries: np.ndarray, batch: int) -> float:
    """Return queries/s, searching in batches for `SECONDS` after one search that reads the index in."""
    search(queries[:batch], K)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        first = done % (len(queries) - batch + 1)
        search(queries[first : first + batch], K)
        done += batch
    return done / (time.perf_counter() - start)


def memory() -> dict[str, int]:
    """Return the resident MiB of this process: its own and of mapped files, which the kernel can drop (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: int(line.split()[1]) >> 10 for line in lines for key in ("RssAnon", "RssFile") if line.startswith(key)}


def measure_file(path: Path, queries: np.ndarray, threads: int) -> dict[str, Any]:
    """Open an index in this process, a fresh one, and search it."""
    faiss.omp_set_num_threads(threads)
    faiss.cvar.distance_compute_blas_threshold = 3 * DIM  # as the service sets it
    before = memory()
    start = time.perf_counter()
    vectors = read_vectors(path)
    open_s = time.perf_counter() - start
    qps = {batch: round(rate(vectors.search, queries, batch), 1) for batch in BATCHES}
    rows = vectors.search(queries, K)[1]
    after = memory()
    own, mapped = (after[key] - before[key] for key in ("RssAnon", "RssFile"))
    return {"open_s": open_s, "qps": qps, "rows": rows, "own_mib": own, "mapped_mib": mapped}


def measure_indexes(n: int, threads: int, kinds: list[str]) -> dict[str, Any]:
    """Build, open and search each kind; every file is searched in a process of its own."""
    qps, recall, size, exact = {}, {}, {}, None
    queries = make_queries(n)
    faiss.omp_set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / VECTORS_FILE
        for kind in kinds:
            spec = IndexSpec(kind).for_passages(n)
            build_s = build(spec, n, path)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                result = pool.submit(measure_file, path, queries, threads).result()
            exact = result["rows"] if exact is None else exact  # the first kind is flat
            qps[kind] = result["qps"]
            recall[kind] = float(np.mean([len(set(a) & set(b)) / K for a, b in zip(result["rows"], exact)]))
            size[kind] = path.stat().st_size / n
            print(
                f"{spec.label()}: built in {build_s:.0f} s, opened in {result['open_s']:.3f} s, queries/s "
                + ", ".join(f"{value:,.0f} (batch {batch})" for batch, value in result["qps"].items())
                + f", recall@3 {recall[kind]:.3f}, {size[kind]:,.0f} bytes a vector; resident after it: own "
                f"{result['own_mib']} MiB, mapped file {result['mapped_mib']} MiB",
                flush=True,
            )
            scale = WIKIPEDIA / n
            slower = scale if kind in ("flat", "fp16", "sq8") else None
            print(
                f"  computed for {WIKIPEDIA:,}: {size[kind] * WIKIPEDIA / 1e9:,.0f} GB"
                + (f", {result['qps'][256] / slower:,.1f} queries/s in batches of 256" if slower else ""),
                flush=True,
            )
            if kind == "flat":
                open_s = measure_open(Path(name), n)
    return {
        "open_s": round(open_s, 3),
        "qps": qps,
        "recall_at_3": {kind: round(value, 4) for kind, value in recall.items()},
        "bytes_per_vector": {kind: round(value) for kind, value in size.items()},
    }


def measure_open(folder: Path, n: int) -> float:
    """Return the seconds in which a fresh process opens a corpus of `n` passages with its index and answers a query.

    The index in the folder gets what belongs to it; imports are not counted.
    """
    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as file:
        for row in range(n):
            file.write(json.dumps({"id": str(row), "contents": f'"Title {row}"\n' + f"word{row} text " * 50}) + "\n")
    encoder = HashedEncoder(dim=DIM)
    encoder.fit(f"Title {row}" for row in range(1000))
    np.savez(folder / ENCODER_FILE, **encoder.state())
    start = time.perf_counter()
    corpus_id = Corpus(corpus, cache_dir=folder).corpus_id
    megabytes = corpus.stat().st_size / 1e6
    print(f"first reading of {megabytes:.0f} MB of passages, once: {time.perf_counter() - start:.1f} s")
    meta = IndexMeta(
        corpus_id, n, DIM, "flat", encoder.settings(), vectors_id=file_fingerprint(folder / VECTORS_FILE)
    )
    (folder / META_FILE).write_text(json.dumps(asdict(meta)))
    code = (
        "import sys, time; from retriever.service import open_retriever; start = time.perf_counter(); "
        "retriever = open_retriever(sys.argv[1], sys.argv[2]); opened = time.perf_counter() - start; "
        "assert len(retriever.search(['Title 7'], 3)[0]) == 3; print(opened, time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code, str(corpus), str(folder)]
    opened, answered = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    print(f"{n} passages with a flat index: opened in {opened:.3f} s, first answer after {answered:.3f} s", flush=True)
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="a million vectors and half an hour of serving")
    parser.add_argument("--only", nargs="+", choices=("recall", "indexes", "server"), default=[])
    parser.add_argument("--data", type=Path, default=os.environ.get("SAPO_TEST_DATA"))
    parser.add_argument("--encoder", default="models/multilingual-e5-small")
    parser.add_argument("--vectors", type=int, help="how many random vectors (200,000; with --full 1,000,000)")
    parser.add_argument("--kinds", nargs="+", default=["flat", "fp16", "sq8", "ivf_flat", "ivf_sq8", "ivf_pq", "hnsw"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    parts = options.only or ["recall", "indexes", "server"]
    result: dict[str, Any] = {}
    if "recall" in parts:
        if options.data is None:
            print("recall is left out: SAPO_TEST_DATA does not name the folder with the real data")
        else:
            result["recall"] = measure_recall(options.data, options.encoder)
    if "indexes" in parts:
        n = options.vectors or (1_000_000 if options.full else 200_000)
        result |= measure_indexes(n, options.threads, ["flat", *(kind for kind in options.kinds if kind != "flat")])
    if "server" in parts:
        from benchmarks.server import measure

        result |= measure(minutes=30 if options.full else 2, clients=64, threads=options.threads)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
