import gzip
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

import retriever.corpus
import retriever.service
from retriever.build import main as build_main
from retriever.corpus import OFFSETS_FILE, Corpus, Document, split_contents
from retriever.encoder import HashedEncoder, make_encoder, word_hash, words_of
from retriever.index import IndexMeta, PassageIndex, build_index, load_index
from retriever.service import NullRetriever, RetrieverService, open_retriever
from retriever.types import Passage, RetrieverError

CONTENTS = [
    '"Ada Lovelace"\nAda Lovelace was born in London .',
    '"London"\nLondon is governed by Ada Byron . London is old .',
    "Tokyo\nTokyo is a city in Japan .",
    "A passage of one line about Mars .",
]


def write_corpus(path: Path, contents: list[str]) -> Path:
    rows = [json.dumps({"id": f"p{row}", "contents": text}) for row, text in enumerate(contents)]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def corpus_path(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", CONTENTS)


@pytest.fixture
def service(corpus_path, tmp_path):
    return open_retriever(corpus_path, tmp_path / "index", encoder={"name": "hashed", "dim": 256})


def data_file(name: str) -> Path:
    folder = os.environ.get("SAPO_TEST_DATA")
    if not folder:
        pytest.skip("SAPO_TEST_DATA does not name the folder with the real data")
    return Path(folder) / name


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


# corpus


def test_rows_are_split_on_newline_only_and_read_in_any_order(tmp_path):
    contents = [
        '"Line\u2028separator"\nbefore\u2028after',
        '"Next"\nbefore\x85after\x0b\x0c\x1c',
        '"Return"\nbefore\rafter\r\nend',
        '"Last"\nno newline after me \u2029',
    ]
    rows = [json.dumps({"id": str(n), "contents": text}, ensure_ascii=False) for n, text in enumerate(contents)]
    rows[2] = rows[2].replace("before\\r", "before\r")  # also unescaped
    path = tmp_path / "corpus.jsonl"
    path.write_bytes("\n".join(rows).encode())
    corpus = Corpus(path)
    assert len(corpus) == 4
    assert [corpus[row].contents for row in (3, 0, 2, 1)] == [contents[row] for row in (3, 0, 2, 1)]
    assert corpus[1] == Document("1", '"Next"', "before\x85after\x0b\x0c\x1c")


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Paris"\nCapital of France.', '"Paris"', "Capital of France."),
        ("Citibank\nresulting in a net profit", "Citibank", "resulting in a net profit"),
        ('"""Heroes"" (album)"\nAn album.\nBy Bowie.', '"""Heroes"" (album)"', "An album.\nBy Bowie."),
        ("Only one line", "", "Only one line"),
        ('"Title only"\n', '"Title only"', ""),
        ("\nno title", "", "\nno title"),
        ("", "", ""),
    ],
)
def test_title_is_the_first_line_and_contents_round_trip(contents, title, text):
    assert split_contents(contents) == (title, text)
    assert Document("x", title, text).contents == contents


def test_other_keys_blank_lines_and_crlf_are_harmless(tmp_path):
    path = tmp_path / "corpus.jsonl"
    first, second = b'{"id": "a", "title": "T", "contents": "\\"T\\"\\nx"}', b'{"contents": "U\\ny", "id": "b"}'
    path.write_bytes(first + b"\r\n\n  \n" + second + b"\n\n")
    corpus = Corpus(path)
    assert [corpus[row] for row in range(len(corpus))] == [Document("a", '"T"', "x"), Document("b", "U", "y")]


@pytest.mark.parametrize("row", [-1, 4])
def test_row_outside_the_corpus_is_an_error(corpus_path, row):
    with pytest.raises(IndexError, match=f"row {row} of 4"):
        Corpus(corpus_path)[row]


