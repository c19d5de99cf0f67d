"""The study of agents: its calculator, its agents with a scripted model, a run with a tiny one."""

import asyncio
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import tiny_run
from qerl.errors import RunError
from qerl.types import Sample
from studies import calculator, catalog_agents
from studies.catalog_agents import FRAMEWORKS, agents, failure_notes, play, problems
from studies.study import with_fields

ROW = {"prompt": [{"role": "user", "content": "What is 12 * 34 + 5?"}], "answer": "413"}
MODULES = {"openai_agents": "agents.run", "langgraph": "langgraph.graph", "pydantic_ai": "pydantic_ai"}


@pytest.mark.parametrize(("text", "value"), [("12 * 34 + 5", 413), (" -(3 - 10)", 7), ("2*(3+4)", 14)])
def test_a_sum_has_its_value(text, value):
    assert calculator.evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "2 ** 9", "1.5 * 2", "a + 1", "1 +", "f(1)", "True + 1", "1 < 2", "1 + " * 60 + "1", "(" * 90],
)
def test_any_other_text_is_an_error_that_the_model_reads(text):
    tool = calculator.Calculator()
    assert tool.calculate(text).startswith("Error: ")
    assert tool.score("413", ROW) == {"reward": 0.5, "is_valid": False, "is_right": True}


def test_the_last_number_of_the_final_answer_counts():
    tool = calculator.Calculator()
    tool.calculate("12 * 34 + 5")
    assert [tool.score(text, ROW)["reward"] for text in ("408 + 5 = 413.", "413 or 4", "4,13", "")] == [
        1.0,
        0.5,
        1.0,
        0.5,
    ]


def test_training_and_held_out_problems_differ():
    train, test = ({row["prompt"] for row in problems(num, seed)} for seed, num in enumerate((2048, 256)))
    assert len(train) > 2040 and len(test) == 256 and not train & test


class Script(BaseHTTPRequestHandler):
    """Answers with the class's call, and after a tool's result with that; notes whether tools are offered."""

    call: dict[str, str]
    offers: list[bool]

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = asked["messages"][-1]
        self.offers.append(bool(asked.get("tools")))
        message = {"role": "assistant", "content": f"It is {last['content']}"}
        if last["role"] != "tool":
            call = {"id": "call_1", "type": "function", "function": self.call}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        written = json.dumps(body | {"usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *arguments):
        pass


def played(name, call):
    """Return what the agent returns, and for each request whether it offered the tool."""
    import openai

    script = type("OneScript", (Script,), {"call": call, "offers": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), script) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"

        async def play():
            if name == "langgraph":
                return await calculator.with_langgraph(url, "key", "policy", ROW)
            async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
                return await getattr(calculator, f"with_{name}")(client, ROW)

        try:
            return asyncio.run(play()), script.offers
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_agent_counts_calls_that_gave_a_result(name):
    pytest.importorskip("openai")
    pytest.importorskip(MODULES[name])
    right = {"name": "calculate", "arguments": '{"expression": "12 * 34 + 5"}'}
    assert played(name, right) == ({"reward": 1.0, "is_valid": True, "is_right": True}, [True, False])
    for wrong in (
        {"name": "divide"},
        {"arguments": '{"expression": "12 ** 34"}'},
        {"arguments": '{"x": 3}'},
        {"arguments": '{"expression": '},
    ):
        returned, offers = played(name, right | wrong)
        assert returned["is_valid"] is False and all(offers)


@pytest.mark.parametrize("num_failed", [0, 12, 13])
def test_an_evaluation_with_too_many_failed_episodes_is_no_figure(num_failed):
    """Too many are more than 5 %; up to that a note says why."""
    failures = [("raised OSError", f"agent: {i}") if i < num_failed else None for i in range(256)]
    fields = {"tokens_T": [], "logprobs_T": [], "text": "", "finish": "stop", "version": 0}
    episodes = [Sample(**fields, failure=failure) for failure in failures]
    note = f"evaluation: {num_failed} of 256 episodes have failed, the first: raised OSError: agent: 0"
    if num_failed > 12:
        with pytest.raises(RunError, match=f"{note}; with more than 5%"):
            failure_notes(episodes, "evaluation")
    else:
        assert failure_notes(episodes, "evaluation") == ([note] if num_failed else [])


AGENT = """
async def agent(client, row):
    answer = await client.chat.completions.create(model="policy", messages=row["prompt"])
    return {"reward": 0.5, "is_valid": 1.0, "is_right": float(len(answer.choices[0].message.content) > 10**6)}
"""


def tiny_job(arm, agent, tmp_path, monkeypatch):
    """A job of the study with a tiny model and this agent's code."""
    monkeypatch.setattr(catalog_agents, "_ROWS", {"train": 4, "test": 3})
    tiny_run.write_model(tmp_path / "Qwen2.5-Coder-0.5B-Instruct", max_positions=256)
    (tmp_path / "my.py").write_text(agent)
    tiny = {
        "num_steps": 1,
        "num_prompts": 2,
        "num_generations": 2,
        "adapter.rank": 4,
        "sample.max_tokens": 8,
        "engine.kv_cache_gb": 0.1,
        "engine.max_num_seqs": 8,
        "agent.context_tokens": 256,
    }
    study = agents()
    study = dataclasses.replace(study, base=with_fields(study.base, tiny), files=tmp_path)
    task = dataclasses.replace(study.tasks[0], fields={"agent.function": f"{tmp_path / 'my.py'}:agent"})
    job = study.job(task, {each.name: each for each in study.arms}[arm], 0, None, tmp_path / "runs")
    job.folder.mkdir(parents=True)
    return study, job


@pytest.mark.parametrize("arm", ["before", "after"])
def test_a_line_has_the_figures_of_its_arm(arm, tmp_path, monkeypatch):
    pytest.importorskip("starlette")
    pytest.importorskip("openai")
    study, job = tiny_job(arm, AGENT, tmp_path, monkeypatch)
    line = play(job)
    shown = {metric.key for metric in study.metrics}
    after_only = {"reward_first", "reward_last", "train_s", "peak_gb"}
    assert shown - (set() if arm == "after" else after_only) <= set(line["final"])
    assert line["final"]["valid"] == line["final"]["valid_greedy"] == 1.0 and line["final"]["right"] == 0.0
    assert line["notes"] == []
    assert [point["agent_is_valid"] for point in line["curve"]] == ([1.0] if arm == "after" else [])


def test_failed_episodes_stop_the_study_with_their_reason(tmp_path, monkeypatch):
    pytest.importorskip("starlette")
    pytest.importorskip("openai")
    failing = "async def agent(client, row):\n    raise OSError('no place')\n"
    _, job = tiny_job("before", failing, tmp_path, monkeypatch)
    with pytest.raises(RunError, match=r"evaluation: 3 of 3 episodes have failed, the first: raised OSError"):
        play(job)


def test_each_claim_says_beside_it_what_the_model_does_at_temperature_0():
    """An untrained model calls the tool in most greedy answers already."""
    for claim in agents().claims:
        assert claim.side_results == tuple((name, f"{claim.metric}_greedy") for name in FRAMEWORKS)
