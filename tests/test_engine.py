import itertools

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
)

from sapo.engine.hf import HFEngine, Session, StaticStep
from sapo.engine.sampling import GREEDY, Sampling, keyed_uniform, sample, trajectory_key, truncate
from tests.tiny import tiny_tokenizer

STOPS = ("</search>", "</answer>")


def tiny_model(tokenizer, seed=0, dtype=torch.float32, **changes):
    """A random Qwen2 with grouped heads; weights large enough that its distributions are far from flat."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 3,  # more embeddings than tokens, as real models have
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def full_logprobs(model, ids):
    """Log-softmax of one forward over a whole trajectory, [T, V]; row t predicts token t + 1."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def run_turns(engine, prompts, sampling, schedule_seed, turns=3, keys=None):
    """Drive a session through ragged turns of a seeded schedule; return ids and logprobs of each row."""
    rng = np.random.default_rng(schedule_seed)
    session = engine.session(keys or list(range(len(prompts))), sampling, STOPS)
    ids = [list(p) for p in prompts]
    logprobs = [[None] * len(p) for p in prompts]
    rows, new = list(range(len(prompts))), [list(p) for p in prompts]
    for _ in range(turns):
        limits = rng.integers(1, 14, len(rows)).tolist()
        for row, generation in zip(rows, session.generate(rows, new, limits)):
            ids[row] += generation.ids
            logprobs[row] += generation.logprobs
        rows = [row for row in rows if rng.random() < 0.8]
        new = [rng.integers(2, 200, int(rng.integers(0, 20))).tolist() for _ in rows]
        for row, added in zip(rows, new):
            ids[row] += added
            logprobs[row] += [None] * len(added)
        if not rows:
            break
    return ids, logprobs


def ragged_prompts(seed, count=6):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 200, int(n)).tolist() for n in rng.integers(1, 25, count)]
    prompts[2] = prompts[0]  # a group shares its prompt
    return prompts


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
@pytest.mark.parametrize("prefill_tokens", [7, 4096])
def test_logprobs_equal_one_full_forward(tokenizer, sampling, prefill_tokens):
    model = tiny_model(tokenizer)
    engine = HFEngine(model, tokenizer, prefill_tokens=prefill_tokens)
    for schedule in range(5):
        ids, logprobs = run_turns(engine, ragged_prompts(schedule), sampling, schedule)
        for row_ids, row_logprobs in zip(ids, logprobs):
            full = full_logprobs(model, row_ids)
            for t, logprob in enumerate(row_logprobs):
                if logprob is not None:
                    assert logprob == pytest.approx(full[t - 1, row_ids[t]].item(), abs=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logprobs_of_a_hundred_ragged_schedules_of_five_turns(tokenizer, dtype, tolerance):
    model = tiny_model(tokenizer, dtype=dtype)
    if dtype == torch.bfloat16:  # its logits alone are rounded by 2^-9: 0.02 for one of 8
        with torch.no_grad():
            model.lm_head.weight.mul_(0.25)
    worst = 0.0
    for schedule in range(100):
        budget, static_decode = [13, 64, 4096][schedule % 3], schedule % 2 == 1
        engine = HFEngine(model, tokenizer, prefill_tokens=budget, static_decode=static_decode)
        ids, logprobs = run_turns(engine, ragged_prompts(schedule, count=5), Sampling(), schedule, turns=5)
        for row_ids, row_logprobs in zip(ids, logprobs):
            full = full_logprobs(model, row_ids)
            for t, logprob in enumerate(row_logprobs):
                if logprob is not None:
                    worst = max(worst, abs(logprob - full[t - 1, row_ids[t]].item()))
    assert worst <= tolerance


@pytest.mark.parametrize("prefill_tokens", [600, 5000])
def test_prompts_longer_than_one_attention_call(tokenizer, prefill_tokens):
    model = tiny_model(tokenizer)
    prompts = [(np.arange(length) % 200 + 2).tolist() for length in (1300, 40, 513, 512)]
    engine = HFEngine(model, tokenizer, prefill_tokens=prefill_tokens)
    session = engine.session(range(4), Sampling(), ())
    first = session.generate(range(4), prompts, [3] * 4)
    said = [2 + i % 250 for i in range(700)]
    for prompt, a, b in zip(prompts, first, session.generate(range(4), [said] * 4, [3] * 4)):
        ids = prompt + a.ids + said + b.ids
        full = full_logprobs(model, ids)
        for start, generation in ((len(prompt), a), (len(ids) - len(b.ids), b)):
            expected = [full[start + t - 1, token].item() for t, token in enumerate(generation.ids)]
            assert generation.logprobs == pytest.approx(expected, abs=1e-5)


def test_eager_attention_and_llama_agree_with_the_full_forward_too(tokenizer):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=1, intermediate_size=64, initializer_range=0.2, eos_token_id=1)
    ).eval()  # fmt: skip
    for model in (llama, tiny_model(tokenizer, attn_implementation="eager")):
        ids, logprobs = run_turns(HFEngine(model, tokenizer), ragged_prompts(3), Sampling(), 3)
        for row_ids, row_logprobs in zip(ids, logprobs):
            full = full_logprobs(model, row_ids)
            for t, logprob in enumerate(row_logprobs):
                if logprob is not None:
                    assert logprob == pytest.approx(full[t - 1, row_ids[t]].item(), abs=1e-5)


