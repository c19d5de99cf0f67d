"""Run one program or test in the sandbox. It starts as `python -I child.py MODE ...`
or is forked from one that did.

    stdin     the program reads standard input; its standard output is graded
    call      one function of the program is called once; its value is sent as plain data
    serve     the program stays loaded and answers requests about its names: values, calls, attributes
    test      a test runs here (test_process.py) and reaches the program, in a process of mode serve, through
              a socket (remote_value.py)

The test and the expected values are never in the program's process. Values travel as plain data (values.py);
any other object stays in its process and is a RemoteValue on the other side, which equals no plain value.

This file and those that it imports import the standard library only: qerl need not be importable here.
"""

import builtins
import contextlib
import functools
import importlib
import io
import json
import operator
import os
import socket
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

MAX_LINE_BYTES = 16 << 20


def _load(source: str, name: str) -> dict[str, Any]:
    """Run the program as module `name` and return its globals."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    exec(compile(source, "sample.py", "exec"), module.__dict__)
    return module.__dict__


# The program's side of a test (mode serve).


class _Server:
    """Answers requests about the program's names, and about the objects that earlier answers referred to.

    A function of the test that the program calls is a request of its own to the test's process, which may
    make requests before it answers.
    """

    def __init__(
        self, stream: Any, names: dict[str, Any], encode: Callable[..., Any], decode: Callable[..., Any]
    ):
        self._stream = stream
        self._objects: list[Any] = [names]
        self._indices: dict[int, int] = {}
        self._encode, self._decode = encode, decode
        self._loop: Any = None

    def run(self) -> None:
        self._send(_listed(self._objects[0]))
        self._serve()

    def _serve(self) -> dict[str, Any]:
        """Answer requests until there is a message that is none."""
        while line := self._stream.readline(MAX_LINE_BYTES):
            message = json.loads(line)
            if "target" not in message:
                return message
            out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True) for _ in "12")
            with warnings.catch_warnings(record=True) as caught:
                try:
                    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                        answer = self._answer(**message)
                except Exception as error:
                    answer = {"error": _described(error)}
            answer["printed"] = [text.buffer.getvalue().decode() for text in (out, err)]
            self._send(answer | {"warned": [_described(each.message) for each in caught or ()]})
        os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def _answer(self, target: int, action: str, arguments: Any) -> dict[str, Any]:
        subject, values = self._objects[target], self._decode(arguments, self._known)
        if action == "call":
            value = subject(*values[0], **values[1])
            if isinstance(value, types.GeneratorType | map | filter | zip | range):
                value = list(value)
            after = self._encode(list(values[0]), self._reference)
            return {"value": self._encode(value, self._reference), "arguments": after}
        actions = {"attribute": getattr, "item": operator.getitem, "equal": lambda a, b: bool(a == b)}
        actions |= {"set_attribute": setattr, "set_item": operator.setitem, "await": self._awaited}
        actions |= {kind.__name__: kind for kind in (len, list, str, repr, bool)}
        actions["is_instance"] = lambda kind, value: isinstance(value, kind)
        return {"value": self._encode(actions[action](subject, *values), self._reference)}

    def _known(self, name: str, index: int) -> Any:
        return self._objects[index] if name == "remote" else functools.partial(self._call_back, index)

    def _call_back(self, index: int, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the test."""
        self._send(
            {"callback": index, "arguments": self._encode([list(arguments), keywords], self._reference)}
        )
        message = self._serve()
        if "raised" in message:
            kind = getattr(builtins, message["raised"], RuntimeError)
            raise kind("a function of the test has raised it")
        return self._decode(message["result"], self._known)

    def _reference(self, value: Any) -> dict[str, int]:
        index = self._indices.setdefault(id(value), len(self._objects))
        if index == len(self._objects):
            self._objects.append(value)
        return {"coroutine" if isinstance(value, types.CoroutineType) else "remote": index}

    def _awaited(self, value: Any) -> Any:
        import asyncio

        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(value)


def _described(error: Any) -> list[Any]:
    """Return [names of the class and of those it derives from, text]."""
    return [[kind.__name__ for kind in type(error).__mro__], str(error)]


def _listed(names: dict[str, Any]) -> dict[str, Any]:
    """Return what the test may ask for: names, functions that the program defines, and its exceptions."""
    public = {str(name): value for name, value in names.items() if not str(name).startswith("__")}
    functions = [
        name
        for name, value in public.items()
        if isinstance(value, types.FunctionType) and value.__globals__ is names
    ]
    exceptions = {
        name: [kind.__name__ for kind in value.__mro__[1:]]
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ != "builtins"
    }
    return {"names": list(public), "functions": functions, "exceptions": exceptions}


def main() -> None:
    """Read argv: the mode, and the descriptors of the result, the order (JSON: source, limits, ...) and the
    socket, or 0; of a server (fork_server.py) those of its control socket and of the worker."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from confine import confine
    from fork_server import enter, next_request
    from values import decode, encode

    mode, descriptors = sys.argv[1], [*map(int, sys.argv[2:])]
    run_test = importlib.import_module("test_process").run_test if mode == "test" else None
    request = None
    if len(descriptors) == 2:
        request = next_request(*descriptors)
        descriptors = [*request.channels, 0][:3]
        sys.argv[2:] = map(str, descriptors)
    del sys.path[0]
    result, order, link = descriptors
    try:
        if request is not None:
            enter(request)
        with os.fdopen(order, encoding="utf-8") as file:
            settings = json.load(file)
        stream = socket.socket(fileno=link).makefile("rwb") if link else None
        active = confine(**settings["confine"])
    except Exception as error:
        os.write(result, f"E{type(error).__name__}: {error}".encode())
        sys.exit(1)
    # If the worker has ended, before its end would have killed this process, this raises BrokenPipeError.
    os.write(result, b"%d" % (("landlock" in active) + 2 * ("seccomp" in active)))
    if mode == "stdin":
        os.close(result)
        _load(settings["source"], "__main__")
    elif mode == "call":
        names, name = _load(settings["source"], "sample"), settings["function"]
        function = names[name] if name in names else getattr(names["Solution"](), name)
        os.write(result, json.dumps(encode(function(*decode(settings["arguments"])))).encode())
    elif mode == "serve":
        os.close(result)
        warnings.simplefilter(
            "default"
        )  # those that the program itself does not ignore are the test's to see
        _Server(stream, _load(settings["source"], "sample"), encode, decode).run()
    elif run_test is not None:
        os.write(result, run_test(settings["test"], stream).encode())
        os._exit(0)  # the end of the interpreter would take a third of the time


if __name__ == "__main__":
    main()
