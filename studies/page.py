"""Write a study's page: verdicts in sentences, tables, curves with bands, the choice of rates, the origin.

The page is one file without scripts; summary.md beside it has the verdicts and the leading table.
"""

import dataclasses
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from qerl.tracking.atomic_file import write_atomic
from qerl.tracking.metric_text import clock
from qerl.tracking.report.curve import Series, curves_svg
from studies import verdict
from studies.analysis import Judged, Row, bands, facts, judge, table
from studies.forest import forest_svg
from studies.results import Line
from studies.study import Curve, Metric, Study


def write_pages(study: Study, folder: Path, lines: Sequence[Line], trials: Sequence[Line]) -> Path:
    """Write index.html and summary.md; return the path of index.html."""
    judged = judge(study, lines)
    rows = table(study, lines, study.metrics[0].key)
    origin = _origin(lines, trials)
    write_atomic(folder / "summary.md", verdict.summary(study, judged, rows, origin).encode())
    write_atomic(folder / "index.html", _html(study, lines, trials, judged, origin).encode())
    return folder / "index.html"


def _html(
    study: Study, lines: Sequence[Line], trials: Sequence[Line], judged: Sequence[Judged], origin: str
) -> str:
    first, *others = study.metrics
    planned = len(study.tasks) * len(study.arms) * len(study.seeds)
    missing = planned - len(lines)
    parts = {
        "title": escape(study.name),
        "style": files("qerl.tracking.report").joinpath("page.css").read_text(encoding="utf-8"),
        "notices": f"{missing} of {planned} runs are missing" if missing else "",
        "question": escape(study.question),
        "caveats": "".join(f'<p class="caveat">{escape(text)}</p>' for text in verdict.caveats(study)),
        "verdicts": _verdicts(study, judged),
        "rules": escape(verdict.RULES),
        "metric": escape(first.title),
        "forests": "".join(_forest(study, lines, task.name, first) for task in study.tasks),
        "table": _table(study, lines, first),
        "tables": "".join(f"<h3>{escape(m.title)}</h3>" + _table(study, lines, m) for m in others),
        "legend": _legend(study),
        "curves": _charts([_overview(study, lines, c, t.name) for t in study.tasks for c in study.curves]),
        "baseline": escape(study.baseline),
        "pairs": _charts(_pairs(study, lines)),
        "choice": _choice(study, trials),
        "arms": _arms(study),
        "remarks": "".join(f"<p>{escape(text)}</p>" for text in (*study.remarks, origin)),
    }
    # One pass over the template: inserted text is never searched for placeholders.
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, *rest = template.split("{{")
    return head + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest))


def _verdicts(study: Study, judged: Sequence[Judged]) -> str:
    blocks = []
    for title, claims in verdict.by_verdict(judged):
        items = "".join(
            f"<li>{escape(verdict.sentence(one))}<br><small>{escape(verdict.evidence_text(study, one))}"
            "</small></li>"
            for one in claims
        )
        kind = claims[0].verdict.replace(" ", "-")
        blocks.append(f'<div class="verdict {kind}"><h3>{escape(title)}</h3><ul>{items}</ul></div>')
    return "".join(blocks)


def _table(study: Study, lines: Sequence[Line], metric: Metric) -> str:
    rows = table(study, lines, metric.key)
    heads = "".join(f"<th>{name}</th>" for name in ("task", "arm", *verdict.COLUMNS))
    body = "".join(_row(study, row) for row in rows)
    about = f'<p class="rule">{escape(metric.about)}; differences from {escape(study.baseline)}</p>'
    table_html = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'{about if metric.about else ""}<div class="scroll">{table_html}</div>'


def _row(study: Study, row: Row) -> str:
    kind = ' class="baseline"' if row.arm == study.baseline else ""
    cells = "".join(f"<td>{escape(text)}</td>" for text in verdict.cells(row))
    return f"<tr{kind}><td>{escape(row.task)}</td><th>{escape(row.arm)}</th>{cells}</tr>"


def _forest(study: Study, lines: Sequence[Line], task: str, metric: Metric) -> str:
    index = {arm.name: i for i, arm in enumerate(study.arms)}
    rows = [
        (row.arm, index[row.arm], row.estimate) for row in table(study, lines, metric.key) if row.task == task
    ]
    if not rows:
        return ""
    svg = forest_svg(f"{metric.title}, {task}", rows, study.baseline)
    return _figure(task, f"{metric.about or metric.title}; mean and 95 % interval", svg)


