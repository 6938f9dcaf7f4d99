"""The retrieval server: in a thread of the test where it can be, as the command where processes matter."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import urllib3
import uvicorn

import retriever.client
import retriever.server
from retriever.client import RetrieverClient, start_server, stop_server
from retriever.server import Batcher, Limits, bind, main, make_app, open_app_in_worker
from retriever.service import open_retriever
from retriever.types import IndexInfo, Passage, RetrieverError
from tests.tiny import DictRetriever

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = [
    '"Ada Lovelace"\nAda Lovelace was born in London .',
    '"London"\nLondon is governed by Ada Byron .',
    "Tōkyō\nTokyo is a city in Japan .",
    "A passage of one line about Mars .",
]
PARIS = Passage("7", '"Paris"', "Capital é.", 0.75)
PLAIN = Passage("8", "", "One line.", 0.5)
INFO = IndexInfo("none", 2, "dict", 0, "dict")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Corpus and index folder of four passages."""
    folder = tmp_path_factory.mktemp("server")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": f"p{n}", "contents": text}) + "\n" for n, text in enumerate(CONTENTS)))
    open_retriever(corpus, folder / "index", encoder={"name": "hashed", "dim": 256})
    return corpus, folder / "index"


@contextlib.contextmanager
def serving(retriever, limits=Limits(), token=None, port=0):
    """Serve in a thread; yield the URL, and stop gracefully."""
    config = uvicorn.Config(make_app(retriever, limits, token), lifespan="on", log_level="critical")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", port) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class SlowRetriever(DictRetriever):
    """Finds each query itself; every search waits for `gate`. Fails on the query "bad"."""

    def __init__(self):
        super().__init__({})
        self.gate = threading.Event()
        self.ks = []

    def search(self, queries, k):
        self.calls.append(list(queries))
        self.ks.append(k)
        assert self.gate.wait(30)
        if "bad" in queries:
            raise RuntimeError("a fault of the index")
        return [[Passage(f"{query}-{n}", "", query, 1.0) for n in range(k)] for query in queries]

    def wait_for_calls(self, count):
        while len(self.calls) < count:
            time.sleep(0.005)


def post(url, body, headers=None):
    """Return status, JSON, headers of a /retrieve; `body` is bytes or becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = urllib3.request("POST", f"{url}/retrieve", body=data, headers=headers, retries=False)
    return response.status, response.json(), response.headers


@pytest.fixture(scope="module")
def plain():
    """URL of a server that finds two passages for "a" and "b", and nothing else."""
    finds = {"a": [PARIS, PLAIN], "b": [PLAIN]}
    with serving(DictRetriever(finds), Limits(max_queries=100, max_body_bytes=20_000)) as url:
        yield url


# the protocol


def test_an_answer_is_search_r1s_but_for_escapes(plain):
    body = json.dumps({"queries": ["a", "b"], "topk": 2, "return_scores": True}).encode()
    response = urllib3.request("POST", f"{plain}/retrieve", body=body)
    assert response.data == (
        '{"result":[[{"document":{"id":"7","contents":"\\"Paris\\"\\nCapital \\u00e9."},"score":0.75},'
        '{"document":{"id":"8","contents":"One line."},"score":0.5}],'
        '[{"document":{"id":"8","contents":"One line."},"score":0.5}]]}'
    ).encode()
    assert (response.status, response.headers["Content-Type"]) == (200, "application/json")


@pytest.mark.parametrize("fields", [{"return_scores": False}, {}])
def test_without_scores_the_documents_of_every_query_stand_alone(plain, fields):
    paris, line = {"id": "7", "contents": '"Paris"\nCapital é.'}, {"id": "8", "contents": "One line."}
    assert post(plain, {"queries": ["a", "b"], "topk": 2, **fields})[1] == {"result": [[paris, line], [line]]}


def test_a_single_query_is_a_list_of_one(plain):
    assert post(plain, {"query": "a", "topk": 1})[1] == post(plain, {"queries": ["a"], "topk": 1})[1]
    assert len(post(plain, {"query": "a", "topk": 1})[1]["result"]) == 1


def test_topk_may_be_left_out_and_more_than_there_is(index):
    with serving(open_retriever(*index), Limits(topk=2)) as url:
        for fields, found in (({}, 2), ({"topk": None}, 2), ({"topk": 1}, 1), ({"topk": 1000}, 4)):
            status, answer, _ = post(url, {"queries": ["London Ada"], "return_scores": True, **fields})
            assert (status, len(answer["result"][0])) == (200, found)
        ids = [item["document"]["id"] for item in answer["result"][0]]
        assert sorted(ids) == ["p0", "p1", "p2", "p3"]
        assert all(abs(item["score"]) <= 1.001 for item in answer["result"][0])


@pytest.mark.parametrize("queries", [[], [""], [" \n", ""]])
def test_no_queries_and_blank_ones_find_nothing(plain, queries):
    """Search-R1's trainer sends "" for an empty <search></search>."""
    assert post(plain, {"queries": queries, "topk": 3})[:2] == (200, {"result": [[] for _ in queries]})


