"""Clients that send slowly, leave or flood, and a disk that is full, before a server for Tinker's API."""

import contextlib
import errno
import json
import os
import shutil
import threading
import time

import httpx
import pytest

import tiny_run
from qerl.tinker import wire
from qerl.tinker.wire import WireError, read_pass_request
from serve.parts import connected
from tinker_server.test_tinker_wire import DATUM, TARGETS, text
from tinker_server.tinker_parts import serving

HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\n"
NUM_SLOW = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def address(model, folder):
    with serving(model, folder) as address:
        yield address


def post(address, route, **body):
    return httpx.post(f"{address}/api/v1/{route}", json=body, timeout=60)


def result(address, route, **body):
    """The result of a request that computes."""
    promised = post(address, route, **body).json()
    return post(address, "retrieve_future", request_id=promised["request_id"]).json()


def made_client(address):
    session = post(address, "create_session").json()["session_id"]
    how = {"base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    return result(address, "create_model", session_id=session, model_seq_id=0, **how)["model_id"]


def save(address, model_id, name, **how):
    return result(address, "save_weights", model_id=model_id, path=name, **how)


def test_clients_that_send_byte_by_byte_or_read_nothing_hold_up_nobody(address):
    """Headers, a body, and answers that nobody reads."""
    body = json.dumps({"tags": ["x" * 200]}).encode()
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with contextlib.ExitStack() as attack:
        slow = [attack.enter_context(connected(address)) for _ in range(NUM_SLOW)]
        deaf = [attack.enter_context(connected(address, whole * 200, receive_bytes=4096)) for _ in range(8)]
        longest_s = 0.0
        for at in range(len(whole) - 1):
            for connection in slow:
                connection.sendall(whole[at : at + 1])
            if at % 40 == 0:
                begin_s = time.monotonic()
                assert post(address, "create_session").status_code == 200
                longest_s = max(longest_s, time.monotonic() - begin_s)
        for connection in slow:
            connection.sendall(whole[-1:])
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert longest_s < 5.0 and deaf


def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_no_traceback(address, capfd):
    for _ in range(5):
        with connected(address, HEAD + b"content-length: 1000\r\n\r\n{") as connection:
            time.sleep(0.05)
            connection.close()
    assert post(address, "create_session").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Refused:
    """Lets flushes, renames and new folders fail after so many."""

    def __init__(self, monkeypatch, allowed):
        self.left = allowed
        for name in ("fsync", "rename", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._change(getattr(os, name)))

    def _change(self, real):
        def change(*given, **named):
            self.left -= 1
            if self.left < 0 and threading.current_thread().name == "tinker":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*given, **named)

        return change


