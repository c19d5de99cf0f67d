"""Agents of other packages: each does a small task with the tiny model, and what it did is recorded."""

import subprocess
import sys
from pathlib import Path

import pytest
from agent_episodes import load_tiny, playing

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
ROW = {"prompt": [{"role": "user", "content": "Is 3 big?"}], "answer": "7"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), max_positions=8192)


def test_the_example_of_the_repository_runs(model):
    found = {}
    exec(compile((ROOT / "examples" / "agent_openai.py").read_text(), "agent_openai.py", "exec"), found)
    with playing(model, found["agent"]) as play:
        (group,) = play(ROW)
    for sample in group.samples_G:
        assert sample.failure is None and sample.reward == 0.0 and sample.episode.metrics == {"hints": 1.0}
        assert sample.episode.num_turns == 2 and len(sample.episode.parts) == 1


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
    with playing(model, in_a_subprocess) as play:
        (group,) = play(ROW)
    for sample in group.samples_G:
        (part,) = sample.episode.parts
        assert sample.failure is None and sample.reward > 0 and len(part.samples_G[0].environment_spans) == 1


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
        result = await agents.Runner.run(first, row["prompt"][-1]["content"], max_turns=4)
    return {"reward": 1.0, "is_second": float(result.last_agent is second), "items": len(result.new_items)}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_call_tools_and_hand_off(model, api):
    if not hasattr(pytest.importorskip("agents"), "Runner"):  # the folder of these tests has this name too
        pytest.skip("openai-agents is not installed")
    with playing(model, with_openai_agents) as play:
        rows = [ROW | {"api": api, "does": does} for does in ("tool", "handoff")]
        tool, handoff = (group.samples_G[0] for group in play(*rows, num_samples=1, max_tokens=120))
    assert tool.failure is None and handoff.failure is None, (tool.failure, handoff.failure)
    assert len(tool.episode.parts) == 1 and tool.episode.num_turns == 2 and tool.episode.num_tool_calls == 1
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
    with playing(model, with_smolagents) as play:
        (group,) = play(ROW, num_samples=1, max_tokens=200)
    (sample,) = group.samples_G
    assert sample.failure is None and sample.episode.num_turns >= 1 and sample.reward == 1.0


def test_a_graph_of_langgraph_is_one_conversation(model):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    found = {}
    exec(compile((ROOT / "examples" / "agent_langgraph.py").read_text(), "agent_langgraph.py", "exec"), found)
    with playing(model, found["agent"]) as play:
        (group,) = play(ROW)
    for sample in group.samples_G:
        assert sample.failure is None and sample.reward == 0.0 and sample.episode.metrics == {"hints": 1.0}
        assert sample.episode.num_turns == 2 and len(sample.episode.parts) == 1
