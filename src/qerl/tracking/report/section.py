"""The page's sections as HTML: headlines, curves, time by phase, tables. Text of a run is escaped here."""

import itertools
from collections.abc import Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from qerl.tracking import is_timing
from qerl.tracking.atomic_file import encode
from qerl.tracking.metric_text import clock
from qerl.tracking.provenance import flatten
from qerl.tracking.report.curve import Series, curves_svg, hover_data, number_text, rounded, stack_svg
from qerl.tracking.report.read import Points, RecordedRun, number

PHASES = ("rollout", "reward", "learn", "publish", "evaluate", "checkpoint")
"""Spans that add up to a step; what is left of it is shown as other."""
CHARTS = (
    ("reward", "Reward", "mean of the step's samples"),
    ("accuracy", "Accuracy", "share of samples that are right"),
    ("entropy", "Entropy", "of the learner's policy, nats a token"),
    ("sampler_entropy", "Sampler's entropy", "of the noisy policy, from its samples, nats a token"),
    ("mismatch_kl", "KL to the sampler", "sampling policy against the learner's, nats a token"),
    ("sigma", "Noise sigma", "standard deviation of the noise in the norms"),
    ("informative", "Informative groups", "share of groups whose rewards differ"),
    ("distinct", "Distinct answers", "share of a group's samples that differ in text"),
    ("effective_fraction", "Effective samples", "share that the importance weights leave of the tokens"),
    ("mean_tokens", "Length", "mean tokens of a sample"),
    ("grad_norm", "Gradient norm", "before it is scaled down"),
    ("tokens_per_s", "Sampling speed", "tokens a second"),
)
_EXACT = ("sigma", "learning_rate")
"""Set by the config, not measured: nothing to smooth."""
_MAX_STACKED = 300