def test_a_blank_query_leaves_the_others_as_they_are(plain):
    result = post(plain, {"queries": ["", "a", " ", "b"], "topk": 1})[1]["result"]
    assert [[document["id"] for document in documents] for documents in result] == [[], ["7"], [], ["8"]]


def test_a_blank_query_finds_nothing_in_process_either(index):
    service = open_retriever(*index)
    service._encoder = SimpleNamespace(encode_queries=lambda queries: np.ones((len(queries), 256), np.float32))
    assert [len(passages) for passages in service.search([" ", "a"], 2)] == [0, 2]


@pytest.mark.parametrize("fields", [{"topk": "2"}, {"topk": 2.0}, {"return_scores": 1}, {"return_scores": "true"}])
def test_numbers_and_flags_are_read_as_search_r1_reads_them(plain, fields):
    asked = {"queries": ["a"], "topk": 2, "return_scores": True}
    assert post(plain, asked | fields)[:2] == (200, post(plain, asked)[1])


def test_a_passage_that_is_no_unicode_is_sent_as_it_is():
    """JSON of a corpus can spell half of a surrogate pair."""
    half = Passage("1", "", "x\ud800y", 1.0)
    with serving(DictRetriever({"a": [half], "b": [PLAIN]})) as url:
        assert RetrieverClient(url).search(["a", "b"], 1) == [[half], [PLAIN]]


def test_an_answer_that_json_cannot_spell_is_a_counted_error(caplog):
    with serving(DictRetriever({"a": [Passage("1", "", "x", float("nan"))]})) as url:
        status, answer, _ = post(url, {"queries": ["a"], "return_scores": True})
        assert (status, answer) == (500, {"detail": "the search failed (ValueError); see the server's log"})
        assert 'requests_total{status="500"}' in urllib3.request("GET", f"{url}/metrics").data.decode()


def test_a_large_answer_is_rendered_off_the_event_loop(monkeypatch):
    threads, render = [], retriever.server.render
    monkeypatch.setattr(retriever.server, "render", lambda *a: threads.append(threading.get_ident()) or render(*a))
    finder = SlowRetriever()
    finder.gate.set()
    with serving(finder) as url:
        for k in (1, 300, 1):
            assert len(post(url, {"queries": ["a"], "topk": k})[1]["result"][0]) == k
    assert threads[0] == threads[2] != threads[1]


