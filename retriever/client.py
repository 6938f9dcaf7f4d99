"""Asks a retrieval server that speaks Search-R1's protocol over HTTP.

Request: POST {url}/retrieve with {"queries": ["..."], "topk": 3, "return_scores": true}.
Answer: {"result": [[{"document": {"id": "0", "contents": "\\"Title\\"\\ntext"}, "score": 0.8}, ...], ...]}, one list
for each query, best first. Search-R1's BM25 server sends documents of `title`, `text` and `contents`, without `id`.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from contextlib import closing
from typing import Any

import numpy as np
import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader, LocationParseError, NewConnectionError
from urllib3.exceptions import TimeoutError as RequestTimeout

from retriever.corpus import split_contents
from retriever.types import IndexInfo, Passage, RetrieverError

ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 1 << 28

_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_EXCERPT_CHARS = 200
_CONNECTIONS = 8
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_SHAPE = r'{"result": [[{"document": {"id": "0", "contents": "\"Title\"\ntext"}, "score": 0.8}]]}'
# With fewer than k passages FAISS fills up with row -1 and this score; Search-R1 then sends its last document.
_FILLER_SCORE = float(np.finfo(np.float32).min)
_jitter = random.SystemRandom()  # spreads the retries of many ranks, and leaves the seeded generators alone


class _TransientError(RetrieverError):
    """A failure that may pass. retry_after_s: seconds the server asked to wait, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RetrieverClient:
    """Search over HTTP; satisfies `Retriever`. Connections are kept open; threads may share it.

    url: base URL of the server, with or without /retrieve. Proxy settings of the environment are not used.
    timeout_s: seconds for one `search`, retries included. A refused or broken connection and the statuses 408, 429,
    500, 502, 503 and 504 are retried with back-off, at most 5 attempts; while the server sends Retry-After, as long as
    timeout_s allows. An answer that begins late and then stalls can take up to twice timeout_s.
    max_query_chars: characters of a query that are sent; the rest is dropped. max_answer_bytes: a longer answer is
    refused.
    Raises RetrieverError for a URL that is not http or https; ValueError for a limit that is not positive.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        max_query_chars: int = 1000,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        if not timeout_s > 0 or max_query_chars < 1 or max_answer_bytes < 1:
            raise ValueError(
                "timeout_s, max_query_chars and max_answer_bytes must be positive, "
                f"got {timeout_s}, {max_query_chars} and {max_answer_bytes}"
            )
        self._base_url = _base_url(url)
        self._url = f"{self._base_url}/retrieve"
        self._path = urllib3.util.parse_url(self._url).path
        self._pool = urllib3.connection_from_url(self._url, maxsize=_CONNECTIONS)
        self._timeout_s = timeout_s
        self._max_query_chars = max_query_chars
        self._max_answer_bytes = max_answer_bytes

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages, best first, all queries sent as one request.

        Raises RetrieverError naming the URL when the server cannot be reached, does not answer in time, or answers
        anything but the documented JSON; ValueError unless k >= 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        cut = [query[: self._max_query_chars] for query in queries]
        answer = self._post(json.dumps({"queries": cut, "topk": k, "return_scores": True}).encode())
        try:
            return _passages(answer, len(queries), k)
        except ValueError as error:
            raise RetrieverError(
                f"{self._url}: {error}; the server must answer {_SHAPE}, one list for each query: point retriever.url "
                "at a Search-R1 retrieval server"
            ) from error

    def info(self) -> IndexInfo:
        """Return what is known of the index: only where it is, the protocol does not tell more."""
        return IndexInfo("unknown", passages=0, encoder=f"server {self._base_url}", dim=0, index_type="remote")

    def _post(self, body: bytes) -> Any:
        """Return the JSON value answered to `body`; retry until one attempt succeeds, the last fails or time is up."""
        deadline = time.monotonic() + self._timeout_s
        uninvited = 0  # failures after which the server did not ask to come back
        for attempt in itertools.count(1):
            try:
                return self._attempt(body, deadline)
            except _TransientError as failure:
                uninvited += failure.retry_after_s is None
                pause_s = FIRST_PAUSE_S * 2 ** min(attempt - 1, 5) * _jitter.uniform(0.5, 1.0)
                pause_s += failure.retry_after_s or 0.0
                if uninvited >= ATTEMPTS or pause_s > deadline - time.monotonic():
                    raise RetrieverError(
                        f"{failure} (attempts: {attempt}, retriever.timeout_s: {self._timeout_s:g})"
                    ) from failure
                time.sleep(pause_s)

    def _attempt(self, body: bytes, deadline: float) -> Any:
        """Send one request and return the JSON value of its answer. Raises _TransientError or RetrieverError."""
        left_s = max(deadline - time.monotonic(), 1e-3)
        try:
            response = self._pool.urlopen(
                "POST",
                self._path,
                body=body,
                headers=_HEADERS,
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
                f"{self._url}: cannot connect ({error.__cause__ or error}); start the retrieval server, "
                "or set retriever.url to where it runs"
            ) from error
        except (RequestTimeout, TimeoutError) as error:
            raise _TransientError(
                f"{self._url}: no complete answer in time; raise retriever.timeout_s or see why the server is slow"
            ) from error
        except HTTPError as error:
            raise _TransientError(f"{self._url}: the connection failed ({error}); see the server's log") from error

        kind = response.headers.get("Content-Type", "no content type")
        if response.status != 200:
            raise self._status_error(response, f"HTTP {response.status}, {kind}, {_excerpt(content)}")
        if len(content) > self._max_answer_bytes:
            raise RetrieverError(
                f"{self._url}: the answer is longer than {self._max_answer_bytes} bytes; lower retriever.top_k "
                "or index shorter passages"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RetrieverError(
                f"{self._url}: HTTP 200, {kind}, but not JSON: {_excerpt(content)}; "
                "point retriever.url at a Search-R1 retrieval server"
            ) from error

    def _status_error(self, response: urllib3.BaseHTTPResponse, answer: str) -> RetrieverError:
        if response.status not in _TRANSIENT_STATUS:
            return RetrieverError(f"{self._url}: {answer}; point retriever.url at a Search-R1 retrieval server")
        retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
        asked = "" if retry_after_s is None else f", asks to wait {retry_after_s:g} s"
        return _TransientError(f"{self._url}: {answer}{asked}; see the server's log", retry_after_s)


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
