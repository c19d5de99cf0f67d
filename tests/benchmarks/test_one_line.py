"""`python -m benchmarks` says in one line what it cannot do."""

import sys

import pytest

from benchmarks import __main__ as benchmarks


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tiles"], ["unknown benchmark tiles", "did you mean tile"]),
        (["tile", "--runs", "many"], ["--runs must be an integer, got", "many"]),
        (["tile", "--run", "3"], ["unknown option --run", "did you mean --runs"]),
        (["partial", "--runs", "0"], ["runs must be positive", "got 0"]),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, parts):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as stop:
        benchmarks.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("benchmarks: ") and error.count("\n") == 1
    assert all(part in error for part in parts)


def test_help_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "tile", "--help"])
    with pytest.raises(SystemExit) as stop:
        benchmarks.main()
    assert not stop.value.code and "usage: python -m benchmarks tile" in capsys.readouterr().out
