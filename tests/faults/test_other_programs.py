"""Other programs move, remove or save the files of a run that writes them."""

from pathlib import Path

import pytest

import tiny_run
from faults import runs

MEDDLING = """
import os, pathlib
place = pathlib.Path(__file__).parent
def meddling(completion_ids, **_):
    try:
        out = (place / "out").read_text()
        if pathlib.Path(out, "metrics.jsonl").read_text().count("\\n") >= 2:
            os.rename(place / "what.py", place / "done.py")  # by one process only
            exec((place / "done.py").read_text(), {"out": out})
    except FileNotFoundError:
        pass
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    (files / "meddling.py").write_text(MEDDLING)
    return files


def options(files: Path) -> tuple[str, ...]:
    return "--task.rewards", f"{files / 'meddling.py'}:meddling"


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    runs.finish(files, out, *options(files))
    return out


def meddled(files: Path, out: Path, what: str) -> tuple[int, str]:
    """Exit code and output of a run to whose folder another program does this in the third step."""
    (files / "out").write_text(str(out))
    (files / "what.py").write_text(f"import os, shutil\n{what}\n")
    run = runs.start(files, out, *options(files))
    code = run.wait()
    assert not (files / "what.py").exists() and "Traceback" not in run.said, run.said
    return code, run.said


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_run_whose_folder_is_gone_ends_with_its_step_saved(files, whole, tmp_path, is_moved):
    out = tmp_path / "run"
    place = tmp_path / "moved" if is_moved else out
    code, said = meddled(files, out, f"os.rename(out, {str(place)!r})" if is_moved else "shutil.rmtree(out)")
    (error,) = [line for line in said.splitlines() if line.startswith("qerl: ")]
    told = f"was moved to {place}" if is_moved else "was removed"
    assert code == 1 and f"{out}: {told} while the run wrote to it" in error
    assert "step 3 is saved" in error and (place / "checkpoints" / "step-000003").is_dir()
    assert not is_moved or not (out / "checkpoints").exists()
    runs.finish(files, place, *options(files))
    assert runs.num_steps(place) == (6 if is_moved else 3)
    assert not is_moved or runs.difference(place, whole) is None


def test_files_that_are_replaced_or_removed_are_put_back_and_told(files, whole, tmp_path):
    out = tmp_path / "run"
    replace = "open(out + '/new', 'w').write('edited'); os.replace(out + '/new', out + '/metrics.jsonl')"
    code, said = meddled(files, out, f"{replace}; os.unlink(out + '/samples.jsonl')")
    assert code == 0
    assert said.count("another program replaced metrics.jsonl while the run wrote it") == 1
    assert said.count("another program removed samples.jsonl while the run wrote it") == 1
    assert (out / "metrics.jsonl.other").read_text() == "edited"
    assert runs.difference(out, whole) is None
