"""The download command against a small hub of our own, whose connections break."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from retriever.download import CORPUS_FILE, CORPUS_REPO, INDEX_FILE, INDEX_REPO, join_parts

ROOT = Path(__file__).parent.parent
COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """What the command uses of a hub: sizes, hashes and files. `breaking`: file -> byte after which it hangs up."""

    def __init__(self):
        random = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(20_000))
        self.files = {
            (CORPUS_REPO, CORPUS_FILE): gzip.compress(b'{"id": "0", "contents": "T\\nx"}\n'),
            (INDEX_REPO, "part_aa"): random[:400_000],
            (INDEX_REPO, "part_ab"): random[400_000:],
        }
        self.breaking = {}
        self.wrong = set()
        self.ranges = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):  # /api/datasets/OWNER/NAME/paths-info/main
        self.rfile.read(int(self.headers["Content-Length"]))
        repo = "/".join(self.parts()[3:5])
        rows = [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lfs": self.lfs(data)}
            for (owner, name), data in self.server.files.items()
            if owner == repo
        ]
        self.reply(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def parts(self):  # a proxy is asked with the whole address
        return unquote(urlsplit(self.path).path).split("/")

    def lfs(self, data):
        return {"oid": hashlib.sha256(data).hexdigest(), "sha256": "", "size": len(data), "pointerSize": 1}

    def do_GET(self):  # /datasets/OWNER/NAME/resolve/main/FILE
        parts = self.parts()
        name = parts[-1]
        data = self.server.files.get(("/".join(parts[2:4]), name))
        if data is None:
            return self.reply(404, b"", {"Content-Length": 0})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if name in self.server.wrong:
            data = data[:-1] + b"?"
        start = 0
        if self.command == "GET" and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            self.server.ranges.append((name, start))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        headers["Content-Length"] = len(data) - start
        until = self.server.breaking.get(name, len(data)) if self.command == "GET" else len(data)
        if start >= until < len(data):
            self.connection.close()
            return
        self.reply(206 if start else 200, data[start:until], headers)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def download(url, out, *arguments, answer=""):
    command = [sys.executable, "-m", "retriever.download", "--wiki18", "--out", str(out), *arguments]
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_HOME": str(out.parent / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=answer, capture_output=True, text=True, timeout=200
    )


def test_files_are_fetched_checked_and_joined(hub, tmp_path):
    declined = download(hub.url, tmp_path / "wiki", answer="n\n")
    assert declined.returncode == 1 and "nothing fetched" in declined.stdout, declined.stderr
    assert f"{INDEX_REPO}/part_aa: 0.0 GB, to fetch" in declined.stdout and not (tmp_path / "wiki").exists()

    done = download(hub.url, tmp_path / "wiki", answer="y\n")
    assert done.returncode == 0, done.stderr
    assert f"retriever.index={tmp_path / 'wiki' / INDEX_FILE} retriever.encoder=intfloat/e5-base-v2" in done.stdout
    whole = hub.files[INDEX_REPO, "part_aa"] + hub.files[INDEX_REPO, "part_ab"]
    assert (tmp_path / "wiki" / INDEX_FILE).read_bytes() == whole
    assert gzip.decompress((tmp_path / "wiki" / CORPUS_FILE).read_bytes()).startswith(b'{"id": "0"')
    assert sorted(p.name for p in (tmp_path / "wiki").iterdir() if p.name[0] != ".") == [INDEX_FILE, CORPUS_FILE]

    again = download(hub.url, tmp_path / "wiki")  # nothing to ask
    assert again.returncode == 0 and "is there already" in again.stdout and "0.0 GB to fetch" in again.stdout


def test_a_broken_download_goes_on_and_a_wrong_file_is_refused(hub, tmp_path):
    hub.breaking["part_ab"] = 100_000
    broken = download(hub.url, tmp_path / "wiki", "--yes", "--only", "index")
    assert broken.returncode == 2 and "the hub does not give the files" in broken.stderr
    hub.breaking.clear()
    hub.ranges.clear()
    done = download(hub.url, tmp_path / "wiki", "--yes", "--only", "index")
    assert done.returncode == 0, done.stderr
    assert hub.ranges == [("part_ab", 100_000)]

    hub.wrong.add(CORPUS_FILE)
    wrong = download(hub.url, tmp_path / "wiki", "--yes", "--only", "corpus")
    assert wrong.returncode == 2 and "but the hub says" in wrong.stderr and "it was removed" in wrong.stderr
    assert not (tmp_path / "wiki" / CORPUS_FILE).exists()


def test_a_file_brought_by_hand_is_checked_and_never_replaced(hub, tmp_path):
    (tmp_path / "wiki").mkdir()
    path = tmp_path / "wiki" / CORPUS_FILE
    path.write_bytes(hub.files[CORPUS_REPO, CORPUS_FILE])
    done = download(hub.url, tmp_path / "wiki", "--yes", "--only", "corpus")
    assert done.returncode == 0 and f"{CORPUS_FILE}: 0.0 GB, complete" in done.stdout, done.stderr
    (tmp_path / "wiki" / f".{CORPUS_FILE}.sha256").unlink()
    path.write_bytes(b"mine")
    refused = download(hub.url, tmp_path / "wiki", "--yes", "--only", "corpus")
    assert refused.returncode == 2 and "is not the file that the hub has; move it away" in refused.stderr
    assert path.read_bytes() == b"mine" and hub.ranges == []


def test_files_come_through_the_proxy_of_the_environment(hub, tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.url)
    done = download("http://hub.invalid", tmp_path / "wiki", "--yes", "--only", "corpus")
    assert done.returncode == 0, done.stderr
    assert hub.ranges == [(CORPUS_FILE, 0)] and (tmp_path / "wiki" / CORPUS_FILE).exists()


def test_without_a_hub_the_steps_by_hand_are_told(tmp_path):
    offline = download("http://127.0.0.1:9", tmp_path / "wiki", "--yes")
    assert offline.returncode == 2
    assert f"cat part_aa part_ab > {INDEX_FILE}" in offline.stderr and "hf download --repo-type" in offline.stderr
    assert offline.stderr.startswith("error: the hub does not give the files") and offline.stderr.count("\n") == 1


def test_parts_are_joined_or_kept(tmp_path):
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(b"one")
    with pytest.raises(FileNotFoundError):
        join_parts(parts, tmp_path / "whole")
    assert parts[0].exists() and not (tmp_path / "whole").exists()
    parts[1].write_bytes(b"two")
    join_parts(parts, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"onetwo" and not parts[0].exists()
