"""Kinds of indexes, builds that are stopped and continued, merged from processes or taken from other indexes."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest

import retriever.index
from retriever.build import main as build_main
from retriever.corpus import UNPACKED_FILE, Corpus
from retriever.encoder import HashedEncoder
from retriever.index import KINDS, IndexSpec, build_index, file_fingerprint, load_index, shard_vectors
from retriever.recall import main as recall_main
from retriever.recall import recall_at
from retriever.service import open_retriever
from retriever.types import RetrieverError

ROOT = Path(__file__).parent.parent
WORDS = [a + b for a in ("ba", "do", "fi", "gu", "he") for b in ("kla", "mro", "nti", "pvu", "sze")]
CONTENTS = [f'"{a} {b}"\n{a} {b} was born in {WORDS[12]}' for a in WORDS for b in WORDS[:13]]


@pytest.fixture
def corpus_path(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", CONTENTS)


def write_corpus(path, contents):
    path.write_text("".join(json.dumps({"id": f"p{n}", "contents": text}) + "\n" for n, text in enumerate(contents)))
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "least", "tolerance", "bytes_per_number"),
    [
        ("flat", 1.0, 1e-5, 4),
        ("fp16", 1.0, 2e-3, 2),
        ("sq8", 1.0, 0.02, 1),
        ("ivf_flat", 1.0, 1e-5, 4),
        ("ivf_sq8", 1.0, 0.02, 1),
        ("ivf_pq", 0.8, 0.3, 0.25),
        ("hnsw", 0.97, 1e-5, 4),
    ],
)
def test_each_kind_finds_what_exact_search_finds(corpus_path, tmp_path, kind, least, tolerance, bytes_per_number):
    spec = IndexSpec(kind, lists=8 if kind.startswith("ivf") else 0, probes=8 if kind.startswith("ivf") else 0)
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=32), spec=spec)
    index, encoder = load_index(tmp_path / "index")
    queries = encoder.encode_queries([f"birthplace of {CONTENTS[row].split(chr(34))[1]}" for row in range(0, 325, 5)])
    passages = encoder.encode_passages(CONTENTS)
    exact = np.sort(queries @ passages.T, axis=1)[:, :-4:-1]  # scores: rows may tie
    scores, rows = index.vectors.search(queries, 3)
    true_scores = (queries[:, None] * passages[rows]).sum(axis=2)
    assert rows.min() >= 0
    assert (true_scores >= exact - tolerance).mean() >= least
    np.testing.assert_allclose(scores, true_scores, atol=max(tolerance, 1e-5))
    assert index.meta.index_type.split()[0] == kind
    own = 325 * 32 * bytes_per_number
    assert own <= (tmp_path / "index" / "index.faiss").stat().st_size <= own + 150_000


def test_numbers_of_an_index_follow_the_size_of_the_corpus():
    spec = IndexSpec("ivf_sq8").for_passages(21_015_324)
    assert (spec.lists, spec.probes, spec.label()) == (16384, 1024, "ivf_sq8 lists=16384 probes=1024")
    assert IndexSpec("ivf_flat").for_passages(100).lists == 2
    assert IndexSpec("ivf_flat", lists=4, probes=9).for_passages(100).probes == 4
    assert IndexSpec("hnsw").for_passages(10).label() == "hnsw links=32 candidates=128"
    with pytest.raises(ValueError, match="unknown kind of index 'ivf'; known: flat, fp16"):
        IndexSpec("ivf")
    with pytest.raises(ValueError, match="ivf_pq learns 256 codes.* for 255 take"):
        IndexSpec("ivf_pq").for_passages(255)
    with pytest.raises(ValueError, match="groups of 4 numbers"):
        IndexSpec("ivf_pq", lists=2).make(30)


def test_effort_changes_how_much_is_searched(corpus_path, tmp_path):
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=32), spec=IndexSpec("ivf_flat", lists=8, probes=1))
    queries = ["bakla dokla", "dokla fisze"]
    few, many = (open_retriever(corpus_path, tmp_path / "index", effort=n).search(queries, 325) for n in (None, 99))
    assert [len(found) for found in many] == [325, 325]
    assert all(0 < len(found) < 325 for found in few)


class Killed(HashedEncoder):
    """Kills its process after so many passages."""

    left = 250

    def encode_passages(self, contents):
        Killed.left -= len(contents)
        if Killed.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_passages(contents)


def build_killed(corpus_path, folder):
    build_index(corpus_path, folder, Killed(dim=32), batch_size=10, shard_rows=100)


def test_a_killed_build_goes_on_from_its_last_shard(corpus_path, tmp_path, monkeypatch):
    build_index(corpus_path, tmp_path / "whole", HashedEncoder(dim=32))
    process = multiprocessing.get_context("spawn").Process(target=build_killed, args=(corpus_path, tmp_path / "index"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    workshop = tmp_path / ".index.building"
    assert [path.name for path in sorted(workshop.glob("shard_*"))] == ["shard_00000.npy", "shard_00001.npy"]
    assert not (tmp_path / "index").exists()

    with pytest.raises(RetrieverError, match="stopped build with another corpus, encoder or kind of vectors"):
        build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=64), shard_rows=100)
    encoded = []
    encode = HashedEncoder.encode_passages
    monkeypatch.setattr(
        HashedEncoder, "encode_passages", lambda self, contents: encoded.append(len(contents)) or encode(self, contents)
    )
    seen = []
    build_index(
        corpus_path, tmp_path / "index", HashedEncoder(dim=32), shard_rows=100, progress=lambda *n: seen.append(n)
    )
    assert sum(encoded) == 125 and seen == [(300, 325), (325, 325)]
    whole, again = (tmp_path / name / "index.faiss" for name in ("whole", "index"))
    assert whole.read_bytes() == again.read_bytes()
    assert names(tmp_path) == ["corpus.jsonl", "index", "whole"]
    assert names(tmp_path / "index") == names(tmp_path / "whole")


def test_overwrite_drops_a_stopped_build_of_other_settings(corpus_path, tmp_path):
    class Stopped(HashedEncoder):
        def encode_passages(self, contents):
            if contents[0] == CONTENTS[200]:
                raise KeyboardInterrupt
            return super().encode_passages(contents)

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus_path, tmp_path / "index", Stopped(dim=32), batch_size=100, shard_rows=100)
    assert (tmp_path / ".index.building" / "shard_00001.npy").exists()
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=64), shard_rows=100, overwrite=True)
    assert load_index(tmp_path / "index")[0].vectors.d == 64


def test_two_processes_share_a_build(corpus_path, tmp_path):
    build_index(corpus_path, tmp_path / "one", HashedEncoder(dim=32), shard_rows=50)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "retriever.build"]
    command += ["--corpus", str(corpus_path), "--out", str(tmp_path / "two"), "--dim", "32", "--shard-rows", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("325 passages") == 1
    one, two = (tmp_path / name / "index.faiss" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert names(tmp_path) == ["corpus.jsonl", "one", "two"]


def test_vectors_of_an_index_are_taken_over_by_another_kind(corpus_path, tmp_path, monkeypatch, capsys):
    command = ["--corpus", str(corpus_path), "--dim", "32", "--out"]
    assert build_main([*command, str(tmp_path / "flat")]) == 0
    monkeypatch.setattr(retriever.index, "_SAME_VECTOR", 0.99999)
    calls = []
    encode = HashedEncoder.encode_passages
    monkeypatch.setattr(
        HashedEncoder, "encode_passages", lambda self, contents: calls.append(len(contents)) or encode(self, contents)
    )
    assert build_main([*command, str(tmp_path / "fp16"), "--index", "fp16", "--vectors", str(tmp_path / "flat")]) == 0
    assert sum(calls) == 8  # only the sample that is compared
    assert "fp16, hashed dim=32" in capsys.readouterr().out
    flat, half = (load_index(tmp_path / name)[0].vectors.reconstruct_n(0, 325) for name in ("flat", "fp16"))
    np.testing.assert_allclose(half, flat, atol=1e-3)

    other = write_corpus(tmp_path / "other.jsonl", [text[::-1] for text in CONTENTS])
    build = ["--corpus", str(other), "--dim", "32", "--out", str(tmp_path / "x"), "--vectors", str(tmp_path / "flat")]
    assert build_main(build) == 2
    assert "its vectors are not those of this corpus by this encoder (cosine" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_shards_in_float16_answer_like_one_index(corpus_path, tmp_path):
    """What runs on GPUs, with parts that lie on the CPU."""
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=32))
    index, encoder = load_index(tmp_path / "index")
    parts = shard_vectors(index.vectors, ["cpu", "cpu", "cpu"], chunk_rows=50)
    assert parts.ntotal == 325
    queries = encoder.encode_queries(["bakla bamro", "gupvu", "hesze dokla"])
    expected, rows = index.vectors.search(queries, 10)
    scores, found = parts.search(queries, 10)
    np.testing.assert_allclose(scores, expected, atol=2e-3)
    passages = encoder.encode_passages(CONTENTS)
    np.testing.assert_allclose((queries[:, None] * passages[found]).sum(2), expected, atol=2e-3)


def test_gpus_that_are_not_there_are_missed_in_words(corpus_path, tmp_path):
    if getattr(faiss, "get_num_gpus", lambda: 0)():
        pytest.skip("there are GPUs")
    with pytest.raises(RetrieverError, match="FAISS sees no GPU: install faiss-gpu .* retriever.gpu to false"):
        open_retriever(corpus_path, tmp_path / "index", gpu=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.4, 0.999])
def test_a_cut_index_is_refused(corpus_path, tmp_path, kind, part):
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=32), spec=IndexSpec(kind, lists=2))
    path = tmp_path / "index" / "index.faiss"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(RetrieverError, match="index.faiss: damaged, cut or of another build"):
        load_index(tmp_path / "index")
    with pytest.raises(RetrieverError, match="index.faiss: damaged, cut or not a FAISS index"):
        retriever.index.read_vectors(path)


def test_fingerprint_tells_files_apart(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000_000))
    first = file_fingerprint(path)
    for changed in (bytes(9_999_999), bytes(9_999_999) + b"x", b"x" + bytes(9_999_999), b""):
        path.write_bytes(changed)
        assert file_fingerprint(path) != first


def test_a_packed_corpus_is_the_same_corpus(corpus_path, tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_path.read_bytes()))
    with pytest.raises(RetrieverError, match="no random access; unpack it with: gunzip --keep .*corpus.jsonl.gz"):
        Corpus(packed)
    cache = tmp_path / "cache"
    cache.mkdir()
    corpus = Corpus(packed, cache_dir=cache)
    assert (corpus.corpus_id, len(corpus)) == (Corpus(corpus_path).corpus_id, 325)
    assert corpus[324].contents == CONTENTS[324]
    made = (cache / UNPACKED_FILE).stat().st_ino
    assert Corpus(packed, cache_dir=cache)[0].id == "p0" and (cache / UNPACKED_FILE).stat().st_ino == made

    time.sleep(0.01)
    packed.write_bytes(gzip.compress(corpus_path.read_bytes().replace(b"p324", b"q324")))
    assert Corpus(packed, cache_dir=cache)[324].id == "q324"
    packed.write_bytes(packed.read_bytes()[:500])
    with pytest.raises(RetrieverError, match="corpus.jsonl.gz: cut or damaged gzip file"):
        Corpus(packed, cache_dir=cache)
    assert names(cache) == [UNPACKED_FILE, "corpus.offsets.npy"]


def test_recall_counts_gold_and_exact_neighbours(corpus_path, tmp_path, capsys):
    assert recall_at([["a", "b"], [], ["c"]], [["b", "z"], ["a"], ["c"]], 2) == 0.5
    assert recall_at([["a", "b"]], [["b"]], 1) == 0.0
    for kind in ("flat", "sq8"):
        build_index(corpus_path, tmp_path / kind, HashedEncoder(dim=256), spec=IndexSpec(kind))
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": text.split('"')[1], "supporting_ids": [f"p{n}", "absent"]} for n, text in enumerate(CONTENTS)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    command = ["--corpus", str(corpus_path), "--index", str(tmp_path / "sq8"), "--exact", str(tmp_path / "flat")]
    assert recall_main([*command, "--questions", str(questions), "--k", "1", "5"]) == 0
    out = capsys.readouterr().out
    assert "sq8: 325 queries" in out and "@5 0.500" in out
    assert recall_main([*command, "--queries", "20", "--k", "1"]) == 0
    assert "sq8: 20 queries" in capsys.readouterr().out
    questions.write_text('{"question": "x"}\n')
    assert recall_main([*command, "--questions", str(questions)]) == 2
    assert 'questions.jsonl, line 1: a row needs "question"' in capsys.readouterr().err
    swapped = ["--corpus", str(corpus_path), "--index", str(tmp_path / "flat"), "--exact", str(tmp_path / "sq8")]
    assert recall_main(swapped) == 2
    assert "--exact needs a flat index, this one is sq8" in capsys.readouterr().err