GOOD = b'{"id": "0", "contents": "T\\nx"}\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\n \n", "no rows"),
        (GOOD + b'{"id": "1", "contents": \n', r"line 2: not valid JSON"),
        (GOOD + b'\n{"id": "1", "contents": "\xff"}\n', r"line 3: not valid JSON"),
        (GOOD + b'["1", "x"]\n', "line 2: expected a JSON object, found list"),
        (GOOD + b'{"id": "1", "text": "x"}\n', r"line 2: .*string \"contents\" but it has \['id', 'text'\]"),
        (GOOD + b'{"id": "1", "contents": null}\n', r'line 2: .*string "contents" but its type is NoneType'),
        (GOOD + b'{"contents": "x"}\n', 'line 2: .*string "id"'),
        (GOOD + b'{"id": 1, "contents": "x"}\n', r'line 2: .*string "id" but its type is int'),
        (GOOD + b'{"id": "1", "contents": "x", "z": ' + b"[" * 100_000, "line 2: not valid JSON"),
        (GOOD + b'{"id": "1\\ud83d", "contents": "x"}\n', "line 2: the id '1.ud83d' is no text"),
        (b"\xef\xbb\xbf" + GOOD, r"begins with a byte order mark; take it away with: tail -c \+4"),
        (GOOD.decode().encode("utf-16"), "it is UTF-16; make it UTF-8 with: iconv -f UTF-16"),
        (gzip.compress(GOOD), "packed by gzip; give it a name that ends in .gz"),
        (GOOD + b'\n{"id": "1", "contents": "x"}\n' + GOOD, 'lines 1 and 4 have the same id "0"'),
    ],
)
def test_bad_corpus_names_file_and_line(tmp_path, data, message):
    path = tmp_path / "wiki.jsonl"
    path.write_bytes(data)
    with pytest.raises(RetrieverError, match=f"(?s)wiki.jsonl.*{message}"):
        Corpus(path)


def test_half_a_surrogate_pair_is_read_as_a_replacement(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(GOOD + rb'{"id": "1", "contents": "\ud83d\ude00\nbroken \ud83d zebra \ude00"}')
    assert Corpus(path)[1] == Document("1", "\U0001f600", "broken \ufffd zebra \ufffd")
    found = open_retriever(path, tmp_path / "index").search(["zebra"], 1)[0][0]
    assert found.text.encode().decode() == "broken \ufffd zebra \ufffd"


def test_missing_corpus_names_the_path(tmp_path):
    with pytest.raises(RetrieverError, match=r"nowhere\.jsonl: cannot read the corpus \(No such file"):
        Corpus(tmp_path / "nowhere.jsonl")


def test_equal_hashes_of_different_ids_are_no_duplicates(corpus_path, monkeypatch):
    monkeypatch.setattr(retriever.corpus, "hash", lambda _: 7, raising=False)
    assert len(Corpus(corpus_path)) == 4


def test_offsets_are_cached_until_the_file_changes(corpus_path, tmp_path, monkeypatch):
    scans = []
    scan = retriever.corpus._scan
    monkeypatch.setattr(retriever.corpus, "_scan", lambda *args: scans.append(1) or scan(*args))
    sha256 = hashlib.sha256(corpus_path.read_bytes()).hexdigest()
    for _ in range(2):
        corpus = Corpus(corpus_path, cache_dir=tmp_path)
        assert corpus.corpus_id == sha256
        assert corpus[2].title == "Tokyo"
    assert len(scans) == 1

    changed = corpus_path.read_bytes().replace(b"Tokyo", b"Kyoto")  # same size
    corpus_path.write_bytes(changed)
    os.utime(corpus_path, ns=(0, 1))
    corpus = Corpus(corpus_path, cache_dir=tmp_path)
    assert (corpus.corpus_id, corpus[2].title) == (hashlib.sha256(changed).hexdigest(), "Kyoto")
    assert len(scans) == 2

    swapped = changed.replace(b"London", b"Dublin")
    corpus_path.write_bytes(swapped)
    os.utime(corpus_path, ns=(0, 1))  # same size and time
    assert Corpus(corpus_path, cache_dir=tmp_path).corpus_id == hashlib.sha256(swapped).hexdigest()
    assert len(scans) == 3

    cache = tmp_path / OFFSETS_FILE
    for damaged in (b"", cache.read_bytes()[:100], b"not numpy"):
        cache.write_bytes(damaged)
        assert Corpus(corpus_path, cache_dir=tmp_path)[3].text == CONTENTS[3]
    assert len(scans) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", OFFSETS_FILE]


def test_unwritable_cache_folder_only_costs_a_scan(corpus_path, tmp_path):
    assert len(Corpus(corpus_path, cache_dir=tmp_path / "absent")) == 4
    assert not (tmp_path / "absent").exists()


def test_threads_read_one_corpus(tmp_path):
    contents = [f"Title {n}\ntext {n * n}" for n in range(500)]
    corpus = Corpus(write_corpus(tmp_path / "c.jsonl", contents))
    rows = random.Random(0).choices(range(500), k=4000)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda row: corpus[row].contents, rows)) == [contents[row] for row in rows]


