"""Asks retrieval servers that speak Search-R1's protocol over HTTP.

Request: POST {url}/retrieve with {"queries": ["..."], "topk": 3, "return_scores": true}.
Answer: {"result": [[{"document": {"id": "0", "contents": "\\"Title\\"\\ntext"}, "score": 0.8}, ...], ...]}, one list
for each query, best first. Search-R1's BM25 server sends documents of `title`, `text` and `contents`, without `id`.
The server of this project (`retriever/server.py`) also says what it serves and how much it takes, at GET {url}/info.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader, LocationParseError, NewConnectionError
from urllib3.exceptions import TimeoutError as RequestTimeout

from retriever.corpus import split_contents
from retriever.types import IndexInfo, Passage, RetrieverError

ATTEMPTS_AT_START = 5
FIRST_PAUSE_S = 0.5
ASIDE_S = 30.0  # a replica that failed is asked after the others for so long
MAX_ANSWER_BYTES = 1 << 28
STOP_S = 40.0  # the server itself gives requests in flight 30 s
CACHED_QUERIES = 1 << 14

_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_NO_INFO_STATUS = {404, 405, 501}
_EXCERPT_CHARS = 200
_CONNECTIONS = 8
_INDEX_HEADER = "X-Index-Id"
_SHAPE = r'{"result": [[{"document": {"id": "0", "contents": "\"Title\"\ntext"}, "score": 0.8}]]}'
# With fewer than k passages FAISS fills up with row -1 and this score; Search-R1 then sends its last document.
_FILLER_SCORE = float(np.finfo(np.float32).min)
_UNKNOWN = "unknown"
_jitter = random.SystemRandom()  # spreads the retries of many ranks, and leaves the seeded generators alone

Found = tuple[Passage, ...]


class _TransientError(RetrieverError):
    """A failure that may pass. retry_after_s: seconds the server asked to wait, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass
class _Replica:
    """One server. failed_at: time of its last failure, on the monotonic clock."""

    base_url: str
    pool: urllib3.HTTPConnectionPool
    failed_at: float = -math.inf


