"""A study's picture, the paragraphs that README.md quotes, and what runs cost, from lines made by hand."""

import itertools
import re
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest

from benchmarks.pages import TABLES
from studies import costs, headline
from studies.analysis import judge
from studies.catalog_real import gsm8k, gsm8k_small, gsm8k_untrained
from studies.page import write_pages
from studies.picture import picture_svg, write_picture

STUDY = gsm8k_small()
ARMS = {"bf16": 0.16, "nvfp4": 0.12, "nvfp4+aqn": 0.12}
WHERE = {"digest": "", "commit": "0123456789", "is_dirty": False, "device": "NVIDIA H200", "seconds": 130.0}


def line(arm, seed, workers=1):
    """Ten points better after 40 steps, a point more with each seed; a third as fast if three share a GPU."""
    step_s = 2.0 * workers + 0.1 * seed
    curve = [
        {
            "step": s,
            "reward": 0.1,
            "step_s": step_s,
            "rollout_s": 1.0,
            "memory_gb": 17.0,
            "elapsed_s": step_s * s,
        }
        for s in range(40)
    ]
    curve[0] |= {"step_s": 9.0}
    before = ARMS[arm]
    for s in (9, 19, 29, 39):
        curve[s] |= {"eval_accuracy": before + s / 390 + seed / 100, "step_s": 3.0 * step_s}
    after = curve[39]["eval_accuracy"]
    final = {"greedy": after, "train_s": 100.0 * workers + seed, "reward_mean": 0.2, "entropy_first": 0.3}
    final |= {f"{key}_before": before for key in ("accuracy", "greedy")}
    final |= {f"{key}_after": after for key in ("accuracy", "greedy")}
    place = {"study": STUDY.name, "task": "gsm8k-0.5b", "arm": arm, "seed": seed, "learning_rate": 5e-5}
    return place | {"final": final, "curve": curve, "workers": workers} | WHERE


def lines(num_seeds, shared=(0,)):
    return [line(arm, seed, 3 if seed in shared else 1) for arm in ARMS for seed in range(num_seeds)]


def shapes(svg, kind):
    return re.findall(rf'class="{kind}"', svg)


def test_a_picture_of_one_or_two_seeds_has_curves_without_bands():
    one, two = (picture_svg(STUDY, lines(num_seeds)) for num_seeds in (1, 2))
    for svg in (one, two):
        assert len(shapes(svg, "curve")) == 3 and not shapes(svg, "band")
    assert "too few seeds for an interval, n = 1; on NVIDIA H200, which the runs shared" in one
    assert "too few seeds for an interval, n = 2; 101 s a run without loading, on one NVIDIA H200" in two
    unequal = [line for line in lines(2) if (line["arm"], line["seed"]) != ("bf16", 1)]
    assert "means, n = 1 (BF16 LoRA), 2 (NVFP4, rounded), 2 (NVFP4 + AQN); " in picture_svg(STUDY, unequal)


def test_a_picture_of_eight_seeds_has_bands_and_says_what_they_are():
    svg = picture_svg(STUDY, lines(8))
    assert len(shapes(svg, "band")) == 3
    assert (
        "mean and 95 % interval over seeds, n = 8; 101 to 107 s a run without loading, on one NVIDIA H200"
        in svg
    )
    assert "n = 7 to 8" in picture_svg(STUDY, lines(8)[1:])


def test_the_curves_of_a_picture_begin_before_training_and_end_with_its_labels():
    svg = picture_svg(STUDY, lines(3))
    (first, *_, last) = re.search(r'class="curve" d="M([^"]*)"', svg)[1].split()
    assert first.startswith("50.0,") and last.startswith("470.0,")
    labels = re.findall(r'class="end" x="480" y="([0-9.]+)"[^>]*>([^<]*)<', svg)
    assert [text.split()[0] for _, text in labels] == ["BF16", "NVFP4,", "NVFP4"]
    assert labels[0][1].endswith(f" {0.16 + 0.1 + 0.01:.3f}")
    heights = [float(y) for y, _ in labels]
    assert all(below - above >= 17 for above, below in itertools.pairwise(heights))


def test_a_stored_picture_has_its_colors_for_light_and_dark(tmp_path):
    path = write_picture(STUDY, lines(3), tmp_path)
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text and "--c1" in text
    assert write_picture(STUDY, [], tmp_path) is None


def test_costs_are_medians_of_runs_with_a_gpu_of_their_own():
    """Seeds 1 to 4 have steps of 2.1 to 2.4 s; first steps and evaluations do not move the median."""
    rows = costs.costs(STUDY, lines(5))
    assert [(row.arm, row.num_runs) for row in rows] == [(arm, 4) for arm in ARMS]
    assert rows[0].step_s == pytest.approx(2.25) and rows[0].run_s == pytest.approx(102.5)
    text = "\n".join(costs.markdown(STUDY, lines(5)))
    assert "| gsm8k-0.5b | bf16 | 4 | 2.25 | 1.00 | 102 | 17.0 |" in text
    assert "Not counted: 3 runs (seed 0), 3 of which shared a GPU at a time" in text
    other = [{**one, "workers": 2 * one["workers"]} for one in lines(2)]
    assert "3 to 6 of which shared" in costs.left_out([*lines(1), *(x for x in other if x["workers"] == 6)])
    alone_in_one_arm = [one for one in lines(2) if one["arm"] == "nvfp4" or one["seed"] == 0]
    assert costs.cells(costs.costs(STUDY, alone_in_one_arm)[0])[:2] == ("0", "not measured alone")
    assert (
        costs.costs(STUDY, lines(1)) == [] == costs.markdown(STUDY, [])
        and costs.left_out(lines(3, shared=())) == ""
    )


