"""Where a run came from: the source's commit, and what differs between two runs."""

import subprocess

from qerl.tracking.provenance import changes, source_state


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_a_checkout_gives_its_commit_and_whether_it_was_changed(tmp_path):
    git(tmp_path, "init")
    assert source_state(tmp_path) == (None, None)
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit, is_dirty = source_state(tmp_path)
    assert commit is not None and len(commit) == 40 and is_dirty is False
    (tmp_path / "file").write_text("b")
    assert source_state(tmp_path) == (commit, True)


def test_a_package_within_somebodys_repository_has_no_commit(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    assert source_state(tmp_path / "lib") == (None, None)
    assert source_state(tmp_path / "missing") == (None, None)


def test_changes_name_nested_fields_and_those_that_one_side_lacks():
    old = {"seed": 0, "learn": {"betas": [0.9, 0.99], "gone": 1}}
    new = {"seed": 0, "learn": {"betas": (0.9, 0.95), "added": None}}
    assert changes(old, new) == {
        "learn.betas": ("[0.9, 0.99]", "[0.9, 0.95]"),
        "learn.added": ("absent", "null"),
        "learn.gone": ("1", "absent"),
    }
