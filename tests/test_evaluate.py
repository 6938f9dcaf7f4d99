"""evaluate.py on benchmarks: files, resuming, refusals, agents, comparisons."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
from sapo.assemble import source_commit
from sapo.config import load_config
from sapo.data import load_benchmarks
from sapo.data import main as data_main
from tests.test_agents import Server, url  # noqa: F401 (a fixture)
from tests.test_engine import tiny_model
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["red", "blue", "green", "old", "new", "tall", "small", "cold", "warm", "wide", "deep"]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model, two benchmarks of eleven and five questions, a corpus, and a config of all that."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, count in (("nq", 11), ("bamboogle", 5)):
        rows = [
            {"id": f"test_{n}", "question": f"what is {w}", "golden_answers": [w]} for n, w in enumerate(WORDS[:count])
        ]
        write_jsonl(folder / f"{name}_raw.jsonl", rows)
    files = [f"--file={name}={folder / name}_raw.jsonl" for name in ("nq", "bamboogle")]
    assert data_main(["prepare", "--out", str(folder / "data"), "--train", "", "--partial", *files]) == 0
    write_jsonl(
        folder / "corpus.jsonl", [{"id": str(n), "contents": f'"{w}"\n{w} is {w}'} for n, w in enumerate(WORDS)]
    )
    (folder / "c.yaml").write_text(f"""
name: tiny
model: {{path: {folder}/model}}
data: {{train: [none.jsonl]}}
protocol: {{template: plain}}
retriever: {{corpus: {folder}/corpus.jsonl, index: {folder}/index, top_k: 2}}
rollout: {{questions_per_step: 2, group_size: 2, max_rows: 4, max_prompt_tokens: 64, max_turn_tokens: 24,
  max_observation_tokens: 40, max_searches: 2, max_trajectory_tokens: 216}}