def legend(runs: Sequence[RecordedRun]) -> str:
    return "".join(
        f'<label class="s{i % 8}"><input type="checkbox" checked data-toggle="{i}"><i></i>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )


def list_of(runs: Sequence[RecordedRun], texts: Sequence[Sequence[str]]) -> str:
    """Each run's remarks, under its name."""
    pairs = [(run.name, text) for run, own in zip(runs, texts, strict=True) for text in own]
    lines = "".join(f"<li><b>{escape(name)}</b> {escape(text)}</li>" for name, text in pairs)
    return f"<ul>{lines}</ul>" if lines else ""


def tiles(runs: Sequence[RecordedRun]) -> str:
    rows = [_headlines(run) for run in runs]
    labels = dict.fromkeys(label for row in rows for label in row)
    tiles = []
    for label in labels:
        lines = "".join(
            f'<p class="s{i % 8}" data-run="{i}"><i></i>{row[label]}</p>'
            for i, row in enumerate(rows)
            if label in row
        )
        tiles.append(f"<div><h3>{label}</h3>{lines}</div>")
    return "".join(tiles)


def _headlines(run: RecordedRun) -> dict[str, str]:
    """Label and value, of what the run has."""
    found: dict[str, str] = {}
    held_out, rewards = evaluated(run, "accuracy"), run.values("reward")
    for label, values in (("Held-out accuracy", held_out), ("Held-out, greedy", evaluated(run, "greedy"))):
        if values:
            found[label] = _change(values[0][1], values[-1][1], len(values) > 1, "{:.0%}")
    if rewards:
        share = max(1, len(rewards) // 10)
        found["Reward"] = _change(fmean(rewards[:share]), fmean(rewards[-share:]), len(rewards) > 1, "{:.2f}")
    if run.records:
        config = run.facts.get("config")
        planned = config.get("num_steps") if isinstance(config, dict) else None
        found["Steps"] = f"{len(run.records)}" + (
            f" <small>of {escape(str(planned))}</small>" if planned else ""
        )
        found["Time in steps"] = clock(sum(run.values("step_s")))
    if speeds := run.values("tokens_per_s"):
        found["Tokens a second"] = number_text(round(median(speeds)))
    if memory := run.values("memory_gb"):
        found["Peak memory"] = f"{max(memory):.1f} <small>GB</small>"
    return found


def _change(first: float, last: float, has_changed: bool, template: str) -> str:
    before = f"<small>{template.format(first)} &rarr;</small> " if has_changed else ""
    return before + template.format(last)


def evaluated(run: RecordedRun, name: str) -> Points:
    """(steps taken by then, held-out accuracy): before the first step, after some, after the last."""
    points = [(step + 1, value) for step, value in run.points(f"eval_{name}")]
    last = run.records[-1]["step"] + 1 if run.records else 0
    for moment, steps in (("before", 0), ("after", last)):
        measured = run.evaluations.get(moment)
        value = number(measured.get(name)) if isinstance(measured, dict) else None
        if value is not None and steps not in [step for step, _ in points]:
            points.append((float(steps), value))
    return sorted(points)


def _keys(runs: Sequence[RecordedRun]) -> set[str]:
    return {key for run in runs for record in run.records for key in record}


def pass_at(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """A chart of pass@k for each k that was measured but 1, which is the accuracy."""
    numbers = {key.removeprefix("pass_at_") for key in _keys(runs) if key.startswith("pass_at_")}
    powers = sorted(int(number) for number in numbers if number.isdigit() and number != "1")
    about = "share of prompts of which one of {} samples is right, unbiased"
    return [(f"pass_at_{k}", f"Pass@{k}", about.format(k)) for k in powers]


def other_metrics(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    shown = {key for key, _, _ in [*CHARTS, *pass_at(runs)]}
    shown |= {"step", "wall_time", "eval_accuracy", "eval_greedy"}
    keys = _keys(runs)
    return [(key, key, "") for key in sorted(keys - shown, key=lambda key: (is_timing(key), key))]


def charts(runs: Sequence[RecordedRun], kinds: Sequence[tuple[str, str, str]]) -> tuple[str, list[Any]]:
    """The charts that have something to show, and their data for the pointer."""
    cards, data = [], []
    for key, title, about in kinds:
        series = [s for i, run in enumerate(runs) for s in _series(run, i, key) if s.points]
        if series:
            has_marks = any(one.mark in ("dot", "ring") for one in series)
            note = "; held out: dots sampled, rings greedy" if has_marks else ""
            cards.append(_card(title, about + note, curves_svg(title, series)))
            data.append(hover_data(series))
    return "".join(cards), data


def _series(run: RecordedRun, run_index: int, key: str) -> list[Series]:
    mark = "exact" if key in _EXACT else "line"
    found = [Series(label=run.name, run_index=run_index, points=run.points(key), mark=mark)]
    if key == "accuracy":
        for name, label, mark in (("accuracy", "held out", "dot"), ("greedy", "held out, greedy", "ring")):
            points = evaluated(run, name)
            found.append(Series(label=f"{run.name}, {label}", run_index=run_index, points=points, mark=mark))
    return found


def _card(title: str, about: str, svg: str, attributes: str = "") -> str:
    return (
        f"<figure{attributes}><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>{svg}</figure>"
    )


def phases(runs: Sequence[RecordedRun]) -> tuple[str, list[Any]]:
    """Seconds of each step by phase, on one scale for all runs; and their data for the pointer."""
    shares = [phase_seconds(run) for run in runs]
    high = max((sum(parts) for _, rows in shares for parts in rows), default=1.0)
    cards, data = [], []
    for i, (run, (steps, rows)) in enumerate(zip(runs, shares, strict=True)):
        if any(sum(parts) for parts in rows):
            layers = [list(layer) for layer in zip(*rows, strict=True)]
            svg = stack_svg(f"Seconds of each step: {run.name}", steps, layers, high)
            about = f"{run.name}, seconds of each step"
            cards.append(_card("Time", about, svg + _phase_key(layers), f' data-run="{i}"'))
            named = zip((*PHASES, "other"), layers, strict=True)
            data.append(
                [
                    {"label": name, "run": i, "points": list(zip(steps, rounded(layer), strict=True))}
                    for name, layer in named
                    if any(layer)
                ]
            )
    return "".join(cards), data


def _phase_key(layers: Sequence[Sequence[float]]) -> str:
    totals = [sum(layer) for layer in layers]
    spans = [
        f'<span class="p{i}"><i></i>{name} <b>{total / (sum(totals) or 1):.0%}</b></span>'
        for i, (name, total) in enumerate(zip((*PHASES, "other"), totals, strict=True))
        if total
    ]
    return f'<p class="key">{"".join(spans)}</p>'


def phase_seconds(run: RecordedRun) -> tuple[list[float], list[list[float]]]:
    """Steps, and for each the seconds of every phase and of the rest; long runs as means of stretches."""
    rows = []
    for record in run.records:
        parts = [number(record.get(f"{name}_s")) or 0.0 for name in PHASES]
        rows.append(
            [float(record["step"]), *parts, max(0.0, (number(record.get("step_s")) or 0.0) - sum(parts))]
        )
    num_rows = min(len(rows), _MAX_STACKED)
    edges = [i * len(rows) // num_rows for i in range(num_rows + 1)] if rows else []
    means = [[fmean(c) for c in zip(*rows[a:b], strict=True)] for a, b in itertools.pairwise(edges)]
    return [row[0] for row in means], [row[1:] for row in means]


def table(runs: Sequence[RecordedRun], trees: Sequence[dict[str, Any]]) -> str:
    """A row for each name, a column for each run; rows in which the runs differ are marked."""
    columns = [flatten(tree) for tree in trees]
    names = dict.fromkeys(name for column in columns for name in column)
    head = "".join(f'<th class="s{i % 8}"><i></i>{escape(run.name)}</th>' for i, run in enumerate(runs))
    rows = []
    for name in names:
        cells = [_cell(column[name]) if name in column else "" for column in columns]
        mark = ' class="differs"' if len(set(cells)) > 1 else ""
        rows.append(f"<tr{mark}><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        if rows
        else ""
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) else encode(value).decode())
