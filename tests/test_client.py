"""The HTTP client against a real server on a free local port."""

import errno
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import retriever.client
from retriever.client import RetrieverClient
from retriever.corpus import split_contents
from retriever.types import IndexInfo, Passage, RetrieverError

PARIS = {"document": {"id": "7", "contents": '"Paris"\nCapital of France.'}, "score": 0.75}
LONDON = {"document": {"id": "9", "contents": '"London"\nCapital of England.'}, "score": 0.5}
PARIS_PASSAGE = Passage("7", '"Paris"', "Capital of France.", 0.75)
LONDON_PASSAGE = Passage("9", '"London"', "Capital of England.", 0.5)


@dataclass
class Reply:
    """What the server sends. chunks are written `gap_s` apart; `declared` replaces the true Content-Length."""

    chunks: list[bytes]
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    gap_s: float = 0.0
    declared: int | None = None
    close: bool = False


def answer(*lists) -> Reply:
    return Reply([json.dumps({"result": list(lists)}).encode()])


def found(item) -> Reply:
    return answer([item])


@dataclass
class Server:
    url: str
    stop: threading.Event
    script: Callable[[int, dict], Reply] = lambda n, request: answer(*[[PARIS, LONDON] for _ in request["queries"]])
    paths: list[str] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)  # ports of the client
    left: set[int] = field(default_factory=set)  # those it closed before the server had sent everything

    def reply_with(self, *replies: Reply) -> None:
        """Send the replies in turn, the last one from then on."""
        self.script = lambda n, request: replies[min(n, len(replies) - 1)]


@pytest.fixture(scope="module")
def running():
    """The server, started once for the module; `server` empties it before each test."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            n = len(state.requests)
            state.requests.append(request)
            state.paths.append(self.path)
            state.kinds.append(self.headers["Content-Type"])
            state.tokens.append(self.headers["Authorization"])
            state.connections.add(self.client_address[1])
            reply = state.script(n, request)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            length = sum(map(len, reply.chunks)) if reply.declared is None else reply.declared
            self.send_header("Content-Length", str(length))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for chunk in reply.chunks:
                self.wfile.write(chunk)
                state.stop.wait(reply.gap_s)
            self.close_connection = self.close_connection or reply.close

        def log_message(self, *arguments):
            pass

    class HttpServer(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            if isinstance(sys.exc_info()[1], ConnectionError):
                state.left.add(client_address[1])
            else:
                super().handle_error(request, client_address)

    with HttpServer(("127.0.0.1", 0), Handler) as http_server:
        state = Server(f"http://127.0.0.1:{http_server.server_port}", threading.Event())
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
        thread.start()
        yield state
        state.stop.set()
        http_server.shutdown()
        thread.join()


@pytest.fixture
def server(running, monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.002)
    seen_before = running.requests, running.paths, running.kinds, running.tokens, running.connections, running.left
    for seen in seen_before:
        seen.clear()
    running.script = Server.script
    return running


def error_of(server: Server, reply: Reply, **settings) -> str:
    """Return the message of the RetrieverError that this reply to one query leads to."""
    server.reply_with(reply)
    with pytest.raises(RetrieverError) as error:
        RetrieverClient(server.url, **settings).search(["a"], 3)
    message = str(error.value)
    assert f"{server.url}/retrieve: " in message and "\n" not in message
    return message


def search(server: Server, k: int = 1, **settings) -> list[Passage]:
    """Return what a new client finds for one query."""
    return RetrieverClient(server.url, **settings).search(["a"], k)[0]


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# request and answer


def test_one_request_carries_all_queries(server):
    server.reply_with(answer([PARIS, LONDON], [LONDON]))
    results = RetrieverClient(server.url).search(["capital of France", "Londón"], 2)
    assert results == [[PARIS_PASSAGE, LONDON_PASSAGE], [LONDON_PASSAGE]]
    assert server.requests == [{"queries": ["capital of France", "Londón"], "topk": 2, "return_scores": True}]
    assert server.paths == ["/retrieve"] and server.kinds == ["application/json"]


@pytest.mark.parametrize(
    ("suffix", "path"),
    [("/", "/retrieve"), ("/retrieve", "/retrieve"), ("/retrieve/", "/retrieve"), ("/wiki", "/wiki/retrieve")],
)
def test_the_url_may_end_in_retrieve(server, suffix, path):
    RetrieverClient(server.url + suffix).search(["a"], 1)
    assert server.paths == [path]


def test_no_queries_make_no_request(server):
    assert RetrieverClient(server.url).search([], 3) == []
    assert server.requests == []


def test_long_queries_are_cut(server):
    RetrieverClient(server.url, max_query_chars=4).search(["abcdef", "abc"], 1)
    assert server.requests[0]["queries"] == ["abcd", "abc"]


def test_a_blank_query_is_not_sent_and_finds_nothing(server):
    assert RetrieverClient(server.url).search(["", "a", " \n"], 1) == [[], [PARIS_PASSAGE], []]
    assert RetrieverClient(server.url, max_query_chars=2).search(["  a"], 1) == [[]]
    assert [request["queries"] for request in server.requests] == [["a"]]


def test_half_a_surrogate_pair_is_sent_as_a_question_mark(server):
    RetrieverClient(server.url).search(["a\ud800", "b\U0001f600"], 1)
    assert server.requests[0]["queries"] == ["a?", "b\U0001f600"]


def test_results_beyond_k_are_dropped(server):
    assert RetrieverClient(server.url).search(["a", "b"], 1) == [[PARIS_PASSAGE], [PARIS_PASSAGE]]


def test_a_query_may_find_nothing(server):
    server.reply_with(answer([], [PARIS]))
    assert RetrieverClient(server.url).search(["a", "b"], 3) == [[], [PARIS_PASSAGE]]


def test_the_fillers_of_faiss_are_dropped(server):
    """FAISS gives row -1 the lowest float32 score; Search-R1 then sends the last document of its corpus."""
    server.reply_with(answer([PARIS, {**LONDON, "score": -3.4028234663852886e38}]))
    assert RetrieverClient(server.url).search(["a"], 2) == [[PARIS_PASSAGE]]


@pytest.mark.parametrize(
    "contents", ['"Paris"\nCapital\nof France.', "Mars\nA planet.", "One line.", "\nNo title.", '"A ""b"""\nc', ""]
)
def test_contents_are_split_as_in_the_corpus(server, contents):
    server.reply_with(found({"document": {"id": "1", "contents": contents}, "score": 1}))
    assert RetrieverClient(server.url).search(["a"], 1) == [[Passage("1", *split_contents(contents), 1.0)]]


