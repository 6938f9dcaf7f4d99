"""Fetch Search-R1's Wikipedia passages and their E5 index: `python -m retriever.download --wiki18 --out data/wiki-18`.

It says what it will fetch and asks before it does. A stopped download goes on when the command is repeated; every file
is checked against the sha256 that the hub has of it. The hub is that of `huggingface_hub` (HF_ENDPOINT), proxies are
those of the environment (HTTPS_PROXY, NO_PROXY).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote
from urllib.request import getproxies, proxy_bypass

import urllib3

from retriever.types import RetrieverError

CORPUS_REPO, CORPUS_FILE = "PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"
INDEX_REPO, INDEX_PARTS, INDEX_FILE = "PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab"), "e5_Flat.index"
ENCODER = "intfloat/e5-base-v2"
TRIES, PAUSE_S, TIMEOUT_S = 4, 0.5, 60.0  # tries in a row in which nothing arrives
REPORT_EVERY_S = 10.0
_BLOCK = 1 << 24


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set on the hub. sha256: "" when the hub does not tell."""

    repo: str
    name: str
    size_bytes: int
    sha256: str


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 2 after an error of the user's, 1 when the user declines."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.download", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wiki18", action="store_true", required=True, help="Wikipedia of 2018, 21,015,324 passages")
    parser.add_argument("--out", type=Path, default=Path("data/wiki-18"), help="folder for the files (data/wiki-18)")
    parser.add_argument("--only", choices=("corpus", "index"), help="fetch one of the two")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    corpus, index = args.only != "index", args.only != "corpus"
    try:
        if index and (args.out / INDEX_FILE).exists():
            print(f"{args.out / INDEX_FILE} is there already")
            index = False
        wanted = [(CORPUS_REPO, CORPUS_FILE)] if corpus else []
        wanted += [(INDEX_REPO, part) for part in INDEX_PARTS] if index else []
        files = remote_files(wanted)
        missing = [file for file in files if not _is_complete(args.out, file)]
        needed = sum(file.size_bytes for file in missing)
        for file in files:
            state = "to fetch" if file in missing else "complete"
            print(f"{file.repo}/{file.name}: {file.size_bytes / 1e9:,.1f} GB, {state}")
        joined = sum(file.size_bytes for file in files if file.repo == INDEX_REPO)
        room = shutil.disk_usage(_existing(args.out)).free
        print(
            f"{needed / 1e9:,.1f} GB to fetch, {(needed + joined) / 1e9:,.1f} GB of disk needed, "
            f"{room / 1e9:,.1f} GB free"
        )
        if needed + joined > room:
            raise RetrieverError(f"{args.out}: not enough room; free some or give another --out")
        if needed and not args.yes and input("Fetch them? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing fetched")
            return 1
        args.out.mkdir(parents=True, exist_ok=True)
        for file in missing:
            fetch(file, args.out)
        if index:
            join_parts([args.out / part for part in INDEX_PARTS], args.out / INDEX_FILE)
    except (RetrieverError, OSError, EOFError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"Set retriever.corpus={args.out / CORPUS_FILE} retriever.index={args.out / INDEX_FILE} "
        f"retriever.encoder={ENCODER}. The first start unpacks and reads the corpus, once. A smaller index is made by: "
        f"python -m retriever.build --corpus {args.out / CORPUS_FILE} --vectors {args.out / INDEX_FILE} "
        f"--encoder {ENCODER} --index fp16 --out {args.out / 'e5-fp16'}"
    )
    return 0


def remote_files(wanted: list[tuple[str, str]]) -> list[RemoteFile]:
    """Return size and sha256 of files (repo, name) as the hub has them. Raises RetrieverError when it cannot tell."""
    from huggingface_hub import HfApi, RepoFile

    found = []
    for repo, name in wanted:
        try:
            listed = HfApi().get_paths_info(repo, [name], repo_type="dataset")
        except Exception as error:  # the library raises its HTTP client's errors, too many to name
            raise _offline(error) from error
        entry = next((entry for entry in listed if entry.path == name), None)
        if not isinstance(entry, RepoFile):
            raise RetrieverError(f"the hub's data set {repo} has no file {name} any more")
        found.append(RemoteFile(repo, name, entry.size, entry.lfs.sha256 if entry.lfs else ""))
    return found