def test_the_client_keeps_to_the_passages_of_a_request():
    finder = SlowRetriever()
    finder.gate.set()
    with serving(finder, Limits(max_topk=10, max_passages=20)) as url:
        client = RetrieverClient(url)
        client.connect(top_k=6)
        assert [len(found) for found in client.search(list("abcdefg"), 6)] == [6] * 7
        assert post(url, {"queries": list("abcd"), "topk": 6})[0] == 422
    assert finder.calls[1:] == [list("abc"), list("def"), ["g"]]


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"", 400, "not JSON in UTF-8"),
        (b'{"queries": ["a"]', 400, "not JSON in UTF-8"),
        (b'{"queries": ["\xff\xfe"]}', 400, "not JSON in UTF-8"),
        (b"[" * 15_000, 400, "not JSON in UTF-8"),
        (b'["a"]', 422, "must be a JSON object, not list"),
        ({"topk": 3}, 422, 'give either "queries"'),
        ({"queries": ["a"], "query": "a"}, 422, 'give either "queries"'),
        ({"queries": "a"}, 422, '"queries" must be a list of strings, not str'),
        ({"queries": None}, 422, '"queries" must be a list of strings, not NoneType'),
        ({"queries": ["a", 7]}, 422, "queries[1] must be a string, not int"),
        ({"query": ["a"]}, 422, "query must be a string, not list"),
        ({"queries": ["x" * 10_000]}, 422, "queries[0] has 10000 characters, at most 4096"),
        ({"queries": ["a"] * 101}, 422, '"queries" has 101 queries, at most 100'),
        (b'{"queries": ["\\ud800"]}', 422, "queries[0] is not Unicode text"),
        ({"queries": ["a"], "topk": 0}, 422, '"topk" must be a whole number from 1 to 1000, got 0'),
        ({"queries": ["a"], "topk": -1}, 422, "got -1"),
        ({"queries": ["a"], "topk": 1001}, 422, "got 1001"),
        ({"queries": ["a"], "topk": 2.5}, 422, "got 2.5"),
        ({"queries": ["a"], "topk": "three"}, 422, "got 'three'"),
        ({"queries": ["a"], "topk": [3]}, 422, "got [3]"),
        ({"queries": ["a"] * 100, "topk": 656}, 422, '100 queries times "topk" = 656 is more than 65536'),
        ({"queries": ["a"], "return_scores": 2}, 422, '"return_scores" must be true or false, got 2'),
        ({"queries": ["a"], "return_scores": None}, 422, '"return_scores" must be true or false, got None'),
        ({"queries": ["a"], "top_k": 3}, 422, "unknown fields ['top_k']"),
        ({"queries": ["a"] * 10_000}, 413, "longer than 20000 bytes"),
    ],
)
def test_a_bad_request_names_what_is_wrong(plain, body, status, detail):
    got_status, answer, _ = post(plain, body)
    assert got_status == status and list(answer) == ["detail"] and detail in answer["detail"]
    assert len(answer["detail"]) < 300


def test_ten_thousand_queries_are_refused_by_default(index):
    with serving(open_retriever(*index)) as url:
        status, answer, _ = post(url, {"queries": ["London"] * 10_000})
        assert (status, "10000 queries, at most 4096" in answer["detail"]) == (422, True)
        client = RetrieverClient(url, cached_queries=0)
        client.connect()
        found = client.search([f"London {n}" for n in range(5000)], 1)  # the client asks twice
        assert len(found) == 5000 and all(len(passages) == 1 for passages in found)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", "/x", 404), ("GET", "/retrieve", 405)]
)
def test_other_paths_and_methods_are_json_errors(plain, method, path, status):
    response = urllib3.request(method, plain + path, retries=False)
    assert response.status == status and list(response.json()) == ["detail"]


def test_info_and_health(plain):
    limits = asdict(Limits(max_queries=100, max_body_bytes=20_000))
    assert urllib3.request("GET", f"{plain}/info").json() == {"index": asdict(INFO), "limits": limits}
    assert urllib3.request("GET", f"{plain}/health").json() == {"status": "ok"}


def test_metrics_count_requests_queries_and_batches(plain):
    def values():
        text = urllib3.request("GET", f"{plain}/metrics").data.decode()
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    names = {
        'retriever_requests_total{status="200"}': 1, 'retriever_requests_total{status="422"}': 1,
        "retriever_queries_total": 2, "retriever_batches_total": 1, "retriever_request_seconds_count": 1,
    }  # fmt: skip
    before = values()
    post(plain, {"queries": ["a", "b"]})
    post(plain, {"queries": [7]})
    after = values()
    assert {name: float(after[name]) - float(before.get(name, 0)) for name in names} == names


