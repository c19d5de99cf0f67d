"""qerl eval, sft, serve and tinker: killed, without space, twice in one folder, in folders of any name."""

import errno
import os
import signal
import sys

import pytest

import tiny_run
from faults import commands, runs

ROWS = ("--num-samples", "2", "--num-prompts", "6")
NUM_WRITES = 6
"""Flushes and renames of an evaluation: of its folder, its results, and its summary."""


def evaluation(files, whole, out):
    return ["eval", str(whole), str(files / "sums.jsonl"), *ROWS, "--out", str(out)]


def tuning(files, out):
    given = {"--data": files / "chats.jsonl", "--model": files, "--model.dtype": "fp32", "--out": out}
    given |= {"--batch-size": 4, "--max-steps": 4, "--checkpoint.every": 2, "--adapter.rank": 4}
    return ["sft", *(str(part) for pair in given.items() for part in pair)]


def finish(given, log):
    one = runs.start_command(given, log)
    assert one.wait() == 0, one.said
    return one


@pytest.fixture(scope="module")
def results(files, whole, tmp_path_factory):
    """The file of a whole evaluation."""
    folder = tmp_path_factory.mktemp("eval")
    finish(evaluation(files, whole, folder / "out"), folder / "log")
    (path,) = (folder / "out").iterdir()
    return path


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("sft") / "out"
    finish(tuning(files, out), out.with_name("log"))
    return out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_an_evaluation_is_one_line_and_the_next_one_is_whole(
    files, whole, results, tmp_path, number
):
    for cut in (0, NUM_WRITES - 1):
        out = tmp_path / str(cut)
        given = evaluation(files, whole, out)
        one = runs.start_command(given, tmp_path / f"{cut}.log", commands.failing_at(cut, number))
        assert commands.refusal(one, number) is None
        finish(given, tmp_path / f"{cut}.again")
        assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [
            (results.name, results.read_bytes())
        ]


def test_killed_at_any_write_an_evaluation_leaves_nothing_behind_and_the_next_one_is_whole(
    files, whole, results, tmp_path
):
    for cut in (1, 2, 4, NUM_WRITES):
        out = tmp_path / str(cut)
        given = evaluation(files, whole, out)
        one = runs.start_command(given, tmp_path / f"{cut}.log", commands.killed_at(cut))
        assert one.wait() == -signal.SIGKILL
        finish(given, tmp_path / f"{cut}.again")
        assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [
            (results.name, results.read_bytes())
        ]


def test_an_evaluation_by_ones_own_reward_keeps_the_old_results_until_it_has_new_ones(
    files, whole, results, tmp_path
):
    given = evaluation(files, whole, tmp_path / "out")
    finish(given, tmp_path / "log")
    one = runs.start_command(given, tmp_path / "killed.log", commands.killed_at(0))
    assert one.wait() == -signal.SIGKILL
    assert (tmp_path / "out" / results.name).read_bytes() == results.read_bytes()


@pytest.mark.parametrize("number", [1, 4, 6])
def test_ctrl_c_at_any_fork_ends_an_evaluation(files, whole, tmp_path, number):
    """Forks of such a process take most of the time in which its workers start."""
    left = [number]

    def interrupt():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)

    given = evaluation(files, whole, tmp_path / "out")
    one = runs.start_command(given, tmp_path / "log", lambda: os.register_at_fork(before=interrupt))
    assert one.wait() == 130 and "Exception ignored" not in one.said


def test_of_two_tunings_in_one_folder_one_goes_on_and_the_other_is_refused(files, tuned, tmp_path):
    both = [runs.start_command(tuning(files, tmp_path / "out"), tmp_path / f"{i}.log") for i in range(2)]
    codes = sorted(one.wait() for one in both)
    refused = [one for one in both if "another run is writing here" in one.said]
    assert len(refused) <= 1 and codes == ([0, 2] if refused else [0, 0])
    assert runs.difference(tmp_path / "out", tuned) is None


def test_a_tuning_beside_one_that_runs_is_refused_with_its_process(files, tuned, tmp_path):
    out = tmp_path / "out"
    one = runs.start_command(tuning(files, out), tmp_path / "1.log", stopping_at(3))
    try:
        one.wait_for(lambda: one.log.exists() and "[stopped]" in one.said)
        two = runs.start_command(tuning(files, out), tmp_path / "2.log")
        assert two.wait() == 2 and f"another run is writing here (process {one.pid})" in two.said
    finally:
        one.kill(signal.SIGCONT)
    assert one.wait() == 0 and runs.difference(out, tuned) is None


def stopping_at(allowed):
    """From then on the process stops itself at its next flush after so many, until it is continued."""
    sync, left = os.fsync, [allowed]

    def stop(descriptor):
        left[0] -= 1
        if left[0] == 0:
            os.write(2, b"[stopped]\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        sync(descriptor)

    return lambda: setattr(os, "fsync", stop)


@pytest.mark.parametrize("command", ["eval", "sft", "serve", "tinker"])
def test_an_output_that_is_full_is_one_line(files, whole, tmp_path, command):
    given = {
        "eval": evaluation(files, whole, tmp_path / "out"),
        "sft": tuning(files, tmp_path / "out"),
        "serve": ["serve", str(files), "--port", "0", "--model.dtype", "fp32"],
        "tinker": ["tinker", str(files), "--port", "0", "--model.dtype", "fp32"],
    }
    one = runs.start_command(given[command], tmp_path / "log", full_output)
    assert one.wait() == 1 and "Traceback" not in one.said
    assert [line for line in one.said.splitlines() if line.startswith("qerl: ")] == [
        f"qerl: {os.strerror(errno.ENOSPC)}"
    ]


def full_output():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115


NAMES = {
    "spaces-newline-and-quotes": " a  b\n'\"$(b)`*[c] ",
    "emoji-of-252-bytes": "\N{SLIGHTLY SMILING FACE}" * 63,
    "no-utf-8": os.fsdecode(b"\xff\xfe"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_folders_of_any_name_are_trained_tuned_evaluated_and_exported(files, whole, results, tmp_path, kind):
    name = NAMES[kind]
    train = ["train", "demo_long", *tiny_run.options(files, tmp_path / "t" / name), "--num-steps", "1"]
    for number, given in enumerate(
        [
            train,
            tuning(files, tmp_path / "s" / name),
            evaluation(files, whole, tmp_path / "e" / name),
            ["export", str(tmp_path / "t" / name), str(tmp_path / "x" / name)],
        ]
    ):
        finish(given, tmp_path / f"{number}.log")
    assert [os.listdir(tmp_path / folder) for folder in "tsex"] == [[name]] * 4
    assert (tmp_path / "e" / name / results.name).read_bytes() == results.read_bytes()