class RetrieverClient:
    """Search over HTTP; satisfies `Retriever`. Connections are kept open; threads may share it.

    url: base URL of the server, with or without /retrieve, or those of several replicas: they take turns, and another
    one answers in place of one that fails. Proxy settings of the environment are not used.
    timeout_s: seconds for one `search`, all its requests and retries included. A refused or broken connection and the
    statuses 408, 429, 500, 502, 503 and 504 are retried with back-off until then, not before the time of a Retry-After:
    a server may be restarted meanwhile. An answer that begins late and then stalls can take up to twice timeout_s.
    max_query_chars: characters of a query that are sent; the rest is dropped. max_answer_bytes: a longer answer is
    refused. token: sent as a bearer token. cached_queries: answers that are remembered, the least recently used go
    first; 0 remembers none.
    Raises RetrieverError for a URL that is not http or https; ValueError for a limit that is out of range or a token
    that no header can hold.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        max_query_chars: int = 1000,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        token: str | None = None,
        cached_queries: int = CACHED_QUERIES,
    ) -> None:
        if not timeout_s > 0 or max_query_chars < 1 or max_answer_bytes < 1 or cached_queries < 0:
            raise ValueError(
                "timeout_s, max_query_chars and max_answer_bytes must be positive and cached_queries not negative, "
                f"got {timeout_s}, {max_query_chars}, {max_answer_bytes} and {cached_queries}"
            )
        base_urls = [_base_url(one) for one in ([url] if isinstance(url, str) else url)]
        if not base_urls:
            raise RetrieverError("retriever.url names no server; write it as http://127.0.0.1:8000")
        if token:
            check_token(token, "the environment variable of retriever.token_env")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._replicas = [
            _Replica(base_url, urllib3.connection_from_url(base_url, maxsize=_CONNECTIONS, headers=headers))
            for base_url in base_urls
        ]
        self._turn = itertools.count(_jitter.randrange(len(self._replicas)))  # spreads the ranks over the replicas
        self._timeout_s = timeout_s
        self._max_query_chars = max_query_chars
        self._max_answer_bytes = max_answer_bytes
        self._max_queries = self._max_passages = sys.maxsize  # in one request
        self._index_id: str | None = None
        self._cached_queries = cached_queries
        self._cache: OrderedDict[tuple[str, int], Found] = OrderedDict()
        self._lock = Lock()  # of the cache
        self._info = IndexInfo(_UNKNOWN, passages=0, encoder=f"server {base_urls[0]}", dim=0, index_type="remote")

    def connect(
        self, *, top_k: int = 1, encoder: str | Mapping[str, Any] | None = None, corpus_id: str = ""
    ) -> None:
        """Ask every replica for a result, and check what it serves where it can tell.

        top_k: passages that will be asked for. encoder: name that the index's encoder must have, whatever folder it
        is in, or settings with `name`, all of which must be its; not checked when the server cannot tell, like
        Search-R1's. corpus_id: beginning of the sha256 that its corpus must have; a server that cannot tell is refused
        unless it is empty.
        Raises RetrieverError when a replica cannot be reached, serves anything else, or not the same as the others.
        """
        limits: list[dict[str, int]] = []
        for replica in self._replicas:
            served = self._served(replica)
            if served is None:
                if corpus_id:
                    raise RetrieverError(
                        f"{replica.base_url}: this server has no /info, so retriever.corpus_id cannot be checked: "
                        "start python -m retriever.server, or leave it empty"
                    )
            else:
                info, limit = served
                _check_served(replica.base_url, info, limit, top_k, encoder, corpus_id, self._max_query_chars)
                self._info = info
                limits.append(limit)
            body = json.dumps({"queries": ["is anybody there?"], "topk": 1, "return_scores": True}).encode()
            answer = self._ask([replica], "POST", "/retrieve", body, self._deadline(), ATTEMPTS_AT_START)
            self._results(*answer, 1, 1)
        self._max_queries = min((limit["max_queries"] for limit in limits), default=sys.maxsize)
        self._max_passages = min((limit["max_passages"] for limit in limits), default=sys.maxsize)

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages, best first, each different query sent once, in one request.

        More queries than the server takes at once, by what it said to `connect`, go in several. A blank query is not
        sent and finds nothing; half of a surrogate pair, which is no text, is sent as "?".
        Raises RetrieverError naming the URL when no server can be reached, answers in time, or answers anything but
        the documented JSON, or when another index has taken the place of the one that was searched before; ValueError
        unless k >= 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        cut = [query[: self._max_query_chars].encode(errors="replace").decode() for query in queries]
        found = self._remembered(dict.fromkeys(cut), k)
        found |= {query: () for query in cut if not query.strip()}
        asked = [query for query in dict.fromkeys(cut) if query not in found]
        most, deadline = max(1, min(self._max_queries, self._max_passages // k)), self._deadline()
        for start in range(0, len(asked), most):
            part = asked[start : start + most]
            body = json.dumps({"queries": part, "topk": k, "return_scores": True}).encode()
            answer = self._ask(self._in_turn(), "POST", "/retrieve", body, deadline)
            results = dict(zip(part, self._results(*answer, len(part), k)))
            self._remember(results, k)
            found |= results
        return [list(found[query]) for query in cut]

    def info(self) -> IndexInfo:
        """Return what the server said to `connect` of its index; Search-R1's protocol tells only where it is."""
        return self._info

    def close(self) -> None:
        """Close the connections that are open; a later search opens new ones."""
        for replica in self._replicas:
            replica.pool.close()

    def _deadline(self) -> float:
        """Return when a search that begins now must have ended, on the monotonic clock."""
        return time.monotonic() + self._timeout_s

    def _remembered(self, queries: dict[str, None], k: int) -> dict[str, Found]:
        with self._lock:
            known = [query for query in queries if (query, k) in self._cache]
            for query in known:
                self._cache.move_to_end((query, k))
            return {query: self._cache[query, k] for query in known}

    def _remember(self, results: dict[str, Found], k: int) -> None:
        with self._lock:
            self._cache.update({(query, k): found for query, found in results.items()})
            while len(self._cache) > self._cached_queries:
                self._cache.popitem(last=False)

    def _in_turn(self) -> list[_Replica]:
        """Return the replicas in the order to ask them: each begins in turn, those that failed lately come last."""
        first = next(self._turn) % len(self._replicas)
        replicas = self._replicas[first:] + self._replicas[:first]
        now = time.monotonic()
        return sorted(replicas, key=lambda replica: now - replica.failed_at < ASIDE_S)

    def _served(self, replica: _Replica) -> tuple[IndexInfo, dict[str, int]] | None:
        """Return what /info says of the index and of the limits of a request; None when the server has no /info."""
        url, response, content = self._ask(
            [replica], "GET", "/info", None, self._deadline(), ATTEMPTS_AT_START, _NO_INFO_STATUS
        )
        if response.status in _NO_INFO_STATUS:
            return None
        answer = _json(url, response, content)
        try:
            index, limits = _field("the answer", answer, "index", dict), _field("the answer", answer, "limits", dict)
            for name in ("max_queries", "max_passages", "max_topk", "max_query_chars"):
                _field("limits", limits, name, int)
            for name, kind in (
                ("corpus_id", str), ("encoder", str), ("passages", int), ("encoder_settings", (dict, type(None))),
            ):  # fmt: skip
                _field("index", index, name, kind)
            names = {field.name for field in dataclasses.fields(IndexInfo)}
            return IndexInfo(**{name: index[name] for name in names & index.keys()}), limits
        except (ValueError, TypeError) as error:
            raise RetrieverError(
                f"{url}: {error}; the server must be of this version of python -m retriever.server, or have no /info"
            ) from error

    def _results(
        self, url: str, response: urllib3.BaseHTTPResponse, content: bytes, queries: int, k: int
    ) -> list[Found]:
        """Return the passages of each query from an answer of /retrieve."""
        answer = _json(url, response, content)
        index_id = response.headers.get(_INDEX_HEADER, _UNKNOWN)
        if self._index_id is None:
            self._index_id = index_id
        elif index_id != self._index_id:
            raise RetrieverError(
                f"{url}: serves another index than before (id {index_id}, it was {self._index_id}), so results would "
                "mix: serve the same index on all servers of retriever.url, also after a restart"
            )
        try:
            return [tuple(passages) for passages in _passages(answer, queries, k)]
        except ValueError as error:
            raise RetrieverError(
                f"{url}: {error}; the server must answer {_SHAPE}, one list for each query: point retriever.url "
                "at a Search-R1 retrieval server"
            ) from error

    def _ask(
        self,
        replicas: Sequence[_Replica],
        method: str,
        path: str,
        body: bytes | None,
        deadline: float,
        attempts: float = math.inf,
        accepted: frozenset[int] | set[int] = frozenset(),
    ) -> tuple[str, urllib3.BaseHTTPResponse, bytes]:
        """Return URL, response and body of the first answer of status 200 or `accepted`.

        The replicas are asked one after the other, with a pause after each round; `attempts` bounds the rounds and
        `deadline` the time. Raises RetrieverError with the last failure.
        """
        for attempt in itertools.count():
            turn, place = divmod(attempt, len(replicas))
            replica = replicas[place]
            left_s = max(deadline - time.monotonic(), 1e-3) / (len(replicas) - place)
            try:
                answer = self._attempt(replica, method, path, body, time.monotonic() + left_s, accepted)
                replica.failed_at = -math.inf
                return answer
            except _TransientError as failure:
                replica.failed_at = time.monotonic()
                if place < len(replicas) - 1:
                    continue
                pause_s = FIRST_PAUSE_S * 2 ** min(turn, 5) * _jitter.uniform(0.5, 1.0)
                pause_s += failure.retry_after_s or 0.0
                if turn + 1 >= attempts or pause_s > deadline - time.monotonic():
                    raise RetrieverError(
                        f"{failure} (attempts: {attempt + 1}, retriever.timeout_s: {self._timeout_s:g})"
                    ) from failure
                time.sleep(pause_s)
        raise AssertionError

    def _attempt(
        self,
        replica: _Replica,
        method: str,
        path: str,
        body: bytes | None,
        deadline: float,
        accepted: frozenset[int] | set[int],
    ) -> tuple[str, urllib3.BaseHTTPResponse, bytes]:
        """Send one request and return URL, response and body. Raises _TransientError or RetrieverError."""
        url = replica.base_url + path
        left_s = max(deadline - time.monotonic(), 1e-3)
        try:
            response = replica.pool.urlopen(
                method,
                urllib3.util.parse_url(url).path,
                body=body,
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(total=left_s),
                preload_content=False,
            )
            with closing(response):
                limit = self._max_answer_bytes + 1 if response.status == 200 else 4 * _EXCERPT_CHARS
                content = _read(response, limit, deadline)
        except NewConnectionError as error:  # urllib3 counts it among its timeouts
            raise _TransientError(
                f"{url}: cannot connect ({error.__cause__ or error}); start the retrieval server, "
                "or set retriever.url to where it runs"
            ) from error
        except (RequestTimeout, TimeoutError) as error:
            raise _TransientError(
                f"{url}: no complete answer in time; raise retriever.timeout_s or see why the server is slow"
            ) from error
        except HTTPError as error:
            raise _TransientError(f"{url}: the connection failed ({error}); see the server's log") from error

        if response.status != 200 and response.status not in accepted:
            raise _status_error(url, response, content)
        if len(content) > self._max_answer_bytes:
            raise RetrieverError(
                f"{url}: the answer is longer than {self._max_answer_bytes} bytes; lower retriever.top_k "
                "or index shorter passages"
            )
        return url, response, content


