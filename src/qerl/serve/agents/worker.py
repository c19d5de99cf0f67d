"""Run the agent's function for many episodes at once, in a process of its own.

    async def agent(client, row) -> float | dict        in the event loop, beside the other episodes
    def agent(client, row) -> float | dict              in a thread of its own

The function gets the arguments that it names. A coroutine that blocks the event loop for a minute is
interrupted. A thread cannot be ended: if one is still running when all episodes are over, the process is
replaced before the next ones.
"""

import asyncio
import dataclasses
import importlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from qerl.config import AgentConfig
from qerl.serve.agents.outcomes import MAX_METRICS, Outcome, OutcomePipe
from qerl.tasks.event_loop import GuardedLoop, InvalidReturn
from qerl.tasks.scoring import Failure, awaited, failure_of, finite_number, missing_arguments, name_of

ARGUMENTS = ("client", "base_url", "api_key", "model", "row", "seed")
"""Parameters that an agent's function may have."""
_MAX_BLOCK_S = 60.0
_LATER_S = 5.0  # a client's deadline after the endpoint's, whose error says more
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(eq=False, frozen=True, kw_only=True, slots=True)
class AgentCall:
    """One episode to run."""

    call: int
    """Number of the rollout."""
    index: int
    base_url: str
    api_key: str
    model: str
    row: dict[str, Any]
    seed: int
    ends_s: float | None
    """The step's deadline by the monotonic clock; None: it has none."""


class AgentWorker:
    def __init__(self, function: Callable[..., Any], config: AgentConfig, pipe: OutcomePipe):
        self._function, self._config, self._pipe = function, config, pipe
        if "client" in agent_arguments(function):
            importlib.import_module("openai")  # once, before the fork: it takes seconds
        self._is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._loop = GuardedLoop[Outcome](
            max_concurrent=config.max_concurrent,
            deadline_s=config.episode_timeout_s,
            block_s=min(config.episode_timeout_s, _MAX_BLOCK_S),
        )
        self._in_threads: set[AgentCall] = set()

    def play(self, calls: list[AgentCall]) -> bool:
        """Run the episodes and report each through the pipe; True if a thread is left behind."""
        for name in ("no_proxy", "NO_PROXY"):  # the clients of other packages ask for it
            hosts = os.environ.get(name, "").split(",")
            if _LOOPBACK not in hosts:
                os.environ[name] = ",".join([*filter(None, hosts), _LOOPBACK])
        name = name_of(self._function)

        def say(position: int, ended: Outcome | Failure) -> None:
            outcome = Outcome(failure=ended) if isinstance(ended, Failure) else ended
            self._pipe.say_ended(calls[position].call, calls[position].index, outcome)

        ended = self._loop.run([(name, partial(self._episode, call)) for call in calls], say)
        if isinstance(ended, BaseException):
            for position in range(len(calls)):
                say(position, failure_of(name, ended))
        return bool(self._in_threads) or self._loop.has_busy_threads

    async def _episode(self, call: AgentCall) -> Outcome:
        late = InvalidReturn(
            "over the step's deadline", f"not done {self._config.step_timeout_s} s after the first"
        )
        left_s = None if call.ends_s is None else call.ends_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise late
        self._pipe.say_begun(call.call, call.index)
        clock = asyncio.timeout(left_s)
        try:
            async with clock:
                return await self._result(call)
        except TimeoutError:
            if clock.expired():
                raise late from None
            raise

    async def _result(self, call: AgentCall) -> Outcome:
        arguments = self._arguments(call)
        if self._is_async:
            try:
                return checked_outcome(await self._function(**arguments))
            finally:
                if (client := arguments.get("client")) is not None:
                    await client.close()
        ended = Future[Outcome]()  # a thread each: one that hangs takes no other episode's place
        run = partial(self._in_thread, ended, call, arguments)
        threading.Thread(target=run, name="agent", daemon=True).start()
        return await asyncio.wrap_future(ended)

    def _in_thread(self, ended: Future[Outcome], call: AgentCall, arguments: dict[str, Any]) -> None:
        pid, _ = os.getpid(), ended.set_running_or_notify_cancel()
        self._in_threads.add(call)
        try:
            result = self._function(**arguments)
            result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
            outcome: Outcome | BaseException = checked_outcome(result)
        except BaseException as error:  # of the episode, which raises it
            outcome = error
        if os.getpid() != pid:
            os._exit(0)  # a child that the function forked
        self._in_threads.discard(call)
        if (client := arguments.get("client")) is not None:
            client.close()
        if isinstance(outcome, Outcome):
            ended.set_result(outcome)
        else:
            ended.set_exception(outcome)

    def _arguments(self, call: AgentCall) -> dict[str, Any]:
        names = agent_arguments(self._function)
        values = {name: getattr(call, name) for name in names if name != "client"}
        if "client" in names:
            values["client"] = self._client(call)
        return values

    def _client(self, call: AgentCall) -> Any:
        """Return a client of the episode. Loading certificates takes 0.07 s, and there is nothing to verify
        on a loopback address, nor to go through a proxy for."""
        openai = importlib.import_module("openai")
        kind, http_kind = openai.OpenAI, openai.DefaultHttpxClient
        if self._is_async:
            kind, http_kind = openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient
        timeout_s = self._config.call_timeout_s + _LATER_S
        return kind(
            base_url=call.base_url,
            api_key=call.api_key,
            timeout=timeout_s,
            max_retries=0,
            http_client=http_kind(verify=False, trust_env=False, timeout=timeout_s),
        )


def agent_arguments(function: Callable[..., Any]) -> list[str]:
    """Return those of ARGUMENTS that the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in ARGUMENTS if name in parameters]


def agent_fault(function: Callable[..., Any]) -> str | None:
    """Return what is wrong with the function's parameters, or None."""
    if wrong := missing_arguments(function, ARGUMENTS):
        return f"{name_of(function)} needs {', '.join(wrong)}; an agent may take {', '.join(ARGUMENTS)}"
    if not {"client", "base_url"} & set(agent_arguments(function)):
        return f"{name_of(function)} takes neither client nor base_url, so it cannot reach the model"
    return None


def checked_outcome(result: Any) -> Outcome:
    """Return the reward and the metrics that an agent returned; raise InvalidReturn if there is no reward."""
    metrics: dict[str, float] = {}
    reward = result
    if isinstance(result, Mapping):
        if "reward" not in result:
            keys = ", ".join(map(str, list(result)[:8])) or "no key"
            raise InvalidReturn("no reward", f"returned a dict without 'reward' (it has {keys})")
        reward, others = result["reward"], {k: v for k, v in result.items() if k != "reward"}
        for name, value in list(others.items())[:MAX_METRICS]:
            number = finite_number("agent", value)
            if isinstance(name, str) and name.isidentifier() and len(name) < 64 and isinstance(number, float):
                metrics[name] = number
    if reward is None:
        raise InvalidReturn("no reward", "returned None, not a number or a dict with 'reward'")
    number = finite_number("it", reward)
    if isinstance(number, Failure):
        raise InvalidReturn(number.cause, number.message.removeprefix("it "))
    return Outcome(reward=number, metrics=metrics)
