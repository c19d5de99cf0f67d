"""The reward `code`: right and wrong programs, forms of tests, and programs that claim to be right."""

import dataclasses
import functools
import json
import time

import pytest

from qerl.config import CodeConfig, TaskConfig
from qerl.tasks import RewardPool
from qerl.tasks.code.grade import code, program_of
from qerl.tasks.code.script import read_script
from qerl.tasks.code.test_cases import (
    CallCase,
    InputCase,
    is_correct_output,
    is_correct_value,
    parse_tests,
)
from qerl.tasks.code.values import encode
from qerl.types import Group, Prompt, Sample

CODE = CodeConfig(test_timeout_s=20.0, unsafe=True)  # the tests of what is graded need no sandbox
TASK = TaskConfig(rewards=("code",), answer_column="tests", code=CODE)
SQUARES = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
SQUARE_CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
SQUARE_ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]


@functools.cache
def grader(credit):
    """The reward; the sandbox is probed once for each."""
    return code(dataclasses.replace(TASK, code=dataclasses.replace(TASK.code, credit=credit)))


def graded(program, tests, *, entry_point=None, credit="fraction"):
    reward, texts = grader(credit), [f"```python\n{program}\n```"]
    return reward(completions=texts, tests=[tests], entry_point=[entry_point])[0]


@pytest.mark.parametrize(
    ("tests", "right", "half", "wrong"),
    [
        (SQUARES, "print(int(input()) ** 2)", "print(int(input()) * 2)", "print(input())"),
        (SQUARE_CALLS, "def f(x): return x * x", "def f(x): return x * 2", "def f(x): return x"),
        (SQUARE_ASSERTS, "def f(x): return x * x", "def f(x): return x * 2", "def f(x): return x"),
    ],
)
def test_the_reward_is_the_fraction_of_tests_or_all_or_nothing(tests, right, half, wrong):
    assert [graded(program, tests) for program in (right, half, wrong)] == [1.0, 0.5, 0.0]
    assert [graded(program, tests, credit="all") for program in (right, half, wrong)] == [1.0, 0.0, 0.0]
    assert graded(right, json.dumps(tests)) == 1.0


ANY = "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
EVIL = ANY + (
    "    __ne__ = lambda s, o: False\n    __lt__ = __gt__ = __contains__ = __eq__\n"
    "    __sub__ = __rsub__ = __abs__ = lambda s, o=0: 0\n"
)
WRITES_EVERYWHERE = """
import os
for descriptor in range(3, 64):
    for text in (b"passed", b"Lpassed", b"L4", b'{"value": true}\\n', b'{"names": []}\\n'):
        try: os.write(descriptor, text)
        except OSError: pass
"""


@pytest.mark.parametrize("tests", [SQUARES, SQUARE_CALLS, SQUARE_ASSERTS, ["assert abs(f(2) - 4) < 1e-6"]])
@pytest.mark.parametrize(
    "forged",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "print('passed'); print('4'); print('9')",
        ANY + "def f(x): return Any()",
        EVIL + "def f(x): return Any()",
        "class Int(int):\n    __eq__ = lambda s, o: 1\n    __sub__ = lambda s, o: 0\ndef f(x): return Int(7)",
        "def f(x): raise SystemExit(0)",
        "import os\ndef f(x): os._exit(0)",
        WRITES_EVERYWHERE,
        WRITES_EVERYWHERE + "def f(x): return x",
        WRITES_EVERYWHERE + "os._exit(0)",
        "import builtins\nbuiltins.AssertionError = builtins.abs = abs = lambda *a: 0\ndef f(x): return 0.5",
        "import json, sys\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 1",
        "import __main__\n__main__.encode = lambda *a: 1\ndef f(x): return 1",
        "def f(x): return f(x)",
        "import sys\nsys.modules['__main__']._run_test = print\ndef f(x): return 0",
    ],
)
def test_success_cannot_be_forged(forged, tests):
    assert graded(forged, tests, credit="all") == 0.0


def test_what_is_expected_is_not_in_the_programs_process():
    searches = """
import gc, sys
def f(x=None):
    frame, found = sys._getframe(), [sys.argv]
    while frame: found.append((frame.f_locals, frame.f_globals)); frame = frame.f_back
    text = repr(found) + repr([o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))])
    return "is" + "there" if "".join(["expected", "value"]) in text else "absent"
"""
    expected = "expectedvalue"
    assert graded(searches, {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}) == 0.0
    assert graded(searches, {"fn_name": "f", "inputs": [[1]], "outputs": ["absent"]}) == 1.0
    assert graded(searches, [f"assert f() == 'absent' != {expected!r}"]) == 1.0
    program = f"{searches}\nprint(f())"
    assert graded(program, {"inputs": [""], "outputs": ["absent"]}) == 1.0


def test_the_deadline_of_all_tests_is_kept_and_the_sample_has_a_reward():
    quick = dataclasses.replace(CODE, test_timeout_s=1.5)
    config = dataclasses.replace(TASK, reward_timeout_s=5.0, code=quick)
    tests = {"inputs": [""] * 5, "outputs": ["1"] * 5}
    prompt = Prompt(index=0, text="", tokens_T=[1], messages=None, columns={"tests": tests})
    texts = ["while True: pass", "print(1)", "import os\nfor _ in range(5): os.fork()"]
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=text, finish="stop", version=0) for text in texts]
    begin = time.monotonic()
    with RewardPool(config) as pool:
        rewards = pool.score([Group(prompt=prompt, samples_G=samples)])
        assert not pool.failures
    assert rewards == [[0.0, 1.0, 0.0]] and time.monotonic() - begin < 60


