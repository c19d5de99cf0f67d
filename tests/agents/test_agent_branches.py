"""Branches of an agent's episodes: played again up to a call of the model, and sampled from there on."""

import json
import re
from pathlib import Path

import pytest
import torch
from agent_episodes import load_tiny, noting_samples, playing, turns_of

import tiny_run
from engine.parts import packed_logprobs, request_of
from qerl.cli.main import command
from qerl.config import AgentConfig, AlgoConfig, RunConfig, TaskConfig
from qerl.errors import UserError
from qerl.learner.minibatch import split
from qerl.serve.agents.function import find_agent
from qerl.serve.agents.rollout import AgentPool
from qerl.tracking.json_lines import read_lines
from qerl.training.rollouts.rollout import learned_parts, with_advantages
from qerl.types import Pivot, Prompt

pytest.importorskip("starlette")
pytest.importorskip("openai")
TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


async def answer(client, messages, **options):
    return (await client.chat.completions.create(model="any", messages=messages, **options)).choices[0]


def note(row, seed, number, choice):
    """Write what the client saw of a turn to the row's file."""
    logprobs = [each.logprob for each in choice.logprobs.content]
    with Path(row["file"]).open("a") as file:
        file.write(json.dumps([seed, number, choice.message.content, choice.token_ids, logprobs]) + "\n")


async def three_turns(client, row, seed):
    messages = [{"role": "user", "content": row["say"]}]
    for number in range(3):
        choice = await answer(client, messages, **TOKENS)
        note(row, seed, number, choice)
        messages += [choice.message.to_dict(), {"role": "user", "content": f"more {seed % 97}"}]
    return 1.0 + len(messages)


def branched(model, agent, rows, places, *, num_branches=2, max_tokens=8, **settings):
    """(groups, branches): of the first sample of each row, where its place-th branchable turn begins."""
    with AgentPool(agent, AgentConfig(**settings), TaskConfig()) as pool:
        engine = pool.engine(model.engine)
        prompts_P = [
            Prompt(index=i, text="", tokens_T=[1], messages=None, columns=row) for i, row in enumerate(rows)
        ]
        request = request_of(prompts_P, num_samples=2, max_tokens=max_tokens, seed=3, step=4)
        (batch,) = engine.branch_batches(request)
        groups = batch.sample()
        pivots = [
            Pivot(
                group_index=i,
                sample_index=0,
                prefix_tokens=groups[i].samples_G[0].episode.turn_starts[place],
            )
            for i, place in enumerate(places)
        ]
        return groups, batch.branch(pivots, num_branches)


@pytest.fixture(scope="module")
def conversations(model, tmp_path_factory):
    """(groups, branches, what each row's clients saw, all that the engine sampled)."""
    folder = tmp_path_factory.mktemp("seen")
    rows = [{"say": f"hello {i}", "file": str(folder / str(i))} for i in range(2)]
    with noting_samples() as sampled:
        groups, branches = branched(model, three_turns, rows, [0, 1])
    seen = [[json.loads(line) for line in Path(row["file"]).read_text().splitlines()] for row in rows]
    return groups, branches, seen, sampled


def test_a_branch_hears_its_episodes_answers_again_and_then_others(conversations):
    groups, branches, seen, _ = conversations
    for group, branch, lines, num_again in zip(groups, branches, seen, (1, 2), strict=True):
        parent = group.samples_G[0]
        (seed,) = {line[0] for line in lines[-6:]}  # the branches' own, beside that of the other sample
        own = [line[1:] for line in lines[:6] if line[0] == seed]
        again = [line[1:] for line in lines[6:]]
        assert len(own) == 3 and len(again) == 6
        for number in range(3):
            heard = [line for line in again if line[0] == number]
            assert (heard == [own[number]] * 2) == (number < num_again)
        texts = [sample.text for sample in (parent, *branch.samples_G)]
        assert len(set(texts)) == 3 and branch.prefix_tokens == parent.episode.turn_starts[num_again - 1]
        for sample in branch.samples_G:
            assert sample.failure is None and sample.reward == parent.reward and sample.episode.num_turns == 3
            said = [[m["content"] for m in each.messages if m["role"] == "user"] for each in (sample, parent)]
            assert said[0] == said[1]
            assert sample.messages[: 2 * num_again] == parent.messages[: 2 * num_again]


