"""Programs that attack the machine: each one runs and is stopped by one mechanism of the sandbox."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from processes import all_running, comes_true
from qerl.tasks.code import launch, sandbox
from qerl.tasks.code.runner import Limits, run_call, run_test, run_with_input
from qerl.tasks.code.script import read_script
from qerl.tasks.code.values import decode

SANDBOX = sandbox.choose(unsafe=True)
LIMITS = Limits(1.0, memory_bytes=512 << 20, output_bytes=1 << 20, backend=SANDBOX.backend)
LONG = Limits(20.0, memory_bytes=512 << 20, output_bytes=1 << 20, backend=SANDBOX.backend)
OUT_OF_REACH = ("PermissionError\n", "FileNotFoundError\n")
confined = pytest.mark.skipif(SANDBOX.backend == "unsafe", reason=str(SANDBOX))


def printed(program, stdin="", limits=LONG):
    return run_with_input(textwrap.dedent(program), stdin, limits)


def raised(statement, setup=""):
    """The name of what the statement raises inside."""
    return printed(
        f"{setup}\ntry:\n    {statement}\nexcept BaseException as error: print(type(error).__name__)"
    )


def children() -> int:
    """Processes of this checkout's child.py that still run, but for servers: Bubblewrap's own name it too."""
    count = 0
    for pid in all_running():
        with contextlib.suppress(OSError):
            is_server = Path(f"/proc/{pid}/comm").read_text() == "qerl-fork\n"
            count += not is_server and os.fsencode(launch.CHILD) in Path(f"/proc/{pid}/cmdline").read_bytes()
    return count


def is_nothing_left() -> bool:
    return comes_true(lambda: children() == 0, within_s=10)


def test_standard_input_goes_in_and_standard_output_comes_out():
    assert printed("print(int(input()) ** 2)", "7\n") == "49\n"
    assert printed("import sys; print(len(sys.stdin.read()))") == "0\n"
    assert printed("raise SystemExit(0)") == ""


def test_a_program_that_fails_has_printed_nothing():
    assert printed("print(49); raise ValueError") is None
    assert printed("print(49); import os; os._exit(3)") is None
    assert printed("print(49") is None


def test_an_endless_loop_ends_at_the_deadline_and_leaves_nothing():
    begin = time.monotonic()
    assert printed("print(1, flush=True)\nwhile True: pass", limits=LIMITS) is None
    assert printed("import time, os; os.close(1); time.sleep(60)", limits=LIMITS) is None
    assert time.monotonic() - begin < 30 and is_nothing_left()


@confined
def test_a_fork_bomb_has_no_first_child():
    # Were it to have children, there would be 20 that end: the test must not do what it tests.
    bomb = """
        import os, time
        children = 0
        for _ in range(2000):
            try:
                if children < 20 and os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
                children += 1
            except OSError: pass
        print(children)
    """
    assert printed(bomb) == "0\n" and is_nothing_left()


def test_a_memory_hog_meets_its_limit():
    assert raised("x = bytearray(1 << 30)") == "MemoryError\n"
    assert raised("x = mmap.mmap(-1, 1 << 30)", "import mmap") == "OSError\n"  # shared memory
    assert raised("import os; os.memfd_create('x')") == "PermissionError\n"
    assert printed("x = bytearray(100 << 20); print(len(x))") == f"{100 << 20}\n"


def test_a_gigabyte_of_output_is_cut_off_at_once():
    begin = time.monotonic()
    assert printed("while True: print('x' * 1000000)", limits=LONG) is None
    assert run_call("def f(): return 'x' * 50_000_000", "f", [], LONG) is None
    assert time.monotonic() - begin < 2 * LONG.deadline_s
    assert printed("import sys\nfor _ in range(100): sys.stderr.write('x' * 1000000)\nprint(1)") == "1\n"


@confined
def test_nothing_is_written_outside_and_the_folder_is_gone_afterwards(tmp_path):
    tmp_path.chmod(0o777)
    target = tmp_path / "kept"
    target.write_text("kept")
    target.chmod(0o666)
    for statement in ("open({!r}, 'w')", "os.remove({!r})", "os.truncate({!r}, 0)", "os.chmod({!r}, 0)"):
        assert raised(statement.format(str(target)), "import os") in OUT_OF_REACH
    assert raised(f"open({str(tmp_path / 'new')!r}, 'w')") in OUT_OF_REACH
    assert target.read_text() == "kept" and list(tmp_path.iterdir()) == [target]
    inside = "import os; assert os.listdir() == []; open('a', 'w').write('1'); print(os.getcwd(), end='')"
    assert is_gone(printed(inside))


def test_a_folder_that_resists_is_removed_too():
    deep = """
        import os
        print(os.getcwd(), end="")
        for _ in range(1500): os.mkdir("d"); os.chdir("d")
        os.mkdir("closed", 0o300); open("closed/f", "w").close()
    """
    assert is_gone(printed(deep))


def is_gone(folder) -> bool:
    """True once the folder, which is removed in the background, is gone."""
    end = time.monotonic() + 60
    while folder and Path(folder).exists() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(folder) and not Path(folder).exists()


MAKES_FOLDERS = {
    "deep": "os.mkdir('d'); os.chdir('d')",
    "many": "os.mkdir(str(count))",
    "files": "open(str(count), 'w').close()",
    "names": "os.mkdir('\\U0001f600' * 60 + chr(10) + str(count)); open(' ' * 249 + str(count), 'w').close()",
    "closed": "os.mkdir('d', 0o300); os.chdir('d')",
}


@pytest.mark.parametrize("kind", MAKES_FOLDERS)
def test_the_deadline_holds_whatever_has_to_be_removed(kind):
    makes = f"""
