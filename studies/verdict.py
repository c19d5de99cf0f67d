"""Evidence as sentences: the same words on the page and in the summary, made from the numbers alone."""

from collections.abc import Sequence

from studies.analysis import LEVEL_OF_PROOF, Judged, Row, Verdict
from studies.statistics import Estimate, Paired
from studies.study import Study

HEADINGS: dict[Verdict, str] = {
    "held": "What held",
    "mixed": "What held over all, but not in every task",
    "opposite": "What turned out the other way round",
    "depends": "What depends on the task",
    "not shown": "What was not shown",
    "not measured": "What was not measured",
}
RULES = (
    f"A claim holds if p < {LEVEL_OF_PROOF} and the difference has the claimed sign in every task; it is"
    " turned round if p is as small and the sign is the other; where p is larger and two tasks' intervals"
    " are on opposite sides of 0, it depends on the task. p is that of the exact sign-flip test over all"
    " (task, seed) pairs, corrected by Holm over the claims of one family (all of this page, unless it names"
    " some). Intervals are Student's, 95 %, over seeds; d is Cohen's for pairs, the mean difference over its"
    " standard deviation. 'Not shown' is not 'not so': the interval says which differences these seeds leave"
    " open. In tables p is that of Student's paired t-test within a task, corrected over all rows of the"
    " table: it takes differences to be normal."
)


def number(value: float) -> str:
    """Four significant digits at most: 0.1234, 12.3, 1.2e-05."""
    return f"{value:.3g}" if abs(value) < 1 or abs(value) >= 1000 else f"{value:.4g}"


def interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return number(found.mean)
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def signed(found: Estimate) -> str:
    return ("+" if found.mean >= 0 else "") + interval(found)


def p_text(p: float | None) -> str:
    return "" if p is None else ("p < 0.001" if p < 0.001 else f"p = {p:.2g}")


def effect(found: Paired) -> str:
    return "" if found.effect_size is None else f"{found.effect_size:.2f}"


def evidence(study: Study, judged: Judged) -> str:
    """What stands behind a claim: "+0.03 [0.01, 0.05] in mean reward, p = 0.016, d = 1.9, 10 pairs; ..." """
    if judged.over_all is None:
        return "no pair of runs has been made"
    parts = [_difference(study, judged)]
    if judged.over_all.effect_size is not None:
        parts.append(f"d = {effect(judged.over_all)}")
    parts.append(f"{judged.num_pairs} pairs")
    text = f"{', '.join(parts)}; {_by_task(judged)}"
    if judged.verdict == "not shown" and judged.has_too_few_pairs:
        text += f"; so few pairs could not have gone below {p_text(judged.smallest_p)}"
    return text


def by_verdict(judged: Sequence[Judged]) -> list[tuple[str, list[Judged]]]:
    """Headings with their claims, those that have any."""
    groups = [
        (title, [one for one in judged if one.verdict == verdict]) for verdict, title in HEADINGS.items()
    ]
    return [(title, own) for title, own in groups if own]


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """n, the arm's mean, its difference, d, p."""
    n, mean = str(row.estimate.n), interval(row.estimate)
    if row.compared is None:
        return n, mean, "", "", ""
    return n, mean, signed(row.compared.difference), effect(row.compared), p_text(row.p)


COLUMNS = ("n", "mean", "difference", "d", "p")


def summary(study: Study, judged: Sequence[Judged], rows: Sequence[Row], origin: str) -> str:
    """Markdown to quote: the verdict, and the table of the leading metric."""
    lines = [f"# Study {study.name}", "", study.question, ""]
    for title, own in by_verdict(judged):
        lines += [f"**{title}**", "", *(f"- {one.claim.says}: {evidence(study, one)}." for one in own), ""]
    metric = study.metrics[0]
    lines += [f"{metric.title} ({metric.about or metric.key}), differences from {study.baseline}:", ""]
    lines += [_row(("task", "arm", *COLUMNS)), _row(("---",) * (2 + len(COLUMNS)))]
    lines += [_row((row.task, row.arm, *cells(row))) for row in rows]
    return "\n".join([*lines, "", RULES, "", *study.remarks, "", origin, ""])


_IN_SHORT: dict[Verdict, str] = {
    "held": "Held",
    "mixed": "Held over all, not in every task",
    "opposite": "The other way round",
    "depends": "Depends on the task",
    "not shown": "Not shown",
    "not measured": "Not measured",
}
_MOST_NAMED = 12


def headline(study: Study, judged: Sequence[Judged], num_runs: int) -> str:
    """Markdown for a page of all studies: every claim, those that were decided with their differences."""
    whole = len(study.arms) * len(study.tasks) * len(study.seeds)
    lines = [f"**{study.name}**, {num_runs} of {whole} runs. {study.question}", ""]
    for verdict, title in _IN_SHORT.items():
        own = [one for one in judged if one.verdict == verdict]
        if verdict in ("not shown", "not measured"):
            enough = [one for one in own if not one.has_too_few_pairs]
            few = [one for one in own if one.has_too_few_pairs]
            lines += _list(title, enough, len(judged)) + _list("Too few runs yet to show", few, len(judged))
        else:
            lines += [
                f"- {title}: {one.claim.says} ({_difference(study, one)}; {_by_task(one)})." for one in own
            ]
    return "\n".join(lines)


def _list(title: str, judged: Sequence[Judged], num_claims: int) -> list[str]:
    """Claims by name if they are few; a line if there are any."""
    named = "; ".join(one.claim.says for one in judged)
    said = named if len(judged) <= _MOST_NAMED else f"{len(judged)} of {num_claims} claims"
    return [f"- {title}: {said}."] if judged else []


def _by_task(judged: Judged) -> str:
    return ", ".join(f"{task} {signed(found.difference)}" for task, found in judged.by_task.items())


def _difference(study: Study, judged: Judged) -> str:
    assert judged.over_all is not None, judged
    title = next(m.title for m in study.metrics if m.key == judged.claim.metric).lower()
    return f"{signed(judged.over_all.difference)} in {title}, {p_text(judged.p)}"


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
