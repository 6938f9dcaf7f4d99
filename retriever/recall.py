"""Measure what an index finds: `python -m retriever.recall --corpus C --index I [--questions Q] [--exact FLAT_INDEX]`.

With --questions, the share of each question's gold passages among the first k (JSONL of `question` and
`supporting_ids`, ids of the corpus), averaged over the questions. With --exact, the share of the passages that an exact
index finds first which the index finds first too; the queries are the questions, or titles of passages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from retriever.build import add_encoder_arguments, encoder_settings
from retriever.corpus import Corpus
from retriever.service import open_retriever
from retriever.types import Retriever, RetrieverError


def recall_at(found: Sequence[Sequence[str]], wanted: Sequence[Collection[str]], k: int) -> float:
    """Return the mean over the queries of the share of `wanted` ids among the first `k` found.

    >>> recall_at([["a", "b", "c"], ["d"]], [{"a", "c"}, {"d"}], k=2)
    0.75
    """
    shares = [len(set(ids[:k]) & set(gold)) / len(set(gold)) for ids, gold in zip(found, wanted, strict=True)]
    return sum(shares) / len(shares)


def search_ids(retriever: Retriever, queries: Sequence[str], k: int, batch: int = 256) -> list[list[str]]:
    """Return the ids found for each query, best first."""
    batches = [retriever.search(list(queries[start : start + batch]), k) for start in range(0, len(queries), batch)]
    return [[passage.id for passage in passages] for found in batches for passages in found]


def read_gold(path: Path) -> tuple[list[str], list[set[str]]]:
    """Return the questions of a JSONL file and their gold ids. Raises ValueError naming the line that is wrong.

    Other keys of a row are ignored.
    """
    questions, gold = [], []
    for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {line}: not valid JSON ({error}); write one JSON object a line") from error
        row = row if isinstance(row, dict) else {}
        question, ids = row.get("question"), row.get("supporting_ids")
        if not (isinstance(question, str) and isinstance(ids, list) and ids and all(isinstance(x, str) for x in ids)):
            raise ValueError(
                f'{path}, line {line}: a row needs a string "question" and "supporting_ids", a list of one or more ids '
                'of the corpus, all strings: {"question": "...", "supporting_ids": ["12", "34"]}'
            )
        questions.append(question)
        gold.append(set(ids))
    if not questions:
        raise ValueError(f"{path}: no questions")
    return questions, gold


def refuse_unknown_ids(path: Path, gold: Iterable[Collection[str]], corpus: Corpus) -> None:
    """Raise ValueError when a gold id is none of the corpus: it could not be found. Reads rows until all have come."""
    missing = set().union(*gold)
    for row in range(len(corpus)):
        if not missing:
            return
        missing.discard(corpus[row].id)
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the supporting_ids are no ids of {corpus.path}, among them "
            f"{', '.join(sorted(missing)[:3])}; give the corpus that the questions were written for"
        )


def sample_titles(corpus: Corpus, n: int) -> list[str]:
    """Return up to `n` titles (or the beginning of the text) of passages that lie evenly spread in the corpus."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, n).astype(np.int64)).tolist()
    documents = [corpus[row] for row in rows]
    return [document.title.strip('"') or document.text[:100] for document in documents]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 2 after an error of the user's."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--index", type=Path, required=True, help="index folder, or a bare FAISS file")
    parser.add_argument("--kind", choices=("dense", "bm25", "hybrid"), default="dense")
    parser.add_argument("--questions", type=Path, help="JSONL of question and supporting_ids")
    parser.add_argument("--exact", type=Path, help="a flat index over the same corpus to compare with")
    parser.add_argument("--queries", type=int, default=1000, help="titles to ask for without --questions (1000)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument(
        "--effort", type=int, nargs="+", default=[None], help="one or several: lists of ivf, candidates of hnsw"
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1)
    add_encoder_arguments(parser)
    args = parser.parse_args(argv)
    if args.questions is None and args.exact is None:
        parser.error("nothing to compare with: give --questions, --exact or both")
    if min(*args.k, args.queries, args.threads, *(effort or 1 for effort in args.effort)) < 1:
        parser.error("--k, --queries, --threads and --effort must be at least 1")
    try:
        encoder = None if args.encoder == "hashed" else encoder_settings(args)
        corpus = Corpus(args.corpus, cache_dir=args.index if args.index.is_dir() else None)
        if args.questions is None:
            queries, gold = sample_titles(corpus, args.queries), None
        else:
            queries, gold = read_gold(args.questions)
            refuse_unknown_ids(args.questions, gold, corpus)
        exact = None
        if args.exact is not None:
            flat = open_retriever(args.corpus, args.exact, encoder=encoder, threads=args.threads)
            if (info := flat.info()).index_type not in ("flat", "IndexFlatIP", "IndexFlat"):
                raise RetrieverError(f"{args.exact}: --exact needs a flat index, this one is {info.index_type}")
            exact = search_ids(flat, queries, max(args.k))
        for effort in args.effort:
            retriever = open_retriever(
                args.corpus, args.index, encoder=encoder, kind=args.kind, effort=effort, threads=args.threads
            )
            start = time.perf_counter()
            found = search_ids(retriever, queries, max(args.k))
            rate = len(queries) / (time.perf_counter() - start)
            print(f"{retriever.info().index_type}: {len(queries)} queries, {rate:,.0f}/s")
            if gold is not None:
                print("  gold passages   " + "  ".join(f"@{k} {recall_at(found, gold, k):.3f}" for k in args.k))
            if exact is not None:
                shares = [recall_at(found, [set(ids[:k]) or {""} for ids in exact], k) for k in args.k]
                print("  exact neighbours  " + "  ".join(f"@{k} {share:.3f}" for k, share in zip(args.k, shares)))
    except (RetrieverError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
