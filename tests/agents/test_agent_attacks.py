"""Agents that fork, hang where no clock looks, write where they must not, or flood: the others go on."""

import asyncio
import collections
import gc
import http.client
import json
import os
import sys
import time

import pytest
from agent_episodes import load_tiny, playing

import processes
from qerl.serve.agents.outcomes import OutcomePipe
from qerl.serve.agents.parser import EpisodeParser
from qerl.tasks.rows import prompt

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "hello"}]
FINE = {"do": "fine"}
RAN = []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


def failures_of(groups):
    return [sample.failure for group in groups for sample in group.samples_G]


def fork(row):
    """Return True in the child, whose exec may have failed."""
    pid = os.fork()
    if pid:
        with open(row["path"], "w") as file:
            file.write(str(pid))
    return pid == 0


def block(row):
    time.sleep(1000)


async def block_in_a_task(row):
    await asyncio.gather(asyncio.to_thread(int), asyncio.create_task(blocking()))


async def leave_a_task_that_blocks(row):
    RAN.append(asyncio.create_task(blocking()))  # kept from the collector


async def blocking():
    time.sleep(1000)


async def write_nonsense(row):
    """As a program that was given the wrong number of a file."""
    for pipe in (each for each in gc.get_objects() if isinstance(each, OutcomePipe)):
        os.write(pipe._write_end, b'5\n{}\n[1]\n[[], {}]\n"x"\nnull\n[1, 99]\n[1, 0, "x", 2, 3]\n\xff\n')


async def agent(client, row):
    """Calls the model, does what the row names, and calls it again."""
    await client.chat.completions.create(model="any", messages=HELLO)
    do = globals().get(row["do"])
    if do is not None and asyncio.iscoroutinefunction(do):
        await do(row)
    elif do is not None and do(row):
        return 1.0
    await client.chat.completions.create(model="any", messages=HELLO)
    return 1.0


def threaded(client, row):
    if (do := globals().get(row["do"])) is not None and do(row):
        return 1.0
    client.chat.completions.create(model="any", messages=HELLO)
    return 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("function", [agent, threaded])
def test_a_forked_child_runs_no_other_episode_and_ends(model, tmp_path, function):
    row = {"do": "fork", "path": str(tmp_path / "pid")}
    with playing(model, function) as play:
        assert failures_of(play(FINE, row, FINE, num_samples=1)) == [None] * 3
        assert processes.has_ended(int((tmp_path / "pid").read_text()))
        assert failures_of(play(FINE)) == [None] * 2


@pytest.mark.parametrize("do", ["block_in_a_task", "leave_a_task_that_blocks"])
def test_a_task_that_blocks_the_loop_ends_its_own_episode(model, do):
    with playing(model, agent, episode_timeout_s=1) as play:
        fine, blocked, other = failures_of(play(FINE, {"do": do}, FINE, num_samples=1))
    assert (fine, other) == (None, None) and blocked[0] == "over the deadline"


async def hang_in_a_thread(row):
    await asyncio.to_thread(time.sleep, 1000)


async def use_a_thread(row):
    assert await asyncio.to_thread(os.getpid) == os.getpid()


def test_tools_that_hang_in_threads_take_no_places_of_later_ones(model):
    """asyncio has six threads for them on two processors."""
    with playing(model, agent, episode_timeout_s=1.5) as play:
        hung = play(*[{"do": "hang_in_a_thread"}] * 20, {"do": "use_a_thread"}, num_samples=1)
        assert failures_of(hung)[-1] is None
        assert {failure[0] for failure in failures_of(hung)[:-1]} == {"over the deadline"}
        assert failures_of(play({"do": "use_a_thread"})) == [None] * 2


def test_nonsense_in_the_pipe_of_outcomes_is_left_out(model):
    with playing(model, agent) as play:
        assert failures_of(play(FINE, {"do": "write_nonsense"}, FINE, num_samples=1)) == [None] * 3
        assert failures_of(play(FINE)) == [None] * 2


def test_a_thread_that_hangs_takes_no_place_of_another_episode(model):
    with playing(model, threaded, episode_timeout_s=1, max_concurrent=1) as play:
        hung, *others = failures_of(play({"do": "block"}, FINE, FINE, num_samples=1))
    assert hung[0] == "over the deadline" and others == [None, None]


def request(base_url, api_key, body):
    """Send a request on a connection of its own; return the connection."""
    _, _, place, path = base_url.split("/", 3)
    connection = http.client.HTTPConnection(place, timeout=60)
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    connection.request("POST", f"/{path}/chat/completions", json.dumps({"model": "any", **body}), headers)
    return connection


def flooding(client, row, base_url, api_key):
    """Sends the row's bodies at once, or calls the model now and then; returns how often it got each status.
    In the end it calls the model once more."""
    connections = [request(base_url, api_key, body) for body in row.get("bodies", [])]
    answers = [each.getresponse() for each in connections]
    statuses = collections.Counter(each.status for each in answers if each.read())
    for _ in range(5):
        client.chat.completions.create(model="any", messages=HELLO, max_tokens=2)
        time.sleep(0.05)
    return {"reward": 1.0, **{f"status_{status}": count for status, count in statuses.items()}}


def test_a_flood_of_streams_is_refused_beyond_64_and_other_episodes_are_answered(model):
    bodies = [{"messages": HELLO, "stream": True, "max_tokens": 200}] * 400
    with playing(model, flooding, max_concurrent=2) as play:
        groups = play({"do": "flood", "bodies": bodies}, FINE, num_samples=1, max_tokens=200)
    assert failures_of(groups) == [None, None]
    counts = groups[0].samples_G[0].episode.metrics
    assert counts["status_429"] > 200 and counts["status_200"] >= 64
    assert sum(counts.values()) == 400


def test_requests_that_are_slow_to_read_hold_up_their_own_episode_alone(model, monkeypatch):
    read, log = EpisodeParser.chat, []

    def slow(self, content):
        log.append(b"slow" in content)
        if log[-1] and log.count(False) < 5:
            time.sleep(0.1)
        return read(self, content)

    monkeypatch.setattr(EpisodeParser, "chat", slow)
    bodies = [{"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}] * 40
    with playing(model, flooding) as play:
        groups = play({"do": "flood", "bodies": bodies}, FINE, num_samples=1)
    assert failures_of(groups) == [None, None]
    fifth = [at for at, is_slow in enumerate(log) if not is_slow][4]
    assert log.count(True) == 40 and log[:fifth].count(True) < 30


CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y " * 50_000})}}
]
LONG = {
    "content": [{"role": "user", "content": "x " * 50_000}],
    "calls": [*HELLO, {"role": "assistant", "content": "", "tool_calls": CALLS}, *HELLO],
}


@pytest.mark.parametrize("kind", LONG)
def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_counted(model, monkeypatch, kind):
    """4 MB take seconds, in which no other request is read."""
    encode, lengths = prompt.encoded, []
    monkeypatch.setattr(prompt, "encoded", lambda *given: (lengths.append(len(given[1])), encode(*given))[1])
    with playing(model, flooding) as play:
        (group,) = play({"do": "flood", "bodies": [{"messages": LONG[kind]}] * 3}, num_samples=1)
    assert group.samples_G[0].episode.metrics == {"status_400": 3.0}
    assert 0 < max(lengths) < 1000
