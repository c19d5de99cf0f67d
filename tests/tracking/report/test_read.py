"""Read a run for the report: samples, evaluations and times."""

import json
import re
from pathlib import Path

import pytest

from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.metric_text import plain_line
from qerl.tracking.report import page
from qerl.tracking.report.read import Place, RecordedRun, read_run, select_places
from qerl.tracking.report.section import (
    charts,
    evaluated,
    intervals,
    noise_starts,
    phase_seconds,
    tiles,
    timeline,
)
from stored_samples import checked_line


def run_of(records, evaluations=None, config=None):
    parts = {"facts": {"config": config or {}}, "result": {}, "groups": [], "held_out": []}
    parts |= {"notices": [], "coverage": [], "progress": []}
    return RecordedRun(name="run", records=records, evaluations=evaluations or {}, **parts)


def write_samples(folder, num_steps, num_prompts, num_samples, text="t"):
    (folder / "metrics.jsonl").touch()
    with open(folder / "samples.jsonl", "wb") as file:
        for step in range(num_steps):
            for i in range(num_prompts * num_samples):
                record = {
                    "step": step,
                    "prompt_index": i // num_samples,
                    "prompt": "p",
                    "text": f"{text}{step}.{i}",
                }
                file.write(checked_line(json.dumps(record)))


