"""The Dockerfile copies what exists and installs extras that exist; docker itself is not needed."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
KNOWN = {"FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT"}


def instructions() -> list[list[str]]:
    return [line.split() for line in TEXT.splitlines() if line and not line.startswith("#")]


def test_it_begins_with_a_cuda_13_base_and_ends_with_the_command():
    lines = instructions()
    assert lines[0][0] == "FROM" and re.match(r"nvidia/cuda:13\.\d+\.\d+-base-", lines[0][1])
    assert {line[0] for line in lines} <= KNOWN and lines[-1] == ["ENTRYPOINT", '["qerl"]']


def test_it_copies_what_the_build_needs():
    copied = {source for line in instructions() if line[0] == "COPY" for source in line[1:-1]}
    assert copied >= {"pyproject.toml", "src"} and not [path for path in copied if not (ROOT / path).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= copied


def test_its_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'"/src\[([\w,]+)\]"', TEXT)
    assert set(named.split(",")) <= set(extras)
