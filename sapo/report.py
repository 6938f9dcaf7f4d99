"""Turn a run folder into one static HTML page: what was trained, how it went, and what the agent does now.

Everything is read back from the files of the run (config.yaml, run.json, metrics.jsonl, eval/), so the page can be made
again at any time, also while a run is going on or after it was killed:

    python -m sapo.report runs/quickstart
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import matplotlib
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sapo.metrics import format_duration, read_metrics

Prediction = dict[str, Any]  # a row of eval/step_<n>_<decoding>.predictions.jsonl
Pair = tuple[Prediction, Prediction]  # of one question: before, after

EXAMPLES = 12  # questions whose trajectories are shown
MAX_CHARS = 6000  # of one shown text; the rest is counted, not shown

DECODINGS = ("greedy", "sampled")
_EVAL_FILE = re.compile(r"step_(\d+)_(greedy|sampled)\.json")
# Evaluations that belong to no step: file stem without its decoding, and what the table calls it.
_EXTRA_EVALS = {
    "fault_free": "warm start on fault-free demonstrations, no RL",
    "no_retrieval": "retriever made to return nothing",
}


class Chart(NamedTuple):
    """One plot. series: (metric, legend) pairs. at_least: the y axis spans this range or more."""

    title: str
    series: tuple[tuple[str, str], ...]
    at_least: tuple[float, float]
    held_out_em: bool = False  # add the evaluations


CHARTS = (
    Chart(
        "Importance ratio",
        (
            ("policy/ratio_mean", "mean"),
            ("policy/ratio_p01", "p01"),
            ("policy/positive_ratio_p01", "p01 where A > 0"),
        ),
        (0, 1.1),
    ),
    Chart(
        "Good tokens by kind: ratio p01",
        (
            ("kind/positive_ratio_p01_think", "think"),
            ("kind/positive_ratio_p01_query", "query"),
            ("kind/positive_ratio_p01_tags", "tags"),
        ),
        (0, 1.1),
    ),
    Chart(
        "Drift",
        (
            ("policy/positive_drift_frac", "good tokens below ratio 0.5"),
            ("policy/underflow_frac", "underflowed responses"),
        ),
        (0, 0.05),
    ),
    Chart("Clip fraction", (("policy/clip_frac", "clipped tokens"),), (0, 0.05)),
    Chart("Entropy (nats)", (("policy/entropy_nats", "per token"),), (0, 0.1)),
    Chart("Reward", (("reward/mean", "training"),), (0, 1)),
    Chart("Exact match", (("reward/em", "training"),), (0, 1), held_out_em=True),
    Chart("Gate fraction", (("policy/gate_frac", "tokens with the drift penalty"),), (0, 0.05)),
    Chart("Searches per question", (("rollout/searches", "training"),), (0, 1)),
    Chart(
        "Tokens per response",
        (("rollout/response_tokens", "with observations"), ("rollout/sampled_tokens", "sampled by the policy")),
        (0, 1),
    ),
    Chart("Gradient norm", (("optim/grad_norm", "before clipping"),), (0, 0.1)),
    Chart(
        "Behaviour",
        (
            ("rollout/invalid_frac", "invalid turns"),
            ("rollout/truncated_frac", "truncated"),
            ("group/zero_std_frac", "equal-reward groups"),
        ),
        (0, 0.1),
    ),
    Chart("KL (nats)", (("policy/approx_kl", "to the sampling policy"), ("policy/ref_kl", "to the reference")), (0, 0)),
    Chart(
        "Seconds per step",
        (("time/rollout_s", "rollout"), ("time/retrieval_s", "of it retrieval"), ("time/update_s", "update")),
        (0, 0),
    ),
)
README_CHARTS = (
    "Importance ratio",
    "Clip fraction",
    "Entropy (nats)",
    "Reward",
    "Exact match",
    "Searches per question",
)

_COLOURS = ("#1f5fa8", "#d1661b", "#2b8a57")
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sapo",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a9099",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a5058",
    "ytick.color": "#4a5058",
}

_SUMMARY_KEYS = (
    "model.path",
    "protocol.template",
    "retriever.top_k",
    "reward.name",
    "loss.name",
    "loss.gamma",
    "loss.tau",
    "loss.gate",
    "loss.reduction",
    "loss.ref_kl_beta",
    "rollout.questions_per_step",
    "rollout.group_size",
    "rollout.max_searches",
    "rollout.temperature",
    "optim.lr",
    "optim.minibatch_responses",
    "optim.epochs",
    "optim.steps",
    "seed",
)


@dataclass
class Run:
    """What could be read of a run folder. notes: a sentence for each file that is there but could not be used."""

    dir: Path
    info: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    evals: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)  # (step, decoding) -> results
    extra_evals: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # (stem, decoding) -> results
    notes: list[str] = field(default_factory=list)

    def steps(self, decoding: str) -> list[int]:
        """Steps with an evaluation of this decoding, ascending."""
        return sorted(step for step, name in self.evals if name == decoding)


def load_run(run_dir: str | Path) -> Run:
    """Read a run folder. Missing files are left out, broken ones noted; raises ValueError when there is no folder."""
    run = Run(Path(run_dir))
    if not run.dir.is_dir():
        raise ValueError(
            f"{run.dir} is not a run folder: give the folder that holds metrics.jsonl, such as runs/<name>"
        )
    run.info = _read_object(run, run.dir / "run.json")
    run.rows = read_metrics(run.dir / "metrics.jsonl")
    config_file = run.dir / "config.yaml"
    if config_file.exists():
        run.config_text = config_file.read_text(encoding="utf-8", errors="replace")
        try:
            config = yaml.safe_load(run.config_text)
            run.config = config if isinstance(config, dict) else {}
        except yaml.YAMLError:
            run.notes.append("config.yaml is not valid YAML and is shown as it is.")
    for path in sorted((run.dir / "eval").glob("*.json")):
        if match := _EVAL_FILE.fullmatch(path.name):
            results = _read_object(run, path)
            if results:
                run.evals[int(match[1]), match[2]] = results
        stem, _, decoding = path.stem.rpartition("_")
        if stem in _EXTRA_EVALS and decoding in DECODINGS:
            results = _read_object(run, path)
            if results:
                run.extra_evals[stem, decoding] = results
    return run


def write_report(run_dir: str | Path) -> Path:
    """Write `run_dir`/report.html from the files of the run and return its path.

    The page is one file without external resources. Raises ValueError when `run_dir` is no folder.
    """
    run = load_run(run_dir)
    name = str(run.info.get("name") or run.dir.resolve().name)
    sections = [
        _header(run, name),
        _notes(run),
        _held_out(run),
        _curves(run),
        _trajectories(run),
        _configuration(run),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(name)} · SAPO run</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )
    path = run.dir / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def plot_curves(run_dir: str | Path, out_png: str | Path) -> Path:
    """Draw the curves of a run as one PNG of 2 x 3 plots and return its path. Raises ValueError without any curve."""
    run = load_run(run_dir)
    charts = [chart for chart in CHARTS if chart.title in README_CHARTS]
    if not any(_lines(run, chart) for chart in charts):
        raise ValueError(f"{run.dir / 'metrics.jsonl'} has no rows to draw: the run has not finished a step yet")
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(12, 5.6), layout="constrained")
        for axes, chart in zip(figure.subplots(2, 3).flat, charts, strict=True):
            _draw(axes, chart, _lines(run, chart))
            axes.set_title(chart.title, fontsize=10.5, fontweight="bold", loc="left", pad=20)
        path = Path(out_png)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return path


def safe(text: object) -> str:
    """Return text as HTML that shows what is there: markup escaped, characters that hide or reorder text spelt out.

    >>> safe('<b>&"')
    '&lt;b&gt;&amp;&quot;'
    >>> safe("a\\u202eb\\x00")
    'a⟨U+202E⟩b⟨U+0000⟩'
    """
    return html.escape(_UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", str(text)))


# Controls but tab and newline, direction marks and overrides, separators, byte-order mark, lone surrogates (which
# JSON can carry and UTF-8 cannot).
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff\ud800-\udfff]"
)


def choose_examples(before: Sequence[Prediction], after: Sequence[Prediction], count: int) -> list[Pair]:
    """Return up to `count` (before, after) predictions of the same questions, every kind of change among them.

    Of `count`, half go to questions that became right, the rest to those still wrong, lost again and right both times;
    what a kind lacks goes to the next. Within a kind: hops in turn, then the order of the file. Nothing is picked by
    how it looks.
    """
    later = {str(row["id"]): row for row in after}
    kinds: dict[tuple[bool, bool], list[Pair]] = defaultdict(list)
    for row in before:
        if (other := later.get(str(row["id"]))) is not None:
            kinds[_is_right(row), _is_right(other)].append((row, other))
    shares = {(False, True): count // 2, (False, False): count // 4, (True, False): count // 8, (True, True): count}
    chosen: list[Pair] = []
    queues = {kind: _hops_in_turn(kinds[kind]) for kind in shares}
    for kind, share in shares.items():
        chosen += queues[kind][: min(share, count - len(chosen))]
        queues[kind] = queues[kind][share:]
    left = [pair for kind in shares for pair in queues[kind]]
    return chosen + left[: count - len(chosen)]


def _read_object(run: Run, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        run.notes.append(f"{path.relative_to(run.dir)} is not a complete JSON object and was left out.")
        return {}
    return content


def _read_predictions(run: Run, step: int, decoding: str) -> list[Prediction]:
    """The predictions of one evaluation; rows torn or without an id are left out."""
    path = run.dir / "eval" / f"step_{step}_{decoding}.predictions.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):  # splitlines would also split at separators inside a text
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "id" in row:
            rows.append(row)
    return rows


def _readable(run: Run, steps: Iterable[int], decoding: str) -> Iterator[tuple[int, list[Prediction]]]:
    """The steps whose predictions can be read, with them."""
    for step in steps:
        if rows := _read_predictions(run, step, decoding):
            yield step, rows


# Plots -----------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    label: str
    steps: list[float]
    values: list[float]
    colour: str
    marked: bool  # few points, far apart


def _lines(run: Run, chart: Chart) -> list[_Line]:
    """The lines of a chart for which the run has figures."""
    lines = []
    for (metric, label), colour in zip(chart.series, _COLOURS):
        points = [(row["step"], row[metric]) for row in run.rows if _is_number(row.get(metric))]
        if points:
            lines.append(_Line(label, [p[0] for p in points], [p[1] for p in points], colour, False))
    if chart.held_out_em:
        for decoding, colour in zip(DECODINGS, _COLOURS[1:]):
            points = [(step, run.evals[step, decoding].get("em")) for step in run.steps(decoding)]
            points = [(step, value) for step, value in points if _is_number(value)]
            if points:
                lines.append(
                    _Line(f"held-out {decoding}", [p[0] for p in points], [p[1] for p in points], colour, True)
                )
    return lines


def _draw(axes: Axes, chart: Chart, lines: Sequence[_Line]) -> None:
    low, high = chart.at_least
    for line in lines:
        low, high = min(low, *line.values), max(high, *line.values)
        if line.marked or len(line.steps) == 1:
            axes.plot(line.steps, line.values, "o--", color=line.colour, markersize=4, linewidth=1.1, label=line.label)
            continue
        window = _window(len(line.steps))
        if window > 1:
            axes.plot(line.steps, line.values, color=line.colour, linewidth=0.8, alpha=0.35)
        axes.plot(line.steps, _running_mean(line.values, window), color=line.colour, linewidth=1.6, label=line.label)
    margin = 0.04 * (high - low or 1)
    axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel("step")
    axes.set_axisbelow(True)
    if len(chart.series) > 1 or chart.held_out_em:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1),
            ncols=3,
            fontsize=8,
            frameon=False,
            handlelength=1.2,
            columnspacing=1,
            borderaxespad=0.2,
        )


def _window(points: int) -> int:
    """Width of the running mean, odd: 1 for short runs, a twentieth of long ones."""
    return 1 if points < 40 else points // 20 | 1


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean; at the ends of what is there."""
    half = window // 2
    means = []
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        means.append(sum(near) / len(near))
    return means


