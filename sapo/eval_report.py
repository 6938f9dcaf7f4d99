"""What an evaluation looks like: the paper's table with its rows beside ours, a comparison, a page of transcripts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapo.data import BENCHMARKS
from sapo.evaluation import Row, per_question, read_predictions, write_atomically
from sapo.report import STYLE, safe, transcript
from sapo.statistics import Comparison, compare

TRANSCRIPTS = 100  # of each benchmark on the page
NAMES = {
    "nq": "NQ", "triviaqa": "TriviaQA", "popqa": "PopQA", "hotpotqa": "HotpotQA", "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue", "bamboogle": "Bamboogle",
}  # fmt: skip
# EM of arXiv 2603.10069, in the order of BENCHMARKS, then their mean; other methods as that paper gives them.
PAPER_ROWS = {
    "Search-R1-Instruct 3B (GRPO)": (0.397, 0.565, 0.391, 0.331, 0.310, 0.124, 0.232, 0.336),
    "Search-R1-Base 3B (GRPO)": (0.421, 0.583, 0.413, 0.297, 0.274, 0.066, 0.128, 0.312),
    "AutoRefine-Base 3B": (0.467, 0.620, 0.450, 0.405, 0.393, 0.157, 0.344, 0.405),
    "SE-Search 3B": (0.475, 0.624, 0.423, 0.450, 0.361, 0.183, 0.424, 0.420),
    "SAPO-3B-Base": (0.474, 0.630, 0.449, 0.449, 0.412, 0.196, 0.424, 0.433),
    "SAPO-3B-Instruct": (0.469, 0.629, 0.457, 0.456, 0.448, 0.203, 0.432, 0.442),
    "SAPO-1.5B-Instruct": (0.440, 0.591, 0.432, 0.413, 0.381, 0.160, 0.384, 0.400),
    "SAPO-7B-Instruct": (0.473, 0.658, 0.480, 0.471, 0.439, 0.231, 0.480, 0.462),
    "SAPO-14B-Instruct": (0.510, 0.695, 0.485, 0.494, 0.477, 0.255, 0.548, 0.495),
}
# (key of a result, head of its column)
_DETAILS = (
    ("n", "n"), ("em", "EM"), ("f1", "F1"), ("cover_em", "cover-EM"), ("em_folded", "EM folded"),
    ("hit_rate", "hit rate"), ("searches", "searches"), ("turns", "turns"), ("invalid_frac", "invalid"),
    ("forged_frac", "forged"), ("truncated_frac", "truncated"), ("answered_frac", "answered"),
    ("sampled_tokens", "tokens"),
)  # fmt: skip


def conditions_text(result: Mapping[str, Any]) -> str:
    """Return one paragraph with all that a score depends on, so that nobody compares what cannot be compared."""
    decoding, corpus = result["decoding"], result.get("corpus")
    how = (
        "greedy"
        if decoding["temperature"] == 0
        else f"sampled at T = {decoding['temperature']:g}, top-p {decoding['top_p']:g}"
    )
    passages = (
        f"top-{result['top_k']} of {corpus['passages']:,} passages (corpus {corpus['corpus_id'][:12]}, "
        f"{corpus['encoder']}, {corpus['index_type']})"
        if corpus
        else "no retrieval"
    )
    splits = ", ".join(f"{NAMES.get(name, name)} {split}" for name, split in (result.get("splits") or {}).items())
    parts = [
        "metric EM as in Search-R1 and FlashRAG, with 95 % bootstrap intervals over questions",
        how
        + (", as Search-R1 evaluates" if result.get("sampling") == "search-r1" else "")
        + (f", {result['samples']} samples a question" if result.get("samples", 1) > 1 else ""),
        f"agent {result['agent']}" + (f", template {result['template']}" if result["template"] else ""),
        passages,
        f"splits: {splits}" if splits else "",
        f"model {result['model']}" + (f" ({result['model_sha256'][:12]})" if result.get("model_sha256") else ""),
        f"commit {result['commit'][:12]}{'+' * result['commit'].endswith('+')}" if result.get("commit") else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def paper_table(result: Mapping[str, Any], label: str) -> str:
    """Return the Markdown table of EM in the layout of the paper, its own rows below ours.

    A column is filled from the benchmark itself only: questions of the same name in another file may be of any split.
    """
    columns = [*NAMES.values(), "avg"]
    ours = {name: figures for name, figures in result["benchmarks"].items() if name in result["splits"]}
    lines = [f"| EM | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    whole = all(name in ours for name in BENCHMARKS)

    def row(name: str, key: str) -> str:
        cells = []
        for benchmark in BENCHMARKS:
            figures = ours.get(benchmark)
            cells.append(_with_interval(figures, key) if figures else "–")
        macro = result["averages"].get("macro")
        cells.append(_with_interval(macro, key) if macro and whole and key in macro else "–")
        return f"| {name} | {' | '.join(cells)} |"

    lines.append(row(f"**{label}**", "em"))
    if "pass_em" in result:
        lines.append(row(f"{label}, pass@{result['samples']}", "pass_em"))
    lines.append(row(f"{label}, F1", "f1"))
    counts = [f"{ours[name]['n']:,}" if name in ours else "–" for name in BENCHMARKS]
    lines.append(f"| questions | {' | '.join(counts)} | {result['n']:,} |")
    for name, values in PAPER_ROWS.items():
        lines.append(f"| {name} (paper) | {' | '.join(map(_figure, values))} |")
    return "\n".join(lines) + "\n"


def details_table(result: Mapping[str, Any]) -> str:
    """Return the Markdown table of all figures by benchmark, with the averages over single-hop, multi-hop and all."""
    lines = [f"| | {' | '.join(head for _, head in _DETAILS)} |", "|---" * (len(_DETAILS) + 1) + "|"]
    for name, figures in result["benchmarks"].items():
        cells = [f"{figures[key]:,}" if key == "n" else _figure(figures[key]) for key, _ in _DETAILS]
        label = NAMES.get(name, name) if name in result["splits"] else f"{name} (own file)"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    for group, figures in result["averages"].items():
        cells = [_with_interval(figures, key) if key in ("em", "f1") else "" for key, _ in _DETAILS]
        lines.append(f"| average of {len(figures['benchmarks'])}, {group.replace('_', '-')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(result: Mapping[str, Any], label: str) -> str:
    """Return both tables and the conditions."""
    return f"{paper_table(result, label)}\n{details_table(result)}\n{conditions_text(result)}\n"


def write_page(folder: Path, name: str, result: Mapping[str, Any], label: str, transcripts: int = TRANSCRIPTS) -> Path:
    """Write `<name>.html`: the tables, and searchable transcripts of the first `transcripts` rows of each benchmark."""
    shown: dict[str, int] = {}
    cards = []
    for row in read_predictions(folder / f"{name}.predictions.jsonl"):
        shown[row["source"]] = shown.get(row["source"], 0) + 1
        if shown[row["source"]] <= transcripts:
            cards.append(_card(row))
    total = sum(shown.values())
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(label)} · evaluation</title>\n<style>{STYLE}{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{safe(label)}</h1>\n{_html_table(paper_table(result, label))}\n{_html_table(details_table(result))}\n"
        f'<p class="caption">{safe(conditions_text(result))}</p>\n<h2>Transcripts</h2>\n'
        f"<p>{len(cards):,} of {total:,}: the first {transcripts} of each benchmark, in the order of the file.</p>\n"
        '<p><input id="search" type="search" placeholder="search in questions, queries, documents and answers"> '
        '<select id="verdict"><option value="">all</option><option>right</option><option>wrong</option></select> '
        '<span id="count"></span></p>\n'
        + "\n".join(cards)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
    path = folder / f"{name}.html"
    write_atomically(path, page)
    return path


def _card(row: Row) -> str:
    verdict = "right" if row["em"] == 1 else "wrong"
    source = NAMES.get(row["source"], row["source"])
    golden = " / ".join(row["golden_answers"])
    answer = f"<bdi>{safe(row['answer'])}</bdi>" if row["answer"] is not None else "<i>no answer</i>"
    return (
        f'<details data-verdict="{verdict}"><summary><span class="hops">{safe(source)}</span> '
        f'<span class="verdict">{verdict}</span> <bdi>{safe(row["question"])}</bdi></summary>\n'
        f'<p class="golden">golden: <bdi>{safe(golden)}</bdi></p>'
        f'<p class="outcome"><span class="{verdict}">{answer}</span> '
        f"<small>F1 {row['f1']:.2f} · searches {row['searches']} · {safe(row['id'])}</small></p>"
        f"{transcript(row)}</details>"
    )


_STYLE = """
#search { width: 32em; max-width: 70%; padding: 6px; font: inherit; }
#verdict { padding: 6px; font: inherit; }
"""
_SCRIPT = """
const box = document.getElementById("search"), verdict = document.getElementById("verdict");
const cards = [...document.querySelectorAll("details[data-verdict]")];
const texts = cards.map(card => card.textContent.toLowerCase());
function filter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  cards.forEach((card, i) => {
    const wanted = !verdict.value || card.dataset.verdict === verdict.value;
    const fits = wanted && words.every(word => texts[i].includes(word));
    card.hidden = !fits;
    shown += fits;
  });
  document.getElementById("count").textContent = shown + " shown";
}
box.addEventListener("input", filter);
verdict.addEventListener("change", filter);
filter();
"""


def _html_table(markdown_table: str) -> str:
    head, _, *body = [
        [safe(cell.strip()) for cell in line.strip("|").split("|")] for line in markdown_table.splitlines()
    ]
    rows = "".join(
        "<tr>"
        + "".join(f"<td{' class=words' if n == 0 else ''}>{cell.replace('**', '')}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in body
    )
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _figure(value: float) -> str:
    """A score without its leading zero, as papers print it.

    >>> _figure(0.4421), _figure(1.0), _figure(12.34)
    ('.442', '1.000', '12.34')
    """
    return f"{value:.2f}" if value > 1 else f"{value:.3f}".removeprefix("0")


def _with_interval(figures: Mapping[str, Any], key: str) -> str:
    low, high = figures[f"{key}_interval"]
    return f"{_figure(figures[key])} [{_figure(low)}, {_figure(high)}]"


# Comparisons ------------------------------------------------------------------------------------------------------


# What must be the same for a difference to be one of the models.
_ALIKE = (
    "decoding",
    "samples",
    "agent",
    "template",
    "think_aware",
    "chat_template",
    "budget",
    "top_k",
    "corpus",
    "splits",
)


def compare_evaluations(path_a: Path, path_b: Path) -> dict[str, Any]:
    """Compare two complete evaluations of the same questions, given by their result files.

    Returns the comparisons of EM and F1 by benchmark and of all questions pooled, the conditions in which the two
    differ, and the questions that flipped. Raises ValueError when they cannot be compared.
    """
    sides = [_load(path) for path in (path_a, path_b)]
    (result_a, rows_a), (result_b, rows_b) = sides
    by_id_a, by_id_b = ({row["id"]: row for row in rows} for rows in (rows_a, rows_b))
    only_a, only_b = by_id_a.keys() - by_id_b.keys(), by_id_b.keys() - by_id_a.keys()
    if only_a or only_b:
        raise ValueError(
            f"{path_a} and {path_b} hold other questions: {len(only_a)} are only in the first, {len(only_b)} only in "
            "the second; evaluate both on the same benchmarks and --limit"
        )
    for key in ("question", "golden_answers"):
        for name, row in by_id_a.items():
            if row[key] != by_id_b[name][key]:
                raise ValueError(
                    f"question {name} has another {key} in {path_a} than in {path_b}: {row[key]!r} and "
                    f"{by_id_b[name][key]!r}; evaluate both on the same files"
                )
    order = list(by_id_a)
    position = {name: n for n, name in enumerate(order)}
    rows_b.sort(key=lambda row: (position[row["id"]], row["sample"]))
    sources = dict.fromkeys(row["source"] for row in rows_a)
    groups = {source: source for source in sources} | ({"pooled": None} if len(sources) > 1 else {})
    comparisons: dict[str, Any] = {}
    for group, source in groups.items():
        parts = [[row for row in rows if source is None or row["source"] == source] for rows in (rows_a, rows_b)]
        comparisons[group] = {
            name: dataclasses.asdict(compare(per_question(parts[0], name), per_question(parts[1], name)))
            for name in ("em", "f1")
        }
    right_a, right_b = (dict(zip(order, per_question(rows, "em") > 0.5)) for rows in (rows_a, rows_b))
    flips = [
        {
            "id": name,
            "source": by_id_a[name]["source"],
            "question": by_id_a[name]["question"],
            "golden_answers": by_id_a[name]["golden_answers"],
            "change": "gained" if right_b[name] else "lost",
            "answer_a": by_id_a[name]["answer"],
            "answer_b": by_id_b[name]["answer"],
        }
        for name in order
        if right_a[name] != right_b[name]
    ]
    differing = {
        key: [result_a.get(key), result_b.get(key)] for key in _ALIKE if result_a.get(key) != result_b.get(key)
    }
    return {
        "a": str(path_a),
        "b": str(path_b),
        "model_a": result_a["model"],
        "model_b": result_b["model"],
        "comparisons": comparisons,
        "differing_conditions": differing,
        "flips": flips,
    }


def comparison_markdown(comparison: Mapping[str, Any], flips: int = 10) -> str:
    """Return the comparison as Markdown, with the first `flips` questions that were gained and lost."""
    lines = [f"A: {comparison['model_a']} ({comparison['a']})", f"B: {comparison['model_b']} ({comparison['b']})", ""]
    for key, (left, right) in comparison["differing_conditions"].items():
        lines.append(f"not like for like: {key} is {left} in A and {right} in B")
    lines += ["", "| EM | n | A | B | B - A [95 %] | gained | lost | McNemar p | F1, B - A [95 %] |", "|---" * 9 + "|"]
    for group, scores in comparison["comparisons"].items():
        em, f1 = (Comparison(**scores[name]) for name in ("em", "f1"))
        p = "–" if em.p_value is None else f"{em.p_value:.2g}"
        lines.append(
            f"| {NAMES.get(group, group)} | {em.n:,} | {_figure(em.mean_a)} | {_figure(em.mean_b)} | {_signed(em)} | "
            f"{em.gained} | {em.lost} | {p} | {_signed(f1)} |"
        )
    for change in ("gained", "lost"):
        chosen = [flip for flip in comparison["flips"] if flip["change"] == change]
        if chosen:
            lines += ["", f"{change} ({len(chosen)}, the first {min(flips, len(chosen))}):"]
            for flip in chosen[:flips]:
                golden = " / ".join(flip["golden_answers"][:3])
                lines.append(f"- {flip['question']} [{golden}] A: {flip['answer_a']!r} B: {flip['answer_b']!r}")
    return "\n".join(lines) + "\n"


def _signed(comparison: Comparison) -> str:
    return f"{comparison.difference:+.3f} [{comparison.low:+.3f}, {comparison.high:+.3f}]"


def _load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    if not path.is_file():
        raise ValueError(f"{path}: no result file; give the folder or the .json of a finished evaluation")
    try:
        result = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a complete JSON file ({error})") from None
    if not isinstance(result, dict) or "em" not in result or "decoding" not in result:
        raise ValueError(f"{path}: not the result of an evaluation")
    predictions = path.with_name(path.name.removesuffix(".json") + ".predictions.jsonl")
    if not predictions.is_file():
        raise ValueError(f"{predictions}: the predictions that belong to {path} are missing")
    return result, [
        {key: value for key, value in row.items() if key != "turns"} for row in read_predictions(predictions)
    ]