def _overview(study: Study, lines: Sequence[Line], curve: Curve, task: str) -> str:
    """Return the chart of every arm's mean."""
    series = [s for i, arm in enumerate(study.arms) if (s := _series(lines, curve, task, arm.name, i))]
    series = [dataclasses.replace(one, band=()) for one in series]
    return _chart(curve, task, series, "means of all arms")


def _pairs(study: Study, lines: Sequence[Line]) -> list[str]:
    charts = []
    curve = study.curves[0]
    base_index = next(i for i, arm in enumerate(study.arms) if arm.name == study.baseline)
    for task in study.tasks:
        base = _series(lines, curve, task.name, study.baseline, base_index)
        for i, arm in enumerate(study.arms):
            series = _series(lines, curve, task.name, arm.name, i)
            if arm.name != study.baseline and series and base:
                charts.append(_chart(curve, task.name, [base, series], f"{arm.name} and {study.baseline}"))
    return charts


def _series(lines: Sequence[Line], curve: Curve, task: str, arm: str, index: int) -> Series | None:
    of_arm = [line for line in lines if (line["task"], line["arm"]) == (task, arm)]
    points_by_x = bands(of_arm, curve.x, curve.y)
    if not points_by_x:
        return None
    edges = [(x, e.low, e.high) for x, e in points_by_x if e.low is not None and e.high is not None]
    points = [(float(x), e.mean) for x, e in points_by_x]
    return Series(label=arm, run_index=index, points=points, mark="exact", band=edges)


def _chart(curve: Curve, task: str, series: Sequence[Series], about: str) -> str:
    if not series:
        return ""
    title = f"{curve.title}, {task}"
    return _figure(title, f"{curve.about}; {about}", curves_svg(title, series, curve.x))


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _figure(title: str, about: str, svg: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>{svg}</figure>"


def _legend(study: Study) -> str:
    return "".join(
        f'<span class="s{i % 8}{" again" if i >= 8 else ""}"><i></i>{escape(arm.name)}</span>'
        for i, arm in enumerate(study.arms)
    )


def _choice(study: Study, trials: Sequence[Line]) -> str:
    """Return the table of means by arm and rate, with the best rate of each arm in bold."""
    if not trials:
        return ""
    rates = sorted({line["learning_rate"] for line in trials})
    rows = []
    for task in study.tasks:
        for arm in study.arms:
            of_arm = [line for line in trials if (line["task"], line["arm"]) == (task.name, arm.name)]
            scores = {
                r: [x["final"][study.choice_metric] for x in of_arm if x["learning_rate"] == r] for r in rates
            }
            means = {rate: fmean(values) for rate, values in scores.items() if values}
            best = max(means, key=means.__getitem__, default=None)
            cells = "".join(f"<td>{_mean(means.get(rate), rate == best)}</td>" for rate in rates)
            rows.append(f"<tr><td>{escape(task.name)}</td><th>{escape(arm.name)}</th>{cells}</tr>")
    heads = "".join(f"<th>{rate:g}</th>" for rate in rates)
    seeds = ", ".join(map(str, study.choice_seeds))
    return (
        "<section><h2>Choice of the learning rate</h2>"
        f'<p class="rule">Mean {escape(study.choice_metric)} over seeds {seeds}, which are used for nothing'
        " else; of equal rates the smaller one is taken.</p>"
        f'<div class="scroll"><table><thead><tr><th>task</th><th>arm</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _mean(value: float | None, is_best: bool) -> str:
    text = "" if value is None else verdict.number(value)
    return f"<b>{text}</b>" if is_best else text


def _arms(study: Study) -> str:
    def fields(index: int) -> str:
        arm = study.arms[index]
        texts = [f"{name} = {value}" for name, value in arm.fields.items()]
        return escape(", ".join([*texts, *([f"weights {arm.weights}"] if arm.weights != "plain" else [])]))

    rows = "".join(
        f"<tr><th>{escape(arm.name)}</th><td>{escape(arm.about)}</td><td>{fields(i)}</td></tr>"
        for i, arm in enumerate(study.arms)
    )
    return f"<table><thead><tr><th>arm</th><th></th><th>fields</th></tr></thead><tbody>{rows}</tbody></table>"


def _origin(lines: Sequence[Line], trials: Sequence[Line]) -> str:
    summary = facts([*lines, *trials])
    if not summary["runs"]:
        return "No run is complete."
    workers = "/".join(map(str, summary["workers"]))
    commits = ", ".join(summary["commits"])
    differed = " (+: with uncommitted changes)" if "+" in commits else ""
    return (
        f"{summary['runs']} runs, {clock(summary['seconds'])} in total, {workers} at the same time on one"
        f" device: {', '.join(summary['devices'])}; commits {commits}{differed}."
    )
