"""`qerl train --agent` learns a small task through each client: the reward of a tiny model rises.

The model has to say true, where the schema of its answer, or of a tool's argument, also allows false.
"""

import json
import os
import shutil
import statistics

import pytest

import tiny_run
from qerl.tracking.json_lines import read_lines

pytest.importorskip("starlette")
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


async def with_openai_agents(client, row):
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def judge(is_big: bool) -> str:
        return "big" if is_big else "small"

    helper = agents.Agent(
        name="judge",
        tools=[judge],
        tool_use_behavior="stop_on_first_tool",
        model=agents.OpenAIChatCompletionsModel(model="policy", openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="required"),
    )
    result = await agents.Runner.run(helper, "5?")
    return float(result.final_output == "big")


async def with_langgraph(base_url, api_key, row):
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(state):
        return {"messages": [await model.bind(response_format=FORMAT).ainvoke(state["messages"])]}

    def is_right(state):
        return END if state["messages"][-1].content == "true" or len(state["messages"]) > 3 else "again"

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("again", lambda state: {"messages": [("user", "no")]})
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", is_right, ["again", END])
    graph.add_edge("again", "ask")
    state = await graph.compile().ainvoke({"messages": [("user", row["prompt"][-1]["content"])]})
    return float(len(state["messages"]) == 2)  # right at once


def with_smolagents(base_url, api_key, row):
    import smolagents

    class Answer(smolagents.Tool):
        name = "final_answer"
        description = "Ends."
        inputs = {"is_big": {"type": "boolean", "description": "whether it is"}}
        output_type = "boolean"

        def forward(self, is_big):
            return is_big

    agent = smolagents.ToolCallingAgent(
        tools=[Answer()],
        model=smolagents.OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key),
        prompt_templates={**smolagents.EMPTY_PROMPT_TEMPLATES, "system_prompt": "Answer."},
        max_steps=1,
        verbosity_level=0,
    )
    return float(agent.run(row["prompt"][-1]["content"]) is True)
"""
SHORT = ["--num-steps", "8", "--num-prompts", "2", "--num-generations", "8", "--learn.learning-rate", "0.02"]
PACKAGES = {"openai_agents": "agents", "langgraph": "langgraph", "smolagents": "smolagents"}


def require(name):
    """Skip the test where the client is not installed."""
    if name == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    module = pytest.importorskip(PACKAGES.get(name, "openai"))
    if name == "openai_agents" and not hasattr(module, "Runner"):  # the folder of these tests has this name
        pytest.skip("openai-agents is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai", "curl", *PACKAGES])
def test_the_reward_of_an_agent_rises(name, tmp_path):
    require(name)
    tiny_run.write_files(tmp_path, max_positions=2048)
    (tmp_path / "my.py").write_text(AGENT)
    more = ["--agent", f"{tmp_path / 'my.py'}:with_{name}"]
    more += ["--sample.max-tokens", "120"] if name in ("openai_agents", "smolagents") else []
    rewards = train(tmp_path, *SHORT, *more)
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-2:])
    print(f"{name}: reward of the first two steps {first:.2f}, of the last two {last:.2f}")
    assert len(rewards) == 8 and last > first + 0.1


def train(folder, *more):
    """Return the mean reward of each step."""
    given, out = tiny_run.options(folder, folder / "run"), folder / "run"
    at = given.index("--task.rewards")
    del given[at : at + 2]
    given += ["--noise.schedule", "none", "--evaluate.num-prompts", "0", "--checkpoint.every", "100", *more]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given)
    _, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    return [step["reward"] for step in read_lines(out / "metrics.jsonl")]


TASKSET = """
import verifiers.v1 as vf

__all__ = ["BigTaskset"]


class BigTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_true(self, trace) -> float:
        return float(trace.last_reply == "true")


class BigTaskset(vf.Taskset[BigTask, vf.TasksetConfig]):
    def load(self):
        for i in range(40):
            yield BigTask(vf.TaskData(prompt=f"Is {i} big?"), self.config.task)
"""


@pytest.mark.slow
def test_the_reward_of_an_environment_of_verifiers_rises(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    tiny_run.write_files(tmp_path, max_positions=2048)
    (tmp_path / "big_taskset.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    form = {"type": "json_schema", "json_schema": {"name": "is_big", "schema": {"type": "boolean"}}}
    options = {"agent": {"sampling": {"response_format": form}}}
    more = ["--env", "verifiers:big_taskset", "--task.env-options", json.dumps(options)]
    rewards = train(tmp_path, *SHORT, *more)
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-2:])
    print(f"verifiers: reward of the first two steps {first:.2f}, of the last two {last:.2f}")
    assert len(rewards) == 8 and last > first + 0.1