def test_a_token_guards_all_but_health():
    with serving(DictRetriever({"a": [PARIS]}), token="sécret") as url:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sécret".encode()}):
            assert post(url, {"queries": ["a"]}, headers)[0] == 401
        for path, status in (("/health", 200), ("/info", 401), ("/metrics", 401)):
            assert urllib3.request("GET", url + path).status == status
        client = RetrieverClient(url, token="sécret")
        client.connect()
        assert client.search(["a"], 1) == [[PARIS]]
        sent = "bearer  sécret".encode()  # the name of the scheme has no case
        assert post(url, {"queries": ["a"]}, {"Authorization": sent})[0] == 401  # UTF-8, headers are Latin-1
        assert post(url, {"queries": ["a"]}, {"Authorization": sent.decode()})[0] == 200
        with pytest.raises(RetrieverError, match="HTTP 401.*set retriever.token_env"):
            RetrieverClient(url).search(["a"], 1)


# batches


def test_requests_that_wait_are_searched_together_each_query_once():
    slow = SlowRetriever()
    with serving(slow, Limits(max_batch=5)) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, url, {"queries": ["a"], "topk": 2})
        slow.wait_for_calls(1)
        same = [pool.submit(post, url, {"queries": [name, "z"], "topk": 2}) for name in "bc"]
        other = pool.submit(post, url, {"queries": ["d"], "topk": 1})
        time.sleep(0.3)
        slow.gate.set()
        for future, names, k in ((first, "a", 2), (same[0], "bz", 2), (same[1], "cz", 2), (other, "d", 1)):
            status, answer, _ = future.result()
            assert status == 200
            assert [[item["id"] for item in found] for found in answer["result"]] == [
                [f"{name}-{n}" for n in range(k)] for name in names
            ]
    assert [sorted(call) for call in slow.calls] == [["a"], ["b", "c", "z"], ["d"]] or [
        sorted(call) for call in slow.calls
    ] == [["a"], ["d"], ["b", "c", "z"]]
    assert sorted(slow.ks) == [1, 2, 2]


def test_a_batch_has_at_most_max_batch_queries_and_a_request_is_never_split():
    slow = SlowRetriever()
    slow.gate.set()

    async def search():
        batcher = Batcher(slow, Limits(max_batch=3, batch_wait_s=0.01))
        requests = [batcher.search(queries, 1) for queries in (["a", "b"], ["c"], ["d", "e"], ["f", "g", "h", "i"])]
        answers = asyncio.gather(*requests)
        running = asyncio.create_task(batcher.run())
        found = await answers
        running.cancel()
        return found

    found = asyncio.run(search())
    assert slow.calls == [["a", "b", "c"], ["d", "e"], ["f", "g", "h", "i"]]
    assert [[passages[0].text for passages in one] for one in found] == [list("ab"), ["c"], list("de"), list("fghi")]


def test_a_batch_has_at_most_max_passages():
    finder = SlowRetriever()
    finder.gate.set()

    async def search():
        batcher = Batcher(finder, Limits(max_topk=6, max_passages=6, batch_wait_s=0.01))
        answers = asyncio.gather(*[batcher.search([query], 3) for query in "abc"])
        running = asyncio.create_task(batcher.run())
        await answers
        running.cancel()

    asyncio.run(search())
    assert finder.calls == [["a", "b"], ["c"]]


def test_a_batch_finds_what_single_requests_find(index):
    words = ["Ada", "London", "Tokyo", "city", "Mars", "born"]
    queries = [f"{one} {other}" for one in words for other in words]
    alone = open_retriever(*index)
    expected = [alone.search([query], 3)[0] for query in queries]
    with serving(open_retriever(*index), Limits(batch_wait_s=0.02)) as url, ThreadPoolExecutor(12) as pool:
        client = RetrieverClient(url, cached_queries=0)
        found = list(pool.map(lambda query: client.search([query], 3)[0], queries))
    for got, wanted in zip(found, expected, strict=True):
        assert [(p.id, p.title, p.text) for p in got] == [(p.id, p.title, p.text) for p in wanted]
        assert [p.score for p in got] == pytest.approx([p.score for p in wanted], abs=1e-6)


