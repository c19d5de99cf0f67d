"""Verdicts and estimates from lines made by hand."""

import pytest

from qerl.config import RunConfig
from studies.analysis import bands, differences, judge, matched, matched_mean, table, values_of
from studies.findings import brief
from studies.statistics import estimate
from studies.study import Arm, Claim, Curve, Metric, Study, StudyTask
from studies.verdict import evidence_text, interval, rules, stopping_note, summary, tally, with_ci


def study(*claims, seeds=(0, 1, 2, 3, 4), arms=("base", "a", "b"), weights="plain", **changes):
    return Study(
        name="made",
        question="which is higher?",
        base=RunConfig(),
        tasks=(StudyTask(name="x", fields={}), StudyTask(name="y", fields={})),
        arms=tuple(Arm(name=name, weights=weights if name == "a" else "plain") for name in arms),
        baseline="base",
        measure=lambda job: {},
        metrics=(Metric(key="score", title="Score"),),
        curves=(),
        claims=claims,
        seeds=seeds,
        **changes,
    )


def claim(arm="a", sign=1, family="", **changes):
    return Claim(
        says=f"{arm} is higher",
        reverse=f"{arm} is lower",
        arm=arm,
        against="base",
        metric="score",
        sign=sign,
        family=family,
        **changes,
    )


def line(task, arm, seed, score, curve=()):
    final = {} if score is None else {"score": score}
    return {"task": task, "arm": arm, "seed": seed, "final": final, "curve": list(curve)}


def lines(arm, gain_x, gain_y, seeds=range(5)):
    """The arm's and the baseline's: the arm is `gain` above it, give or take a tenth of it by seed."""
    found = []
    for task, gain in (("x", gain_x), ("y", gain_y)):
        for seed in seeds:
            found.append(line(task, "base", seed, seed / 10))
            found.append(line(task, arm, seed, seed / 10 + gain * (1 + (seed - 2) / 20)))
    return found


def test_differences_are_taken_seed_by_seed_where_both_have_it():
    values = values_of([line("x", "a", 1, 5), line("x", "a", 0, 3), line("x", "base", 1, 1)], "score")
    assert differences(values, "x", "a", "base") == {1: 4}


@pytest.mark.parametrize(
    ("gains", "sign", "verdict"),
    [
        ((0.3, 0.2), 1, "supported"),
        ((-0.3, -0.2), -1, "supported"),
        ((0.3, 0.2), -1, "refuted"),
        ((0.3, -0.3), 1, "depends"),
        ((0.0, 0.0), 1, "not shown"),
    ],
)
def test_a_verdict_needs_the_sign_in_every_task(gains, sign, verdict):
    judged = judge(study(claim(sign=sign)), lines("a", *gains))[0]
    assert (judged.verdict, judged.evidence.num_units) == (verdict, 10)


def test_a_claim_that_fails_in_a_task_is_mixed_however_sure():
    judged = judge(study(claim()), lines("a", 0.3, -0.001))[0]
    assert judged.p == pytest.approx(2 * 32 / 1024) and judged.verdict == "depends"
    judged = judge(study(claim()), lines("a", 0.3, -0.001, seeds=range(8)))[0]
    assert judged.p < 0.05 and judged.verdict == "mixed"


def test_p_is_the_exact_one_over_all_pairs_corrected_for_the_claims():
    judged = judge(study(claim("a"), claim("b")), lines("a", 0.3, 0.2) + lines("b", 0.01, -0.01))
    assert judged[0].p == pytest.approx(2 * 2 / 1024)
    assert judged[0].smallest_p == pytest.approx(2 * 2 / 1024)
    assert judged[0].evidence.over_all.difference.mean == pytest.approx(0.25)
    assert judged[0].evidence.over_all.difference.n == 5


def test_claims_of_another_family_do_not_count():
    claims = [claim("a", family="one"), claim("b", family="one"), claim("b", -1, family="two")]
    judged = judge(study(*claims), lines("a", 0.3, 0.2) + lines("b", 0.01, 0.01))
    assert [one.p for one in judged] == pytest.approx([2 * 2 / 1024, 2 * 2 / 1024, 2 / 1024])
    assert [one.smallest_p for one in judged] == pytest.approx([2 * 2 / 1024, 2 * 2 / 1024, 2 / 1024])


def test_the_best_that_few_pairs_could_give_is_corrected_as_the_others_are():
    """a: 2 / 1024. b has 8 pairs, 2 / 256 at best: behind a no longer three times that, but twice."""
    claims = [claim("a"), claim("b"), claim("b", -1)]
    few = lines("b", 0.01, -0.01, seeds=range(4))
    judged = judge(study(*claims), lines("a", 0.3, 0.2) + few)
    assert [one.smallest_p for one in judged] == pytest.approx([3 * 2 / 1024, 2 * 2 / 256, 2 * 2 / 256])


def test_a_claim_without_pairs_is_not_run():
    judged = judge(study(claim("a"), claim("b")), lines("a", 0.3, 0.2))
    assert [one.verdict for one in judged] == ["supported", "not run"] and judged[1].p is None


