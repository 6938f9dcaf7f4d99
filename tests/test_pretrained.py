"""Encoders with weights: pooling, prefixes and normalisation against one text at a time, and what is refused."""

import gzip
import json

import faiss
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from retriever.encoder import make_encoder
from retriever.index import build_index, load_index
from retriever.pretrained import family_settings, length_batches
from retriever.service import open_retriever
from retriever.types import RetrieverError

CONTENTS = ['"Ada"\nborn in London', '"London"\nis old and is governed by Ada Byron', "Mars", '"Tokyo"\nin Japan']
WORDS = 'query passage : Ada Lovelace born in London is old and governed by Byron Mars Tokyo Japan far , "'.split()
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def make_model(folder, seed=0, pooler=False):
    """A small BERT with random weights and a tokenizer of whole words, in a folder."""
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(**SIZES, vocab_size=len(vocabulary))
    BertModel(config, add_pooling_layer=pooler).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def e5(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "e5-small")


@pytest.fixture
def corpus_path(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(CONTENTS)))
    return path


def reference(folder, text, pooling, normalize, max_length):
    """The vector of one text without padding, in float64."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    ids = ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / np.sqrt((vector**2).sum()) if normalize else vector


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_equal_one_text_at_a_time(e5, pooling, normalize):
    settings = {"pooling": pooling, "normalize": normalize, "max_length": 9}
    encoder = make_encoder({"name": e5, "dtype": "float32"} | settings)
    encoder._tokens_per_forward = 20  # several forwards, of different lengths
    for encode, prefix in ((encoder.encode_passages, "passage: "), (encoder.encode_queries, "query: ")):
        expected = [reference(e5, prefix + text, pooling, normalize, 9) for text in CONTENTS]
        vectors = encode(CONTENTS)
        assert vectors.dtype == np.float32 and vectors.shape == (4, 16)
        np.testing.assert_allclose(vectors, expected, atol=2e-6)
    assert encoder.encode_queries([]).shape == (0, 16)


def test_odd_queries_have_vectors(e5):
    vectors = make_encoder({"name": e5}).encode_queries(["", "\ud800 Ada", "Ada " * 10_000])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_half_precision_changes_little(e5):
    exact = make_encoder({"name": e5, "dtype": "float32"}).encode_passages(CONTENTS)
    if not torch.cuda.is_available():
        assert np.array_equal(make_encoder({"name": e5}).encode_passages(CONTENTS), exact)
        mixed = make_encoder({"name": e5, "dtype": "bfloat16"})
        assert not np.array_equal(mixed.encode_passages(CONTENTS), exact)
        assert np.array_equal(mixed.encode_queries(CONTENTS), make_encoder({"name": e5}).encode_queries(CONTENTS))
    for dtype in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {}):
        vectors = make_encoder({"name": e5} | dtype).encode_passages(CONTENTS)
        assert (vectors * exact).sum(axis=1).min() > 0.999
    with pytest.raises(ValueError, match="dtype is one of float32, bfloat16, float16, got 'int8'"):
        make_encoder({"name": e5, "dtype": "int8"})


def test_families_are_known_by_name():
    assert family_settings("intfloat/e5-base-v2") == family_settings("models/multilingual-e5-small")
    assert family_settings("BAAI/bge-base-en-v1.5") == {
        "pooling": "cls",
        "query_prefix": "Represent this sentence for searching relevant passages: ",
        "passage_prefix": "",
        "normalize": True,
    }
    assert family_settings("facebook/contriever")["normalize"] is False
    for other in ("intfloat/e5-mistral-7b-instruct", "BAAI/bge-m3", "my-e5-small", "gte-base-en-v1.5"):
        assert family_settings(other) == {}


def test_batches_hold_texts_of_similar_length():
    assert list(length_batches([5, 1, 9, 4, 4], 10)) == [[2], [0, 3], [4, 1]]
    assert list(length_batches([0, 0], 10)) == [[0, 1]]


def test_settings_are_those_of_the_index_whatever_the_folder_is_called(e5, corpus_path, tmp_path):
    folder = tmp_path / "elsewhere"
    make_model(folder)  # the same weights
    index = tmp_path / "index"
    meta = build_index(corpus_path, index, make_encoder({"name": e5, "max_length": 12}))
    assert meta.encoder == {
        "name": e5,
        "pooling": "mean",
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
        "normalize": True,
        "max_length": 12,
        "dim": 16,
        "weights": make_encoder({"name": e5}).settings()["weights"],
    }
    service = open_retriever(corpus_path, index, encoder=str(folder))
    assert service.search(["London"], 2) == open_retriever(corpus_path, index).search(["London"], 2)
    assert "pooling=mean query_prefix='query: ' passage_prefix='passage: '" in service.info().encoder


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"query_prefix": ""}, "query_prefix is 'query: ' in the index, '' asked for"),
        ({"pooling": "cls"}, "pooling is 'mean' in the index, 'cls' asked for"),
        ({"normalize": False}, "normalize is True in the index, False asked for"),
        ({"max_length": 8}, "max_length is 32 in the index, 8 asked for"),
        ({"name": "hashed"}, "name is '.*e5-small' in the index, 'hashed' asked for"),
        ({"name": "/nowhere/e5-small"}, "encoder '/nowhere/e5-small' cannot be loaded"),
    ],
)
def test_another_encoder_than_the_index_has_is_refused(e5, corpus_path, tmp_path, asked, message):
    build_index(corpus_path, tmp_path / "index", make_encoder({"name": e5}))
    with pytest.raises(RetrieverError, match=message):
        open_retriever(corpus_path, tmp_path / "index", encoder={"name": e5} | asked)


def test_other_weights_or_words_are_refused(e5, corpus_path, tmp_path):
    build_index(corpus_path, tmp_path / "index", make_encoder({"name": e5}))
    other = make_model(tmp_path / "e5-base", seed=1)
    with pytest.raises(RetrieverError, match="e5-base': its weights is .*: this is another model"):
        load_index(tmp_path / "index", {"name": other})
    tokenizer = tmp_path / "e5-large"
    make_model(tokenizer)
    text = (tokenizer / "tokenizer.json").read_text()
    (tokenizer / "tokenizer.json").write_text(text.replace('"[CLS] $A [SEP]"', '"$A"').replace('"lowercase":false', ""))
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary["post_processor"] = None
    (tokenizer / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(RetrieverError, match="its weights is"):
        load_index(tmp_path / "index", {"name": str(tokenizer)})


def test_missing_weights_are_refused(e5, tmp_path):
    folder = tmp_path / "e5-small"
    make_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(RetrieverError, match=r"16 weights are not in its files .* and would be random"):
        make_encoder({"name": str(folder)})


def bare_index(folder, encoder, contents=CONTENTS):
    """A FAISS file as Search-R1 writes it."""
    vectors = faiss.index_factory(encoder.dim, "Flat", faiss.METRIC_INNER_PRODUCT)
    vectors.add(encoder.encode_passages(contents))
    faiss.write_index(vectors, str(folder / "e5_Flat.index"))
    return folder / "e5_Flat.index"


def test_an_index_of_search_r1_is_read_as_it_is(e5, corpus_path, tmp_path):
    path = bare_index(tmp_path, make_encoder({"name": e5}))
    service = open_retriever(corpus_path, path, encoder=e5)
    own = open_retriever(corpus_path, tmp_path / "index", encoder=e5)
    assert service.search(["London", "Mars"], 9) == own.search(["London", "Mars"], 9)
    assert (service.info().index_type, service.info().passages) == ("IndexFlatIP", 4)
    assert service.info().encoder == own.info().encoder


def test_a_bare_index_needs_no_folder_that_can_be_written(e5, corpus_path, tmp_path):
    path = bare_index(tmp_path, make_encoder({"name": e5}))
    path.with_name(f"{path.name}.cache").write_text("no folder")
    assert open_retriever(corpus_path, path, encoder=e5).search(["Mars"], 1)[0][0].id
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_path.read_bytes()))
    with pytest.raises(RetrieverError, match="no random access; unpack it with: gunzip --stdout"):
        open_retriever(packed, path, encoder=e5)


@pytest.mark.parametrize(
    ("encoder", "rows", "message"),
    [
        (None, 4, "does not say what it was built with: set retriever.encoder"),
        ({}, 3, "holds 3 vectors, but .*corpus.jsonl has 4 passages"),
        ({"pooling": "cls"}, 4, r"not those of this corpus by this encoder \(cosine"),
        ({"passage_prefix": "query Mars far : "}, 4, r"not those of this corpus by this encoder \(cosine"),
    ],
)
def test_an_index_of_search_r1_with_another_encoder_is_refused(e5, corpus_path, tmp_path, encoder, rows, message):
    path = bare_index(tmp_path, make_encoder({"name": e5}), CONTENTS[:rows])
    with pytest.raises(RetrieverError, match=message):
        open_retriever(corpus_path, path, encoder=None if encoder is None else {"name": e5} | encoder)
