"""Build an index folder: `python -m retriever.build --corpus wiki.jsonl --out index/ --encoder intfloat/e5-base-v2`.

A command that was stopped goes on where it was when it is repeated. Several processes share the encoding:
`accelerate launch --num_processes 8 -m retriever.build ...`; on CPUs `torchrun --nproc_per_node 2 -m retriever.build`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import faiss

from retriever.corpus import Corpus
from retriever.encoder import Encoder, HashedEncoder, Settings, make_encoder
from retriever.index import (
    KINDS,
    SHARD_ROWS,
    IndexSpec,
    Progress,
    build_index,
    has_index,
    load_index,
    read_meta,
    read_vectors,
)
from retriever.types import RetrieverError


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 2 after an error of the user's."""
    args = _parser().parse_args(argv)
    rank, world_size, barrier = _processes()
    progress = progress_printer() if rank == 0 else None
    start = time.monotonic()
    try:
        if rank == 0:
            print(f"reading {args.corpus}", file=sys.stderr)
        if args.kind != "bm25":
            encoder = make_encoder(encoder_settings(args))
            spec = IndexSpec(args.index, args.lists, args.probes, args.links, args.candidates)
            half_done = args.kind == "hybrid" and not args.overwrite and _only_words_lack(args, encoder, spec)
            barrier()  # before the words are there
            meta = None
            if half_done and rank == 0:
                print(f"{args.out}: the vectors are there already", file=sys.stderr)
            if not half_done:
                meta = build_index(
                    args.corpus,
                    args.out,
                    encoder,
                    spec=spec,
                    source=None if args.vectors is None else _source(args.vectors, encoder),
                    overwrite=args.overwrite,
                    batch_size=args.batch_size,
                    shard_rows=args.shard_rows,
                    rank=rank,
                    world_size=world_size,
                    barrier=barrier,
                    progress=progress,
                )
            if meta is not None:
                info = meta.info()
                print(
                    f"{args.out}: {info.passages} passages, {info.index_type}, {info.encoder}, "
                    f"corpus sha256 {info.corpus_id[:12]}, {time.monotonic() - start:.1f} s"
                )
        if args.kind != "dense" and rank == 0:
            _build_lexical(args.corpus, args.out, args.overwrite)
    except (RetrieverError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add_encoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an encoder; `encoder_settings` reads them."""
    group = parser.add_argument_group("encoder", "for models other than E5, BGE, GTE and Contriever all must be told")
    group.add_argument("--encoder", default="hashed", help="hashed (no weights, the default), a model folder or hub id")
    group.add_argument("--pooling", choices=("mean", "cls", "last"), help="how token vectors become one")
    group.add_argument("--query-prefix", help='put before queries, such as "query: "')
    group.add_argument("--passage-prefix", help='put before passages, such as "passage: "')
    group.add_argument("--normalize", type=_yes_or_no, help="yes or no: vectors of length 1")
    group.add_argument("--max-length", type=int, help="tokens of a text that are read (default: 512 at most)")
    group.add_argument("--dtype", help="of the forward pass (default: float16 on a GPU, float32 on a CPU)")
    group.add_argument("--dim", type=int, help=f"vector size of the hashed encoder (default: {HashedEncoder().dim})")


def encoder_settings(args: argparse.Namespace) -> Settings:
    """Return the settings that were given on the command line."""
    keys = ("pooling", "query_prefix", "passage_prefix", "normalize", "max_length", "dtype", "dim")
    given = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    return {"name": args.encoder} | given


def progress_printer(every_s: float = 5.0) -> Progress:
    """Return a callback that writes a line to stderr at most once in `every_s` seconds.

    The rate counts from the first call: what a stopped build had done before does not speed it up.
    """
    last = time.monotonic()
    first: tuple[float, int] | None = None

    def show(done: int, total: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = first or (now, done)
        if now - last < every_s:
            return
        last = now
        rate = (done - first[1]) / max(now - first[0], 1e-9)
        left = f", {(total - done) / rate:,.0f} s left" if rate else ""
        print(f"{done:,} of {total:,} passages, {rate:,.0f}/s{left}", file=sys.stderr)

    return show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retriever.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help='JSONL of {"id", "contents": "\\"Title\\"\\ntext"}, plain or .gz'
    )
    parser.add_argument("--out", type=Path, required=True, help="index folder to make, or to add a kind to")
    parser.add_argument("--kind", choices=("dense", "bm25", "hybrid"), default="dense", help="what to build (dense)")
    parser.add_argument("--index", choices=KINDS, default="flat", help="how vectors are stored (flat)")
    parser.add_argument("--lists", type=int, default=0, help="of an ivf index (default: about 4 sqrt(passages))")
    parser.add_argument("--probes", type=int, default=0, help="lists that a search looks into (default: a sixteenth)")
    parser.add_argument("--links", type=int, default=32, help="of each passage in an hnsw index (32)")
    parser.add_argument("--candidates", type=int, default=128, help="that an hnsw search keeps (128)")
    parser.add_argument(
        "--vectors", type=Path, help="take the vectors of this index (folder or FAISS file), over the same corpus by "
        "the same encoder, instead of encoding again"
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=1024, help="passages encoded at a time (1024)")
    parser.add_argument(
        "--shard-rows", type=int, default=SHARD_ROWS, help=f"passages that a stopped build loses at most ({SHARD_ROWS})"
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the index that is in --out")
    add_encoder_arguments(parser)
    return parser


def _processes() -> tuple[int, int, Callable[[], None]]:
    """Return rank, number of processes and a barrier, from the launcher's environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, lambda: None
    import torch
    from accelerate import PartialState

    # A rank may wait for a whole shard of another one, and all of them for the corpus to be read.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=2))
    return state.process_index, state.num_processes, state.wait_for_everyone


def _source(path: Path, encoder: Encoder) -> faiss.Index:
    """Return the vectors of an index folder or of a bare FAISS file."""
    if path.is_dir():
        return load_index(path, encoder.settings())[0].vectors
    return read_vectors(path)


def _only_words_lack(args: argparse.Namespace, encoder: Encoder, spec: IndexSpec) -> bool:
    """Whether --out holds the vectors that are asked for, but no lexical index: a hybrid build was stopped there."""
    from retriever.lexical import has_lexical

    if not has_index(args.out) or has_lexical(args.out):
        return False
    meta = read_meta(args.out)
    same = (meta.encoder, meta.index_type) == (encoder.settings(), spec.for_passages(meta.passages).label())
    return same and meta.corpus_id == Corpus(args.corpus, cache_dir=args.out).corpus_id


def _build_lexical(corpus_path: Path, out: Path, overwrite: bool) -> None:
    from retriever.lexical import build_lexical

    start = time.monotonic()
    meta = build_lexical(corpus_path, out, overwrite=overwrite)
    print(f"{out}: BM25, {meta.passages} passages, {meta.words} words, {time.monotonic() - start:.1f} s")


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"yes or no, not {text!r}")
    return text == "yes"


if __name__ == "__main__":
    sys.exit(main())
