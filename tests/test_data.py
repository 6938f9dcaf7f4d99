import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from sapo.data import BENCHMARKS, TRAIN_ROWS, load_benchmarks, load_questions, main, spare_questions, step_questions
from sapo.types import Question

QUESTIONS = [Question(id=f"q:{n}", question=f"question {n}", golden_answers=("a",)) for n in range(10)]


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    return path


def test_jsonl_rows_become_questions(tmp_path):
    path = write(
        tmp_path / "nq.jsonl",
        '{"id": "dev_0", "question": "who", "golden_answers": ["a", "b"]}',
        "",
        '{"id": "dev_0", "question": " when?", "golden_answers": "c", "hops": 2, "data_source": "world", "other": 1}\r',
        "",
    )
    assert load_questions([path]) == [
        Question(id="nq:1", question="who", golden_answers=("a", "b"), source="nq"),
        Question(id="nq:3", question=" when?", golden_answers=("c",), source="world", hops=2),
    ]


def test_ids_are_unique_over_files_with_equal_rows_and_names(tmp_path):
    row = '{"id": "test_0", "question": "q", "golden_answers": "a"}'
    paths = [write(tmp_path / folder / "dev.jsonl", row, row) for folder in ("nq", "hotpotqa")]
    assert [q.id for q in load_questions(paths)] == ["dev:1", "dev:2", "dev#2:1", "dev#2:2"]


def test_the_limit_counts_over_files(tmp_path):
    row = '{"question": "q", "golden_answers": "a"}'
    paths = [write(tmp_path / f"{name}.jsonl", row, row) for name in "ab"]
    assert [q.id for q in load_questions(paths, limit=3)] == ["a:1", "a:2", "b:1"]
    assert len(load_questions(paths, limit=9)) == 4


def test_only_newline_ends_a_row(tmp_path):
    text = "line\u2028separator\u0085next"
    path = write(tmp_path / "a.jsonl", f'{{"question": "{text}", "golden_answers": ["x\u2029y"]}}')
    (question,) = load_questions([path])
    assert (question.question, question.golden_answers) == (text, ("x\u2029y",))


