"""Environments of verifiers and OpenEnv by name, with the packages themselves, where they are installed. They
need different versions of one package, so never both."""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
from agent_episodes import load_tiny, noting_samples, playing, turns_of

from qerl.config import TaskConfig
from qerl.serve.agents.openenv import OpenEnvAgent
from qerl.serve.agents.verifiers import VerifiersAgent

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), max_positions=4096)


def open_env(place, **options):
    return TaskConfig(name=f"openenv:{place}", env_options=json.dumps(options), num_rows=2)


TASKSET = """
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def spoke(self, trace) -> float:
        if self.data.idx == 1:
            raise ValueError("no rubric")
        return float(len(trace.last_reply or "") > 0)


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for i in range(2):
            yield SumsTask(vf.TaskData(prompt=f"{i} + 1 ="), self.config.task)
"""


@pytest.mark.slow
def test_the_real_verifiers_plays_and_scores(model, tmp_path, monkeypatch):
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed")
    (tmp_path / "few_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    config = TaskConfig(name="verifiers:few_sums")
    with playing(model, VerifiersAgent(config)) as play:
        fine, bad = play({"prompt": "a", "task": 0}, {"prompt": "b", "task": 1}, num_samples=1)
    assert fine.samples_G[0].failure is None, fine.samples_G[0].failure
    assert fine.samples_G[0].reward == 0.5 and fine.samples_G[0].episode.metrics == {"spoke": 0.5}  # weighted
    assert "no rubric" in bad.samples_G[0].failure[1]


@pytest.mark.slow
def test_a_slow_tool_of_the_real_verifiers_ends_at_its_deadline(model, tmp_path, monkeypatch):
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed")
    slow = (Path(__file__).parents[2] / "examples" / "lamp_taskset.py").read_text()
    slow = slow.replace(
        'return f"the lamp', 'import time\n        time.sleep(300)\n        return f"the lamp'
    )
    (tmp_path / "slow_lamp.py").write_text(slow)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # of the tools' own process
    options = {"agent": {"max_turns": 2, "sampling": {"tool_choice": "required"}}}
    config = TaskConfig(name="verifiers:slow_lamp", env_options=json.dumps(options), num_rows=2)
    with playing(model, VerifiersAgent(config, tool_timeout_s=2.0)) as play:
        start_s = time.monotonic()
        (group,) = play({"prompt": "a", "task": 1}, num_samples=1, max_tokens=300)
        took_s = time.monotonic() - start_s
    (sample,) = group.samples_G
    assert sample.reward is None and "the environment failed: HarnessError" in sample.failure[1]
    assert took_s < 200  # also the time in which verifiers starts the tool


@pytest.mark.slow
def test_a_tool_of_the_real_verifiers_is_called_and_rewarded(model, monkeypatch):
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed")
    examples = str(Path(__file__).parents[2] / "examples")
    monkeypatch.syspath_prepend(examples)
    monkeypatch.setenv("PYTHONPATH", examples, prepend=os.pathsep)  # of the tools' own process
    options = {"agent": {"max_turns": 2, "sampling": {"tool_choice": "required"}}}
    config = TaskConfig(name="verifiers:lamp_taskset", env_options=json.dumps(options), num_rows=2)
    with noting_samples() as sampled, playing(model, VerifiersAgent(config)) as play:
        (group,) = play({"prompt": "a", "task": 1}, num_samples=1, max_tokens=300)
    (sample,) = group.samples_G
    assert sample.failure is None and sample.episode.metrics["called"] == 0.5, sample.failure
    assert sample.reward == 0.5 + sample.episode.metrics["right"]
    assert "tool: the lamp is" in sample.text and sample.episode.num_tool_calls == 1
    turns = [turn for part in sample.episode.parts for turn in turns_of(part)]
    assert sorted(turn[1:] for turn in turns) == sorted(sampled)


ECHOES = """
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Echoes(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        return Observation(done=True, reward=0.75)

    @property
    def state(self):
        return State(episode_id="0", step_count=0)


app = create_app(Echoes, Say, Observation, env_name="echoes", max_concurrent_envs=1)
"""


@pytest.mark.slow
def test_the_real_openenv_serves_sessions_one_after_the_other(model, tmp_path):
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed")
    (tmp_path / "echoes.py").write_text(ECHOES)
    with playing(model, OpenEnvAgent(open_env(tmp_path / "echoes.py:app"))) as play:
        (group,) = play({"prompt": "a", "reset": {"seed": 0}}, num_samples=2)
    assert [sample.reward for sample in group.samples_G] == [0.75, 0.75]


@pytest.mark.slow
def test_a_real_openenv_that_does_not_answer_in_time_costs_that_episode(model, tmp_path):
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed")
    slow = ECHOES.replace(
        "return Observation(done=True", "time.sleep(30)\n        return Observation(done=True"
    )
    (tmp_path / "slow.py").write_text(f"import time\n{slow}")
    with playing(model, OpenEnvAgent(open_env(tmp_path / "slow.py:app"), tool_timeout_s=2.0)) as play:
        (group,) = play({"prompt": "a", "reset": {"seed": 0}}, num_samples=1)
    (sample,) = group.samples_G
    assert sample.failure[0] == "over the tool's deadline" and sample.reward is None
    assert "did not answer after 2 s" in sample.failure[1]


FRAGILE = """
import os

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Fragile(Environment):
    turn = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed, self.turn = seed, 0
        return Observation(done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.turn += 1
        if self.turn == 2 and self.seed == 1:
            raise ValueError("the bridge has fallen")
        if self.turn == 2 and self.seed == 2:
            os._exit(7)
        return Observation(done=self.turn == 2, reward=0.25)

    @property
    def state(self):
        return State(episode_id="0", step_count=self.turn)


app = create_app(Fragile, Say, Observation, env_name="fragile", max_concurrent_envs=1)
"""


@pytest.mark.slow
def test_a_real_openenv_that_fails_in_an_episode_costs_that_episode(model, tmp_path):
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed")
    (tmp_path / "fragile.py").write_text(FRAGILE)
    rows = [{"prompt": str(seed), "reset": {"seed": seed}} for seed in range(4)]
    with playing(model, OpenEnvAgent(open_env(tmp_path / "fragile.py:app"))) as play:
        first = [group.samples_G[0] for group in play(*rows, num_samples=1)]
        later = [group.samples_G[0] for group in play(*rows[::3], num_samples=1, step=1)]
    for sample in (first[0], first[3], *later):
        assert sample.failure is None and sample.reward == 0.5 and sample.episode.num_turns == 2
    raised, ended = first[1], first[2]
    assert raised.reward is None and "the bridge has fallen" in raised.failure[1]
    assert ended.reward is None and "ended with exit code 7" in ended.failure[1]
    assert [sample.episode.num_turns for sample in (raised, ended)] == [2, 2]


@pytest.mark.slow
def test_the_environment_that_openenv_ships_is_played_turn_by_turn(model, tmp_path, monkeypatch):
    """`openenv init` writes it: it echoes a message and rewards its length."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["openenv", "init", "echoing"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module("openenv.cli.__main__").main()
    monkeypatch.chdir(tmp_path / "echoing")
    with playing(model, OpenEnvAgent(open_env("server.app:app", max_turns=3, structured=True))) as play:
        (group,) = play({"prompt": "a", "reset": {"seed": 0}}, num_samples=2, max_tokens=60)
    for sample in group.samples_G:
        assert sample.failure is None and sample.episode.num_turns == 3
        assert len(sample.episode.parts) == 1 and '"echoed_message"' in sample.text
        assert sample.episode.metrics["refused_actions"] == 3 or sample.reward > 0


@pytest.mark.slow
@pytest.mark.parametrize("game", ["WordSearch-v0", "Hangman-v0"])
def test_games_that_verifiers_ships_are_played_turn_by_turn(model, tmp_path, monkeypatch, game):
    """Their word list is one that is downloaded; here a short one takes its place."""
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("textarena") is None:
        pytest.skip("verifiers with textarena is not installed")
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    words = [f"{a}{b}{c}{d}" for a in "bcdfm" for b in "aeio" for c in "lnrst" for d in "eskt"]
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(words))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    options = {"taskset": {"game": game}, "player": {"max_turns": 3}}
    config = TaskConfig(name="verifiers:textarena", env_options=json.dumps(options), num_rows=2)
    with playing(model, VerifiersAgent(config)) as play:
        groups = play({"prompt": "a", "task": 0}, {"prompt": "b", "task": 1}, num_samples=1)
    for (sample,) in (group.samples_G for group in groups):
        assert sample.failure is None, sample.failure
        assert sample.episode.num_turns > 1 and len(sample.episode.parts) == 1
        assert sample.text.count("\nuser: ") >= 2 and "game_reward" in sample.episode.metrics
