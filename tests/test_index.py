"""Kinds of indexes, builds that are stopped and continued, merged from processes or taken from other indexes."""

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

import retriever.index
from retriever.build import main as build_main
from retriever.corpus import Corpus, file_fingerprint
from retriever.encoder import HashedEncoder
from retriever.index import KINDS, IndexSpec, adopt_vectors, build_index, load_index, shard_vectors
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
    with pytest.raises(ValueError, match="effort of a search must be at least 1, got 0"):
        open_retriever(corpus_path, tmp_path / "index", effort=0)


def test_info_tells_how_much_is_searched_and_how_it_is_held(corpus_path, tmp_path, monkeypatch):
    for spec in (IndexSpec("ivf_flat", lists=8, probes=1), IndexSpec("hnsw"), IndexSpec("flat")):
        build_index(corpus_path, tmp_path / spec.kind, HashedEncoder(dim=32), spec=spec)

    def label(kind, **options):
        return open_retriever(corpus_path, tmp_path / kind, **options).info().index_type

    assert [label("ivf_flat", effort=n) for n in (None, 4, 99)] == [f"ivf_flat lists=8 probes={n}" for n in (1, 4, 8)]
    assert [label("hnsw", effort=n) for n in (None, 50)] == [f"hnsw links=32 candidates={n}" for n in (128, 50)]
    monkeypatch.setattr("retriever.service._gpus", lambda: ["cpu"])
    assert label("flat", effort=3) == "flat" and label("flat", gpu=True) == "flat in float16"


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
    (tmp_path / ".index.building.0.old").mkdir()  # killed while it removed what it has replaced
    build_index(corpus_path, tmp_path / "index", HashedEncoder(dim=64), shard_rows=100, overwrite=True)
    assert load_index(tmp_path / "index")[0].vectors.d == 64
    assert names(tmp_path) == ["corpus.jsonl", "index"]


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
    assert sum(calls) == 32  # only the sample that is compared
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
    with pytest.raises(RetrieverError, match="no random access; unpack it with: gunzip --stdout .*corpus.jsonl.gz"):
        Corpus(packed)
    cache = tmp_path / "cache"
    cache.mkdir()
    corpus = Corpus(packed, cache_dir=cache)
    assert (corpus.corpus_id, len(corpus)) == (Corpus(corpus_path).corpus_id, 325)
    assert corpus[324].contents == CONTENTS[324]
    unpacked = cache / f"corpus.{file_fingerprint(packed)}.jsonl"
    made = unpacked.stat().st_ino
    (cache / "corpus.jsonl").write_text("not ours")
    assert Corpus(packed, cache_dir=cache)[0].id == "p0" and unpacked.stat().st_ino == made

    before = packed.stat()
    packed.write_bytes(gzip.compress(corpus_path.read_bytes().replace(b"p324", b"q324")))
    os.utime(packed, ns=(before.st_atime_ns, before.st_mtime_ns))  # told apart by what it holds
    (cache / ".corpus.jsonl.part").write_bytes(b"killed")
    assert Corpus(packed, cache_dir=cache)[324].id == "q324"
    now = f"corpus.{file_fingerprint(packed)}.jsonl"
    packed.write_bytes(packed.read_bytes()[:500])
    with pytest.raises(RetrieverError, match="corpus.jsonl.gz: cut or damaged gzip file"):
        Corpus(packed, cache_dir=cache)
    assert names(cache) == sorted([now, "corpus.jsonl", "corpus.offsets.npy"])
    assert (cache / "corpus.jsonl").read_text() == "not ours"


def test_processes_unpack_a_corpus_once(corpus_path, tmp_path, monkeypatch):
    packed = tmp_path / "corpus.jsonl.GZ"
    packed.write_bytes(gzip.compress(corpus_path.read_bytes()))
    opened = []
    unpack = gzip.open
    monkeypatch.setattr(gzip, "open", lambda path: opened.append(path) or time.sleep(0.2) or unpack(path))
    with ThreadPoolExecutor(4) as pool:
        assert [len(c) for c in pool.map(lambda _: Corpus(packed, cache_dir=tmp_path), range(4))] == [325] * 4
    assert len(opened) == 1