def test_a_failed_search_fails_only_its_own_request(caplog):
    slow = SlowRetriever()
    with serving(slow) as url, ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, url, {"queries": ["a"]})
        slow.wait_for_calls(1)
        others = [pool.submit(post, url, {"queries": [name]}) for name in ("b", "bad", "c")]
        time.sleep(0.3)
        slow.gate.set()
        assert [future.result()[0] for future in (first, *others)] == [200, 200, 500, 200]
        assert others[1].result()[1] == {"detail": "the search failed (RuntimeError); see the server's log"}
    assert "a fault of the index" in caplog.text


def test_too_much_waiting_is_refused_with_a_time_to_come_again(monkeypatch):
    slow = SlowRetriever()
    with serving(slow, Limits(max_waiting=2)) as url, ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, url, {"queries": ["a"]})
        slow.wait_for_calls(1)
        waiting = pool.submit(post, url, {"queries": ["b", "c"]})
        time.sleep(0.3)
        status, answer, headers = post(url, {"queries": ["d"]})
        assert (status, headers["Retry-After"]) == (503, "1") and "come again later" in answer["detail"]
        client = pool.submit(RetrieverClient(url).search, ["e"], 1)
        time.sleep(0.3)
        slow.gate.set()
        assert (first.result()[0], waiting.result()[0]) == (200, 200)
        assert client.result()[0][0].text == "e"  # it came again


def test_requests_in_flight_are_answered_when_the_server_stops():
    slow = SlowRetriever()
    with ThreadPoolExecutor(2) as pool:
        with serving(slow) as url:
            one, two = pool.submit(post, url, {"queries": ["a"]}), pool.submit(post, url, {"queries": ["b"]})
            slow.wait_for_calls(1)
            time.sleep(0.2)
            threading.Timer(0.5, slow.gate.set).start()
        assert one.result()[0] == two.result()[0] == 200


# client and server


def test_the_client_learns_and_checks_what_is_served(index):
    service = open_retriever(*index)
    corpus_id = service.info().corpus_id
    with serving(service, Limits(max_topk=5, max_query_chars=2000)) as url:
        client = RetrieverClient(url)
        client.connect(top_k=5, encoder="hashed", corpus_id=corpus_id[:12])
        assert client.info() == service.info()
        for wanted, message in (
            ({"top_k": 6}, r"takes at most 5, but retriever.top_k = 6.*--max-topk 6"),
            ({"encoder": "e5"}, r"built with the encoder 'hashed dim=256.*retriever.encoder is 'e5'"),
            ({"encoder": {"name": "hashed", "dim": 512}}, r"'hashed dim=256.*retriever.encoder is .*512"),
            ({"corpus_id": "f00d"}, f"corpus of sha256 {corpus_id}, retriever.corpus_id is f00d"),
        ):
            with pytest.raises(RetrieverError, match=message):
                client.connect(**wanted)
        with pytest.raises(RetrieverError, match="at most 2000, but retriever.max_query_chars = 2001"):
            RetrieverClient(url, max_query_chars=2001).connect()


@pytest.mark.parametrize(
    ("asked", "accepted"),
    [
        ("intfloat/e5 small", True),
        ("small", False),  # part of a folder's name
        ({"name": "e5 small/", "pooling": "mean", "device": "cpu"}, True),
        ({"name": "e5 small", "pooling": "cls"}, False),
        ({"name": "e5 small", "revision": "x"}, False),
        (None, True),
    ],
)
def test_the_settings_of_a_servers_encoder_are_compared(asked, accepted):
    settings = {"name": "/my models/e5 small", "pooling": "mean", "query_prefix": "query: "}
    served = DictRetriever({})
    served.info = lambda: IndexInfo("none", 2, "a model", 0, "flat", settings)
    with serving(served) as url:
        client = RetrieverClient(url)
        if accepted:
            client.connect(encoder=asked)
            assert client.info().encoder_settings == settings
        else:
            with pytest.raises(RetrieverError, match="built with the encoder 'a model'"):
                client.connect(encoder=asked)


