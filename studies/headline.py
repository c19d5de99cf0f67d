"""Write what a study found for README.md, accuracies and verdicts, and for docs/gsm8k.md, its curve's table.

**... learns GSM8K ...**, 95 s a run ... on one NVIDIA H200. ... NVFP4 from 0.121 to 0.270 [0.255, 0.285] ...
*Reproduced*: NVFP4 has a higher entropy than BF16 (+0.034 [0.026, 0.042]). *Not shown*: ...
"""

from collections.abc import Sequence
from statistics import fmean

from studies.analysis import Judged, bands
from studies.picture import num_seeds, seconds_text
from studies.results import Line
from studies.statistics import Estimate, estimate
from studies.study import Arm, Study
from studies.verdict import MIN_SEEDS, by_verdict, ends_of, markdown, signed, title_of


def results(study: Study, lines: Sequence[Line]) -> str:
    """Return each pictured arm's accuracies before and after; nothing if none was run."""
    picture = study.picture
    if picture is None:
        return ""
    lines = [line for line in lines if line["arm"] in picture.arms]
    by_arm = [(arm, [line for line in lines if line["arm"] == arm.name]) for arm in study.arms]
    by_arm = [(_short(arm), of_arm) for arm, of_arm in by_arm if of_arm]
    if not by_arm:
        return ""
    have_same = len({len(of_arm) for _, of_arm in by_arm}) == 1
    each = [(arm, "" if have_same else f" (n = {len(arm[1])})") for arm in by_arm]
    sampled, greedy = (
        "; ".join(f"{name}{number} from {_rise(key, of_arm)}" for (name, of_arm), number in each)
        for key in ("accuracy", "greedy")
    )
    spread = " with 95 % intervals" if max(len(of_arm) for _, of_arm in by_arm) >= MIN_SEEDS else ""
    return (
        f"**{picture.title}**, {seconds_text(lines)}. Accuracy on {study.base.evaluate.num_prompts} held-out"
        f" problems at temperature 1, means over seeds{spread} ({num_seeds(lines)}): {sampled}. Greedy:"
        f" {greedy}."
    )


def _rise(key: str, lines: Sequence[Line]) -> str:
    """Return "0.121 to 0.270 [0.255, 0.285]", before and after training."""
    before = fmean(line["final"][f"{key}_before"] for line in lines)
    after = estimate([line["final"][f"{key}_after"] for line in lines])
    return f"{before:.3f} to {_mean_and_ends(after)}"


def curve_table(study: Study, lines: Sequence[Line]) -> str:
    """Return the points of the picture's curve for each tabled arm that was run: mean and standard
    deviation over seeds."""
    assert study.picture is not None
    curve, tabled = study.picture.curve, study.picture.tabled
    heads, points = [curve.x_label], list[dict[float, Estimate]]()
    for arm in (arm for arm in study.arms if arm.name in tabled):
        if of_arm := [line for line in lines if line["arm"] == arm.name]:
            heads.append(f"{arm.about}, n = {len(of_arm)}")
            points.append(dict(bands(of_arm, curve)))
    shared = sorted(set.intersection(*map(set, points))) if points else []
    rows = [[f"{x:.0f}", *(_mean_and_deviation(at[x]) for at in points)] for x in shared]
    return "\n".join(markdown(heads, rows))


def _mean_and_deviation(value: Estimate) -> str:
    """Return "0.226±0.010"."""
    return f"{value.mean:.3f}" + ("" if value.deviation is None else f"±{value.deviation:.3f}")


def _mean_and_ends(value: Estimate) -> str:
    ends = ends_of(value)
    return f"{value.mean:.3f}" + ("" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]")


def _short(arm: Arm) -> str:
    """Return "NVFP4" of the arm about "NVFP4, rounded", and of no other."""
    return arm.title.removesuffix(", rounded")


def verdicts(study: Study, judged: Sequence[Judged]) -> str:
    """Return the claims by verdict, each with its difference and interval."""
    pairs = sorted({one.evidence.num_units for one in judged if one.evidence is not None})
    if not pairs:
        return ""
    number = " to ".join(map(str, {pairs[0]: None, pairs[-1]: None}))
    groups = [
        f"*{word.capitalize()}*: {'; '.join(_claim(study, one) for one in claims)}."
        for word, claims in by_verdict(study, judged)
    ]
    pairs_text = f"From {number} pair{'s' * (pairs[-1] > 1)} of runs{_too_few(judged)}"
    leading = study.metrics[0]
    return f"{study.question} {pairs_text}: {' '.join(groups)} {leading.title} here: {leading.about}."


def _too_few(judged: Sequence[Judged]) -> str:
    """Return for how many claims no outcome of so few pairs could have had p < 0.05, or nothing."""
    run = [one for one in judged if one.evidence is not None]
    few = [one for one in run if one.has_too_few_units]
    if not few:
        return ""
    return (
        f", too few to decide {'any claim' if len(few) == len(run) else f'{len(few)} of {len(run)} claims'}"
    )


def _claim(study: Study, judged: Judged) -> str:
    """Return "NVFP4 + AQN ends above BF16 LoRA (greedy accuracy -0.023 [-0.045, 0.001]; greedy before
    -0.055)", the claim's side results last."""
    if judged.evidence is None:
        return judged.claim.says
    differences = [(judged.claim.metric, judged.evidence.over_all.difference)]
    differences += [(side.metric, side.difference) for side in judged.side_results]
    told = "; ".join(f"{title_of(study, metric)} {signed(difference)}" for metric, difference in differences)
    return f"{judged.claim.says} ({told})"
