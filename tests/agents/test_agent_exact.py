"""With engine.exact an agent's run is a function of its seed, whenever its requests arrive."""

import hashlib
import json

import pytest

import tiny_run
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
AGENT = '''
import asyncio, random, time


async def ask(client, messages, **options):
    await asyncio.sleep(random.Random(time.time_ns()).uniform(0, 0.03))  # arrives at another moment each time
    got = await client.chat.completions.create(model="any", messages=messages, **options)
    return got.choices[0].message.to_dict()


async def agent(client, row):
    """Asks, then goes on twice beside each other, once under a grammar, with a sub-agent."""
    messages = [{"role": "user", "content": row["prompt"][-1]["content"]}]
    messages.append(await ask(client, messages))
    more = [[*messages, {"role": "user", "content": each}] for each in ("a", "b")]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no", "maybe"]}}}
    said = await asyncio.gather(
        ask(client, more[0]),
        ask(client, more[1], response_format=form),
        ask(client, [{"role": "user", "content": "sub"}]),
    )
    return float(sum(map(len, (each["content"] for each in said))) % 3)
'''
SHORT = ("--num-steps", "2", "--evaluate.num-prompts", "0", "--noise.schedule", "none")
EXACT = ("--engine.exact", "--engine.max-num-seqs", "16")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=256)
    (folder / "my.py").write_text(AGENT)
    return folder


def arguments(files, out):
    given = tiny_run.options(files, out)
    at = given.index("--task.rewards")
    del given[at : at + 2]
    agent = ("--agent", f"{files / 'my.py'}:agent")
    return ["train", "demo_long", *given, *agent, *SHORT, *EXACT]


def finish(files, out):
    process = tiny_run.started(*tiny_run.QERL, *arguments(files, out))
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr


def outcome(out):
    """All metrics but times, the episodes, and the adapter."""
    metrics = [
        {k: v for k, v in line.items() if not is_timing(k) and k != "crc32"}
        for line in read_lines(out / "metrics.jsonl")
    ]
    samples = [
        {key: value for key, value in line.items() if key in ("step", "turns", "reward", "num_tokens")}
        for line in read_lines(out / "samples.jsonl")
    ]
    for each in samples:  # requests beside each other are shown in the order of their arrival
        each["turns"] = sorted((turn["role"], turn["content"]) for turn in each["turns"])
    (adapter,) = (out / "checkpoints").glob("*000002/**/adapter_model.safetensors")
    return metrics, samples, hashlib.sha256(adapter.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def unbroken(files):
    out = files / "unbroken"
    finish(files, out)
    return outcome(out)


def test_sampler_and_learner_agree_to_the_bit_under_a_grammar_too(unbroken):
    metrics, _, _ = unbroken
    assert [step["mismatch_max"] for step in metrics] == [0.0] * 2
    assert all(step["restricted_tokens"] > 0 and step["grad_norm"] > 0 for step in metrics)


def test_a_run_killed_in_the_middle_of_a_step_ends_as_one_that_was_not(files, unbroken):
    out = files / "killed"
    tiny_run.kill_in_step(1, *arguments(files, out))
    assert len(list(read_lines(out / "metrics.jsonl"))) == 1
    finish(files, out)
    assert json.dumps(outcome(out)) == json.dumps(unbroken)
