"""A row says where it comes from, or is not written."""

import dataclasses
import json
import subprocess

import pytest

from benchmarks.rows import read_rows
from qerl.bench import record
from qerl.bench.options import BenchDecodeOptions
from qerl.bench.record import Origin, RowWriter, default_file, row_writer, source
from qerl.errors import RunError, UserError

ORIGIN = Origin(
    commit="a" * 40,
    is_dirty=False,
    qerl="0.1.0",
    gpu="NVIDIA H200",
    capability="9.0",
    torch="2.11.0",
    triton="3.6.0",
    driver="580.1",
)


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_a_clean_checkout_gives_its_commit(checkout):
    commit, is_dirty = source(checkout, allow_dirty=False)
    assert len(commit) == 40 and not is_dirty


@pytest.mark.parametrize("name", ["file.py", "new.py"])
def test_a_changed_or_new_file_is_refused_by_name_unless_allowed(checkout, name):
    (checkout / name).write_text("x = 2\n")
    with pytest.raises(UserError, match=f"^uncommitted changes in {name}: commit them"):
        source(checkout, allow_dirty=False)
    assert source(checkout, allow_dirty=True)[1]


def test_rows_of_an_earlier_benchmark_do_not_make_a_checkout_dirty(checkout):
    RowWriter(default_file("NVIDIA H200", checkout), ORIGIN).add({"bench": "linear"})
    assert source(checkout, allow_dirty=False)[1] is False


def test_an_installed_package_has_no_commit(tmp_path, checkout):
    inside = checkout / "installed"
    inside.mkdir()
    for folder in (inside, tmp_path / "missing"):
        assert source(folder, allow_dirty=False) == (None, None)


@pytest.mark.parametrize(("is_dirty", "is_kept"), [(False, True), (True, False), (None, False)])
def test_only_rows_of_a_clean_checkout_join_the_results(monkeypatch, tmp_path, is_dirty, is_kept):
    origin = dataclasses.replace(ORIGIN, is_dirty=is_dirty)
    monkeypatch.setattr(record, "read_origin", lambda **_: origin)
    file = row_writer(BenchDecodeOptions()).file
    assert file == (default_file("NVIDIA H200") if is_kept else None)
    assert row_writer(BenchDecodeOptions(out=tmp_path / "rows")).file == tmp_path / "rows"


def test_a_row_carries_its_origin_and_rows_are_appended(tmp_path):
    file = tmp_path / "results" / "h200.jsonl"
    for batch in (8, 16):
        RowWriter(file, ORIGIN).add({"bench": "linear", "batch": batch})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [8, 16] and rows == read_rows(file.parent)
    assert rows[0]["commit"] == "a" * 40 and rows[0]["gpu"] == "NVIDIA H200" and len(rows[0]["date"]) == 10


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"rows\.jsonl: cannot be written"):
        RowWriter(tmp_path / "file" / "rows.jsonl", ORIGIN).add({})


def test_a_gpu_has_its_own_file(tmp_path):
    names = {gpu: default_file(gpu, tmp_path).name for gpu in ("NVIDIA H200", "NVIDIA GeForce RTX 4090")}
    assert list(names.values()) == ["h200.jsonl", "geforce-rtx-4090.jsonl"]
