"""Reach the program, which runs in a process of its own, from the process of the test.

The program's process may answer anything. What arrives is plain data, a RemoteValue, or an exception whose
class the test's process has made; everything else ends the test, and the test has failed.
"""

import builtins
import json
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from values import decode, encode, refuse

MAX_LINE_BYTES = 16 << 20
_ITERATION_ENDS = (StopIteration, StopAsyncIteration)


class ProgramEnded(BaseException):
    """The program's process has ended. Not an Exception, because a test may expect and catch one."""


def send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class Connection:
    """Connection to the process that runs the program."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._remote: dict[int, RemoteValue] = {}
        self._classes: dict[str, type[Exception]] = {}
        self.has_ended = False
        """True once an answer was missing or malformed, also if the test went on after it."""
        self.refused: str | None = None
        """Type of an object of the test that cannot be passed to the program."""
        self._callbacks: list[Callable[..., Any]] = []
        message = self._receive()
        self.names: list[str] = message["names"]
        self.functions: list[str] = message["functions"]
        self._exceptions: dict[str, list[str]] = message["exceptions"]

    def value(self, name: str) -> Any:
        """Return a value of the program by its name, or a class for one of its exceptions."""
        return self._exception(name) if name in self._exceptions else self.request(0, "item", name)

    def request(self, index: int, action: str, *arguments: Any) -> Any:
        encoded = encode([*arguments], self._argument)
        send(self._stream, {"target": index, "action": action, "arguments": encoded})
        answer = self._receive()
        while "callback" in answer:
            send(self._stream, self._called(answer))
            answer = self._receive()
        try:
            for stream, text in zip((sys.stdout, sys.stderr), answer["printed"], strict=True):
                stream.write(str(text))
            warned = [
                warning for each in answer["warned"] if isinstance(warning := self._error(each), Warning)
            ]
            error = self._error(answer["error"]) if "error" in answer else None
            value = decode(answer.get("value"), self._special)
            after = decode(answer.get("arguments"), self._special)
        except Exception as malformed:
            raise self._ended() from malformed
        for warning in warned:
            warnings.warn(warning, stacklevel=3)
        if error is not None:
            raise error
        if action == "call":
            _write_back(arguments[0], after)
        return value

    def _called(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the test that was an argument, and return the message with its value."""
        try:
            arguments, keywords = decode(request["arguments"], self._special)
            value = self._callbacks[request["callback"]](*arguments, **keywords)
            return {"result": encode(value, _reference)}
        except Exception as error:
            is_builtin = type(error).__module__ == "builtins"
            return {"raised": type(error).__name__ if is_builtin else "RuntimeError"}

    def _argument(self, value: Any) -> Any:
        """Return what stands for an argument that is not plain data."""
        if isinstance(value, RemoteValue | types.CoroutineType):
            return _reference(value)
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        self.refused = type(value).__name__
        return refuse(value)

    def _special(self, name: str, content: Any) -> Any:
        if name not in ("remote", "coroutine") or not isinstance(content, int):
            raise ValueError(f"unknown kind of value: {name!r}")
        if name == "coroutine":
            return self._await(content)
        return self._remote.setdefault(content, RemoteValue(self, content))

    async def _await(self, index: int) -> Any:
        return self.request(index, "await")

    def _error(self, error: list[Any]) -> Exception:
        """Return the exception for [names of its class and of those it derives from, text]."""
        names, text = error
        kind = next(filter(None, map(self._exception, names)), RuntimeError)
        # Iteration would take it for its end: all(map(f, cases)) would be true.
        kind = RuntimeError if issubclass(kind, _ITERATION_ENDS) else kind
        raised = kind.__new__(kind)
        raised.args = (str(text),)
        return raised

    def _exception(self, name: str) -> type[Exception] | None:
        """Return Python's exception, or a class made for the program's; None for any other name."""
        if name in self._exceptions and name not in self._classes:
            base = next(filter(None, map(self._exception, self._exceptions[name])), Exception)
            self._classes[name] = type(name, (base,), {})
        kind = self._classes.get(name) or getattr(builtins, name, None)
        return kind if isinstance(kind, type) and issubclass(kind, Exception) else None

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline(MAX_LINE_BYTES)
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except Exception as malformed:
            raise self._ended() from malformed
        if not isinstance(message, dict):
            raise self._ended()
        return message

    def _ended(self) -> ProgramEnded:
        self.has_ended = True
        return ProgramEnded("the program's process has ended, or has sent no answer")


def _reference(value: Any) -> Any:
    return {"remote": value._qerl_index} if isinstance(value, RemoteValue) else refuse(value)


def _write_back(arguments: tuple[Any, ...], after: list[Any]) -> None:
    """Copy in-place changes of the program's copies to the test's arguments."""
    numpy: Any = sys.modules.get("numpy")
    for mine, theirs in zip(arguments, after, strict=True):
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif type(mine) is type(theirs) and isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)
        elif numpy is not None and isinstance(mine, numpy.ndarray) and isinstance(theirs, numpy.ndarray):
            numpy.copyto(mine, theirs)


def _asks(action: str) -> Any:
    """Return the method of a RemoteValue that asks for this action."""
    return lambda self, *arguments: self._qerl_ask(action, *arguments)


class RemoteValue:
    """An object in the program's process. It equals no plain value and supports no arithmetic, because the
    program would decide the result."""

    def __init__(self, connection: Connection, index: int):
        object.__setattr__(self, "_qerl_connection", connection)
        object.__setattr__(self, "_qerl_index", index)

    def _qerl_ask(self, action: str, *arguments: Any) -> Any:
        return self._qerl_connection.request(self._qerl_index, action, *arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._qerl_ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._qerl_ask("attribute", name)

    __setattr__, __getitem__, __setitem__ = _asks("set_attribute"), _asks("item"), _asks("set_item")
    __len__, __str__, __repr__ = _asks("len"), _asks("str"), _asks("repr")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteValue) and self._qerl_ask("equal", other) is True

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteValue) and self._qerl_ask("is_instance", value) is True

    def __hash__(self) -> int:
        return hash(self._qerl_index)

    def __iter__(self) -> Any:
        return iter(self._qerl_ask("list"))

    def __bool__(self) -> bool:
        return self._qerl_ask("bool") is True
