"""Write verdicts and their evidence as sentences: the same words on the page and in the summary."""

import itertools
from collections import Counter
from collections.abc import Sequence

from studies.analysis import SIGNIFICANCE, Evidence, Judged, Row, SideResult, Verdict
from studies.statistics import Estimate, Paired
from studies.study import Study

WORDS: dict[Verdict, str] = {
    "supported": "supported",
    "mixed": "supported overall, but not in every task",
    "refuted": "refuted",
    "depends": "depends on the task",
    "not shown": "not shown",
    "not run": "not run",
}
"""In the order of a page. Claims of another work that are supported are reproduced."""
RULES = (
    f"A claim is supported (of other authors: reproduced) if p < {SIGNIFICANCE} and the difference has the"
    f" claimed sign in every task. It is refuted if p < {SIGNIFICANCE} and the overall difference has the"
    " opposite sign. It depends on the task if p is larger and the intervals of two tasks lie on opposite"
    " sides of 0. p is from the exact sign-flip test over all independent differences (one for each task and"
    " seed, unless stated), corrected by Holm's method over the claims of one family that were run (all"
    " claims of this page, unless families are named below). Intervals are Student's 95 % intervals over"
    " seeds, each for one claim alone; d is Cohen's d for pairs, the mean difference over its standard"
    " deviation. 'Not shown' does not mean 'false': the interval shows which differences these seeds leave"
    " open. In tables p is from Student's paired t test within a task, corrected over all rows of the table;"
    " it assumes normal differences."
)
"""What holds for every study; `rules` adds a study's families."""
MIN_SEEDS = 3
"""Number of seeds from which on an interval is spoken of; Student's interval of two values says nothing."""
COLUMNS = ("n", "mean", "difference", "d", "p")


def number(value: float) -> str:
    """Four significant digits at most: 0.1234, 12.3, 1.2e-05."""
    return f"{value:.3g}" if abs(value) < 1 or abs(value) >= 1000 else f"{value:.4g}"


def interval(estimate: Estimate) -> str:
    ends = ends_of(estimate)
    text = number(estimate.mean)
    return text if ends is None else f"{text} [{number(ends[0])}, {number(ends[1])}]"


def ends_of(estimate: Estimate) -> tuple[float, float] | None:
    """Return the interval; None with fewer than MIN_SEEDS values, and if all values are the same, as those of
    one deterministic evaluation are: they say nothing of other seeds."""
    low, high = estimate.low, estimate.high
    if estimate.n < MIN_SEEDS or low is None or high is None or high - low <= 1e-12 * abs(estimate.mean):
        return None
    return low, high


def signed(estimate: Estimate) -> str:
    return ("+" if estimate.mean >= 0 else "") + interval(estimate)


def with_ci(estimate: Estimate, metric: str) -> str:
    """Return "+0.778 in entropy, 95 % CI [0.768, 0.787]"."""
    ends, text = ends_of(estimate), f"{_plus(estimate.mean)} in {metric}"
    return text if ends is None else f"{text}, 95 % CI [{number(ends[0])}, {number(ends[1])}]"


def _plus(value: float) -> str:
    return ("+" if value >= 0 else "") + number(value)


def p_text(p: float | None) -> str:
    return "" if p is None else ("p < 0.001" if p < 0.001 else f"p = {p:.2g}")


def effect(paired: Paired) -> str:
    return "" if paired.effect_size is None else f"{paired.effect_size:.2f}"


def word(study: Study, judged: Judged) -> str:
    """Return the verdict as it is read: "reproduced" for a supported claim of another work."""
    is_of_others = study.reproduces and not judged.claim.is_own
    return word_of_others(judged.verdict) if is_of_others else WORDS[judged.verdict]


def word_of_others(verdict: Verdict) -> str:
    """Return the verdict on a claim of another work."""
    return WORDS[verdict].replace("supported", "reproduced")


def difference_text(study: Study, judged: Judged) -> str:
    """Return "-0.129 in entropy, 95 % CI [-0.141, -0.116]"."""
    assert judged.evidence is not None, judged
    return with_ci(judged.evidence.over_all.difference, title_of(study, judged.claim.metric))


def evidence_text(study: Study, judged: Judged) -> str:
    """Return the difference, p, d, what was counted, the tasks one by one, and what qualifies the verdict."""
    evidence = judged.evidence
    if evidence is None:
        return "no pair of runs exists"
    parts = [difference_text(study, judged), p_text(judged.p), *counted(study, judged, evidence)]
    return "; ".join([", ".join(parts), *details(study, judged, evidence)])


def counted(study: Study, judged: Judged, evidence: Evidence) -> list[str]:
    """Return what stands beside p: that of a first look, d, and the number of independent differences."""
    parts = []
    if judged.is_decided and judged.first_look_p is not None:
        parts.append(f"{p_text(judged.first_look_p)} with the first {study.first_look_seeds} seeds alone")
    if evidence.over_all.effect_size is not None:
        parts.append(f"d = {effect(evidence.over_all)}")
    return [*parts, _count(study, judged, evidence)]


def details(study: Study, judged: Judged, evidence: Evidence) -> list[str]:
    """Return what is true instead, the tasks one by one, what the seeds exclude or cannot show, and what
    qualifies the verdict."""
    parts = [f"in fact {judged.claim.reverse}"] if judged.verdict == "refuted" else []
    if len(evidence.by_task) > 1:
        parts.append(
            ", ".join(f"{task} {signed(by_task.difference)}" for task, by_task in evidence.by_task.items())
        )
    if judged.verdict == "not shown":
        parts += [text for text in (excluded(evidence.over_all.difference),) if text]
        if judged.has_too_few_units:
            parts.append(f"with so few, p cannot be below {judged.smallest_p:.2g}")
    parts += [side_text(study, judged, side) for side in judged.side_results]
    return [*parts, judged.claim.note] if judged.claim.note else parts