optim: {{minibatch_responses: 4}}
""")
    return folder


def arguments(folder, out, *more, benchmarks="nq,bamboogle"):
    return [
        "--config", f"{folder}/c.yaml", "--model", f"{folder}/model", "--benchmarks", benchmarks, "--data-dir",
        f"{folder}/data", "--out", str(out), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder):
    """The result of an uninterrupted evaluation."""
    assert evaluate.main(arguments(folder, folder / "whole", "--label", "mine")) == 0
    return folder / "whole"


def result(folder, name="search_greedy"):
    return json.loads((folder / f"{name}.json").read_text())


def untimed(content):
    return {key: value for key, value in content.items() if key != "time"}


def test_an_evaluation_leaves_all_that_reproduces_it(whole, folder, capsys):
    content = result(whole)
    assert (content["n"], content["agent"], content["sampling"], content["samples"]) == (16, "search", "greedy", 1)
    assert content["splits"] == {"nq": "test", "bamboogle": "test"} and content["top_k"] == 2
    assert content["decoding"]["temperature"] == 0 and content["budget"]["max_searches"] == 2
    assert content["corpus"]["passages"] == 11 and len(content["corpus"]["corpus_id"]) == 64
    assert len(content["model_sha256"]) == 64 and content["dtype"] == "float32" and content["chat_template"] is False
    assert {"torch", "transformers", "python"} <= set(content["versions"]) and "commit" in content
    assert {name: part["n"] for name, part in content["benchmarks"].items()} == {"nq": 11, "bamboogle": 5}
    assert set(content["averages"]) == {"single_hop", "multi_hop", "macro"}
    rows = [json.loads(line) for line in (whole / "search_greedy.predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"nq:test_{n}" for n in range(11)] + [
        f"bamboogle:test_{n}" for n in range(5)
    ]
    assert {p.suffix for p in whole.iterdir()} == {".json", ".jsonl", ".md", ".html"} and len(
        list(whole.iterdir())
    ) == 4


def test_the_table_has_the_papers_layout_and_rows(whole):
    lines = (whole / "search_greedy.md").read_text().splitlines()
    assert lines[0] == "| EM | NQ | TriviaQA | PopQA | HotpotQA | 2Wiki | MuSiQue | Bamboogle | avg |"
    assert lines[2].startswith("| **mine** | .000 [.000, .259] | – | – |") and lines[2].endswith("| – |")
    assert "| SAPO-3B-Instruct (paper) | .469 | .629 | .457 | .456 | .448 | .203 | .432 | .442 |" in lines
    text = lines[-1]
    commit = ("commit ",) if source_commit() else ()  # none outside a checkout
    for part in ("greedy", "template plain", "top-2 of 11 passages", "NQ test", "model ", *commit):
        assert part in text, part


def test_the_page_holds_the_transcripts_and_a_search(whole, folder):
    page = (whole / "search_greedy.html").read_text()
    assert page.count("<details data-verdict=") == 16 and 'id="search"' in page and "what is red" in page
    copy = folder / "page"
    shutil.copytree(whole, copy)
    assert evaluate.main(arguments(folder, copy, "--transcripts", "2")) == 0
    assert (copy / "search_greedy.html").read_text().count("<details data-verdict=") == 4


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stopped_evaluation_goes_on_to_the_same_result(whole, folder, tmp_path, monkeypatch, batches):
    left = batches

    def stop(dist, label):
        def show(done, of, em):
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        return show

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "show_progress", stop)
        assert evaluate.main(arguments(folder, tmp_path)) == 130
    predictions = tmp_path / "search_greedy.predictions.jsonl"
    assert predictions.read_text().count("\n") == 4 * batches and not (tmp_path / "search_greedy.json").exists()
    with predictions.open("a") as file:
        file.write('{"id": "nq:test_4", "sam')  # what a kill leaves
    assert evaluate.main(arguments(folder, tmp_path)) == 0
    assert predictions.read_bytes() == (whole / predictions.name).read_bytes()
    assert untimed(result(tmp_path)) == untimed(result(whole))
    assert result(tmp_path)["time"]["resumed_rows"] == 4 * batches


def test_two_ranks_give_the_result_of_one(whole, folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29577"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(ROOT / "evaluate.py"), *arguments(folder, tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert result(tmp_path)["time"]["ranks"] == 2
    name = "search_greedy.predictions.jsonl"
    assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert untimed(result(tmp_path)) == untimed(result(whole))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["retriever.top_k=1"], "top_k is 2 there, 1 here"),
        (["seed=1"], "decoding is"),
        (["protocol.template=sapo", "rollout.max_prompt_tokens=120"], 'template is "plain" there, "sapo" here'),
        (["--limit", "3"], "n is 16 there, 6 here"),
    ],
)
def test_results_of_other_settings_are_not_overwritten(whole, folder, capsys, more, reason):
    before = {path: path.read_bytes() for path in whole.iterdir()}
    assert evaluate.main(arguments(folder, whole, *more)) == 1
    message = capsys.readouterr().err
    assert reason in message and "--fresh" in message and "search_greedy.json" in message
    assert before == {path: path.read_bytes() for path in whole.iterdir()}


def test_another_model_or_corpus_is_refused_also_half_way(whole, folder, tmp_path, capsys):
    half = tmp_path / "half"
    half.mkdir()
    content = result(whole)
    shutil.copy(whole / "search_greedy.predictions.jsonl", half)
    (half / "search_greedy.started.json").write_text(json.dumps(content | {"model_sha256": "0" * 64}))
    assert evaluate.main(arguments(folder, half)) == 1
    assert 'model_sha256 is "0000' in capsys.readouterr().err
    (half / "search_greedy.started.json").write_text(json.dumps(content))
    other = tmp_path / "corpus.jsonl"
    other.write_text((folder / "corpus.jsonl").read_text() + '{"id": "x", "contents": "t\\nmore"}\n')
    more = [f"retriever.corpus={other}", f"retriever.index={tmp_path}/index"]
    assert evaluate.main(arguments(folder, half, *more)) == 1
    assert "corpus is" in capsys.readouterr().err
    assert evaluate.main(arguments(folder, half, "--fresh", *more)) == 0
    assert result(half)["corpus"]["passages"] == 12


def test_samples_and_search_r1_decoding(folder, tmp_path, capsys):
    assert (
        evaluate.main(
            arguments(folder, tmp_path, "--sampling", "search-r1", "--samples", "3", "--json", benchmarks="bamboogle")
        )
        == 0
    )
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (content["samples"], content["n"], content["name"]) == (3, 5, "search_search-r1")
    assert (content["decoding"]["temperature"], content["decoding"]["top_p"]) == (1.0, 1.0) and "pass_em" in content
    table = (tmp_path / "search_search-r1.md").read_text()
    assert "pass@3" in table and "sampled at T = 1, top-p 1, as Search-R1 evaluates, 3 samples a" in table


@pytest.mark.parametrize("agent", ["direct", "rag", "ircot"])
def test_baselines(folder, tmp_path, agent):
    more = ["--agent", agent, "--limit", "3", "rollout.max_trajectory_tokens=2000"]
    assert evaluate.main(arguments(folder, tmp_path, *more)) == 0
    content = result(tmp_path, f"{agent}_greedy")
    assert (content["n"], content["corpus"] is None) == (6, agent == "direct")
    # the second query of ircot is what a random model writes: nothing is found for it
    assert content["searches"] == {"direct": 0, "rag": 1, "ircot": 1}[agent]
    assert content["hit_rate"] == (agent != "direct")  # the corpus answers every question


def test_a_model_behind_an_endpoint(folder, tmp_path, url, capsys):  # noqa: F811
    answer = {"choices": [{"message": {"content": "<answer>red"}, "finish_reason": "stop"}]}
    Server.plan = [(200, json.dumps(answer))] * 6
    assert evaluate.main(arguments(folder, tmp_path, "--limit", "3", "--endpoint", url)) == 0
    content = result(tmp_path)
    assert content["benchmarks"]["nq"]["em"] == pytest.approx(1 / 3) and content["endpoint"].startswith(url)
    Server.plan = [(400, "context too long")] * 6
    assert evaluate.main(arguments(folder, tmp_path / "b", "--limit", "3", "--endpoint", url)) == 1
    assert "context too long" in capsys.readouterr().err


def test_other_question_files(folder, tmp_path, capsys):
    data = write_jsonl(tmp_path / "mine.jsonl", [{"question": "what is red", "golden_answers": ["red"]}] * 3)
    command = ["--config", f"{folder}/c.yaml", "--model", f"{folder}/model", "--out", str(tmp_path / "out")]
    assert evaluate.main([*command, "--data", str(data), "--limit", "2"]) == 0
    content = result(tmp_path / "out")
    assert (content["n"], content["sources"], content["splits"], content["averages"]) == (2, ["mine"], {}, {})
    rows = [{"question": "what is red", "golden_answers": ["red"], "data_source": "hotpotqa", "split": "train"}] * 2
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    command[-1] = str(tmp_path / "train")
    assert evaluate.main([*command, "--data", str(train)]) == 0
    table = (tmp_path / "train" / "search_greedy.md").read_text()
    assert "| – | – | – | – | – | – | – | – |" in table.splitlines()[2]  # no benchmark of the paper
    assert "| hotpotqa (own file) |" in table
    assert evaluate.main([*command, "--fresh"]) == 1
    assert "there are no questions: give --benchmarks" in capsys.readouterr().err


def test_options_that_would_be_ignored_are_refused(folder, tmp_path, capsys):
    for more, message in (
        (["--decoding", "greedy"], "--decoding is for"),
        (["--samples", "2"], "greedy repeats itself"),
        (["--checkpoint", "3"], "--checkpoint chooses one of --run"),
        (["--data", "x"], "either --benchmarks or --data"),
    ):
        with pytest.raises(SystemExit):
            evaluate.main(arguments(folder, tmp_path, *more))
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main(["--run", "runs/x", "--agent", "rag"])
    assert "go with --benchmarks or --config" in capsys.readouterr().err


def test_the_budgets_of_search_r1():
    config = load_config(ROOT / "configs" / "qwen3b-instruct.yaml", ["preset=presets/search_r1"])
    rollout = config.rollout
    assert (config.protocol.template, rollout.max_searches, rollout.max_turn_tokens) == ("search_r1", 4, 500)
    assert (rollout.max_observation_tokens, rollout.max_trajectory_tokens) == (500, 2048 + 5 * 500 + 4 * 500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmarks": "nq,squad"}, "unknown benchmark 'squad': choose of nq, triviaqa"),
        ({"benchmarks": "nq,nq"}, "one is named twice"),
        ({"benchmarks": "popqa"}, "popqa.jsonl: make it with python -m sapo.data prepare"),
    ],
)
def test_benchmarks_that_are_not_there(folder, tmp_path, capsys, change, message):
    assert evaluate.main(arguments(folder, tmp_path, **change)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "nq:test_0"}, "id 'nq:test_0' is that of"),
        ({"golden_answers": []}, r"'golden_answers' is \[\]"),
        ({"data_source": "hotpotqa"}, "a prepared row has id, data_source = 'nq' and split"),
        ({"split": None}, "a prepared row has id"),
    ],
)
def test_bad_rows_of_a_benchmark_are_named(folder, tmp_path, row, message):
    good = json.loads((folder / "data" / "nq.jsonl").read_text().splitlines()[0])
    write_jsonl(tmp_path / "nq.jsonl", [good, good | {"id": "nq:test_1"} | row])
    with pytest.raises(ValueError, match=message) as error:
        load_benchmarks(tmp_path, ["nq"])
    assert f"{tmp_path}/nq.jsonl, row 2" in str(error.value)


def test_a_comparison_names_what_flipped(whole, folder, tmp_path, capsys):
    """B: the evaluation with two answers of NQ and one of Bamboogle set right."""
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    lines = (other / "search_greedy.predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for n in (0, 3, 12):
        rows[n] |= {"em": 1.0, "f1": 1.0, "answer": rows[n]["golden_answers"][0]}
    write_jsonl(other / "search_greedy.predictions.jsonl", rows)
    content = result(other) | {"top_k": 5, "model": "other"}
    (other / "search_greedy.json").write_text(json.dumps(content))
    out = tmp_path / "compared.json"
    assert evaluate.main(["compare", str(whole), str(other), "--out", str(out), "--json"]) == 0
    text = capsys.readouterr().out
    compared = json.loads(text.splitlines()[-1])
    assert compared == json.loads(out.read_text())
    assert compared["differing_conditions"] == {"top_k": [2, 5]} and "not like for like: top_k" in text
    em = {name: part["em"] for name, part in compared["comparisons"].items()}
    assert (em["nq"]["gained"], em["nq"]["lost"], em["nq"]["n"]) == (2, 0, 11)
    assert em["pooled"]["difference"] == pytest.approx(3 / 16) and em["pooled"]["p_value"] == 0.25
    assert em["pooled"]["low"] > 0 and em["bamboogle"]["p_value"] == 1.0
    assert [flip["id"] for flip in compared["flips"]] == ["nq:test_0", "nq:test_3", "bamboogle:test_1"]
    assert "gained (3, the first 3):" in text and "[red] A: None B: 'red'" in text


def test_what_cannot_be_compared_is_refused(whole, folder, tmp_path, capsys):
    def refused(path, message):
        assert evaluate.main(["compare", str(whole), str(path)]) == 1
        assert message in capsys.readouterr().err

    part = tmp_path / "part"
    shutil.copytree(whole, part)
    lines = (part / "search_greedy.predictions.jsonl").read_text().splitlines(keepends=True)
    (part / "search_greedy.predictions.jsonl").write_text("".join(lines[:-1]))
    refused(part, "1 are only in the first, 0 only in the second")
    changed = json.loads(lines[0]) | {"golden_answers": ["crimson"]}
    (part / "search_greedy.predictions.jsonl").write_text(json.dumps(changed) + "\n" + "".join(lines[1:]))
    refused(part, "question nq:test_0 has another golden_answers")
    (part / "search_greedy.predictions.jsonl").write_text("".join(lines[:-1]) + lines[-1][:30])
    refused(part, "line 16: not a prediction row")
    refused(tmp_path, "it holds none: name the .json file")
    refused(part / "no.json", "no result file")
