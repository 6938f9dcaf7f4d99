"""Serve an index over HTTP: `python -m retriever.server --corpus wiki.jsonl --index index/`.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}, or "query": "..." for a single one
                    {"result": [[{"document": {"id": "0", "contents": "\\"Title\\"\\ntext"}, "score": 0.8}, ...], ...]}
                    and without return_scores {"result": [[{"id": "0", "contents": "..."}, ...], ...]}
    GET /health     {"status": "ok"}, the only path that needs no token
    GET /info       {"index": what is served, "limits": what a request may ask for}
    GET /metrics    Prometheus text

/retrieve takes what Search-R1's takes, but for these errors: a field it does not know (ignored there), a `topk` of 0
(the default there), and more than the limits allow. Its answer differs in these: a blank query finds nothing; a query
finds fewer than `topk` passages where the index has no more (filled up there); a document is its `id` and `contents`
without other fields of the corpus row; characters beyond ASCII are escaped. An error is {"detail": "..."} with status
400 (not JSON; 422 there), 401, 413 (body too large), 422 (a field is wrong), 500 or 503 (too much is waiting;
Retry-After says when to come again).

Requests that wait at the same time are encoded and searched as one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from retriever.client import check_token
from retriever.service import open_retriever
from retriever.types import Passage, Retriever, RetrieverError

INDEX_HEADER = "X-Index-Id"  # sent with each result: a client sees that another index has taken the place of its own
RETRY_AFTER_S = 1
STOP_S = 30  # for requests in flight when the server is asked to stop
_MAX_WAITS = 10
_KEEP_ALIVE_S = 75  # longer than most pauses between two turns of a rollout
_FIELDS = ("queries", "query", "topk", "return_scores")
_INLINE_PASSAGES = 256  # more are rendered in a thread: other requests go on
_BACKLOG = 2048  # connections that wait to be taken, as uvicorn has it
_POLL_S = 1.0
_WHOLE, _FLAG = TypeAdapter(int), TypeAdapter(bool)  # as Search-R1 reads them: "2" and 2.0 are numbers, 1 is true
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # in ASCII, which can spell any string

_log = logging.getLogger(__name__)

_REQUESTS = Counter("retriever_requests", "Requests to /retrieve, by status.", ["status"], registry=None)
_QUERIES = Counter("retriever_queries", "Queries answered.", registry=None)
_BATCHES = Counter("retriever_batches", "Searches of the index; queries / batches is the mean batch.", registry=None)
_SECONDS = Histogram("retriever_request_seconds", "Time from a request's arrival to its answer.", registry=None)
_METRICS = (_REQUESTS, _QUERIES, _BATCHES, _SECONDS)


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, and how requests wait.

    topk: passages a query when the request does not say. max_passages: queries * topk of one request, and of those
    searched at once. max_batch: queries searched at once; a request is never split, so 1 answers one request at a time.
    batch_wait_s: a search begins when no request has come for so many seconds, or after 10 times as many.
    max_waiting: queries that wait; more are refused with status 503.
    """

    topk: int = 3
    max_topk: int = 1000
    max_queries: int = 4096
    max_passages: int = 1 << 16
    max_query_chars: int = 4096
    max_body_bytes: int = 1 << 24
    max_batch: int = 512
    batch_wait_s: float = 0.002
    max_waiting: int = 1 << 14

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < (0 if name == "batch_wait_s" else 1):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.topk > self.max_topk:
            raise ValueError(f"topk = {self.topk} is more than max_topk = {self.max_topk}")
        if self.max_topk > self.max_passages:
            raise ValueError(f"max_topk = {self.max_topk} is more than max_passages = {self.max_passages}")


@dataclass(frozen=True)
class Settings:
    """What a serving process opens. options: keyword arguments of `open_retriever`. url: where it listens."""

    corpus: str
    index: str
    options: dict[str, Any]
    limits: Limits
    token: str | None
    url: str


class ListenError(OSError):
    """An address cannot be listened at; the message names it and the fix."""


class Overloaded(Exception):
    """So much is waiting that a request was refused."""


@dataclass
class _Waiting:
    queries: list[str]
    k: int
    found: asyncio.Future[list[list[Passage]]]


