"""The help of a command fits one screen; --help-all has every option, its text wrapped once."""

import itertools
import re
import sys

import pytest
import tyro

from qerl.bench.options import BenchDecodeOptions
from qerl.cli import check, distil, evaluate, main, plan, sft, train
from qerl.cli.help import Help, help_text, options_of
from qerl.config import RunConfig
from qerl.config.options import EvalOptions, ExportOptions, QuantizeOptions, ServeOptions
from qerl.config.recipes import RECIPES

WIDTH, SCREEN = 80, 40
KINDS = [
    *(RunConfig, sft.SftOptions, EvalOptions, plan.PlanOptions, check.CheckOptions),
    *(ExportOptions, QuantizeOptions, ServeOptions, BenchDecodeOptions),
]
COMMANDS = ["train", "train demo", "sft", "distil", "eval", "eval o/m", "plan", "check", "check demo"]
NOT_FIELDS = {"--env", "--init-adapter", "--json"}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def shown(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["qerl", *arguments])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


def listed(lines):
    return [line for line in lines if line.startswith("  --")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_long_command_is_one_screen_of_about_twenty_options(monkeypatch, capsys, command):
    lines = shown(monkeypatch, capsys, *command.split(), "--help")
    options = listed(lines)
    assert len(lines) <= SCREEN and 15 <= len(options) <= 25
    assert max(map(len, options)) <= WIDTH
    assert not [line for line in options if "..." in line]
    assert re.fullmatch(r"--help-all lists all \d+ options\.", lines[-1])


@pytest.mark.parametrize("command", [*main.COMMANDS, "bench decode", "bench step"])
def test_the_help_of_each_command_fits_a_screen(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", ["qerl", *command.split(), "--help"])
    try:
        main.main()
    except SystemExit as stop:
        assert stop.code == 0
    assert len(capsys.readouterr().out.splitlines()) <= SCREEN


@pytest.mark.parametrize(
    ("kind", "help"),
    [
        (RunConfig, train.train_help()),
        (RunConfig, distil.HELP),
        (sft.SftOptions, sft.HELP),
        (EvalOptions, evaluate.HELP),
        (plan.PlanOptions, plan.HELP),
        (check.CheckOptions, check.HELP),
    ],
)
def test_each_option_of_the_short_help_is_one_that_the_command_takes(kind, help):
    known = {f"--{option.name}" for option in options_of(kind)} | NOT_FIELDS | {"--no-with-adapter"}
    names = [label.split()[0] for label in help.common]
    assert {help.short.get(name, name) for name in names} <= known


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_help_lists_exactly_the_options_that_tyro_parses(capsys, kind):
    with pytest.raises(SystemExit):
        tyro.cli(kind, args=["--help"])
    pattern = r"--[a-z][a-z0-9.-]*"
    of_tyro = re.findall(rf"^\W (?:-h, )?({pattern})", capsys.readouterr().out, re.M)
    names = {f"--{option.name}" for option in options_of(kind) if not option.is_positional}
    assert names == set(of_tyro) - {"--help"}
    whole = help_text(kind, None, "qerl x", Help("Do it."), shows_all=True)
    assert names <= set(re.findall(r"^  (" + pattern + ")", whole, re.M))


def test_each_text_of_the_whole_help_is_wrapped_once():
    """No line ends where the next word would still have fitted."""
    whole = help_text(RunConfig, None, "qerl x", Help("Do it."), shows_all=True).splitlines()
    for line, below in itertools.pairwise(whole):
        if line.startswith(" " * 6) and below.startswith(" " * 6):
            assert len(line) <= WIDTH < len(line) + 1 + len(below.split()[0])
    told = "the others save the last step and end. A rank that runs"
    assert told in " ".join(" ".join(whole).split())


def test_a_recipe_s_values_are_the_defaults_of_its_help(monkeypatch, capsys):
    for flag, form in (("--help", "({})"), ("--help-all", "(default: {})")):
        text = "\n".join(shown(monkeypatch, capsys, "train", "gsm8k", flag))
        assert form.format(RECIPES["gsm8k"]().model.path) in " ".join(text.split())


def test_a_default_of_zero_is_shown_and_one_that_is_off_is_not(monkeypatch, capsys):
    options = {line.split()[0]: line for line in listed(shown(monkeypatch, capsys, "train", "--help"))}
    assert options["--seed"].endswith("(0)") and not options["--evaluate.every"].endswith(")")


def test_a_small_command_shows_all_its_options(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, "export", "--help")
    assert lines[0] == "usage: qerl export RUN OUT [OPTIONS]" and "--help-all" not in "\n".join(lines)
    assert {"  RUN", "  OUT", "  --dtype {bf16,fp32}"} <= set(lines)


def test_check_shows_the_defaults_that_a_run_of_own_rows_has(monkeypatch, capsys):
    train, check = (listed(shown(monkeypatch, capsys, command, "--help")) for command in ("train", "check"))
    assert [line for line in train if "(" in line and not line.startswith("  --json")] == [
        line for line in check if "(" in line
    ]