def test_a_server_that_compares_no_vectors_has_no_encoder(plain):
    with pytest.raises(RetrieverError, match="built with the encoder 'dict', retriever.encoder is 'hashed'"):
        RetrieverClient(plain).connect(encoder="hashed")


def test_replicas_must_serve_the_same_index():
    one, other = DictRetriever({}), DictRetriever({"a": [PARIS]})
    with serving(one) as first, serving(other) as second, pytest.raises(RetrieverError, match="serves another index"):
        RetrieverClient([first, second]).connect()


def test_another_index_after_a_restart_is_an_error(monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.01)
    with serving(DictRetriever({"a": [PARIS]})) as url:
        client = RetrieverClient(url, cached_queries=0)
        assert client.search(["a"], 1) == [[PARIS]]
    with serving(DictRetriever({"a": [PARIS], "b": []}), port=int(url.rsplit(":", 1)[1])):
        with pytest.raises(RetrieverError, match="serves another index than before.*also after a restart"):
            client.search(["a"], 1)


def test_searches_go_on_while_the_server_is_restarted(index, monkeypatch):
    monkeypatch.setattr(retriever.client, "FIRST_PAUSE_S", 0.02)
    service = open_retriever(*index)
    queries = [f"London Ada {n}" for n in range(30)]
    expected = [service.search([query], 3) for query in queries]
    found, asked = [], threading.Semaphore(0)

    def search(url):
        client = RetrieverClient(url)
        client.connect()
        for query in queries:
            found.append(client.search([query], 3))
            asked.release()
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        with serving(open_retriever(*index)) as url:
            done = pool.submit(search, url)
            for _ in range(10):
                asked.acquire()
        time.sleep(0.2)
        assert not done.done()
        with serving(open_retriever(*index), port=int(url.rsplit(":", 1)[1])):
            done.result()
    assert found == expected


# the command


def command(index, *arguments):
    return [sys.executable, "-m", "retriever.server", "--corpus", str(index[0]), "--index", str(index[1]), *arguments]


def run_main(index, *arguments):
    return main(command(index, *arguments)[3:])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_of_ones_own_answers_quietly_and_stops(index, capfd):
    process, url = start_server(*index, topk=1)
    client = RetrieverClient(url)
    client.connect(top_k=3)
    assert client.search(["Ada London", "Mars"], 3) == open_retriever(*index).search(["Ada London", "Mars"], 3)
    assert post(url, {"queries": ["x" * 5000]})[0] == 422
    stop_server(process)
    assert process.returncode in (0, -signal.SIGTERM) and capfd.readouterr() == ("", "")
    with pytest.raises(RetrieverError, match="cannot connect"):
        RetrieverClient(url, timeout_s=0.2).search(["a"], 1)