def test_a_folder_that_cannot_be_written_is_named(corpus_path, tmp_path):
    packed, no_folder = tmp_path / "corpus.jsonl.gz", tmp_path / "file"
    packed.write_bytes(gzip.compress(corpus_path.read_bytes()))
    no_folder.write_text("")
    with pytest.raises(RetrieverError, match=r"gz: cannot be unpacked into .*/file \(.*unpack it with: gunzip"):
        Corpus(packed, cache_dir=no_folder)
    with pytest.raises(RetrieverError, match="file/index: no index can be built here .File exists.; name a folder"):
        open_retriever(corpus_path, no_folder / "index")


@pytest.mark.parametrize("kind", ["dense", "hybrid", "bm25"])
def test_overwrite_removes_no_file_of_others(corpus_path, tmp_path, kind, capsys):
    command = ["--corpus", str(corpus_path), "--dim", "32", "--overwrite", "--kind", kind, "--out"]
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "meta.json").write_text('{"name": "mine"}')
    assert build_main([*command, str(foreign)]) == 2
    assert "model exists and is not an index (meta.json): give another" in capsys.readouterr().err
    assert names(foreign) == ["meta.json"]

    mixed = tmp_path / "index"
    build_index(corpus_path, mixed, HashedEncoder(dim=32))
    (mixed / "notes.txt").write_text("mine")
    if kind != "bm25":  # which removes no vectors
        assert build_main([*command, str(mixed)]) == 2
        assert "index holds files that are no part of its index (notes.txt): give" in capsys.readouterr().err
        (mixed / "notes.txt").unlink()
    assert build_main([*command, str(mixed)]) == 0
    assert load_index(mixed)[1].dim == 32

    own = write_corpus(tmp_path / "data.jsonl", CONTENTS)
    (tmp_path / "data").mkdir()
    own = own.rename(tmp_path / "data" / "corpus.jsonl")
    assert build_main([*command, str(tmp_path / "data")]) == 2
    assert "data exists and is not an index (corpus.jsonl)" in capsys.readouterr().err
    assert len(Corpus(own)) == 325


def test_numbers_that_build_nothing_are_refused(corpus_path, tmp_path, capsys):
    for option in ("--shard-rows", "--batch-size"):
        for number in ("0", "-5"):
            assert build_main(["--corpus", str(corpus_path), "--out", str(tmp_path / "index"), option, number]) == 2
            assert f"{option[2:].replace('-', '_')}" in capsys.readouterr().err
    assert names(tmp_path) == ["corpus.jsonl"]


class Letters(HashedEncoder):
    """Passages by the letters that they have: rows of a corpus are much alike, as with E5."""

    def encode_passages(self, contents):
        vectors = np.array([[1.0 + text.count(chr(97 + n)) for n in range(32)] for text in contents], np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["flat", "ivf_flat", "ivf_pq", "hnsw"])
def test_a_bare_index_of_rows_in_another_order_is_refused(corpus_path, tmp_path, kind):
    encoder, spec = Letters(dim=32), IndexSpec(kind, lists=4 if kind.startswith("ivf") else 0)
    path = tmp_path / "bare.index"
    build_index(corpus_path, tmp_path / "index", encoder, spec=spec)
    (tmp_path / "index" / "index.faiss").rename(path)
    index = adopt_vectors(path, Corpus(corpus_path), encoder)
    queries = encoder.encode_passages(CONTENTS[:3])
    assert index.vectors.search(queries, 1)[1].shape == (3, 1)
    if kind == "ivf_flat":
        assert index.meta.index_type == "IndexIVFFlat lists=4 probes=1"
    shifted = write_corpus(tmp_path / "shifted.jsonl", [*CONTENTS[:200], *CONTENTS[201:], '"New"\nnew text'])
    with pytest.raises(RetrieverError, match=r"not those of this corpus by this encoder \(cosine 0.* in row"):
        adopt_vectors(path, Corpus(shifted), encoder)


