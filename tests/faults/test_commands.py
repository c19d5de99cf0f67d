"""qerl export, quantize, eval and report: killed, without space, and their folders in others' hands."""

import errno
import fcntl
import os
import shutil
import signal

import pytest

from faults import commands, runs


@pytest.fixture(scope="module")
def wholes(files, whole, tmp_path_factory):
    """{command: (its folder, number of flushes and renames, seconds)}"""
    folder, made = tmp_path_factory.mktemp("wholes"), {}
    for name in commands.NAMES:
        (folder / name).mkdir()
        out = folder / name / "out"
        made[name] = (out, *commands.whole(name, files, whole, out))
    return made


@pytest.mark.parametrize("name", commands.NAMES)
def test_killed_at_any_flush_a_command_leaves_no_half_folder_and_the_next_one_writes_it(
    files, whole, wholes, tmp_path, name
):
    reference, num_flushes, _ = wholes[name]
    cuts = sorted({0, 1, num_flushes // 2, num_flushes - 2, num_flushes - 1})
    found = [
        commands.trial(name, files, whole, reference, tmp_path / str(cut), commands.killed_at(cut), None)
        for cut in cuts
    ]
    assert found == [None] * len(cuts)


@pytest.mark.parametrize("name", ["export-merged", "quantize"])
def test_killed_at_random_moments_a_command_leaves_no_half_folder(files, whole, wholes, tmp_path, name):
    reference, _, whole_s = wholes[name]
    found = [
        commands.trial(name, files, whole, reference, tmp_path / str(i), lambda: None, moment_s)
        for i, moment_s in enumerate(commands.moments(5, 3, whole_s))
    ]
    assert found == [None] * 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", commands.NAMES)
def test_a_disk_that_refuses_a_command_is_one_line_and_leaves_nothing(
    files, whole, wholes, tmp_path, name, number
):
    num_flushes = wholes[name][1]
    for cut in (0, num_flushes // 2, num_flushes - 2):
        out = tmp_path / str(cut) / "out"
        given = commands.arguments(name, files, whole, out)
        one = runs.start_command(given, tmp_path / f"{cut}.log", commands.failing_at(cut, number))
        assert commands.refusal(one, number) is None
        assert not out.exists() and not (out.parent.exists() and list(out.parent.iterdir()))


@pytest.mark.parametrize("name", ["export-merged", "quantize", "report"])
def test_a_full_file_system_is_one_line_and_leaves_nothing(files, whole, tmp_path, name):
    try:
        with runs.small_disk(1 << 17) as folder:
            given = ["report", str(whole), "--out", str(folder / "out.html")]
            given = given if name == "report" else commands.arguments(name, files, whole, folder / "out")
            (folder / "ballast").write_bytes(bytes(120_000))
            one = runs.start_command(given, tmp_path / "log")
            assert one.wait() in (1, 2) and "Traceback" not in one.said
            (line,) = [line for line in one.said.splitlines() if line.startswith("qerl: ")]
            assert os.strerror(errno.ENOSPC) in line or "No space" in line
            assert [path.name for path in folder.iterdir()] == ["ballast"]
    except PermissionError as error:
        pytest.skip(str(error))


def test_what_a_killed_export_left_is_removed_and_what_a_living_one_writes_is_not(files, whole, tmp_path):
    """Another folder's files with a like name stay too."""
    out = tmp_path / "out"
    others = [tmp_path / name for name in (".out.unfinished", ".outer.unfinished-abc", "out.unfinished-abc")]
    for other in others:
        other.mkdir()
    given = commands.arguments("export-peft", files, whole, out)
    one = runs.start_command(given, tmp_path / "one.log", commands.killed_at(2))
    assert one.wait() == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.unfinished-*")
    held = os.open(left, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert runs.start_command(given, tmp_path / "two.log").wait() == 0
    assert left.exists() and out.exists()
    os.close(held)
    shutil.rmtree(out)
    assert runs.start_command(given, tmp_path / "three.log").wait() == 0
    assert not left.exists() and out.exists() and all(other.is_dir() for other in others)


def test_an_export_into_a_linked_empty_folder_keeps_the_link(files, whole, tmp_path):
    (tmp_path / "disk" / "place").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "place")
    given = commands.arguments("export-peft", files, whole, tmp_path / "link")
    one = runs.start_command(given, tmp_path / "log")
    assert one.wait() == 0, one.said
    assert (tmp_path / "link").is_symlink() and (
        tmp_path / "disk" / "place" / "adapter_model.safetensors"
    ).exists()


NAMES = {
    "spaces": " a  b ",
    "newline": "a\nb",
    "emoji": "🙂" * 63,
    "255-bytes": "é" * 127 + "x",
    "quotes": "a'\"$(b)`*[c]",
}


@pytest.mark.parametrize("kind", NAMES)
def test_folders_of_any_name_are_written_and_read(files, whole, tmp_path, kind):
    place = tmp_path / NAMES[kind]
    shutil.copytree(whole, place)
    for number, given in enumerate(
        [
            ["export", place, tmp_path / "o" / NAMES[kind]],
            ["export", place, tmp_path / "m" / NAMES[kind], "--as", "merged"],
            ["quantize", tmp_path / "m" / NAMES[kind], tmp_path / "q" / NAMES[kind]],
            ["report", place, "--out", tmp_path / "r" / NAMES[kind]],
        ]
    ):
        one = runs.start_command(list(map(str, given)), tmp_path / f"{number}.log")
        assert one.wait() == 0, one.said
    for folder in "omqr":
        assert [path.name for path in (tmp_path / folder).iterdir()] == [NAMES[kind]]


@pytest.mark.parametrize(
    "given",
    [
        ("export", "{run}", "{long}"),
        ("export", "{long}", "{out}"),
        ("quantize", "{model}", "{long}"),
        ("quantize", "{long}", "{out}"),
        ("report", "{long}"),
        ("report", "{run}", "--out", "{long}"),
        ("eval", "{long}"),
        ("data", "{long}.jsonl"),
        ("sft", "--data", "{long}.jsonl"),
        ("generate", "{long}", "--prompt", "x"),
    ],
    ids=lambda given: "-".join(given[:2]).replace("{", "").replace("}", ""),
)
def test_a_name_that_is_too_long_is_one_line(files, whole, tmp_path, given):
    places = {"run": whole, "model": files, "out": tmp_path / "out", "long": tmp_path / ("x" * 256)}
    one = runs.start_command([part.format(**places) for part in given], tmp_path / "log")
    assert one.wait() in (1, 2) and "Traceback" not in one.said, one.said
    assert len([line for line in one.said.splitlines() if line.startswith("qerl: ")]) == 1