# encoder


def test_words_are_lower_case_without_accents():
    assert words_of("Beyoncé's 3rd—ALBUM, ３ İzmir_x") == ["beyonce", "s", "3rd", "album", "3", "izmir_x"]
    assert words_of(" .,! ") == []


def test_word_hash_is_fixed():
    assert word_hash("paris") == int.from_bytes(hashlib.blake2b(b"paris", digest_size=8).digest(), "little")
    assert word_hash("paris") == 1657316678316814225


def test_idf_counts_passages_not_occurrences():
    encoder = HashedEncoder(dim=64)
    encoder.fit(["a a a\nb", "b c", "b"])
    state = encoder.state()
    assert dict(zip(state["words"].tolist(), state["df"].tolist())) == {
        word_hash("a"): 1,
        word_hash("b"): 3,
        word_hash("c"): 1,
    }
    assert state["passages"] == 3
    idf = encoder._lookup_idf(np.array([word_hash(w) for w in ("a", "b", "unknown")], dtype=np.uint64))
    # ln(1 + 2.5 / 1.5), ln(1 + 0.5 / 3.5)
    np.testing.assert_allclose(idf, [0.980829253, 0.133531393, 0.0], atol=1e-9)


def reference_vector(fields, df, passages, dim, pair_weight, seed):
    """Scalar Python: fields = [(count of each word, words), ...]."""
    mask = 2**64 - 1

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def idf(word):
        return math.log(1 + (passages - df[word] + 0.5) / (df[word] + 0.5)) if word in df else 0.0

    tf, term_idf = {}, {}
    for count, words in fields:
        for word in words:
            tf[word_hash(word)] = tf.get(word_hash(word), 0) + count
            term_idf[word_hash(word)] = idf(word)
        for left, right in zip(words, words[1:]):
            pair = mix((word_hash(left) * 0x9E3779B97F4A7C15 + word_hash(right)) & mask)
            tf[pair] = tf.get(pair, 0) + count
            term_idf[pair] = pair_weight * min(idf(left), idf(right))
    vector = [0.0] * dim
    for term in tf:
        weight = (1 + math.log(tf[term])) * term_idf[term]
        for block in range(8):
            bits = mix((term + (seed * 8 + block + 1) * 0x9E3779B97F4A7C15) & mask)
            vector[block * dim // 8 + (bits >> 32) % (dim // 8)] += -weight if bits & 1 else weight
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector]


def test_vectors_equal_a_scalar_loop():
    encoder = HashedEncoder(dim=56, title_weight=2, pair_weight=0.7, seed=3)
    encoder.fit(CONTENTS)
    df = {}
    for text in CONTENTS:
        for word in set(re.findall(r"\w+", text.lower())):
            df[word] = df.get(word, 0) + 1
    passages = encoder.encode_passages(CONTENTS)
    assert passages.shape == (4, 56) and passages.dtype == np.float32
    for row, text in enumerate(CONTENTS):
        title, body = text.split("\n") if "\n" in text else ("", text)
        fields = [(2.0, title.lower().replace('"', "").split()), (1.0, re.findall(r"\w+", body.lower()))]
        np.testing.assert_allclose(passages[row], reference_vector(fields, df, 4, 56, 0.7, 3), atol=1e-6)
    query = encoder.encode_queries(["the London the of London zzz Ada"])
    words = ["the", "london", "the", "of", "london", "zzz", "ada"]
    np.testing.assert_allclose(query[0], reference_vector([(1.0, words)], df, 4, 56, 0.7, 3), atol=1e-6)


