"""The Dockerfile copies what exists, installs what pip needs and keeps the usual rules. Docker is not run."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
KNOWN = {"FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[list[str]]:
    return [line.split() for line in TEXT.splitlines() if line and not line.startswith("#")]


def stages() -> list[list[list[str]]]:
    """Return the instructions of each FROM: one that builds, one that is the image."""
    parts: list[list[list[str]]] = []
    for line in instructions():
        parts += [[]] if line[0] == "FROM" else []
        parts[-1].append(line)
    return parts


def installed(stage: list[list[str]]) -> set[str]:
    (line,) = (" ".join(line) for line in stage if "apt-get" in line)
    found = re.search(r"apt-get install -y --no-install-recommends ([\w .-]+?) &&", line)
    assert found and line.endswith("&& rm -rf /var/lib/apt/lists/*") and "noninteractive" in line
    return set(found[1].split())


def test_it_ends_with_a_cuda_13_base_and_the_command():
    build, image = stages()
    assert build[0][1:] == ["ubuntu:24.04", "AS", "build"]
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-base-ubuntu24\.04", image[0][1])
    assert {line[0] for line in instructions()} <= KNOWN and image[-1] == ["ENTRYPOINT", '["qerl"]']


def test_it_copies_what_the_build_needs_and_nothing_else_is_sent():
    build, image = stages()
    copied = {source for line in build if line[0] == "COPY" for source in line[1:-1]}
    assert copied >= {"pyproject.toml", "src"} and not [path for path in copied if not (ROOT / path).exists()]
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied
    everything, *kept = (ROOT / ".dockerignore").read_text().split()
    assert everything == "*" and {line[1:] for line in kept if line.startswith("!")} == copied
    assert [line[1:] for line in image if line[0] == "COPY"] == [["--from=build", "/opt/qerl", "/opt/qerl"]]


def test_pip_has_a_compiler_and_the_image_has_none():
    build, image = stages()
    assert installed(build) == {"gcc", "libc6-dev", "python3-dev", "python3-venv"}
    assert installed(image) == {"python3", "bubblewrap"}
    (pip,) = (line for line in build if "install" in line and "apt-get" not in line)
    assert pip[1:4] == ["/opt/qerl/bin/pip", "install", "--no-cache-dir"]


def test_its_extras_exist():
    (named,) = re.findall(r'"/src\[([\w,]+)\]"', TEXT)
    assert set(named.split(",")) <= set(PROJECT["optional-dependencies"])


def test_any_user_has_a_home_where_the_folder_is_mounted():
    _, image = stages()
    (env,) = (line[1:] for line in image if line[0] == "ENV")
    (folder,) = (line[1] for line in image if line[0] == "WORKDIR")
    assert f"HOME={folder}" in env and "USER=qerl" in env and "PATH=/opt/qerl/bin:$PATH" in env
    assert f'-v "$PWD":{folder} qerl train demo' in TEXT
