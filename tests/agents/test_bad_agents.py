"""An agent that misbehaves costs its own episode, which says why; the others are learned from."""

import asyncio
import json
import os
import re
import time
import urllib.error
import urllib.request

import pytest
from agent_episodes import load_tiny, playing

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "hello"}]
FINE = {"do": "fine"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


async def ask(client, **options):
    return await client.chat.completions.create(model="any", messages=HELLO, **options)


async def leave_in_the_middle(client, **given):
    stream = await ask(client, stream=True, max_tokens=500)
    async for _ in stream:
        break
    await stream.close()
    with pytest.raises(openai.APITimeoutError):
        await ask(client, timeout=0.001, max_tokens=500)


async def after_the_end(base_url, api_key, path):
    """Call once the episode is over."""
    await asyncio.sleep(0.5)
    late = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    try:
        await ask(late)
    except openai.APIStatusError as error:
        with open(path, "w") as file:
            json.dump([error.status_code, error.message], file)


def status_with(base_url, key):
    request = urllib.request.Request(f"{base_url}/models", headers={"authorization": f"Bearer {key}"})
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code


async def lose_its_way(client, **given):
    raise ValueError("lost its way")


async def leave_the_program(client, **given):
    raise SystemExit(3)


async def die(client, **given):
    os._exit(7)


async def call_a_thousand_times(client, **given):
    for _ in range(1000):
        await ask(client, max_tokens=1)


async def call_later(client, row, base_url, api_key):
    LEFT.append(asyncio.create_task(after_the_end(base_url, api_key, row["path"])))


async def wait(client, **given):
    await asyncio.sleep(1.5)


async def try_keys(client, row, base_url, api_key):
    number = int(base_url.split("/")[-2])
    other = base_url.replace(f"/{number}/", "/2/")  # an episode of "wait"
    assert (status_with(base_url, "sk-no"), status_with(other, api_key)) == (401, 401)
    assert (status_with(base_url, api_key), status_with(base_url[:-12], api_key)) == (200, 404)


async def say_much(client, row, **given):
    content = "x" * row["num_bytes"]
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": content}])


async def agent(client, row, base_url, api_key):
    """Does what the row names, and returns what it has; all but silent ones call the model first."""
    if row["do"] == "silent":
        return 1.0
    await ask(client)
    if (do := globals().get(row["do"])) is not None:
        await do(client, row=row, base_url=base_url, api_key=api_key)
    return row.get("returns", 1.0)


LEFT = []


def failures_of(groups):
    return [[s.failure for s in group.samples_G] for group in groups]


BROKEN = (
    ({"do": "silent"}, "no call", "without an answer of the model"),
    ({"do": "lose_its_way"}, "raised ValueError", r"lost its way \(test_bad_agents.py:\d+\)"),
    ({"do": "leave_the_program"}, "raised SystemExit", "3"),
    ({"do": "call_a_thousand_times"}, "raised BadRequestError", r"made its 20 calls \(agent.max_calls\)"),
    ({"do": "say_much", "num_bytes": 5000}, "raised BadRequestError", "the prompt has .* tokens; the limit"),
    ({"do": "", "returns": float("nan")}, "not finite", "returned nan"),
    ({"do": "", "returns": "good"}, "not a number", "returned a str"),
    ({"do": "", "returns": None}, "no reward", "returned None"),
    ({"do": "", "returns": {"score": 1}}, "no reward", r"without 'reward' \(it has score\)"),
    ({"do": "", "returns": {"reward": 1e40}}, "too large", "the limit is 1e"),
)


NAMES = [f"{row['do']}{row.get('returns', '')}" for row, *_ in BROKEN]


@pytest.fixture(scope="module")
def broken(model):
    """The sample of each broken episode, which all ran beside each other and a fine one."""
    rows = [row for row, *_ in BROKEN]
    with playing(model, agent, max_calls=20) as play:
        fine, *groups = play(FINE, *rows, num_samples=1)
    assert failures_of([fine]) == [[None]] and fine.samples_G[0].reward == 1.0
    return [group.samples_G[0] for group in groups]


@pytest.mark.parametrize(
    "index", range(len(BROKEN)), ids=[f"{r['do']}{r.get('returns', '')}" for r, *_ in BROKEN]
)
def test_a_broken_episode_costs_itself_and_says_why(broken, index):
    sample, (_, cause, message) = broken[index], BROKEN[index]
    assert sample.failure[0] == cause and sample.reward is None
    assert re.search(message, sample.failure[1]) and "\n" not in sample.failure[1], sample.failure


async def hanging(client, row):
    if row["do"] == "hang":
        await asyncio.sleep(1000)
    time.sleep(1000)  # blocks the event loop


def test_an_episode_that_hangs_or_blocks_the_others_ends_at_its_deadline(model):
    with playing(model, hanging, episode_timeout_s=0.5) as play:
        groups = play({"do": "hang"}, {"do": "block"}, num_samples=1)
    assert failures_of(groups) == [[("over the deadline", "hanging: not done after 0.5 s")]] * 2


def test_a_message_of_many_megabytes_is_refused_before_it_is_read(model):
    with playing(model, agent, max_body_bytes=100_000) as play:
        groups = play(FINE, {"do": "say_much", "num_bytes": 100_000_000}, num_samples=1)
    assert failures_of(groups)[0] == [None]
    cause, message = groups[1].samples_G[0].failure
    assert cause in ("raised APIStatusError", "raised APIConnectionError"), message


def test_a_client_that_leaves_loses_no_more_than_that_answer(model):
    with playing(model, agent) as play:
        (group,) = play({"do": "leave_in_the_middle"}, max_tokens=500)
    for sample in group.samples_G:
        assert sample.failure is None and sample.episode.num_turns == 1 and sample.reward == 1.0


def test_a_key_is_dead_once_its_episode_is_over_and_opens_no_other(model, tmp_path):
    late = {"do": "call_later", "path": str(tmp_path / "status")}
    with playing(model, agent) as play:
        groups = play(late, {"do": "wait"}, {"do": "try_keys"}, num_samples=2)
    assert failures_of(groups) == [[None] * 2] * 3
    status, message = json.loads((tmp_path / "status").read_text())
    assert status == 410 and "is over: its key is invalid now" in message
    assert groups[0].samples_G[0].episode.num_turns == 1


def test_a_process_that_dies_costs_the_episodes_that_were_running(model):
    with playing(model, agent, max_concurrent=1) as play:
        first = play(FINE, {"do": "die"}, FINE, num_samples=1)
        second = play(FINE, num_samples=1)
    assert failures_of(first) == [[None], [("ended its process", "agent: exit code 7")], [None]]
    assert failures_of(second) == [[None]]


def stuck(client, row):
    if row["do"] == "hang":
        time.sleep(1000)
    client.chat.completions.create(model="any", messages=HELLO)
    return 0.5


def test_a_plain_function_runs_in_a_thread_and_a_stuck_one_is_left_behind(model):
    with playing(model, stuck, episode_timeout_s=2) as play:
        (fine,) = play(FINE)
        (hung,) = play({"do": "hang"}, num_samples=1)
        again = play(FINE)
    assert [s.reward for s in fine.samples_G] == [0.5, 0.5]
    assert [s.failure[0] for s in hung.samples_G] == ["over the deadline"]
    assert failures_of(again) == [[None, None]]


def test_a_call_has_a_deadline(model):
    async def long(client, row):
        with pytest.raises(openai.InternalServerError, match=r"not complete after 0.05 s"):
            await ask(client, max_tokens=1500)
        return 1.0

    with playing(model, long, call_timeout_s=0.05) as play:
        (group,) = play(FINE, num_samples=1, max_tokens=1500)
    assert group.samples_G[0].failure[0] == "no call"


async def waiting(client, row):
    await ask(client)
    await asyncio.sleep(0.5)
    await ask(client)
    return {"reward": 1.0}


def test_hundreds_of_episodes_wait_for_tools_at_once(model):
    with playing(model, waiting) as play:
        start_s = time.monotonic()
        groups = play(*[FINE] * 25, num_samples=4, max_tokens=2)
        took_s = time.monotonic() - start_s
    samples = [s for group in groups for s in group.samples_G]
    assert {s.failure for s in samples} == {None} and {s.episode.num_turns for s in samples} == {2}
    assert took_s < 25  # one after the other they wait for 50 s
    assert all(s.episode.waiting_share > 0.1 for s in samples)


async def calling_long(client, row):
    messages = list(HELLO)
    for number in range(99):
        if number % 9 == 0:
            messages = [{"role": "user", "content": f"begin {number}"}]
        got = await client.chat.completions.create(model="any", messages=messages, max_tokens=1)
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    await ask(client, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=r"made its 100 calls"):
        await ask(client)
    return 1.0


def test_a_hundred_calls_are_one_episode_and_the_next_is_refused(model):
    with playing(model, calling_long, max_calls=100) as play:
        (group,) = play(FINE, num_samples=1)
    (sample,) = group.samples_G
    assert sample.failure is None and sample.reward == 1.0
    assert sample.episode.num_turns == 100 and len(sample.episode.parts) == 12
    assert sum(len(part.samples_G[0].logprobs_T) for part in sample.episode.parts) == 100
