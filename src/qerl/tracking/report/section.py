"""Render the page's sections as HTML, with all text of a run escaped: headlines, charts, tables."""

import itertools
import math
import re
from collections.abc import Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from qerl.errors import quantity
from qerl.tracking import is_timing
from qerl.tracking.atomic_file import encode
from qerl.tracking.metric_text import clock
from qerl.tracking.provenance import flatten
from qerl.tracking.report.curve import (
    MAX_POINTS,
    Series,
    chart_data,
    curves_svg,
    linear_ticks,
    number_text,
    rounded,
    stacked_svg,
)
from qerl.tracking.report.facts import swatch
from qerl.tracking.report.read import Points, RecordedRun, changes, completed_steps, number

PHASES = ("rollout", "reward", "teacher", "learn", "publish", "evaluate", "checkpoint")
"""Phases of a step; the rest of its time is shown as other."""
CHARTS = (
    ("nll", "Loss", "negative log-likelihood of the learned tokens, nats per token"),
    ("rewards/accuracies", "Accuracy of pairs", "share whose chosen completion has the higher reward"),
    ("rewards/margins", "Margin", "mean reward of chosen less that of rejected completions"),
    ("rewards/chosen", "Reward of chosen", "beta times the log-ratio to the reference"),
    ("rewards/rejected", "Reward of rejected", "the same"),
    ("reward", "Reward", "mean over the step's samples"),
    ("accuracy", "Accuracy", "share of correct samples"),
    ("teacher_kl", "KL to the teacher", "student to teacher on the student's samples, nats per token"),
    ("entropy", "Entropy", "of the learner's policy, nats per token"),
    ("sampler_entropy", "Sampler entropy", "of the policy that samples, noise included, nats per token"),
    ("mismatch_kl", "Sampler-learner KL", "sampling policy to learner's policy, nats per token"),
    ("sigma", "Noise sigma", "standard deviation of the noise in the RMSNorm weights"),
    ("informative", "Informative groups", "share of groups whose rewards differ"),
    ("distinct", "Distinct samples", "share of a group's samples with different text"),
    ("effective_fraction", "Effective sample size", "share of the tokens, after importance weights"),
    ("mean_tokens", "Completion length", "mean tokens per sample"),
    ("cut_fraction", "Share cut off", "samples truncated at the limit of tokens"),
    ("staleness", "Staleness", "policy versions between sampling and learning"),
    ("carried_samples", "Carried samples", "unfinished samples left to the next step"),
    ("clip_fraction", "Clip fraction", "share of the gradient that the loss held back"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("learning_rate", "Learning rate", "of the step's last update"),
    ("tokens_per_s", "Sampling speed", "tokens per second"),
    ("memory_gb", "Peak memory", "1e9 bytes, of the GPU, or of the process on a CPU"),
)
_EXACT = ("sigma", "learning_rate")
"""Set by the config, not measured, so never smoothed."""
_MAX_STACKED = 300


def legend(runs: Sequence[RecordedRun]) -> str:
    return "".join(
        f'<label class="s{i % 8}"><input type="checkbox" checked data-toggle="{i}">{swatch(i, len(runs))}'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )


def notice_list(runs: Sequence[RecordedRun], texts: Sequence[Sequence[str]]) -> str:
    """List each run's texts after its name."""
    pairs = [(run.name, text) for run, own_texts in zip(runs, texts, strict=True) for text in own_texts]
    lines = "".join(f"<li><b>{escape(name)}</b> {escape(text)}</li>" for name, text in pairs)
    return f"<ul>{lines}</ul>" if lines else ""


def progress(runs: Sequence[RecordedRun]) -> str:
    """List the newest message of each run, and fold the earlier ones."""
    earlier = notice_list(runs, [run.progress[:-1] for run in runs])
    number = sum(max(0, len(run.progress) - 1) for run in runs)
    folded = f"<details><summary>{quantity(number, 'earlier line')}</summary>{earlier}</details>"
    return notice_list(runs, [run.progress[-1:] for run in runs]) + (folded if earlier else "")


def tiles(runs: Sequence[RecordedRun]) -> str:
    rows = [_headlines(run) for run in runs]
    labels = dict.fromkeys(label for row in rows for label in row)
    tiles = []
    for label in labels:
        values = [(i, row[label]) for i, row in enumerate(rows) if label in row]
        lines = [
            f'<p class="s{i % 8}" data-run="{i}">{swatch(i, len(runs))}{value}</p>' for i, value in values
        ]
        tiles.append(f"<div><h3>{label}</h3>{''.join(lines)}</div>")
    return "".join(tiles)


def _headlines(run: RecordedRun) -> dict[str, str]:
    """Return {label: value} of the metrics that the run has."""
    tiles: dict[str, str] = {}
    last_change = max([-1, *(step for step, _ in changes(run.facts))])
    rewards = [reward for step, reward in run.points("reward") if step > last_change]
    for name, of_rewards, label in (
        ("accuracy", "reward", "Held-out"),
        ("greedy", "greedy_reward", "Greedy"),
    ):
        accuracies, held_out = (evaluated(run, of, last_change) for of in (name, of_rewards))
        if accuracies:
            tiles[f"{label} accuracy"] = _change(accuracies, "{:.0%}")
        if held_out and held_out != accuracies:
            tiles[f"{label} reward"] = _change(held_out, "{:.2f}")
    tiles |= _float_tile(run)
    for name, label, template in (
        ("nll", "Held-out loss", "{:.3f}"),
        ("loss", "Held-out loss", "{:.3f}"),
        ("rewards/accuracies", "Held-out accuracy of pairs", "{:.0%}"),
        ("rewards/margins", "Held-out margin", "{:.2f}"),
    ):
        if figures := evaluated(run, name):
            tiles[label] = _change(figures, template)
    if rewards:
        share = max(1, len(rewards) // 10)
        means = [(0.0, fmean(rewards[:share])), (1.0, fmean(rewards[-share:]))]
        tiles["Reward"] = _change(means[: len(rewards)], "{:.2f}")
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


def _float_tile(run: RecordedRun) -> dict[str, str]:
    """Return the float model's held-out accuracy, or reward, and how far the quantized model is below it."""
    stored = run.evaluations.get("float")
    scores = stored if isinstance(stored, dict) else {}
    for name, template in (("accuracy", "{:.0%}"), ("reward", "{:.2f}")):
        value, price = number(scores.get(name)), number(scores.get(f"{name}_price"))
        if value is not None:
            loss = "" if price is None else f" <small>{template.format(price)} more than quantized</small>"
            return {f"Float model's {name}": template.format(value) + loss}
    return {}


def _change(points: Points, template: str) -> str:
    """Return the last value, after the first one if there are several."""
    before = f"<small>{template.format(points[0][1])} &rarr;</small> " if len(points) > 1 else ""
    return before + template.format(points[-1][1])


def evaluated(run: RecordedRun, name: str, after: int = -1) -> Points:
    """Return (completed steps, held-out figure): before training, during it, and at its end; of more steps
    than `after` alone."""
    points = run.points(f"eval_{name}")
    last = completed_steps(run.records)
    ends = {m: int(n[1]) for m in run.evaluations if (n := re.fullmatch(r"after_([0-9]{1,15})_steps", m))}
    for moment, steps in {"before": 0, **ends, "after": last}.items():
        scores = run.evaluations.get(moment)
        value = number(scores.get(name)) if isinstance(scores, dict) else None
        if value is not None and steps not in [step for step, _ in points]:
            points.append((float(steps), value))
    return sorted(point for point in points if point[0] > after)


def _keys(runs: Sequence[RecordedRun]) -> set[str]:
    return {key for run in runs for record in run.records for key in record}


def pass_at_charts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Return a pass@k chart for each measured k except 1, which is the accuracy."""
    matches = (re.fullmatch(r"pass_at_([1-9][0-9]{0,8})", key) for key in _keys(runs))
    powers = sorted(k for match in matches if match and (k := int(match[1])) > 1)
    about = "probability that at least one of {} samples is correct"
    return [(f"pass_at_{k}", f"Pass@{k}", about.format(k)) for k in powers]


def main_charts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Return all charts that have a title."""
    first = [each[0] for each in CHARTS].index("accuracy") + 1
    return [*CHARTS[:first], *reward_charts(runs), *CHARTS[first:], *pass_at_charts(runs)]


def reward_charts(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    """Return a chart for each of several rewards."""
    names = sorted(key for key in _keys(runs) if re.fullmatch(r"rewards/.+/mean", key, re.DOTALL))
    return [(key, f"Reward {key[8:-5]}", "mean of this reward, before its weight") for key in names]


def other_metrics(runs: Sequence[RecordedRun]) -> list[tuple[str, str, str]]:
    charted = {key for key, _, _ in main_charts(runs)}
    keys = _keys(runs)
    charted |= {"step", "wall_time", *(key for key in keys if key.startswith("eval_"))}
    return [(key, key, "") for key in sorted(keys - charted, key=lambda key: (is_timing(key), key))]


def by_change(
    runs: Sequence[RecordedRun], kinds: Sequence[tuple[str, str, str]]
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Divide the charts into those that have something to see and those whose values are all the same, to the
    digits that a page shows."""
    is_same = accuracy_is_reward(runs)
    constant = []
    for kind in kinds:
        points = [
            s.points for i, run in enumerate(runs) for s in _series(run, i, kind[0], is_same) if s.points
        ]
        if (
            any(len(each) > 1 for each in points)
            and len({rounded(y) for each in points for _, y in each}) == 1
        ):
            constant.append(kind)
    return [kind for kind in kinds if kind not in constant], constant


def charts(runs: Sequence[RecordedRun], kinds: Sequence[tuple[str, str, str]]) -> tuple[str, list[Any]]:
    """Return the charts that have values, and the values that the page's script shows.

    Where accuracy is the reward at every step of every run, there is one chart for both.
    """
    cards, data = [], []
    is_same, x_range = accuracy_is_reward(runs), (0.0, num_steps(runs))
    for key, title, about in kinds:
        series = [s for i, run in enumerate(runs) for s in _series(run, i, key, is_same) if s.points]
        if not series or (is_same and key == "accuracy"):
            continue
        if is_same and key == "reward":
            about += "; accuracy is the same at every step and not drawn"
        if any(one.mark in ("dot", "ring") for one in series):
            kinds_drawn = "dots" if len(_HELD_OUT[key]) == 1 else "dots sampled, rings greedy"
            about += f"; held-out: {kinds_drawn}" + ", bars 95 % intervals" * any(one.band for one in series)
        cards.append(_card(title, about, curves_svg(title, series, x_range=x_range)))
        data.append(chart_data(series))
    return "".join(cards), data


def num_steps(runs: Sequence[RecordedRun]) -> float:
    """Return the last step of the longest run, at least 1."""
    return float(max([1, *(completed_steps(run.records) for run in runs)]))


def accuracy_is_reward(runs: Sequence[RecordedRun]) -> bool:
    """True if there is an accuracy, and no step where it differs from the reward."""
    pairs = [(run.points("accuracy"), run.points("reward")) for run in runs]
    return any(accuracy for accuracy, _ in pairs) and all(a == reward for a, reward in pairs if a)


def noise_starts(run: RecordedRun) -> list[float]:
    """Return the steps whose sigma is above 0 where it was 0 the step before."""
    return [
        step for (_, before), (step, sigma) in itertools.pairwise(run.points("sigma")) if before == 0 < sigma
    ]


def timeline(run: RecordedRun) -> dict[str, Any]:
    """Return the run's name, and (step, minutes of training, tokens sampled) from 0 on for the other axes."""
    rows, minutes, tokens = [(0, 0.0, 0.0)], 0.0, 0.0
    for record in run.records:
        minutes += (number(record.get("step_s")) or 0.0) / 60
        tokens += number(record.get("sampled_tokens")) or 0.0
        rows.append((record["step"] + 1, rounded(minutes), rounded(tokens)))
    stride = max(1, -(-len(rows) // MAX_POINTS))
    return {"name": run.name, "clock": [*rows[:-1:stride], rows[-1]]}


def ticks(timelines: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the ticks of each x axis, which all charts share: whole steps, minutes, tokens. An axis that
    ends at 0 or below, as negative times in damaged records give, has the ticks of one that ends at 1."""
    ends = zip(*(timeline["clock"][-1] for timeline in timelines), strict=True)
    steps, *others = [linear_ticks(0.0, end if (end := max(values)) > 0 else 1.0, 6) for values in ends]
    return [[tick for tick in steps if tick.is_integer()], *others]


def _series(run: RecordedRun, run_index: int, key: str, is_same: bool) -> list[Series]:
    mark = "exact" if key in _EXACT else "line"
    breaks = dict.fromkeys(noise_starts(run), "noise") if mark == "line" else {}
    breaks |= {step + 1.0: "changed" for step, _ in changes(run.facts)}
    series = [Series(label=run.name, run_index=run_index, points=run.points(key), mark=mark, breaks=breaks)]
    figures = _HELD_OUT.get("accuracy" if is_same and key == "reward" else key, ())
    for name, (label, mark) in zip(figures, _DRAWN, strict=False):
        points = evaluated(run, name)
        held_out = Series(
            label=f"{run.name}, {label}",
            run_index=run_index,
            points=points,
            mark=mark,
            band=intervals(run, name, points),
            is_joined=bool(run.points(f"eval_{name}")),
        )
        series.append(held_out)
    return series


_HELD_OUT = {
    **{name: (name,) for name in ("nll", "rewards/accuracies", "rewards/margins")},
    "reward": ("reward", "greedy_reward"),
    "accuracy": ("accuracy", "greedy"),
}
"""The sampled and the greedy figure of an evaluation that a chart shows."""
_DRAWN = (("held-out", "dot"), ("held-out greedy", "ring"))


def intervals(run: RecordedRun, name: str, points: Points) -> list[tuple[float, float, float]]:
    """Return (step, low, high): the 95 % interval of a held-out figure over problems, Wilson's of a share."""
    if name in _HELD_OUT["reward"]:
        errors = dict(evaluated(run, f"{name}_error"))
        return [(x, y - 1.96 * errors[x], y + 1.96 * errors[x]) for x, y in points if x in errors]
    if name not in _HELD_OUT["accuracy"]:
        return []
    config = run.facts.get("config")
    fields = flatten(config) if isinstance(config, dict) else {}
    limits = [number(fields.get(field)) for field in ("evaluate.num_prompts", "task.num_held_out")]
    limit, counts = (
        min((limit for limit in limits if limit), default=0.0),
        dict(evaluated(run, "num_prompts")),
    )
    z2, bounds = 1.96**2, []
    for step, share in points:
        if (count := counts.get(step, limit)) < 1:
            continue
        scale, variance = 1 + z2 / count, share * (1 - share) / count + z2 / 4 / count**2
        middle, spread = (share + z2 / 2 / count) / scale, 1.96 * math.sqrt(max(0.0, variance)) / scale
        bounds.append((step, max(0.0, middle - spread), min(1.0, middle + spread)))
    return bounds


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
            layers = list(map(list, zip(*rows, strict=True)))
            title = f"Seconds per step: {run.name}"
            svg = stacked_svg(title, steps, layers, high, num_steps(runs))
            about = f"seconds by phase, {run.name}"
            cards.append(_card("Time per step", about, svg + _phase_key(layers), f' data-run="{i}"'))
            layered = [
                Series(label=name, run_index=i, points=list(zip(steps, layer, strict=True)))
                for name, layer in zip((*PHASES, "other"), layers, strict=True)
                if any(layer)
            ]
            data.append(chart_data(layered))
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
    """Return steps, and the seconds of every phase and of the rest of the step in each. Checkpoints lie
    between steps. Long runs are averaged: each step is then the last of those averaged."""
    rows = []
    for record in run.records:
        names = ("checkpoint_hold", "step", *PHASES[:-1])
        seconds = (max(0.0, number(record.get(f"{name}_s")) or 0.0) for name in names)
        held_s, step_s, *parts = seconds
        rows.append([record["step"] + 1.0, *parts, held_s, max(0.0, step_s - sum(parts))])
    num_rows = min(len(rows), _MAX_STACKED)
    edges = [i * len(rows) // num_rows for i in range(num_rows + 1)] if rows else []
    means = [[fmean(c) for c in zip(*rows[a:b], strict=True)] for a, b in itertools.pairwise(edges)]
    return [rows[end - 1][0] for end in edges[1:]], [row[1:] for row in means]


def table(runs: Sequence[RecordedRun], trees: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per name and a column per run; rows that differ are marked."""
    columns = [flatten(tree) for tree in trees]
    names = dict.fromkeys(name for column in columns for name in column)
    head = "".join(
        f'<th class="s{i % 8}">{swatch(i, len(runs))}{escape(run.name)}</th>' for i, run in enumerate(runs)
    )
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
