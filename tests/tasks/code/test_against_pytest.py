"""Generated files of tests have the outcomes that pytest gives them, in pytest's order, or are refused.

    python tests/tasks/code/test_against_pytest.py 0 2000     compares 2,000 files and prints figures

The files differ from a row's in that f is a function of their own process, so that pytest can run them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from generated_tests import generate

from qerl.tasks.code import script

CODE = Path(script.__file__).parent
CONFTEST = """
import asyncio, inspect, json, pytest

outcomes, modules = {}, {}

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):  # as plugins for async tests do
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True

def pytest_collection_modifyitems(items):
    for item in items:
        modules.setdefault(item.nodeid.split("::")[0], item.module)

def pytest_collectreport(report):
    if report.failed:
        outcomes.setdefault(report.nodeid.split("::")[0], []).append(["collection", "failed"])

def pytest_runtest_logreport(report):
    file, *names = report.nodeid.split("::")
    listed = outcomes.setdefault(file, [])
    if report.when == "setup":
        listed.append(["::".join(names).partition("[")[0], "passed"])
    if report.failed:
        listed[-1][1] = "failed"
    elif report.skipped and listed[-1][1] == "passed":
        listed[-1][1] = "xfailed" if hasattr(report, "wasxfail") else "skipped"

def pytest_sessionfinish(session):
    found = {file: [listed, getattr(modules.get(file), "LOG", [])] for file, listed in outcomes.items()}
    with open("theirs.json", "w") as file:
        json.dump(found, file, default=str)
"""
OURS = """
import ast, json, os, sys, types
sys.path.insert(0, sys.argv[1])
import collect, pytest_stub, test_items, test_process
from assertions import Instrument
sys.path[0] = os.getcwd()
import solution

def outcomes(path):
    module, assertions, listed = types.ModuleType("__main__"), test_process._Assertions(), []
    names = vars(module)
    sys.modules |= {"__main__": module, "pytest": pytest_stub.module()}
    names |= {"__file__": path, "f": solution.f, **assertions.names}
    tree = ast.parse(open(path).read())
    instrument = Instrument(tree, ["f"])
    try:
        test_process._run_module(compile(instrument.visit(tree), path, "exec"), names)
        for outcome in test_process.run_items(module, assertions):
            if outcome.name.startswith("teardown of") and listed:
                listed[-1][1] = outcome.result
            else:
                listed.append([outcome.name, outcome.result])
    except pytest_stub.Refused:
        pass
    except Exception as error:
        listed = [["collection", "failed"], repr(error)]
    has_failed = "failed" in str(listed)
    missed = [] if has_failed else assertions.missed(instrument)
    return listed, names.get("LOG"), pytest_stub.refusals + missed

found = {}
for file in json.load(sys.stdin):
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.close(reads)
        with os.fdopen(writes, "w") as stream:
            json.dump(outcomes(file), stream, default=str)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as stream:
        found[file] = json.loads(stream.read() or "null")
    os.wait()
with open("ours.json", "w") as stream:
    json.dump(found, stream)
"""


def compare(seeds, folder):
    """Return {seed: "equal", "refused: why", or what differs}."""
    results, files = {}, {}
    for name, text in {
        "conftest.py": CONFTEST,
        "ours.py": OURS,
        "solution.py": "def f(x): return x * x",
    }.items():
        (folder / name).write_text(text)
    for seed in seeds:
        text = generate(seed)
        try:
            script.read_script(text)
        except ValueError as error:
            results[seed] = f"refused: {error}"
            continue
        files[seed] = f"test_{seed}.py"
        (folder / files[seed]).write_text(f"from solution import f\n{text}")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-W", "ignore", "--rootdir", "."]
    options += ["--continue-on-collection-errors", *files.values()]
    environment = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    for command, given in (
        (["-m", "pytest", *options], ""),
        (["-W", "ignore", "ours.py", str(CODE)], json.dumps([*files.values()])),
    ):
        subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, input=given, text=True, check=False
        )
    theirs, ours = (json.loads((folder / f"{name}.json").read_text()) for name in ("theirs", "ours"))
    for seed, file in files.items():
        listed, log, refused = ours[file]
        expected, expected_log = theirs.get(file, [[], []])
        if refused:
            results[seed] = f"refused: {refused[0]}"
        elif ["collection", "failed"] in expected:
            results[seed] = "equal" if "failed" in str(listed) else f"{file}: pytest cannot collect, {listed}"
        elif listed == expected and (not expected or log == expected_log):
            results[seed] = "equal"
        else:
            results[seed] = (
                f"{file}:\n  {listed}, pytest's:\n  {expected}\n  {log}, pytest's:\n  {expected_log}"
            )
    return results


def differences(results):
    return [each for each in results.values() if each != "equal" and not each.startswith("refused")]


def test_generated_files_have_pytests_outcomes_or_are_refused(tmp_path):
    results = compare(range(150), tmp_path)
    assert not differences(results), "\n".join(differences(results)[:3])
    assert sum(result == "equal" for result in results.values()) > 50


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = compare(range(int(sys.argv[1]), int(sys.argv[2])), Path(folder))
    print(*differences(found)[:20], sep="\n")
    reasons = Counter(result[:60] for result in found.values() if result.startswith("refused"))
    print(*(f"{count:5} {reason}" for reason, count in reasons.most_common(30)), sep="\n")
    equal = sum(result == "equal" for result in found.values())
    print(f"{equal} equal, {reasons.total()} refused, {len(differences(found))} different")
