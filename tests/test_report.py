import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sapo.report import choose_examples, main, plot_curves, safe, write_report

VOID = {"meta", "br", "img", "input", "hr", "link"}
HOSTILE = "<script>alert(1)</script></pre></div>\"'&amp; \u202egnp.exe \x00 \ud800 \u2028 $\\frac{a$ " + "W" * 50


def test_report_of_a_finished_run_holds_every_part(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    text = _Page(page).text
    assert "quick finished" in text and "3 of 3 steps · 7m 11s · started 2026-01-02 · commit 0123456789ab" in text
    assert "0.250 → 0.750 held-out EM, greedy, n = 4" in text
    assert "0.000 → 0.500 held-out EM, sampled, n = 4" in text
    assert "0.000 held-out EM without retrieval, greedy" in text
    for title in ("Importance ratio", "Clip fraction", "Entropy (nats)", "Reward", "Exact match", "Gate fraction"):
        assert title in text
    for title in ("Searches per question", "Tokens per response", "Gradient norm"):
        assert title in text
    assert "held-out greedy" in text and "held-out sampled" in text
    assert "torch 2.13.0" in text and "loss.gamma 0.1" in text


def test_table_rows_are_before_after_and_the_two_controls(tmp_path: Path) -> None:
    rows = _Page(write_report(_finished_run(tmp_path)).read_text(encoding="utf-8")).table
    assert rows[0] == ["decoding", "policy", "n", "EM", "1-hop", "2-hop", "F1", "cover-EM", "searches", "invalid"]
    # ± 1.96 * sqrt(0.25 * 0.75 / 4) = 0.424, 1.96 * sqrt(0.5 * 0.5 / 4) = 0.490
    tail = ["0.500", "1.50", "0.100"]
    assert rows[1:] == [
        ["greedy", "before RL (step 0)", "4", "0.250 ±0.424", "0.500 n=2", "0.000 n=2", "0.300", *tail],
        ["", "after RL (step 3)", "4", "0.750 ±0.424", "1.000 n=2", "0.500 n=2", "0.800", *tail],
        ["", "warm start on fault-free demonstrations, no RL", "4", "0.500 ±0.490", "0.500 n=2", "0.500 n=2", "0.550",
         *tail],
        ["", "retriever made to return nothing", "4", "0.000 ±0.000", "0.000 n=2", "0.000 n=2", "0.050", *tail],
        ["sampled", "before RL (step 0)", "4", "0.000 ±0.000", "0.000 n=2", "0.000 n=2", "0.050", *tail],
        ["", "after RL (step 3)", "4", "0.500 ±0.490", "0.500 n=2", "0.500 n=2", "0.550", *tail],
    ]  # fmt: skip


def test_conditions_stand_under_the_table(tmp_path: Path) -> None:
    text = _Page(write_report(_finished_run(tmp_path)).read_text(encoding="utf-8")).text
    assert "decoding: temperature 0.0 / temperature 1.0; template: plain; corpus: corpus_id abc; top-k: 1;" in text


def test_trajectories_show_the_same_questions_before_and_after(tmp_path: Path) -> None:
    page = _Page(write_report(_finished_run(tmp_path)).read_text(encoding="utf-8"))
    assert (
        "Greedy decoding at step 0 and step 3 on the same 4 questions: 2 became right, 1 were right both times, "
        "1 stayed wrong, 0 were lost."
    ) in page.text
    # Became right first (hops in turn), then still wrong, then right both times.
    assert page.summaries == [
        "1-hop wrong → right Who q1?",
        "2-hop wrong → right Who q2?",
        "2-hop wrong → wrong Who q3?",
        "1-hop right → right Who q0?",
        "config.yaml",
    ]
    card = page.text[page.text.index("Who q1?") : page.text.index("Who q2?")]
    assert card.startswith("Who q1? golden: right answer / alias step 0 wrong answer F1 0.00 · EM 0 · searches 1")
    assert "search <search> query of q1 </search> <documents> document of q1 </documents>" in card
    assert "answer <answer> wrong answer </answer> step 3 right answer F1 1.00 · EM 1 · searches 1" in card
    assert page.classes["model"] == 1 + 2 * 8 and page.classes["observation"] == 1 + 8  # with the legend


def test_page_is_one_static_file(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    source = write_report(run).read_text(encoding="utf-8")
    page = _Page(source)
    assert page.unclosed == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & page.tags
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", source)
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]
    assert write_report(run).read_text(encoding="utf-8") == source  # made again, the same bytes


def test_hostile_text_is_shown_and_never_interpreted(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    for step in (0, 3):
        path = run / "eval" / f"step_{step}_greedy.predictions.jsonl"
        rows = [json.loads(line) for line in path.read_text().split("\n") if line]
        for row in rows:
            row |= {"question": HOSTILE, "golden_answers": [HOSTILE], "answer": HOSTILE, "hops": HOSTILE}
            row["turns"] = [dict.fromkeys(("text", "action", "content", "observation", "finish"), HOSTILE)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = json.loads((run / "eval" / f"step_{step}_greedy.json").read_text())
        result |= {"template": HOSTILE, "commit": HOSTILE, "n": HOSTILE, "by_hops": {HOSTILE: {"n": HOSTILE, "em": 1}}}
        (run / "eval" / f"step_{step}_greedy.json").write_text(json.dumps(result))
    record = dict.fromkeys(("name", "commit", "started", "status"), HOSTILE)
    (run / "run.json").write_text(json.dumps(record | {"versions": {HOSTILE: HOSTILE}}))
    (run / "config.yaml").write_text(json.dumps({"loss": {"name": HOSTILE}, HOSTILE: 1}))

    page = _Page(write_report(run).read_text(encoding="utf-8"))
    assert page.unclosed == [] and "script" not in page.tags
    shown = "<script>alert(1)</script></pre></div>\"'&amp; ⟨U+202E⟩gnp.exe ⟨U+0000⟩ ⟨U+D800⟩ ⟨U+2028⟩ $\\frac{a$ WWW"
    assert page.text.count(shown) > 40
    assert not re.search("[\x00\u202e\u2028\ud800]", page.text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a<b>&\"'", "a&lt;b&gt;&amp;&quot;&#x27;"),
        ("tab\tline\n", "tab\tline\n"),
        ("\r\x1b[31m\x7f", "⟨U+000D⟩⟨U+001B⟩[31m⟨U+007F⟩"),
        ("\ufeff\u2066\udfff", "⟨U+FEFF⟩⟨U+2066⟩⟨U+DFFF⟩"),
        ("é 日本 👩\u200d🔬 می\u200cروم", "é 日本 👩\u200d🔬 می\u200cروم"),
        (None, "None"),
    ],
)
def test_safe(text: object, shown: str) -> None:
    assert safe(text) == shown


def test_long_texts_are_cut_with_their_length(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    path = run / "eval" / "step_3_greedy.predictions.jsonl"
    path.write_text(path.read_text().replace("document of q1", "x" * 50_000))
    page = _Page(write_report(run).read_text(encoding="utf-8"))
    assert "x" * 5900 in page.text and "x" * 6000 not in page.text
    assert "… 44,025 more characters" in page.text  # of 50,025 with the tags and spaces around


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (("metrics.jsonl",), "metrics.jsonl has no rows yet: there are no curves."),
        (("eval",), "There are no held-out evaluations yet."),
        (("run.json",), "unknown"),
        (("config.yaml",), "3 steps"),
        (("metrics.jsonl", "eval", "run.json", "config.yaml"), "There are no held-out evaluations yet."),
    ],
)
def test_missing_files_leave_their_part_out(tmp_path: Path, missing: tuple[str, ...], expected: str) -> None:
    run = _finished_run(tmp_path)
    for name in missing:
        if name == "eval":
            (run / name).rename(tmp_path / "elsewhere")
        else:
            (run / name).unlink()
    page = _Page(write_report(run).read_text(encoding="utf-8"))
    assert expected in page.text and page.unclosed == []
    assert ("Training curves" in page.text) == ("metrics.jsonl" not in missing or "eval" not in missing)
    assert ("Trajectories" in page.text) == ("eval" not in missing)