def _check_served(
    url: str,
    info: IndexInfo,
    limits: dict[str, int],
    top_k: int,
    encoder: str | Mapping[str, Any] | None,
    corpus_id: str,
    max_query_chars: int,
) -> None:
    """Raise RetrieverError naming the setting that the server does not meet."""
    if encoder and not _is_encoder({"name": encoder} if isinstance(encoder, str) else encoder, info.encoder_settings):
        raise RetrieverError(
            f"{url}: its index was built with the encoder {info.encoder!r}, retriever.encoder is {encoder!r}: "
            "start the server with another index, or correct retriever.encoder"
        )
    if not info.corpus_id.startswith(corpus_id):
        raise RetrieverError(
            f"{url}: serves a corpus of sha256 {info.corpus_id}, retriever.corpus_id is {corpus_id}: "
            "start the server with the other corpus, or correct retriever.corpus_id"
        )
    for key, asked, name, flag in (
        ("retriever.top_k", top_k, "max_topk", "--max-topk"),
        ("retriever.max_query_chars", max_query_chars, "max_query_chars", "--max-query-chars"),
    ):
        if asked > limits[name]:
            raise RetrieverError(
                f"{url}: takes at most {limits[name]}, but {key} = {asked}: lower it, or start the server with "
                f"{flag} {asked}"
            )