def _svg(run: Run, chart: Chart) -> str:
    """One plot as an inline <svg> element; "" when the run has no figures for it."""
    lines = _lines(run, chart)
    if not lines:
        return ""
    with matplotlib.rc_context(_RC | {"svg.hashsalt": chart.title}):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        _draw(figure.subplots(), chart, lines)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Ids of groups are not referenced, and would be the same in every plot of the page.
    return re.sub(r'<g id="[^"]*"', "<g", text).replace("<svg", f'<svg role="img" aria-label="{safe(chart.title)}"', 1)


# Sections --------------------------------------------------------------------------------------------------------


def _header(run: Run, name: str) -> str:
    status = str(run.info.get("status") or "unknown")
    facts = []
    steps_done, steps = run.info.get("steps_done"), _lookup(run.config, "optim.steps")
    if steps_done is None and run.rows:
        steps_done = run.rows[-1]["step"]
    if steps_done is not None:
        facts.append(f"{steps_done} of {steps} steps" if steps is not None else f"{steps_done} steps")
    if _is_number(run.info.get("wall_s")):
        facts.append(format_duration(run.info["wall_s"]))
    if run.info.get("started"):
        facts.append(f"started {run.info['started']}")
    if run.info.get("commit"):
        facts.append(f"commit {str(run.info['commit'])[:12]}")
    kind = status if status in ("finished", "interrupted", "running", "stopped", "failed") else "unknown"
    return (
        f'<header>\n<p class="kicker">SAPO · Search Agent Policy Optimization</p>\n'
        f'<h1>{safe(name)} <span class="status {kind}">{safe(status)}</span></h1>\n'
        f'<p class="facts">{" · ".join(map(safe, facts))}</p>\n{_tiles(run)}</header>'
    )


