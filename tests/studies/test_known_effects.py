"""The verdicts of gsm8k_small on made-up lines whose effects are known: eight seeds, as many as are run.

Accuracies have a standard deviation of 0.012 over seeds, about that of 1,319 problems; half of the variance
is shared by the arms of a seed, which pairs remove.
"""

import dataclasses

import numpy as np
import pytest

from studies.analysis import judge
from studies.catalog_real import gsm8k_small
from studies.verdict import evidence_text

SPREAD = 0.012
ENDS = ("nvfp4+aqn", "bf16", "greedy")


def lines(study, seed, effects, num_seeds=8):
    """effects: what an arm's metrics are above those of bf16; an arm without effects is not run."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num_seeds):
        shared = dict(zip(("greedy", "reward_mean", "entropy_first"), rng.normal(0, SPREAD, 3), strict=True))
        for arm, effect in effects.items():
            final = {
                key: 0.3 + effect.get(key, 0.0) + (value + rng.normal(0, SPREAD)) / 2**0.5
                for key, value in shared.items()
            }
            made.append(
                {
                    "task": study.tasks[0].name,
                    "arm": arm,
                    "seed": number,
                    "final": final,
                    "curve": [],
                    "workers": 1,
                }
            )
    return made


def verdicts(effects, seed, num_seeds=8):
    study = gsm8k_small()
    judged = judge(study, lines(study, seed, effects, num_seeds))
    return {(one.claim.arm, one.claim.against, one.claim.metric): one for one in judged}


def three_arms(**effect):
    return {"bf16": {}, "nvfp4": {}, "nvfp4+aqn": effect}


@pytest.mark.parametrize(("effect", "verdict"), [(0.03, "supported"), (-0.03, "refuted")])
def test_an_effect_of_three_points_is_found(effect, verdict):
    """All five claims that were run have effects of that size or none: p is corrected over them."""
    full = {"greedy": effect, "reward_mean": effect}
    found = [verdicts(three_arms(**full), seed)[ENDS] for seed in range(60)]
    counts = {
        word: sum(one.verdict == word for one in found) for word in ("supported", "refuted", "not shown")
    }
    assert counts[verdict] >= 48 and counts[verdict] + counts["not shown"] == 60
    covered = sum(d.low <= effect <= d.high for d in (one.evidence.over_all.difference for one in found))
    assert 52 <= covered <= 60


def test_without_effects_a_family_of_claims_has_a_false_verdict_in_one_of_twenty_at_most():
    wrong, shown = 0, None
    for seed in range(200):
        found = verdicts(three_arms(), seed)
        wrong += any(one.is_decided for one in found.values())
        shown = shown or next((one for one in found.values() if one.verdict == "not shown"), None)
    assert wrong <= 0.05 * 200 + 3 * (0.05 * 0.95 * 200) ** 0.5
    assert shown is not None
    difference = shown.evidence.over_all.difference
    assert difference.low < 0 < difference.high
    assert "are excluded (95 %)" in evidence_text(gsm8k_small(), shown)


def test_an_arm_without_lines_is_not_run_and_is_not_corrected_for():
    found = verdicts(three_arms(greedy=0.1, reward_mean=0.1), 0)
    assert found["bf16+aqn", "bf16", "greedy"].verdict == "not run"
    assert found["nvfp4+aqn", "bf16", "step_s"].verdict == "not run"
    assert found[ENDS].p == pytest.approx(5 * 2 / 2**8) and found[ENDS].verdict == "supported"


def test_eight_pairs_can_decide_all_six_claims_and_seven_cannot():
    arms = {"bf16": {}, "nvfp4": {}, "nvfp4+aqn": {}, "bf16+aqn": {}}
    eight, seven = (verdicts(arms, 0, n)[ENDS] for n in (8, 7))
    assert not eight.has_too_few_units and seven.has_too_few_units
    assert "with so few, p cannot be below" in evidence_text(gsm8k_small(), seven)


def test_seeds_of_one_arm_alone_make_no_pair():
    study = gsm8k_small()
    made = [line for line in lines(study, 0, three_arms()) if (line["arm"] == "bf16") == (line["seed"] < 4)]
    judged = judge(dataclasses.replace(study), made)
    assert next(one for one in judged if one.claim.metric == "entropy_first").verdict == "not run"