def _is_encoder(asked: Mapping[str, Any], served: Mapping[str, Any] | None) -> bool:
    """Whether the settings asked for, but for how the encoder is run, are those served; of the name its last part."""
    last = [str(settings["name"]).rstrip("/").split("/")[-1] for settings in (asked, served or {"name": ""})]
    others = {key: value for key, value in asked.items() if key not in ("name", "device", "dtype")}
    return served is not None and last[0] == last[1] and others.items() <= served.items()


def check_token(token: str, place: str) -> None:
    """Raise ValueError, naming the place it is from but not the token, when no HTTP header can hold it."""
    if not token.isprintable() or token != token.strip() or any(ord(character) > 255 for character in token):
        raise ValueError(
            f"{place}: its token cannot be sent in an HTTP header, as it holds a line end or another control "
            "character, a space at an end or a character beyond Latin-1: use another token"
        )


def _json(url: str, response: urllib3.BaseHTTPResponse, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        kind = response.headers.get("Content-Type", "no content type")
        raise RetrieverError(
            f"{url}: HTTP {response.status}, {kind}, but not JSON: {_excerpt(content)}; "
            "point retriever.url at a Search-R1 retrieval server"
        ) from error


def _status_error(url: str, response: urllib3.BaseHTTPResponse, content: bytes) -> RetrieverError:
    kind = response.headers.get("Content-Type", "no content type")
    answer = f"{url}: HTTP {response.status}, {kind}, {_excerpt(content)}"
    if response.status in (401, 403):
        return RetrieverError(f"{answer}; set retriever.token_env to the environment variable with the server's token")
    if response.status in (413, 422):
        return RetrieverError(f"{answer}; the server refuses this request: see its limits")
    if response.status not in _TRANSIENT_STATUS:
        return RetrieverError(f"{answer}; point retriever.url at a Search-R1 retrieval server")
    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
    asked = "" if retry_after_s is None else f", asks to wait {retry_after_s:g} s"
    return _TransientError(f"{answer}{asked}; see the server's log", retry_after_s)


def start_server(corpus: str | Path, index: str | Path, **options: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server for this process on a free port of 127.0.0.1; return it and its URL, once it answers.

    The server ends when its standard input closes or this process has ended, however that ends. It is in a session of
    its own, so a Ctrl-C meant for this process leaves it running.
    options: of the command, as threads=2 for --threads 2; None, False and "" leave one out.
    Raises RetrieverError when it ends before it answers; its own message is on stderr by then.
    """
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-m", "retriever.server"]
    for name, value in {"corpus": corpus, "index": index, "port": 0, "stop_at_eof": True, **options}.items():
        if value is not None and value is not False and value != "":
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().decode().strip()
    if not url:
        raise RetrieverError(
            f"the retrieval server of {index} ended with status {process.wait()}; its error is printed above"
        )
    return process, url


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Stop a server of `start_server`; requests in flight are answered first, for at most STOP_S seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.terminate()  # a child that this process forked may hold the pipe open
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _base_url(url: str) -> str:
    """Return the URL without /retrieve. Raises RetrieverError unless it is a plain http or https URL with a host."""
    try:
        parts = urllib3.util.parse_url(url)
    except LocationParseError:
        parts = urllib3.util.Url()
    if parts.auth is not None:  # not repeated: it may hold a password
        raise RetrieverError("retriever.url holds a user name or password, which a retrieval server does not take")
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise RetrieverError(f"retriever.url = {url!r} is no server address; write it as http://127.0.0.1:8000")
    return parts.url.rstrip("/").removesuffix("/retrieve").rstrip("/")


def _read(response: urllib3.BaseHTTPResponse, limit: int, deadline: float) -> bytes:
    """Return the first `limit` bytes of the body, or all of it. Raises TimeoutError past the deadline."""
    content = bytearray()
    # read1 returns what has arrived: a server that trickles is cut off at the deadline.
    while len(content) < limit and (chunk := response.read1(min(limit - len(content), 1 << 16))):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


def _excerpt(content: bytes) -> str:
    """Return the first characters of a body, quoted: line ends and control characters are escaped."""
    return repr(content[: 4 * _EXCERPT_CHARS].decode("utf-8", errors="replace")[:_EXCERPT_CHARS])


def _retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without one that can be read."""
    if header is None:
        return None
    try:
        return float(urllib3.Retry().parse_retry_after(header))
    except (InvalidHeader, ValueError, OverflowError):
        return None


def _passages(answer: Any, queries: int, k: int) -> list[list[Passage]]:
    """Return the first `k` passages of each result list. Raises ValueError naming the field that is wrong."""
    lists = _field("the answer", answer, "result", list)
    if len(lists) != queries:
        raise ValueError(f'"result" has {len(lists)} lists for {queries} queries')
    results = []
    for i, items in enumerate(lists):
        if not isinstance(items, list):
            raise ValueError(f"result[{i}] is no list but {type(items).__name__}")
        passages = [_passage(f"result[{i}][{j}]", item) for j, item in enumerate(items[:k])]
        results.append([passage for passage in passages if passage.score > _FILLER_SCORE])
    return results


def _passage(place: str, item: Any) -> Passage:
    """Return one result. `contents` is split as in the corpus; without it `title` and `text` are taken as they are."""
    document = _field(place, item, "document", dict)
    score = _field(place, item, "score", (float, int))
    if not abs(score) <= sys.float_info.max:  # also false for NaN
        raise ValueError(f'"score" of {place} is not a finite number')
    place += ".document"
    from_bm25 = "title" in document and "text" in document
    if "contents" in document or not from_bm25:
        title, text = split_contents(_field(place, document, "contents", str))
    else:
        title, text = _field(place, document, "title", str), _field(place, document, "text", str)
    id_ = _field(place, document, "id", (str, int)) if "id" in document or not from_bm25 else ""
    return Passage(str(id_), title, text, float(score))


def _field(place: str, value: Any, key: str, types: type | tuple[type, ...]) -> Any:
    """Return value[key]. Raises ValueError naming place and key when it is missing or of another type."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no JSON object but {type(value).__name__}")
    if key not in value:
        raise ValueError(f'{place} has no "{key}", only {sorted(value)[:10]}')
    if not isinstance(value[key], types) or isinstance(value[key], bool):
        raise ValueError(f'"{key}" of {place} cannot be {type(value[key]).__name__}')
    return value[key]
