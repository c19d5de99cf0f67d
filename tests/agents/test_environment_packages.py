"""`--env verifiers:NAME` and `openenv:PLACE`, with stand-ins that have the packages' interfaces
(test_real_environments.py has the packages)."""

import asyncio
import json
import os
import sys
import types

import pytest
from agent_episodes import load_tiny, playing

import tiny_run
from qerl.cli import main
from qerl.cli.train import read_recipe
from qerl.config import AgentConfig, RunConfig, TaskConfig
from qerl.errors import UserError
from qerl.serve.agents.function import with_absolute_paths
from qerl.serve.agents.openenv import OpenEnvAgent, action_of
from qerl.serve.agents.verifiers import VerifiersAgent, put_uv_on_path
from qerl.tasks import env_packages
from qerl.tasks.rows.table import open_rows

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

SERVER = """
import time

from fastapi import FastAPI
from fastapi.responses import JSONResponse

app, games = FastAPI(), {}


@app.get("/health")
def health():
    return {}


@app.get("/schema")
def schema():
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"action": {"title": "Guess", "type": "object", "properties": {"guess": number},
                       "required": ["guess"], "additionalProperties": False}}


@app.post("/{game}/reset")
def reset(game: str, body: dict):
    games[game] = [body["seed"], 0]
    return {"observation": {"say": "begin"}, "reward": None, "done": False}


@app.post("/{game}/step")
def step(game: str, body: dict):
    seed, turn = games[game][0], games[game][1] + 1
    games[game][1] = turn
    if seed == 13:
        return JSONResponse({}, 500)
    if seed == 17:
        time.sleep(3)
    return {"observation": {"turn": turn}, "reward": 0.25 * (seed + 1), "done": turn == 2}
"""


class HttpSession:
    """GenericEnvClient's interface over plain requests; refuses a second session while the first is open."""

    open_ones = 0

    def __init__(self, base_url, message_timeout_s=60.0):
        import httpx

        self._http, self._is_open = httpx.AsyncClient(base_url=f"{base_url}/{id(self)}", timeout=60.0), False
        self._timeout_s = message_timeout_s

    async def connect(self):
        if HttpSession.open_ones >= 1:
            raise RuntimeError("Server error: at capacity (code: CAPACITY_REACHED)")
        HttpSession.open_ones, self._is_open = HttpSession.open_ones + 1, True

    async def state(self):
        return {}

    async def reset(self, **arguments):
        return await self._post("reset", arguments)

    async def step(self, action):
        return await self._post("step", action)

    async def _post(self, what, body):
        async with asyncio.timeout(self._timeout_s):
            reply = await self._http.post(what, json=body)
        reply.raise_for_status()
        return types.SimpleNamespace(**reply.json())

    async def close(self):
        HttpSession.open_ones -= self._is_open
        self._is_open = False
        await self._http.aclose()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), max_positions=4096)


def open_env(place, **options):
    return TaskConfig(name=f"openenv:{place}", env_options=json.dumps(options), num_rows=2)


def test_an_openenv_server_is_started_and_its_rewards_are_added(model, tmp_path, monkeypatch):
    (tmp_path / "guessing.py").write_text(SERVER)
    monkeypatch.setitem(sys.modules, "openenv", types.SimpleNamespace(GenericEnvClient=HttpSession))
    agent = OpenEnvAgent(open_env(tmp_path / "guessing.py:app", max_turns=5, structured=True))
    rows = [{"prompt": "a", "reset": {"seed": seed}} for seed in (0, 1, 13)]
    with playing(model, agent) as play:
        groups = play(*rows, max_tokens=40)
    for group, reward in zip(groups[:2], (0.5, 1.0), strict=True):
        for sample in group.samples_G:
            assert sample.failure is None and sample.reward == reward
            assert sample.episode.num_turns == 2 and len(sample.episode.parts) == 1
            assert sample.episode.metrics == {"refused_actions": 0.0, "done": 1.0}
    for sample in groups[2].samples_G:
        assert sample.failure[0] == "raised HTTPStatusError" and sample.reward is None


def test_an_environment_that_does_not_answer_in_time_costs_its_episode(model, tmp_path, monkeypatch):
    (tmp_path / "guessing.py").write_text(SERVER)
    monkeypatch.setitem(sys.modules, "openenv", types.SimpleNamespace(GenericEnvClient=HttpSession))
    agent = OpenEnvAgent(open_env(tmp_path / "guessing.py:app", structured=True), tool_timeout_s=1.0)
    rows = [{"prompt": "a", "reset": {"seed": seed}} for seed in (17, 0)]
    with playing(model, agent) as play:
        late, fine = play(*rows, num_samples=1, max_tokens=40)
    cause, message = late.samples_G[0].failure
    assert cause == "over the tool's deadline" and late.samples_G[0].reward is None
    assert message.endswith("the environment did not answer after 1 s")
    assert fine.samples_G[0].failure is None and fine.samples_G[0].reward == 0.5