def test_greedy_equals_generate_token_for_token(tokenizer):
    model = tiny_model(tokenizer)
    prompts = ragged_prompts(1)
    session = HFEngine(model, tokenizer).session(range(len(prompts)), GREEDY, ())
    ours = session.generate(range(len(prompts)), prompts, [40] * len(prompts))
    for prompt, generation in zip(prompts, ours):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert generation.ids == theirs[0, len(prompt) :].tolist()


def test_a_trajectory_does_not_depend_on_its_batch(tokenizer):
    model = tiny_model(tokenizer, dtype=torch.float64)
    prompts = ragged_prompts(2, count=8)
    keys = [trajectory_key(0, 1, f"q{i}", 0) for i in range(8)]

    def sampled(order, batch):
        found = {}
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            session = HFEngine(model, tokenizer).session([keys[i] for i in part], Sampling(), STOPS)
            first = session.generate(range(len(part)), [prompts[i] for i in part], [9] * len(part))
            second = session.generate(range(len(part)), [[5, 6, 7]] * len(part), [9] * len(part))
            found |= {i: (a.ids, b.ids) for i, a, b in zip(part, first, second)}
        return [found[i] for i in range(8)]

    alone = sampled(list(range(8)), 1)
    assert sampled(list(range(8)), 8) == alone
    assert sampled([5, 2, 7, 0, 1, 6, 3, 4], 3) == alone


def test_samples_of_a_group_differ_and_other_steps_differ(tokenizer):
    engine = HFEngine(tiny_model(tokenizer), tokenizer)
    keys = [trajectory_key(0, step, "q", sample) for step in (1, 2) for sample in range(4)]
    assert len(set(keys)) == 8
    outputs = engine.session(keys, Sampling(), ()).generate(range(8), [[5, 9, 11]] * 8, [12] * 8)
    assert len({tuple(o.ids) for o in outputs}) == 8


def test_weights_changed_in_place_are_used_by_the_next_session(tokenizer):
    model = tiny_model(tokenizer)
    engine = HFEngine(model, tokenizer)
    prompt = [7, 8, 9]
    engine.session([1], Sampling(), ()).generate([0], [prompt], [5])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    generation = engine.session([1], Sampling(), ()).generate([0], [prompt], [5])[0]
    full = full_logprobs(model, prompt + generation.ids)
    expected = [full[2 + t, token].item() for t, token in enumerate(generation.ids)]
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