def test_search_r1_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [
        {
            "id": "train_0",
            "question": "q1",
            "golden_answers": ["a"],
            "data_source": "nq",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["never"]}},
            "extra_info": {"index": 0},
        },
        {
            "id": "train_0",
            "question": "q2",
            "golden_answers": None,
            "data_source": "hotpotqa",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["b", "c"]}},
            "extra_info": {"index": 0},
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_questions([path]) == [
        Question(id="train:1", question="q1", golden_answers=("a",), source="nq"),
        Question(id="train:2", question="q2", golden_answers=("b", "c"), source="hotpotqa"),
    ]
    without = [{key: value for key, value in row.items() if key != "golden_answers"} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(without), path)
    assert [q.golden_answers for q in load_questions([path])] == [("never",), ("b", "c")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "q"}', "'golden_answers' is None"),
        ('{"question": "q", "golden_answers": []}', r"'golden_answers' is \[\]"),
        ('{"question": "q", "golden_answers": ["", " "]}', "at least one not empty"),
        ('{"question": "q", "golden_answers": [1990]}', r"'golden_answers' is \[1990\]"),
        ('{"question": "q", "golden_answers": {"a": 1}}', "give a text or a list of texts"),
        ('{"question": "q", "reward_model": {"ground_truth": []}}', "'golden_answers' is None"),
        ('{"question": "  ", "golden_answers": "a"}', "'question' is '  '"),
        ('{"golden_answers": "a"}', "'question' is None"),
        ('{"question": "q", "golden_answers": "a", "hops": "2"}', "'hops' an integer"),
        ('{"question": "q", "golden_answers": "a"', "not a line of JSON"),
        ('["q", "a"]', "a row is an object"),
        ('{"question": "q\\ud800", "golden_answers": "a"}', "half of a surrogate pair"),
        ('{"question": "\ud800", "golden_answers": "a"}', "not a line of JSON in UTF-8"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", '{"question": "q", "golden_answers": "a"}', "", row)
    with pytest.raises(ValueError, match=message) as error:
        load_questions([path])
    assert str(error.value).startswith(f"{path}, row 3: ") and "\n" not in str(error.value)


def test_a_bad_parquet_row_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q", "q"], "golden_answers": [["a"], None]}), path)
    with pytest.raises(ValueError, match=rf"^{path}, row 2: 'golden_answers' is None"):
        load_questions([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for name, message in (("none.jsonl", "no such question file"), ("a.csv", "question files are .jsonl or .parquet")):
        with pytest.raises(ValueError, match=rf"^{tmp_path / name}: {message}"):
            load_questions([tmp_path / name])
    with pytest.raises(ValueError, match="x.parquet: not a parquet file"):
        load_questions([write(tmp_path / "x.parquet", "no")])


def test_an_epoch_draws_no_question_twice():
    drawn = [[q.id for q in step_questions(QUESTIONS, step, 3, seed=7)] for step in range(1, 7)]
    assert all(len(set(ids)) == 3 for ids in drawn)
    for epoch in (drawn[:3], drawn[3:]):
        assert len({name for ids in epoch for name in ids}) == 9
    assert drawn[:3] != drawn[3:]


def test_the_order_depends_on_step_and_seed_alone():
    first = [step_questions(QUESTIONS, step, 5, seed=1) for step in (1, 2, 3)]
    assert [step_questions(QUESTIONS, step, 5, seed=1) for step in (3, 2, 1)] == first[::-1]
    assert step_questions(QUESTIONS, 1, 10, seed=1) != step_questions(QUESTIONS, 1, 10, seed=2)
    assert first[0] != QUESTIONS[:5]


def test_the_remainder_changes_from_epoch_to_epoch():
    counts = Counter(q.id for step in range(1, 61) for q in step_questions(QUESTIONS, step, 7, seed=0))
    assert len(counts) == 10 and sum(counts.values()) == 420 and min(counts.values()) > 30


def test_without_a_seed_the_order_is_that_of_the_files():
    assert step_questions(QUESTIONS, 2, 3, seed=None) == QUESTIONS[3:6]
    assert step_questions(QUESTIONS, 4, 3, seed=None) == QUESTIONS[0:3]


def test_spare_questions_are_all_that_the_step_does_not_draw():
    for step in range(1, 8):
        drawn = [q.id for q in step_questions(QUESTIONS, step, 3, seed=7)]
        spare = [q.id for q in spare_questions(QUESTIONS, step, 3, seed=7)]
        assert len(spare) == 7 and sorted(drawn + spare) == sorted(q.id for q in QUESTIONS)
    assert list(spare_questions(QUESTIONS, 1, 10, seed=7)) == []


def test_the_order_of_spare_questions_depends_on_step_and_seed_alone():
    def spare(step, seed):
        return [q.id for q in spare_questions(QUESTIONS, step, 1, seed)]

    first = [spare(step, 1) for step in (1, 2, 3)]
    assert [spare(step, 1) for step in (3, 2, 1)] == first[::-1]
    drawn = {q.id for step in (1, 2) for seed in (1, 2) for q in step_questions(QUESTIONS, step, 1, seed)}
    never_drawn = [tuple(n for n in spare(step, seed) if n not in drawn) for step in (1, 2) for seed in (1, 2)]
    assert len(set(never_drawn)) == 4


def test_without_a_seed_spare_questions_are_the_next_of_the_files():
    assert list(spare_questions(QUESTIONS, 2, 3, seed=None)) == QUESTIONS[6:] + QUESTIONS[:3]
    assert list(spare_questions(QUESTIONS, 4, 3, seed=None)) == QUESTIONS[3:]


def test_impossible_draws_are_refused():
    with pytest.raises(ValueError, match="there are 10 training questions, but rollout.questions_per_step = 11"):
        step_questions(QUESTIONS, 1, 11, seed=0)
    with pytest.raises(ValueError, match="step is 0: steps count from 1"):
        step_questions(QUESTIONS, 0, 2, seed=0)


def test_the_mixes_have_the_known_sizes():
    assert sum(benchmark.rows for benchmark in BENCHMARKS.values()) == 51713
    assert sum(TRAIN_ROWS.values()) == 169615
    assert [name for name, benchmark in BENCHMARKS.items() if benchmark.split == "dev"] == [
        "hotpotqa", "2wikimultihopqa", "musique"
    ]  # fmt: skip


def rows_of(name, count, split="test"):
    return [{"id": f"{split}_{n}", "question": f"{name} {n}", "golden_answers": [f"a{n}"]} for n in range(count)]


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def known(monkeypatch, **rows):
    """Make benchmarks that small."""
    for name, count in rows.items():
        monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], rows=count))
        if name in TRAIN_ROWS:
            monkeypatch.setitem(TRAIN_ROWS, name, 2 * count)


