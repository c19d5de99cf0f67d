"""A full disk and damaged files; `python tests/faults/figures.py` tries every moment and every file."""

import json

import pytest

from faults import damage, disks, figures, runs


@pytest.mark.parametrize("allowed", [1, 20, 50])
def test_a_disk_full_from_some_write_on_is_one_line_and_nothing_is_lost(files, whole, tmp_path, allowed):
    assert disks.sync_trial(files, tmp_path / "run", whole, allowed) is None


@pytest.mark.parametrize("allowed", [8, 25])
def test_a_disk_that_turns_read_only_is_one_line_and_nothing_is_lost(files, whole, tmp_path, allowed):
    assert disks.read_only_trial(files, tmp_path / "run", whole, allowed) is None


def test_on_a_full_file_system_the_run_ends_in_one_line_and_goes_on_once_there_is_room(
    files, whole, tmp_path
):
    try:
        with runs.small_disk(1 << 22) as folder:
            found = [
                disks.space_trial(files, folder, tmp_path / f"{free_bytes}.log", whole, free_bytes)
                for free_bytes in (0, 160_000)
            ]
    except PermissionError as error:
        pytest.skip(str(error))
    assert found == [None] * 2


@pytest.fixture(scope="module")
def eight(files, tmp_path_factory):
    """(a whole run, one that was killed half done)"""
    folder = tmp_path_factory.mktemp("eight")
    runs.finish(files, folder / "whole", *damage.MORE)
    return folder / "whole", damage.half_done(files, folder / "half")


@pytest.mark.parametrize(
    ("name", "harm", "expected"),
    [
        ("optimizer.safetensors", "flip", "same run"),
        ("state.json", "delete", "same run"),
        ("evaluations.json", "empty", "refused: qerl: /run/evaluations.json: is damaged"),
        ("loggers/tensorboard.json", "empty", "same run"),
        ("metrics.jsonl", "truncate", "told"),
        ("metrics.jsonl", "flip", "told"),
        ("samples.jsonl", "flip", "told"),
    ],
)
def test_a_damaged_file_is_made_good_or_named(files, eight, tmp_path, name, harm, expected):
    whole, half = eight
    assert damage.trial(files, half, tmp_path / "run", whole, name, harm).startswith(expected)


def test_the_page_holds_the_figures_that_were_found():
    """`python tests/faults/figures.py` finds them, which takes too long for each commit."""
    text = figures.PAGE.read_text()
    found = json.loads(figures.RESULTS.read_text())
    assert figures.written(text, figures.page(found)) == text
    assert found["kills"]["kills"] == found["kills"]["same"] >= 50 and not found["kills"]["survivors"]
    assert not found["disk"]["wrong"]
    assert not [o for row in found["damage"].values() for o in row.values() if o.startswith("wrong")]
