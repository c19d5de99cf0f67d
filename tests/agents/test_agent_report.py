"""The report shows an episode as a conversation whose tool calls are folded."""

import json
import re
import shutil
import subprocess

import pytest

from qerl.tracking.report.page import asset
from qerl.tracking.report.read import read_run
from stored_samples import checked_line

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
TURNS = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": f"I call. {CALL}"},
    {"role": "tool", "content": "3\nmore"},
    {"role": "assistant", "content": "It is 3."},
]


def record(**fields):
    return {"step": 0, "prompt_index": 0, "prompt": "add", "text": "t", "reward": 1.0, **fields}


def test_the_page_gets_the_turns_of_a_sample_and_why_it_failed(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(checked_line('{"step": 0, "reward": 1.0}'))
    samples = [
        record(turns=TURNS),
        record(turns=TURNS * 60, failure="raised KeyError: no"),
        record(turns="x"),
    ]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(checked_line(json.dumps(each)) for each in samples))
    (group,) = read_run(tmp_path, "run", max_samples=10).groups
    first, long, plain = group["samples"]
    assert first["turns"] == [[each["role"], each["content"]] for each in TURNS] and "failure" not in first
    assert len(long["turns"]) == 101 and long["turns"][-1] == ["more", "140 more messages in samples.jsonl"]
    assert long["failure"] == "raised KeyError: no" and "turns" not in plain


def test_calls_and_results_of_tools_are_folded():
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    (function,) = re.findall(r"^function conversation\(.*?^}$", asset("page.js"), re.M | re.S)
    script = f"""
    const element = (tag, fields, inner = []) => ({{ tag, ...fields, inner }});
    const highlighted = (text) => [text];
    {function}
    console.log(JSON.stringify(conversation({json.dumps([list(each.values()) for each in TURNS])})));
    """
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=30, check=True)
    nodes = json.loads(done.stdout)
    folded = [each["inner"][0]["textContent"] for each in nodes if each["tag"] == "details"]
    assert folded == ["call: add", "tool: 3"]
    assert [each["textContent"] for each in nodes if each["tag"] == "p"] == ["user", "assistant", "assistant"]
    assert [each["inner"] for each in nodes if each["tag"] == "pre"] == [["add"], ["I call. "], ["It is 3."]]
