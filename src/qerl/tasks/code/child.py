"""What runs inside: one program, confined, in one of four ways. `python -I child.py` starts it.

    input     the program reads standard input; its standard output is what is judged
    call      a function of the program is called once; its value goes out as plain data
    serve     the program stays and answers questions about its names: values, calls, attributes
    judge     a test runs here, and the program, which runs elsewhere (serve), is asked through a socket

The test and what it expects are never in the process of the program. Values cross as JSON, and arrive as
plain data: a subclass of int, list or dict with an __eq__ of its own is an int, a list or a dict on the other
side. Anything else stays where it is and is a Far there, which equals no plain value.

One file with sandbox.py, of the standard library alone: qerl need not be importable where it runs.
"""

import ast
import builtins
import importlib
import json
import math
import os
import socket
import sys
import types
from typing import Any

MAX_LINE_BYTES = 16 << 20
_BY_NAME = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, far: list[Any] | None = None) -> Any:
    """As JSON has it; what is not plain data is put into far, and TypeError without one."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, far) for item in list(value)]
    for name, kind in _BY_NAME.items():
        if isinstance(value, kind):
            return {name: [encode(item, far) for item in list(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, far), encode(item, far)] for key, item in dict(value).items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if far is None:
        raise TypeError(f"a {type(value).__name__} is not plain data")
    far.append(value)
    return {"far": len(far) - 1}


def decode(value: Any, far: Any = None) -> Any:
    """The inverse; far(index) stands for what has stayed on the other side. ValueError for anything else."""
    if isinstance(value, list):
        return [decode(item, far) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name in _BY_NAME:
        return _BY_NAME[name](decode(item, far) for item in held)
    if name == "dict":
        return {decode(key, far): decode(item, far) for key, item in held}
    if name == "int":
        return int(held, 16)
    if name == "bytes":
        return bytes.fromhex(held)
    if name == "complex":
        return complex(*held)
    if name == "far" and far is not None:
        return far(held)
    raise ValueError(f"no value of kind {name!r}")


def _load(source: str, name: str) -> dict[str, Any]:
    """The names of the program, run as the module `name`."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    exec(compile(source, "sample.py", "exec"), module.__dict__)
    return module.__dict__


def _found(names: dict[str, Any], name: str) -> Any:
    """A function of the program, or the method of its class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


# The program's side of a test.


def _serve(names: dict[str, Any], stream: Any) -> None:
    far: list[Any] = [names]
    listed = [name for name in names if not name.startswith("__")]
    _send(stream, {"names": [name for name in listed if isinstance(name, str)]})
    while line := stream.readline(MAX_LINE_BYTES):
        question = json.loads(line)
        try:
            answer = _answered(question, far)
        except Exception as error:
            answer = {"error": type(error).__name__}
        _send(stream, answer)


def _answered(question: dict[str, Any], far: list[Any]) -> dict[str, Any]:
    it, do = far[question["far"]], question["do"]
    given = decode(question["given"], lambda index: far[index])
    if do == "name":
        return {"value": encode(it[given[0]], far)}
    if do == "call":
        value = it(*given[0], **given[1])
        if isinstance(value, types.GeneratorType | map | filter | zip | range):
            value = list(value)
        return {"value": encode(value, far), "given": encode(list(given[0]), far)}
    ask = {
        "attribute": lambda: getattr(it, given[0]),
        "item": lambda: it[given[0]],
        "len": lambda: len(it),
        "list": lambda: list(it),
        "str": lambda: str(it),
        "repr": lambda: repr(it),
        "truth": lambda: bool(it),
        "same": lambda: bool(it == given[0]),
    }
    return {"value": encode(ask[do](), far)}


def _send(stream: Any, what: dict[str, Any]) -> None:
    stream.write(json.dumps(what).encode() + b"\n")
    stream.flush()


# The test's side.


class _Gone(BaseException):
    """The program has ended. No Exception: a test that expects one would take it."""


class _Line:
    """Questions to the process that holds the program."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.names: list[str] = self._received()["names"]

    def ask(self, index: int, do: str, *given: Any) -> Any:
        _send(self._stream, {"far": index, "do": do, "given": _outward(list(given))})
        answer = self._received()
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(f"the program raised {answer['error']}")
        far = lambda held: RemoteValue(self, held)  # noqa: E731
        if do == "call":
            _write_back(given[0], decode(answer["given"], far))
        return decode(answer["value"], far)

    def _received(self) -> dict[str, Any]:
        line = self._stream.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise _Gone
        return json.loads(line)