@pytest.mark.parametrize(
    ("document", "passage"),
    [
        ({"title": "Paris", "text": "Capital."}, Passage("", "Paris", "Capital.", 0.5)),
        ({"id": "3", "title": "Paris", "text": "Capital."}, Passage("3", "Paris", "Capital.", 0.5)),
        (
            {"title": "Paris", "text": "Capital.", "contents": '"Paris"\nCapital.'},
            Passage("", '"Paris"', "Capital.", 0.5),
        ),
        ({"id": 12, "contents": "T\nx", "url": "u"}, Passage("12", "T", "x", 0.5)),
    ],
)
def test_documents_of_a_bm25_server(server, document, passage):
    server.reply_with(found({"document": document, "score": 0.5}))
    assert RetrieverClient(server.url).search(["a"], 1) == [[passage]]


def test_info_marks_what_a_server_cannot_tell():
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/retrieve"):
        assert RetrieverClient(url).info() == IndexInfo("unknown", 0, "server http://127.0.0.1:8000", 0, "remote")


# answers that are refused


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([], "the answer is no JSON object but list"),
        ({"results": []}, """the answer has no "result", only ['results']"""),
        ({"result": None}, '"result" of the answer cannot be NoneType'),
        ({"result": [{}]}, "result[0] is no list but dict"),
        ({"result": [["x"]]}, "result[0][0] is no JSON object but str"),
        ({"result": [[PARIS, PARIS["document"]]]}, """result[0][1] has no "document", only ['contents', 'id']"""),
        ({"result": [[{"document": PARIS["document"]}]]}, 'result[0][0] has no "score"'),
        ({"result": [[{**PARIS, "score": "0.5"}]]}, '"score" of result[0][0] cannot be str'),
        ({"result": [[{**PARIS, "score": True}]]}, '"score" of result[0][0] cannot be bool'),
        ({"result": [[{**PARIS, "score": float("nan")}]]}, '"score" of result[0][0] is not a finite number'),
        ({"result": [[{**PARIS, "score": float("inf")}]]}, '"score" of result[0][0] is not a finite number'),
        ({"result": [[{**PARIS, "score": 10**400}]]}, '"score" of result[0][0] is not a finite number'),
        (
            {"result": [[{"document": {"id": "1", "content": "x"}, "score": 1.0}]]},
            """result[0][0].document has no "contents", only ['content', 'id']""",
        ),
        (
            {"result": [[{"document": {"contents": "x"}, "score": 1.0}]]},
            'result[0][0].document has no "id"',
        ),
        (
            {"result": [[{"document": {"id": "1", "title": "x"}, "score": 1.0}]]},
            'result[0][0].document has no "contents"',
        ),
        (
            {"result": [[{"document": {"id": "1", "contents": None}, "score": 1.0}]]},
            '"contents" of result[0][0].document cannot be NoneType',
        ),
    ],
)
def test_a_wrong_shape_is_named_with_its_field_and_the_fix(server, value, named):
    message = error_of(server, Reply([json.dumps(value).encode()]))
    assert named in message
    assert r'{"document": {"id": "0", "contents": "\"Title\"\ntext"}, "score": 0.8}' in message
    assert "point retriever.url at a Search-R1 retrieval server" in message
    assert len(server.requests) == 1