def test_prepare_reads_flashrags_folders(tmp_path, monkeypatch, capsys):
    known(monkeypatch, nq=4, hotpotqa=3)
    for name, split, count in (("nq", "test", 4), ("nq", "train", 8), ("hotpotqa", "dev", 3), ("hotpotqa", "train", 6)):
        write(tmp_path / name / f"{split}.jsonl", *map(json.dumps, rows_of(name, count, split)))
    command = [
        "prepare",
        "--out",
        str(tmp_path / "out"),
        "--source",
        str(tmp_path),
        "--test",
        "nq,hotpotqa",
        "--held-out",
        "2",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "test mix: 7 questions of 7" in out and "training mix: 14 questions of 14" in out
    assert "other than known" in out  # not the questions of FlashRAG's NQ
    assert lines(tmp_path / "out" / "hotpotqa.jsonl")[2] == {
        "id": "hotpotqa:dev_2", "question": "hotpotqa 2", "golden_answers": ["a2"], "data_source": "hotpotqa",
        "split": "dev",
    }  # fmt: skip
    train, held_out = (lines(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "heldout"))
    assert len(train) == 12 and len(held_out) == 2
    assert len({row["id"] for row in train + held_out}) == 14 and {row["split"] for row in train + held_out} == {
        "train"
    }
    questions, splits = load_benchmarks(tmp_path / "out", ["nq", "hotpotqa"])
    assert splits == {"nq": "test", "hotpotqa": "dev"} and questions[4] == Question(
        "hotpotqa:dev_0", "hotpotqa 0", ("a0",), "hotpotqa"
    )
    manifest = json.loads((tmp_path / "out" / "data.json").read_text())
    assert manifest["files"]["nq.jsonl"]["rows"] == 4 and len(manifest["files"]["nq.jsonl"]["sha256"]) == 64
    # the same again changes nothing; other held-out questions would overwrite
    assert main(command) == 0
    assert main([*command, "--seed", "1"]) == 1
    assert "is there already with other content" in capsys.readouterr().err
    assert lines(tmp_path / "out" / "heldout.jsonl") == held_out


def test_held_out_questions_stand_nowhere_else_in_the_mix(tmp_path, monkeypatch):
    known(monkeypatch, nq=5)
    rows = rows_of("nq", 10, "train")
    for n in range(5):
        rows[n + 5] |= {"question": rows[n]["question"]}
    rows[9] |= {"question": "alone"}
    path = write(tmp_path / "t.jsonl", *map(json.dumps, rows))
    command = ["prepare", "--out", str(tmp_path / "out"), "--file", f"nq:train={path}", "--test", "", "--train", "nq"]
    assert main([*command, "--held-out", "2"]) == 0
    assert {row["question"] for row in lines(tmp_path / "out" / "heldout.jsonl")} == {"alone", "nq 4"}
    assert main([*command, "--held-out", "3"]) == 1


@pytest.mark.parametrize("form", ["list", "str", "ndarray", "prompt"])
def test_prepare_reads_search_r1s_parquet(tmp_path, monkeypatch, form):
    known(monkeypatch, nq=2, hotpotqa=1)
    target = {"str": "x", "ndarray": np.array(["x", "y"], dtype=object)}.get(form, ["x", "y"])
    rows = []
    for name, index in (("nq", 0), ("hotpotqa", 0), ("nq", 1)):
        row = {
            "id": f"test_{index}", "data_source": name, "ability": "fact-reasoning", "extra_info": {"index": index},
            "prompt": [{"role": "user", "content": f"An example. Question: {name} {index}?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        }  # fmt: skip
        rows.append(row if form == "prompt" else row | {"question": f"{name} {index}?"})
    pandas.DataFrame(rows).to_parquet(tmp_path / "test.parquet")
    command = [
        "prepare",
        "--out",
        str(tmp_path / "out"),
        "--source",
        str(tmp_path),
        "--test",
        "nq,hotpotqa",
        "--train",
        "",
    ]
    assert main(command) == 0
    nq = lines(tmp_path / "out" / "nq.jsonl")
    assert [(row["id"], row["question"]) for row in nq] == [("nq:test_0", "nq 0?"), ("nq:test_1", "nq 1?")]
    assert nq[0]["golden_answers"] == (["x"] if form == "str" else ["x", "y"])
    assert len(lines(tmp_path / "out" / "hotpotqa.jsonl")) == 1


def test_prepare_reads_the_hub(tmp_path, monkeypatch, capsys):
    known(monkeypatch, bamboogle=2)
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(rows_of("bamboogle", 2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    command = ["prepare", "--out", str(tmp_path / "out"), "--test", "bamboogle", "--train", ""]
    assert main(command) == 0 and asked == [("RUC-NLPIR/FlashRAG_datasets", "bamboogle", "test")]
    assert [row["id"] for row in lines(tmp_path / "out" / "bamboogle.jsonl")] == [
        "bamboogle:test_0",
        "bamboogle:test_1",
    ]

    def offline(*_, **__):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert main(command) == 1
    assert "ConnectionError: no network): without a network give the files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (rows_of("nq", 3), [], "holds 3 questions of nq, but nq/test has 4: give the whole split, or --partial"),
        (rows_of("nq", 3) + rows_of("nq", 1), [], "row 4: id 'nq:test_0' is that of"),
        ([*rows_of("nq", 3), {"question": "q"}], [], "row 4: 'golden_answers' is None"),
        (rows_of("nq", 4), ["--test", "nq,popqa"], "no popqa/test in the source: give --file popqa:test=PATH"),
        (rows_of("nq", 4), ["--test", "squad"], "unknown data set 'squad'"),
        (rows_of("nq", 4), ["--file", "squad=x"], "--file squad=x: write NAME=PATH"),
        (rows_of("nq", 4), ["--test", "popqa", "--partial"], "the source holds none of the questions"),
    ],
)
def test_what_prepare_refuses(tmp_path, monkeypatch, capsys, rows, more, message):
    known(monkeypatch, nq=4)
    path = write(tmp_path / "nq.jsonl", *map(json.dumps, rows))
    command = ["prepare", "--out", str(tmp_path / "out"), "--train", "", "--test", "nq", f"--file=nq={path}", *more]
    assert main(command) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_prepare_takes_a_part_when_told_so(tmp_path, capsys):
    path = write(tmp_path / "nq.jsonl", *map(json.dumps, rows_of("nq", 3)))
    command = ["prepare", "--out", str(tmp_path / "out"), "--train", "", f"--file=nq={path}", "--partial"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "PARTIAL" in out and "test mix: 3 questions of 3,610" in out


@pytest.mark.skipif("SAPO_TEST_DATA" not in os.environ, reason="SAPO_TEST_DATA does not name the folder of real data")
def test_real_question_files():
    folder = Path(os.environ["SAPO_TEST_DATA"]) / "qa"
    rows = {
        "nq_open_dev": 3610,
        "triviaqa_test": 11313,
        "popqa_1k_flashrag": 1000,
        "hotpotqa_dev_full": 7405,
        "2wiki_dev_full": 12576,
        "musique_dev_full": 2417,
        "bamboogle": 125,
        "hotpotqa_ctx": 297,
        "hotpotqa_train_ctx": 100,
    }
    questions = load_questions([folder / f"{name}.jsonl" for name in rows])
    assert Counter(q.source for q in questions) == rows
    assert len({q.id for q in questions}) == sum(rows.values())
    assert questions[3610 + 11312].id == "triviaqa_test:11313"
    last = json.loads((folder / "triviaqa_test.jsonl").read_bytes().rstrip(b"\n").split(b"\n")[-1])
    assert questions[3610 + 11312].golden_answers == tuple(last["golden_answers"])