def _outward(value: Any) -> Any:
    if isinstance(value, RemoteValue):
        return {"far": value._index}
    if isinstance(value, list):
        return [_outward(item) for item in value]
    for name, kind in _BY_NAME.items():
        if isinstance(value, kind):
            return {name: [_outward(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_outward(key), _outward(item)] for key, item in value.items()]}
    return encode(value)


def _write_back(given: tuple[Any, ...], after: list[Any]) -> None:
    """A program that works in place has changed its copy."""
    for mine, theirs in zip(given, after, strict=True):
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif type(mine) is type(theirs) and isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)


class RemoteValue:
    """An object of the program. It equals no plain value and takes part in no arithmetic: the program would
    say what comes of it."""

    def __init__(self, line: _Line, index: int):
        self._line, self._index = line, index

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._line.ask(self._index, "call", given, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask(self._index, "attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask(self._index, "item", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteValue) and self._line.ask(self._index, "same", other) is True

    def __hash__(self) -> int:
        return hash(self._index)

    def __len__(self) -> int:
        return self._line.ask(self._index, "len")

    def __iter__(self) -> Any:
        return iter(self._line.ask(self._index, "list"))

    def __str__(self) -> str:
        return self._line.ask(self._index, "str")

    def __repr__(self) -> str:
        return self._line.ask(self._index, "repr")

    def __bool__(self) -> bool:
        return self._line.ask(self._index, "truth") is True


def _judge(test: str, stream: Any) -> None:
    """Returns if the test holds, and raises if not."""
    line = _Line(stream)
    tree = ast.parse(test)
    asked = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"__name__": "test", "math": math}
    known = {*dir(builtins), *sys.stdlib_module_names}
    # abs in `assert abs(f(2) - 1.4) < 1e-6` is Python's; sum in `assert sum(1, 2) == 3` is the program's.
    theirs = [name for name in line.names if name in asked and name not in known]
    for name in theirs or [name for name in line.names if name in asked]:
        names[name] = line.ask(0, "name", name)
    for name in (asked & sys.stdlib_module_names) - names.keys():
        names[name] = importlib.import_module(name)
    solution = types.ModuleType("solution")
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"
    ]
    imported = {alias.name for node in imports for alias in node.names}
    vars(solution).update({name: line.ask(0, "name", name) for name in line.names if name in imported})
    sys.modules["solution"] = solution
    exec(compile(tree, "test.py", "exec"), names)
    for name, function in list(names.items()):
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            function()


def main() -> None:
    """argv: the way, and descriptors of verdict, order (JSON of text, limits and more) and socket, or 0."""
    way, (verdict, order, line) = sys.argv[1], map(int, sys.argv[2:5])
    try:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from sandbox import confine

        del sys.path[0]
        with os.fdopen(order, encoding="utf-8") as file:
            settings = json.load(file)
        stream = socket.socket(fileno=line).makefile("rwb") if line else None
        has_landlock = confine(**settings["limits"])
    except Exception as error:
        os.write(verdict, f"E{type(error).__name__}: {error}".encode())
        sys.exit(1)
    os.write(verdict, b"L" if has_landlock else b"S")
    text = settings["text"]
    if way == "input":
        os.close(verdict)
        _load(text, "__main__")
    elif way == "call":
        value = _found(_load(text, "sample"), settings["function"])(*decode(settings["given"]))
        os.write(verdict, json.dumps(encode(value)).encode())
    elif way == "serve":
        os.close(verdict)
        _serve(_load(text, "sample"), stream)
    else:
        _judge(text, stream)
        os.write(verdict, b"passed")


if __name__ == "__main__":
    main()