def test_few_seeds_cannot_show_anything():
    judged = judge(study(claim()), lines("a", 0.3, 0.3, seeds=range(2)))[0]
    assert judged.verdict == "not shown" and judged.smallest_p == 0.125


def test_a_refuted_claim_is_stated_with_the_true_sentence():
    asked = study(claim(sign=1))
    (judged,) = judge(asked, lines("a", -0.3, -0.2))
    assert "**Refuted**\n\n- a is higher: -0.25" in summary(asked, [judged], [], "")
    text = evidence_text(asked, judged)
    assert "; in fact a is lower; " in text
    assert text.startswith("-0.25 in score, 95 % CI [-0.2") and "10 pairs" in text


def test_weights_drawn_by_seed_count_once_for_all_tasks():
    """Both tasks of a seed have the same draw: 5 units, not 10, whose smallest p is 2 / 32."""
    asked = study(claim(), weights="gaussian")
    (judged,) = judge(asked, lines("a", 0.3, 0.2))
    assert (judged.verdict, judged.evidence.num_units, judged.p) == ("not shown", 5, 2 / 32)
    text = evidence_text(asked, judged)
    assert "5 independent draws of the noise" in text and "p cannot be below 0.062" in text
    other = study(claim("b"), weights="gaussian")
    assert judge(other, lines("b", 0.3, 0.2))[0].evidence.num_units == 10


def test_pairs_of_constant_weights_are_called_so():
    asked = study(claim(), has_constant_weights=True)
    assert "10 pairs, all of the same weights" in evidence_text(asked, judge(asked, lines("a", 0.3, 0.2))[0])


def test_seeds_added_after_a_first_look_are_stated_with_the_p_of_the_first_ones():
    asked = study(claim(), seeds=tuple(range(8)), first_look_seeds=5)
    (judged,) = judge(asked, lines("a", 0.3, 0.2, seeds=range(8)))
    assert judged.p == pytest.approx(2 / 2**16) and judged.first_look_p == pytest.approx(2 / 1024)
    assert "p < 0.001, p = 0.002 with the first 5 seeds alone" in evidence_text(asked, judged)
    assert "seeds 0 to 4 of every arm were run and read before seeds 5 to 7" in stopping_note(asked)
    assert stopping_note(asked) in summary(asked, [judged], [], "")
    assert stopping_note(study(claim())) == ""


def test_a_side_result_is_stated_with_its_claim():
    asked = study(claim(side_results=(("y", "score"),)))
    text = evidence_text(asked, judge(asked, lines("a", 0.3, 0.2))[0])
    assert "on y, score is 0.4 with a and 0.2 with base (+0.2 [0.1" in text and "not tested)" in text


def test_the_brief_names_what_was_decided_and_the_headlines():
    first = study(claim("a", note="a note"), claim("b", is_headline=True))
    results = [(first, judge(first, lines("a", 0.3, 0.2) + lines("b", 0.0, 0.0)))]
    text = brief(results).splitlines()
    assert text[0].startswith("- Supported: a is higher (+0.25 in score, 95 % CI [0.2")
    assert text[0].endswith("; a note).")
    assert text[1:] == ["- Not shown: b is higher."]


def test_the_table_compares_with_the_baseline_and_corrects_over_all_its_rows():
    rows = table(study(), lines("a", 0.3, 0.2), "score")
    assert [(row.task, row.arm) for row in rows] == [("x", "base"), ("x", "a"), ("y", "base"), ("y", "a")]
    assert rows[0].compared is None and rows[0].estimate.mean == pytest.approx(0.2)
    assert rows[1].compared.difference.mean == pytest.approx(0.3)
    # t = sqrt(5) * 0.3 / s, s = 0.3 / 20 * sqrt(2.5): far out, so the smaller p of two is doubled
    assert rows[1].p == pytest.approx(2 * rows[1].compared.p_t) and rows[1].p < 1e-4


def test_matched_runs_are_read_from_the_common_level_on():
    # level 0.2; the means of the last three steps are 0, .1, .2: from step 2 on, for half of 6 steps
    assert matched_mean([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 0.2) == pytest.approx((0.4 + 0.6 + 0.8) / 3)
    assert matched_mean([0.3, 0.4, 0.5, 0.6, 0.7, 0.8], 0.2) == pytest.approx(0.4)
    assert matched_mean([0.0] * 6, 0.2) == 0


def test_the_common_level_is_the_best_arm_s_first_reward():
    rising = [{"step": i, "reward": 0.1 * i} for i in range(10)]
    ahead = [{"step": i, "reward": 0.2 + 0.1 * i} for i in range(10)]
    found = matched([line("x", "base", 0, None, rising), line("x", "a", 0, None, ahead)])
    # the mean of the last three of `rising` is 0.1 (i - 1): 0.2 at step 3
    assert found["x", "base"][0] == pytest.approx(0.1 * (3 + 4 + 5 + 6 + 7) / 5)
    assert found["x", "a"][0] == pytest.approx(0.2 + 0.1 * 2)


def test_bands_are_over_the_seeds_at_each_step_that_all_have():
    one = line("x", "a", 0, None, [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 4.0}])
    two = line("x", "a", 1, None, [{"step": 0, "reward": 2.0}, {"step": 1, "reward": 4.0}, {"step": 2}])
    found = bands([one, two], Curve(x="step", y="reward", title="Reward"))
    assert [at for at, _ in found] == [0, 1]
    assert [band.mean for _, band in found] == pytest.approx([1.0, 4.0])