def places_of(num_steps, num_prompts, size=8, first_prompt=lambda step: 0):
    """{step: places} of a run that has these prompts in each step."""
    path = Path("samples.jsonl")
    return {
        step: [Place(path, i, str(first_prompt(step) + i // size)) for i in range(num_prompts * size)]
        for step in range(num_steps)
    }


def numbers(places, selected):
    """{step: number of its samples that are selected}"""
    chosen = [
        (step, sum(any(place is each for each in selected) for place in places[step])) for step in places
    ]
    return {step: number for step, number in chosen if number}


def test_samples_of_every_step_are_shown_and_of_the_newest_all():
    places = places_of(36, 72)
    shown = numbers(places, select_places(places, 2000))
    assert list(shown) == list(range(36)) and sum(shown.values()) <= 2000
    assert shown.pop(35) == 496 and set(shown.values()) == {40}  # a quarter of the page; five groups each
    few = places_of(36, 10)
    assert numbers(few, select_places(few, 2000))[35] == 80


def test_of_more_steps_than_groups_evenly_spaced_ones_are_shown():
    places = places_of(100, 2, size=4)
    shown = numbers(places, select_places(places, 36))
    assert list(shown) == [0, 14, 28, 42, 56, 70, 84, 99] and shown[99] == 8


def test_a_selection_has_whole_groups_of_different_steps_and_no_more_than_asked_for():
    for num_steps in range(1, 12):
        for max_samples in range(1, 70):
            places = places_of(num_steps, 3, size=2)
            shown = numbers(places, select_places(places, max_samples))
            assert 0 < sum(shown.values()) <= max_samples and num_steps - 1 in shown
            assert max_samples < 2 or all(number % 2 == 0 for number in shown.values())
            assert len(shown) >= min(num_steps, max_samples // 2 - 2)


def test_prompts_that_come_in_several_steps_are_preferred():
    places = {step: places_of(1, 4, first_prompt=lambda _, n=10 * step: -n)[0] for step in range(3)}
    places[1] += [Place(Path("samples.jsonl"), 100 + i, "0") for i in range(8)]
    shown = select_places(places, 32)
    assert {place.prompt for place in shown if place in places[1]} == {"0"}


def test_the_samples_on_a_page_are_capped_and_the_page_says_so(tmp_path):
    write_samples(tmp_path, num_steps=30, num_prompts=4, num_samples=2)
    run = read_run(tmp_path, "run", max_samples=100)
    assert [group["step"] for group in run.groups] == [*range(29), 29, 29, 29, 29]
    assert [s["text"] for s in run.groups[-3]["samples"]] == ["t29.2", "t29.3"]
    assert run.coverage == ["This page shows 66 of 240 samples, from 30 of 30 steps; samples.jsonl has all."]


def test_one_step_of_too_many_samples_is_cut(tmp_path):
    write_samples(tmp_path, num_steps=2, num_prompts=1, num_samples=30)
    run = read_run(tmp_path, "run", max_samples=10)
    assert {group["step"] for group in run.groups} == {1}
    assert sum(len(group["samples"]) for group in run.groups) == 10 and run.coverage


def test_a_small_run_is_shown_whole(tmp_path):
    write_samples(tmp_path, num_steps=3, num_prompts=2, num_samples=4)
    run = read_run(tmp_path, "run", max_samples=page.MAX_SAMPLES)
    assert [len(group["samples"]) for group in run.groups] == [4] * 6 and run.coverage == []


def test_a_branch_says_where_its_sample_was_branched(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    records = [
        {"step": 0, "prompt_index": 7, "text": "a"},
        {"step": 0, "prompt_index": 7, "prefix_tokens": 20},
    ]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(checked_line(json.dumps(record)) for record in records))
    (group,) = read_run(tmp_path, "run", max_samples=5).groups
    assert [sample.get("prefix_tokens") for sample in group["samples"]] == [None, 20]


def test_a_very_long_text_is_cut_and_says_by_how_much(tmp_path):
    write_samples(tmp_path, num_steps=1, num_prompts=1, num_samples=1, text="x" * 20_007)
    text = read_run(tmp_path, "run", max_samples=5).groups[0]["samples"][0]["text"]
    assert text == "x" * 20_000 + "\n[10 more characters in samples.jsonl]"


def test_several_runs_share_the_cap(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(page, "read_run", lambda *_, max_samples: seen.append(max_samples) or run_of([]))
    page.write_report([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "page.html")
    assert seen == [666] * 3


def test_an_evaluation_stands_at_the_number_of_steps_then_taken():
    records = [{"step": i} | ({"eval_accuracy": i / 10} if i % 2 else {}) for i in range(5)]
    run = run_of(records, {"before": {"accuracy": 0.05, "greedy": 0.2}, "after": {"accuracy": 0.9}})
    assert evaluated(run, "accuracy") == [(0, 0.05), (2, 0.1), (4, 0.3), (5, 0.9)]
    assert evaluated(run, "greedy") == [(0, 0.2)]


def test_the_end_of_a_run_that_was_given_more_steps_stays_where_it_was():
    figures = {"before": 1.0, "after_2_steps": 2.0, "after": 3.0}
    run = run_of([{"step": i} for i in range(5)], {m: {"reward": value} for m, value in figures.items()})
    assert evaluated(run, "reward") == [(0, 1.0), (2, 2.0), (5, 3.0)]


def test_own_rewards_have_tiles_and_dots_of_their_held_out_mean():
    figures = {
        "before": {"reward": -4.0, "greedy_reward": -3.0},
        "after": {"reward": -2.0, "greedy_reward": -1.0},
    }
    run = run_of([{"step": 0, "reward": -4.0}, {"step": 1, "reward": -2.5}], figures)
    shown = tiles([run])
    assert "Held-out reward" in shown and "-4.00" in shown and "-2.00" in shown and "-1.00" in shown
    assert "accuracy" not in shown
    svg, _ = charts([run], [("reward", "Reward", "")])
    assert svg.count('class="dot"') == 2 and svg.count('class="ring"') == 2


def test_a_held_out_reward_that_is_the_accuracy_has_no_tile_of_its_own():
    run = run_of([], {"after": {"accuracy": 0.5, "greedy": 1.0, "reward": 0.5, "greedy_reward": 1.0}})
    assert "Held-out accuracy" in tiles([run]) and "Held-out reward" not in tiles([run])


def test_the_last_evaluation_is_shown_once():
    run = run_of([{"step": 0, "eval_greedy": 0.5}], {"after": {"greedy": 0.5}})
    assert evaluated(run, "greedy") == [(1, 0.5)]


def drawn(key, *runs):
    """(SVG, caption, series) of the chart; None without one."""
    cards, data = charts(runs, [(key, "Title", "about")])
    return (cards, re.search("<figcaption>(.*?)</figcaption>", cards)[1], data[0]) if cards else None


BEFORE_AND_AFTER = {"before": {"accuracy": 0.0, "greedy": 0.5}, "after": {"accuracy": 0.5, "greedy": 1.0}}


def test_held_out_points_are_joined_only_where_they_are_measured_during_training():
    records = [{"step": i, "reward": i / 8, "accuracy": i / 4} for i in range(4)]
    svg, caption, _ = drawn("accuracy", run_of(records, BEFORE_AND_AFTER))
    assert "between" not in svg and svg.count("<circle") == 4 and "held-out" in caption
    records[1] |= {"eval_accuracy": 0.25}
    svg, *_ = drawn("accuracy", run_of(records, BEFORE_AND_AFTER))
    assert svg.count("between") == 1  # no line joins the greedy ones


def test_held_out_shares_have_wilsons_intervals():
    records = [{"step": i, "reward": i / 8, "accuracy": i / 4} for i in range(4)]
    config = {"evaluate": {"num_prompts": 1000}, "task": {"num_held_out": 100}}
    run = run_of(records, BEFORE_AND_AFTER, config)
    (_, low, high), _ = intervals(run, "accuracy", evaluated(run, "accuracy"))
    assert low == 0 and high == pytest.approx(3.8416 / 103.8416)  # z^2 / (n + z^2)
    (_, *ends), _ = intervals(run, "greedy", evaluated(run, "greedy"))
    assert ends == pytest.approx([0.4038, 0.5962], abs=1e-4)
    svg, caption, _ = drawn("accuracy", run)
    assert svg.count('class="error"') == 2 and "95 % intervals" in caption
    assert "95 %" not in drawn("accuracy", run_of(records, BEFORE_AND_AFTER))[1]


def test_held_out_rewards_have_their_own_intervals():
    run = run_of([{"step": 0, "reward": 1.0}], {"after": {"reward": 7.0, "reward_error": 0.5}})
    assert intervals(run, "reward", [(1, 7.0)]) == [(1, pytest.approx(6.02), pytest.approx(7.98))]


def test_an_accuracy_that_is_the_reward_is_not_drawn_and_the_caption_says_so():
    records = [{"step": i, "reward": i / 4, "accuracy": i / 4} for i in range(4)]
    same = run_of(records, BEFORE_AND_AFTER)
    assert drawn("accuracy", same) is None
    _, caption, series = drawn("reward", same)
    assert "accuracy is the same at every step and not drawn" in caption
    assert [one["label"] for one in series] == ["run", "run, held-out", "run, held-out greedy"]
    other = run_of([*records, {"step": 4, "reward": 1.5, "accuracy": 1.0}], BEFORE_AND_AFTER)
    assert "not drawn" not in drawn("reward", same, other)[1] and len(drawn("accuracy", same, other)[2]) == 6


def test_noise_starts_where_sigma_leaves_zero():
    sigmas = [0, 0, 0.1, 0.05, 0, 0.2]
    run = run_of([{"step": i, "sigma": s, "entropy": 1.0} for i, s in enumerate(sigmas)])
    assert noise_starts(run) == [3, 6]
    svg, *_ = drawn("entropy", run)
    assert re.findall('class="break"><path d="M([0-9.]+),', svg) == ["260.0", "470.0"]  # of 0 to 6
    assert noise_starts(run_of([{"step": 0, "sigma": 0.1}, {"step": 1, "sigma": 0.2}])) == []


def test_the_clock_adds_up_minutes_and_tokens():
    records = [{"step": i, "step_s": 30.0 * i, "sampled_tokens": 100} for i in range(3)]
    assert timeline(run_of(records)) == {
        "name": "run",
        "clock": [(0, 0, 0), (1, 0, 100), (2, 0.5, 200), (3, 1.5, 300)],
    }
    rows = timeline(run_of([{"step": i, "step_s": 60.0} for i in range(5000)]))["clock"]
    assert len(rows) <= 601 and rows[0] == (0, 0, 0) and rows[-1] == (5000, 5000, 0)


def test_phases_and_the_rest_add_up_to_the_step():
    record = {"step": 3, "rollout_s": 2.0, "learn_s": 1.5, "prefill_s": 0.5, "step_s": 4.0}
    steps, rows = phase_seconds(run_of([record]))
    assert steps == [4] and rows == [[2.0, 0, 0, 1.5, 0, 0, 0, 0.5]]


def test_a_checkpoint_lies_outside_the_step_and_takes_nothing_from_its_rest():
    _, rows = phase_seconds(run_of([{"step": 0, "rollout_s": 1.0, "checkpoint_hold_s": 2.0, "step_s": 1.5}]))
    assert rows == [[1.0, 0, 0, 0, 0, 0, 2.0, 0.5]]


def test_an_evaluation_before_the_first_step_does_not_make_its_rest_negative():
    _, rows = phase_seconds(run_of([{"step": 0, "rollout_s": 1.0, "evaluate_s": 2.0, "step_s": 1.0}]))
    assert rows == [[1.0, 0, 0, 0, 0, 2.0, 0, 0]]


def test_a_long_runs_times_are_means_of_stretches():
    steps, rows = phase_seconds(run_of([{"step": i, "learn_s": i % 2, "step_s": i % 2} for i in range(600)]))
    assert len(steps) == 300 and steps[:2] == [2, 4] and all(row[3] == 0.5 for row in rows)


def test_steps_are_numbered_as_on_the_console():
    records = [{"step": i, "reward": i / 4, "step_s": 1.0, "learn_s": 1.0} for i in range(3)]
    run = run_of(records)
    lines = [plain_line(r, steps_done=r["step"] + 1, num_steps=3, left_s=None).split("/")[0] for r in records]
    assert [f"step {step:g}" for step, _ in run.points("reward")] == lines == ["step 1", "step 2", "step 3"]
    assert phase_seconds(run)[0] == [1, 2, 3]
    assert charts([run], [("reward", "Reward", "")])[1][0][0]["points"][0][0] == 1
    script = page.asset("page.js")
    assert "step ${group.step + 1}" in script and "String(step + 1)" in script


def write_held_out(folder, steps, num_problems=2, **fields):
    (folder / "metrics.jsonl").write_bytes(b"".join(checked_line(f'{{"step": {i}}}') for i in range(100)))
    records = [
        {"step": step, "prompt_index": i, "kind": kind, "prompt": f"p{i}", "text": f"{kind} {step}"} | fields
        for step in steps
        for kind in ("sampled", "greedy")
        for i in range(num_problems)
    ]
    with open(folder / "held_out.jsonl", "ab") as file:
        file.write(b"".join(checked_line(json.dumps(record)) for record in records))


def test_held_out_answers_are_grouped_by_problem_in_the_order_of_training(tmp_path):
    write_held_out(tmp_path, [0, 10, 100])
    groups = read_run(tmp_path, "run", max_samples=9).held_out
    assert [(group["prompt"], len(group["samples"])) for group in groups] == [("p0", 6), ("p1", 6)]
    texts = [sample["text"] for sample in groups[0]["samples"] if sample["kind"] == "greedy"]
    assert texts == ["greedy 0", "greedy 10", "greedy 100"]


def test_of_many_evaluations_the_first_the_last_and_some_between_are_shown(tmp_path):
    write_held_out(tmp_path, range(0, 101, 5))
    (samples, _) = (group["samples"] for group in read_run(tmp_path, "run", max_samples=9).held_out)
    assert sorted({sample["step"] for sample in samples}) == [0, 20, 40, 60, 80, 100]


def test_the_later_of_two_evaluations_at_a_step_counts_and_none_beyond_the_last_step(tmp_path):
    write_held_out(tmp_path, [0, 7, 101])
    write_held_out(tmp_path, [7], text="again")
    samples = read_run(tmp_path, "run", max_samples=9).held_out[0]["samples"]
    assert {(sample["step"], sample["text"]) for sample in samples} == {
        (0, "sampled 0"),
        (0, "greedy 0"),
        (7, "again"),
    }


def test_a_damaged_step_and_missing_samples_hide_no_held_out_answer(tmp_path):
    write_held_out(tmp_path, [0, 100])
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"damaged\n" + metrics.read_bytes().partition(b"\n")[2])
    for groups in (
        read_run(tmp_path, "run", max_samples=9).held_out,
        RunFollower(tmp_path, "run").held_out(),
    ):
        assert {sample["step"] for sample in groups[0]["samples"]} == {0, 100}
