"""The page is self-contained, no text of a run becomes markup, and missing files are named."""

import base64
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from qerl.config import LearnConfig, RunConfig
from qerl.errors import UserError
from qerl.tracking import Journal
from qerl.tracking.report import write_report
from qerl.tracking.report.facts import run_summary
from qerl.tracking.report.page import asset, script_json
from qerl.types import Group, Prompt, Sample
from stored_samples import checked_line

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{title}}<!--\u2028\ud800"


SVG = "http://www.w3.org/2000/svg"
"""A name, not an address to load."""


class Page(HTMLParser):
    """A page as a browser sees it: elements with their attributes, scripts, and the visible text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.visible = [], [], []
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.visible.append(data)

    @property
    def text(self):
        return " ".join(self.visible)

    @property
    def data(self):
        return json.loads(self.scripts[0])


def lines(path, records):
    path.write_bytes(b"".join(checked_line(json.dumps(record)) for record in records))


def make_run(folder, num_steps=4, **files):
    folder.mkdir(parents=True)
    lines(folder / "metrics.jsonl", [{"step": i, "reward": i / 8, "step_s": 1.0} for i in range(num_steps)])
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def sample(step, prompt_index=0, **fields):
    base = {
        "prompt": "1 + 2?",
        "text": "3",
        "reward": 1.0,
        "advantage": 0.5,
        "finish": "stop",
        "num_tokens": 2,
    }
    return {"step": step, "prompt_index": prompt_index, **base, **fields}


def page_of(folders, tmp_path):
    out = tmp_path / "report" / "page.html"
    write_report(folders, out)
    return Page(out)


def test_nothing_that_a_run_says_becomes_markup(tmp_path):
    name = HOSTILE.replace("/", "").replace("\ud800", "")
    folder = make_run(tmp_path / name, run={"config": {HOSTILE: HOSTILE}}, result={HOSTILE: HOSTILE})
    lines(folder / "metrics.jsonl", [{"step": 0, "reward": 1, HOSTILE: 2.0}, {"damaged": True}])
    lines(
        folder / "samples.jsonl",
        [sample(0, HOSTILE, prompt=HOSTILE, text=HOSTILE, answer=HOSTILE, finish=HOSTILE)],
    )
    page = page_of([folder], tmp_path)
    assert not [tag for tag, _ in page.elements if tag in ("img", "iframe", "link", "object", "base")]
    assert len(page.scripts) == 2
    assert not [
        a for _, attributes in page.elements for a in attributes if a.startswith("on") or a in ("src", "href")
    ]
    (run,) = page.data["runs"]
    (group,) = run["groups"]
    assert run["name"] == name
    assert [group["prompt"], group["answer"], group["samples"][0]["text"]] == [HOSTILE] * 3
    assert page.text.count("</script><img") >= 4 and "{{title}}" in page.text


def test_only_the_pages_own_script_may_run_and_nothing_is_loaded(tmp_path):
    page = page_of([make_run(tmp_path / "run")], tmp_path)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "innerHTML" not in page.scripts[1] and "http" not in page.scripts[1].replace(SVG, "")


def test_embedded_json_has_no_character_that_begins_markup():
    value = {"a<b": ["&\u2028\u2029", HOSTILE, float("nan")]}
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a<b": ["&\u2028\u2029", HOSTILE, None]}


def test_what_a_journal_wrote_is_on_the_page(tmp_path):
    prompt = Prompt(index=17, text="What is 1 + 2?", tokens_T=[5], messages=None, columns={"answer": "3"})
    config = RunConfig(out=str(tmp_path / "demo"), learn=LearnConfig(learning_rate=0.0625))
    with Journal(tmp_path / "demo", num_steps=100, console=Console(file=io.StringIO())) as journal:
        journal.start(config)
        for step in range(3):
            with journal.step(step) as log:
                log.samples(
                    [
                        Group(
                            prompt=prompt,
                            samples_G=[
                                Sample(
                                    tokens_T=[7],
                                    logprobs_T=[-1],
                                    text="three",
                                    finish="length",
                                    version=step,
                                    reward=0.25,
                                    advantage=-0.5,
                                )
                            ],
                        )
                    ]
                )
                log.add(reward=0.25 * step, entropy=1.5)
        journal.finish({"accuracy_after": 0.875})
    page = page_of([tmp_path / "demo"], tmp_path)
    assert page.data["runs"][0]["groups"][2] == {
        "step": 2,
        "prompt_index": "17",
        "prompt": "What is 1 + 2?",
        "answer": "3",
        "samples": [
            {"text": "three", "reward": 0.25, "advantage": -0.5, "finish": "length", "num_tokens": 1}
        ],
    }
    (reward,) = page.data["charts"][0]
    assert reward == {"label": "demo", "run": 0, "points": [[1, 0], [2, 0.25], [3, 0.5]]}
    for text in (
        "accuracy_after",
        "0.875",
        "config.learn.learning_rate",
        "0.0625",
        "0.50",
        "of 100",
        "Entropy",
    ):
        assert text in page.text


def test_every_curve_has_its_values_in_the_pages_order(tmp_path):
    folders = [make_run(tmp_path / name) for name in "ab"]
    lines(
        folders[0] / "metrics.jsonl", [{"step": 0, "reward": 1.0, "loss": 3.0, "learn_s": 2.0, "step_s": 2.5}]
    )
    page = page_of(folders, tmp_path)
    assert sum(tag == "svg" for tag, _ in page.elements) == len(page.data["charts"])
    drawn = [[(one["label"], one["points"][0][1]) for one in chart] for chart in page.data["charts"]]
    assert drawn == [
        [("a", 1.0), ("b", 0.0)],
        [("learn", 2.0), ("other", 0.5)],
        [("other", 1.0)],
        [("a", 3.0)],
        [("a", 2.0)],
        [("a", 2.5), ("b", 1.0)],
    ]


def test_a_reward_that_was_changed_is_said_and_no_headline_compares_across(tmp_path):
    changed = {"config.num_steps": [2, 4], "sources.reward mine (my.py)": ["0e3b", "8995"]}
    figures = {"before": {"reward": 0.11}, "after_2_steps": {"reward": 0.22}, "after": {"reward": 0.33}}
    folder = make_run(tmp_path / "a", run={"history": [{"step": 2, "changed": changed}]}, evaluations=figures)
    text = page_of([folder], tmp_path).text
    assert (
        "a changed from step 3 on: reward mine (my.py)" in re.sub(r"\s+", " ", text)
        and "num_steps;" not in text
    )
    assert "0.33" in text and "0.11" not in text and "0.22" not in text
    html = (tmp_path / "report" / "page.html").read_text()
    marks = re.findall(r'<g class="break"><path d="M([\d.]+),.*?>([a-z]+)</text>', html)
    assert marks and set(marks) == {("365.0", "changed")}
    history = [{"step": 2, "changed": {"config.num_steps": [2, 4]}}, 7]
    longer = make_run(tmp_path / "b", run={"history": history})
    page_of([longer], tmp_path)
    assert ">changed</text>" not in (tmp_path / "report" / "page.html").read_text()


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [make_run(tmp_path / parent / "run") for parent in "ab"]
    page = page_of(folders, tmp_path)
    assert [run["name"] for run in page.data["runs"]] == [str(folder) for folder in folders]


def test_what_tells_of_exploration_has_charts_of_its_own(tmp_path):
    names = ("informative", "distinct", "sampler_entropy", "effective_fraction", "pass_at_1", "pass_at_16")
    folder = make_run(tmp_path / "run")
    lines(folder / "metrics.jsonl", [{"step": i} | dict.fromkeys(names, i / 4) for i in range(3)])
    text = page_of([folder], tmp_path).text
    head, others = text.split("pass_at_1", 1)
    for title in (
        "Informative groups",
        "Distinct samples",
        "Sampler entropy",
        "Effective sample size",
        "Pass@16",
    ):
        assert title in head
    assert not [name for name in names if name in others] and "Pass@1 " not in text


def titles(tmp_path):
    """Those of the charts at the front, and of the folded ones."""
    html = (tmp_path / "report" / "page.html").read_text()
    parts = html.partition("<summary>All other metrics")[::2]
    return [re.findall(r"<figcaption><b>([^<]*)</b>", part) for part in parts]


def test_a_chart_whose_values_are_all_the_same_is_folded_away(tmp_path):
    run = make_run(tmp_path / "run")
    steps = [
        {"step": i, "reward": i / 8, "sigma": 0.0, "cut_fraction": 0.5, "raw": i, "loss": 1.0 - 1e-7 * i}
        for i in range(4)
    ]
    lines(run / "metrics.jsonl", steps)
    page = page_of([run], tmp_path)
    front, folded = titles(tmp_path)
    assert front == ["Reward"] and folded == ["raw", "Noise sigma", "Share cut off", "loss"]
    first = [chart[0]["points"][0][1] for chart in page.data["charts"]]
    assert first == [0.0, 0.0, 0.0, 0.5, 1.0]  # in the page's order


def test_what_the_learner_and_the_limit_hold_back_has_charts_with_names(tmp_path):
    run = make_run(tmp_path / "run")
    names = ("cut_fraction", "clip_fraction", "learning_rate", "memory_gb")
    lines(run / "metrics.jsonl", [{"step": i, **dict.fromkeys(names, 0.1 * i)} for i in range(3)])
    page_of([run], tmp_path)
    assert titles(tmp_path)[0] == ["Share cut off", "Clip fraction", "Learning rate", "Peak memory"]


def test_each_of_several_rewards_has_a_chart_after_the_reward(tmp_path):
    run = make_run(tmp_path / "run")
    keys = ("rewards/tags/mean", "rewards/numeric/mean", "reward", "entropy")
    lines(run / "metrics.jsonl", [{"step": i, **dict.fromkeys(keys, 0.1 * i)} for i in range(3)])
    page_of([run], tmp_path)
    assert titles(tmp_path) == [["Reward", "Reward numeric", "Reward tags", "Entropy"], []]


def test_the_header_says_what_the_run_is(tmp_path):
    config = dataclasses.asdict(RunConfig())
    config["algo"]["loss_type"] = "cispo"
    facts = {"config": config, "device": "NVIDIA H200", "qerl": "0.1.0", "torch": "2.13.0", "is_dirty": True}
    found = run_summary(facts | {"commit": "169ad83771e0", "start_time": "2026-11-22T10:58:24+00:00"})
    assert found == {
        "Model": "smollm2-135m-instruct, nvfp4, LoRA rank 32",
        "Task": "reasoning-gym basic_arithmetic, rewards numeric",
        "Method": "cispo loss, group advantage, exponential noise 0.01 to 0.0005",
        "Step": "16 prompts x 8 samples, learning rate 1e-05",
        "Device": "NVIDIA H200",
        "Versions": "qerl 0.1.0, torch 2.13.0, commit 169ad83 with changes",
        "Started": "2026-11-22 10:58",
    }
    config["noise"]["schedule"] = "none"
    assert run_summary({"config": config})["Method"].endswith("group advantage, no noise")
    assert run_summary({}) == run_summary({"config": 5}) == {}


def test_a_stored_run_has_a_page(tmp_path):
    page = page_of([Path(__file__).parents[2] / "data" / "stored_run"], tmp_path)
    for text in ("grpo loss, group advantage, exponential noise 0.03", "4 prompts x 4 samples", "Reward"):
        assert text in page.text


def test_what_runs_share_is_said_once_and_runs_have_numbers(tmp_path):
    runs = [{"config": {"num_prompts": n, "num_generations": 8}, "device": "CPU"} for n in (4, 16)]
    out = tmp_path / "page.html"
    write_report([make_run(tmp_path / f"{i}", run=run) for i, run in enumerate(runs)], out)
    html = out.read_text()
    assert "<dt>Device</dt><dd>CPU</dd></div>" in html
    for i, n in enumerate((4, 16)):
        assert f'<dd class="s{i}" data-run="{i}"><i>{i + 1}</i>{n} prompts x 8 samples</dd>' in html


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}


def linear(color):
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def oklab(rgb):
    r, g, b = (min(1.0, max(0.0, value)) for value in rgb)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    )


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_the_color_blind_tell_low_and_high_rewards_and_runs_apart(vision, mode):
    def seen(color):
        return oklab([sum(m * c for m, c in zip(row, linear(color), strict=True)) for row in VISION[vision]])

    colors = dict(re.findall(r"--(\w+): (#\w{6})", asset("page.css").split("@media (prefers-color")[mode]))
    assert math.dist(seen(colors["good"]), seen(colors["bad"])) > 0.2  # the former green and red: 0.03
    runs = [seen(colors[f"c{i}"]) for i in range(8)]
    # The former ones were 0.01 apart.
    assert vision == "tritan" or min(itertools.starmap(math.dist, itertools.combinations(runs, 2))) > 0.08


def test_settings_in_which_runs_differ_are_marked(tmp_path):
    runs = [{"config": {"seed": seed, "num_steps": 4}} for seed in (0, 1)]
    folders = [make_run(tmp_path / f"{i}", run=run) for i, run in enumerate(runs)]
    out = tmp_path / "page.html"
    write_report(folders, out)
    assert '<tr class="differs"><th>config.seed</th><td>0</td><td>1</td></tr>' in out.read_text()
    assert "<tr><th>config.num_steps</th><td>4</td><td>4</td></tr>" in out.read_text()


def test_damaged_lines_are_skipped_with_a_notice(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    lines(folder / "samples.jsonl", [sample(0), {"no": "step"}, ["no object"]])
    (folder / "result.json").write_text('{"half": ')
    page = page_of([folder], tmp_path)
    for text in (
        "metrics.jsonl: skipped 1 damaged line: 4",
        "samples.jsonl: skipped 2 damaged lines: 2, 3",
        "result.json: skipped, the file is damaged",
    ):
        assert text in page.text
    assert len(page.data["charts"][0][0]["points"]) == 3 and len(page.data["runs"][0]["groups"]) == 1


def test_a_run_without_a_finished_step_has_a_page_that_says_so(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=0)
    page = page_of([folder], tmp_path)
    assert "no step has finished yet" in page.text and page.data["charts"] == []


def test_values_of_a_wrong_kind_are_no_points(tmp_path):
    folder = make_run(tmp_path / "run", evaluations={"before": 3}, run={"config": 5})
    (folder / "metrics.jsonl").write_bytes(
        checked_line('{"step": 0, "reward": "high", "loss": NaN, "entropy": null, "sigma": true}')
    )
    assert page_of([folder], tmp_path).data["charts"] == []


@pytest.mark.parametrize(("name", "lacks"), [("missing", "no such folder"), ("empty", "has no metrics")])
def test_a_folder_that_is_no_runs_is_refused(tmp_path, name, lacks):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{name}: {lacks}"):
        write_report([tmp_path / name], tmp_path / "page.html")


def test_no_folder_and_no_place_are_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match="give the folder of at least one run"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(UserError, match="cannot be written"):
        write_report([make_run(tmp_path / "run")], tmp_path)


def test_the_installed_package_has_the_pages_parts():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    included = project["tool"]["setuptools"]["package-data"]["qerl"]
    assert {"**/*.html", "**/*.css", "**/*.js"} <= set(included)