def test_an_answer_that_is_no_action_is_told_so(model, tmp_path, monkeypatch):
    (tmp_path / "guessing.py").write_text(SERVER)
    monkeypatch.setitem(sys.modules, "openenv", types.SimpleNamespace(GenericEnvClient=HttpSession))
    agent = OpenEnvAgent(open_env(tmp_path / "guessing.py:app", max_turns=3))
    with playing(model, agent) as play:
        (group,) = play({"prompt": "a", "reset": {"seed": 0}}, num_samples=1, max_tokens=4)
    (sample,) = group.samples_G
    assert sample.reward == 0.0 and sample.episode.metrics == {"refused_actions": 3.0, "done": 0.0}


def test_an_action_is_an_object_or_the_text_of_the_only_field():
    schema = {"properties": {"message": {"type": "string"}}, "required": ["message"]}
    assert action_of('so {"message": "a"} it is', schema) == {"message": "a"}
    assert action_of(" hello ", schema) == {"message": "hello"}
    assert action_of('{"other": 1}', schema) is None and action_of(" ", schema) is None
    two = {"properties": {}, "required": ["a", "b"]}
    assert action_of("hello", two) is None and action_of('{"a": 1, "b": 2}', two) == {"a": 1, "b": 2}


class Environment:
    """verifiers' Env: two turns a task, rewards on the trace of each seat."""

    def __init__(self, options):
        self.options, self.is_serving = options, False
        say = ("hello", "bad", "aside")
        self.taskset = [types.SimpleNamespace(data=types.SimpleNamespace(prompt_text=t, name=t)) for t in say]

    def serving(self):
        import contextlib

        @contextlib.asynccontextmanager
        async def serve():
            self.is_serving = True
            yield
            self.is_serving = False

        return serve()

    async def run_episode(self, task, context):
        assert self.is_serving
        key, client = os.environ[context.client.api_key_var], context.client
        messages = [{"role": "user", "content": task.data.prompt_text}]
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=key, max_retries=0) as http:
            for _ in range(2):
                got = await http.chat.completions.create(model=context.model, messages=messages)
                messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "on"}]
        is_bad = task.data.prompt_text == "bad"
        error = types.SimpleNamespace(type="TaskError", message="the world has ended")
        seat = types.SimpleNamespace(
            trainable=task.data.prompt_text != "aside",
            name="user",
            config=types.SimpleNamespace(client=client),
        )
        trace = types.SimpleNamespace(
            agent=seat,
            reward=1.5,
            rewards={"right": types.SimpleNamespace(value=1.0)},
            metrics={"length": 2.0},
            last_error=error if is_bad else None,
        )
        return types.SimpleNamespace(ok=not is_bad, errors=[], traces=[trace])


class SeatConfig:
    pass


@pytest.fixture
def stand_in(monkeypatch):
    field = types.SimpleNamespace(default=SeatConfig())
    module = types.SimpleNamespace(
        AgentConfig=SeatConfig,
        env_config_type=lambda taskset, env: types.SimpleNamespace(model_fields={"player": field}),
        default_harness_id=lambda taskset: "bash",
        resolve_env_config=lambda options: options,
        load_environment=Environment,
        EvalClientConfig=types.SimpleNamespace,
        ModelContext=types.SimpleNamespace,
        SamplingConfig=types.SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    monkeypatch.setattr(env_packages, "require_package", lambda name: None)
    env_packages.verifiers_tasks.cache_clear()
    yield TaskConfig(name="verifiers:worlds", env_options='{"player": {"max_turns": 3}}')
    env_packages.verifiers_tasks.cache_clear()


def test_verifiers_own_rewards_are_the_samples(model, stand_in):
    rows, held_out = open_rows(stand_in)
    assert held_out is None and rows.num_rows == 3 and rows.get(1) == {"prompt": "bad", "task": 1}
    with playing(model, VerifiersAgent(stand_in)) as play:
        fine, bad, aside = play(*map(rows.get, range(3)))
    for sample in fine.samples_G:
        assert sample.failure is None and sample.reward == 1.5 and sample.episode.num_turns == 2
        assert sample.episode.metrics == {"right": 1.0, "length": 2.0}
    assert all("TaskError: the world has ended" in sample.failure[1] for sample in bad.samples_G)
    assert all("the seat user is not trained" in sample.failure[1] for sample in aside.samples_G)
    assert not [name for name in os.environ if name.startswith("QERL_") and name.endswith("API_KEY")]


def test_open_seats_get_the_chat_loop_in_a_subprocess_and_other_options_stay(stand_in):
    options = env_packages.verifiers_environment(stand_in).options
    seat = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}, "max_turns": 3}
    assert options == {"taskset": {"id": "worlds"}, "player": seat}