def test_a_server_of_ones_own_ends_with_a_killed_parent(index):
    script = (
        "import sys, time; from retriever.client import start_server; "
        "process, url = start_server(*sys.argv[1:]); print(process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, *map(str, index)], cwd=ROOT, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not alive(pid))


def test_a_server_ends_with_its_parent_while_a_child_of_that_holds_the_pipe(index):
    script = (
        "import subprocess, sys, time; from retriever.client import start_server; "
        "process, url = start_server(*sys.argv[1:]); "
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[process.stdin.fileno()], stdout=subprocess.DEVNULL); "
        "print(process.pid, child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, *map(str, index)], cwd=ROOT, stdout=subprocess.PIPE)
    pid, child = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.communicate()
        wait_until(lambda: not alive(pid))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_server_stops_while_its_pipe_is_held(index):
    process, _ = start_server(*index)
    held = os.dup(process.stdin.fileno())  # as a forked child does
    stop_server(process)
    os.close(held)
    assert process.returncode in (0, -signal.SIGTERM)


def test_a_server_that_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(retriever.client, "STOP_S", 0.2)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    stop_server(process)
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_cannot_start_says_why(index, tmp_path, capfd):
    with pytest.raises(RetrieverError, match="ended with status 2; its error is printed above"):
        start_server(tmp_path / "none.jsonl", index[1])
    assert "none.jsonl: cannot read the corpus" in capfd.readouterr().err


def test_workers_share_the_port_and_add_up_their_metrics(index):
    environment = os.environ | {"SECRET": "s"}
    arguments = ("--port", "0", "--workers", "2", "--token-env", "SECRET")
    server = subprocess.Popen(command(index, *arguments), cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    try:
        urls = [server.stdout.readline().decode().strip() for _ in range(2)]
        assert urls[0] == urls[1] != ""
        expected = open_retriever(*index).search(["Ada London"], 3)
        for _ in range(20):  # a connection each
            assert RetrieverClient(urls[0], token="s", cached_queries=0).search(["Ada London"], 3) == expected
        metrics = urllib3.request("GET", f"{urls[0]}/metrics", headers={"Authorization": "Bearer s"}).data.decode()
        assert "retriever_queries_total 20.0" in metrics
        workers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        workers = [pid for pid in workers if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
    finally:
        server.kill()  # the workers end although nobody tells them
        server.communicate()
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_workers_that_cannot_open_the_index_end_the_server(index, tmp_path):
    server = command((tmp_path / "none.jsonl", index[1]), "--port", "0", "--workers", "2")
    ended = subprocess.run(server, cwd=ROOT, capture_output=True, timeout=60)
    assert ended.returncode == 2 and b"none.jsonl: cannot read the corpus" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-env", "NO_SUCH_VARIABLE"], "--token-env NO_SUCH_VARIABLE: this environment variable is not set"),
        (["--workers", "0"], "--workers and --threads must be at least 1"),
        (["--topk", "0"], "topk must be positive, got 0"),
        (["--topk", "9", "--max-topk", "8"], "topk = 9 is more than max_topk = 8"),
        (["--max-topk", "9", "--max-passages", "8"], "max_topk = 9 is more than max_passages = 8"),
        (["--port", "70000"], "cannot listen on 127.0.0.1, port 70000"),
    ],
)
def test_wrong_options_are_named(index, capsys, arguments, message):
    assert run_main(index, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named(index, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_main(index, "--port", str(port)) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_another_server_took_meanwhile_is_named(index, capsys, monkeypatch, tmp_path, workers):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with bind("127.0.0.1", port) as faster:
            faster.listen()
            monkeypatch.setattr(retriever.server, "bind", lambda host, port: listener)
            assert run_main(index, "--workers", workers) == 2
    out, error = capsys.readouterr()
    assert out == "" and f"cannot listen on 127.0.0.1, port {port}" in error


def test_a_worker_that_fails_in_any_way_is_not_started_again(monkeypatch, capsys):
    def fail(settings):
        raise OSError("no such device")

    monkeypatch.setattr(retriever.server, "open_app", fail)
    monkeypatch.setattr(retriever.server, "_stop_after", lambda event: None)
    monkeypatch.setattr(retriever.server.multiprocessing, "parent_process", lambda: SimpleNamespace(sentinel=0))
    with pytest.raises(SystemExit) as ended:
        open_app_in_worker(None)
    assert ended.value.code == 3 and "OSError: no such device" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["ключ", "hidden\nb", "hidden "])
def test_a_token_that_no_header_can_hold_is_refused(index, capsys, monkeypatch, token):
    monkeypatch.setenv("SECRET", token)
    assert run_main(index, "--port", "0", "--token-env", "SECRET") == 2
    error = capsys.readouterr().err
    assert "--token-env SECRET: its token cannot be sent" in error and token not in error
