"""Deadlines: of all episodes of a step, and of a tool, which is the agent's own."""

import asyncio
import time

import pytest
from agent_episodes import load_tiny, playing

pytest.importorskip("starlette")
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


async def ask(client, messages, **options):
    got = await client.chat.completions.create(model="m", messages=messages, **options)
    return got.choices[0].message.to_dict()


async def with_deadlines(client, row):
    messages = [{"role": "user", "content": "hello"}]
    await ask(client, messages, max_tokens=2)
    if row["do"] == "tool":
        try:
            async with asyncio.timeout(0.05):
                await asyncio.sleep(1000)
        except TimeoutError:
            result = {"role": "tool", "tool_call_id": "1", "content": "Error: no answer after 0.05 s"}
        await ask(client, [*messages, {"role": "assistant", "content": "x"}, result], max_tokens=2)
    if row["do"] == "hang":
        await asyncio.sleep(1000)
    return 1.0


def test_a_step_has_a_deadline_for_all_of_its_episodes(model):
    with playing(model, with_deadlines, step_timeout_s=3.0, max_concurrent=2) as play:
        start_s = time.monotonic()
        hung, queued = play({"do": "hang"}, {"do": "hang"}, num_samples=2)
        took_s = time.monotonic() - start_s
        (after,) = play({"do": ""})
    causes = [s.failure[0] for group in (hung, queued) for s in group.samples_G]
    assert causes == ["over the step's deadline"] * 4 and took_s < 30
    assert "not done 3.0 s after the first" in hung.samples_G[0].failure[1]
    assert [s.failure for s in after.samples_G] == [None, None]


def test_a_tools_own_deadline_is_a_failed_tool_and_not_a_failed_episode(model):
    with playing(model, with_deadlines, episode_timeout_s=60) as play:
        (group,) = play({"do": "tool"}, num_samples=2)
    assert [(s.failure, s.episode.num_tool_failures) for s in group.samples_G] == [(None, 1)] * 2
