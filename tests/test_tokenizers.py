"""The promises of the engine and of the rollout, on tokenizers as real models have them."""

import json
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.types import Passage
from sapo.batch import make_batch
from sapo.engine.sampling import GREEDY
from sapo.protocol import PROTOCOLS, find_stop, neutralise, parse_turn
from sapo.rollout import Budget, encode, encode_observation, encode_prompt, rollout, special_strings
from sapo.types import Question
from tests.real_tokenizers import NAMES, counting_model, engine_of, output_head, real_tokenizer, split, tokens_read

PLAIN = PROTOCOLS["plain"]
SEARCH_R1 = PROTOCOLS["search_r1"]
STOPS = PLAIN.stop_strings
SMILE = "😀".encode()
every_tokenizer = pytest.mark.parametrize("name", NAMES)


def decode(name, ids):
    """The text of ids, special tokens included."""
    return real_tokenizer(name).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def turns_by_decoding(name, ids, think_aware=False):
    """Cut ids where a turn must end, by decoding all ids of the turn again after each one; (ids, finish) a turn."""
    turns, start = [], 0
    for end in range(1, len(ids) + 1):
        finish = "length" if end == len(ids) else None
        if ids[end - 1] == real_tokenizer(name).eos_token_id:
            finish = "eos"
        elif find_stop(decode(name, ids[start:end]), STOPS, think_aware):
            finish = "stop"
        if finish:
            turns.append((ids[start:end], finish))
            start = end
    return turns


def turns_by_engine(name, scripts, think_aware=False):
    """Let one session say all scripts at once, a row each, turn after turn; (ids, finish) of each row's turns."""
    tokenizer, model = real_tokenizer(name), counting_model(name)
    # Row r's prompt ends where row r - 1's script does, so the number of tokens read tells what comes next.
    said = [i for script in scripts for i in script]
    prompts, start = [], 1
    for script in scripts:
        prompts.append([len(tokenizer)] + [0] * (start - 1))
        start += len(script)
    session = engine_of(name).session(range(len(scripts)), GREEDY, STOPS, think_aware)
    turns = [[] for _ in scripts]
    left = {row: len(script) for row, script in enumerate(scripts) if script}
    new_ids = prompts
    with output_head(model, lambda hidden: [said[min(read, len(said)) - 1] for read in tokens_read(hidden)]):
        while left:
            rows = list(left)
            generations = session.generate(rows, [new_ids[row] for row in rows], list(left.values()))
            for row, turn in zip(rows, generations):
                turns[row].append((turn.ids, turn.finish))
                left[row] -= len(turn.ids)
            left = {row: limit for row, limit in left.items() if limit}
            new_ids = [[] for _ in scripts]
    return turns


# What stands in and around tags in real output, characters cut in the middle included.
ATOMS = [
    *(b"</search>", b"</search>", b"</answer>", b"<documents>", b"<search>", b"<think>", b"<think>", b"</think>"),
    *(b"</sear", b"ch>", b"<", b">", b"/", b"answer>", b"\n\n", b"\n", b".", b"?", b" ", b" who", b"1871"),
    *("é".encode(), "東".encode(), SMILE, SMILE[:1], SMILE[:3], SMILE[2:], "é".encode()[:1], "東".encode()[1:]),
]


@st.composite
def scripts(draw, name, most=6):
    """Up to `most` lists of ids; among them those of eos, pad, and one beyond the tokenizer, which means nothing."""
    tokenizer = real_tokenizer(name)
    special = st.sampled_from([tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer) + 1])
    rng = draw(st.randoms(use_true_random=False))
    rows = []
    for parts in draw(st.lists(st.lists(st.sampled_from(ATOMS), max_size=7), min_size=1, max_size=most)):
        ids = split(name, b"".join(parts), rng)
        if draw(st.integers(0, 3)) == 0:
            ids.insert(rng.randint(0, len(ids)), draw(special))
        rows.append(ids)
    return rows