def test_a_bare_index_of_slightly_other_settings_is_refused(corpus_path, tmp_path):
    class Near(Letters):
        shift = 0.06

        def encode_passages(self, contents):
            vectors = super().encode_passages(contents)
            vectors[:, 0] += self.shift
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    flat = faiss.IndexFlatIP(32)
    flat.add(Letters(dim=32).encode_passages(CONTENTS))
    faiss.write_index(flat, str(tmp_path / "bare.index"))
    with pytest.raises(RetrieverError, match=r"cosine 0\.99\d in row \d+, 0\.99[78]\d in the middle"):
        adopt_vectors(tmp_path / "bare.index", Corpus(corpus_path), Near(dim=32))
    Near.shift = 0.01
    adopt_vectors(tmp_path / "bare.index", Corpus(corpus_path), Near(dim=32))


def test_an_index_with_ids_of_its_own_is_refused(corpus_path, tmp_path):
    encoder = Letters(dim=32)
    vectors = faiss.IndexIDMap(faiss.IndexFlatIP(32))
    vectors.add_with_ids(encoder.encode_passages(CONTENTS), np.arange(325)[::-1].copy())
    faiss.write_index(vectors, str(tmp_path / "map.index"))
    ivf = IndexSpec("ivf_flat", lists=2).make(32)
    ivf.train(encoder.encode_passages(CONTENTS))
    ivf.add_with_ids(encoder.encode_passages(CONTENTS), np.arange(325) + 7)
    faiss.write_index(ivf, str(tmp_path / "ivf.index"))
    for name in ("map.index", "ivf.index"):
        with pytest.raises(RetrieverError, match="FAISS reads none of its vectors by row"):
            adopt_vectors(tmp_path / name, Corpus(corpus_path), encoder)


def test_inverted_lists_are_taken_over_by_another_kind(corpus_path, tmp_path):
    build_index(corpus_path, tmp_path / "ivf", HashedEncoder(dim=32), spec=IndexSpec("ivf_flat", lists=4))
    command = ["--corpus", str(corpus_path), "--dim", "32", "--out", str(tmp_path / "flat"), "--batch-size", "50"]
    assert build_main([*command, "--vectors", str(tmp_path / "ivf")]) == 0
    index, encoder = load_index(tmp_path / "flat")
    np.testing.assert_array_equal(index.vectors.reconstruct_n(0, 325), encoder.encode_passages(CONTENTS))


def test_recall_counts_gold_and_exact_neighbours(corpus_path, tmp_path, capsys):
    assert recall_at([["a", "b"], [], ["c"]], [["b", "z"], ["a"], ["c"]], 2) == 0.5
    assert recall_at([["a", "b"]], [["b"]], 1) == 0.0
    for kind in ("flat", "sq8"):
        build_index(corpus_path, tmp_path / kind, HashedEncoder(dim=256), spec=IndexSpec(kind))
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": text.split('"')[1], "supporting_ids": [f"p{n}", "p0"]} for n, text in enumerate(CONTENTS)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    command = ["--corpus", str(corpus_path), "--index", str(tmp_path / "sq8"), "--exact", str(tmp_path / "flat")]
    assert recall_main([*command, "--questions", str(questions), "--k", "1", "5"]) == 0
    out = capsys.readouterr().out
    assert "sq8: 325 queries" in out and "@5 0.5" in out
    assert recall_main([*command, "--queries", "20", "--k", "1"]) == 0
    assert "sq8: 20 queries" in capsys.readouterr().out
    for row, message in (
        ('{"question": "x"}', 'line 2: a row needs a string "question" and "supporting_ids", a list of'),
        ('{"question": "x", "supporting_ids": "p1"}', "line 2: a row needs"),
        ('{"question": "x", "supporting_ids": ["p1", 2]}', "line 2: a row needs"),
        ('["x"]', "line 2: a row needs"),
        ("{x", "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ('{"question": "x", "supporting_ids": ["p1", "q1"]}', ": 1 of the supporting_ids are no ids of .* q1; give"),
    ):
        questions.write_text(f"\n{row}\n")
        assert recall_main([*command, "--questions", str(questions)]) == 2
        assert re.search(f"questions.jsonl.*{message}", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        recall_main([*command, "--k", "0"])
    assert "must be at least 1" in capsys.readouterr().err
    swapped = ["--corpus", str(corpus_path), "--index", str(tmp_path / "flat"), "--exact", str(tmp_path / "sq8")]
    assert recall_main(swapped) == 2
    assert "--exact needs a flat index, this one is sq8" in capsys.readouterr().err