def test_vectors_have_length_one_and_do_not_depend_on_the_batch():
    encoder = HashedEncoder(dim=128)
    encoder.fit(CONTENTS)
    texts = ["born in London", "governed by Ada", "", "London", "city of Japan"] * 3
    batch = encoder.encode_queries(texts)
    assert all(np.array_equal(batch[n], encoder.encode_queries([text])[0]) for n, text in enumerate(texts))
    np.testing.assert_allclose(np.linalg.norm(batch, axis=1), [1, 1, 0, 1, 1] * 3, atol=1e-6)
    assert encoder.encode_queries([]).shape == (0, 128)


def test_unknown_words_change_nothing():
    encoder = HashedEncoder(dim=128)
    encoder.fit(CONTENTS)
    with_unknown, without = encoder.encode_queries(["qqq London", "London"])
    assert np.array_equal(with_unknown, without)
    assert not encoder.encode_queries(["qqq zzz"]).any()


def test_word_order_and_title_count():
    passages = ["x\nada byron", "x\nbyron ada", '"mars"\nred rock', '"red"\nmars rock', "x\nfill one", "x\nfill two"]
    encoder = HashedEncoder(dim=4096)
    encoder.fit(passages)
    scores = encoder.encode_queries(["byron ada", "mars"]) @ encoder.encode_passages(passages).T
    assert scores[0].argmax() == 1 and scores[0, 1] > scores[0, 0] + 0.08
    assert scores[1].argmax() == 2 and scores[1, 2] > scores[1, 3] + 0.1


def test_vectors_are_the_same_in_every_process():
    code = (
        "import hashlib; from retriever.encoder import HashedEncoder; e = HashedEncoder(dim=64); "
        "e.fit(['Ada Byron\\nwas born in London', 'London\\nis old']); "
        "v = e.encode_passages(['Ada Byron\\nwas born in London']); "
        "print(hashlib.sha256(v.tobytes()).hexdigest())"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
    encoder = HashedEncoder(dim=64)
    encoder.fit(["Ada Byron\nwas born in London", "London\nis old"])
    vector = encoder.encode_passages(["Ada Byron\nwas born in London"])
    assert hashlib.sha256(vector.tobytes()).hexdigest() == digests[0].strip()


def test_encoder_is_made_from_settings_and_state():
    encoder = HashedEncoder(dim=64, title_weight=2, pair_weight=0, seed=5)
    encoder.fit(CONTENTS)
    assert encoder.settings() == {"name": "hashed", "dim": 64, "title_weight": 2.0, "pair_weight": 0.0, "seed": 5}
    copy = make_encoder(json.loads(json.dumps(encoder.settings())), encoder.state())
    assert np.array_equal(copy.encode_queries(["Ada in London"]), encoder.encode_queries(["Ada in London"]))
    other = make_encoder(encoder.settings() | {"seed": 6}, encoder.state())
    assert not np.allclose(other.encode_queries(["Ada in London"]), encoder.encode_queries(["Ada in London"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "e6"}, "normalize, passage_prefix, pooling, query_prefix must be given"),
        ({"name": "e5-base-v2", "pooling": "max"}, "pooling is one of mean, cls, last, got 'max'"),
        ({"name": "e5-base-v2", "max_length": 4}, "max_length must be at least 8 tokens, got 4"),
        ({"name": "e5-base-v2", "poling": "cls"}, r"\['poling'\]; known: \['device', 'dim', 'dtype', 'max_length'"),
        ({}, "got None"),
        ({"name": "hashed", "dimm": 8}, r"\['dimm'\]; known: \['dim', 'pair_weight'"),
        ({"name": "hashed", "dim": 100}, "multiple of 8, got 100"),
        ({"name": "hashed", "dim": 0}, "multiple of 8, got 0"),
        ({"name": "hashed", "title_weight": 0.5}, "title_weight >= 1.*title_weight=0.5"),
    ],
)
def test_wrong_encoder_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_encoder(settings)


def test_unfitted_encoder_refuses():
    with pytest.raises(RetrieverError, match="knows no corpus"):
        HashedEncoder().encode_queries(["x"])


# index and service


