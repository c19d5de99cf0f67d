"""Provenance: the commit of the source, and the differences between two runs."""

import subprocess
from pathlib import Path

from qerl.tracking.provenance import GitState, changes, git_state


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_a_checkout_gives_its_commit_and_whether_it_was_changed(tmp_path):
    git(tmp_path, "init")
    assert git_state(tmp_path) is None
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    state = git_state(tmp_path)
    assert len(state.commit) == 40 and state.changed_files == []
    (tmp_path / "file").write_text("b")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new").touch()
    assert git_state(tmp_path) == GitState(commit=state.commit, changed_files=["file", "results/"])
    assert git_state(tmp_path, exclude=Path("results")).changed_files == ["file"]


def test_a_package_within_somebodys_repository_has_no_commit(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    assert git_state(tmp_path / "lib") is None
    assert git_state(tmp_path / "missing") is None


def test_changes_name_nested_fields_and_those_that_one_side_lacks():
    old = {"seed": 0, "learn": {"betas": [0.9, 0.99], "gone": 1}}
    new = {"seed": 0, "learn": {"betas": (0.9, 0.95), "added": None}}
    assert changes(old, new) == {
        "learn.betas": ("[0.9, 0.99]", "[0.9, 0.95]"),
        "learn.added": ("absent", "null"),
        "learn.gone": ("1", "absent"),
    }