def test_a_headline_has_the_means_before_and_after():
    text = headline.results(STUDY, lines(3))
    assert text.startswith(
        "**Qwen2.5-Coder-0.5B-Instruct learns GSM8K in 40 steps of 64 x 8 answers**, 101 to 102 s a run"
    )
    assert (
        "means over seeds with 95 % intervals (n = 3): BF16 LoRA from 0.160 to 0.270 [0.245, 0.295];" in text
    )
    assert "(n = 1): BF16 LoRA from 0.160 to 0.260; NVFP4 from 0.120 to 0.220;" in headline.results(
        STUDY, lines(1)
    )
    fewer = headline.results(STUDY, [one for one in lines(4) if (one["arm"], one["seed"]) != ("bf16", 0)])
    assert "(n = 3 to 4): BF16 LoRA (n = 3) from 0.160 to 0.280" in fewer and "NVFP4 (n = 4) from" in fewer
    assert headline.results(STUDY, []) == "" == headline.verdicts(STUDY, judge(STUDY, []))


def test_a_headline_names_rounded_and_calibrated_nvfp4_apart():
    rounded = line("nvfp4", 0)
    text = headline.results(gsm8k(), [rounded, rounded | {"arm": "nvfp4-gptq"}])
    assert "NVFP4 from 0.120 to 0.220; NVFP4, calibrated from 0.120 to 0.220." in text


def test_verdicts_in_brief_have_every_claim_with_its_interval():
    text = headline.verdicts(STUDY, judge(STUDY, lines(8)))
    assert (
        "From 7 to 8 pairs of runs: *Refuted*: NVFP4 + AQN ends above BF16 LoRA (greedy accuracy -0.04; "
        "greedy before -0.04)" in text
    )
    assert "*Not run*: AQN raises what BF16 LoRA ends at. " in text
    assert "Greedy accuracy here: 1,319 test problems" in text
    few = headline.verdicts(STUDY, judge(STUDY, lines(3)))
    assert "From 2 to 3 pairs of runs, too few to decide any claim: *Not shown*" in few
    assert all(one.says in text for one in STUDY.claims)
    assert (
        text.count("*Not run, our own*: Calibrated NVFP4 ends above NVFP4; Calibrated NVFP4 ends below") == 1
    )


def test_the_table_of_the_curve_has_each_arms_means_and_deviations():
    heads, _, *rows = headline.curve_table(STUDY, lines(8)).splitlines()
    assert heads.count("n = 8") == heads.count("|") - 2 == len(ARMS)
    assert [row.split()[1] for row in rows] == ["0", "10", "20", "30", "40"]
    first, last = (row.split("|")[2] for row in (rows[0], rows[-1]))
    before, after = ARMS["bf16"], [line["final"]["greedy"] for line in lines(8) if line["arm"] == "bf16"]
    assert first.strip() == f"{before:.3f}±0.000"
    assert last.strip() == f"{fmean(after):.3f}±{stdev(after):.3f}"


def test_a_page_names_its_missing_runs_and_shows_picture_verdicts_and_costs(tmp_path):
    page = write_pages(STUDY, tmp_path, lines(8), []).read_text()
    assert "Runs not made: nvfp4-gptq 8 of 8, bf16+aqn 8 of 8" in page
    assert page.index("Claims of QeRL:") < page.index('class="back"') < page.index("<h2>Verdicts</h2>")
    assert page.index("<h2>Seconds and memory</h2>") < page.index("<h2>Curves</h2>")
    assert (tmp_path / "headline.md").read_text().startswith("**Qwen2.5")
    assert (tmp_path / "verdicts.md").read_text().count("*Not run*") == 1


def test_a_study_without_curves_has_a_page_without_their_section(tmp_path):
    study = gsm8k_untrained()
    final = {metric.key: 0.25 for metric in study.metrics}
    rows = [line(arm, seed) | {"final": final, "curve": []} for arm in ("bf16", "nvfp4") for seed in (0, 1)]
    page = write_pages(study, tmp_path, rows, []).read_text()
    assert "<h2>Curves</h2>" not in page and "<h2>Seconds and memory</h2>" not in page
    assert "NVFP4 lowers the sampled accuracy" in page and "are excluded" not in page


def test_the_pages_quote_the_stored_paragraphs():
    for study in ("gsm8k", "gsm8k_small"):
        for part in ("headline", "verdicts", "curve"):
            assert TABLES[f"{study}-{part}"]([])