def test_harnesses_get_the_deadline_of_a_tool_unless_their_options_have_one(stand_in, monkeypatch):
    def harness(options="{}"):
        config = TaskConfig(name="verifiers:worlds", env_options=options)
        return env_packages.verifiers_environment(config, 7.5).options["player"]["harness"]

    assert harness() == {"id": "null", "tool_timeout": 7.5}
    assert harness('{"player": {"harness": {"id": "rlm"}}}') == {"id": "rlm", "tool_timeout": 7.5}
    assert harness('{"player": {"harness": {"tool_timeout": 60}}}')["tool_timeout"] == 60
    monkeypatch.setattr(sys.modules["verifiers.v1"], "default_harness_id", lambda taskset: "own")
    assert harness() == {"id": "own", "tool_timeout": 7.5}


def test_the_uv_beside_the_interpreter_is_found(tmp_path, monkeypatch):
    (tmp_path / "uv").write_text("#!/bin/sh")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    put_uv_on_path()
    assert os.environ["PATH"] == f"/nowhere{os.pathsep}{tmp_path}"
    put_uv_on_path()  # it is there now
    assert os.environ["PATH"] == f"/nowhere{os.pathsep}{tmp_path}"


def test_env_is_short_for_the_task_and_the_agent():
    _, _, options = read_recipe(["--env", "verifiers:worlds"], "train")
    assert options == ["--task.name=verifiers:worlds", "--agent.function=verifiers:worlds"]
    with pytest.raises(UserError, match="an environment is verifiers:NAME or openenv:PLACE"):
        read_recipe(["--env", "gym:a"], "train")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openenv:games/app.py:app", "openenv:{here}/games/app.py:app"),
        ("openenv:games.app:app", "openenv:games.app:app"),
        ("openenv:http://localhost:8000", "openenv:http://localhost:8000"),
        ("verifiers:worlds", "verifiers:worlds"),
    ],
)
def test_a_worker_in_another_folder_finds_the_file_of_an_environment(name, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = RunConfig(task=TaskConfig(name=name), agent=AgentConfig(function=name))
    there, found = with_absolute_paths(given), found.format(here=tmp_path)
    assert (there.task.name, there.agent.function) == (found, found)
    own = RunConfig(task=TaskConfig(name="rows.jsonl"), agent=AgentConfig(function="my.py:agent"))
    assert with_absolute_paths(own).agent.function == f"{tmp_path}/my.py:agent"
    assert with_absolute_paths(own).task.name == "rows.jsonl"  # the learner's process reads the rows


def run_without(package, *arguments):
    """Run qerl where a package cannot be imported; return what it writes to stderr."""

    def work():
        for name in [name for name in sys.modules if name.startswith(("qerl.serve", f"{package}."))]:
            del sys.modules[name]
        sys.modules[package] = None
        sys.argv = ["qerl", *map(str, arguments)]
        main.main()

    process = tiny_run.Forked(work)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    return stderr


@pytest.mark.parametrize(
    ("package", "given", "line"),
    [
        ("verifiers", ("--env", "verifiers:a"), "verifiers:a needs verifiers: pip install 'qerl[verifiers]'"),
        ("openenv", ("--env", "openenv:a:b"), "openenv:a:b needs openenv: pip install 'qerl[openenv]'"),
        ("openai", ("--agent", "{my}:agent"), "an agent needs openai: pip install openai"),
        ("starlette", ("--agent", "{my}:agent"), "an agent needs starlette: pip install starlette"),
        ("uvicorn", ("--agent", "{my}:agent"), "an agent needs uvicorn: pip install uvicorn"),
    ],
    ids=["verifiers", "openenv", "openai", "starlette", "uvicorn"],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(package, given, line, tmp_path):
    (tmp_path / "my.py").write_text("def agent(client):\n    return 1.0\n")
    given = [each.format(my=tmp_path / "my.py") for each in given]
    # It is told before a model is fetched: an id of a hub that nobody has.
    out = ("--out", tmp_path / "run", "--model", "nobody/no-model")
    assert run_without(package, "train", "demo_long", *given, *out) == f"qerl: {line}\n"