def test_files_of_a_killed_run_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    for name in ("metrics.jsonl", "eval/step_3_sampled.json", "eval/step_3_greedy.predictions.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(len(content) * 0.6)])
    (run / "config.yaml").write_text("loss: {gamma: [")
    (run / "run.json").write_bytes(b"\xff[1, 2")
    (run / "eval" / "step_2_greedy.json").write_text("[]")
    page = _Page(write_report(run).read_text(encoding="utf-8"))
    for note in (
        "run.json is not a complete JSON object and was left out.",
        "eval/step_3_sampled.json is not a complete JSON object and was left out.",
        "eval/step_2_greedy.json is not a complete JSON object and was left out.",
        "config.yaml is not valid YAML and is shown as it is.",
    ):
        assert note in page.text
    assert "0.250 → 0.750 held-out EM, greedy" in page.text and "0.000 held-out EM, sampled" in page.text
    assert "on the same 2 questions: 1 became right, 1 were right both times" in page.text


def test_values_of_wrong_types_do_not_break_the_page(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    odd = [None, "x", [], {}, True, -1.5, 1e400]
    keys = ("em", "n", "f1", "cover_em", "searches", "invalid_frac", "by_hops", "decoding", "corpus", "template")
    for value in odd:
        (run / "eval" / "step_0_greedy.json").write_text(json.dumps(dict.fromkeys(keys, value) | {"step": 0}))
        row = dict.fromkeys(("question", "golden_answers", "hops", "answer", "em", "f1", "searches", "turns"), value)
        turn = {"turns": [value, dict.fromkeys(("text", "action", "observation"), value)]}
        lines = [{"id": value}, row | {"id": "q0"}, row | {"id": "q1"} | turn, value]
        predictions = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "eval" / "step_0_greedy.predictions.jsonl").write_text(predictions)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/em": value, "policy/ratio_p01": value}))
        (run / "run.json").write_text(json.dumps(dict.fromkeys(("name", "commit", "versions", "wall_s"), value)))
        (run / "config.yaml").write_text(json.dumps({"loss": value, "optim": {"steps": value}}))
        assert _Page(write_report(run).read_text(encoding="utf-8")).unclosed == []


def test_one_evaluation_is_shown_alone(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    for path in (run / "eval").glob("*"):
        if not path.name.startswith("step_0_greedy"):
            path.unlink()
    page = _Page(write_report(run).read_text(encoding="utf-8"))
    assert "Greedy decoding at step 0: 1 of 4 questions right." in page.text
    assert "0.250 held-out EM, greedy" in page.text and "→" not in page.text
    assert page.classes["model"] == 1 + 8


def test_no_run_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="none is not a run folder: give the folder that holds metrics.jsonl"):
        write_report(tmp_path / "none")
    with pytest.raises(SystemExit, match="1"):
        main([str(tmp_path / "none")])
    assert "none is not a run folder" in capsys.readouterr().err


def test_examples_take_from_every_kind_and_fill_up() -> None:
    def row(name: str, em: int, hops: int = 1) -> dict:
        return {"id": name, "em": em, "hops": hops}

    before = [row(f"q{i}", i % 2, hops=1 + i % 3) for i in range(40)]
    after = [row(f"q{i}", (i // 2) % 2) for i in range(39)]  # q39 is missing
    chosen = choose_examples(before, after, 8)
    kinds = [(b["em"], a["em"]) for b, a in chosen]
    assert kinds == [(0, 1)] * 4 + [(0, 0)] * 2 + [(1, 0)] + [(1, 1)]
    assert [b["hops"] for b, _ in chosen[:4]] == [1, 2, 3, 1]
    assert all(b["id"] == a["id"] for b, a in chosen)
    # Nothing became right: the share goes to what there is.
    stuck = choose_examples([row(f"q{i}", 0) for i in range(9)], [row(f"q{i}", 0) for i in range(9)], 8)
    assert [b["id"] for b, _ in stuck] == [f"q{i}" for i in range(8)]
    assert len(choose_examples(before, after, 100)) == 39
    assert choose_examples([], after, 8) == []


def test_curves_have_the_values_of_the_log(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    rows = [{"step": step, "policy/clip_frac": 0.5 if step == 2 else None} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = write_report(run).read_text(encoding="utf-8")
    svgs = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    assert [ET.fromstring(svg).get("aria-label") for svg in svgs] == ["Clip fraction", "Exact match"]
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids))


def test_readme_figure(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    png = plot_curves(run, tmp_path / "docs" / "curves.png")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    for path in (run / "metrics.jsonl", *(run / "eval").glob("*.json")):
        path.unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no rows to draw"):
        plot_curves(run, tmp_path / "none.png")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _finished_run(tmp_path)
    main([str(run), "--curves", str(tmp_path / "c.png")])
    assert capsys.readouterr().out.splitlines() == [str(run / "report.html"), str(tmp_path / "c.png")]


def _finished_run(tmp_path: Path) -> Path:
    run = tmp_path / "quick"
    (run / "eval").mkdir(parents=True)
    names = ("reward/mean", "reward/em", "policy/ratio_mean", "policy/ratio_p01", "policy/clip_frac",
             "policy/entropy_nats", "policy/gate_frac", "rollout/searches", "rollout/response_tokens",
             "rollout/sampled_tokens", "optim/grad_norm")  # fmt: skip
    rows = [{"step": step} | {name: step / 10 for name in names} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text("name: quick\nloss:\n  gamma: 0.1\noptim:\n  steps: 3\n")
    record = {"name": "quick", "commit": "0123456789abcdef", "versions": {"torch": "2.13.0"}, "started": "2026-01-02"}
    (run / "run.json").write_text(json.dumps(record | {"status": "finished", "steps_done": 3, "wall_s": 431.0}))
    evaluations = {
        "step_0_greedy": [1, 0, 0, 0],
        "step_2_greedy": [0, 1, 0, 0],
        "step_3_greedy": [1, 1, 1, 0],
        "step_0_sampled": [0, 0, 0, 0],
        "step_3_sampled": [0, 1, 1, 0],
        "fault_free_greedy": [1, 0, 1, 0],
        "no_retrieval_greedy": [0, 0, 0, 0],
    }
    for name, right in evaluations.items():
        result = {
            "step": int(name.split("_")[1]) if name.startswith("step") else 0,
            "decoding": {"temperature": 0.0 if name.endswith("greedy") else 1.0},
            "n": 4,
            "em": sum(right) / 4,
            "f1": sum(right) / 4 + 0.05,
            "cover_em": 0.5,
            "searches": 1.5,
            "invalid_frac": 0.1,
            "by_hops": {"1": {"n": 2, "em": sum(right[:2]) / 2}, "2": {"n": 2, "em": sum(right[2:]) / 2}},
            "template": "plain",
            "corpus": {"corpus_id": "abc"},
            "top_k": 1,
            "commit": "0123",
        }
        (run / "eval" / f"{name}.json").write_text(json.dumps(result))
        lines = "".join(json.dumps(_prediction(i, em)) + "\n" for i, em in enumerate(right))
        (run / "eval" / f"{name}.predictions.jsonl").write_text(lines)
    return run


def _prediction(i: int, em: int) -> dict:
    said = "right answer" if em else "wrong answer"
    search = {
        "text": f"<search> query of q{i} </search>",
        "action": "search",
        "content": f"query of q{i}",
        "observation": f"\n<documents> document of q{i} </documents>\n",
        "finish": "stop",
    }
    answer = {
        "text": f"<answer> {said} </answer>",
        "action": "answer",
        "content": said,
        "observation": "",
        "finish": "stop",
    }
    return {
        "id": f"q{i}",
        "question": f"Who q{i}?",
        "golden_answers": ["right answer", "alias"],
        "hops": 1 if i < 2 else 2,
        "answer": said,
        "em": float(em),
        "f1": float(em),
        "cover_em": float(em),
        "em_folded": float(em),
        "searches": 1,
        "invalid_turns": 0,
        "truncated": False,
        "turns": [search, answer],
    }


class _Page(HTMLParser):
    """What a reader of the page sees, and whether its elements close."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.unclosed: list[str] = []  # open elements; a wrong end tag stays in it
        self.classes: dict[str, int] = {}
        self.table: list[list[str]] = []
        self.summaries: list[str] = []
        self._parts: list[str] = []
        self.feed(source)
        self.close()
        self.text = " ".join("".join(self._parts).split())
        self.table = [[" ".join(cell.split()) for cell in row] for row in self.table]
        self.summaries = [" ".join(text.split()) for text in self.summaries]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.unclosed.append(tag)
        for name in (dict(attributes).get("class") or "").split():
            self.classes[name] = self.classes.get(name, 0) + 1
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th"):
            self.table[-1].append("")
        if tag == "summary":
            self.summaries.append("")
        self._parts.append(" ")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.unclosed and self.unclosed[-1] == tag:
            self.unclosed.pop()
        else:
            self.unclosed.append(f"/{tag}")
        self._parts.append(" ")

    def handle_data(self, data: str) -> None:
        if {"style", "title"} & set(self.unclosed):
            return
        self._parts.append(data)
        if {"td", "th"} & set(self.unclosed):
            self.table[-1][-1] += data
        if "summary" in self.unclosed:
            self.summaries[-1] += data
