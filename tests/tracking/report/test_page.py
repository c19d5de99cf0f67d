"""The page is self-contained, no text of a run becomes markup, and missing files are named."""

import base64
import hashlib
import io
import json
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from qerl.config import LearnConfig, RunConfig
from qerl.errors import UserError
from qerl.tracking import Journal
from qerl.tracking.report import write_report
from qerl.tracking.report.page import script_json
from qerl.types import Group, Prompt, Sample

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{title}}<!--\u2028\ud800"


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, scripts, and the visible text."""

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
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


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
    assert "innerHTML" not in page.scripts[1] and "http" not in page.scripts[1]


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
            | {"prefix_tokens": None}
        ],
    }
    assert page.data["charts"][0] == [{"label": "demo", "run": 0, "points": [[1, 0], [2, 0.25], [3, 0.5]]}]
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
        "metrics.jsonl: skipped 1 damaged line",
        "samples.jsonl: skipped 2 damaged lines",
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
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "reward": "high", "loss": NaN, "entropy": null, "sigma": true}\n'
    )
    assert page_of([folder], tmp_path).data["charts"] == []


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_that_is_no_runs_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"{name}: has no metrics.jsonl"):
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
