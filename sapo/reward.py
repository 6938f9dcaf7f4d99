"""Score an answer against golden answers: EM, F1, cover-EM and folded EM, each in [0, 1]; and rewards by name.

An answer is what the policy itself wrote between `<answer>` and `</answer>`, as `Trajectory.answer` gives it: neither
the prompt (which shows an example answer) nor a retrieved document is ever looked at. `None` means that there was no
answer; it scores 0 everywhere.

`em` and `f1` equal the scorers of Search-R1 (`verl/utils/reward_score/qa_em.py`) and FlashRAG (`flashrag/evaluator`)
bit for bit, so tables compare. `cover_em` and `em_folded` stand beside them and are ours.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})

# What Unicode's compatibility decomposition leaves apart although readers take it for the same character. Acute accents
# standing alone come first because their decomposition starts with a space.
_LOOKALIKES = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′‵ʹʻʼʽ´ˊˋ", "'"),
        **dict.fromkeys("“”„‟″‶«»", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("ı", "i"),
        "⁄": "/",
        "æ": "ae", "Æ": "ae", "œ": "oe", "Œ": "oe", "ø": "o", "Ø": "o", "ł": "l", "Ł": "l",
        "đ": "d", "Đ": "d", "ð": "d", "Ð": "d", "þ": "th", "Þ": "th", "ħ": "h", "Ħ": "h", "ŧ": "t", "Ŧ": "t",
    }
)  # fmt: skip


class Scores(NamedTuple):
    """Scores of one answer, each in [0, 1]."""

    em: float
    f1: float
    cover_em: float
    em_folded: float


def normalize(text: str) -> str:
    """Return `text` in SQuAD normal form: lower case, without ASCII punctuation and articles, single spaces.

    The steps and their order are those of Search-R1 and FlashRAG. Punctuation is deleted, not replaced by a space,
    and nothing outside ASCII is folded.

    >>> normalize("The  Beatles' (1960–70)")
    'beatles 1960–70'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def fold(text: str) -> str:
    """Return `text` with typographic variants made plain: quotes, dashes, accents, full-width forms, invisible marks.

    Only the diacritics U+0300..U+036F of Latin, Greek and Cyrillic are dropped: the marks of other scripts make other
    letters.

    >>> fold("Beyoncé’s １９９０–Łódź")
    "beyonce's 1990-lodz"
    """
    decomposed = unicodedata.normalize("NFKD", text.translate(_LOOKALIKES)).translate(_LOOKALIKES)
    return "".join(
        char for char in decomposed if not "\u0300" <= char <= "\u036f" and unicodedata.category(char) != "Cf"
    ).casefold()


def token_f1(prediction: Sequence[str], golden: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the tokens in common, counted with multiplicity.

    0.0 when nothing is in common, so also when either side is empty.
    """
    common = (Counter(prediction) & Counter(golden)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(golden)
    return 2 * precision * recall / (precision + recall)


def em(answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 when the normalised answer equals a normalised golden answer, else 0.0.

    Bit-identical to Search-R1, also where both normalise to the empty string: `em("", ["the"])` is 1.0. Use
    `em_folded` where that matters.
    """
    if answer is None:
        return 0.0
    prediction = normalize(answer)
    return float(any(prediction == normalize(golden) for golden in _as_answers(golden_answers)))


def f1(answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return the largest token F1 of the normalised answer over the golden answers.

    A golden answer counts 0 when it and the answer differ and either is "yes", "no" or "noanswer": "no" earns nothing
    from "no man's land". The rule is applied to each golden answer by itself, as in FlashRAG.
    """
    if answer is None:
        return 0.0
    prediction = normalize(answer)
    return max((_normalized_f1(prediction, normalize(golden)) for golden in _as_answers(golden_answers)), default=0.0)


def cover_em(answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 when the tokens of a normalised golden answer occur in the normalised answer, in order and adjacent.

    Whole tokens, unlike the substring test of other scorers: "know" does not cover "no". A golden answer that
    normalises to the empty string is covered by nothing.
    """
    if answer is None:
        return 0.0
    prediction = f" {normalize(answer)} "
    goldens = (normalize(golden) for golden in _as_answers(golden_answers))
    return float(any(golden != "" and f" {golden} " in prediction for golden in goldens))


def em_folded(answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return EM after `fold` on both sides, so that curly quotes, dashes and accents do not decide.

    An answer that normalises to the empty string is never correct.
    """
    if answer is None:
        return 0.0
    prediction = normalize(fold(answer))
    goldens = (normalize(fold(golden)) for golden in _as_answers(golden_answers))
    return float(prediction != "" and any(prediction == golden for golden in goldens))


def score(answer: str | None, golden_answers: Sequence[str]) -> Scores:
    """Return every score of one answer; all are 0.0 when it is None."""
    return Scores(
        em=em(answer, golden_answers),
        f1=f1(answer, golden_answers),
        cover_em=cover_em(answer, golden_answers),
        em_folded=em_folded(answer, golden_answers),
    )


def reward(name: str, answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return the reward called `name` of an answer, in [0, 1]. Raises ValueError for a name not in `REWARDS`."""
    if name not in REWARDS:
        raise ValueError(f"Unknown reward {name!r}: use one of {', '.join(REWARDS)}.")
    return REWARDS[name](answer, golden_answers)


def _normalized_f1(prediction: str, golden: str) -> float:
    if prediction != golden and (prediction in _CLOSED_ANSWERS or golden in _CLOSED_ANSWERS):
        return 0.0
    return token_f1(prediction.split(), golden.split())


def _as_answers(golden_answers: Sequence[str]) -> Sequence[str]:
    """Take a bare string as one golden answer: iterated, its letters would become the golden answers."""
    return (golden_answers,) if isinstance(golden_answers, str) else golden_answers


REWARDS: dict[str, Callable[[str | None, Sequence[str]], float]] = {
    "f1": f1,
    "em": em,
    "cover_em": cover_em,
    "em_folded": em_folded,
}