def _tiles(run: Run) -> str:
    tiles = []
    for decoding in DECODINGS:
        steps = run.steps(decoding)
        if steps:
            ems = [_figure(run.evals[step, decoding].get("em")) for step in dict.fromkeys((steps[0], steps[-1]))]
            questions = run.evals[steps[-1], decoding].get("n", "?")
            tiles.append((" → ".join(ems), f"held-out EM, {decoding}, n = {questions}"))
    for (stem, decoding), results in run.extra_evals.items():
        if stem == "no_retrieval":
            tiles.append((_figure(results.get("em")), f"held-out EM without retrieval, {decoding}"))
    last = next((row for row in reversed(run.rows) if _is_number(row.get("policy/ratio_p01"))), None)
    if last is not None:
        tiles.append((_figure(last["policy/ratio_p01"]), f"ratio p01, step {last['step']}"))
    cells = "".join(f"<div><b>{safe(value)}</b><span>{safe(label)}</span></div>" for value, label in tiles)
    return f'<div class="tiles">{cells}</div>\n' if cells else ""


def _notes(run: Run) -> str:
    notes = list(run.notes)
    if not run.rows:
        notes.insert(0, "metrics.jsonl has no rows yet: there are no curves.")
    if not run.evals:
        notes.insert(0, "There are no held-out evaluations yet.")
    if not notes:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{safe(note)}</li>" for note in notes) + "</ul>"