@pytest.mark.parametrize("lists", [[], [[PARIS], [PARIS]]])
def test_every_query_needs_its_list(server, lists):
    assert f'"result" has {len(lists)} lists for 1 queries' in error_of(server, answer(*lists))


def test_html_is_quoted_up_to_200_characters(server):
    page = "<html>\n" + "é" * 192 + "xyz"
    message = error_of(server, Reply([page.encode()], kind="text/html"))
    assert f"HTTP 200, text/html, but not JSON: {page[:200]!r};" in message and "xy" not in message
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\xfa", b"[" * 100_000])
def test_broken_json_is_refused(server, body):
    assert "HTTP 200, application/json, but not JSON" in error_of(server, Reply([body]))


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (301, "point retriever.url"),
        (404, "point retriever.url"),
        (401, "set retriever.token_env"),
        (403, "set retriever.token_env"),
        (413, "the server refuses this request"),
        (422, "the server refuses this request"),
    ],
)
def test_a_status_that_will_not_pass_is_not_retried(server, status, fix):
    message = error_of(server, Reply([b"no"], status=status, headers={"Location": "/elsewhere", "Retry-After": "0"}))
    assert f"HTTP {status}, application/json, 'no'; {fix}" in message
    assert len(server.requests) == 1


def test_a_long_answer_is_refused(server):
    reply = found(PARIS)
    size = len(reply.chunks[0])
    server.reply_with(reply)
    assert RetrieverClient(server.url, max_answer_bytes=size).search(["a"], 1) == [[PARIS_PASSAGE]]
    message = error_of(server, reply, max_answer_bytes=size - 1)
    assert f"longer than {size - 1} bytes" in message and "retriever.top_k" in message


def test_the_connection_of_a_long_answer_is_closed_at_the_limit(server):
    server.reply_with(Reply([b" " * 1000] * 100, gap_s=0.02))
    start = time.monotonic()
    with pytest.raises(RetrieverError) as error:  # held to the end: it keeps the frames and with them the response
        RetrieverClient(server.url, max_answer_bytes=1500).search(["a"], 1)
    while not server.connections <= server.left and time.monotonic() - start < 1.0:
        time.sleep(0.01)
    assert server.connections <= server.left and "longer than 1500 bytes" in str(error.value)


# retries


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_retried(server, status):
    busy = Reply([b"<html>"], status=status, kind="text/html")
    server.reply_with(busy, busy, found(PARIS))
    assert RetrieverClient(server.url).search(["a"], 1) == [[PARIS_PASSAGE]]
    assert len(server.requests) == 3 and server.requests[0] == server.requests[2]


def test_attempts_are_bounded_by_the_time(server):
    page = "<h1>" + "x" * 3000
    start = time.monotonic()
    message = error_of(server, Reply([page.encode()], status=500, kind="text/html"), timeout_s=0.5)
    assert f"HTTP 500, text/html, {page[:200]!r}; see the server's log (attempts: {len(server.requests)}, " in message
    assert len(server.requests) > 8 and time.monotonic() - start < 1.0