def test_search_returns_passages_with_exact_inner_products(service):
    encoder = HashedEncoder(dim=256)
    encoder.fit(CONTENTS)
    queries = ["birthplace of Ada Lovelace", "who governs London", "city in Japan", "Mars"]
    products = (
        encoder.encode_queries(queries).astype(np.float64) @ encoder.encode_passages(CONTENTS).astype(np.float64).T
    )
    results = service.search(queries, 3)
    for row, passages in enumerate(results):
        expected = np.argsort(-products[row])[:3]
        assert [passage.id for passage in passages] == [f"p{n}" for n in expected]
        np.testing.assert_allclose([passage.score for passage in passages], products[row][expected], atol=1e-6)
    assert [passages[0].id for passages in results] == ["p0", "p1", "p2", "p3"]
    first = results[0][0]
    assert first == Passage("p0", '"Ada Lovelace"', "Ada Lovelace was born in London .", first.score)
    assert (results[3][0].title, results[3][0].text) == ("", CONTENTS[3])
    assert isinstance(first.score, float)


def test_search_bounds(service, monkeypatch):
    assert [len(passages) for passages in service.search(["London", "Ada"], 10**9)] == [4, 4]
    assert service.search(["", "qqq", "London"], 2)[:2] == [[], []]
    assert [len(passages) for passages in service.search(["", "qqq", "London"], 2)] == [0, 0, 2]
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        service.search(["London"], 0)
    monkeypatch.setattr(HashedEncoder, "encode_queries", None)  # no encoder is bothered with nothing
    assert service.search([], 3) == []


def test_long_queries_are_cut(corpus_path, tmp_path, service):
    cut = open_retriever(corpus_path, tmp_path / "index", max_query_chars=6)
    assert cut.search(["London Ada Lovelace"], 4) == service.search(["London"], 4)
    assert service.search(["London " + "x " * 500_000 + "Mars"], 4) == service.search(["London x"], 4)


def test_missing_neighbours_are_dropped(corpus_path):
    encoder = HashedEncoder(dim=256)
    encoder.fit(CONTENTS)
    vectors = encoder.encode_passages(CONTENTS)
    quantizer = faiss.IndexFlatIP(256)
    ivf = faiss.IndexIVFFlat(quantizer, 256, 4, faiss.METRIC_INNER_PRODUCT)
    ivf.cp.min_points_per_centroid = 1
    ivf.train(vectors)
    ivf.add(vectors)
    assert (ivf.search(vectors, 4)[1] == -1).any()
    corpus = Corpus(corpus_path)
    meta = IndexMeta(corpus.corpus_id, 4, 256, "ivf", encoder.settings())
    found = RetrieverService(corpus, PassageIndex(ivf, meta), encoder).search(["who governs London"], 4)[0]
    assert 1 <= len(found) < 4
    assert found[0].id == "p1"
    assert "p3" not in [passage.id for passage in found]


def test_one_service_serves_many_threads(service):
    queries = ["Ada Lovelace", "London", "Japan", "Mars"] * 25
    expected = service.search(queries, 2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda query: service.search([query], 2)[0], queries))
    assert [[p.id for p in a] for a in answers] == [[p.id for p in e] for e in expected]


def test_search_leaves_the_threads_of_torch_alone(service, corpus_path, tmp_path):
    code = (
        # imported before FAISS, torch shares its OpenMP with it
        "import sys, torch; torch.set_num_threads(2); assert torch.get_num_threads() == 2; "
        "from retriever.service import open_retriever; "
        "open_retriever(*sys.argv[1:]).search(['London'] * 30, 2); "
        "assert torch.get_num_threads() == 2"
    )
    command = [sys.executable, "-c", code, str(corpus_path), str(tmp_path / "index")]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)


def test_info_says_what_is_indexed(service, corpus_path):
    info = service.info()
    assert info.corpus_id == hashlib.sha256(corpus_path.read_bytes()).hexdigest()
    assert (info.passages, info.dim, info.index_type) == (4, 256, "flat")
    assert info.encoder == "hashed dim=256 title_weight=3.0 pair_weight=0.5 seed=0"


def test_null_retriever_finds_nothing():
    null = NullRetriever()
    assert null.search(["a", "b"], 3) == [[], []]
    assert null.info().passages == 0


