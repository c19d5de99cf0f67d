"""Render the page's sections as HTML, with all text of a run escaped: headlines, charts, tables."""

import itertools
import re
from collections.abc import Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from qerl.tracking import is_timing
from qerl.tracking.atomic_file import encode
from qerl.tracking.metric_text import clock
from qerl.tracking.provenance import flatten
from qerl.tracking.report.curve import Series, curves_svg, hover_data, number_text, stacked_svg
from qerl.tracking.report.read import Points, RecordedRun, number

PHASES = ("rollout", "reward", "learn", "publish", "evaluate", "checkpoint")
"""Phases of a step; the rest of its time is shown as other."""
CHARTS = (
    ("reward", "Reward", "mean over the step's samples"),
    ("accuracy", "Accuracy", "share of correct samples"),
    ("entropy", "Entropy", "of the learner's policy, nats per token"),
    ("sampler_entropy", "Sampler entropy", "of the noisy policy, nats per token"),
    ("mismatch_kl", "Sampler-learner KL", "sampling policy to learner's policy, nats per token"),
    ("sigma", "Noise sigma", "standard deviation of the noise in the RMSNorm weights"),
    ("informative", "Informative groups", "share of groups whose rewards differ"),
    ("distinct", "Distinct samples", "share of a group's samples with different text"),
    ("effective_fraction", "Effective sample size", "share of the tokens, after importance weights"),
    ("mean_tokens", "Completion length", "mean tokens per sample"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("tokens_per_s", "Sampling speed", "tokens per second"),
)
_EXACT = ("sigma", "learning_rate")
"""Set by the config, not measured, so never smoothed."""
_MAX_STACKED = 300


def legend(runs: Sequence[RecordedRun]) -> str:
    return "".join(
        f'<label class="s{i % 8}"><input type="checkbox" checked data-toggle="{i}"><i></i>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )


def notice_list(runs: Sequence[RecordedRun], texts: Sequence[Sequence[str]]) -> str:
    """List each run's texts after its name."""
    pairs = [(run.name, text) for run, own in zip(runs, texts, strict=True) for text in own]
    lines = "".join(f"<li><b>{escape(name)}</b> {escape(text)}</li>" for name, text in pairs)
    return f"<ul>{lines}</ul>" if lines else ""


def tiles(runs: Sequence[RecordedRun]) -> str:
    rows = [_headlines(run) for run in runs]
    labels = dict.fromkeys(label for row in rows for label in row)
    tiles = []
    for label in labels:
        values = [(i, row[label]) for i, row in enumerate(rows) if label in row]
        lines = [f'<p class="s{i % 8}" data-run="{i}"><i></i>{value}</p>' for i, value in values]
        tiles.append(f"<div><h3>{label}</h3>{''.join(lines)}</div>")
    return "".join(tiles)


def _headlines(run: RecordedRun) -> dict[str, str]:
    """Return {label: value} of the metrics that the run has."""
    tiles: dict[str, str] = {}
    rewards = run.values("reward")
    for name, of_rewards, label in (
        ("accuracy", "reward", "Held-out"),
        ("greedy", "greedy_reward", "Greedy"),
    ):
        accuracies, held_out = evaluated(run, name), evaluated(run, of_rewards)
        if accuracies:
            first, last = accuracies[0][1], accuracies[-1][1]
            tiles[f"{label} accuracy"] = _change(first, last, len(accuracies) > 1, "{:.0%}")
        if held_out and held_out != accuracies:
            first, last = held_out[0][1], held_out[-1][1]
            tiles[f"{label} reward"] = _change(first, last, len(held_out) > 1, "{:.2f}")
    if rewards:
        share = max(1, len(rewards) // 10)
        tiles["Reward"] = _change(fmean(rewards[:share]), fmean(rewards[-share:]), len(rewards) > 1, "{:.2f}")
    if run.records:
        config = run.facts.get("config")
        planned = config.get("num_steps") if isinstance(config, dict) else None
        of_planned = f" <small>of {escape(str(planned))}</small>" if planned else ""
        tiles["Steps"] = f"{len(run.records)}{of_planned}"
        tiles["Training time"] = clock(sum(run.values("step_s")))
    if speeds := run.values("tokens_per_s"):
        tiles["Tokens per second"] = number_text(round(median(speeds)))
    if memory := run.values("memory_gb"):
        tiles["Peak memory"] = f"{max(memory):.1f} <small>GB</small>"
    return tiles


def _change(first: float, last: float, has_changed: bool, template: str) -> str:
    before = f"<small>{template.format(first)} &rarr;</small> " if has_changed else ""
    return before + template.format(last)


def evaluated(run: RecordedRun, name: str) -> Points:
    """Return (completed steps, held-out figure): before training, during it, and after."""
    points = run.points(f"eval_{name}")
    last = run.records[-1]["step"] + 1 if run.records else 0
    ends = {m: int(n[1]) for m in run.evaluations if (n := re.fullmatch(r"after_(\d+)_steps", m))}
    for moment, steps in {"before": 0, **ends, "after": last}.items():
        scores = run.evaluations.get(moment)
        value = number(scores.get(name)) if isinstance(scores, dict) else None
        if value is not None and steps not in [step for step, _ in points]:
            points.append((float(steps), value))
    return sorted(points)


def _keys(runs: Sequence[RecordedRun]) -> set[str]:
    return {key for run in runs for record in run.records for key in record}


def pass_at_charts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Return a pass@k chart for each measured k except 1, which is the accuracy."""
    numbers = {key.removeprefix("pass_at_") for key in _keys(runs) if key.startswith("pass_at_")}
    powers = sorted(int(number) for number in numbers if number.isdigit() and number != "1")
    about = "probability that at least one of {} samples is correct"
    return [(f"pass_at_{k}", f"Pass@{k}", about.format(k)) for k in powers]


def other_metrics(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    charted = {key for key, _, _ in [*CHARTS, *pass_at_charts(runs)]}
    charted |= {"step", "wall_time", "eval_accuracy", "eval_greedy", "eval_reward", "eval_greedy_reward"}
    keys = _keys(runs)
    return [(key, key, "") for key in sorted(keys - charted, key=lambda key: (is_timing(key), key))]


def charts(runs: Sequence[RecordedRun], kinds: Sequence[tuple[str, str, str]]) -> tuple[str, list[Any]]:
    """Return the charts that have values, and the values for the pointer."""
    cards, data = [], []
    for key, title, about in kinds:
        series = [s for i, run in enumerate(runs) for s in _series(run, i, key) if s.points]
        if series:
            has_marks = any(one.mark in ("dot", "ring") for one in series)
            note = "; held-out: dots sampled, rings greedy" if has_marks else ""
            cards.append(_card(title, about + note, curves_svg(title, series)))
            data.append(hover_data(series))
    return "".join(cards), data


def _series(run: RecordedRun, run_index: int, key: str) -> list[Series]:
    mark = "exact" if key in _EXACT else "line"
    series = [Series(label=run.name, run_index=run_index, points=run.points(key), mark=mark)]
    if key in ("accuracy", "reward"):
        best = "greedy" if key == "accuracy" else "greedy_reward"
        for name, label, mark in ((key, "held-out", "dot"), (best, "held-out greedy", "ring")):
            points = evaluated(run, name)
            series.append(Series(label=f"{run.name}, {label}", run_index=run_index, points=points, mark=mark))
    return series


def _card(title: str, about: str, svg: str, attributes: str = "") -> str:
    caption = f"<figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>"
    return f"<figure{attributes}>{caption}{svg}</figure>"


def phases(runs: Sequence[RecordedRun]) -> tuple[str, list[Any]]:
    """Return charts of seconds by phase, on one scale for all runs, and the values for the pointer."""
    shares = [phase_seconds(run) for run in runs]
    high = max((sum(parts) for _, rows in shares for parts in rows), default=1.0)
    cards, data = [], []
    for i, (run, (steps, rows)) in enumerate(zip(runs, shares, strict=True)):
        if any(sum(parts) for parts in rows):
            layers = [list(layer) for layer in zip(*rows, strict=True)]
            svg = stacked_svg(f"Seconds per step: {run.name}", steps, layers, high)
            about = f"seconds by phase, {run.name}"
            cards.append(_card("Time per step", about, svg + _phase_key(layers), f' data-run="{i}"'))
            named = [pair for pair in zip((*PHASES, "other"), layers, strict=True) if any(pair[1])]
            points = [(name, list(zip(steps, layer, strict=True))) for name, layer in named]
            data.append(hover_data([Series(label=n, run_index=i, points=own) for n, own in points]))
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
    """Return the steps, and the seconds of every phase and of the rest in each; long runs are averaged."""
    rows = []
    for record in run.records:
        step_s, *parts = (number(record.get(f"{name}_s")) or 0.0 for name in ("step", *PHASES))
        rows.append([record["step"] + 1.0, *parts, max(0.0, step_s - sum(parts))])
    num_rows = min(len(rows), _MAX_STACKED)
    edges = [i * len(rows) // num_rows for i in range(num_rows + 1)] if rows else []
    means = [[fmean(c) for c in zip(*rows[a:b], strict=True)] for a, b in itertools.pairwise(edges)]
    return [row[0] for row in means], [row[1:] for row in means]


def table(runs: Sequence[RecordedRun], trees: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per name and a column per run; rows that differ are marked."""
    columns = [flatten(tree) for tree in trees]
    names = dict.fromkeys(name for column in columns for name in column)
    head = "".join(f'<th class="s{i % 8}"><i></i>{escape(run.name)}</th>' for i, run in enumerate(runs))
    rows = []
    for name in names:
        cells = [_cell(column[name]) if name in column else "" for column in columns]
        mark = ' class="differs"' if len(set(cells)) > 1 else ""
        rows.append(f"<tr{mark}><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f"<table><thead><tr><th></th>{head}</tr></thead>{body}</table>" if rows else ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) else encode(value).decode())