def _evaluations(run: Run) -> list[tuple[str, str, dict[str, Any]]]:
    """The rows of the held-out table: (decoding, what was evaluated, results)."""
    found = []
    for decoding in DECODINGS:
        steps = run.steps(decoding)
        for step in dict.fromkeys((*steps[:1], *steps[-1:])):
            label = "before RL" if step == 0 else "after RL"
            found.append((decoding, f"{label} (step {step})", run.evals[step, decoding]))
        for stem, label in _EXTRA_EVALS.items():
            if (stem, decoding) in run.extra_evals:
                found.append((decoding, label, run.extra_evals[stem, decoding]))
    return found


def _held_out(run: Run) -> str:
    evaluations = _evaluations(run)
    if not evaluations:
        return ""
    hops = sorted({hop for *_, results in evaluations for hop in _by_hops(results)}, key=lambda hop: (len(hop), hop))
    words = ["decoding", "policy"]
    figures = ["n", "EM", *(f"{hop}-hop" if hop.isdigit() else hop for hop in hops)]
    figures += ["F1", "cover-EM", "searches", "invalid"]
    head = "".join(f"<th class=words>{text}</th>" for text in words) + "".join(
        f"<th>{safe(text)}</th>" for text in figures
    )
    body = []
    above = ""
    for decoding, label, results in evaluations:
        cells = [safe(results.get("n", "–")), f"<b>{_figure(results.get('em'))}</b>{_interval(results)}"]
        for hop in hops:
            part = _by_hops(results).get(hop, {})
            count = f" <small>n={safe(part['n'])}</small>" if "n" in part else ""
            cells.append(_figure(part.get("em")) + count)
        cells += [_figure(results.get("f1")), _figure(results.get("cover_em"))]
        cells += [_figure(results.get("searches"), 2), _figure(results.get("invalid_frac"))]
        first = decoding != above
        above = decoding
        body.append(
            f"<tr{' class=first' if first else ''}><td class=words>{decoding if first else ''}</td>"
            f"<td class=words>{safe(label)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    return (
        "<section>\n<h2>Held-out questions</h2>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>\n'
        f'<p class="caption">{_conditions([results for *_, results in evaluations])}</p>\n</section>'
    )


