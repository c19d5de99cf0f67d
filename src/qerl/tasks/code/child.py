"""Run one program or test in the sandbox. The runner starts it as `python -I child.py MODE ...`.

    stdin     the program reads standard input; its standard output is graded
    call      one function of the program is called once; its value is sent as plain data
    serve     the program stays loaded and answers requests about its names: values, calls, attributes
    test      a test runs here and reaches the program, in a process of mode serve, through a socket

The test and the expected values are never in the program's process. Values travel as JSON and arrive as plain
data: a subclass of int, list or dict with its own __eq__ is an int, list or dict on the other side. Any other
object stays in its process and is a RemoteValue on the other side, which equals no plain value.

This file and sandbox.py import the standard library only: qerl need not be importable in the child.
"""

import ast
import builtins
import importlib
import json
import math
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_LINE_BYTES = 16 << 20
_BY_NAME = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is not plain data")


def encode(value: Any, other: Callable[[Any], Any] = _refuse) -> Any:
    """Return the value as JSON data; other(object) returns that of an object which is not plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in list(value)]
    for name, kind in _BY_NAME.items():
        if isinstance(value, kind):
            return {name: [encode(item, other) for item in list(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in dict(value).items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return other(value)


def decode(value: Any, remote: Any = None) -> Any:
    """Invert `encode`; remote(index) makes the value that stands for an object in the other process."""
    if isinstance(value, list):
        return [decode(item, remote) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _BY_NAME:
        return _BY_NAME[name](decode(item, remote) for item in content)
    if name == "dict":
        return {decode(key, remote): decode(item, remote) for key, item in content}
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name == "remote" and remote is not None:
        return remote(content)
    raise ValueError(f"unknown kind of value: {name!r}")


def _load(source: str, name: str) -> dict[str, Any]:
    """Run the program as module `name` and return its globals."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    exec(compile(source, "sample.py", "exec"), module.__dict__)
    return module.__dict__


def _function(names: dict[str, Any], name: str) -> Any:
    """Return a function of the program, or a method of its class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


# The program's side of a test (mode serve).


def _serve(names: dict[str, Any], stream: Any) -> None:
    remote: list[Any] = [names]
    listed = [name for name in names if not name.startswith("__")]
    _send(stream, {"names": [name for name in listed if isinstance(name, str)]})
    while line := stream.readline(MAX_LINE_BYTES):
        request = json.loads(line)
        try:
            answer = _answer(request, remote)
        except Exception as error:
            answer = {"error": type(error).__name__}
        _send(stream, answer)


def _answer(request: dict[str, Any], remote: list[Any]) -> dict[str, Any]:
    def keep(value: Any) -> dict[str, int]:
        remote.append(value)
        return {"remote": len(remote) - 1}

    target, action = remote[request["target"]], request["action"]
    arguments = decode(request["arguments"], lambda index: remote[index])
    if action == "call":
        value = target(*arguments[0], **arguments[1])
        if isinstance(value, types.GeneratorType | map | filter | zip | range):
            value = list(value)
        return {"value": encode(value, keep), "arguments": encode(list(arguments[0]), keep)}
    actions = {"attribute": getattr, "item": operator.getitem, "equal": lambda a, b: bool(a == b)}
    actions |= {"len": len, "list": list, "str": str, "repr": repr, "bool": bool}
    return {"value": encode(actions[action](target, *arguments), keep)}


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


# The test's side (mode test).


class _ProgramEnded(BaseException):
    """The program's process has ended. Not an Exception, because a test may expect and catch one."""


class _Connection:
    """Connection to the process that runs the program."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.names: list[str] = self._receive()["names"]

    def request(self, index: int, action: str, *arguments: Any) -> Any:
        arguments_data = encode(list(arguments), _index_of)
        _send(self._stream, {"target": index, "action": action, "arguments": arguments_data})
        answer = self._receive()
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(f"the program raised {answer['error']}")
        remote = lambda index: RemoteValue(self, index)  # noqa: E731
        if action == "call":
            _write_back(arguments[0], decode(answer["arguments"], remote))
        return decode(answer["value"], remote)

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise _ProgramEnded
        return json.loads(line)


def _index_of(value: Any) -> Any:
    return {"remote": value._index} if isinstance(value, RemoteValue) else _refuse(value)


def _write_back(arguments: tuple[Any, ...], after: list[Any]) -> None:
    """Copy in-place changes of the program's copies to the test's arguments."""
    for mine, theirs in zip(arguments, after, strict=True):
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif type(mine) is type(theirs) and isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)


class RemoteValue:
    """An object in the program's process. It equals no plain value and supports no arithmetic, because the
    program would decide the result."""

    def __init__(self, connection: _Connection, index: int):
        self._connection, self._index = connection, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.request(self._index, "call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.request(self._index, "attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._connection.request(self._index, "item", key)

    def __eq__(self, other: object) -> bool:
        is_remote = isinstance(other, RemoteValue)
        return is_remote and self._connection.request(self._index, "equal", other) is True

    def __hash__(self) -> int:
        return hash(self._index)

    def __len__(self) -> int:
        return self._connection.request(self._index, "len")

    def __iter__(self) -> Any:
        return iter(self._connection.request(self._index, "list"))

    def __str__(self) -> str:
        return self._connection.request(self._index, "str")

    def __repr__(self) -> str:
        return self._connection.request(self._index, "repr")

    def __bool__(self) -> bool:
        return self._connection.request(self._index, "bool") is True


def _run_test(test: str, stream: Any) -> None:
    """Run the test; raise if it fails."""
    connection = _Connection(stream)
    tree = ast.parse(test)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"__name__": "test", "math": math}
    known = {*dir(builtins), *sys.stdlib_module_names}
    # abs in `assert abs(f(2) - 1.4) < 1e-6` is Python's; sum in `assert sum(1, 2) == 3` is the program's.
    theirs = [name for name in connection.names if name in used and name not in known]
    for name in theirs or [name for name in connection.names if name in used]:
        names[name] = connection.request(0, "item", name)
    for name in (used & sys.stdlib_module_names) - names.keys():
        names[name] = importlib.import_module(name)
    solution = types.ModuleType("solution")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports if node.module == "solution" for alias in node.names}
    for name in connection.names:
        if name in imported:
            setattr(solution, name, connection.request(0, "item", name))
    sys.modules["solution"] = solution
    exec(compile(tree, "test.py", "exec"), names)
    for name, function in list(names.items()):
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            function()


def main() -> None:
    """Read argv: the mode, and the descriptors of the result, the order (JSON: source, limits, ...) and the
    socket, or 0."""
    mode, (result, order, link) = sys.argv[1], map(int, sys.argv[2:5])
    try:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from sandbox import confine

        del sys.path[0]
        with os.fdopen(order, encoding="utf-8") as file:
            settings = json.load(file)
        stream = socket.socket(fileno=link).makefile("rwb") if link else None
        has_landlock = confine(**settings["limits"])
    except Exception as error:
        os.write(result, f"E{type(error).__name__}: {error}".encode())
        sys.exit(1)
    os.write(result, b"L" if has_landlock else b"S")
    source = settings["source"]
    if mode == "stdin":
        os.close(result)
        _load(source, "__main__")
    elif mode == "call":
        value = _function(_load(source, "sample"), settings["function"])(*decode(settings["arguments"]))
        os.write(result, json.dumps(encode(value)).encode())
    elif mode == "serve":
        os.close(result)
        _serve(_load(source, "sample"), stream)
    else:
        _run_test(source, stream)
        os.write(result, b"passed")


if __name__ == "__main__":
    main()