def test_training_mode_with_gradient_checkpointing_is_put_aside_and_back(tokenizer):
    model = tiny_model(tokenizer)
    expected = HFEngine(model, tokenizer).session([1], GREEDY, ()).generate([0], [[7, 8, 9]], [8])
    model.gradient_checkpointing_enable()
    model.train()
    assert HFEngine(model, tokenizer).session([1], GREEDY, ()).generate([0], [[7, 8, 9]], [8]) == expected
    assert model.training


def say(tokenizer, model, pieces, limit=50, stops=STOPS, **options):
    """Make the engine sample the given token strings one by one; return the generation."""
    engine = HFEngine(model, tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(p) for p in pieces]
    assert None not in ids
    said = iter(ids + [tokenizer.eos_token_id] * limit)

    def head(hidden):
        logits = torch.full((hidden.shape[0], engine.is_eos.size), -1e9)
        logits[:, next(said)] = 0.0
        return logits

    model.get_output_embeddings = lambda: head
    try:
        return engine.session([0], GREEDY, stops, **options).generate([0], [[5, 6]], [limit])[0]
    finally:
        del model.get_output_embeddings


@pytest.mark.parametrize(
    ("pieces", "kept", "finish"),
    [
        (["<", "search", ">", "a", "</", "search", ">"], 7, "stop"),
        (["a", "</", "search", ">ĊĊ", "b"], 4, "stop"),  # the closing bracket is merged with what follows
        ([".</", "search", ">", "b"], 3, "stop"),  # and the opening one with what came before
        (["<", "/", "s", "e", "a", "r", "c", "h", ">", "b"], 9, "stop"),
        (["</", "answer", ">", "</", "answer", ">"], 3, "stop"),
        (["Ã", "<", "/", "search", ">", "b"], 5, "stop"),  # half of a character just before the tag
        (["<", "search", ">", "a"], 4, "eos"),
    ],
)
def test_a_turn_ends_at_the_token_that_completes_a_stop_string(tokenizer, pieces, kept, finish):
    model = tiny_model(tokenizer)
    generation = say(tokenizer, model, pieces)
    expected = [tokenizer.convert_tokens_to_ids(p) for p in pieces[:kept]]
    if finish == "eos":
        expected.append(tokenizer.eos_token_id)
    assert (generation.ids, generation.finish) == (expected, finish)


def test_think_aware_stops_ignore_tags_inside_think(tokenizer):
    model = tiny_model(tokenizer)
    pieces = ["<", "think", ">", "</", "search", ">", "</", "think", ">", "</", "answer", ">", "a"]
    assert len(say(tokenizer, model, pieces).ids) == 6
    assert len(say(tokenizer, model, pieces, think_aware=True).ids) == 12


def test_nan_logits_are_an_error(tokenizer):
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="NaN"):
        HFEngine(model, tokenizer).session([0], Sampling(), ()).generate([0], [[5]], [3])


def test_models_that_the_cache_does_not_fit_are_refused(tokenizer):
    windowed = tiny_model(tokenizer, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window"):
        HFEngine(windowed, tokenizer)


def test_positions_that_change_with_the_longest_row_are_refused(tokenizer):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        HFEngine(tiny_model(tokenizer, rope_parameters=rope), tokenizer)


def test_a_model_that_attends_twice_in_a_layer_is_refused(tokenizer):
    config = DiffLlamaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, intermediate_size=64, pad_token_id=0, eos_token_id=1)  # fmt: skip
    engine = HFEngine(AutoModelForCausalLM.from_config(config), tokenizer)
    with pytest.raises(ValueError, match="called its attention 4 times in a forward of 2 layers"):
        engine.session([0], GREEDY, ()).generate([0], [[5, 6]], [2])


def test_a_row_given_twice_is_an_error(tokenizer):
    engine = HFEngine(tiny_model(tokenizer), tokenizer)
    with pytest.raises(ValueError, match="given twice"):
        engine.session([0], GREEDY, ()).generate([0, 0], [[5], [5]], [2, 2])
    engine.is_eos[:] = False
    session = engine.session([0], GREEDY, ())
    with engine.inference():
        session.start([0], [[5]], [9])
        with pytest.raises(ValueError, match="has not ended"):
            session.start([0], [[5]], [9])