def _interval(results: dict[str, Any]) -> str:
    """Half of the normal 95 % interval of an EM over its questions."""
    em, n = results.get("em"), results.get("n")
    if not (_is_number(em) and _is_number(n) and n > 0 and 0 <= em <= 1):
        return ""
    return f" <small>±{1.96 * math.sqrt(em * (1 - em) / n):.3f}</small>"


def _conditions(evaluations: Sequence[dict[str, Any]]) -> str:
    """What the scores depend on, so that nobody compares what cannot be compared."""
    parts = [
        "EM: exact match after SQuAD normalisation, ± half of its 95 % interval over questions",
        "searches: answered searches per question",
        "invalid: fraction of turns",
    ]
    for key in ("decoding", "template", "corpus", "top_k", "split", "commit"):
        values = dict.fromkeys(_short(results[key]) for results in evaluations if results.get(key) is not None)
        if values:
            parts.append(f"{key.replace('_', '-')}: {' / '.join(values)}")
    return safe("; ".join(parts) + ".")


def _curves(run: Run) -> str:
    plots = [(chart.title, _svg(run, chart)) for chart in CHARTS]
    figures = "".join(f"<figure><figcaption>{safe(title)}</figcaption>{svg}</figure>" for title, svg in plots if svg)
    if not figures:
        return ""
    window = _window(len(run.rows))
    smoothing = f" Faint: single steps; bold: centred mean of {window} steps." if window > 1 else ""
    return (
        f'<section>\n<h2>Training curves</h2>\n<div class="plots">{figures}</div>\n'
        f'<p class="caption">One value a step, over all ranks; formulas are in docs/metrics.md. p01: 1st percentile over tokens.{smoothing}</p>\n</section>'
    )


def _trajectories(run: Run) -> str:
    decoding = next((name for name in DECODINGS if run.steps(name)), None)
    if decoding is None:
        return ""
    steps = run.steps(decoding)
    first, before = next(_readable(run, steps, decoding), (0, []))
    last, after = next(_readable(run, steps[::-1], decoding), (0, []))
    pairs = choose_examples(before, after, EXAMPLES)
    if not pairs:
        return ""
    cards = [_card(pair, (first, last), is_open=i < 2) for i, pair in enumerate(pairs)]
    return (
        f"<section>\n<h2>Trajectories</h2>\n<p>{_changes(before, after, first, last, decoding)}</p>\n"
        '<p class="legend"><span class="model">written by the policy</span> <span class="observation">returned by the '
        "environment: documents or feedback</span></p>\n" + "\n".join(cards) + "\n</section>"
    )


def _changes(before: Sequence[Prediction], after: Sequence[Prediction], first: int, last: int, decoding: str) -> str:
    if first == last:
        right = sum(map(_is_right, before))
        return f"{decoding.capitalize()} decoding at step {first}: {right} of {len(before)} questions right."
    later = {str(row["id"]): _is_right(row) for row in after}
    kinds = Counter((_is_right(row), later[str(row["id"])]) for row in before if str(row["id"]) in later)
    return (
        f"{decoding.capitalize()} decoding at step {first} and step {last} on the same {kinds.total()} questions: "
        f"{kinds[False, True]} became right, {kinds[True, True]} were right both times, {kinds[False, False]} stayed "
        f"wrong, {kinds[True, False]} were lost. The examples are the first of each kind in the order of the file."
    )


