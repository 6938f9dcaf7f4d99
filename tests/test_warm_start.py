"""Demonstrations, their encoding, the loss, and the folder that the warm start leaves behind."""

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sapo.warm_start as module
from sapo.policy import load_policy
from sapo.protocol import PROTOCOLS, parse_turn
from sapo.warm_start import (
    WarmStartSettings,
    demonstrate,
    encode_demonstrations,
    make_model,
    train_tokenizer,
    warm_start,
    weighted_loss,
)
from sapo.world import WorldSettings, make_world

PLAIN = PROTOCOLS["plain"]
VERBS = {
    "birthplace": "was born in",
    "employer": "works for",
    "mayor": "is governed by",
    "sponsor": "is sponsored by",
    "headquarters": "is based in",
    "founder": "was set up by",
}
WORLD = WorldSettings(entities=240, distractors=60, pool_words=16, train_questions=300, heldout_questions=200)
TINY = WarmStartSettings(
    hidden_size=32, heads=2, intermediate_size=32, vocab_size=600, demonstrations=64, batch_size=8, warmup_steps=2
)


@pytest.fixture(scope="module", autouse=True)
def small_tokenizer_corpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENIZER_DEMONSTRATIONS", 300)
        yield


@pytest.fixture(scope="module")
def world():
    return make_world(WORLD, seed=3)


def draw(world, count: int, faults: bool, **changes: float) -> list[list[str]]:
    rng = random.Random(5)
    settings = TINY.model_copy(update=changes)
    return [demonstrate(world, settings, PLAIN, rng, faults) for _ in range(count)]


def hops_of(pieces: list[str]) -> int:
    return pieces[0].count(" the ")


def test_a_faultless_demonstration_searches_once_per_hop_and_answers_from_the_last_document(world):
    for pieces in draw(world, 200, faults=False):
        turns = [parse_turn(turn, PLAIN) for turn in pieces[1::2]]
        assert [turn.action for turn in turns] == ["search"] * hops_of(pieces) + ["answer"]
        assert turns[0].content.split(" of ")[1] == pieces[0].removesuffix("?\n").rpartition(" of ")[2]
        for turn, document, following in zip(turns, pieces[2::2], pieces[3::2]):
            evidence = following.removeprefix("<think> ").partition(" </think>")[0]
            assert f"{evidence}." in document
            name, subject = turn.content.split(" of ")
            stated = VERBS[name]
            assert evidence.startswith(f"{subject} {stated} ")
        assert evidence.endswith(turns[-1].content)


def test_every_turn_ends_with_the_closing_tag_of_its_action(world):
    for pieces in draw(world, 200, faults=True):
        assert all(turn.endswith("</search>") for turn in pieces[1:-1:2])
        assert pieces[-1].endswith("</answer>")


def test_faults_come_as_often_as_their_settings_say(world):
    count = 4000
    guesses = sum(len(pieces) == 2 for pieces in draw(world, count, True, guess=0.3, stop_early=0, wrong_relation=0))
    assert abs(guesses / count - 0.3) < 4 * math.sqrt(0.3 * 0.7 / count)
    several = [
        pieces
        for pieces in draw(world, count, True, guess=0, stop_early=0.6, wrong_relation=0)
        if hops_of(pieces) > 1
    ]
    early = sum(len(pieces) == 4 for pieces in several)
    assert abs(early / len(several) - 0.6) < 4 * math.sqrt(0.6 * 0.4 / len(several))
    # those that go on after the first search finish
    assert all(len(pieces) in (4, 2 + 2 * hops_of(pieces)) for pieces in several)
    wrong = 0
    for pieces in draw(world, count, True, guess=0, stop_early=0, wrong_relation=0.2):
        asked = pieces[0].removesuffix("?\n").split(" of ")[-2].rpartition("the ")[2]
        wrong += parse_turn(pieces[1], PLAIN).content.split(" of ")[0] != asked
    assert abs(wrong / count - 0.2) < 4 * math.sqrt(0.2 * 0.8 / count)


def test_a_wrong_relation_is_answered_with_the_wrong_fact(world):
    for pieces in draw(world, 100, True, guess=0, stop_early=0, wrong_relation=1):
        assert len(pieces) == 4
        evidence = pieces[3].removeprefix("<think> ").partition(" </think>")[0]
        assert f"{evidence}." in pieces[2] and evidence.endswith(parse_turn(pieces[3], PLAIN).content)


def test_no_demonstration_holds_a_heldout_name(world):
    text = "\n".join(piece for faults in (True, False) for pieces in draw(world, 3000, faults) for piece in pieces)
    assert not [name for name in world.heldout_names if name in text]


