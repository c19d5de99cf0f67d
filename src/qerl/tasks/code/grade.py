"""The reward of a sample's Python: the fraction of the row's tests that it passes, or 1 for all and else 0.

The program is the last ```python block of the sample, else its last block of any kind, else all of it. Each
test has a process of its own, confined (sandbox.py), and a deadline; tests that the whole reward's deadline
leaves no time for are failed.

What the program says of itself counts for nothing. It is given inputs and never what is expected: printed
text and values are compared out here, and a test in Python runs in another process, which asks the program
for plain data (child.py). So it gains nothing by leaving with 0, by printing "passed", by patching what
it finds around it, by writing to every descriptor or by objects that equal everything.

Not guarded against: a program that knows the answers to these very inputs; tests whose truth is left to the
program's own objects (`assert f(2).is_right()`), or that hold for any error; and a fault of the kernel. A
program can read Python's installation, keep one core and its memory busy until the deadline, and fill its
folder at 1 MiB a file as fast as the disk takes it. Programs that need child processes, sockets or files of
their own fail.
"""

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.code.runner import Limits, SandboxUnavailable, probe, run_call, run_test, run_with_input
from qerl.tasks.code.test_cases import (
    AssertCase,
    Case,
    InputCase,
    cases_of,
    is_right_output,
    is_right_value,
)

_logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_OUTPUT_BYTES = 4 << 20
_SHARE_FOR_TESTS = 0.8
"""Of task.reward_timeout_s; past that the sample would have no reward instead of a low one."""


def code(config: TaskConfig) -> Callable[..., Any]:
    own = config.code
    limits = Limits(own.test_timeout_s, own.memory_mb << 20, _OUTPUT_BYTES)
    try:
        if not probe(limits):
            _logger.warning(
                "this kernel has no Landlock: programs have no network and no children, but read and write"
                " the files that %s may",
                "nobody" if os.geteuid() == 0 else "this user",
            )
    except SandboxUnavailable as error:
        raise UserError(f"task.rewards: code cannot confine a program on this machine: {error}") from error

    def one(completion: Any, tests: Any, entry_point: str | None) -> float:
        end = time.monotonic() + _SHARE_FOR_TESTS * config.reward_timeout_s
        cases = cases_of(tests, entry_point)[: own.max_tests]
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        passed = 0
        for case in cases:
            is_passed = passes(program_of(text), case, limits, end)
            if own.credit == "all" and not is_passed:
                return 0.0
            passed += is_passed
        return passed / len(cases)

    def code(completions: list[Any], **columns: list[Any]) -> list[float]:
        points = columns.get("entry_point", [None] * len(completions))
        rows = zip(completions, columns[config.answer_column], points, strict=True)
        return [one(*row) for row in rows]

    return code


def program_of(text: str) -> str:
    blocks = _BLOCK.findall(text)
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [text])[-1]


def passes(program: str, case: Case, limits: Limits, end: float) -> bool:
    """Whether the program passes before `end`, a time.monotonic()."""
    limits = dataclasses.replace(limits, deadline_s=min(limits.deadline_s, end - time.monotonic()))
    if limits.deadline_s <= 0:
        return False
    if isinstance(case, InputCase):
        printed = run_with_input(program, case.given, limits)
        return printed is not None and is_right_output(printed, case.expected)
    if isinstance(case, AssertCase):
        return run_test(program, case.text, limits)
    value = run_call(program, case.function, case.given, limits)
    return value is not None and is_right_value(value[0], case.expected)
