"""Workers of a local Ray cluster make the run of one process; killed, what they owed is sampled again."""

import os
import re
import signal
import socket

import pytest
from test_session import wait_for_steps

import tiny_run
from qerl.config import AlgoConfig, RayConfig, RunConfig
from qerl.errors import UserError
from qerl.learner.distributed import Ranks
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from qerl.training.ray_engine import check_reachable, start_workers

pytest.importorskip("ray")
SLOW = """
import time
def even(prompts, completions, completion_ids, **columns):
    time.sleep(0.2)
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""
RAY = ("--ray", "local", "--ray.num-samplers", "2")
AHEAD = (*RAY, "--ray.max-staleness", "2", "--evaluate.num-prompts", "0")
ROUNDS = ("--algo.dynamic-sampling", "--num-generations", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    (folder / "slow.py").write_text(SLOW)
    return folder


def start(files, out, *more):
    given = [*tiny_run.options(files, out), "--model.device", "cpu", *more]
    return tiny_run.started(*tiny_run.QERL, "train", "demo", *given)


def finish(files, out, *more):
    process = start(files, out, *more)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return out


def metrics(out):
    return list(read_lines(out / "metrics.jsonl"))


def untimed(out, *without):
    return [{k: v for k, v in m.items() if not is_timing(k) and k not in without} for m in metrics(out)]


@pytest.mark.slow
def test_workers_make_the_run_of_one_process(files, tmp_path):
    """With none ahead, evaluation and noise included: every sample, and what is learned of them."""
    by_group = ("--noise.scope", "group")
    remote = finish(files, tmp_path / "remote", *RAY, *by_group)
    local = finish(files, tmp_path / "local", *by_group)
    assert (remote / "samples.jsonl").read_text() == (local / "samples.jsonl").read_text()
    assert (remote / "evaluations.json").read_text() == (local / "evaluations.json").read_text()
    own = ("staleness", "replaced_samplers", "resampled_prompts")
    for ours, theirs in zip(untimed(remote, *own), untimed(local), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_no_sample_is_lost_or_drawn_twice(files, tmp_path):
    """Two versions ahead; the run that lost a worker has the samples and metrics of the one that did not.
    Staleness is of a step's oldest samples: a later round's prompts are asked for when they are wanted, so
    that their samples are of the newest version."""
    whole = finish(files, tmp_path / "whole", *AHEAD, *ROUNDS)
    assert max(m["rounds"] for m in metrics(whole)[2:]) > 1
    assert [m["staleness"] for m in metrics(whole)] == [0, 1, 2, 2, 2, 2]
    out = tmp_path / "broken"
    process = start(files, out, *AHEAD, *ROUNDS, "--task.rewards", f"{files / 'slow.py'}:even")
    wait_for_steps(process, out, 1)
    pids = re.findall(r"sampler \d is process (\d+)", (out / "events.jsonl").read_text())
    os.kill(int(pids[1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
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
            with pytest.raises(UserError) as error, start_workers(config, Ranks(0, 1)):
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
def test_environments_do_not_go_with_workers_which_is_told_before_there_is_a_model(files, tmp_path):
    given = ("--ray", "local", "--task.rewards", "higher_lower", "--model.path", str(tmp_path / "none"))
    _, stderr = (process := start(files, tmp_path / "run", *given)).communicate(timeout=120)
    assert process.returncode == 2
    assert stderr == "qerl: environments do not work with --ray: use torchrun\n"


def test_being_ahead_needs_workers_and_a_correction():
    RunConfig(ray=RayConfig(address="local", max_staleness=1))
    with pytest.raises(UserError, match=r"ray\.max_staleness needs"):
        RunConfig(ray=RayConfig(max_staleness=1))
    with pytest.raises(UserError, match=r"ray\.max_staleness needs"):
        RunConfig(ray=RayConfig(address="local", max_staleness=1), algo=AlgoConfig(importance="none"))
