"""Small real parts that several tests use: a byte-level BPE tokenizer and a retriever over a few passages."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retriever.types import IndexInfo, Passage

# Longer pieces with the merges that build them, as in real vocabularies: ">\n\n" and ".</" are single tokens there.
MERGED = ("search", "answer", "think", "documents", "</", ".</", ">Ċ", ">ĊĊ", "Ġa", "Ġthe", "ĊĊ")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with every byte, the tag words, and tokens that merge a bracket with its neighbours."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    merges = []
    for piece in MERGED:
        left = piece[0]
        for character in piece[1:]:
            if left + character not in vocab:
                vocab[left + character] = len(vocab)
                merges.append((left, character))
            left += character
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class DictRetriever:
    """Answers from a dict of query -> passages; other queries find nothing. Counts its calls."""

    def __init__(self, passages: dict[str, list[Passage]]) -> None:
        self.passages = passages
        self.calls: list[list[str]] = []

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.calls.append(list(queries))
        return [self.passages.get(query, [])[:k] for query in queries]

    def info(self) -> IndexInfo:
        return IndexInfo("none", len(self.passages), "dict", 0, "dict")