import os, time
folder, end, count = os.getcwd(), time.monotonic() + 2, 0
while time.monotonic() < end:
    {MAKES_FOLDERS[kind]}
    count += 1
print(folder, time.monotonic())
"""
    folder, ended = (printed(makes, limits=dataclasses.replace(LONG, output_bytes=10_000)) or "").split()
    assert time.monotonic() - float(ended) < 1.5  # to remove the folders took 2 s, as long as to make them
    assert is_gone(folder)


def test_a_file_has_a_limit():
    assert raised("f = open('a', 'wb'); f.write(bytes(2 << 20)); f.close()") == "OSError\n"


@confined
def test_the_environment_is_clean(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "HF_TOKEN" not in (printed("import os; print(dict(os.environ))") or "HF_TOKEN")


@confined
def test_its_own_limits_cannot_be_raised():
    raise_it = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert raised(raise_it, "import resource") in ("ValueError\n", "PermissionError\n")


def test_a_program_dies_with_the_worker_that_runs_it(tmp_path):
    runs = (
        "from qerl.tasks.code.runner import *\n"
        f"run_with_input('while True: pass', '', Limits(30.0, 1 << 29, 1000, {LIMITS.backend!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", runs], env=environment)
    comes_true(lambda: children() >= 1, within_s=30)
    time.sleep(0.5)  # a server has Python's name while it starts; then until the program is confined
    has_begun = comes_true(lambda: children() >= 1)
    worker.kill()
    worker.wait()
    assert has_begun and is_nothing_left()


def test_usual_programs_run():
    assert printed("import numpy; print(numpy.arange(4).sum())") == "6\n"
    deep = """
        import sys, threading
        sys.setrecursionlimit(10**6); threading.stack_size(1 << 26)
        def f(n): return 0 if n == 0 else 1 + f(n - 1)
        t = threading.Thread(target=lambda: print(f(20000))); t.start(); t.join()
    """
    assert printed(deep) == "20000\n"
    whole = "import dataclasses as d\n@d.dataclass\nclass P: x: int\nif __name__ == '__main__': print(P(1))"
    assert printed(whole) == "P(x=1)\n"
    assert printed("def f(): return f()\nf()") is None


def value(program, arguments):
    """The value of the program's f."""
    (data,) = run_call(program, "f", arguments, LONG)
    return decode(data)


def test_a_call_gives_its_value_as_plain_data():
    assert value("def f(x): return (x, {1: {2}}, None)", [[3, 4.5]]) == ([3, 4.5], {1: {2}}, None)
    assert value("class Solution:\n    def f(self, x): return -x", [10**30]) == -(10**30)
    assert run_call("def f(x): return object()", "f", [1], LONG) is None
    assert run_call("def g(x): return x", "f", [1], LONG) is None


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return x * x", "assert f(3) == 9"),
        ("def f(x): return x / 3", "assert abs(f(1) - 0.33333) < 1e-4"),
        ("def f(x): return x / 3", "import math\nassert math.isclose(f(1), 1 / 3)"),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
        ("def f(a): a.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("from collections import Counter\nf = Counter", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(): raise ValueError", "try:\n    f()\n    assert False\nexcept ValueError: pass"),
        ("class S:\n    a = []\n    def push(s, x): s.a.append(x)\n    def pop(s): return s.a.pop()",
         "s = S()\ns.push(3)\nassert s.pop() == 3 and s.a == []"),
        ("def f(g, x): return g", "assert set(f((1, 2), 3)) == {1, 2}"),
        ("def f(x): return x + 1", "from solution import f\ndef test_one():\n    assert f(1) == 2"),
        ("def f(g, xs): return [g(x) for x in xs]",
         "assert f(lambda x: x + 1, [1, 2]) == [2, 3] == f(int, '23')"),
        ("def f(g): return lambda x: g(g(x))", "def double(x): return 2 * x\nassert f(double)(3) == 12"),
        ("def f(g):\n    try: g()\n    except KeyError: return 'caught'",
         "def fails(): raise KeyError\nassert f(fails) == 'caught'"),
        ("class S:\n    def __call__(s): return 3\ndef f(g): return g(S())",
         "assert f(lambda s: s() + 1) == 4 and isinstance(S(), S) and not isinstance(3, S)"),
        ("import datetime, decimal, fractions\nfrom collections import deque\n"
         "def f(x): return x.replace(day=2), decimal.Decimal('0.1'), fractions.Fraction(1, 3), deque([1])",
         "from datetime import date\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
         "from collections import deque\nassert f(date(2020, 1, 1)) == "
         "(date(2020, 1, 2), Decimal('0.1'), Fraction(1, 3), deque([1]))"),
        ("def f(x): return [*x], x[2]", "assert f(range(3)) == ([0, 1, 2], 2)"),
        ("class S:\n    def __init__(s, v): s.v, s.next = v, None\ndef f(s): return s.next.v + len(s.d)",
         "a = S(1)\na.next = S(2)\na.d = {}\nassert f(a) == 2 and a.next is a.next"),
        ("import numpy as np\ndef f(x):\n    x += 1\n    return x.sum(), x * 2",
         "import numpy as np\nx = np.ones(3)\nf(x)\nassert (f(x)[1] == [6] * 3).all() and x[0] == 3"),
    ],
)  # fmt: skip
def test_a_test_asks_the_program(program, test):
    assert run_test(program, read_script(test), LONG)
    assert not run_test("def f(*a): return None\nsum = S = f", read_script(test), LONG)


def test_an_object_of_the_test_that_the_program_cannot_have_is_an_error_of_the_row():
    test = "class Node: pass\ntry: f(Node())\nexcept Exception: pass\nassert f(1) == 1"
    with pytest.raises(ValueError, match="gives the program a Node of its own"):
        run_test("def f(x): return x", read_script(test), LONG)
