"""Where a turn ends: at the token that completes a closing tag, whatever engine sampled it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sapo.protocol import BYTE_TOKEN, completed_tags, spelled

STOP_WINDOW = 24  # tokens decoded before new ones to look for a tag: more than the bytes of any, each has at least one


class Vocabulary:
    """What ending a turn needs to know of each id of a model.

    is_eos, is_byte: bool [V], ids that end a sequence, and tokens of a single byte.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        size = model.config.get_text_config().vocab_size
        self.is_eos = np.zeros(size, dtype=bool)
        self.is_eos[[i for i in eos_ids if i < size]] = True
        strings = tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))
        self.strings = [spelled(string) for string in strings]
        self.is_byte = np.zeros(size, dtype=bool)
        self.is_byte[[i for i, string in enumerate(strings) if string and BYTE_TOKEN.fullmatch(string)]] = True
        self._with_characters: dict[str, np.ndarray] = {}

    def tokens_with(self, characters: str) -> np.ndarray:
        """Return bool [V]: the tokens whose string holds any of `characters`. Searched once, for all sessions."""
        if characters not in self._with_characters:
            found = np.zeros(len(self.is_eos), dtype=bool)
            for i, string in enumerate(self.strings):
                found[i] = any(character in string for character in characters)
            self._with_characters[characters] = found
        return self._with_characters[characters]


class StopTags:
    """Finds the stop strings in the turns of a session's rows as they grow.

    may_complete: bool [V], the tokens that can complete a tag; all others need no look.
    think_aware: a stop string inside an open <think> of its turn does not count.
    """

    def __init__(self, vocabulary: Vocabulary, stop_strings: Iterable[str], think_aware: bool, rows: int) -> None:
        self.vocabulary = vocabulary
        self.stop_strings = tuple(stop_strings)
        self.tags = (*self.stop_strings, "<think>", "</think>") if think_aware else self.stop_strings
        # Only a token whose string holds the last character of a tag can complete one; all others cost nothing.
        self.may_complete = vocabulary.tokens_with("".join(sorted({tag[-1] for tag in self.tags})))
        self._settled = np.zeros(rows, dtype=np.int64)  # tokens of this turn whose tags were looked for
        self._thinking = np.zeros(rows, dtype=bool)  # inside an open <think> of this turn after those

    def begin(self, rows: Sequence[int] | np.ndarray) -> None:
        """Start a turn of these rows."""
        self._settled[rows] = 0
        self._thinking[rows] = False

    def complete(self, row: int, ids: Sequence[int] | np.ndarray) -> bool:
        """Tell whether the last token of a row's turn so far completed a stop string; decodes each token a few times.

        It need only be asked after tokens of `may_complete`, and must be after each of them.
        """
        thinking = bool(self._thinking[row])
        # A run of byte tokens changes its text with every byte: its tags count for now, and again when it is over.
        run = self._run_start(ids, len(ids))
        for begin, end in ((self._settled[row], run), (run, len(ids))):
            for tag in self._completed(ids, begin, end):
                if tag in self.stop_strings and not thinking:
                    return True
                if tag not in self.stop_strings:
                    thinking = tag == "<think>"
            if end == run:
                self._settled[row], self._thinking[row] = run, thinking
        return False

    def _run_start(self, ids: Sequence[int] | np.ndarray, end: int) -> int:
        """Return where the run of byte tokens before `end` begins."""
        while end and self.vocabulary.is_byte[ids[end - 1]]:
            end -= 1
        return end

    def _completed(self, ids: Sequence[int] | np.ndarray, begin: int, end: int) -> list[str]:
        """Return the tags that the tokens begin..end of a turn complete. Neither `begin` nor `end` cuts a byte run."""
        if begin == end:
            return []
        start = self._run_start(ids, max(0, begin - STOP_WINDOW))

        def decode(part: Sequence[int] | np.ndarray) -> str:
            return self.vocabulary.tokenizer.decode(
                part, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

        # A character cut at the edge of the tokens before shows as U+FFFD, which no tag holds.
        return completed_tags(decode(ids[start:end]), len(decode(ids[start:begin]).rstrip("\ufffd")), self.tags)