def test_a_curve_by_time_has_the_mean_seconds_of_each_step_of_runs_with_a_gpu_of_their_own():
    """No two runs have a step's end at the same second; a run that shared its GPU is left out."""
    made = [
        line(
            "x",
            "a",
            seed,
            None,
            [{"step": s, "reward": s + seed, "elapsed_s": pace * (s + 1)} for s in (0, 1)],
        )
        for seed, pace in ((0, 9.0), (1, 2.0), (2, 4.0))
    ]
    made = [one | {"workers": workers} for one, workers in zip(made, (3, 1, 1), strict=True)]
    found = bands(made, Curve(x="elapsed_s", y="reward", title="Reward"))
    assert [(at, band.n, band.mean) for at, band in found] == [(3.0, 2, 1.5), (6.0, 2, 2.5)]
    by_step = bands(made, Curve(x="step", y="reward", title="Reward"))
    assert [(at, band.n) for at, band in by_step] == [(0, 3), (1, 3)]


def test_a_curve_with_a_value_before_training_counts_the_steps_done():
    one = line("x", "a", 0, 0.1, [{"step": 0}, {"step": 9, "reward": 0.5}])
    curve = Curve(x="step", y="reward", title="Reward", before="score")
    assert [(at, band.mean) for at, band in bands([one], curve)] == [(0, 0.1), (10, 0.5)]


def test_seconds_count_only_of_runs_with_a_gpu_of_their_own():
    made = [line("x", "a", seed, 0.5) | {"workers": workers} for seed, workers in ((0, 3), (1, 1))]
    for seed, one in enumerate(made):
        one["final"]["train_s"] = 100.0 + seed
    assert values_of(made, "train_s") == {("x", "a"): {1: 101.0}}
    assert values_of(made, "score") == {("x", "a"): {0: 0.5, 1: 0.5}}


def test_what_was_not_shown_says_which_effects_are_excluded():
    asked = study(claim())
    made = lines("a", 0.0, 0.0)
    for one in (each for each in made if each["arm"] == "a"):
        one["final"]["score"] += 0.1 * (-1) ** one["seed"]
    (judged,) = judge(asked, made)
    difference = judged.evidence.over_all.difference
    assert judged.verdict == "not shown" and difference.low < 0 < difference.high
    text = f"effects above +{difference.high:.3g} or below {difference.low:.3g} are excluded (95 %)"
    assert text in evidence_text(asked, judged)


def test_a_supported_claim_of_others_is_reproduced():
    theirs, ours = study(claim(), reproduces="QeRL"), study(claim())
    judged = judge(theirs, lines("a", 0.3, 0.2))
    assert tally(theirs, judged) == "Claims of QeRL: 1 reproduced."
    assert tally(ours, judged) == "Claims: 1 supported."
    assert "**Reproduced**" in summary(theirs, judged, [], "")


def test_our_own_claim_beside_those_of_others_is_counted_apart():
    own = claim(is_own=True)
    theirs = study(claim(), own, reproduces="QeRL")
    judged = judge(theirs, lines("a", 0.3, 0.2))
    assert tally(theirs, judged) == "Claims of QeRL: 1 reproduced. Our own: 1 supported."
    text = summary(theirs, judged, [], "")
    assert text.index("**Reproduced**") < text.index("**Supported, our own**")


def test_the_rules_name_families_of_claims_if_there_are_several():
    of_speed = claim(family="speed")
    assert "Families" not in rules(study(claim(), claim()))
    assert rules(study(of_speed, claim(), claim())).endswith(
        " Families of claims: speed (1), all others (2)."
    )


def test_an_interval_without_0_of_too_few_pairs_excludes_nothing():
    asked = study(claim())
    (judged,) = judge(asked, [one for one in lines("a", 0.1, 0.1, range(4)) if one["task"] == "x"])
    assert judged.verdict == "not shown" and judged.has_too_few_units
    assert judged.evidence.over_all.difference.low > 0
    text = evidence_text(asked, judged)
    assert "excluded" not in text
    assert "the interval lies above 0, but is of one claim alone and assumes normal differences" in text


@pytest.mark.parametrize("values", [[0.1, 0.1], [0.1, 0.3], [0.25] * 4])
def test_two_values_and_values_without_spread_have_no_interval(values):
    assert "[" not in interval(estimate(values)) and "CI" not in with_ci(estimate(values), "x")
    assert "[" in interval(estimate([0.1, 0.2, 0.3]))
