"""64 clients at once against a real server: all are in one batch, and those that leave free their place."""

import asyncio
import json

import httpx
import pytest

from serve import parts

CLIENTS, LENGTHS, LONG = 64, (60, 90, 120), 900


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    model = parts.load_tiny(tmp_path_factory.mktemp("model"))
    app, _ = parts.app_of(model, max_waiting=CLIENTS)
    with parts.serving(app) as address:
        yield address


async def whole(http, index):
    """(tokens of the answer, why it ended) of a request that is read to its end."""
    request = {"prompt": "a" * (1 + index % 50), "max_tokens": LENGTHS[index % 3], "seed": index}
    options = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "completions", json=request | options) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    *pieces, usage, end = lines
    finish = [choice["finish_reason"] for piece in pieces for choice in json.loads(piece)["choices"]]
    assert end == "[DONE]"
    return json.loads(usage)["usage"]["completion_tokens"], finish[-1]


async def left(http, index, is_full):
    """Leave a long answer after its first text, once the batch has been full."""
    request = {"model": "tiny", "prompt": f"b {index}", "max_tokens": LONG, "seed": index, "stream": True}
    async with http.stream("POST", "completions", json=request) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                await is_full.wait()
                return


async def load(address):
    """Send all requests at once; return the whole answers."""
    is_full = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        kinds = [whole(http, i) if i % 4 else left(http, i, is_full) for i in range(CLIENTS)]
        tasks = [asyncio.ensure_future(kind) for kind in kinds]
        while await asyncio.to_thread(parts.metric, address, "qerl_requests_running") < CLIENTS // 4:
            assert not all(task.done() for task in tasks)
        is_full.set()
        return [answer for answer in await asyncio.gather(*tasks) if answer is not None]


def test_64_clients_are_answered_and_those_that_leave_free_their_place(address):
    answers = asyncio.run(load(address))
    assert len(answers) == CLIENTS - CLIENTS // 4
    for (num_tokens, finish), index in zip(answers, (i for i in range(CLIENTS) if i % 4), strict=True):
        assert finish == ("length" if num_tokens == LENGTHS[index % 3] else "stop")
    parts.wait_for(lambda: parts.metric(address, "qerl_requests_running") == 0)
    parts.wait_for(lambda: parts.metric(address, "qerl_kv_pages_used") == 0)
    given_up = CLIENTS // 4 * LONG
    assert parts.metric(address, "qerl_generated_tokens_total") < sum(n for n, _ in answers) + given_up / 2
