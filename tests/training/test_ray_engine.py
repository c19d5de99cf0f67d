"""Workers of a local Ray cluster make the run of one process; killed, what they owed is sampled again."""

import os
import pickle
import re
import signal
import socket
import threading
from functools import partial

import pytest
from test_session import wait_for_steps

import tiny_run
from qerl.config import AlgoConfig, ModelConfig, RayConfig, RunConfig, SampleConfig
from qerl.errors import UserError
from qerl.learner.distributed import Ranks
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.peft.adapter import adapter_tensors
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from qerl.training import ray_engine
from qerl.training.engines.multi_turn import EnvironmentEpisodes
from qerl.training.policy import load_sampler
from qerl.training.ray_engine import Cluster, check_reachable, join_cluster, with_round
from qerl.training.ray_worker import PublishedPolicy, Worker
from qerl.types import GenerateRequest, Prompt, Sampling
from training.ray_cluster import OF_A_RUN

ray = pytest.importorskip("ray")
SLOW = """
import time
from pathlib import Path
def even(prompts, completions, completion_ids, **columns):
    if not Path(__file__).with_name("gone").exists():
        time.sleep(0.2)
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""
GAME = """
import os
import random
import signal
from pathlib import Path

MARK = Path(__file__).with_name("killed")
NUM_EVALUATED = 4  # episodes of each of two samplers before the first step


def end_sampler():
    try:
        MARK.touch(exist_ok=False)
    except FileExistsError:
        return
    keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)


class Game:
    \"\"\"Ends the sampler that it plays for, once, in the middle of an episode of the first step.\"\"\"

    num = 0

    async def reset(self, row, seed):
        self.random, self.turns = random.Random(seed), 0
        Game.num += 1
        return "the number is " + str(self.random.randrange(10))

    async def step(self, completion):
        self.turns += 1
        if self.turns == 2 and Game.num > NUM_EVALUATED:
            end_sampler()
        number = self.random.randrange(10)
        if number == 0 and self.turns > 1:
            raise RuntimeError("the game broke")
        return [{"role": "tool", "content": str(number)}], float(len(completion) > number), self.turns == 3
"""
TWO = ("--ray.num-samplers", "2")
AHEAD = ("--ray.max-staleness", "2", "--evaluate.num-prompts", "0")
OWN = ("staleness", "replaced_samplers", "resampled_prompts")
ROUNDS = ("--algo.dynamic-sampling", "--num-generations", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    (folder / "slow.py").write_text(SLOW)
    (folder / "game.py").write_text(GAME)
    tiny_run.write_model(folder / "chat", max_positions=256)
    return folder


def lose_second_sampler(process, files, out):
    """Kill it after the first step, end the slow reward, and let the run end."""
    wait_for_steps(process, out, 1)
    pids = re.findall(r"sampler \d is process (\d+)", (out / "events.jsonl").read_text())
    os.kill(int(pids[1]), signal.SIGKILL)
    (files / "gone").touch()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr


def start(files, out, *more):
    given = [*tiny_run.options(files, out), "--model.device", "cpu", *more]
    return tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given, environment=OF_A_RUN)


def finish(files, out, *more):
    process = start(files, out, *more)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return out


def metrics(out):
    return list(read_lines(out / "metrics.jsonl"))


def untimed(out, *without):
    return [{k: v for k, v in m.items() if not is_timing(k) and k not in without} for m in metrics(out)]


def assert_alike(remote, local):
    for ours, theirs in zip(remote, local, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_no_sample_is_lost_or_drawn_twice(files, ray_address, tmp_path):
    """Two versions ahead; the run that lost a worker has the samples and metrics of the one that did not,
    whose first step is that of one process.
    Staleness is of a step's oldest samples: a later round's prompts are asked for when they are wanted, so
    that their samples are of the newest version."""
    given = ("--ray", ray_address, *TWO, *AHEAD, *ROUNDS)
    whole = finish(files, tmp_path / "whole", *given)
    assert max(m["rounds"] for m in metrics(whole)[2:]) > 1
    assert [m["staleness"] for m in metrics(whole)] == [0, 1, 2, 2, 2, 2]
    local = finish(files, tmp_path / "local", *ROUNDS, "--num-steps", "3", "--evaluate.num-prompts", "0")
    first = [[s for s in read_lines(out / "samples.jsonl") if s["step"] == 0] for out in (whole, local)]
    assert first[0] == first[1] != []
    assert_alike(untimed(whole, *OWN)[:1], untimed(local)[:1])
    out = tmp_path / "broken"
    slowly = ("--task.rewards", f"{files / 'slow.py'}:even")
    process = start(files, out, *given, *slowly)
    lose_second_sampler(process, files, out)
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    own = ("replaced_samplers", "resampled_prompts")
    assert untimed(out, *own) == untimed(whole, *own)
    assert sum(m["replaced_samplers"] for m in metrics(out)) == 1
    assert sum(m["resampled_prompts"] for m in metrics(out)) > 0
    assert "sampler 1 died" in (out / "events.jsonl").read_text()


@pytest.fixture
def closed():
    """An address of this machine where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{one.getsockname()[1]}"