def test_attempts_to_connect_are_bounded(server):
    server.reply_with(Reply([b""], status=500))
    with pytest.raises(RetrieverError, match="attempts: 5, retriever.timeout_s: 60"):
        RetrieverClient(server.url).connect()
    assert len(server.requests) == 5


def test_the_pauses_double(server, monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.04)
    server.reply_with(*[Reply([b""], status=500)] * 4, found(PARIS))
    start = time.monotonic()
    assert search(server) == [PARIS_PASSAGE]
    assert time.monotonic() - start > 0.3  # at least half of 0.04 + 0.08 + 0.16 + 0.32


def test_retry_after_is_waited_for(server):
    server.reply_with(Reply([b"busy"], status=503, headers={"Retry-After": "1"}), found(PARIS))
    start = time.monotonic()
    assert RetrieverClient(server.url).search(["a"], 1) == [[PARIS_PASSAGE]]
    assert time.monotonic() - start >= 1.0


def test_a_server_that_asks_to_come_back_is_asked_more_often(server):
    busy = Reply([b"loading"], status=503, headers={"Retry-After": "0"})
    server.reply_with(*[busy] * 7, found(PARIS))
    assert RetrieverClient(server.url).search(["a"], 1) == [[PARIS_PASSAGE]]
    assert len(server.requests) == 8


@pytest.mark.parametrize("as_date", [False, True])
def test_a_wait_beyond_the_time_limit_is_not_begun(server, as_date):
    header = formatdate(time.time() + 5, usegmt=True) if as_date else "5"
    start = time.monotonic()
    message = error_of(server, Reply([b"busy"], status=503, headers={"Retry-After": header}), timeout_s=2)
    assert "'busy', asks to wait " in message and "(attempts: 1, retriever.timeout_s: 2)" in message
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("header", ["soon", "-1", "9" * 5000])
def test_a_retry_after_that_cannot_be_used_does_no_harm(server, header):
    server.reply_with(Reply([b"busy"], status=503, headers={"Retry-After": header}), found(PARIS))
    assert search(server) == [PARIS_PASSAGE] and len(server.requests) == 2


def test_a_silent_server_is_left_at_the_time_limit(server):
    def slow(n, request):
        server.stop.wait(1.5)
        return found(PARIS)

    server.script = slow
    start = time.monotonic()
    with pytest.raises(RetrieverError, match="no complete answer in time; raise retriever.timeout_s"):
        RetrieverClient(server.url, timeout_s=0.2).search(["a"], 1)
    assert 0.2 <= time.monotonic() - start < 1.0


def test_a_trickling_server_is_left_at_the_time_limit(server):
    start = time.monotonic()
    assert "no complete answer in time" in error_of(server, Reply([b" "] * 100, gap_s=0.03), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - start < 1.0


def test_retries_end_at_the_time_limit(server, monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.1)
    start = time.monotonic()
    message = error_of(server, Reply([b"busy"], status=503, headers={"Retry-After": "0"}), timeout_s=0.3)
    assert "retriever.timeout_s: 0.3" in message and 2 <= len(server.requests) <= 3
    assert time.monotonic() - start < 1.0


def test_the_time_limit_is_for_all_requests_of_a_search(server):
    def slow(n, request):
        server.stop.wait(0.2)
        return found(PARIS)

    server.script = slow
    client = RetrieverClient(server.url, timeout_s=0.5)
    client._max_queries = 1
    with pytest.raises(RetrieverError, match="no complete answer in time"):
        client.search(list("abcd"), 1)


def test_an_answer_cut_off_is_asked_for_again(server):
    whole = found(PARIS)
    cut = Reply([whole.chunks[0][:20]], declared=len(whole.chunks[0]), close=True)
    server.reply_with(cut, whole)
    assert RetrieverClient(server.url).search(["a"], 1) == [[PARIS_PASSAGE]]
    assert len(server.requests) == 2
    assert "the connection failed" in error_of(server, cut, timeout_s=0.1)


def test_a_refused_connection_names_url_key_and_fix(server):
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(RetrieverError) as error:
        RetrieverClient(url).connect()
    refused = f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}"
    assert str(error.value) == (
        f"{url}/info: cannot connect ({refused}); start the retrieval server, "
        "or set retriever.url to where it runs (attempts: 5, retriever.timeout_s: 60)"
    )


