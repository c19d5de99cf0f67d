"""Write a study's page: picture, verdicts, tables, costs, curves with bands, the choice of rates, the origin.

The page is one file without scripts; summary.md beside it has the verdicts and the leading tables. A study
with a picture also has headline.md and verdicts.md, which README.md quotes, and curve.md, which
docs/gsm8k.md quotes (benchmarks/pages.py).
"""

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from qerl.tracking.atomic_file import write_atomic
from qerl.tracking.metric_text import clock
from qerl.tracking.report.curve import Series, curves_svg
from qerl.tracking.report.page import asset
from studies import costs, headline, verdict
from studies.analysis import Judged, Row, facts, judge, table
from studies.forest import forest_svg
from studies.picture import STYLE, picture_svg, series_of
from studies.results import Line, num_at_once
from studies.study import Curve, Metric, Study


def write_pages(study: Study, folder: Path, lines: Sequence[Line], trials: Sequence[Line]) -> Path:
    """Write the files above; return the path of index.html."""
    judged = judge(study, lines)
    rows = table(study, lines, study.metrics[0].key)
    origin = _origin(study, lines, trials)
    write_atomic(
        folder / "summary.md",
        verdict.summary(study, judged, rows, origin, costs.markdown(study, lines)).encode(),
    )
    if study.picture is not None:
        write_atomic(folder / "headline.md", f"{headline.results(study, lines)}\n".encode())
        write_atomic(folder / "curve.md", f"{headline.curve_table(study, lines)}\n".encode())
        write_atomic(folder / "verdicts.md", f"{headline.verdicts(study, judged)}\n".encode())
    write_atomic(folder / "index.html", _html(study, lines, trials, judged, origin).encode())
    return folder / "index.html"


def _html(
    study: Study, lines: Sequence[Line], trials: Sequence[Line], judged: Sequence[Judged], origin: str
) -> str:
    first, *others = study.metrics
    parts = {
        "title": escape(study.name),
        "style": asset("page.css") + STYLE,
        "notices": escape(_missing(study, lines)),
        "question": escape(study.question),
        "answer": escape(verdict.tally(study, judged)),
        "picture": _picture(study, lines),
        "caveats": "".join(f'<p class="caveat">{escape(text)}</p>' for text in verdict.caveats(study)),
        "verdicts": _verdicts(study, judged),
        "rules": escape(verdict.rules(study)),
        "metric": escape(first.title),
        "forests": "".join(_forest(study, lines, task.name, first) for task in study.tasks),
        "table": _table(study, lines, first),
        "tables": "".join(f"<h3>{escape(m.title)}</h3>" + _table(study, lines, m) for m in others),
        "costs": _costs(study, lines),
        "curves": _curves(study, lines),
        "choice": _choice(study, trials),
        "arms": _arms(study),
        "remarks": "".join(f"<p>{escape(text)}</p>" for text in (*study.remarks, origin)),
    }
    # One pass over the template: inserted text is never searched for placeholders.
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, *rest = template.split("{{")
    return head + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest))


def _picture(study: Study, lines: Sequence[Line]) -> str:
    """Return the study's picture and its figures, or nothing."""
    picture = picture_svg(study, lines)
    text = escape(headline.results(study, lines).replace("**", ""))
    return f'<div class="picture">{picture}</div><p class="rule">{text}</p>' if picture else ""


def _missing(study: Study, lines: Sequence[Line]) -> str:
    """Return which runs of the study have no line, arm by arm."""
    planned = len(study.tasks) * len(study.seeds)
    counts = {arm.name: sum(line["arm"] == arm.name for line in lines) for arm in study.arms}
    parts = [f"{name} {planned - n} of {planned}" for name, n in counts.items() if n < planned]
    return f"Runs not made: {', '.join(parts)}" if parts else ""


def _verdicts(study: Study, judged: Sequence[Judged]) -> str:
    """Return the table of claims, the decided ones first."""
    rows = "".join(_claim(study, one) for _, claims in verdict.by_verdict(study, judged) for one in claims)
    heads = "".join(f"<th>{name}</th>" for name in ("verdict", "claim", "difference [95 %]", "p", "pairs"))
    table_html = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll verdicts">{table_html}</div>' if judged else ""


