"""Reward a sample's Python by the fraction of the row's tests that it passes, or by 1 for all and else 0.

The program is the last ```python block of the sample, else its last block of any kind, else the whole text.
Each test runs in its own sandboxed process (backends.py) with a deadline; tests that do not start before the
reward's own deadline fail.

The reward does not trust what the program prints about itself. A program gets inputs, never expected values:
printed text and values are compared here, and a test in Python runs in another process, which asks the
program for plain data (child.py). Exiting with 0, printing "passed", patching modules, writing to every
descriptor, or objects that equal everything gain nothing.

Not guarded against: a program that contains the answers to these inputs; tests that rely on its own objects
(`assert f(2).is_right()`) or pass on any error; kernel bugs. A program can read Python's installation, use
one core and its memory until the deadline, and without Bubblewrap fill the disk with 1 MiB files.
Programs that need child processes, sockets or other files fail.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.code import sandbox, test_cases
from qerl.tasks.code.runner import Limits, SandboxUnavailable, run_call, run_test, run_with_input
from qerl.tasks.code.script import Script

_LANGUAGE = re.compile(r"\w*")
_BLANKS = " \t\r"
_OUTPUT_BYTES = 4 << 20
_SHARE_FOR_TESTS = 0.8
"""Share of task.reward_timeout_s; past all of it the sample would get no reward instead of a low one."""


def code(config: TaskConfig) -> Callable[..., Any]:
    settings = config.code
    limits = Limits(settings.test_timeout_s, settings.memory_mb << 20, _OUTPUT_BYTES)
    try:
        chosen = sandbox.choose(limits, unsafe=settings.unsafe)
    except SandboxUnavailable as error:
        raise UserError(
            f"task.rewards: code needs a sandbox, and none works here ({error}). Install bubblewrap, or use a"
            " kernel with Landlock and seccomp; task.code.unsafe runs programs with less"
        ) from error
    limits = dataclasses.replace(limits, backend=chosen.backend, cgroup=chosen.cgroup)

    def grade(completion: Any, tests: Any, entry_point: str | None) -> float:
        end = time.monotonic() + _SHARE_FOR_TESTS * config.reward_timeout_s
        cases = test_cases.parse_tests(tests, entry_point)[: settings.max_tests]
        program = program_of(completion if isinstance(completion, str) else completion[-1]["content"])
        passed = 0
        for case in cases:
            is_passed = passes(program, case, limits, end)
            if settings.credit == "all" and not is_passed:
                return 0.0
            passed += is_passed
        return passed / len(cases)

    def code(completions: list[Any], **columns: list[Any]) -> list[float]:
        points = columns.get("entry_point", [None] * len(completions))
        rows = zip(completions, columns[config.answer_column], points, strict=True)
        return [grade(*row) for row in rows]

    vars(code)["notice"] = str(chosen)
    return code


def program_of(text: str) -> str:
    blocks = list(_blocks(text))
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [text])[-1]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each block between lines that begin with three backticks, in one scan."""
    language, lines = None, []
    for line in text.split("\n"):
        fence = line.strip(_BLANKS)
        if language is None and fence.startswith("```"):
            word = _LANGUAGE.match(fence[3:].lstrip(_BLANKS))
            language, lines = word[0] if word else "", []
        elif fence == "```":
            yield str(language), "".join(f"{each}\n" for each in lines)
            language = None
        else:
            lines.append(line)


def passes(program: str, case: test_cases.TestCase, limits: Limits, end: float) -> bool:
    """True if the program passes before `end`, a value of time.monotonic()."""
    limits = dataclasses.replace(limits, deadline_s=min(limits.deadline_s, end - time.monotonic()))
    if limits.deadline_s <= 0:
        return False
    if isinstance(case, test_cases.InputCase):
        printed = run_with_input(program, case.stdin, limits)
        return printed is not None and _is_right(test_cases.is_correct_output, printed, case.expected)
    if isinstance(case, Script):
        return run_test(program, case, limits)
    value = run_call(program, case.function, case.arguments, limits)
    return value is not None and _is_right(test_cases.is_correct_value, value[0], case.expected)


def _is_right(compare: Callable[[Any, Any], bool], answer: Any, expected: Any) -> bool:
    """Compare; whatever fails on what the program gave fails the program, or it could leave the sample
    without a reward."""
    try:
        return compare(answer, expected)
    except Exception:
        return False
