"""`qerl train --agent`: a run learns from an agent's episodes, is killed, resumed and divided among ranks."""

import json
import re

import pytest

import tiny_run
from qerl.cli.main import command
from qerl.errors import UserError
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from training.ranks import StartedRanks

pytest.importorskip("starlette")
pytest.importorskip("openai")
SHORT = ("--num-steps", "4", "--evaluate.num-prompts", "0", "--noise.schedule", "none")
AGENT = """
async def agent(client, row):
    messages = [{"role": "user", "content": row["prompt"][-1]["content"]}]
    even = 0
    for _ in range(2):
        ids = {"return_token_ids": True}
        got = await client.chat.completions.create(model="any", messages=messages, extra_body=ids)
        even += got.choices[0].token_ids[0] % 2 == 0
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "again"}]
    if row["answer"] == "7":
        raise ValueError("seven")
    return {"reward": even / 2, "even": even}


def helper():
    return 1.0


class Made:
    pass
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=256)
    (folder / "my.py").write_text(AGENT)
    return folder


def arguments(files, out, *more):
    given = tiny_run.options(files, out)
    at = given.index("--task.rewards")
    del given[at : at + 2]
    return [
        *tiny_run.QERL,
        "train",
        "demo_long",
        *given,
        "--agent",
        f"{files / 'my.py'}:agent",
        *SHORT,
        *more,
    ]


def finish(process):
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout


def metrics(out):
    lines = list(read_lines(out / "metrics.jsonl"))
    return [{key: value for key, value in line.items() if not is_timing(key)} for line in lines]


@pytest.fixture(scope="module")
def unbroken(files):
    out = files / "unbroken"
    finish(tiny_run.started(*arguments(files, out)))
    return out


def test_a_run_learns_from_episodes_and_tells_of_broken_ones(unbroken, files):
    steps = metrics(unbroken)
    assert len(steps) == 4 and all(step["turns"] == 2 for step in steps)
    assert all(step["learned_tokens"] <= step["sampled_tokens"] and step["grad_norm"] > 0 for step in steps)
    broken = sum(step["num_failed_episodes"] for step in steps)
    assert broken == sum(step["num_failed_rewards"] for step in steps) and broken % 4 == 0
    assert all(0 <= step["agent_even"] <= 2 for step in steps)
    assert all(step["mismatch_abs"] < 1e-3 for step in steps if step["sigma"] == 0)
    samples = list(read_lines(unbroken / "samples.jsonl"))
    assert {each["role"] for sample in samples for each in sample["turns"]} == {"user", "assistant"}
    assert {sample["num_tokens"] > 0 for sample in samples} == {True}


def test_a_run_of_which_most_episodes_fail_ends_with_an_error(files):
    path = files / "fails.py"
    path.write_text(AGENT.replace('if row["answer"] == "7"', "if got.choices[0].token_ids[0] % 4"))
    given = arguments(files, files / "fails")
    given[given.index("--agent") + 1] = f"{path}:agent"
    process = tiny_run.started(*given)
    _, errors = process.communicate(timeout=120)
    wanted = r"\d+ of \d+ episodes have failed: .*raised ValueError: agent: seven"
    assert process.returncode == 1 and re.search(wanted, errors.strip().splitlines()[-1]), errors


def first_step(out):
    """Return the model's answers in the first step: later ones depend on the last bits of its logprobs, and
    so on which requests happened to be computed together."""
    return [sample["text"] for sample in read_lines(out / "samples.jsonl") if sample["step"] == 0]


def test_a_killed_run_goes_on(files, unbroken):
    out = files / "killed"
    tiny_run.kill_in_step(2, *arguments(files, out)[len(tiny_run.QERL) :])
    assert [step["step"] for step in metrics(out)] == [0, 1]
    finish(tiny_run.started(*arguments(files, out)))
    assert [step["step"] for step in metrics(out)] == list(range(4))
    assert first_step(out) == first_step(unbroken)
    assert metrics(out)[0]["grad_norm"] == pytest.approx(metrics(unbroken)[0]["grad_norm"], rel=1e-4)


def test_two_ranks_have_an_endpoint_each_and_make_the_same_episodes(files, unbroken):
    out = files / "ranks"
    finish(StartedRanks(2, *arguments(files, out, "--num-steps", "2")))
    assert len(metrics(out)) == 2 and first_step(out) == first_step(unbroken)
    ours, theirs = metrics(out)[0], metrics(unbroken)[0]
    for name in ("reward", "turns", "sampled_tokens", "num_failed_episodes", "agent_even"):
        assert ours[name] == theirs[name]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_ray_worker_has_an_endpoint_and_makes_the_same_episodes(files, unbroken, ray_address):
    """Step 1 is requested with the version that step 0 learns from."""
    out = files / "ray"
    more = ("--num-steps", "2", "--ray", ray_address, "--ray.max-staleness", "1")
    finish(tiny_run.started(*arguments(files, out, *more)))
    assert len(metrics(out)) == 2 and first_step(out) == first_step(unbroken)
    assert [step["staleness"] for step in metrics(out)] == [0, 1]
    ours, theirs = metrics(out)[0], metrics(unbroken)[0]
    for name in ("reward", "turns", "sampled_tokens", "num_failed_episodes", "agent_even"):
        assert ours[name] == theirs[name]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert "raised ValueError: agent: seven" in (out / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--algo.branching", "deep"], "set `agent.deterministic = True` if the same row, seed and answers"),
        (["--noise.scope", "sample"], "an agent does not work with noise.scope sample: set it to step"),
        (["--sample.max-tokens", "9000"], "sample.max_tokens must be under agent.context_tokens (8192)"),
        (["--agent", "no.py:agent"], "agent.function no.py:agent: no such file"),
        (["--agent", "agent"], "agent.function: 'agent' is neither module:function nor file.py:function"),
        (["--agent", "{files}/my.py:agents"], "has no 'agents'; did you mean agent?"),
        (["--agent", "{files}/my.py:helper"], "helper takes neither client nor base_url"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line(files, tmp_path, more, line):
    given = [each.format(files=files) for each in more]
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        command(arguments(files, tmp_path / "run", *given)[len(tiny_run.QERL) :])
    assert "\n" not in str(caught.value)


def test_eval_says_that_it_runs_no_agent(unbroken):
    with pytest.raises(UserError, match="its agent's, which eval does not run"):
        command(["eval", str(unbroken)])


def test_check_imports_the_agent(files, tmp_path, capsys):
    given = arguments(files, tmp_path / "run")[len(tiny_run.QERL) + 1 :]
    command(["check", *given, "--json"])
    findings = {each["part"]: each["text"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "can be imported" in findings["functions"] and "return value is the reward" in findings["reward"]