def test_ragged_rows_under_autocast(tokenizer):
    """bf16 without ZeRO: rotary embeddings leave queries and keys in float32, values are bf16."""
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.25)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids, logprobs = run_turns(HFEngine(model, tokenizer), ragged_prompts(1), Sampling(), 1)
        for row_ids, row_logprobs in zip(ids, logprobs):
            full = full_logprobs(model, row_ids)
            for t, logprob in enumerate(row_logprobs):
                if logprob is not None:
                    assert logprob == pytest.approx(full[t - 1, row_ids[t]].item(), abs=0.04)


def test_keyed_uniform_is_fixed_and_uniform():
    keys = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    first = keyed_uniform(keys, np.zeros(3, dtype=np.int64))
    # SplitMix64 of seed 0 starts with 0xE220A8397B1DCDAF (published test vector).
    assert first[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53
    many = keyed_uniform(np.full(200_000, 7, dtype=np.uint64), np.arange(200_000))
    assert abs(many.mean() - 0.5) < 0.003 and abs(many.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.01


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 0.5]])
    expected = torch.softmax(logits / 0.7, -1)[0]
    uniform = (np.arange(100_000) + 0.5) / 100_000
    ids, logprobs = sample(logits.expand(100_000, -1), uniform, Sampling(temperature=0.7))
    counts = torch.bincount(ids, minlength=5) / 100_000
    assert torch.allclose(counts, expected, atol=2e-5)
    assert torch.allclose(logprobs.exp(), expected[ids], atol=1e-6)


def test_a_uniform_next_to_one_never_draws_an_impossible_token():
    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    ids, logprobs = sample(logits, np.array([1 - 2.0**-53]), Sampling())
    assert ids.item() == 1 and torch.isfinite(logprobs).all()
    assert sample(logits, np.array([0.0]), Sampling())[0].item() == 0


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [1, 2]),
        (Sampling(top_p=0.6), [1, 2]),  # .5 alone is below .6, so the next one is kept as well
        (Sampling(top_p=0.5), [2]),
        (Sampling(top_p=1e-9), [2]),
        (Sampling(min_p=0.5), [1, 2]),
        (Sampling(top_k=3, min_p=0.5), [1, 2]),
    ],
)
def test_truncation_keeps_and_renormalises(sampling, kept):
    probabilities = torch.tensor([[0.125, 0.25, 0.5, 0.125]], dtype=torch.float64)
    out = truncate(probabilities.log(), sampling).exp()[0]
    total = probabilities[0, kept].sum()
    expected = [probabilities[0, i].item() / total.item() if i in kept else 0.0 for i in range(4)]
    assert out.tolist() == pytest.approx(expected, abs=1e-12)


def test_recorded_logprobs_are_of_the_sampled_or_the_full_distribution():
    logits = torch.tensor([[0.125, 0.25, 0.5, 0.125]]).log()
    for recorded, expected in (("sampled", 2 / 3), ("full", 0.5)):
        ids, logprobs = sample(logits, np.array([0.99]), Sampling(top_k=2, logprobs=recorded))
        assert ids.item() == 2 and logprobs.exp().item() == pytest.approx(expected, abs=1e-6)