class Batcher:
    """Answers concurrent searches with one search of the retriever for all that wait, in a thread of its own.

    Requests of one batch ask for the same k, so each gets what it would get alone, up to the rounding of a batched
    matrix product. `run` must be running.
    """

    def __init__(self, retriever: Retriever, limits: Limits) -> None:
        self._retriever = retriever
        self._limits = limits
        self._waiting: deque[_Waiting] = deque()
        self._queries = 0  # in _waiting
        self._arrived = asyncio.Event()

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages. Raises Overloaded, or what the retriever raises."""
        if self._queries and self._queries + len(queries) > self._limits.max_waiting:
            raise Overloaded
        request = _Waiting(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._queries += len(queries)
        self._arrived.set()
        return await request.found

    async def run(self) -> None:
        """Search until cancelled."""
        with ThreadPoolExecutor(1, thread_name_prefix="search") as thread:
            while True:
                await self._arrived.wait()
                for _ in range(_MAX_WAITS):
                    arrived = len(self._waiting)
                    if self._queries >= self._limits.max_batch:
                        break
                    await asyncio.sleep(self._limits.batch_wait_s)
                    if len(self._waiting) == arrived:
                        break
                await self._answer(self._take(), thread)

    def _take(self) -> list[_Waiting]:
        """Remove and return the oldest request and those that fit into one batch with it."""
        k, count = self._waiting[0].k, 0
        most = min(self._limits.max_batch, self._limits.max_passages // k)
        batch: list[_Waiting] = []
        rest: deque[_Waiting] = deque()
        for request in self._waiting:
            if request.k == k and (not batch or count + len(request.queries) <= most):
                batch.append(request)
                count += len(request.queries)
            else:
                rest.append(request)
        self._waiting = rest
        self._queries -= count
        if not rest:
            self._arrived.clear()
        return batch

    async def _answer(self, batch: list[_Waiting], thread: ThreadPoolExecutor) -> None:
        queries = list(dict.fromkeys(query for request in batch for query in request.queries))
        search = partial(self._retriever.search, queries, batch[0].k)
        try:
            results = await asyncio.get_running_loop().run_in_executor(thread, search)
            found = dict(zip(queries, results, strict=True))
        except Exception as error:
            if len(batch) > 1:  # only the request at fault shall fail
                for request in batch:
                    await self._answer([request], thread)
            elif not batch[0].found.done():
                batch[0].found.set_exception(error)
            return
        _BATCHES.inc()
        for request in batch:
            if not request.found.done():  # it is when the request was cancelled
                request.found.set_result([found[query] for query in request.queries])


def make_app(retriever: Retriever, limits: Limits = Limits(), token: str | None = None) -> Starlette:
    """Return the ASGI application that serves a retriever. token: what requests must bring as a bearer token."""
    index = dataclasses.asdict(retriever.info())
    index_id = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()[:16]
    batcher: Batcher

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = Batcher(retriever, limits)
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    async def retrieve(request: Request) -> Response:
        start = time.perf_counter()
        try:
            queries, k, with_scores = parse_request(await read_body(request, limits.max_body_bytes), limits)
            asked = [query for query in queries if query.strip()]
            found = iter(await batcher.search(asked, k) if asked else [])
            lists = [next(found) if query.strip() else [] for query in queries]
            if sum(map(len, lists)) <= _INLINE_PASSAGES:
                body = render(lists, with_scores)
            else:
                body = await asyncio.to_thread(render, lists, with_scores)
        except HTTPException as error:
            _REQUESTS.labels(error.status_code).inc()
            raise
        except Overloaded:
            _REQUESTS.labels(503).inc()
            raise HTTPException(
                503,
                f"more than {limits.max_waiting} queries would be waiting: come again later",
                {"Retry-After": str(RETRY_AFTER_S)},
            ) from None
        except Exception as error:
            _log.exception("a search failed")
            _REQUESTS.labels(500).inc()
            raise HTTPException(500, f"the search failed ({type(error).__name__}); see the server's log") from error
        _REQUESTS.labels(200).inc()
        _QUERIES.inc(len(queries))
        _SECONDS.observe(time.perf_counter() - start)
        return Response(body, headers={INDEX_HEADER: index_id}, media_type="application/json")

    async def health(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def info(_: Request) -> Response:
        return json_response({"index": index, "limits": dataclasses.asdict(limits)}, headers={INDEX_HEADER: index_id})

    async def metrics(_: Request) -> Response:
        registry = CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            MultiProcessCollector(registry)  # the sums over all workers
        else:
            for metric in _METRICS:
                registry.register(metric)
        return PlainTextResponse(generate_latest(registry), media_type="text/plain; version=0.0.4")

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            known = scheme.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), (token or "").encode())
            if token is not None and not known:
                raise HTTPException(
                    401, "this server needs its token: send Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
                )
            return await endpoint(request)

        return guard

    async def error(_: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        return json_response({"detail": exception.detail}, exception.status_code, exception.headers)

    routes = [
        Route("/retrieve", guarded(retrieve), methods=["POST"]),
        Route("/health", health),
        Route("/info", guarded(info)),
        Route("/metrics", guarded(metrics)),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: error})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(_encode(content), status, headers, media_type="application/json")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request. Raises HTTPException 413 as soon as it is longer than max_bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            # the rest of the body is not read, so the connection cannot be used again
            raise HTTPException(
                413, f"the body is longer than {max_bytes} bytes: send fewer queries", {"Connection": "close"}
            )
    return bytes(body)


def parse_request(body: bytes, limits: Limits) -> tuple[list[str], int, bool]:
    """Return queries, k and whether scores are wanted. Raises HTTPException naming the field that is wrong."""
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise HTTPException(400, f"the body is not JSON in UTF-8 ({error})") from None
    if not isinstance(fields, dict):
        raise HTTPException(422, f"the body must be a JSON object, not {type(fields).__name__}")
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise HTTPException(422, f"unknown fields {unknown[:10]!r:.200}; known: {list(_FIELDS)}")
    if ("queries" in fields) == ("query" in fields):
        raise HTTPException(422, 'give either "queries", a list of strings, or "query", a string')
    queries = fields["queries"] if "queries" in fields else [fields["query"]]
    if not isinstance(queries, list):
        raise HTTPException(422, f'"queries" must be a list of strings, not {type(queries).__name__}')
    if len(queries) > limits.max_queries:
        raise HTTPException(422, f'"queries" has {len(queries)} queries, at most {limits.max_queries} are taken')
    for i, query in enumerate(queries):
        _check_query(f"queries[{i}]" if "queries" in fields else "query", query, limits.max_query_chars)
    topk, with_scores = fields.get("topk"), fields.get("return_scores", False)
    try:
        k = limits.topk if topk is None else _WHOLE.validate_python(topk)
    except ValidationError:
        k = 0
    if not 1 <= k <= limits.max_topk:
        raise HTTPException(422, f'"topk" must be a whole number from 1 to {limits.max_topk}, got {topk!r:.50}')
    if len(queries) * k > limits.max_passages:
        raise HTTPException(
            422, f'{len(queries)} queries times "topk" = {k} is more than {limits.max_passages}: send fewer at once'
        )
    try:
        return queries, k, _FLAG.validate_python(with_scores)
    except ValidationError:
        raise HTTPException(422, f'"return_scores" must be true or false, got {with_scores!r:.50}') from None


def _check_query(place: str, query: Any, max_chars: int) -> None:
    if not isinstance(query, str):
        raise HTTPException(422, f"{place} must be a string, not {type(query).__name__}")
    if len(query) > max_chars:
        raise HTTPException(422, f"{place} has {len(query)} characters, at most {max_chars} are searched for")
    try:
        query.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise HTTPException(422, f"{place} is not Unicode text ({error.reason})") from None


def render(lists: Sequence[Sequence[Passage]], with_scores: bool) -> bytes:
    """Return the body of an answer. Raises ValueError for a score that JSON cannot spell."""
    # one list at a time: in a thread, the encoder lets others run only between its calls
    texts = [_encode([to_json(passage, with_scores) for passage in passages]) for passages in lists]
    return f'{{"result":[{",".join(texts)}]}}'.encode()


def to_json(passage: Passage, with_scores: bool) -> dict[str, Any]:
    """Return a passage as Search-R1 sends it: the row of the corpus, with its score beside it if asked for."""
    contents = f"{passage.title}\n{passage.text}" if passage.title else passage.text
    document = {"id": passage.id, "contents": contents}
    return {"document": document, "score": passage.score} if with_scores else document


# processes


def open_app(settings: Settings) -> Starlette:
    """Open the index and return the application that serves it. Raises RetrieverError or ValueError."""
    chars = settings.limits.max_query_chars
    retriever = open_retriever(settings.corpus, settings.index, max_query_chars=chars, **settings.options)
    return make_app(retriever, settings.limits, settings.token)


def open_app_in_worker(settings: Settings) -> Starlette:
    """Return the application in a worker process, which ends with the process that started it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _stop_after(lambda: wait([parent.sentinel]))
    try:
        app = open_app(settings)
    except Exception as error:
        if isinstance(error, (RetrieverError, ValueError)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        sys.exit(STARTUP_FAILURE)  # ends the other workers too; after another status it would be started for ever
    sys.stdout.write(f"{settings.url}\n")  # in one piece: all workers write to one pipe
    sys.stdout.flush()
    return app


def serve(settings: Settings, listener: socket.socket, workers: int) -> int:
    """Print the URL once the index is open, and serve until SIGTERM or Ctrl-C; requests in flight are answered first.

    Workers share the memory-mapped index; one that dies is replaced. Returns the exit status, 2 when workers could not
    open the index; raises RetrieverError or ValueError when a single one cannot, ListenError when another process
    has begun to listen at the address meanwhile.
    """
    config = partial(
        uvicorn.Config,
        lifespan="on",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    if workers == 1:
        server = uvicorn.Server(config(open_app(settings)))
        listen(listener)
        print(settings.url, flush=True)
        server.run([listener])
        return 0
    listen(listener)  # here, as a worker that cannot is replaced for ever
    supervisor = Multiprocess(config(partial(open_app_in_worker, settings), factory=True, workers=workers), [listener])
    supervisor.run()
    return 2 if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes) else 0


def _stop_after(event: Callable[[], object]) -> None:
    """Ask this process to stop, gracefully, once `event` returns."""

    def watch() -> None:
        event()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _name_or_settings(text: str) -> str | dict[str, Any]:
    return json.loads(text) if text.startswith("{") else text


def _end_of_input() -> None:
    """Return when standard input closes, or the parent ends: a child that it forked may hold the other end open."""
    parent = os.getppid()
    while os.getppid() == parent:
        # not sys.stdin: its lock, held here, would abort an interpreter that ends for another reason
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1 << 12):
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 2 after an error of the user's."""
    default = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m retriever.server",
        description="Serve an index over HTTP, by the protocol of Search-R1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--corpus", required=True, help='JSONL of {"id", "contents"}')
    option("--index", required=True, help="index folder over the corpus")
    option("--encoder", type=_name_or_settings, help="what the index must have been built with: name, or JSON settings")
    option("--kind", default="dense", help="dense, bm25 or hybrid")
    option("--reranker", default="", help="cross-encoder that puts the best passages in order")
    option("--effort", type=int, help="lists that an IVF index looks into, candidates of an HNSW search")
    option("--gpu", action="store_true", help="hold the vectors in float16 on all GPUs")
    option("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 admits other machines")
    option("--port", type=int, default=8000, help="0 takes a free one; it is printed")
    option("--token-env", metavar="NAME", help="environment variable that holds the token which requests must bring")
    option("--workers", type=int, default=1, help="serving processes; they share one memory-mapped index")
    option("--threads", type=int, default=1, help="CPU threads of one search, in each worker")
    option("--topk", type=int, default=default.topk, help="passages for a query when the request does not say")
    option("--max-topk", type=int, default=default.max_topk, help="passages that a request may ask for")
    option("--max-queries", type=int, default=default.max_queries, help="queries in one request")
    option("--max-passages", type=int, default=default.max_passages, help="queries * topk in one request")
    option("--max-query-chars", type=int, default=default.max_query_chars, help="characters of a query")
    option("--max-body-mb", type=int, default=default.max_body_bytes >> 20, help="MiB of a request")
    option("--max-batch", type=int, default=default.max_batch, help="queries searched at once")
    option("--batch-wait-ms", type=float, default=default.batch_wait_s * 1000, help="how long a search waits for more")
    option("--max-waiting", type=int, default=default.max_waiting, help="queries that may wait in each worker")
    option("--stop-at-eof", action="store_true", help="stop when standard input closes or the parent ends")
    options = parser.parse_args(argv)
    try:
        limits = Limits(
            topk=options.topk,
            max_topk=options.max_topk,
            max_queries=options.max_queries,
            max_passages=options.max_passages,
            max_query_chars=options.max_query_chars,
            max_body_bytes=options.max_body_mb << 20,
            max_batch=options.max_batch,
            batch_wait_s=options.batch_wait_ms / 1000,
            max_waiting=options.max_waiting,
        )
        if options.workers < 1 or options.threads < 1:
            raise ValueError(f"--workers and --threads must be at least 1, got {options.workers} and {options.threads}")
        token = os.environ.get(options.token_env) if options.token_env else None
        if options.token_env and not token:
            raise ValueError(f"--token-env {options.token_env}: this environment variable is not set")
        if token:
            check_token(token, f"--token-env {options.token_env}")
        listener = bind(options.host, options.port)
    except (ValueError, ListenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if token is None and not options.host.startswith("127.") and options.host not in ("localhost", "::1"):
        print(f"warning: {options.host} without --token-env: everybody who reaches it can search", file=sys.stderr)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    opened = {name: getattr(options, name) for name in ("encoder", "kind", "reranker", "effort", "gpu", "threads")}
    settings = Settings(options.corpus, options.index, opened, limits, token, url)
    if options.stop_at_eof:
        _stop_after(_end_of_input)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        if options.workers > 1:  # where the workers of this server add up their metrics
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            return serve(settings, listener, options.workers)
        except (RetrieverError, ValueError, ListenError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ListenError naming it."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ListenError(f"cannot listen on {host}, port {port} ({error}): give another --host or --port") from error
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections. Raises ListenError: several processes can be bound to one address until one of them listens."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ListenError(f"cannot listen on {host}, port {port} ({error}): give another --host or --port") from error


if __name__ == "__main__":
    sys.exit(main())