def fetch(file: RemoteFile, folder: Path) -> Path:
    """Fetch a file and check it, going on after the bytes that an earlier try has left.

    (`hf_hub_download` begins again in every process, and takes no file of over 50 GB without its own protocol.)
    Raises RetrieverError when nothing arrives any more, or what has arrived is wrong; that is removed then.
    """
    path, part = folder / file.name, folder / f".{file.name}.part"
    part.touch()
    failures = 0
    while (size := part.stat().st_size) < file.size_bytes:
        failure: Exception = OSError(f"nothing arrives of {file.name}")
        try:
            _append(file, part)
        except Exception as error:  # see remote_files
            failure = error
        if part.stat().st_size > size:
            failures = 0
            continue
        failures += 1
        if failures == TRIES:
            raise _offline(failure) from failure
        time.sleep(PAUSE_S * 2**failures)
    size, digest = part.stat().st_size, sha256_of(part) if file.sha256 else ""
    if (size, digest) != (file.size_bytes, file.sha256):
        part.unlink()
        raise RetrieverError(
            f"{path}: {size} bytes, sha256 {digest[:12]}, but the hub says {file.size_bytes} and {file.sha256[:12]}; "
            "it was removed, repeat the command to fetch it again"
        )
    part.replace(path)
    _mark(folder, file).write_text(f"{digest}\n")
    return path


def _append(file: RemoteFile, part: Path) -> None:
    """Append to `part` what it lacks. Raises what the hub's library or urllib3 raises, OSError for another status."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    have = part.stat().st_size
    location = get_hf_file_metadata(hf_hub_url(file.repo, file.name, repo_type="dataset")).location
    response = _connections(location).request(
        "GET", location, headers={"Range": f"bytes={have}-"}, preload_content=False, timeout=TIMEOUT_S, retries=False
    )
    with closing(response), part.open("ab") as out:
        if response.status != 206 and (have or response.status != 200):
            raise OSError(f"HTTP {response.status} for {file.name} from byte {have}")
        last = time.monotonic()
        while chunk := response.read1(1 << 20):  # what has arrived: nothing is lost when the connection breaks
            out.write(chunk)
            have += len(chunk)
            if time.monotonic() - last > REPORT_EVERY_S:
                last = time.monotonic()
                print(f"{file.name}: {have / 1e9:,.2f} of {file.size_bytes / 1e9:,.2f} GB", flush=True)


def _connections(url: str) -> urllib3.PoolManager:
    """Return what fetches this address: through the proxy of the environment, where it names one."""
    address, proxies = urllib3.util.parse_url(url), getproxies()
    proxy = proxies.get(address.scheme or "") or proxies.get("all")
    if not proxy or proxy_bypass(address.host or ""):
        return urllib3.PoolManager()
    login = urllib3.util.parse_url(proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=unquote(login)) if login else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers)


def join_parts(parts: list[Path], whole: Path) -> None:
    """Write the parts one after the other into one file, which appears whole or not at all, and remove them."""
    temporary = whole.with_name(f".{whole.name}.joining")
    with temporary.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, _BLOCK)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(whole)
    for part in parts:
        part.unlink()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def manual_steps() -> str:
    """Return what to do on a machine that does not reach the hub."""
    return (
        "on a machine that does: `hf download --repo-type dataset "
        f"{CORPUS_REPO} {CORPUS_FILE} --local-dir .` and `hf download --repo-type dataset {INDEX_REPO} "
        f"{' '.join(INDEX_PARTS)} --local-dir .`, then `cat {' '.join(INDEX_PARTS)} > {INDEX_FILE}`; copy "
        f"{CORPUS_FILE}, {INDEX_FILE} and the model {ENCODER} here and name them in retriever.corpus, retriever.index "
        "and retriever.encoder"
    )


def _offline(error: Exception) -> RetrieverError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RetrieverError(f"the hub does not give the files ({type(error).__name__}: {reason}); {manual_steps()}")


def _mark(folder: Path, file: RemoteFile) -> Path:
    """Return the file that says that a download was checked, and with what result."""
    return folder / f".{file.name}.sha256"


def _is_complete(folder: Path, file: RemoteFile) -> bool:
    """Whether the file is there and checked. Raises RetrieverError for another one that was not fetched by this."""
    path, mark = folder / file.name, _mark(folder, file)
    if not path.exists():
        return False
    if not mark.is_file():  # brought by hand
        if path.stat().st_size != file.size_bytes or (file.sha256 and sha256_of(path) != file.sha256):
            raise RetrieverError(f"{path} is not the file that the hub has; move it away or give another --out")
        mark.write_text(f"{file.sha256}\n")
    return mark.read_text().strip() == file.sha256 and path.stat().st_size == file.size_bytes


def _existing(path: Path) -> Path:
    """Return the path or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


if __name__ == "__main__":
    sys.exit(main())