def _card(pair: Pair, steps: tuple[int, int], is_open: bool) -> str:
    """One question with its trajectories side by side, or alone when there is one evaluation only."""
    shown = [(row, step) for row, step in zip(pair, steps)][: 1 if steps[0] == steps[1] else 2]
    row = pair[0]
    verdict = " → ".join("right" if _is_right(row) else "wrong" for row, _ in shown)
    hops = f'<span class="hops">{safe(row["hops"])}-hop</span> ' if row.get("hops") is not None else ""
    golden = row.get("golden_answers")
    golden = " / ".join(map(str, golden)) if isinstance(golden, list) else str(golden)
    columns = "".join(_column(row, step) for row, step in shown)
    return (
        f'<details{" open" if is_open else ""}>\n<summary>{hops}<span class="verdict">{verdict}</span> '
        f"<bdi>{_cut(row.get('question'))}</bdi></summary>\n"
        f'<p class="golden">golden: <bdi>{_cut(golden)}</bdi></p>\n<div class="pair">{columns}</div>\n</details>'
    )


def _column(row: Prediction, step: int) -> str:
    answer = row.get("answer")
    said = f"<bdi>{_cut(answer)}</bdi>" if answer is not None else "<i>no answer</i>"
    mark = "right" if _is_right(row) else "wrong"
    flags = '<span class="badge invalid">truncated</span> ' if row.get("truncated") else ""
    figures = (
        f"F1 {_figure(row.get('f1'), 2)} · EM {_figure(row.get('em'), 0)} · searches {_figure(row.get('searches'), 0)}"
    )
    return (
        f'<div class="column"><p class="outcome"><b>step {step}</b> {flags}<span class="{mark}">{said}</span> '
        f"<small>{safe(figures)}</small></p>{transcript(row)}</div>"
    )


def transcript(row: Prediction) -> str:
    """Return the turns of one prediction as HTML, what the policy wrote apart from what the environment gave back."""
    turns = row.get("turns")
    return "".join(_turn(turn) for turn in turns if isinstance(turn, dict)) if isinstance(turns, list) else ""


def _turn(turn: dict[str, Any]) -> str:
    action = str(turn.get("action") or "invalid")
    kind = action if action in ("search", "answer") else "invalid"
    finish = ' <span class="badge invalid">cut at the token limit</span>' if turn.get("finish") == "length" else ""
    block = (
        f'<div class="model"><span class="badge {kind}">{safe(action)}</span>{finish}'
        f"<pre>{_tagged(str(turn.get('text') or '').strip())}</pre></div>"
    )
    observation = str(turn.get("observation") or "").strip()
    return block + (f'<div class="observation"><pre>{_tagged(observation)}</pre></div>' if observation else "")


def _tagged(text: str) -> str:
    """Safe HTML of a text with the protocol's tags set apart."""
    return re.sub(r"&lt;/?\w+&gt;", lambda match: f"<span class=tag>{match[0]}</span>", _cut(text))


def _configuration(run: Run) -> str:
    pairs = [(key, _lookup(run.config, key)) for key in _SUMMARY_KEYS]
    cells = "".join(
        f"<div><dt>{safe(key)}</dt><dd>{safe(value)}</dd></div>" for key, value in pairs if value not in (None, "")
    )
    versions = run.info.get("versions")
    listed = " · ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
    parts = [f"<dl>{cells}</dl>" if cells else ""]
    if run.config_text:
        parts.append(f"<details><summary>config.yaml</summary><pre>{safe(run.config_text)}</pre></details>")
    parts.append(f'<p class="caption">{safe(listed)}</p>' if listed else "")
    if not any(parts):
        return ""
    return "<section>\n<h2>Configuration</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