def test_a_server_that_starts_late_is_found(server, monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        client = RetrieverClient(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def serve():
            time.sleep(0.05)
            listener.listen()
            connection, _ = listener.accept()
            with connection:
                while b"return_scores" not in connection.recv(1 << 16):
                    pass
                body = found(PARIS).chunks[0]
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            assert client.search(["a"], 1) == [[PARIS_PASSAGE]]
            served.result()


def test_retries_leave_the_seeded_generator_alone(server):
    state = random.getstate()
    server.reply_with(Reply([b""], status=503), found(PARIS))
    RetrieverClient(server.url).search(["a"], 1)
    assert random.getstate() == state


# connections


def test_the_connection_is_kept(server):
    client = RetrieverClient(server.url)
    server.reply_with(found(PARIS), Reply([b"busy"], status=503), found(PARIS))
    client.search(["a"], 1)
    client.search(["b"], 1)
    assert len(server.requests) == 3 and len(server.connections) == 1


def test_a_connection_that_the_server_closed_is_replaced(server):
    whole = found(PARIS)
    whole.close = True
    server.reply_with(whole)
    client = RetrieverClient(server.url, cached_queries=0)
    for _ in range(3):
        assert client.search(["a"], 1) == [[PARIS_PASSAGE]]
        time.sleep(0.02)
    assert len(server.requests) == 3 and len(server.connections) == 3


def echo(n, request):
    return answer(*[[{"document": {"id": q, "contents": q}, "score": 1.0}] for q in request["queries"]])


def test_threads_get_their_own_answers(server):
    server.script = echo
    client = RetrieverClient(server.url)
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda n: client.search([f"q{n}", f"r{n}"], 1), range(60)))
    assert results == [[[Passage(f"{name}{n}", "", f"{name}{n}", 1.0)] for name in "qr"] for n in range(60)]


def test_proxy_settings_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("no_proxy", "")
    assert RetrieverClient(server.url).search(["a"], 1) == [[PARIS_PASSAGE]]


# repeated queries


def test_a_query_is_sent_once_and_its_answer_remembered(server):
    server.script = echo
    client = RetrieverClient(server.url, max_query_chars=2)
    assert [found[0].text for found in client.search(["a", "b", "a", "bb1", "bb2"], 1)] == ["a", "b", "a", "bb", "bb"]
    assert client.search(["c", "a"], 1)[1] == [Passage("a", "", "a", 1.0)]
    client.search(["a"], 2)  # another question
    assert [request["queries"] for request in server.requests] == [["a", "b", "bb"], ["c"], ["a"]]
    client.search(["a", "b"], 1).clear()
    client.search(["a"], 1)[0].clear()  # the caller's list, not the memory
    assert client.search(["a"], 1) == [[Passage("a", "", "a", 1.0)]] and len(server.requests) == 3


def test_the_memory_of_answers_is_bounded(server):
    server.script = echo
    client = RetrieverClient(server.url, cached_queries=2)
    for query in ("a", "b", "a", "c", "a", "b"):  # c drives b out, not a
        client.search([query], 1)
    assert [request["queries"][0] for request in server.requests] == ["a", "b", "c", "b"]
    forgetful = RetrieverClient(server.url, cached_queries=0)
    assert forgetful.search(["a", "a"], 1) == forgetful.search(["a", "a"], 1)
    assert [request["queries"] for request in server.requests[4:]] == [["a"], ["a"]]


def test_a_failed_search_is_not_remembered(server):
    server.reply_with(answer(), answer([PARIS]))
    client = RetrieverClient(server.url)
    with pytest.raises(RetrieverError):
        client.search(["a"], 1)
    assert client.search(["a"], 1) == [[PARIS_PASSAGE]]


# replicas


def test_replicas_take_turns(server):
    client = RetrieverClient([f"{server.url}/one", f"{server.url}/two"], cached_queries=0)
    for _ in range(4):
        client.search(["a"], 1)
    assert sorted(server.paths[:2]) == ["/one/retrieve", "/two/retrieve"] and server.paths[2:] == server.paths[:2]