def excluded(difference: Estimate) -> str:
    """Return the effects that the interval of a claim that was not shown leaves no room for, or why an
    interval without 0 decides nothing."""
    ends = ends_of(difference)
    if ends is None:
        return ""
    low, high = ends
    if low <= 0 <= high:
        return f"effects above {_plus(high)} or below {_plus(low)} are excluded (95 %)"
    side = "above" if low > 0 else "below"
    return f"the interval lies {side} 0, but is of one claim alone and assumes normal differences: p decides"


def side_text(study: Study, judged: Judged, side: SideResult) -> str:
    """Return "on add, held-out accuracy is 0.787 with arm and 0.724 with against (...; not tested)"."""
    arm, against = f"{number(side.arm.mean)} with {judged.claim.arm}", number(side.against.mean)
    return (
        f"on {side.task}, {title_of(study, side.metric)} is {arm} and {against} with {judged.claim.against}"
        f" ({signed(side.difference)}, not tested)"
    )


def rules(study: Study) -> str:
    """Return how a claim is judged, with the families over which p is corrected if there are several."""
    sizes = Counter(claim.family for claim in study.claims)
    if len(sizes) == 1:
        return RULES
    named = (f"{family or 'all others'} ({sizes[family]})" for family in sorted(sizes, key=lambda f: not f))
    return f"{RULES} Families of claims: {', '.join(named)}."


def stopping_note(study: Study) -> str:
    """Return the note on seeds that were added after a first look, or nothing."""
    first = study.first_look_seeds
    if first is None or len(study.seeds) <= first:
        return ""
    return (
        f"Optional stopping: seeds 0 to {first - 1} of every arm were run and read before seeds {first} to"
        f" {len(study.seeds) - 1} were added, so these p values are somewhat too small."
    )


def caveats(study: Study) -> list[str]:
    """Return what to state above the verdicts."""
    return [text for text in (stopping_note(study), study.caveat) if text]


def by_verdict(study: Study, judged: Sequence[Judged]) -> list[tuple[str, list[Judged]]]:
    """Return the verdicts that have claims, as words, with their claims: "not shown", then "not shown, our
    own" for those that are not of the work that the study reproduces."""
    found: dict[str, list[Judged]] = {}
    for is_own, verdict in itertools.product((False, True), WORDS):
        for one in judged:
            if (one.claim.is_own, one.verdict) == (is_own, verdict):
                found.setdefault(word(study, one) + ", our own" * is_own, []).append(one)
    return list(found.items())


def tally(study: Study, judged: Sequence[Judged]) -> str:
    """Return how many claims have which verdict: "Claims of QeRL: 1 reproduced, 2 refuted, 3 not shown. Our
    own: 1 supported."."""
    of = f"Claims of {study.reproduces}" if study.reproduces else "Claims"
    theirs, own = ([one for one in judged if one.claim.is_own == is_own] for is_own in (False, True))
    return " ".join(
        f"{name}: {_counts(study, part)}." for name, part in ((of, theirs), ("Our own", own)) if part
    )


def _counts(study: Study, judged: Sequence[Judged]) -> str:
    counts = Counter(
        word(study, one) for one in sorted(judged, key=lambda one: list(WORDS).index(one.verdict))
    )
    return ", ".join(f"{number} {text}" for text, number in counts.items())


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Return n, the arm's mean, its difference, d and p."""
    n, mean = str(row.estimate.n), interval(row.estimate)
    if row.compared is None:
        return n, mean, "", "", ""
    return n, mean, signed(row.compared.difference), effect(row.compared), p_text(row.p)


def summary(
    study: Study, judged: Sequence[Judged], rows: Sequence[Row], origin: str, cost_lines: Sequence[str] = ()
) -> str:
    """Return Markdown to quote: the verdicts, the table of the leading metric, and cost_lines."""
    lines = [f"## Study {study.name}", "", study.question, tally(study, judged), ""]
    for note in caveats(study):
        lines += [note, ""]
    for text, claims in by_verdict(study, judged):
        bullets = (f"- {one.claim.says}: {evidence_text(study, one)}." for one in claims)
        lines += [f"**{text.capitalize()}**", "", *bullets, ""]
    metric = study.metrics[0]
    lines += [f"{metric.title} ({metric.about or metric.key}), differences from {study.baseline}:", ""]
    lines += markdown(("task", "arm", *COLUMNS), [(row.task, row.arm, *cells(row)) for row in rows])
    notes = [line for remark in study.remarks for line in (remark, "")]
    return "\n".join([*lines, "", *cost_lines, rules(study), "", *notes, origin, ""])


def _count(study: Study, judged: Judged, evidence: Evidence) -> str:
    if study.shares_weights_over_tasks(judged.claim):
        return f"{evidence.num_units} independent draws of the noise, each used in all tasks"
    constant = ", all of the same weights" if study.has_constant_weights else ""
    return f"{evidence.num_units} pair{'s' * (evidence.num_units > 1)}{constant}"


def title_of(study: Study, key: str) -> str:
    """Return a metric's title as it stands inside a sentence."""
    title = next(metric.title for metric in study.metrics if metric.key == key)
    return title if title[1].isupper() else title[0].lower() + title[1:]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
