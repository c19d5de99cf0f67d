"""Whatever reads completions, rows and headers takes time in proportion to their length.

Patterns are found in the source, and hostile texts are derived from each (hostile_text.py). A quadratic
search of 16,000 characters takes a quarter of a second and more, a linear one 20 ms at most.
"""

import ast
import functools
import importlib
import itertools
import re
import sys
import time
from pathlib import Path

import pytest
from hostile_text import hostile_parts, repeated

import qerl
from qerl.errors import printable, redact
from qerl.serve.tools import ToolCallStream
from qerl.tasks import answer, graders
from qerl.tasks.code.grade import program_of

CODE = str(Path(qerl.__file__).parent / "tasks" / "code")

SOURCE = Path(qerl.__file__).parent
READERS = ("errors.py", "tasks", "serve", "training", "tracking", "eval", "trl", "learner")
"""The rest reads model files and the user's own command line."""
METHODS = ("search", "match", "fullmatch", "sub", "split", "findall", "finditer")
LENGTHS = (25, 200, 500, 1000, 4000, 16_000)  # ascending, so that a bad pattern is noticed before it hangs
LIMIT_S = 0.1
SHORT = {
    "tasks/math_equal.py": 500,  # _MAX_CHARACTERS, longer answers are compared as texts
    "tasks/units.py": 500,
    "tasks/symbolic.py": 500,
    "tasks/answer.py _TEXT": 500,  # of normalize, which is_equal calls
    "tasks/answer.py _FORMULA": 500,
    "tasks/answer.py pattern": 500,
}
GIVEN = {  # patterns that only a run knows
    "tasks/judges/judge.py settings.pattern": "the user's, for the last 20,000 characters of a judge's reply",
    "tasks/judges/rubric.py settings.pattern": "the same",
    "tracking/atomic_file.py f'{re.escape(short_name(path))}\\\\.(\\\\d+)\\\\.part'": "a name, escaped",
    "tasks/answer.py pattern": "of _SPELLINGS",
    "tasks/answer.py closed": "of _MATH_CLOSES: two characters",
    "tasks/math_equal.py separators": "in _split",
    "tasks/units.py name": "of _COMPOUND",
    "tasks/code/pytest_stub.py pattern": "of a row's test",
    "tasks/code/pytest_stub.py self._match": "of a row's test",
    "tasks/chat_tokens.py '|'.join(map(re.escape, ordered)) or '(?!)'": "texts of control tokens, escaped",
}


def calls():
    """(place, method, pattern or None, name) for each use of a regular expression."""
    for top in READERS:
        for path in sorted((SOURCE / top).rglob("*.py")) if (SOURCE / top).is_dir() else [SOURCE / top]:
            if "import re\n" not in (text := path.read_text()):
                continue
            place, tree = path.relative_to(SOURCE).as_posix(), ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
                    yield place, tree, node


@functools.cache
def patterns():
    """{"tasks/answer.py _BOX": (pattern, methods)}, and the places of those that the source does not tell."""
    found, unknown = {}, set()
    for place, tree, call in calls():
        method = call.func.attr
        if method not in (*METHODS, "compile"):
            continue
        name = ast.unparse(call.args[0])
        if place.startswith("tasks/code/") and CODE not in sys.path:
            sys.path.append(CODE)  # files of the program's process import each other by name
        try:
            scope = vars(importlib.import_module("qerl." + place.removesuffix(".py").replace("/", ".")))
            flags = [eval(ast.unparse(each), scope) for each in call.args[1:2] if method == "compile"]
            pattern = re.compile(eval(name, scope), *flags)
        except NameError as error:
            unknown.add(f"{place} {name if name.isidentifier() or '.' in name else error.name}")
            continue
        methods = {method}
        if method == "compile":
            owner = next(n for n in ast.walk(tree) if isinstance(n, ast.Assign) and call in ast.walk(n))
            name = ast.unparse(owner.targets[0])
            uses = [
                n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == name
            ]
            methods = {use.attr for use in uses} & set(METHODS) or {"finditer"}
        found[f"{place} {name}"] = (pattern, methods)
    found |= {
        f"tasks/answer.py pattern {index}": (pattern, {"sub"})
        for index, (pattern, _) in enumerate(answer._PATTERNS)
    }
    return found, unknown


def test_every_pattern_is_known():
    found, unknown = patterns()
    assert unknown <= GIVEN.keys(), "say where these patterns come from, or write them out"
    assert len(found) > 40


@pytest.mark.parametrize("name", patterns()[0])
def test_no_hostile_text_makes_a_pattern_slow(name):
    pattern, methods = patterns()[0][name]
    longest = next((n for start, n in SHORT.items() if name.startswith(start)), LENGTHS[-1])
    for parts in hostile_parts(pattern):
        for length in (n for n in LENGTHS if n <= longest):
            text = repeated(parts, length)
            text = text.encode(errors="replace") if isinstance(pattern.pattern, bytes) else text
            for method in methods:
                took_s = min_time(lambda text, method=method: use(pattern, method, text), text)
                assert took_s < LIMIT_S, f"{method} of {length} characters {parts!r}: {took_s:.2f} s"


def use(pattern, method, text):
    if method == "sub":
        pattern.sub("" if isinstance(text, str) else b"", text)
    elif method in ("findall", "finditer"):
        list(pattern.finditer(text))
    else:
        getattr(pattern, method)(text)


def min_time(run, text):
    """Seconds of CPU time; the least of three if one is long, as the machine may be busy."""
    least = float("inf")
    for _ in range(3):
        begin = time.process_time()
        run(text)
        least = min(least, time.process_time() - begin)
        if least < LIMIT_S:
            break
    return least


def parsed_turn(text):
    stream = ToolCallStream({"f"}, is_parallel=True)
    return stream.add(text), stream.end()


PIECES = (
    *(
        "```",
        "```python\n",
        "\n",
        "<answer>",
        "</answer>",
        "<think>",
        "\\boxed{",
        "}",
        "$",
        "$$",
        "\\(",
        "\\[",
    ),
    *(
        "answer is ",
        "Answer:",
        " ",
        "1",
        "1,111",
        "/",
        "-",
        "<tool_call>",
        '{"name": "f"};',
        "####",
        "://",
        "**",
    ),
)
FUNCTIONS = {
    "the program of the reward code": program_of,
    "the answers of the reward math": answer.final_answers,
    "a reference answer": answer.gold_answer,
    "the number of the reward numeric": graders.last_number,
    "the reward tags": graders._is_tagged,
    "the answer of the reward gym": graders._answered,
    "tool calls": parsed_turn,
    "errors without keys": redact,
    "errors in one line": printable,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reading_a_completion_takes_linear_time(name):
    for one, other in itertools.product(("", *PIECES), PIECES):
        for parts in (("", one + other, ""), (one, other, "\0")):
            for length in (1000, 16_000):
                took_s = min_time(FUNCTIONS[name], repeated(parts, length))
                assert took_s < 2 * LIMIT_S, f"{length} characters {parts!r}: {took_s:.2f} s"
