"""Score an answer against golden answers: EM, F1, cover-EM and folded EM, each in [0, 1]; and rewards by name.

An answer is what the policy itself wrote between `<answer>` and `</answer>`, as `Trajectory.answer` gives it: neither
the prompt (which shows an example answer) nor a retrieved document is ever looked at. `None` means that there was no
answer; it scores 0 everywhere. Only the reward `search_r1_compat` reads the whole text, because Search-R1 does.

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

from sapo.protocol import TAGS
from sapo.types import Trajectory

REFINE_REWARD = 0.1  # AutoRefine: of a wrong answer whose refined documents hold a golden one

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
# A block of a turn that holds no other tag. Every character is looked at once, so hostile text costs linear time.
_BLOCK = re.compile(rf"\s*<(think|refine|search|answer)>(?:(?!</?(?:{'|'.join(TAGS)})>).)*</\1>", re.DOTALL)

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


Decode = Callable[[list[int]], str]  # token ids -> text, special tokens included
Reward = Callable[[Trajectory, Decode], float]


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


def sub_em(answer: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 when a normalised golden answer is a substring of the normalised answer, also inside a word.

    Bit-identical to `compute_score_subem` of Search-R1, which none of its own scripts uses; ours is `cover_em`.
    """
    if answer is None:
        return 0.0
    prediction = normalize(answer)
    return float(any(normalize(golden) in prediction for golden in _as_answers(golden_answers)))


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


def tag_contents(text: str, tag: str) -> list[str]:
    """Return what `<tag>(.*?)</tag>` finds in `text`, in time linear in its length.

    >>> tag_contents("<a>1</a></a> <a>2<a>3</a><a>4", "a")
    ['1', '2<a>3']
    """
    opening = f"<{tag}>"
    return [part.partition(opening)[2] for part in text.split(f"</{tag}>")[:-1] if opening in part]


def autorefine(trajectory: Trajectory) -> float:
    """Return F1 of the answer or, where it is 0, `REFINE_REWARD` if a golden answer stands in the `<refine>` blocks.

    AutoRefine (arXiv 2505.11277): its rule for a wrong answer also holds for a trajectory without one. Only blocks
    that the policy wrote and closed within a turn count. "Stands in" is `cover_em`, so whole tokens, where AutoRefine
    takes any substring.
    """
    golden_answers = trajectory.question.golden_answers
    refined = " ".join(block for turn in trajectory.turns for block in tag_contents(turn.text, "refine"))
    return f1(trajectory.answer, golden_answers) or REFINE_REWARD * cover_em(refined, golden_answers)


def search_r1_em(text: str, golden_answers: Sequence[str]) -> float:
    """Return Search-R1's score of `text`, its prompt and response decoded with special tokens.

    Bit-identical to `compute_score_em` of its `qa_em.py`: EM of the last `<answer>` block, or 0.0 when there are fewer
    than two blocks. Its prompt holds two ("<answer> and </answer>", "<answer> Beijing </answer>"), so a response that
    does not answer is scored as if it had said "Beijing".

    >>> prompt = "put it inside <answer> and </answer>. For example, <answer> Beijing </answer>."
    >>> [search_r1_em(prompt + response, ["Beijing"]) for response in ("I give up", "<answer> Paris </answer>")]
    [1.0, 0.0]
    """
    answers = tag_contents(text, "answer")
    return em(answers[-1].strip(), golden_answers) if len(answers) > 1 else 0.0


def format_score(trajectory: Trajectory, reasoning: Sequence[str] = ("think",)) -> float:
    """Return 1.0 when the trajectory ends in an answer and each turn is well formed, else 0.0.

    A turn is blocks of reasoning and then its action, with only white space between and no tag within a block; text
    after the action (an end-of-turn token) does not matter. reasoning: the tags that the template asks for, each at
    most once in a turn. The first turn has only and always the first of them, a later one at least the last: each turn
    thinks, or with ("think", "refine") the first thinks and the others refine what was found.
    Only the policy's own text is judged, never an observation.
    """
    well_formed = trajectory.answer is not None and all(
        _is_well_formed(turn.text, turn.action, reasoning[:1] if index == 0 else reasoning)
        for index, turn in enumerate(trajectory.turns)
    )
    return float(well_formed)


def reward(
    trajectory: Trajectory,
    name: str,
    *,
    decode: Decode,
    format_weight: float = 0.0,
    reasoning: Sequence[str] = ("think",),
) -> float:
    """Return the reward of a trajectory, in [0, 1]: (1 - format_weight) * reward `name` + format_weight * format.

    decode: token ids to text with special tokens (a tokenizer's `decode`); only `search_r1_compat` calls it. reasoning:
    of `format_score`. Weighted like this, EM and a weight of 0.2 give the 1, 0.8, 0.2 and 0 of Search-R1 v0.3, but for
    the 0.1 that it gives a wrong, malformed answer. Raises ValueError for a name not in `REWARDS`.
    """
    if name not in REWARDS:
        raise ValueError(f"Unknown reward {name!r}: use one of {', '.join(REWARDS)}.")
    value = REWARDS[name](trajectory, decode)
    if format_weight:
        value = (1 - format_weight) * value + format_weight * format_score(trajectory, reasoning)
    return value


def _is_well_formed(text: str, action: str, reasoning: Sequence[str]) -> bool:
    blocks: list[str] = []
    end = 0
    while (block := _BLOCK.match(text, end)) and block[1] not in ("search", "answer"):
        blocks.append(block[1])
        end = block.end()
    once = len(set(blocks)) == len(blocks) and set(blocks) <= set(reasoning)
    return once and reasoning[-1] in blocks and block is not None and block[1] == action


def _normalized_f1(prediction: str, golden: str) -> float:
    if prediction != golden and (prediction in _CLOSED_ANSWERS or golden in _CLOSED_ANSWERS):
        return 0.0
    return token_f1(prediction.split(), golden.split())


def _as_answers(golden_answers: Sequence[str]) -> Sequence[str]:
    """Take a bare string as one golden answer: iterated, its letters would become the golden answers."""
    return (golden_answers,) if isinstance(golden_answers, str) else golden_answers


def _of_answer(score_answer: Callable[[str | None, Sequence[str]], float]) -> Reward:
    """Make a reward of a score that needs only the answer."""
    return lambda trajectory, decode: score_answer(trajectory.answer, trajectory.question.golden_answers)


REWARDS: dict[str, Reward] = {
    "f1": _of_answer(f1),
    "em": _of_answer(em),
    "cover_em": _of_answer(cover_em),
    "em_folded": _of_answer(em_folded),
    "autorefine": lambda trajectory, decode: autorefine(trajectory),
    "search_r1_compat": lambda trajectory, decode: search_r1_em(
        decode(trajectory.ids), trajectory.question.golden_answers
    ),
}
