"""The server: access, responses, and start and end of the command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest

from qerl.errors import UserError
from qerl.tracking.dashboard.server import watch
from tracking.dashboard.parts import run_of, serving, take_step


@pytest.fixture
def run(tmp_path):
    with run_of(tmp_path / "run") as journal:
        take_step(journal, 0)
    return tmp_path / "run"


@pytest.mark.parametrize("path", ["/", "/now", "/update", "/samples?run=0&step=0"])
def test_only_requests_that_name_this_machine_are_answered(run, path):
    with serving(run) as address:
        for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "192.0.2.1", ""):
            assert httpx.get(address + path, headers={"host": host}).status_code == 403
        for host in ("localhost:1", "127.0.0.1", "[::1]:8080"):
            assert httpx.get(address + path, headers={"host": host}).status_code == 200


def test_no_other_page_may_read_or_frame_it(run):
    with serving(run) as address:
        headers = httpx.get(address).headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name in headers if name.startswith("access-control")]


def test_nothing_else_is_there_and_nothing_can_be_changed(run):
    with serving(run) as address:
        for path in (
            "/run.json",
            "/../run.json",
            "/samples",
            "/samples?run=1&step=0",
            "/samples?run=-1&step=0",
            "/samples?run=0&step=1",
            "/samples?run=0&step=x",
            "/samples?run=0",
            "/samples?run=0&prompt=99",
            "/samples?run=0&step=" + "9" * 5000,
        ):
            assert httpx.get(address + path).status_code == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert httpx.request(method, address).status_code == 501


def test_the_tag_changes_with_the_files_and_the_parts_come_under_it(tmp_path):
    with run_of(tmp_path / "run") as journal, serving(tmp_path / "run") as address:
        tags = [httpx.get(f"{address}/now").json()["tag"] for _ in range(2)]
        take_step(journal, 0)
        tags.append(httpx.get(f"{address}/now").json()["tag"])
        assert tags[0] == tags[1] != tags[2]
        update = httpx.get(f"{address}/update").json()
    assert update["data"]["tag"] == tags[2] and update["data"]["runs"] == [
        {"name": "run", "clock": ANY, "groups": [], "steps": [0], "hasHeldOut": False}
    ]
    assert "<h3>Reward</h3>" in update["parts"]["tiles"]


def test_a_run_that_can_no_longer_be_read_is_an_error(run):
    with serving(run) as address:
        (run / "samples.jsonl").unlink()
        (run / "samples.jsonl").mkdir()
        answer = httpx.get(f"{address}/now")
    assert answer.status_code == 503 and answer.text == "the run cannot be read: not a regular file\n"


def test_a_port_in_use_is_one_line(run):
    said = r"cannot listen on 127.0.0.1 port \d+: Address already in use; --port 0 picks a free one"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=said):
        watch([run], port=taken.getsockname()[1], opens_browser=False)


def command(*arguments):
    source = "import sys; from qerl.cli.main import main; main()"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "BROWSER": "echo opened %s",
    }
    return subprocess.Popen(
        [sys.executable, "-c", source, "watch", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_opens_the_page_and_ends_with_ctrl_c_while_someone_looks(run):
    server = command(run, "--port", "0", "--open")
    try:
        name, _, address = server.stdout.readline().strip().partition(" at ")
        assert name == "run" and address.startswith("http://127.0.0.1:")
        assert server.stdout.readline() == f"opened {address}\n"
        with httpx.Client() as client:
            assert json.loads(client.get(f"{address}now").content)["runs"][0]["state"] == "running"
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=30)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 130 and out == err == ""


def test_the_command_waits_for_a_run_that_is_starting(tmp_path):
    (tmp_path / "run").mkdir()
    with command(tmp_path / "run", "--port", "0") as server:
        try:
            assert server.stderr.readline() == f"waiting up to 60 s for {tmp_path / 'run'} to start\n"
            with run_of(tmp_path / "run"):
                assert server.stdout.readline().startswith("run at http://127.0.0.1:")
        finally:
            server.kill()


def test_a_folder_of_other_files_is_not_waited_for(tmp_path):
    (tmp_path / "notes.md").write_text("")
    os.utime(tmp_path / "notes.md", (0, 0))
    with pytest.raises(UserError, match=r"has no metrics\.jsonl, so it is not the folder of a run"):
        watch([tmp_path], port=0, opens_browser=False)


def test_a_run_that_does_not_start_is_an_error(tmp_path, capsys):
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"/none: has no metrics\.jsonl"):
        watch([tmp_path / "none"], port=0, opens_browser=False, patience_s=0.2)
    assert capsys.readouterr().err == f"waiting up to 0 s for {tmp_path / 'none'} to start\n"


def refusal(folder):
    begin_s = time.monotonic()
    with pytest.raises(UserError) as caught:
        watch([folder], port=0, opens_browser=False)
    assert time.monotonic() - begin_s < 5
    return str(caught.value)


def test_a_folder_that_does_not_exist_is_refused_at_once_with_its_neighbour(tmp_path):
    (tmp_path / "sums").mkdir()
    assert refusal(tmp_path / "sum").endswith(f"/sum: no such folder; did you mean {tmp_path / 'sums'}?")
    assert refusal(tmp_path / "none" / "sums").endswith("no such folder")
    (tmp_path / "file").touch()
    assert "file: has no metrics.jsonl" in refusal(tmp_path / "file")


def test_a_folder_of_runs_is_refused_at_once_with_its_newest(tmp_path):
    for name in "first", "second":
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    os.utime(tmp_path / "first" / "run.json", (0, 0))
    assert refusal(tmp_path).endswith(f"the newest run in it is {tmp_path / 'second'}")