@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_a_full_disk_is_told_to_the_client_and_keeps_the_checkpoint_that_was_there(
    address, folder, monkeypatch, capfd, allowed
):
    model_id = made_client(address)
    place = folder / model_id / "weights"
    assert save(address, model_id, "one")["path"] == f"tinker://{model_id}/weights/one"
    before = content_of(place / "one")
    with monkeypatch.context() as patch:
        Refused(patch, allowed)
        for name, how in (("one", {"overwrite": True}), ("two", {})):
            failed = save(address, model_id, name, **how)
            assert failed["category"] == "server" and os.strerror(errno.ENOSPC) in failed["error"]
            assert failed["error"].startswith(f"tinker://{model_id}/weights/{name}: cannot be written")
    assert [path.name for path in place.iterdir()] == ["one"] and content_of(place / "one") == before
    assert save(address, model_id, "two")["type"] == "save_weights"
    assert save(address, model_id, "one", overwrite=True)["type"] == "save_weights"
    assert sorted(path.name for path in place.iterdir()) == ["one", "two"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_that_is_overwritten_is_never_missing(address, folder):
    """Nor is one half of another: a reader finds the old or the new."""
    model_id = made_client(address)
    save(address, model_id, "one")
    place, missing, is_over = folder / model_id / "weights" / "one", [], threading.Event()

    def look():
        while not is_over.is_set():
            missing.extend([1] * (not (place / "checkpoint.json").exists()))
            time.sleep(0.0005)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(10):
        assert save(address, model_id, "one", overwrite=True)["type"] == "save_weights"
    is_over.set()
    looking.join()
    assert not missing


TENSOR = text(2, text(1, b"w") + text(2, TARGETS))
FLOODS = {
    "sequences": (text(3, b"") * 50, "more than 10 sequences"),
    "fields": (b"\x78\x01" * 200, "more than 100 fields"),
    "fields of a sequence": (text(3, text(1, b"") * 60) * 2, "more than 100 fields"),
    "entries": (text(7, text(1, b"a")) * 60, "more than 100 fields"),
    "fields of a tensor": (
        text(3, text(2, text(1, b"w") + text(2, b"\x18\x02" * 60))) * 2,
        "than 100 fields",
    ),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_body_of_millions_of_fields_is_refused(monkeypatch, kind):
    """16 MB of them took 13 to 76 s, in which no other client was answered."""
    monkeypatch.setattr(wire, "_MAX_DATA", 10)
    monkeypatch.setattr(wire, "_MAX_FIELDS", 100)
    body, message = FLOODS[kind]
    with pytest.raises(WireError, match=message):
        read_pass_request(body)
    assert len(read_pass_request(text(3, DATUM) * 4).data) == 4


def test_while_a_large_body_is_read_others_are_answered(address, monkeypatch):
    model_id = made_client(address)
    monkeypatch.setattr(
        "qerl.tinker.app.read_pass_request", lambda body: time.sleep(2) or read_pass_request(body)
    )
    body = text(1, model_id.encode()) + text(3, DATUM) + text(4, b"cross_entropy")
    large = threading.Thread(
        target=httpx.post,
        args=(f"{address}/api/v1/forward_backward",),
        kwargs={"content": body, "timeout": 60},
    )
    large.start()
    time.sleep(0.2)
    assert httpx.get(f"{address}/api/v1/healthz", timeout=60).status_code == 200
    assert large.is_alive()
    large.join()


def sampler_of(address, model_id, number):
    made = {"model_id": model_id, "sampling_session_seq_id": number}
    return result(address, "save_weights_for_sampler", **made)["sampling_session_id"]


def is_there(address, sampler_id):
    return httpx.get(f"{address}/api/v1/samplers/{sampler_id}", timeout=60).status_code == 200


def test_a_loop_that_makes_a_sampler_a_step_keeps_few_in_memory(model, folder):
    """Each has a copy of the adapter; those used last stay in memory, the others lie in files."""
    with serving(model, folder, host_samplers=4) as address:
        one = made_client(address)
        samplers = [sampler_of(address, one, number) for number in range(9)]
        assert len(list(folder.glob(".samplers-*/*.safetensors"))) == 5
        assert all(is_there(address, each) for each in samplers)
        post(address, f"sessions/{one.partition(':')[0]}/finish")
        end_s = time.monotonic() + 30
        while list(folder.glob(".samplers-*/*.safetensors")):
            assert time.monotonic() < end_s
            time.sleep(0.05)


def test_a_result_that_was_taken_is_freed_after_a_while_and_those_that_wait_are_not(
    model, folder, monkeypatch
):
    monkeypatch.setattr("qerl.tinker.requests._FETCHED_KEPT_S", 0.2)
    monkeypatch.setattr("qerl.tinker.app._SWEEP_S", 0.05)
    with serving(model, folder) as address:
        model_id = made_client(address)
        waiting = post(address, "save_weights", model_id=model_id, path="waiting").json()["request_id"]
        taken = post(address, "save_weights", model_id=model_id, path="taken").json()["request_id"]
        assert post(address, "retrieve_future", request_id=taken).status_code == 200
        end_s = time.monotonic() + 30
        while post(address, "retrieve_future", request_id=taken).status_code == 200:
            assert time.monotonic() < end_s
            time.sleep(0.5)
        assert post(address, "retrieve_future", request_id=waiting).json()["type"] == "save_weights"


DAMAGED = {
    "nothing": b"",
    "half": b'{"rank": 4, "se',
    "list": b"[]",
    "no fields": b"{}",
    "time": b'{"time": 5, "expires_at": null}',
    "expiry": b'{"time": "2026-01-01T00:00:00+00:00", "expires_at": "soon"}',
    "expiry without a zone": b'{"time": "2026-01-01T00:00:00+00:00", "expires_at": "2099-01-01"}',
    "rank": b'{"rank": "4", "seed": 1, "train_mlp": true, "train_attn": true, "base_model": "tiny",'
    b' "time": "2026-01-01T00:00:00+00:00", "expires_at": null}',
}


def test_a_damaged_checkpoint_is_refused_and_others_are_listed(address, folder, capfd):
    model_id = made_client(address)
    whole = save(address, model_id, "whole")["path"]
    for number, content in enumerate(DAMAGED.values()):
        place = folder / model_id / "weights" / f"damaged-{number}"
        shutil.copytree(folder / model_id / "weights" / "whole", place)
        (place / "checkpoint.json").write_bytes(content)
        path = whole.replace("whole", place.name)
        for route, given in (
            ("weights_info", {"tinker_path": path}),
            ("load_weights", {"model_id": model_id, "path": path, "optimizer": True}),
        ):
            answer = post(address, route, **given)
            assert answer.status_code == 400 and "checkpoint.json: is damaged" in answer.text, content
    listed = httpx.get(f"{address}/api/v1/checkpoints", timeout=60).json()["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [whole]
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_of_a_huge_rank_is_refused_before_memory_is_taken(address, folder):
    model_id = made_client(address)
    path = save(address, model_id, "whole")["path"]
    info = folder / model_id / "weights" / "whole" / "checkpoint.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"rank": 10**12}))
    answer = post(address, "load_weights", model_id=model_id, path=path, optimizer=False)
    assert answer.status_code == 400 and "is above 8, the server's --max-rank" in answer.text
