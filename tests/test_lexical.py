"""BM25 against a scalar loop, fused ranks, and the order that a cross-encoder gives."""

import json
import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bm25s import BM25
from transformers import BertConfig, BertForSequenceClassification

from retriever.build import main as build_main
from retriever.corpus import Corpus
from retriever.fusion import HybridRetriever, reciprocal_rank_fusion
from retriever.lexical import LexicalRetriever, build_lexical
from retriever.rerank import RerankingRetriever
from retriever.service import open_retriever
from retriever.types import Passage, RetrieverError
from tests.test_pretrained import SIZES, WORDS, make_model
from tests.tiny import DictRetriever

CONTENTS = [
    '"Ada Lovelace"\nAda Lovelace was born in London , London in England .',
    '"London"\nLondon is governed by Ada Byron . It is old .',
    "Tokyo\nTokyo is a city in Japan .",
    "A passage of one line about Mars .",
    '"Ada"\nA language .',
]


@pytest.fixture
def corpus_path(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", CONTENTS)


def write_corpus(path, contents):
    path.write_text("".join(json.dumps({"id": f"p{n}", "contents": text}) + "\n" for n, text in enumerate(contents)))
    return path


def bm25(query, contents, k1=1.5, b=0.75):
    """Lucene's formula, one word at a time."""
    stop = {"is", "a", "in", "of", "by", "it", "was", "the", "and"}
    documents = [[w for w in re.findall(r"\b\w\w+\b", text.lower()) if w not in stop] for text in contents]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score, count = 0.0, Counter(words)
        for word in re.findall(r"\b\w\w+\b", query.lower()):
            df = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            score += idf * count[word] / (count[word] + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def test_scores_equal_a_scalar_loop(corpus_path, tmp_path):
    retriever = open_retriever(corpus_path, tmp_path / "index", kind="bm25")
    queries = ["Ada London", "the city of Tokyo in Japan", "Mars"]
    for query, found in zip(queries, retriever.search(queries, 10)):
        scores = bm25(query, CONTENTS)
        expected = sorted((row for row in range(5) if scores[row] > 0), key=lambda row: -scores[row])
        assert [passage.id for passage in found] == [f"p{row}" for row in expected]
        assert [passage.score for passage in found] == pytest.approx([scores[row] for row in expected], rel=1e-5)
    assert retriever.info().encoder == "bm25 k1=1.5 b=0.75 stopwords=english"
    assert retriever.info().index_type == "bm25" and retriever.info().passages == 5


def test_bounds_of_a_lexical_search(corpus_path, tmp_path):
    retriever = open_retriever(corpus_path, tmp_path / "index", kind="bm25", max_query_chars=10)
    assert retriever.search(["", "the of", "qqq", "\ud800", "x" * 10_000], 3) == [[]] * 5
    assert [len(found) for found in retriever.search(["Ada London", "London and Ada"], 10**9)] == [3, 2]
    assert len(retriever.search(["Ada London"], 1)[0]) == 1
    assert retriever.search([], 3) == []
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        retriever.search(["Ada"], 0)


def test_equal_scores_come_in_the_order_of_the_corpus(tmp_path):
    path = write_corpus(tmp_path / "same.jsonl", ["T\nmoon rises"] * 50 + ["T\nsun sets"])
    found = open_retriever(path, tmp_path / "index", kind="bm25").search(["moon"], 7)[0]
    assert [passage.id for passage in found] == [f"p{n}" for n in range(7)]


def test_lexical_index_of_another_corpus_or_damaged_is_refused(corpus_path, tmp_path):
    build_lexical(corpus_path, tmp_path / "index")
    with pytest.raises(FileExistsError, match="already holds a lexical index"):
        build_lexical(corpus_path, tmp_path / "index")
    other = write_corpus(tmp_path / "other.jsonl", CONTENTS[:4])
    with pytest.raises(RetrieverError, match=r"was built from another corpus \(5 passages, .*this file has 4"):
        LexicalRetriever(Corpus(other), tmp_path / "index")
    with pytest.raises(RetrieverError, match=r"no lexical index here.*retriever\.build --kind bm25"):
        LexicalRetriever(Corpus(corpus_path), tmp_path / "nowhere")
    others = write_corpus(tmp_path / "mars.jsonl", [text.replace("Tokyo", "Kyoto") for text in CONTENTS])
    build_lexical(others, tmp_path / "others")
    for name in ("data.csc.index.npy", "indptr.csc.index.npy", "vocab.index.json", "meta.json"):
        path = tmp_path / "index" / "bm25" / name
        whole, other = path.read_bytes(), (tmp_path / "others" / "bm25" / name).read_bytes()
        for damage in [whole[: len(whole) // 2], b"", *([other] if name == "vocab.index.json" else [])]:
            path.write_bytes(damage)
            with pytest.raises(RetrieverError, match="bm25: damaged"):
                LexicalRetriever(Corpus(corpus_path), tmp_path / "index")
        path.write_bytes(whole)
    assert LexicalRetriever(Corpus(corpus_path), tmp_path / "index").search(["Mars"], 1)[0][0].id == "p3"


def test_a_lexical_build_removes_no_file_of_others(corpus_path, tmp_path):
    (tmp_path / "index" / "bm25").mkdir(parents=True)
    notes = tmp_path / "index" / "bm25" / "meta.json"
    notes.write_text('{"mine": 1}')
    with pytest.raises(FileExistsError, match=r"bm25 holds files that are no part of a lexical index \(meta.json\)"):
        build_lexical(corpus_path, tmp_path / "index", overwrite=True)
    assert notes.read_text() == '{"mine": 1}'
    notes.unlink()
    build_lexical(corpus_path, tmp_path / "index")
    notes.with_name("notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"no part of a lexical index \(notes.txt\)"):
        build_lexical(corpus_path, tmp_path / "index", overwrite=True)
    notes.with_name("notes.txt").unlink()
    left = tmp_path / "index" / f".bm25.{'0' * 32}"
    left.mkdir()
    build_lexical(corpus_path, tmp_path / "index", overwrite=True)
    assert not left.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]

    (tmp_path / "data").mkdir()
    own = corpus_path.rename(tmp_path / "data" / "corpus.jsonl")
    with pytest.raises(RetrieverError, match=r"data exists and is not an index \(corpus.jsonl\)"):
        open_retriever(own, tmp_path / "data", kind="bm25")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["corpus.jsonl"]


def test_lexical_builds_of_one_folder_wait_for_each_other(corpus_path, tmp_path, monkeypatch):
    save, at_once, most = BM25.save, [], []

    def slow(self, *args, **options):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.2)
        save(self, *args, **options)
        at_once.pop()

    monkeypatch.setattr(BM25, "save", slow)
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build_lexical, corpus_path, tmp_path / "index") for _ in range(2)]
    assert sorted(type(build.exception()) for build in builds if build.exception()) == [FileExistsError]
    assert most == [1]


def passages(*ids):
    return [Passage(id_, f"title {id_}", "text", 1.0) for id_ in ids]


def test_ranks_are_fused_with_weights():
    fused = reciprocal_rank_fusion([passages("a", "b", "c"), passages("c", "d")], [3.0, 1.0])
    assert [passage.id for passage in fused] == ["c", "a", "b", "d"]
    # 3/63 + 1/61, 3/61, 3/62, 1/62
    expected = [0.06401249024199844, 0.04918032786885246, 0.04838709677419355, 0.016129032258064516]
    assert [passage.score for passage in fused] == pytest.approx(expected, rel=1e-12)
    assert fused[0].title == "title c"


def test_hybrid_takes_passages_that_one_side_misses():
    dense, lexical = DictRetriever({"q": passages("a", "b")}), DictRetriever({"q": passages("x"), "r": passages("y")})
    hybrid = HybridRetriever(dense, lexical, weights=(1.0, 1.0), depth=7)
    assert [[p.id for p in found] for found in hybrid.search(["q", "r", "s"], 2)] == [["a", "x"], ["y"], []]
    assert dense.calls == lexical.calls == [["q", "r", "s"]]
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
            hybrid.search(["q"], k)
    assert "ranks fused 1:1" in hybrid.info().encoder and hybrid.info().index_type == "dict + dict"


def test_hybrid_is_built_and_opened(corpus_path, tmp_path, capsys):
    command = ["--corpus", str(corpus_path), "--out", str(tmp_path / "index"), "--dim", "256", "--kind"]
    assert build_main([*command, "bm25"]) == 0  # in two steps: the second keeps what the first made
    assert build_main([*command, "dense"]) == 0
    assert "BM25, 5 passages, " in capsys.readouterr().out
    assert build_main([*command, "bm25"]) == 2
    assert "already holds a lexical index" in capsys.readouterr().err
    hybrid = open_retriever(corpus_path, tmp_path / "index", kind="hybrid")
    found = hybrid.search(["birthplace of Ada Lovelace"], 3)[0]
    assert found[0].id == "p0" and found[0].score == pytest.approx((6 + 1) / 61)
    assert build_main([*command, "hybrid", "--overwrite"]) == 0
    assert open_retriever(corpus_path, tmp_path / "index", kind="hybrid").search(["Mars"], 1)[0][0].id == "p3"
    with pytest.raises(ValueError, match="dense, bm25 or hybrid, got 'sparse'"):
        open_retriever(corpus_path, tmp_path / "index", kind="sparse")


def test_a_hybrid_build_that_was_stopped_goes_on(corpus_path, tmp_path, monkeypatch, capsys):
    command = ["--corpus", str(corpus_path), "--out", str(tmp_path / "index"), "--kind", "hybrid", "--dim"]

    def stop(*args, **options):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("retriever.lexical.build_lexical", stop)
        with pytest.raises(ZeroDivisionError):
            build_main([*command, "64"])
    assert build_main([*command, "128"]) == 2  # not what was asked for
    assert "already holds an index" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("retriever.build.build_index", stop)
        assert build_main([*command, "64"]) == 0
    assert "the vectors are there already" in capsys.readouterr().err
    assert open_retriever(corpus_path, tmp_path / "index", kind="hybrid").search(["Mars"], 1)[0][0].id == "p3"
    assert build_main([*command, "64"]) == 2
    assert "already holds an index" in capsys.readouterr().err


@pytest.fixture
def cross_encoder(tmp_path):
    folder = make_model(tmp_path / "cross-encoder")
    torch.manual_seed(3)
    config = BertConfig(**SIZES, vocab_size=4 + len(WORDS), num_labels=1, initializer_range=0.5)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_cross_encoder_orders_the_candidates(cross_encoder):
    found = [Passage(str(n), f'"{word}"', f"{word} is old {'far ' * n}", 0.0) for n, word in enumerate(WORDS[3:9])]
    base = DictRetriever({"Ada in London": found, "Mars": found[:2]})
    reranked = RerankingRetriever(base, cross_encoder, candidates=4)
    results = reranked.search(["Ada in London", "nothing", "Mars"], 3)
    assert [len(passages) for passages in results] == [3, 0, 2]

    model = BertForSequenceClassification.from_pretrained(cross_encoder, dtype=torch.float64).eval()
    tokenizer = reranked._tokenizer
    with torch.no_grad():
        ids = [tokenizer("Ada in London", f"{p.title[1:-1]} {p.text}".strip())["input_ids"] for p in found[:4]]
        logits = [float(model(torch.tensor([row])).logits) for row in ids]
    best = sorted(range(4), key=lambda n: -logits[n])[:3]
    assert [passage.id for passage in results[0]] == [str(n) for n in best]
    assert [passage.score for passage in results[0]] == pytest.approx([logits[n] for n in best], abs=1e-5)
    assert "best 4 reranked by" in reranked.info().encoder
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
            reranked.search(["Mars"], k)


def test_a_long_query_is_cut_for_the_cross_encoder(cross_encoder):
    query = "Ada in London " * 100
    reranked = RerankingRetriever(DictRetriever({query: passages("a", "b"), "Mars": passages("c")}), cross_encoder)
    found = reranked.search([query, "Mars"], 2)
    assert sorted(passage.id for passage in found[0]) == ["a", "b"]
    assert found[1][0].score == pytest.approx(reranked.search(["Mars"], 2)[0][0].score, abs=1e-5)


def test_a_model_that_gives_no_score_is_refused(tmp_path, cross_encoder):
    with pytest.raises(RetrieverError, match="no cross-encoder with one score"):
        RerankingRetriever(DictRetriever({}), make_model(tmp_path / "plain"))
