"""The plans that pages print are those that `qerl plan` prints."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from qerl.cli.main import command

DOCS = Path(__file__).parents[2] / "docs"


def plans(page: str) -> list[tuple[str, str]]:
    """Return (command, printed) of each plan that a page prints in full, with the last command before it."""
    found, last = [], ""
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", (DOCS / page).read_text(), flags=re.MULTILINE):
        text = textwrap.dedent(block).strip()
        if text.startswith("qerl plan"):
            last = re.match(r"(?:.*\\\n)*.*", text)[0]
        elif " GB   always" in text:
            found.append((last, text))
    return found


@pytest.mark.parametrize("page", ["hardware.md", "gsm8k.md"])
def test_the_plans_that_a_page_prints_are_current(page, capsys):
    printed = plans(page)
    assert printed
    for said, text in printed:
        command(shlex.split(said.replace("\\\n", ""), comments=True)[1:])
        assert capsys.readouterr().out.strip() == text


def test_the_planned_peak_of_a_mixture_is_current(capsys):
    text = (DOCS / "models.md").read_text()
    (said,) = re.findall(r"^ {4}qerl (plan (?:.*\\\n)*.*)", text, flags=re.MULTILINE)
    command(shlex.split(said.replace("\\\n", "")))
    (peak,) = re.findall(r"^peak +(\S+) GB", capsys.readouterr().out, flags=re.MULTILINE)
    (first,) = re.findall(r"^\| gpt-oss-120b, .*? \| (\S+) GB", text, flags=re.MULTILINE)
    assert f"{float(peak):.1f}" == first
