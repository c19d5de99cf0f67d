"""Programs that are wrong and try to decide the test: each one gets 0, and none is left without a reward."""

import dataclasses
import functools
import time

import pytest
from sections import sections

from qerl.config import CodeConfig, TaskConfig
from qerl.tasks.code.grade import code

TASK = TaskConfig(
    rewards=("code",),
    answer_column="tests",
    code=CodeConfig(test_timeout_s=60.0, memory_mb=512, credit="all", unsafe=True),
)
GRADE = []


def graded(program, tests, entry_point=None):
    """The reward; the sandbox is probed once for all of them."""
    if not GRADE:
        GRADE.append(code(dataclasses.replace(TASK, reward_timeout_s=300.0)))
    text = f"```python\n{program}\n```"
    return GRADE[0](completions=[text], tests=[tests], entry_point=[entry_point])[0]


CHEATS = {name: parts for name, parts in sections("cheats.txt").items() if "test" in parts}
SQUARE = "def f(x): return x ** 2"


@functools.cache
def can_be_passed(test, right):
    return graded(right, test) == 1.0


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_gains_nothing(cheat):
    parts = CHEATS[cheat]
    assert graded(parts["program"], parts["test"]) == 0.0
    assert can_be_passed(parts["test"], parts.get("right", SQUARE))


WRITES = "import os, sys\ndef f():\n    os.write(int(sys.argv[2]), %s)\n    os._exit(0)"
VALUES = {
    "an overflow": (b'{"complex": [1%s, 0]}' % (b"0" * 400), 4),
    "a value without a kind": (b"{}", 4),
    "a list of them": (b"[{}]", [4]),
    "a kind that is not there": (b'{"eval": "4"}', 4),
    "a key that is a list": (b'{"dict": [[[1], 4]]}', {"4": 4}),
    "a key too long to print": (b'{"dict": [[{"int": "0x1%s"}, 4]]}' % (b"0" * 20000), {"4": 4}),
    "a number too long to read": (b"1" + b"0" * 20000, 4),
    "an int that is none": (b'{"int": [4]}', 4),
    "half a pair": (b'{"dict": [[4]]}', {"4": 4}),
    "an array of objects": (b'{"array": ["|O8", [1], "00"]}', [4]),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, [4]),
    "no JSON": (b"\xff\xfe4", 4),
    "nothing": (b"", 4),
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_cannot_be_read_or_compared_is_wrong(value):
    text, expected = VALUES[value]
    assert graded(WRITES % text, {"fn_name": "f", "inputs": [[]], "outputs": [expected]}) == 0.0


COLLIDING = "[{'int': hex(k * (2**61 - 1))} for k in range(100_000)]"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{'set': ITEMS}", [4]),
        ("{'dict': [[item, 4] for item in ITEMS]}", {"4": 4}),
        ("{'dict': [[{'tuple': [{'frozenset': ITEMS}]}, 4]]}", {"4": 4}),
    ],
)
def test_items_that_collide_cost_no_time(value, expected):
    text = f"json.dumps({value.replace('ITEMS', COLLIDING)}).encode()"
    begin = time.monotonic()
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
    assert graded("import json\n" + WRITES % text, tests) == 0.0
    assert time.monotonic() - begin < 60  # to build a set of them takes minutes
