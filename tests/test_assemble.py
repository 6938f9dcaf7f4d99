import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sapo.assemble
from sapo.assemble import Sources, connect_retriever_in_turn
from sapo.config import load_config

FAULTS = """
import resource, torch
from sapo.assemble import keep_freed_memory
{call}
for i in range(40):  # it settles after some
    if i == 38:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is told so on Linux only")
def test_freed_memory_is_used_again_without_page_faults():
    faults = []
    for call in ("", "keep_freed_memory()"):
        command = [sys.executable, "-c", FAULTS.format(call=call)]
        faults.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    default, kept = faults
    assert kept < 100 < default


@pytest.mark.parametrize(
    ("setting", "corpus_bytes", "local_ranks", "served"),
    [
        ("auto", 10, [0, 1], False),  # a small index is opened by every rank
        ("auto", 11, [0, 1], True),
        ("auto", 11, [0, 0], False),  # one rank on each of two nodes
        ("always", 10, [0, 0], True),
        ("never", 11, [0, 1], False),
    ],
)
def test_a_node_gets_a_server_when_its_ranks_share_a_large_index(
    tmp_path, monkeypatch, setting, corpus_bytes, local_ranks, served
):
    opened, started = [], []
    monkeypatch.setattr(sapo.assemble, "BUILD_AT_OPEN_BYTES", 10)
    monkeypatch.setattr(sapo.assemble, "open_retriever", lambda *a, **options: opened.append(options) or "opened")
    monkeypatch.setattr(sapo.assemble, "start_server", lambda *a, **options: started.append(options) or (None, "url"))
    monkeypatch.setattr(sapo.assemble, "connect_client", lambda config, url: f"client of {url}")
    config = load_config(Path("configs/quickstart.yaml"), [f"retriever.node_server={setting}", "retriever.threads=3"])
    corpus = tmp_path / "corpus"
    corpus.write_bytes(b"x" * corpus_bytes)

    def gather(value):
        return [(rank, value[1]) for rank in local_ranks] if isinstance(value, tuple) else [value]

    dist = SimpleNamespace(rank=0, local_rank=0, is_main=True, barrier=lambda: None, gather_objects=gather)
    retriever = connect_retriever_in_turn(config, Sources([], [], corpus, tmp_path / "index"), dist)
    assert retriever == ("client of url" if served else "opened")
    ((options,), unused) = (started, opened) if served else (opened, started)
    assert unused == [] and (options["encoder"], options["threads"], options["max_query_chars"]) == ("hashed", 3, 1000)


@pytest.mark.parametrize(("rank", "starts", "url"), [(0, True, "a"), (1, False, "a"), (2, True, "b"), (3, False, "b")])
def test_each_rank_asks_the_server_of_its_own_node(tmp_path, monkeypatch, rank, starts, url):
    """Two nodes of two ranks; the servers are a and b."""
    started = []
    monkeypatch.setattr(sapo.assemble, "start_server", lambda *a, **options: started.append(options) or (None, url))
    monkeypatch.setattr(sapo.assemble, "connect_client", lambda config, url: f"client of {url}")
    config = load_config(Path("configs/quickstart.yaml"), ["retriever.node_server=always"])
    dist = SimpleNamespace(
        rank=rank, local_rank=rank % 2, is_main=rank == 0, barrier=lambda: None,
        gather_objects=lambda value: ["a", "", "b", ""],
    )  # fmt: skip
    sources = Sources([], [], tmp_path / "corpus", tmp_path / "index")
    assert connect_retriever_in_turn(config, sources, dist) == f"client of {url}" and bool(started) == starts


def connect_alone(corpus, index, *settings):
    """Return the client of a node's server, in a run of one process."""
    config = load_config(Path("configs/quickstart.yaml"), ["retriever.node_server=always", *settings])
    dist = SimpleNamespace(
        rank=0, local_rank=0, is_main=True, barrier=lambda: None, gather_objects=lambda value: [value]
    )
    return connect_retriever_in_turn(config, Sources([], [], corpus, index), dist)


def test_a_nodes_server_takes_what_a_process_takes(tmp_path):
    """The encoder of an index that counts words is not looked at; that of others is checked where they are opened."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"Ada"\nAda Lovelace was born in London .'}) + "\n")
    client = connect_alone(corpus, tmp_path / "index", "retriever.kind=bm25", "retriever.encoder=hashed")
    assert client.info().encoder.startswith("bm25 ") and len(client.search(["London"], 1)[0]) == 1
