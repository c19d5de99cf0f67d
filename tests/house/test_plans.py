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


def test_the_plans_that_a_page_prints_are_current(capsys):
    printed = plans("hardware.md")
    assert printed
    for said, text in printed:
        command(shlex.split(said.replace("\\\n", ""), comments=True)[1:])
        assert capsys.readouterr().out.strip() == text


PEAKS = {
    "models.md": r"^\| gpt-oss-120b, .*? \| (\S+) GB",
    "gsm8k.md": r"^It needs (\S+) GB",
}


@pytest.mark.parametrize("page", PEAKS)
def test_the_planned_peak_that_a_page_names_is_current(page, capsys):
    text = (DOCS / page).read_text()
    (said,) = re.findall(r"^ {4}qerl (plan (?:.*\\\n)*.*)", text, flags=re.MULTILINE)
    command(shlex.split(said.replace("\\\n", "")))
    (peak,) = re.findall(r"^peak +(\S+) GB", capsys.readouterr().out, flags=re.MULTILINE)
    (named,) = re.findall(PEAKS[page], text, flags=re.MULTILINE)
    assert f"{float(peak):.1f}" == named