# Small things ----------------------------------------------------------------------------------------------------


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _figure(value: object, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if _is_number(value) else "–"


def _is_right(row: Prediction) -> bool:
    return row.get("em") == 1


def _by_hops(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parts = results.get("by_hops")
    return {str(k): v for k, v in parts.items() if isinstance(v, dict)} if isinstance(parts, dict) else {}


def _hops_in_turn(pairs: Iterable[Pair]) -> list[Pair]:
    queues: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        queues[str(pair[0].get("hops"))].append(pair)
    return [
        pair for rank in zip_longest(*(queues[hops] for hops in sorted(queues))) for pair in rank if pair is not None
    ]


def _lookup(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _cut(text: object) -> str:
    text = str(text)
    more = len(text) - MAX_CHARS
    return safe(text) if more <= 0 else f"{safe(text[:MAX_CHARS])}<i> … {more:,} more characters</i>"


STYLE = """
:root { --ink: #1c2126; --soft: #5a626b; --line: #e1e4e8; --blue: #1f5fa8; --green: #1e7a4a; --red: #b3372b; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 28px 60px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 40px 0 12px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
p { margin: 8px 0; }
small { color: var(--soft); font-size: 12px; font-weight: 400; }
.kicker { color: var(--soft); font-size: 13px; letter-spacing: .04em; margin: 0; }
.facts, .caption { color: var(--soft); font-size: 13.5px; overflow-wrap: anywhere; }
.status { font-size: 13px; font-weight: 600; vertical-align: middle; padding: 3px 10px; border-radius: 999px;
  background: #eceff2; color: #434a52; }
.status.finished { background: #e2f3e9; color: var(--green); }
.status.interrupted { background: #fdeedb; color: #8a5310; }
.status.stopped, .status.failed { background: #f8e0dd; color: var(--red); }
.status.running { background: #e3eefa; color: var(--blue); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 18px; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; min-width: 170px; }
.tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
.notes { background: #fff8ec; border: 1px solid #f2dfbd; border-radius: 8px; padding: 10px 14px 10px 32px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 7px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
.words { text-align: left; }
tr.first td { border-top: 2px solid #c9ced4; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 14px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: 10px 10px 4px; }
figcaption { font-weight: 600; font-size: 14px; padding-left: 6px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
details { border: 1px solid var(--line); border-radius: 8px; margin: 10px 0; padding: 0 14px; }
details[open] { padding-bottom: 14px; }
summary { cursor: pointer; padding: 10px 0; font-weight: 600; overflow-wrap: anywhere; }
.hops, .verdict { font-size: 12px; font-weight: 600; color: #434a52; background: #eceff2; border-radius: 4px;
  padding: 2px 7px; }
.golden { margin: 0 0 10px; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 18px; }
.column { min-width: 0; }
.outcome { margin: 0 0 8px; overflow-wrap: anywhere; }
.right { color: var(--green); font-weight: 600; }
.wrong { color: var(--red); font-weight: 600; }
.model, .observation { border-left: 4px solid; border-radius: 0 6px 6px 0; padding: 7px 10px; margin: 0 0 6px;
  overflow: hidden; }
.model { border-color: var(--blue); background: #eef4fb; }
.observation { border-color: #c9a227; background: #fcf8e8; color: #4b4636; }
.legend span { display: inline-block; font-size: 13px; padding: 3px 10px; margin-right: 8px; }
pre { margin: 0; font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.tag { color: #7a4fa3; }
.badge { display: inline-block; font-size: 11.5px; font-weight: 600; padding: 1px 7px; border-radius: 4px;
  margin-bottom: 3px; }
.badge.search { background: #d7e6f7; color: var(--blue); }
.badge.answer { background: #dcf0e4; color: var(--green); }
.badge.invalid { background: #f8e0dd; color: var(--red); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 10px 18px; margin: 0 0 12px; }
dt { color: var(--soft); font-size: 12.5px; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
@media print { details { break-inside: avoid; } }
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report of a run folder again, and the README's figure where `--curves` asks for it."""
    parser = argparse.ArgumentParser(description="Write report.html of a run folder.")
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--curves", type=Path, metavar="PNG", help="also draw the main curves into this file")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dir))
        if options.curves is not None:
            print(plot_curves(options.run_dir, options.curves))
    except ValueError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