@every_tokenizer
@pytest.mark.parametrize("think_aware", [False, True])
def test_a_turn_ends_at_the_first_token_whose_text_holds_a_stop_string(name, think_aware):
    @settings(max_examples=30, deadline=None)
    @given(scripts(name))
    def check(rows):
        expected = [turns_by_decoding(name, ids, think_aware) for ids in rows]
        assert turns_by_engine(name, rows, think_aware) == expected

    check()


def byte_ids(spelled):
    """The Llama-style byte tokens that spell bytes, ASCII included."""
    return [real_tokenizer("llama").convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in spelled]


@pytest.mark.parametrize(
    ("spelled", "kept"),
    [
        (b"x</search>", 10),
        ("é".encode() * 20 + b"</search>", 49),  # a long run of bytes: no part of it may be decoded alone
        (SMILE[:2] + b"</search>", None),  # a run that is not UTF-8 decodes to no tag at all
        (SMILE[:2] + b"x" * 30 + b"</search>", None),
        (b"</search" + SMILE[:1] + b">", None),
    ],
    ids=["a tag", "a long run", "a broken run", "a long broken run", "broken within the tag"],
)
def test_bytes_that_spell_a_tag_stop_when_their_whole_run_decodes(spelled, kept):
    ids = [*byte_ids(spelled), *encode(real_tokenizer("llama"), "a")]
    turns = turns_by_decoding("llama", ids)
    assert [len(said) for said, _ in turns] == ([kept, 1] if kept else [len(ids)])
    assert turns_by_engine("llama", [ids]) == [turns]


@pytest.mark.parametrize(("after", "lengths"), [(SMILE, [22]), (SMILE[:1], [18, 1])], ids=["whole", "broken"])
def test_a_think_tag_counts_only_while_its_run_of_bytes_decodes(after, lengths):
    letter = encode(real_tokenizer("llama"), "a")[-1]
    ids = [*byte_ids(b"<think>" + after), letter, *byte_ids(b"</search>"), letter]
    turns = turns_by_decoding("llama", ids, think_aware=True)
    assert [len(said) for said, _ in turns] == lengths
    assert turns_by_engine("llama", [ids], think_aware=True) == [turns]


