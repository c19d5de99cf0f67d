"""`qerl train --agent` learns a small task through plain clients: the reward of a tiny model rises.

The model has to say true, where the schema of its answer also allows false.
"""

import shutil
import statistics

import pytest

import tiny_run
from qerl.tracking.json_lines import read_lines

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
AGENT = """
import json
import subprocess


FORMAT = {"type": "json_schema", "json_schema": {"name": "is_big", "schema": {"type": "boolean"}}}


async def with_openai(client, row):
    answer = await client.chat.completions.create(
        model="policy", messages=row["prompt"], response_format=FORMAT
    )
    return float(answer.choices[0].message.content == "true")


def with_curl(base_url, api_key, row):
    command = ["curl", "-sS", base_url + "/chat/completions", "--noproxy", "*", "-d", "@-"]
    headers = ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer " + api_key]
    body = json.dumps({"messages": row["prompt"], "response_format": FORMAT})
    done = subprocess.run([*command, *headers], input=body.encode(), stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout)["choices"][0]["message"]["content"] == "true")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai", "curl"])
def test_the_reward_of_an_agent_rises(name, tmp_path):
    if name == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    tiny_run.write_files(tmp_path, max_positions=2048)
    (tmp_path / "my.py").write_text(AGENT)
    given, out = tiny_run.options(tmp_path, tmp_path / "run"), tmp_path / "run"
    at = given.index("--task.rewards")
    del given[at : at + 2]
    given += ["--num-steps", "12", "--num-generations", "8", "--noise.schedule", "none"]
    given += ["--evaluate.num-prompts", "0", "--checkpoint.every", "100"]
    given += ["--agent", f"{tmp_path / 'my.py'}:with_{name}"]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo", *given)
    _, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    rewards = [step["reward"] for step in read_lines(out / "metrics.jsonl")]
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
    print(f"{name}: reward of the first three steps {first:.2f}, of the last three {last:.2f}")
    assert len(rewards) == 12 and last > first + 0.1
