"""An agent that plays an environment of OpenEnv: reset, and a step for each of the policy's answers.

    the server's actions have a schema    the answer is a JSON object of it (or the text of its only field)
    its actions are calls of MCP tools    the policy gets the tools; an answer without a call ends the episode

If an answer is not an action, the model gets an error as a message and answers again. The reward is the sum
of the steps' rewards.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from qerl.config import TaskConfig
from qerl.config.task import OPENENV
from qerl.errors import RunError
from qerl.tasks.event_loop import InvalidReturn

_TOOL_SCHEMAS = {"Action", "CallToolAction", "ListToolsAction"}
_START_TIMEOUT_S = 60.0
_BUSY_S = 0.2
_ENDING_S = 0.2
_MAX_STARTS = 3
_PR_SET_PDEATHSIG = 1


class OpenEnvAgent:
    def __init__(self, config: TaskConfig, tool_timeout_s: float | None = None):
        """tool_timeout_s: longest wait for the answer to a reset or a step; None: that of openenv."""
        self.__name__ = config.name
        self._limits = {} if tool_timeout_s is None else {"message_timeout_s": tool_timeout_s}
        place, options = config.name.removeprefix(OPENENV), json.loads(config.env_options)
        self._place = place
        self._url = place if place.startswith(("http://", "https://")) else None
        self._max_turns = int(options.get("max_turns", 8))
        self._is_structured = bool(options.get("structured", False))
        self.deterministic = bool(options.get("deterministic", False))
        """True if a branch may play an episode again: see replay.py."""
        self._process: subprocess.Popen[bytes] | None = None
        self._schema: dict[str, Any] = {}
        self._starting: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def __call__(self, client: Any, model: str, row: dict[str, Any]) -> dict[str, float]:
        async with self._session() as session:
            if self._schema.get("title") in _TOOL_SCHEMAS:
                return await self._with_tools(client, model, session, row["reset"])
            return await self._with_actions(client, model, session, row["reset"])

    async def _with_actions(
        self, client: Any, model: str, session: Any, reset: dict[str, Any]
    ) -> dict[str, float]:
        result, total, refused = await session.reset(**reset), 0.0, 0
        head = f"Answer with one action, a JSON object of this schema: {json.dumps(self._schema)}"
        messages = [{"role": "user", "content": f"{head}\n{_text(result.observation)}"}]
        schema = {"name": "action", "schema": self._schema}
        form = (
            {"response_format": {"type": "json_schema", "json_schema": schema}} if self._is_structured else {}
        )
        for _ in range(self._max_turns):
            if result.done:
                break
            answer = await client.chat.completions.create(model=model, messages=messages, **form)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            action = action_of(said, self._schema)
            if action is None:
                refused += 1
                messages.append({"role": "user", "content": "Error: that is not an action of the schema."})
                continue
            result = await session.step(action)
            total += float(result.reward or 0.0)
            messages.append({"role": "user", "content": _text(result.observation)})
        return {"reward": total, "refused_actions": refused, "done": float(bool(result.done))}

    async def _with_tools(
        self, client: Any, model: str, session: Any, reset: dict[str, Any]
    ) -> dict[str, float]:
        result, total = await session.reset(**reset), 0.0
        listed = (await session.step({"type": "list_tools"})).observation["tools"]
        tools = [{"type": "function", "function": _function(each)} for each in listed]
        messages: list[Any] = [{"role": "user", "content": _text(result.observation)}]
        choice = {"tool_choice": "required"} if self._is_structured else {}
        for _ in range(self._max_turns):
            answer = await client.chat.completions.create(
                model=model, messages=messages, tools=tools, **choice
            )
            message = answer.choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or ():
                arguments = json.loads(call.function.arguments)
                action = {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments}
                result = await session.step(action)
                total += float(result.reward or 0.0)
                content = _text(result.observation)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if result.done or not message.tool_calls:
                break
        return {"reward": total, "done": float(bool(result.done))}

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        """Open a session of the server; wait while it has as many as it takes."""
        client_kind, num_starts = importlib.import_module("openenv").GenericEnvClient, 0
        while True:
            url = await self._ready_url()
            session, process = client_kind(base_url=url, **self._limits), self._process
            try:
                await session.connect()
                await session.state()  # the server refuses a session with its first message
                break
            except Exception as error:
                with contextlib.suppress(Exception):
                    await session.close()
                if "CAPACITY" not in str(error):
                    num_starts += 1  # another episode may have ended the server
                    if num_starts > _MAX_STARTS or process is None or await _exit_code(process) is None:
                        raise
            await asyncio.sleep(_BUSY_S)
        try:
            yield session
        except TimeoutError:  # its connection is closed: the late answer would be taken for the next one
            limit_s = self._limits.get("message_timeout_s")
            message = "the environment did not answer" + ("" if limit_s is None else f" after {limit_s:g} s")
            raise InvalidReturn("over the tool's deadline", message) from None
        except Exception as error:
            if process is not None and (code := await _exit_code(process)) is not None:
                raise RunError(f"the server of {self.__name__} ended with exit code {code}") from error
            raise
        finally:
            with contextlib.suppress(Exception):
                await session.close()

    async def _ready_url(self) -> str:
        """Return the server's URL; start its process if there should be one and there is none."""
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting[0] is not loop:
            self._starting = loop, asyncio.Lock()
        async with self._starting[1]:
            if self._process is not None and self._process.poll() is not None:
                self._url = None
            if self._url is None:
                self._url = await asyncio.to_thread(self._start)
            if not self._schema:
                self._schema = (await asyncio.to_thread(_fetched, f"{self._url}/schema"))["action"]
            return self._url

    def _start(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        module, _, app = self._place.rpartition(":")
        path = Path(module)
        folder, name = (path.parent, path.stem) if module.endswith(".py") else (Path(), module)
        options = ["--port", str(port), "--app-dir", str(folder), "--log-level", "warning"]
        libc = ctypes.CDLL(None)  # loaded before the fork
        self._process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"{name}:{app}", *options],
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        url = f"http://127.0.0.1:{port}"
        for _ in range(int(_START_TIMEOUT_S / 0.1)):
            with contextlib.suppress(OSError):
                _fetched(f"{url}/health")
                return url
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
                break
        raise RunError(f"the server of {self.__name__} did not start; its error is above")


async def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the process's exit code; None if it still runs. A lost connection may be seen before its end."""
    for _ in range(int(_ENDING_S / 0.02)):
        if (code := process.poll()) is not None:
            return code
        await asyncio.sleep(0.02)
    return None


def action_of(said: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON object in the text; without one, the text as the only required field; else None."""
    start, end = said.find("{"), said.rfind("}")
    required = schema.get("required", [])
    if 0 <= start < end:
        with contextlib.suppress(ValueError, RecursionError):
            action = json.loads(said[start : end + 1])
            return action if all(name in action for name in required) else None
    is_text = len(required) == 1 and schema["properties"][required[0]].get("type") == "string"
    return {required[0]: said.strip()} if is_text and said.strip() else None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}


def _text(observation: Any) -> str:
    """Return what the policy reads: the observation without what is empty."""
    if not isinstance(observation, dict):
        return str(observation)
    return json.dumps({name: value for name, value in observation.items() if value not in (None, {}, [])})


def _fetched(url: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as reply:
        return json.load(reply)
