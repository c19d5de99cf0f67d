"""Text of a run that tries to be markup or script: the page has the elements that it has with plain text."""

import dataclasses
import json
from html.parser import HTMLParser

import pytest

from qerl.config import RunConfig
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.dashboard.live import LivePage
from qerl.tracking.report import write_report
from stored_samples import checked_line

PAYLOADS = {
    "script": "</script><script>alert(1)</script>",
    "attribute": "\" onmouseover=alert(1) x='",
    "single-quote": "' onfocus='alert(1)' autofocus='",
    "image": "<img src=x onerror=alert(1)>",
    "svg": "</title></text></svg><svg/onload=alert(1)>",
    "style": "</style><link rel=stylesheet href=//evil>",
    "comment": "<!--<script>",
    "cdata": "]]><![CDATA[<a href=javascript:alert(1)>",
    "entity": "&lt;img src=x&gt;&#60;script&#62;",
    "template": "{{script}}{{data}}{{policy}}",
    "separator": "\u2028\u2029\x00\x0b\x1b[2J\r\n<base href=//evil>",
    "surrogate": "\ud83d<iframe>",
    "json": '"}],"x":[{"<object>":"\\u003cscript\\u003e',
    "meta": '"><meta http-equiv=refresh content="0;url=//evil">',
}


class Elements(HTMLParser):
    """Tags, with the names of their attributes, and the values of those that do not come from a run."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, [name for name, _ in attrs]))
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    def handle_comment(self, data):
        self.elements.append(("comment", []))

    def handle_decl(self, decl):
        self.elements.append((decl, []))

    def unknown_decl(self, data):
        self.elements.append(("unknown", []))


def tainted(value, text):
    """The value with the text at the end of every string, and of every key of a mapping."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, dict):
        return {key + text: tainted(item, text) for key, item in value.items()}
    return [tainted(item, text) for item in value] if isinstance(value, list | tuple) else value


def write_run(folder, text):
    """A run whose files have this text in every name and value that a run's user or model may choose."""
    folder.mkdir(parents=True)
    plain = dataclasses.asdict(RunConfig())
    config = {
        key: tainted(value, text) if not isinstance(value, dict) else value for key, value in plain.items()
    }
    for section, fields in plain.items():
        if isinstance(fields, dict):
            config[section] = {
                name: tainted(value, text) if isinstance(value, str) or value is None else value
                for name, value in fields.items()
            } | {f"own{text}": f"value{text}"}
    facts = {
        "config": config | {"num_steps": 2},
        "command": f"qerl train {text}",
        "device": f"GPU {text}",
        "qerl": f"1{text}",
        "torch": f"2{text}",
        "commit": f"abc{text}",
        "start_time": f"2026{text}",
        "sources": {f"reward even{text} (even.py)": f"0{text}"},
        "history": [{"step": 1, "changed": {f"sources.reward{text}": [f"a{text}", f"b{text}"]}}],
    }
    figures = {"accuracy": 0.5, f"own{text}": 1.0}
    files = {"run": facts, "result": {f"a{text}": f"b{text}", "accuracy": f"b{text}"}}
    files["evaluations"] = {"before": figures, f"after_1_steps{text}": figures, f"m{text}": figures}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    metrics = [
        {"step": i, "reward": i / 8, f"m{text}": 1.0, f"z{text}_s": 0.5, "finish": f"x{text}"}
        for i in range(2)
    ]
    events = [{"wall_time": 1.0, "step": 0, "text": f"notice{text}"}]
    message = {"role": f"user{text}", "content": f"q{text}"}
    sample = {
        "prompt": f"q{text}",
        "text": f"a{text}",
        "answer": f"r{text}",
        "finish": f"stop{text}",
        "num_tokens": 2,
    }
    sample |= {"step": 0, "prompt_index": 0, "reward": 1.0, "advantage": 0.5, "failure": f"raised{text}"}
    sample |= {
        "messages": [message],
        "turns": [message],
        "rewards": {f"even{text}": 1.0},
        f"column{text}": text,
    }
    lines = {"metrics": metrics, "events": events, "samples": [sample]}
    lines["held_out"] = [sample | {"step": step, "kind": f"greedy{text}"} for step in (0, 2)]
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_bytes(
            b"".join(checked_line(json.dumps(record)) for record in records)
        )
    return folder


def pages(folders):
    """The report and the live page as text, and the parts that the live page is given afterwards."""
    out = folders[0].parent / "report.html"
    write_report(folders, out)
    live = LivePage([RunFollower(folder, folder.name) for folder in folders])
    update = json.loads(live.update())
    return [
        out.read_text(encoding="utf-8"),
        live.page().decode(),
        *map(update["parts"].get, sorted(update["parts"])),
    ]


def folder_name(name, text):
    return (name + text).replace("/", "").replace("\0", "").encode(errors="ignore").decode()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return pages([write_run(folder / "one", ""), write_run(folder / "two", "x")])


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_page_of_hostile_text_has_the_elements_and_attributes_of_one_of_plain_text(plain, tmp_path, kind):
    text = PAYLOADS[kind]
    folders = [
        write_run(tmp_path / folder_name("one", ""), ""),
        write_run(tmp_path / folder_name("two", text), text),
    ]
    hostile = pages(folders)
    assert len(hostile) == len(plain) > 5
    for ours, theirs in zip(hostile, plain, strict=True):
        a, b = Elements(ours), Elements(theirs)
        assert a.elements == b.elements
        assert a.scripts[1:] == b.scripts[1:]  # the first one is data
        if a.scripts:
            json.loads(a.scripts[0])
