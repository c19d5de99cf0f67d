"""What the pages tell a reader to type exists: commands, recipes, options; and the sections they quote."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS as OWN_BENCHMARKS
from qerl import config
from qerl.cli.bench import BENCHMARKS
from qerl.cli.bench import options as bench_options
from qerl.cli.main import COMMANDS
from qerl.cli.plan import PlanOptions
from qerl.cli.report import ReportOptions
from qerl.cli.watch import WatchOptions
from qerl.config import RunConfig, options
from qerl.config.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TAKEN = {
    "train": RunConfig,
    "plan": PlanOptions,
    "eval": options.EvalOptions,
    "generate": options.GenerateOptions,
    "serve": options.ServeOptions,
    "quantize": options.QuantizeOptions,
    "export": options.ExportOptions,
    "report": ReportOptions,
    "watch": WatchOptions,
    "decode": bench_options.BenchDecodeOptions,
    "step": bench_options.BenchStepOptions,
    "learn": bench_options.BenchLearnOptions,
}
SHORT = {"model", "task", "reward", "ray", "init_adapter", "as", "help", "debug"}
PLACEHOLDERS = {"my_recipe", "RECIPE"}


def names(kind, prefix=""):
    for name, field in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(field):
            yield from names(field, "" if name == "run" else f"{prefix}{name}.")


def commands(text):
    """(command, its arguments) of each line of code that begins with qerl, and of qerl in backticks."""
    for line in re.findall(r"^ {4}qerl (.*)", text, flags=re.MULTILINE) + re.findall(r"`qerl ([^`]*)`", text):
        name, *arguments = line.partition("  #")[0].split()
        yield name, arguments


def benchmarks(text):
    """(benchmark, its arguments) of each line of code that runs one of this repository's own."""
    for line in re.findall(r"^ {4}python -m benchmarks (.*)", text, flags=re.MULTILINE):
        name, *arguments = line.partition("  #")[0].split()
        yield name, arguments


def unknown(kind, arguments):
    """Return the options that the dataclass does not have."""
    known = {*names(kind), *SHORT} | {f"no_{name}" for name in names(kind)}
    given = [a.removeprefix("--").replace("-", "_") for a in arguments if a.startswith("--")]
    return [option for option in given if option not in known]


def options_of(name, arguments):
    kind = TAKEN[arguments[0] if name == "bench" else name]
    return unknown(kind, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_exists(page):
    for name, arguments in commands(page.read_text()):
        said = f"qerl {name} {' '.join(arguments)}"
        if name.isupper():
            continue
        assert name in COMMANDS, said
        if name == "train" and arguments and not arguments[0].startswith("-"):
            assert arguments[0] in RECIPES or arguments[0] in PLACEHOLDERS, said
        if name == "bench" and (not arguments or arguments[0] not in BENCHMARKS):
            continue
        assert not options_of(name, arguments), said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_benchmarks_of_a_page_exist(page):
    for name, arguments in benchmarks(page.read_text()):
        assert name in OWN_BENCHMARKS and not unknown(OWN_BENCHMARKS[name][0], arguments), (name, arguments)


def test_every_part_of_a_config_is_on_its_page():
    listed = re.findall(
        r"^::: qerl\.config\.(\w+)$", (ROOT / "docs" / "config.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(config.__all__)


def test_every_section_that_a_page_quotes_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    quoted = {name for page in PAGES[1:] for name in re.findall(r'"README\.md:(\w+)"', page.read_text())}
    marked = set(re.findall(r"\[start:(\w+)\]", readme))
    assert quoted == marked == set(re.findall(r"\[end:(\w+)\]", readme)) and "reward" in quoted


def test_the_page_of_the_config_has_every_part_of_it():
    import qerl.config

    parts = {name for name in dir(qerl.config) if name.endswith("Config")}
    assert parts == set(
        re.findall(r"^::: qerl\.config\.(\w+)$", (ROOT / "docs" / "config.md").read_text(), re.M)
    )
