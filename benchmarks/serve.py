"""Load `qerl serve` on loopback: `python -m benchmarks serve MODEL`.

    one client      its requests one after the other
    many clients    the same mix of requests, all at once, each client one after the other
    beside          a chat of 3 tokens that arrives 2 s after a completion of --long-tokens

ttft is the time from sending a request to its first text, as the client sees it; tokens/s counts the answers'
tokens over the time from the first request to the last answer. Prompts and maximum lengths are drawn from
--seed; a stop token may end an answer before.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import httpx
import torch
import tyro

from qerl.bench.record import ROOT
from qerl.config.check import check_positive
from qerl.errors import RunError
from qerl.tracking.provenance import git_state

_TEXT = "the river runs past old stone houses where people trade bread salt and stories every morning"
_ANSWER_TOKENS = (4, 8, 16, 32, 64, 96)
_REQUEST_S, _HEAD_START_S = 1800, 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "smollm2-135m-instruct"
    """A model as `qerl serve` takes it."""

    num_clients: int = 64
    """Clients at once."""

    requests_per_client: int = 1
    """Requests of each of many clients."""

    requests_alone: int = 8
    """Requests of the one client."""

    max_prompt_words: int = 120
    """Prompts have 3 to this many words."""

    long_tokens: int = 400
    """Length of the answer beside which a short one is asked for."""

    seed: int = 0
    """Seed of prompts and lengths."""

    serve_options: str = ""
    """More options of `qerl serve`, in one string."""

    def __post_init__(self):
        names = ("num_clients", "requests_per_client", "requests_alone", "max_prompt_words", "long_tokens")
        check_positive(self, *names)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    first_text_s: float
    num_tokens: int


def bench_serve(options: ServeBenchOptions) -> None:
    """Print a JSON row: times to first token and tokens/s of one client and of many."""
    with _server(options) as url:
        results = asyncio.run(_measure(options, url))
    git = git_state(ROOT)
    row = {
        "bench": "serve",
        "model": options.model,
        **results,
        "clients": options.num_clients,
        "machine": _machine(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[1], 1),
        "commit": git.commit if git else None,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(row))


@contextlib.contextmanager
def _server(options: ServeBenchOptions) -> Iterator[str]:
    command = [sys.executable, "-m", "qerl", "serve", options.model, "--port", "0"]
    server = subprocess.Popen([*command, *options.serve_options.split()], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = next((line for line in server.stdout if " at http" in line), None)
        if line is None:
            raise RunError(f"the server did not start: {' '.join(command)}")
        yield line.strip().partition(" at ")[2]
    finally:
        server.terminate()
        server.wait(30)


async def _measure(options: ServeBenchOptions, url: str) -> dict[str, Any]:
    rng = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_S, limits=limits) as http:
        model = (await http.get("models")).json()["data"][0]["id"]
        await _ask(http, _request(model, rng, options, num_tokens=4))  # warm-up

        def requests(num: int) -> list[dict[str, Any]]:
            tokens = [_ANSWER_TOKENS[i % len(_ANSWER_TOKENS)] for i in range(num)]
            rng.shuffle(tokens)
            return [_request(model, rng, options, num_tokens=n) for n in tokens]

        alone = await _load(http, [requests(options.requests_alone)])
        mixed = requests(options.num_clients * options.requests_per_client)
        many = await _load(http, [mixed[i :: options.num_clients] for i in range(options.num_clients)])
        beside = await _beside(http, model, options)
    return {"one": alone, "many": many, **beside}


async def _load(http: httpx.AsyncClient, clients: list[list[dict[str, Any]]]) -> dict[str, Any]:
    async def client(requests: list[dict[str, Any]]) -> list[Answer]:
        return [await _ask(http, each) for each in requests]

    start_s = time.monotonic()
    answers = [each for some in await asyncio.gather(*map(client, clients)) for each in some]
    total_s = time.monotonic() - start_s
    times = sorted(answer.first_text_s for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "requests": len(answers),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / total_s, 1),
        "ttft_p50_s": round(statistics.median(times), 3),
        "ttft_p95_s": round(times[min(round(0.95 * len(times)), len(times) - 1)], 3),
    }


async def _beside(http: httpx.AsyncClient, model: str, options: ServeBenchOptions) -> dict[str, Any]:
    short = {"model": model, "prompt": "Say hi.", "max_tokens": 3, "temperature": 0, "stream": True}
    long = short | {"prompt": "Once upon a time", "max_tokens": options.long_tokens}
    alone = await _ask(http, short)
    started = asyncio.ensure_future(_ask(http, long))
    await asyncio.sleep(_HEAD_START_S)
    beside = await _ask(http, short)
    is_beside = not started.done()
    await started
    return {
        "short_alone_ttft_s": round(alone.first_text_s, 3),
        "short_beside_long_ttft_s": round(beside.first_text_s, 3) if is_beside else None,
    }


def _request(
    model: str, rng: random.Random, options: ServeBenchOptions, *, num_tokens: int
) -> dict[str, Any]:
    num_words = rng.randint(3, max(3, options.max_prompt_words))
    prompt = " ".join(rng.choices(_TEXT.split(), k=num_words))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "prompt": prompt, "max_tokens": num_tokens, "seed": rng.getrandbits(31), **stream}


async def _ask(http: httpx.AsyncClient, request: dict[str, Any]) -> Answer:
    start_s, first_s, num_tokens = time.monotonic(), None, 0
    async with http.stream("POST", "completions", json=request) as reply:
        async for piece in _pieces(reply):
            if "error" in piece:
                raise RunError(f"the server answered: {piece['error']['message']}")
            if first_s is None and any(choice["text"] for choice in piece["choices"]):
                first_s = time.monotonic() - start_s
            num_tokens = (piece.get("usage") or {}).get("completion_tokens", num_tokens)
    total_s = time.monotonic() - start_s
    return Answer(total_s if first_s is None else first_s, num_tokens)  # an answer may have no text


async def _pieces(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if reply.status_code != 200:
        yield json.loads(await reply.aread())
        return
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return f"{names[0]}, {len(names)} cores"
    return platform.processor() or platform.machine()