def row_by_row(model, tokenizer, key, turns, sampling):
    """Sample one row without a cache: a full forward of everything so far for each token."""
    ids, prompt, generations = [], len(turns[0][0]), []
    for new_ids, limit in turns:
        ids = ids + new_ids
        said, logprobs, finish = [], [], "length"
        for _ in range(limit):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1:]
            uniform = keyed_uniform(np.array([key], dtype=np.uint64), np.array([len(ids) - prompt]))
            token, logprob = (value.item() for value in sample(logits, uniform, sampling))
            ids, said, logprobs = [*ids, token], [*said, token], [*logprobs, logprob]
            if token == tokenizer.eos_token_id:
                finish = "eos"
                break
            if any(stop in tokenizer.decode(said) for stop in ("d>", "</", "ab")):
                finish = "stop"
                break
        generations.append((said, logprobs, finish))
    return generations


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_come_and_go_equal_a_sampler_without_a_cache(tokenizer, seed):
    """Ragged groups that join late, pause, stop in any order, and go on; float64, token for token."""
    rng = np.random.default_rng(seed)
    model = tiny_model(tokenizer, dtype=torch.float64)
    sampling = [Sampling(), GREEDY, Sampling(temperature=1.7, top_p=0.9), Sampling(top_k=5)][seed % 4]

    def text(length):
        return rng.integers(0, len(tokenizer), length).tolist()

    count = int(rng.integers(2, 14))
    prompts = [text(int(rng.integers(1, 20))) for _ in range(count)]
    for row in range(1, count):
        if rng.random() < 0.5:
            prompts[row] = prompts[row - 1]
    keys = [trajectory_key(seed, 1, "q", row) for row in range(count)]
    engine = HFEngine(
        model, tokenizer, prefill_tokens=int(rng.choice([1, 5, 40, 10_000])), static_decode=bool(seed // 4 % 2)
    )
    session = engine.session(keys, sampling, ("d>", "</", "ab"))
    turns, generated = [[] for _ in range(count)], [[] for _ in range(count)]
    joins = rng.integers(0, 3, count)
    for call in range(5):
        rows = [int(row) for row in rng.permutation(count) if call >= joins[row] and rng.random() < 0.75]
        for row in rows:
            new = text(int(rng.choice([0, 1, 12]))) if turns[row] else prompts[row]
            turns[row].append((new, int(rng.choice([1, 3, 12]))))
        new_ids, limits = [turns[row][-1][0] for row in rows], [turns[row][-1][1] for row in rows]
        for row, generation in zip(rows, session.generate(rows, new_ids, limits)):
            generated[row].append(generation)
    for row in range(count):
        if not turns[row]:
            continue
        for got, (ids, logprobs, finish) in zip(
            generated[row], row_by_row(model, tokenizer, keys[row], turns[row], sampling), strict=True
        ):
            assert (got.ids, got.finish) == (ids, finish)
            assert got.logprobs == pytest.approx(logprobs, abs=1e-9)


@pytest.mark.parametrize("static_decode", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_join_while_others_write_equal_rows_alone(tokenizer, seed, static_decode):
    rng = np.random.default_rng(seed)
    model = tiny_model(tokenizer, dtype=torch.float64)
    count = 9

    def turn():
        return rng.integers(0, len(tokenizer), int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 40))

    turns = [[turn() for _ in range(3)] for _ in range(count)]
    engine = HFEngine(model, tokenizer, prefill_tokens=16, static_decode=static_decode)
    engine.is_eos[:] = False
    session = engine.session(range(count), Sampling(), ("d>",))
    done = [[] for _ in range(count)]
    idle = set(range(count))
    with engine.inference():
        while any(len(row) < 3 for row in done):
            joining = [row for row in sorted(idle) if len(done[row]) < 3 and rng.random() < 0.1]
            begun = [turns[row][len(done[row])] for row in joining]
            finished = session.start(joining, [new for new, _ in begun], [limit for _, limit in begun])
            idle -= set(joining)
            finished |= session.step()
            for row, generation in finished.items():
                done[row].append(generation)
                idle.add(row)
                if len(done[row]) == 3 and rng.random() < 0.5:
                    session.free([row])
    for row in range(count):
        alone = engine.session([row], Sampling(), ("d>",))
        for (new, limit), generation in zip(turns[row], done[row]):
            (expected,) = alone.generate([0], [new], [limit])
            assert (generation.ids, generation.finish) == (expected.ids, expected.finish)
            assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


def test_a_static_step_is_made_again_only_when_its_shapes_no_longer_hold(tokenizer, monkeypatch):
    made, run = [], StaticStep.run
    monkeypatch.setattr(StaticStep, "run", lambda self, *rest: made.append(self) or run(self, *rest))
    engine = HFEngine(tiny_model(tokenizer), tokenizer, static_decode=True)
    engine.is_eos[:] = False
    session = engine.session(range(8), Sampling(), ())
    session.generate(range(8), [[5 + i] * 100 for i in range(8)], [10, 10, 40, 40, 40, 40, 40, 40])
    # 9 steps of 8 rows up to slot 109, on to slot 112 where the block is full, on to 128 and then to 144, the new end
    # of the block; two dead rows of eight are no reason to capture again
    steps = [len(list(group)) for _, group in itertools.groupby(made, key=id)]
    assert sum(steps) == 39 and len(steps) <= 4
    assert {len(step.rows) for step in made} == {8}


def test_the_longest_stop_string_is_seen_byte_by_byte(tokenizer):
    pieces = ["a", "b", *"<information>", "c"]
    generation = say(tokenizer, tiny_model(tokenizer), pieces, stops=("</search>", "<information>"))
    assert (len(generation.ids), generation.finish) == (15, "stop")


def test_a_think_block_stays_open_however_long_it_is(tokenizer):
    inside = [*"x" * 60, "</", "search", ">", *"y" * 40]
    pieces = ["<", "think", ">", *inside, "</", "think", ">", "</", "answer", ">", "z"]
    assert len(say(tokenizer, tiny_model(tokenizer), pieces, limit=200, think_aware=True).ids) == 112


def test_a_tag_that_is_one_special_token_stops_too():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</search>"]})
    generation = say(tokenizer, tiny_model(tokenizer), ["<", "search", ">", "a", "</search>", "b"])
    assert (len(generation.ids), generation.finish) == (5, "stop")


@pytest.mark.parametrize("ends", [[70, 71], 70, None])
def test_the_eos_ids_of_tokenizer_and_generation_config_all_end_a_turn(tokenizer, ends):
    model = tiny_model(tokenizer)
    model.generation_config.eos_token_id = ends
    assert np.flatnonzero(HFEngine(model, tokenizer).is_eos).tolist() == sorted(
        {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends else [])}
    )