def test_a_branchs_record_is_what_the_engine_sampled_after_the_pivot(conversations, model):
    groups, branches, _, sampled = conversations
    recorded = []
    for group, branch, num_again in zip(groups, branches, (1, 2), strict=True):
        (parent,) = group.samples_G[0].episode.parts
        before = turns_of(parent)[num_again][0]  # the parent's prompt of the call at which it is branched
        for sample in branch.samples_G:
            (part,) = sample.episode.parts
            assert part.prompt.tokens_T == before
            turns = turns_of(part)
            assert len(turns) == 3 - num_again
            recorded += [list(turn[1:]) for turn in turns]
            (own,) = part.samples_G
            truth_TV = packed_logprobs(model.engine._decoder, part.prompt, own)
            truth_T = truth_TV[own.sampled_indices, torch.tensor(own.tokens_T)[own.sampled_indices]]
            assert own.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)
        for sample in group.samples_G:
            (part,) = sample.episode.parts
            recorded += [list(turn[1:]) for turn in turns_of(part)]
    assert sorted(recorded) == sorted(map(list, sampled))  # nothing was sampled but for the record


def test_branches_are_learned_from_with_their_weight_and_without_their_beginning(conversations):
    groups, branches, _, _ = conversations
    config = RunConfig(num_generations=2, algo=AlgoConfig(branching="deep"))
    compared = [
        *with_advantages(config.algo, config.sample, groups, [[0.0, 1.0]] * 2),
        *with_advantages(config.algo, config.sample, branches, [[1.0, 0.0]] * 2),
    ]
    parts = [part for group in compared for part in learned_parts(group)]
    assert [part.is_branch for part in parts] == [False] * 2 + [True] * 2
    assert [len(part.samples_G) for part in parts] == [2] * 4
    (whole,) = split(parts, config, device=torch.device("cpu"))
    (own,) = split(parts[:2], config, device=torch.device("cpu"))
    weights = [
        sum(float(batch.weights_C.sum()) for batch in each.with_gradient.batches(10_000))
        for each in (own, whole)
    ]
    assert weights[1] - weights[0] == pytest.approx(config.algo.deep.weight * weights[0], rel=1e-5)


def test_the_same_branches_are_sampled_twice(model, tmp_path):
    rows = [{"say": "hi", "file": str(tmp_path / "seen")}]
    first, again = (branched(model, three_turns, rows, [0])[1] for _ in range(2))
    assert [s.tokens_T for s in first[0].samples_G] == [s.tokens_T for s in again[0].samples_G]


async def counting(client, row, seed):
    """Says something else whenever it is run."""
    number = len(Path(row["file"]).read_text()) if Path(row["file"]).exists() else 0
    with Path(row["file"]).open("a") as file:
        file.write("x")
    messages = [{"role": "user", "content": "begin"}]
    for text in (str(number if row["is_other"] else 7), "end"):
        choice = await answer(client, messages)
        messages += [choice.message.to_dict(), {"role": "user", "content": text}]
    await answer(client, messages)
    return 1.0


def test_a_branch_of_an_agent_that_calls_otherwise_costs_itself(model, tmp_path):
    rows = [{"file": str(tmp_path / str(i)), "is_other": bool(i)} for i in range(2)]
    with noting_samples() as sampled:
        groups, branches = branched(model, counting, rows, [1, 1], max_concurrent=1)
    assert [s.failure for g in groups for s in g.samples_G] == [None] * 4
    assert [s.failure for s in branches[0].samples_G] == [None] * 2
    assert {s.failure[0] for s in branches[1].samples_G} == {"not deterministic"}
    assert {s.reward for s in branches[1].samples_G} == {None}
    assert len(sampled) == 4 * 3 + 2  # nothing is sampled for a branch that is none


async def ending_early(client, row):
    """Calls the model three times when it is run for the first time, and later once."""
    is_first = not Path(row["file"]).exists()
    messages = [{"role": "user", "content": "begin"}]
    for _ in range(3 if is_first else 1):
        choice = await answer(client, messages)
        messages += [choice.message.to_dict(), {"role": "user", "content": "more"}]
    if row["is_last"] or not is_first:
        Path(row["file"]).touch()
    return 1.0


def test_a_branch_that_ends_before_its_pivot_has_no_reward(model, tmp_path):
    rows = [{"file": str(tmp_path / "was"), "is_last": False}]

    async def first_sample_long(client, row, seed):
        if Path(row["file"] + str(seed)).exists():
            Path(row["file"]).touch()
        Path(row["file"] + str(seed)).touch()
        return await ending_early(client, row)

    _, (branch,) = branched(model, first_sample_long, rows, [1])
    assert {s.failure[0] for s in branch.samples_G} == {"not deterministic"}


