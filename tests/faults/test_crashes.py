"""A power cut at every write; `python tests/faults/crashes.py` tries more disks, and runs more to the end."""

import shutil

import pytest

from faults import crashes, runs
from faults.recorded_disk import Names, Sync


@pytest.fixture(scope="module")
def recordings(files, tmp_path_factory):
    return crashes.recordings(files, tmp_path_factory.mktemp("recorded"))


def test_after_a_power_cut_at_any_write_a_run_goes_on_from_what_it_had_saved(recordings, tmp_path):
    num_operations = sum(recording.num_cuts for recording in recordings)
    num_each, num_tried, found = max(1.0, 1005 / num_operations), 0, []
    with crashes.quick():
        for recording in recordings:
            for name, out, declared in crashes.cut_points(recording, tmp_path, num_each, seed=0):
                num_tried += 1
                if what := crashes.wrong(recording, out, declared):
                    found.append(f"{name}: {what}")
    assert num_tried >= 1000 and not found, (len(found), found[:5])


def test_the_lock_is_on_the_disk_before_any_other_file_of_a_run(recordings):
    """Without it, what a power cut leaves of the others looks like a stranger's files."""
    for recording in recordings:
        made = {
            name: i for i, op in enumerate(recording.operations) if isinstance(op, Names) for name in op.nodes
        }
        (folder,) = {
            op.folder for op in recording.operations if isinstance(op, Names) and ".lock" in op.nodes
        }
        between = recording.operations[made[".lock"] : min(made["metrics.jsonl"], made["events.jsonl"])]
        assert Sync(folder) in between


def test_a_run_that_goes_on_after_a_power_cut_is_the_uninterrupted_one(files, recordings, tmp_path):
    for recording, share in zip(recordings, (0.5, 0.7), strict=True):
        chosen = int(share * recording.num_cuts)
        points = crashes.cut_points(recording, tmp_path, 1, seed=1)
        _, out, _ = next(point for i, point in enumerate(points) if i == chosen)
        shutil.move(out, tmp_path / "cut")
        runs.finish(files, tmp_path / "cut")
        assert runs.difference(tmp_path / "cut", recording.whole) is None
        shutil.rmtree(tmp_path / "cut")