def test_another_replica_answers_for_one_that_is_down(server):
    down = f"http://127.0.0.1:{closed_port()}"
    start = time.monotonic()
    client = RetrieverClient([down, server.url], cached_queries=0)
    for _ in range(4):
        assert client.search(["a"], 1) == [[PARIS_PASSAGE]]
    assert len(server.requests) == 4 and time.monotonic() - start < 0.5
    with pytest.raises(RetrieverError, match=f"{down}/info: cannot connect"):
        client.connect()  # at the start of a run all must be there


def test_another_replica_answers_for_one_that_is_silent(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = RetrieverClient([f"http://127.0.0.1:{silent.getsockname()[1]}", server.url], timeout_s=0.6)
        client._turn = iter([0, 0])
        start = time.monotonic()
        assert client.search(["a"], 1) == [[PARIS_PASSAGE]]
        assert 0.25 < time.monotonic() - start < 0.6  # it had half of the time
        start = time.monotonic()
        assert client.search(["b"], 1) == [[PARIS_PASSAGE]]
        assert time.monotonic() - start < 0.25  # now the other one is asked first


def test_a_busy_replica_is_left_for_the_other_at_once(server):
    busy = Reply([b"busy"], status=503, headers={"Retry-After": "5"})
    server.script = lambda n, request: busy if server.paths[-1].startswith("/busy") else found(PARIS)
    start = time.monotonic()
    client = RetrieverClient([f"{server.url}/busy", f"{server.url}/free"], cached_queries=0)
    for _ in range(2):
        assert client.search(["a"], 1) == [[PARIS_PASSAGE]]
    assert time.monotonic() - start < 0.5 and "/busy/retrieve" in server.paths


# connecting


def test_a_server_without_info_is_asked_for_a_result(server):
    """Search-R1's own server has no /info."""
    client = RetrieverClient(server.url)
    client.connect(top_k=3, encoder="intfloat/e5-base-v2")
    assert [request["queries"] for request in server.requests] == [["is anybody there?"]]
    assert client.info() == IndexInfo("unknown", 0, f"server {server.url}", 0, "remote")
    with pytest.raises(RetrieverError, match="this server has no /info, so retriever.corpus_id cannot be checked"):
        client.connect(corpus_id="abc")


def test_a_token_is_sent_and_never_shown(server):
    server.reply_with(Reply([b"no"], status=401))
    with pytest.raises(RetrieverError) as error:
        RetrieverClient(server.url, token="hidden").search(["a"], 1)
    assert server.tokens == ["Bearer hidden"] and "hidden" not in str(error.value)


@pytest.mark.parametrize("token", ["ключ", "a\nb", "hidden "])
def test_a_token_that_no_header_can_hold_names_its_setting(token):
    with pytest.raises(ValueError, match="retriever.token_env: its token cannot be sent in an HTTP header") as error:
        RetrieverClient("http://127.0.0.1:8000", token=token)
    assert token not in str(error.value)


# settings


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "localhost:8000", "ftp://h", "file:///etc/hosts", "http://", "http:///retrieve",
     "http://h:99999", "http://a b", "http://h/?topk=3", "http://h/#x"],
)  # fmt: skip
def test_only_http_urls(url):
    with pytest.raises(RetrieverError, match=r"retriever\.url = '.*' is no server address; write it as http://"):
        RetrieverClient(url)


def test_a_password_is_not_repeated():
    with pytest.raises(RetrieverError, match=r"retriever\.url holds a user name or password") as error:
        RetrieverClient("http://me:secret@h:8000")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("k", [0, -1])
def test_k_is_at_least_one(server, k):
    for queries in ([], ["a"]):
        with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
            RetrieverClient(server.url).search(queries, k)
    assert server.requests == []


@pytest.mark.parametrize(
    "setting",
    [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_query_chars": 0}, {"max_answer_bytes": 0},
     {"cached_queries": -1}],
)  # fmt: skip
def test_limits_are_positive(setting):
    with pytest.raises(ValueError, match="must be positive"):
        RetrieverClient("http://127.0.0.1:8000", **setting)


def test_a_list_of_servers_names_one():
    with pytest.raises(RetrieverError, match="names no server"):
        RetrieverClient([])
