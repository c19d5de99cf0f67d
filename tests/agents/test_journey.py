"""The chain of docs/journey.md with a tiny model: chats, then an agent with a tool, from the adapter."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_run
from qerl.cli.main import command

pytest.importorskip("starlette")
pytest.importorskip("openai")
PAGE = Path(__file__).parents[2] / "docs" / "journey.md"
SMALL = {
    "sft": "--model.dtype fp32 --batch-size 16 --max-steps 4 --max-length 96 --eval-max-tokens 8",
    "train": "--model.dtype fp32 --num-steps 2 --num-prompts 2 --num-generations 4 --sample.max-tokens 8"
    " --evaluate.num-prompts 2 --agent.context-tokens 256",
}
"""Options that make the page's commands small; the rest is as the page has it."""


def code_blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and the files that the page's Python makes."""
    folder = tmp_path_factory.mktemp("journey")
    tiny_run.write_model(folder / "model", max_positions=512)
    make_rows, agent = code_blocks()
    (folder / "make_rows.py").write_text(make_rows)
    (folder / "agent.py").write_text(agent)
    return folder


def commands():
    """The page's two commands, which the shell joins."""
    text = PAGE.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^    (qerl sft .*)$", text, re.M)
    return [shlex.split(part)[1:] for part in line.split("&&")]


def test_the_chain_of_the_page_runs_and_goes_on_from_its_adapter(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(compile((folder / "make_rows.py").read_text(), "make_rows.py", "exec"), {})
    first, second = commands()
    assert (first[0], second[0]) == ("sft", "train") and "--init-adapter" in second
    for arguments in (first, second):
        command([*arguments, "--model", str(folder / "model"), *SMALL[arguments[0]].split()])
    assert f"qerl export {second[second.index('--out') + 1]} " in capsys.readouterr().out
    result = json.loads((Path(second[second.index("--out") + 1]) / "result.json").read_text())
    assert {"reward_before", "reward_after"} <= set(result)
    runs = [Path(run) for run in (first[first.index("--out") + 1], second[second.index("--out") + 1])]
    start = json.loads((runs[1] / "run.json").read_text())["config"]["adapter"]["init_from"]
    assert start == str(runs[0] / "checkpoints" / "step-000004")
    steps = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["turns"] >= 1 and step["reward"] == 0.0 for step in steps)
    imitated, reinforced = (
        load_file(sorted((run / "checkpoints").iterdir())[-1] / "adapter_model.safetensors") for run in runs
    )
    # no sample of the tiny model is rewarded: nothing is learned, and the adapter stays as it began
    assert imitated.keys() == reinforced.keys()
    assert all(torch.equal(imitated[name], reinforced[name]) for name in imitated)
    assert any(tensor.any() for name, tensor in imitated.items() if "lora_B" in name)


class Client:
    """An openai client whose policy answers with these texts, in order."""

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), []
        self.chat = self.completions = self

    async def create(self, *, model, messages):
        self.asked.append([message["content"] for message in messages])
        message = type("Message", (), {"content": self.texts.pop(0)})
        return type("Answer", (), {"choices": [type("Choice", (), {"message": message})]})


@pytest.mark.parametrize(
    ("texts", "reward", "calls"),
    [
        (["calc: 345 + 128", "She has 473"], 1.0, 1),
        (["345 + 128 = 473"], 1.0, 0),
        (["calc: 345 + 12", "345 + 12 = 357"], 0.0, 1),
        (["calc: 345 + 128"] * 3, 0.0, 3),
    ],
)
def test_the_agent_of_the_page_answers_calls_and_rewards_the_right_number(texts, reward, calls):
    scope = {}
    exec(code_blocks()[1], scope)
    client = Client(*texts)
    row = {"prompt": [{"role": "user", "content": "?"}], "answer": "473"}
    assert asyncio.run(scope["agent"](client, row)) == {"reward": reward, "calls": calls}
    if calls:
        assert client.asked[1][-1] == f"calculator: {345 + int(texts[0].split()[-1])}"