async def rich(client, row, seed):
    """Streams, asks for two answers, calls a tool under a grammar, and has a sub-agent beside it."""
    from asyncio import gather

    schema = {"type": "object", "properties": {"at": {"enum": ["left", "right"]}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    messages = [{"role": "user", "content": "begin"}]
    stream = await client.chat.completions.create(model="any", messages=messages, stream=True, max_tokens=5)
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "two"}]
    both = await client.chat.completions.create(model="any", messages=messages, n=2, max_tokens=4)
    messages += [both.choices[1].message.to_dict(), {"role": "user", "content": "look"}]
    called = await answer(client, messages, tools=[tool], tool_choice="required", max_tokens=60)
    calls = called.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": each.id, "content": "Error: no"} for each in calls]
    messages += [called.message.to_dict(), *results, {"role": "user", "content": "on"}]
    both = [messages, [{"role": "user", "content": "sub"}]]
    await gather(*(answer(client, each, max_tokens=3) for each in both))
    await answer(client, [messages[0], {"role": "user", "content": "last"}], max_tokens=3)
    return 0.5


def test_streams_choices_tools_and_sub_agents_are_played_again(model):
    """The last call, with a history of its own, is branched: all others are heard again."""
    pytest.importorskip("llguidance")
    with noting_samples() as sampled:
        (group,), (branch,) = branched(model, rich, [{}], [-1], max_tokens=80)
    parent = group.samples_G[0]
    assert [s.failure for s in (*group.samples_G, *branch.samples_G)] == [None] * 4
    assert parent.episode.num_turns == 7 and len(sampled) == 2 * 7 + 2
    assert len(parent.episode.parts) >= 4 and parent.episode.num_tool_calls == 1
    for sample in branch.samples_G:
        (part,) = sample.episode.parts
        assert len(part.samples_G[0].tokens_T) <= 3 and sample.episode.num_turns == 7
    assert len(parent.episode.turn_starts) >= 4


async def with_top(client, row):
    """Asks for logprobs of other tokens too, which are not recorded."""
    messages = [{"role": "user", "content": "begin"}]
    for number in range(3):
        more = {"logprobs": True, "top_logprobs": 2} if number == 1 else {}
        messages += [(await answer(client, messages, **more)).message.to_dict()]
        messages += [{"role": "user", "content": "more"}]
    return 1.0


def test_no_branch_begins_after_answers_that_cannot_be_played_again(model):
    with playing(model, with_top) as play:
        (group,) = play({})
    episodes = [sample.episode for sample in group.samples_G]
    assert [each and len(each.turn_starts) for each in episodes] == [1, 1]


def test_without_the_declaration_an_agent_is_refused_in_one_line():
    def declared(client, row): ...

    vars(declared)["deterministic"] = True
    config = RunConfig(algo=AlgoConfig(branching="deep"))
    assert find_agent(config, declared) is declared
    line = "set `three_turns.deterministic = True` if the same row, seed and answers"
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        find_agent(config, three_turns)
    assert "\n" not in str(caught.value)


AGENT = """
async def agent(client, row):
    messages, even = [{"role": "user", "content": row["prompt"][-1]["content"]}], 0
    for _ in range(3):
        ids = {"return_token_ids": True}
        got = await client.chat.completions.create(model="any", messages=messages, extra_body=ids)
        even += got.choices[0].token_ids[0] % 2 == 0
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "again"}]
    return float(even >= 2)


agent.deterministic = True
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose sampler and learner must agree to the bit."""
    files = tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=256)
    (files / "my.py").write_text(AGENT)
    given = tiny_run.options(files, files / "run")
    at = given.index("--task.rewards")
    del given[at : at + 2]
    given += ["--agent", f"{files / 'my.py'}:agent", "--num-steps", "2", "--evaluate.num-prompts", "0"]
    given += ["--noise.schedule", "none", "--algo.branching", "deep", "--algo.deep.num-branches", "2"]
    command(
        ["train", "demo_long", *given, "--engine.exact", "--engine.max-num-seqs", "16", "--num-prompts", "2"]
    )
    return files / "run"


def test_a_run_branches_failed_episodes_and_learns_from_the_branches(run):
    steps = list(read_lines(run / "metrics.jsonl"))
    assert all(step["pivots"] > 0 and step["branches"] == 2 * step["pivots"] for step in steps)
    assert all(0 < step["pivot_ratio"] < 1 for step in steps)
    assert any(step.get("grad_norm", 0.0) > 0 for step in steps)
    assert [step["mismatch_max"] for step in steps] == [0.0] * 2
    samples = list(read_lines(run / "samples.jsonl"))
    branches = [each for each in samples if "prefix_tokens" in each]
    assert len(branches) == sum(step["branches"] for step in steps)
    assert {each["reward"] for each in branches} == {0.0, 1.0} and not any("failure" in s for s in samples)
