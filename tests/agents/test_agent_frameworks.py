"""Agents of other packages, and the examples: each plays with the tiny model, and the record of its tokens is
exactly what the engine sampled."""

import subprocess
import sys
from pathlib import Path

import pytest
from agent_episodes import load_tiny, noting_samples, playing, turns_of

from qerl.tasks.reward import imported

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
ROW = {"prompt": [{"role": "user", "content": "Is 3 big?"}], "answer": "7"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), max_positions=8192)


def play_recorded(model, agent, *rows, **settings):
    """Play, and return the samples of all episodes once their record is proved: each turn that the engine
    sampled is in it once, with its tokens and logprobs, and after the tokens that stand before it there."""
    with noting_samples() as sampled, playing(model, agent) as play:
        groups = play(*rows, **settings)
    samples = [sample for group in groups for sample in group.samples_G]
    assert [sample.failure for sample in samples] == [None] * len(samples)
    turns = [turn for sample in samples for part in sample.episode.parts for turn in turns_of(part)]
    assert sorted(turn[1:] for turn in turns) == sorted(sampled)
    for prompt_T, tokens_T, logprobs_T in turns:
        assert prompt_T and len(tokens_T) == len(logprobs_T) > 0
    return samples


def example(name):
    return imported(f"{ROOT / 'examples' / name}:agent", "agent")


def test_the_openai_client_alone(model):
    for sample in play_recorded(model, example("agent_openai.py"), ROW):
        assert sample.reward == 0.0 and sample.episode.metrics == {"hints": 1.0}
        assert sample.episode.num_turns == 2 and len(sample.episode.parts) == 1


def test_a_program_with_nothing_but_an_address_and_a_key(model):
    for sample in play_recorded(model, example("agent_subprocess.py"), ROW):
        assert sample.reward == 0.0 and sample.episode.num_turns == 1


CLIENT = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + sys.argv[2]}
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": "hello"}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "and?"}]
print(len(messages[1]["content"]))
"""


def in_a_subprocess(base_url, api_key, row):
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, base_url, api_key], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_a_plain_http_client_in_a_process_of_its_own(model):
    for sample in play_recorded(model, in_a_subprocess, ROW):
        (part,) = sample.episode.parts
        assert sample.reward > 0 and len(part.samples_G[0].environment_spans) == 1


async def with_openai_agents(base_url, api_key, row):
    """A tool that the model is made to call, and a hand-off to a second agent."""
    import openai

    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def judge(is_big: bool) -> str:
        return "big" if is_big else "small"

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        kind = agents.OpenAIResponsesModel if row["api"] == "responses" else agents.OpenAIChatCompletionsModel
        model = kind(model="policy", openai_client=client)
        forced = agents.ModelSettings(tool_choice="required")
        second = agents.Agent(name="second", instructions="Answer.", model=model)
        first = agents.Agent(
            name="first",
            instructions="Judge.",
            model=model,
            tools=[judge] if row["does"] == "tool" else [],
            handoffs=[second] if row["does"] == "handoff" else [],
            model_settings=forced,
        )
        ask = row["prompt"][-1]["content"]
        if row["is_stream"]:
            result = agents.Runner.run_streamed(first, ask, max_turns=4)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(first, ask, max_turns=4)
    return {"reward": 1.0, "is_second": float(result.last_agent is second), "items": len(result.new_items)}


def require_openai_agents():
    if not hasattr(pytest.importorskip("agents"), "Runner"):  # the folder of these tests has this name too
        pytest.skip("openai-agents is not installed")


def test_the_example_of_openai_agents_hands_off_and_calls_its_tool(model):
    require_openai_agents()
    samples = play_recorded(model, example("agent_openai_agents.py"), ROW, num_samples=8, max_tokens=120)
    found = {sample.episode.metrics["handed_off"]: sample for sample in samples}
    assert found[0.0].reward == 0.0 and found[1.0].reward == 0.25
    assert len(found[1.0].episode.parts) == 2 and '"add"' in found[1.0].text


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_call_tools_and_hand_off(model, api):
    require_openai_agents()
    rows = [
        ROW | {"api": api, "does": does, "is_stream": is_stream}
        for is_stream in (False, True)
        for does in ("tool", "handoff")
    ]
    played = play_recorded(model, with_openai_agents, *rows, num_samples=1, max_tokens=120)
    for tool in played[::2]:
        assert len(tool.episode.parts) == 1 and tool.episode.num_turns == 2
        assert tool.episode.num_tool_calls == 1
    for handoff in played[1::2]:
        assert handoff.episode.metrics["is_second"] == 1.0 and len(handoff.episode.parts) == 2


def with_smolagents(base_url, api_key, row):
    import smolagents

    class Judge(smolagents.Tool):
        name = "judge"
        description = "Says whether a number is big."
        inputs = {"is_big": {"type": "boolean", "description": "whether it is"}}  # noqa: RUF012
        output_type = "string"

        def forward(self, is_big):
            return "big" if is_big else "small"

    model = smolagents.OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = smolagents.ToolCallingAgent(tools=[Judge()], model=model, max_steps=2, verbosity_level=0)
    agent.run(row["prompt"][-1]["content"])
    return {"reward": 1.0, "steps": len(agent.memory.steps)}


def test_smolagents_call_tools(model):
    pytest.importorskip("smolagents")
    (sample,) = play_recorded(model, with_smolagents, ROW, num_samples=1, max_tokens=200)
    assert sample.episode.num_turns >= 1 and sample.reward == 1.0


def test_a_graph_of_langgraph_is_one_conversation(model):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    for sample in play_recorded(model, example("agent_langgraph.py"), ROW):
        assert sample.reward == 0.0 and sample.episode.metrics == {"hints": 1.0}
        assert sample.episode.num_turns == 2 and len(sample.episode.parts) == 1