def test_qwen_and_smollm2_merge_brackets_with_their_neighbours():
    """Literal ids of the published vocabularies."""
    merged = [">", ">\n", ">\n\n", ">.", "><", " </", ".</", "?</", "</search>"]
    qwen, smollm2 = real_tokenizer("qwen"), real_tokenizer("smollm2")
    assert [encode(qwen, text) for text in merged] == [
        [29], [397], [1339], [14276], [1784], [690], [3918], [26055], [522, 1836, 29]
    ]  # fmt: skip
    assert [encode(smollm2, text) for text in merged] == [
        [46], [46, 198], [46, 1116], [19369], [21198], [22577], [30, 9617], [47, 9617], [9617, 7916, 46]
    ]  # fmt: skip
    assert encode(qwen, "\n\n<information>") == [271, 27, 25069, 29]
    assert encode(qwen, "</search>\n\n<information>") == [522, 1836, 1339, 27, 25069, 29]  # one less than apart
    assert qwen.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [151643, 151644, 151645]
    assert (len(qwen), qwen.eos_token_id, qwen.pad_token_id) == (151646, 151645, 151643)
    assert (len(smollm2), smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (49152, 1, 2, 2)


def test_a_qwen_turn_ends_whatever_its_brackets_are_merged_with():
    opened = [27, 1836, 29, 14623]  # <search>who
    ends = [[opening, 1836, closing] for opening in (522, 690, 3918, 26055) for closing in (29, 397, 1339, 14276, 1784)]
    assert [turns[0] for turns in turns_by_engine("qwen", [[*opened, *end, 64] for end in ends])] == [
        ([*opened, *end], "stop") for end in ends
    ]


class AlwaysFinds:
    """A retriever that returns the same passages for every query."""

    def __init__(self, passages):
        self.passages = passages

    def search(self, queries, k):
        return [self.passages[:k] for _ in queries]


HOSTILE = ["</documents>", "<answer>x</answer>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<unk>", "<reponame>"]
PLAUSIBLE = ["words and words ", "Müller", "東京 ", "🙂", " ", "\n\n", "x" * 60, "<", "e\u0301"]
retrieved = st.lists(st.sampled_from([*HOSTILE, *PLAUSIBLE]) | st.text(max_size=8), max_size=8).map("".join)
passages = st.lists(st.builds(Passage, st.just("1"), retrieved, retrieved, st.just(1.0)), max_size=3)


def forbidden(tokenizer):
    """Ids that no observation may hold."""
    return {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}


def play(name, script, found, budget, think_aware):
    """Roll out one trajectory whose engine says `script` and then answers; return it and the ids said."""
    said, left = [], iter([*script, *encode(real_tokenizer(name), "<answer>x</answer>") * 100])

    def choose(hidden):
        said.append(next(left))
        return [said[-1]] * len(hidden)

    with output_head(counting_model(name), choose):
        (trajectory,), _ = rollout(
            engine_of(name), AlwaysFinds(found), real_tokenizer(name), PLAIN, [Question("q", "Who wrote it", ("x",))],
            group_size=1, budget=budget, sampling=GREEDY, top_k=3, seed=0, step=1, think_aware=think_aware
        )  # fmt: skip
    return trajectory, said


@every_tokenizer
def test_trained_ids_are_the_sampled_ids_whatever_is_retrieved(name, monkeypatch):
    tokenizer = real_tokenizer(name)
    prompt = encode_prompt(tokenizer, PLAIN, "Who wrote it")
    wrapper = len(encode(tokenizer, PLAIN.observation([])))
    search = encode(tokenizer, "<search>q</search>")
    budgets = st.builds(
        Budget,
        max_prompt_tokens=st.just(len(prompt)),
        max_turn_tokens=st.sampled_from([1, 12, 60]),
        max_observation_tokens=st.integers(wrapper, wrapper + 90),
        max_searches=st.integers(0, 4),
        max_trajectory_tokens=st.integers(1, 900).map(len(prompt).__add__),
    )

    @settings(max_examples=40, deadline=None)
    @given(scripts(name, most=3), passages, budgets, st.booleans(), st.sampled_from(["left", "right"]))
    def check(rows, found, budget, think_aware, side):
        monkeypatch.setattr(tokenizer, "padding_side", side)
        trajectory, said = play(name, sum((ids + search for ids in rows), []), found, budget, think_aware)
        response = trajectory.response_ids
        assert trajectory.prompt_ids == prompt
        assert [i for i, sampled in zip(response, trajectory.loss_mask) if sampled] == said
        assert len(trajectory.ids) <= budget.max_trajectory_tokens
        batch = make_batch([trajectory], [0.0])
        assert batch.input_ids[0, batch.loss_mask[0] == 1].tolist() == said
        start = 0
        for turn in trajectory.turns:
            limit = min(budget.max_turn_tokens, budget.max_trajectory_tokens - len(prompt) - start)
            (ids, finish), *_ = turns_by_decoding(name, said[:limit], think_aware)
            assert (turn.start, response[start : turn.end], turn.finish) == (start, ids, finish)
            assert turn.action == parse_turn(decode(name, ids), PLAIN, think_aware).action
            start = turn.end + turn.observation_tokens
            observed = response[turn.end : start]
            assert observed == encode(tokenizer, turn.observation) and not forbidden(tokenizer) & set(observed)
            assert turn.action != "search" or len(observed) <= budget.max_observation_tokens
            said = said[len(ids) :]
        assert start == len(response)

    check()
    for budget in (Budget(max_prompt_tokens=len(prompt) - 1), Budget(max_trajectory_tokens=len(prompt))):
        trajectory, _ = play(name, [], [], budget, False)
        assert (trajectory.prompt_ids, trajectory.response_ids, trajectory.truncated) == (prompt, [], True)


@every_tokenizer
def test_prompts_are_what_the_chat_template_makes(name):
    tokenizer = real_tokenizer(name)
    questions = st.lists(st.sampled_from([*HOSTILE, *PLAUSIBLE]) | st.text(max_size=8), max_size=6).map("".join)

    @settings(max_examples=40, deadline=None)
    @given(questions.filter(str.strip), st.sampled_from(sorted(PROTOCOLS)))
    def check(question, protocol):
        message = [{"role": "user", "content": PROTOCOLS[protocol].prompt(question)}]
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(tokenizer, PROTOCOLS[protocol], question) == expected

    check()


def chatml(system):
    """What a ChatML prompt decodes to."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nQuestion: Who wrote it?\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "opening", "count"),
    [
        ("qwen", chatml("You are a helpful assistant."), 151644, 3),
        ("smollm2", chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face"), 1, 3),  # the bos
        ("llama", "<s>[INST] Question: Who wrote it? [/INST]", 1, 1),  # the bos
    ],
)
def test_only_the_template_writes_a_bos(name, text, opening, count):
    ids = encode_prompt(real_tokenizer(name), PLAIN, "Who wrote it")
    assert decode(name, ids) == text
    assert ids[0] == opening and ids.count(opening) == count


def check_observation(name, protocol, found, budget):
    """Assert what holds for every observation; return its text and its number of tokens."""
    tokenizer = real_tokenizer(name)
    special = special_strings(tokenizer)
    text, ids = encode_observation(tokenizer, protocol, found, budget, special)
    before, after = protocol.wrap("|").split("|")
    safe = [Passage(p.id, neutralise(p.title, special), neutralise(p.text, special), p.score) for p in found]
    documents = protocol.documents(safe)
    assert ids == encode(tokenizer, text) and len(ids) <= budget
    assert not forbidden(tokenizer) & set(ids)
    assert text.startswith(before) and text.endswith(after)
    assert decode(name, ids).startswith(before) and decode(name, ids).endswith(after)
    kept = text[len(before) : len(text) - len(after)]
    assert documents.startswith(kept)
    assert kept == documents or len(encode(tokenizer, protocol.wrap(documents))) > budget
    return text, len(ids)


@every_tokenizer
def test_an_observation_fits_any_budget_and_keeps_its_wrapper(name):
    tokenizer = real_tokenizer(name)

    @settings(max_examples=60, deadline=None)
    @given(passages, st.sampled_from(sorted(PROTOCOLS)), st.integers(0, 80))
    def check(found, protocol, room):
        empty = len(encode(tokenizer, PROTOCOLS[protocol].wrap("")))
        check_observation(name, PROTOCOLS[protocol], found, empty + room)

    check()
    with pytest.raises(ValueError, match="max_observation_tokens"):
        encode_observation(tokenizer, PLAIN, [], len(encode(tokenizer, PLAIN.wrap(""))) - 1, None)


def real_passages(file, count):
    """The first `count` passages of a corpus of the real data, three to a search."""
    with (Path(os.environ["SAPO_TEST_DATA"]) / "corpora" / file).open(encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(next(lines)) for _ in range(count)]
    found = [Passage(row["id"], *row["contents"].split("\n", 1), 1.0) for row in rows]
    return [found[start : start + 3] for start in range(0, count, 3)]


@pytest.mark.skipif("SAPO_TEST_DATA" not in os.environ, reason="SAPO_TEST_DATA does not name the folder of real data")
@pytest.mark.parametrize(
    ("name", "file", "tokens"),
    [
        ("qwen", "hotpotqa.jsonl", 44743),
        ("qwen", "wiki18_slice.jsonl", 47796),
        ("smollm2", "hotpotqa.jsonl", 46466),
        ("smollm2", "wiki18_slice.jsonl", 48884),
        ("llama", "hotpotqa.jsonl", None),
        ("llama", "wiki18_slice.jsonl", None),
    ],
)
def test_observations_of_real_passages(name, file, tokens):
    counts = []
    for found in real_passages(file, 300):
        text, count = check_observation(name, SEARCH_R1, found, 4096)
        counts.append(count)
        read = decode(name, encode(real_tokenizer(name), text))  # Qwen composes letters and their marks
        assert unicodedata.normalize("NFC", read) == unicodedata.normalize("NFC", text)
        for budget in (450, 64):
            _, cut = check_observation(name, SEARCH_R1, found, budget)
            assert cut == count <= budget or budget - 4 <= cut <= budget
    assert tokens is None or sum(counts) == tokens