def test_no_forward_of_a_prefill_exceeds_its_token_budget(tokenizer, monkeypatch):
    shapes = []
    forward = Session._forward

    def spy(self, ids, *rest):
        shapes.append(ids.shape)
        return forward(self, ids, *rest)

    monkeypatch.setattr(Session, "_forward", spy)
    prompts = [[5 + i] * length for i, length in enumerate((3, 50, 50, 20, 20, 7))]
    HFEngine(tiny_model(tokenizer), tokenizer, prefill_tokens=40).session(range(6), GREEDY, ()).generate(
        range(6), prompts, [1] * 6
    )
    assert shapes == [(40,), (40,), (40,), (30,)]  # 150 tokens, none of them padding


def test_rows_that_have_stopped_leave_the_decode_batch(tokenizer, monkeypatch):
    widths = []
    forward = Session._forward

    def spy(self, ids, *rest):
        widths.append(len(ids))
        return forward(self, ids, *rest)

    monkeypatch.setattr(Session, "_forward", spy)
    session = HFEngine(tiny_model(tokenizer), tokenizer).session(range(8), Sampling(), ())
    session.engine.is_eos[:] = False
    session.generate(range(8), [[5 + i] for i in range(8)], [2] * 7 + [10])
    assert widths == [8, 8] + [1] * 8


@pytest.mark.parametrize("config", [MistralConfig, Phi3Config, Starcoder2Config])
def test_a_window_without_layer_types_is_refused(tokenizer, config):
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, intermediate_size=32, pad_token_id=0, eos_token_id=1)  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window"):
        HFEngine(AutoModelForCausalLM.from_config(config(**sizes, sliding_window=6)), tokenizer)
    HFEngine(AutoModelForCausalLM.from_config(config(**sizes, sliding_window=None)), tokenizer)