def test_only_the_first_tests_count_where_there_are_many():
    tests = {"inputs": [""] * 3, "outputs": ["1", "1", "2"]}
    own = dataclasses.replace(TASK.code, max_tests=2)
    assert graded("print(1)", tests) == pytest.approx(2 / 3)
    assert code(dataclasses.replace(TASK, code=own))(completions=["print(1)"], tests=[tests]) == [1.0]


def test_a_row_without_tests_is_an_error():
    for tests in (None, [], "", {"test_cases": []}, {"inputs": [], "outputs": []}):
        with pytest.raises(ValueError, match="has no tests"):
            parse_tests(tests)
    with pytest.raises(ValueError, match="are for cpp"):
        parse_tests({"language": "cpp", "test_cases": [{"input": "", "output": ""}]})
    with pytest.raises(ValueError, match="has no fn_name"):
        parse_tests([{"type": "function_call", "input": "[1]", "output": "1"}])


def test_the_forms_of_data_sets():
    case = {"fn_name": None, "input": "2\n", "output": "4\n", "type": "stdin_stdout"}
    assert parse_tests({"language": "python", "test_cases": [case]}) == [InputCase("2\n", "4\n")]
    called = case | {"fn_name": "f", "input": "[2, 3]", "output": "[5]", "type": "function_call"}
    assert parse_tests([called]) == [CallCase("f", [2, 3], [5])]
    live = {"input": "[1, 2]\n3", "output": "5", "testtype": "functional", "fn_name": "f"}
    assert parse_tests([live]) == [CallCase("f", [[1, 2], 3], 5)]
    assert parse_tests({"input": ["2"], "output": ["4"]}) == [InputCase("2", "4")]
    assert parse_tests({"inputs": [["2", "3"]], "outputs": [["4"]], "fn_name": None}) == [
        InputCase("2\n3", "4")
    ]
    assert parse_tests(["assert f(2) == 4"]) == [read_script("assert f(2) == 4")]
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert graded("def f(x): return x * x", check, entry_point="f") == 1.0
    assert graded("def f(x): return x", check, entry_point="f") == 0.0


SAME_OUTPUT = [
    ("4", "4.0"), ("4.0", "4"), ("4.00\n-0.5", "4\n-.5"), ("1e3", "1000"), ("-0.0", "0.0"),
    ("0.3333333333", "0.33333333333333"), ("1000000.5", "1000000.50"), ("+4.", "4.0"), ("yes 2", "yes 2.0"),
    ("0.30000000000000004", "0.3"),
]  # fmt: skip
OTHER_OUTPUT = [
    ("04", "4"), ("+4", "4"), ("4", "4.5"), ("4.1", "4"), ("4.0000001", "4"), ("0x4", "4"), ("4_0", "40.0"),
    ("4 0", "4.0"), ("2.51", "2.5"), ("1000000.9", "1000000.5"), ("inf", "1e999"), ("1e999", "2e999"),
    ("\u0664", "4.0"), ("4,0", "4.0"), ("1/2", "0.5"), ("4\n\n4", "4.0\n4"), ("nan", "nan.0"), ("y", "y.0"),
    ("12345678901234567891", "12345678901234567890"),
]  # fmt: skip


def test_what_output_and_value_is_right():
    assert is_correct_output("1 2 \n3\n\n", "1 2\n3") and not is_correct_output("1 2 3", "1 2\n3")
    for printed, expected in SAME_OUTPUT:
        assert is_correct_output(printed, expected), (printed, expected)
    for printed, expected in OTHER_OUTPUT:
        assert not is_correct_output(printed, expected), (printed, expected)
    right = [((1, [2.0000001]), [1, [2]]), ({1: "a"}, {"1": "a"}), (5, [5]), ({(1, 2): 3}, {"(1, 2)": 3})]
    right += [(4, 4.0), (4.0, 4), ([1, 2.5], [1.0, 2.5]), (10**17, 1e17), (0.1 + 0.2, 0.3), ((4,), [[4.0]])]
    wrong = [([5, 5], [5]), (True, 1), ("4", 4), (None, 0), ({1: {2}}, {"1": [2]}), (1.0, True), ({}, [])]
    wrong += [(4, 4.5), (5, 4.0), (True, 1.0), ("4", 4.0), (10**17 + 1, 1e17), (float("nan"), float("nan"))]
    wrong += [(1234567.5, 1234567), (1234567.25, 1234567.75), (1e9 + 0.5, 10**9), (float("inf"), 1e308)]
    assert [is_correct_value(encode(value), expected) for value, expected in right + wrong] == [
        *[True] * len(right),
        *[False] * len(wrong),
    ]


def test_the_program_is_the_last_python_block_or_all():
    assert program_of("a\n```python\n1\n```\nb\n```py\n2\n```\n```\n3\n```") == "2\n"
    assert program_of("a\n```\n3\n```") == "3\n"
    assert program_of("print(4)") == "print(4)"
