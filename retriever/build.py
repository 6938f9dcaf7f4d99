"""Build an index folder: `python -m retriever.build --corpus wiki.jsonl --out index/`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from retriever.encoder import HashedEncoder, make_encoder
from retriever.index import Progress, build_index
from retriever.types import RetrieverError


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 2 after an error of the user's."""
    parser = argparse.ArgumentParser(prog="python -m retriever.build", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help='JSONL of {"id", "contents": "\\"Title\\"\\ntext"}')
    parser.add_argument("--out", type=Path, required=True, help="index folder to make")
    parser.add_argument("--encoder", default="hashed", help="encoder name (default: hashed, which needs no weights)")
    parser.add_argument("--dim", type=int, help=f"vector size of the hashed encoder (default: {HashedEncoder().dim})")
    parser.add_argument("--overwrite", action="store_true", help="replace the index that is in --out")
    args = parser.parse_args(argv)

    settings = {"name": args.encoder} | ({} if args.dim is None else {"dim": args.dim})
    start = time.monotonic()
    print(f"reading {args.corpus}", file=sys.stderr)
    try:
        meta = build_index(
            args.corpus,
            args.out,
            make_encoder(settings),
            overwrite=args.overwrite,
            progress=progress_printer(),
        )
    except (RetrieverError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    info = meta.info()
    print(
        f"{args.out}: {info.passages} passages, {info.index_type}, {info.encoder}, "
        f"corpus sha256 {info.corpus_id[:12]}, {time.monotonic() - start:.1f} s"
    )
    return 0


def progress_printer(every_s: float = 5.0) -> Progress:
    """Return a callback that writes a line to stderr at most once in `every_s` seconds."""
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every_s:
            return
        last = now
        rate = done / (now - start)
        left_s = (total - done) / rate
        print(f"{done:,} of {total:,} passages, {rate:,.0f}/s, {left_s:,.0f} s left", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main())