def test_an_address_where_nobody_listens_is_one_line_at_once(closed, files, tmp_path):
    process = start(files, tmp_path / "run", "--ray", closed)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr == f"qerl: ray.address: {closed} cannot be reached (Connection refused)\n"


def test_a_cluster_that_refuses_may_want_a_token_which_ray_does_not_say(monkeypatch):
    def refused(**given):
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr("ray.init", refused)
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = RunConfig(ray=RayConfig(address=f"127.0.0.1:{server.getsockname()[1]}"))
        for mode, is_told in ((None, True), ("token", False)):
            monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
            if mode is not None:
                monkeypatch.setenv("RAY_AUTH_MODE", mode)
            with pytest.raises(UserError) as error, join_cluster(config, Ranks(0, 1)):
                pass
            assert (
                str(error.value).endswith("; if the cluster requires a token, set RAY_AUTH_MODE=token")
                == is_told
            )


@pytest.mark.parametrize(
    "address", ["somewhere", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "a..b:6379", ":6379", ""]
)
def test_what_is_no_address_is_refused_by_its_form(address):
    with pytest.raises(UserError, match="is neither HOST:PORT, auto nor local"):
        check_reachable(address)


def test_auto_is_what_the_environment_names_and_else_ray_s_to_find(closed, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_reachable("auto")
    monkeypatch.setenv("RAY_ADDRESS", closed)
    check_reachable("local")
    with pytest.raises(UserError, match=f"{closed} cannot be reached"):
        check_reachable("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        check_reachable("auto")
        check_reachable(f"ray://localhost:{server.getsockname()[1]}")


@pytest.mark.slow
def test_episodes_of_a_worker_that_dies_in_the_middle_of_one_are_those_of_one_process(files, tmp_path):
    """Of two workers, in a cluster of the run's own: their messages, rewards, failures and noise, what is
    evaluated and what is learned."""
    given = ("--task.rewards", f"{files / 'game.py'}:Game", "--sample.max-tokens", "60", "--num-steps", "2")
    given = (*given, "--task.environment.turn-tokens", "8", "--model.path", str(files / "chat"))
    given = (*given, "--noise.scope", "group", "--noise.num-stages", "2")
    remote = finish(files, tmp_path / "remote", "--ray", "local", *TWO, *given)
    assert (files / "killed").exists()
    local = finish(files, tmp_path / "local", *given)
    texts = [(out / "samples.jsonl").read_text() for out in (remote, local)]
    assert texts[0] == texts[1] and "<|im_start|>the number is " in texts[0]
    assert (remote / "evaluations.json").read_text() == (local / "evaluations.json").read_text()
    assert_alike(untimed(remote, *OWN), untimed(local))
    assert sum(m["num_failed_episodes"] for m in metrics(remote)) > 0
    assert all(m["environment_s"] > 0 for m in metrics(remote))
    assert [m["sigma"] > 0 for m in metrics(remote)] == [False, True]
    assert metrics(remote)[0]["replaced_samplers"] == 1 and metrics(remote)[0]["turns"] > 1
    events = (remote / "events.jsonl").read_text()
    assert "died; a new one samples" in events and "Game.step: the game broke" in events


MADE = []


def note_episodes(config, environment):
    MADE.append(EnvironmentEpisodes(config.task, config.sample, environment))
    return MADE[-1]


def test_an_environment_that_is_given_in_python_is_sent_and_plays_in_the_worker(files, monkeypatch):
    class Given:
        def reset(self, row):
            return None

        def step(self, completion):
            return None, 3.0, True

    model = ModelConfig(path=str(files / "chat"), device="cpu", dtype="fp32")
    config = RunConfig(model=model, sample=SampleConfig(max_tokens=5))
    monkeypatch.setattr("ray.get", lambda value: value)
    worker = Worker(config, ray.cloudpickle.dumps(partial(note_episodes, config, Given)))
    adapter = adapter_tensors(load_sampler(config, load_tokenizer(config.model.path))[0])
    prompts_P = [Prompt(index=0, text="", tokens_T=[5, 6], messages=None, columns={})]
    sampling = Sampling(max_tokens=5)
    request = GenerateRequest(prompts_P, num_samples=2, sampling=sampling, seed=0, step=0)
    found = worker.sample(PublishedPolicy(1, [adapter], None), request)
    MADE.pop().pool.close()
    assert [s.reward for _, samples in found.groups_P for s in samples] == [3.0, 3.0]


def test_an_agent_that_cannot_be_sent_or_imported_there_is_one_line(files):
    config = RunConfig(ray=RayConfig(address="local"))
    with pytest.raises(UserError, match=r"cannot be sent to workers .*: name it in the config as FILE\.py"):
        Cluster(ray, config).start(
            partial(EnvironmentEpisodes, config.task, config.sample, threading.Lock().acquire)
        )
    elsewhere = pickle.dumps(partial).replace(b"functools", b"functuuls")
    with pytest.raises(UserError, match="cannot load the environment or agent: No module named 'functuuls'"):
        Worker(config, elsewhere).place()
    missing = pickle.dumps(partial(EnvironmentEpisodes, config.task, config.sample, "/nowhere/game.py:Game"))
    with pytest.raises(UserError, match=r"a worker on .* cannot load .*/nowhere/game\.py:Game: no such file"):
        Worker(config, missing).place()


def test_seconds_of_workers_are_those_of_the_longest_and_their_tokens_are_added():
    first = with_round({}, [{"tool_s": 2.0, "kept_tokens": 3}, {"tool_s": 1.0, "kept_tokens": 4}])
    assert first == {"tool_s": 2.0, "kept_tokens": 7}
    assert with_round(first, [{"tool_s": 0.5, "kept_tokens": 1}]) == {"tool_s": 2.5, "kept_tokens": 8}


def test_being_ahead_needs_workers_and_a_correction():
    RunConfig(ray=RayConfig(address="local", max_staleness=1))
    with pytest.raises(UserError, match=r"ray\.max_staleness needs"):
        RunConfig(ray=RayConfig(max_staleness=1))
    with pytest.raises(UserError, match=r"ray\.max_staleness needs"):
        RunConfig(ray=RayConfig(address="local", max_staleness=1), algo=AlgoConfig(importance="none"))


@pytest.mark.parametrize(
    ("gpu", "visible", "index"),
    [("3", None, 3), ("3", "2,3", 1), ("GPU-b", "GPU-a, GPU-b", 1), ("0", "0", 0)],
)
def test_the_gpu_that_ray_reserves_is_counted_among_the_visible(gpu, visible, index):
    assert ray_engine._index_of(gpu, visible) == index
