"""Folders that appear whole, also in the place of another."""

import ctypes

import pytest

from qerl.errors import RunError
from qerl.models.hf_writer import atomic_folder


class Without:
    """A C library without renameat2, as macOS has."""


@pytest.mark.parametrize("library", [ctypes.CDLL, lambda name: Without()])
def test_a_folder_takes_the_place_of_another_only_when_it_is_whole(tmp_path, monkeypatch, library):
    monkeypatch.setattr(ctypes, "CDLL", library)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(RunError, match="broken"), atomic_folder(out, overwrite=True) as folder:
        (folder / "new").write_text("new")
        raise OSError(5, "broken")
    assert [path.name for path in out.iterdir()] == ["old"]
    with atomic_folder(out, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in out.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [out]