def test_opening_again_reads_no_corpus_and_builds_nothing(corpus_path, tmp_path, service, monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(retriever.corpus, "_scan", fail)
    monkeypatch.setattr(retriever.service, "build_index", fail)
    again = open_retriever(corpus_path, tmp_path / "index")
    assert again.search(["London"], 2) == service.search(["London"], 2)
    assert again.info() == service.info()


def test_index_folder_has_no_leftovers(service, tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "corpus.offsets.npy",
        "encoder.npz",
        "index.faiss",
        "meta.json",
    ]


def test_processes_that_build_together_all_open_the_index(corpus_path, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        services = list(pool.map(lambda _: open_retriever(corpus_path, tmp_path / "index"), range(4)))
    assert [s.search(["London"], 1)[0][0].id for s in services] == ["p1"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_changed_corpus_is_refused(service, corpus_path, tmp_path):
    write_corpus(corpus_path, CONTENTS[:3])
    with pytest.raises(RetrieverError, match=r"corpus\.jsonl: the index was built from another corpus.*4 passages"):
        open_retriever(corpus_path, tmp_path / "index")


def test_other_encoder_is_refused(service, corpus_path, tmp_path):
    with pytest.raises(RetrieverError, match="dim is 256 in the index, 512 asked for"):
        open_retriever(corpus_path, tmp_path / "index", encoder={"name": "hashed", "dim": 512})
    with pytest.raises(RetrieverError, match="name is 'hashed' in the index, 'e5' asked for"):
        open_retriever(corpus_path, tmp_path / "index", encoder="e5")
    index, encoder = load_index(tmp_path / "index")
    other = make_encoder(encoder.settings() | {"seed": 1}, encoder.state())
    with pytest.raises(RetrieverError, match="seed is 0 in the index, 1 asked for"):
        RetrieverService(Corpus(corpus_path), index, other)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("meta.json", None, r"no index here .*python -m retriever\.build"),
        ("meta.json", b'{"dim": 3}', "not the description of an index"),
        ("meta.json", b"{", "not the description of an index"),
        ("index.faiss", None, "index.faiss: missing"),
        ("index.faiss", b"abc", "index.faiss: damaged"),
        ("index.faiss", b"", "index.faiss: damaged"),
        ("encoder.npz", None, "encoder.npz: cannot restore the encoder"),
        ("encoder.npz", b"abc", "encoder.npz: cannot restore the encoder"),
        ("encoder.npz", b"PK\x03\x04abc", "encoder.npz: cannot restore the encoder"),
    ],
)
def test_damaged_index_names_the_file(service, tmp_path, name, damage, message):
    path = tmp_path / "index" / name
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(RetrieverError, match=message):
        load_index(tmp_path / "index")


def test_vectors_must_fit_their_description(service, tmp_path):
    path = tmp_path / "index" / "index.faiss"
    vectors = faiss.IndexFlatIP(256)
    vectors.add(np.ones((3, 256), np.float32))
    faiss.write_index(vectors, str(path))
    with pytest.raises(RetrieverError, match="index.faiss: damaged, cut or of another build"):
        load_index(tmp_path / "index")
    meta = tmp_path / "index" / "meta.json"  # as older versions wrote it
    meta.write_text(json.dumps({k: v for k, v in json.loads(meta.read_text()).items() if k != "vectors_id"}))
    with pytest.raises(RetrieverError, match="holds 3 vectors of dim 256, but meta.json says 4 of dim 256"):
        load_index(tmp_path / "index")
    distances = faiss.IndexFlatL2(256)
    distances.add(np.ones((4, 256), np.float32))
    faiss.write_index(distances, str(path))
    with pytest.raises(RetrieverError, match="inner products"):
        load_index(tmp_path / "index")


def test_large_corpus_is_not_built_in_passing(corpus_path, tmp_path, monkeypatch):
    monkeypatch.setattr(retriever.service, "BUILD_AT_OPEN_BYTES", 10)
    with pytest.raises(RetrieverError, match=r"build it with: python -m retriever\.build --corpus .*corpus\.jsonl"):
        open_retriever(corpus_path, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_foreign_folder_is_left_alone(corpus_path, tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RetrieverError, match="precious exists and is not an index"):
        open_retriever(corpus_path, folder)
    with pytest.raises(FileExistsError, match="precious exists and is not an index"):
        build_index(corpus_path, folder, HashedEncoder(), overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


def test_failed_build_leaves_nothing(corpus_path, tmp_path):
    class Broken(HashedEncoder):
        def encode_passages(self, contents):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus_path, tmp_path / "index", Broken(dim=64))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_existing_index_is_refused_before_any_work(service, corpus_path, tmp_path, monkeypatch):
    monkeypatch.setattr(HashedEncoder, "fit", None)
    with pytest.raises(FileExistsError, match="already holds an index"):
        build_index(corpus_path, tmp_path / "index", HashedEncoder())


def test_batch_size_of_the_build_changes_no_vector(corpus_path, tmp_path):
    seen = []
    build_index(corpus_path, tmp_path / "a", HashedEncoder(dim=64))
    build_index(
        corpus_path, tmp_path / "b", HashedEncoder(dim=64), batch_size=3, progress=lambda *done: seen.append(done)
    )
    assert seen == [(3, 4), (4, 4)]
    assert (tmp_path / "a" / "index.faiss").read_bytes() == (tmp_path / "b" / "index.faiss").read_bytes()


def test_build_command(corpus_path, tmp_path, capsys):
    out = tmp_path / "index"
    command = ["--corpus", str(corpus_path), "--out", str(out), "--dim", "64"]
    assert build_main(command) == 0
    assert "4 passages, flat, hashed dim=64" in capsys.readouterr().out
    before = (out / "meta.json").stat().st_ino
    assert build_main(command) == 2
    assert "already holds an index" in capsys.readouterr().err
    assert (out / "meta.json").stat().st_ino == before
    assert build_main([*command[:-1], "128", "--overwrite"]) == 0
    assert load_index(out)[1].dim == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]
    assert build_main(["--corpus", "nowhere.jsonl", "--out", str(tmp_path / "x")]) == 2
    assert "error: nowhere.jsonl: cannot read the corpus" in capsys.readouterr().err
    assert build_main([*command[:-1], "100", "--overwrite"]) == 2
    assert "multiple of 8, got 100" in capsys.readouterr().err


def test_invented_names_are_found(tmp_path):
    """Entities of two words from small pools, every word shared by dozens of entities and passages."""
    rng = random.Random(0)
    words = [a + b + c for a in ("ba", "do", "fi", "gu") for b in "klmn" for c in ("ra", "so", "ti", "vu")]
    people, towns = ([f"{a}{end} {b}{end}" for a in words for b in words] for end in ("x", "z"))
    people, towns = rng.sample(people, 600), rng.sample(towns, 600)
    contents = [f'"{p}"\n{p} was born in {rng.choice(towns)} . {p} works for {rng.choice(towns)} .' for p in people]
    contents += [f'"{t}"\n{t} is governed by {rng.choice(people)} .' for t in towns]
    path = write_corpus(tmp_path / "world.jsonl", contents)
    service = open_retriever(path, tmp_path / "index", encoder={"name": "hashed", "dim": 512})
    queries = [f"birthplace of {p}" for p in people] + [f"mayor of {t}" for t in towns]
    hits = [found[0].id == f"p{row}" for row, found in enumerate(service.search(queries, 1))]
    assert sum(hits) / len(hits) >= 0.995


def test_real_questions_find_their_passages(tmp_path):
    questions = read_jsonl(data_file("qa/hotpotqa_ctx.jsonl"))
    service = open_retriever(data_file("corpora/hotpotqa.jsonl"), tmp_path / "index")
    found = service.search([question["question"] for question in questions], 10)

    def recall(k):
        shares = [
            len({passage.id for passage in passages[:k]} & set(question["supporting_ids"]))
            / len(set(question["supporting_ids"]))
            for question, passages in zip(questions, found)
        ]
        return sum(shares) / len(shares)

    # measured .392, .655, .744, .842; a plain BM25 has .40, .64, .74, .88
    assert recall(1) >= 0.38
    assert recall(3) >= 0.64
    assert recall(5) >= 0.73
    assert recall(10) >= 0.83


def test_real_passages_keep_their_titles():
    path = data_file("corpora/wiki18_slice.jsonl")
    rows = read_jsonl(path)
    corpus = Corpus(path)
    documents = [corpus[row] for row in range(len(corpus))]
    assert [document.contents for document in documents] == [row["contents"] for row in rows]
    assert sum(not document.title.startswith('"') for document in documents) == 1315
    assert all(document.title and document.text for document in documents)