def _claim(study: Study, judged: Judged) -> str:
    evidence, text, difference, cells = judged.evidence, "no pair of runs exists", "", ("", "")
    if evidence is not None:
        text = "; ".join(
            [*verdict.counted(study, judged, evidence), *verdict.details(study, judged, evidence)]
        )
        metric = escape(verdict.title_of(study, judged.claim.metric))
        difference = f"{verdict.signed(evidence.over_all.difference)}<br><small>{metric}</small>"
        cells = verdict.p_text(judged.p).removeprefix("p = "), str(evidence.num_units)
    kind = judged.verdict.replace(" ", "-")
    claim = f"{escape(judged.claim.says)}<br><small>{escape(text)}</small>"
    tail = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    word = escape(verdict.word(study, judged))
    return f'<tr class="{kind}"><th>{word}</th><td class="claim">{claim}</td><td>{difference}</td>{tail}</tr>'


def _costs(study: Study, lines: Sequence[Line]) -> str:
    """Return the section with what a run of each arm costs, or nothing."""
    rows = costs.costs(study, lines)
    if not rows:
        return ""
    heads = "".join(f"<th>{name}</th>" for name in ("task", "arm", *costs.COLUMNS))
    body = "".join(
        f"<tr><td>{escape(row.task)}</td><th>{escape(row.arm)}</th>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in costs.cells(row))}</tr>"
        for row in rows
    )
    notes = " ".join(text for text in (costs.RULE, costs.left_out(lines)) if text)
    table_html = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return (
        f'<section><h2>Seconds and memory</h2><p class="rule">{escape(notes)}</p>'
        f'<div class="scroll">{table_html}</div></section>'
    )


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
    found = [series_of(study, lines, curve, task, arm.name) for arm in study.arms]
    series = [dataclasses.replace(one, band=()) for one in found if one is not None]
    return _chart(curve, task, series, "means of all arms")


def _curves(study: Study, lines: Sequence[Line]) -> str:
    """Return the section of the curves; nothing for a study without any."""
    if not study.curves:
        return ""
    charts = _charts([_overview(study, lines, c, t.name) for t in study.tasks for c in study.curves])
    pairs = _charts(_pairs(study, lines))
    summary = f"Each arm and {escape(study.baseline)}, with 95 % intervals"
    return (
        f'<section><h2>Curves</h2><div class="legend">{_legend(study, lines)}</div>{charts}\n'
        f"<details><summary>{summary}</summary>{pairs}</details></section>"
    )


def _pairs(study: Study, lines: Sequence[Line]) -> list[str]:
    charts = []
    curve = study.curves[0]
    for task in study.tasks:
        base = series_of(study, lines, curve, task.name, study.baseline)
        for arm in study.arms:
            series = series_of(study, lines, curve, task.name, arm.name)
            if arm.name != study.baseline and series and base:
                charts.append(_chart(curve, task.name, [base, series], f"{arm.name} and {study.baseline}"))
    return charts


def _chart(curve: Curve, task: str, series: Sequence[Series], about: str) -> str:
    if not series:
        return ""
    title = f"{curve.title}, {task}"
    return _figure(title, f"{curve.about}; {about}", curves_svg(title, series, curve.x_label or curve.x))


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _figure(title: str, about: str, svg: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>{svg}</figure>"


def _legend(study: Study, lines: Sequence[Line]) -> str:
    """Return the colors of the arms that were run."""
    run = {line["arm"] for line in lines}
    return "".join(
        f'<span class="s{i % 8}{" again" if i >= 8 else ""}"><i></i>{escape(arm.name)}</span>'
        for i, arm in enumerate(study.arms)
        if arm.name in run
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


def _taken(study: Study, lines: Sequence[Line]) -> str:
    taken = sum(line["study"] != study.name for line in lines)
    return f" {taken} of them are runs of the study {study.takes_from}." if taken else ""


def _origin(study: Study, lines: Sequence[Line], trials: Sequence[Line]) -> str:
    summary = facts([*lines, *trials])
    if not summary["runs"]:
        return "No run is complete."
    commits = ", ".join(summary["commits"])
    differed = " (+: with uncommitted changes)" if "+" in commits else ""
    return (
        f"{summary['runs']} runs, {clock(summary['seconds'])} in total, {num_at_once([*lines, *trials])}"
        f" at the same time on one device: {', '.join(summary['devices'])};"
        f" commits {commits}{differed}.{_taken(study, lines)}"
    )