@pytest.fixture(scope="module")
def tokenizer(world):
    return train_tokenizer((piece for pieces in draw(world, 500, faults=False) for piece in pieces), 600)


def test_the_tokenizer_is_byte_level_with_distinct_specials_and_tags_of_ordinary_tokens(tokenizer):
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer.chat_template is None
    assert set(tokenizer.get_added_vocab()) == {"<|pad|>", "<|eos|>"}
    for tag in ("<think>", "</search>", "</answer>"):
        assert len(tokenizer(tag, add_special_tokens=False)["input_ids"]) >= 2
    text = "<think> é 日本 \n\n x </think><answer> \x00 ?\n</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_pieces_are_encoded_apart_and_weighted_by_kind(tokenizer):
    pieces = ["Question: ma", "yor <search> a </se", "arch>\n<documents> b", " </documents> <answer> b </answer>"]
    apart = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    ((ids, weights),) = encode_demonstrations(tokenizer, [pieces], document_weight=0.25)
    assert ids == sum(apart, [])
    assert weights == [w for w, part in zip([0.0, 1.0, 0.25, 1.0], apart) for _ in part]
    merged = tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
    assert ids != merged


def test_the_loss_is_the_weighted_sum_over_tokens_and_padding_changes_nothing(tokenizer):
    torch.manual_seed(0)
    model = make_model(TINY, tokenizer).double()
    input_ids = torch.tensor([[5, 9, 7, 11], [8, 6, 0, 0]])
    weights = torch.tensor([[0.0, 1.0, 0.3, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    expected = 0.0
    for row, t in ((0, 1), (0, 2), (1, 1)):
        logits = model(input_ids=input_ids[row : row + 1, :t]).logits[0, -1].tolist()
        target = logits[int(input_ids[row, t])]
        expected += float(weights[row, t]) * (math.log(sum(math.exp(x) for x in logits)) - target)
    assert weighted_loss(model, input_ids, weights).item() == pytest.approx(expected, rel=1e-9)


def run(out_dir: Path, **arguments) -> tuple[Path, list[float]]:
    losses: list[float] = []
    folder = warm_start(
        TINY, WORLD, out_dir, **{"seed": 3, **arguments}, progress=lambda step, steps, loss, speed: losses.append(loss)
    )
    return folder, losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run(tmp_path_factory.mktemp("warm_start"))
    torch.set_num_threads(threads)


def test_training_lowers_the_loss_of_other_demonstrations(trained, world):
    folder, losses = trained
    assert len(losses) == 8
    model, tokenizer = load_policy(folder)
    torch.manual_seed(3)
    untrained = make_model(TINY, tokenizer)
    rows = encode_demonstrations(tokenizer, draw(world, 20, faults=False), document_weight=0.3)
    after, before = (
        sum(weighted_loss(m, torch.tensor([ids]), torch.tensor([weights])).item() for ids, weights in rows)
        for m in (model, untrained)
    )
    assert after < 0.95 * before


def test_the_folder_is_an_ordinary_hugging_face_folder(trained):
    folder, _ = trained
    model, tokenizer = load_policy(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.float32
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.config.vocab_size == len(tokenizer)
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == model.num_parameters()
    text = '<think> Bela\'s 12 </think><search> mayor of Zo </search>\n<documents> "A" b. </documents>\n'
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_one_seed_gives_the_same_bytes_and_leaves_the_global_random_state_alone(trained, tmp_path):
    folder, losses = trained
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again, losses_again = run(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses_again == losses
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_a_complete_folder_is_never_trained_again(trained):
    folder, _ = trained
    assert run(folder.parent) == (folder, [])


def test_every_input_has_its_own_folder_and_both_kinds_of_demonstration_share_one_tokenizer(trained, tmp_path):
    folder, _ = trained
    other_seed, _ = run(tmp_path, seed=4)
    clean, losses = run(tmp_path, faults=False)
    assert len({folder.name, other_seed.name, clean.name}) == 3
    assert len(losses) == 8
    assert (clean / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (clean / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_an_interrupted_training_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_folder_it_made(tmp_path, capsys):
    overrides = [f"warm_start.{key}={value}" for key, value in TINY.model_dump(exclude_defaults=True).items()]
    overrides += [f"world.{key}={value}" for key, value in WORLD.model_dump(exclude_defaults=True).items()]
    config = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
    module.main(["--config", config, "--out", str(tmp_path), "--no-faults", *overrides])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("clean-")
    assert f"warm start: {folder}" in capsys.readouterr().out


def test_settings_that_cannot_work_say_what_to_change():
    with pytest.raises(ValueError, match="multiple of 2 \\* heads"):
        WarmStartSettings(hidden_size=100, heads=8)
