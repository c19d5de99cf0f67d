"""Clients that hold connections, send slowly, or send no HTTP, against a real server with small limits."""

import concurrent.futures
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time

import httpx
import pytest

import tiny_run
from qerl.cli import main
from qerl.engine.generation import Generation
from qerl.serve.response import ChatResponse
from serve import parts

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 3}
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-half: "
SHORT_S = 0.5  # deadlines of these tests
BOUND_S = 20 * SHORT_S


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def serving(model, **options):
    app, batcher = parts.app_of(model, **options)
    with parts.serving(app, **options) as address:
        yield address, batcher


def chat(address, **changes):
    return httpx.post(f"{address}/chat/completions", json=HELLO | changes, timeout=60)


def test_hundreds_of_half_sent_headers_keep_nobody_out(model):
    """Beyond the cap, a new connection replaces the one that has waited longest."""
    with serving(model, max_connections=60) as (address, _), contextlib.ExitStack() as attack:
        for _ in range(300):
            attack.enter_context(parts.connected(address, HALF))
        assert chat(address).status_code == 200
        assert parts.metric(address, "qerl_http_connections") <= 60
        assert parts.metric(address, 'qerl_http_connections_closed_total{reason="replaced"}') >= 240


@pytest.mark.parametrize(
    ("phase", "sent", "status"),
    [
        ("header", b"", b"408"),
        ("header", HALF, b"408"),
        ("body", HALF + b"1\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{", b"408"),
    ],
)
def test_a_byte_now_and_then_does_not_keep_a_connection(model, phase, sent, status):
    with serving(model, **{f"{phase}_timeout_s": SHORT_S}) as (address, _):
        began_s = time.monotonic()
        with parts.connected(address, sent) as connection, contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], SHORT_S / 5)[0]:
                assert time.monotonic() - began_s < BOUND_S
                if sent:
                    connection.sendall(b"x")
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
        assert time.monotonic() - began_s > SHORT_S
        parts.wait_for(lambda: parts.metric(address, "qerl_http_connections") == 1)


def test_clients_that_send_and_read_byte_by_byte_hold_up_nobody(model):
    """Of 40 requests each byte comes alone; four answers are read so."""
    sent, stream = parts.post(HELLO), parts.post(HELLO | {"max_tokens": 300, "stream": True, "n": 4})
    longest_s = 0.0
    with serving(model, max_waiting=64) as (address, _), contextlib.ExitStack() as attack:
        slow = [attack.enter_context(parts.connected(address)) for _ in range(40)]
        readers = [attack.enter_context(parts.connected(address, stream, receive_bytes=4096)) for _ in "1234"]
        for at in range(len(sent)):
            for connection in slow:
                connection.sendall(sent[at : at + 1])
            for connection in readers:
                assert len(connection.recv(1)) == 1
            if at % 40 == 0:
                began_s = time.monotonic()
                assert chat(address).status_code == 200
                longest_s = max(longest_s, time.monotonic() - began_s)
        assert {connection.recv(12) for connection in slow} == {b"HTTP/1.1 200"}
    assert longest_s < BOUND_S


def test_an_idle_connection_ends_after_its_answer(model):
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        serving(model, keep_alive_timeout_s=SHORT_S) as (address, _),
        parts.connected(address, request) as connection,
    ):
        assert parts.received(connection).startswith(b"HTTP/1.1 200")


def test_a_slow_request_on_a_kept_connection_ends_too(model):
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        serving(model, header_timeout_s=SHORT_S) as (address, _),
        parts.connected(address, request) as connection,
    ):
        assert connection.recv(9) == b"HTTP/1.1 "
        connection.sendall(HALF)
        assert b"HTTP/1.1 408" in parts.received(connection)


def test_a_client_that_takes_nothing_loses_its_request(model):
    """A stream of more than fits into the buffers between, to a client that does not read."""
    ask = HELLO | {"max_tokens": 900, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 4}
    with serving(model, send_timeout_s=SHORT_S) as (address, batcher):
        with parts.connected(address, parts.post(ask), receive_bytes=4096):
            closed = 'qerl_http_connections_closed_total{reason="send_timeout"}'
            parts.wait_for(lambda: parts.metric(address, closed) == 1, most_s=60)
            parts.wait_for(lambda: batcher.batch.generation.num_used_pages == 0, most_s=60)
        assert chat(address).status_code == 200


def slow_down(monkeypatch):
    """Let each burst of decode steps take a while, so that an answer is long on any machine."""
    step = Generation.step

    def slow(self):
        time.sleep(0.1)
        step(self)

    monkeypatch.setattr(Generation, "step", slow)


def test_health_is_told_while_all_connections_have_requests(model, monkeypatch):
    long = parts.post(HELLO | {"max_tokens": 900, "stream": True, "seed": 8, "temperature": 2.0})
    with serving(model, max_connections=2) as (address, batcher):
        with monkeypatch.context() as slower, contextlib.ExitStack() as stack:
            slow_down(slower)
            one, two = (stack.enter_context(parts.connected(address, long)) for _ in range(2))
            for each in (one, two):
                assert each.recv(9) == b"HTTP/1.1 "
            refused = httpx.get(f"{address}/models", timeout=60)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "busy"
            assert httpx.get(f"{address.removesuffix('/v1')}/health", timeout=60).status_code == 200
        parts.wait_for(lambda: batcher.num_running == 0)
        assert chat(address).status_code == 200


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_long_headers_are_refused(model, num_pieces):
    with serving(model, max_header_bytes=3000) as (address, _), parts.connected(address, HALF) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(num_pieces - 1):
                connection.sendall(b"x" * 2000)
                time.sleep(0.05)
            if num_pieces == 1:  # otherwise they never end
                connection.sendall(b"x" * 4000 + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 431")


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # a TLS handshake
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
    HALF + b"1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
]


def test_what_is_no_http_is_refused_without_filling_the_log(model, capfd):
    upgrade = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    upgrade += b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    with serving(model) as (address, _):
        for _ in range(40):
            for sent in NO_HTTP:
                with parts.connected(address, sent) as connection:
                    assert parts.received(connection).startswith(b"HTTP/1.1 400"), sent
            with parts.connected(address, upgrade) as connection:
                assert parts.received(connection).startswith(b"HTTP/1.1 200")
        assert chat(address).status_code == 200
    logged = capfd.readouterr().err
    assert "Invalid HTTP request received." in logged and "Traceback" not in logged
    assert logged.count("\n") < 160  # of 320; a few per 10 s


def test_garbage_after_an_answer_ends_the_connection(model, capfd):
    """A body whose chunks go wrong when the answer has been sent, and bytes behind a request that runs."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
    with serving(model) as (address, batcher):
        with parts.connected(address, head + b"transfer-encoding: chunked\r\n\r\n") as connection:
            assert connection.recv(12) == b"HTTP/1.1 415"
            connection.sendall(b"xyz\r\n")
            assert b"HTTP/1.1" not in parts.received(connection)
        sent = parts.post(HELLO | {"max_tokens": 200}) + b"\x00garbage\r\n\r\n"
        with parts.connected(address, sent) as connection:
            answers = parts.received(connection)
        assert answers.startswith(b"HTTP/1.1 200") and answers.count(b"HTTP/1.1 400") == 1
        parts.wait_for(lambda: batcher.num_running == 0)
    assert "Traceback" not in capfd.readouterr().err


def test_a_stream_is_told_that_the_server_ends(model, monkeypatch, capfd):
    """Its answer takes longer than the server waits for it."""
    monkeypatch.setattr("qerl.serve.connections._SHUTDOWN_TIMEOUT_S", SHORT_S)
    slow_down(monkeypatch)
    with contextlib.ExitStack() as stack:
        with serving(model) as (address, _):
            sent = parts.post(HELLO | {"max_tokens": 900, "stream": True, "seed": 8, "temperature": 2.0})
            connection = stack.enter_context(parts.connected(address, sent))
            assert connection.recv(9) == b"HTTP/1.1 "
        assert b"the server is shutting down" in parts.received(connection)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux' prlimit")
def test_without_descriptors_the_server_logs_little_and_goes_on(tmp_path):
    """The command's own process, whose limit is lowered to a few more files than it has."""
    folder = tmp_path / "tiny"
    tiny_run.write_model(folder, max_positions=1024)
    options = ["--port", "0", "--model.dtype", "fp32", "--max-prompt-tokens", "60", "--max-tokens", "60"]

    def work():
        os.environ.pop("QERL_API_KEY", None)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
        sys.argv = ["qerl", "serve", str(folder), *options]
        main.main()

    server = tiny_run.Forked(work)
    try:
        parts.wait_for(lambda: " at " in server.written, most_s=120)
        address = server.written.split(" at ")[1].strip()
        assert chat(address).status_code == 200
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        used = set(map(int, os.listdir(f"/proc/{server.pid}/fd")))
        limit = [number for number in range(len(used) + 5) if number not in used][4]
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.ExitStack() as attack:
            for _ in range(60):
                attack.enter_context(parts.connected(address, HALF))
            answer = chat(address)
            assert answer.status_code == 200 and answer.json()["choices"]
            assert parts.metric(address, "qerl_http_accept_errors_total") >= 1
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    finally:
        server.kill()
    assert re.search("cannot accept connections: Too many open files", err)
    assert "Traceback" not in err and err.count("\n") < 100


BODY = json.dumps(HELLO).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SECOND = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
TWO_ENDS = [
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
    POST + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n" + CHUNKED,
    POST + b"content-length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(CHUNKED) + CHUNKED,
    POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED,
    POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
    POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED,
    POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED,
    POST + b"transfer-encoding : chunked\r\n\r\n" + CHUNKED,
    POST + b"content-length: 3\r\ncontent-length: 03\r\n\r\n" + CHUNKED,
    POST + b"content-length: +3\r\n\r\n" + CHUNKED,
]


@pytest.mark.parametrize("sent", TWO_ENDS)
def test_a_request_with_two_ends_is_refused_and_nothing_behind_it_is_read(model, sent):
    """A proxy that takes the other end would let a client put words into another's request."""
    with serving(model) as (address, _), parts.connected(address, sent + SECOND) as connection:
        answers = parts.received(connection)
    assert answers.count(b"HTTP/1.1 ") == 1 and re.match(rb"HTTP/1.1 (400|501) ", answers), answers


def test_pipelined_requests_are_answered_in_order(model):
    ask = parts.post(HELLO)
    last = ask.replace(b"host:", b"connection: close\r\nhost:")
    with serving(model) as (address, _), parts.connected(address, ask + SECOND + last) as connection:
        answers = parts.received(connection)
    found = re.findall(rb'"object":"([a-z.]+)"', answers)
    assert found == [b"chat.completion", b"list", b"model", b"chat.completion"]


def test_a_flood_of_pipelined_requests_is_not_taken_faster_than_it_is_answered(model):
    with serving(model, send_timeout_s=SHORT_S) as (address, _):
        with parts.connected(address, receive_bytes=4096) as connection:
            connection.settimeout(2)
            sent = 0
            with contextlib.suppress(OSError):
                for _ in range(2000):
                    connection.sendall(SECOND * 500)
                    sent += 500
            assert sent < 500_000
        assert chat(address).status_code == 200


@pytest.mark.parametrize(
    ("piece", "status"),
    [
        (b"1;" + b"x" * 20_000, b"400|431"),
        (b"fffffffffffffffff\r\n", b"400|413"),
        (b"0\r\n" + b"a: b\r\n" * 4000, b"400|431"),
        (b"1\r\n{\r\n" * 3000, b"400|413"),
        (b"-1\r\n", b"400"),
    ],
)
def test_chunks_without_sense_or_end_are_refused(model, piece, status):
    sent = POST + b"transfer-encoding: chunked\r\n\r\n" + piece
    with serving(model, body_timeout_s=2) as (address, _), parts.connected(address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert re.match(rb"HTTP/1.1 (" + status + rb"|408) ", parts.received(connection))


def test_clients_that_vanish_at_any_moment_leave_nothing(model):
    """With a reset, after each part of a request, and in its answer."""
    ask = parts.post(HELLO | {"max_tokens": 60, "stream": True})
    with serving(model, max_connections=100) as (address, batcher):
        for length in [*range(0, len(ask), 7), *[len(ask)] * 20]:
            with parts.connected(address, ask[:length]) as connection:
                if length == len(ask):
                    time.sleep(0.002 * (length % 10))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        parts.wait_for(lambda: parts.metric(address, "qerl_http_connections") == 1)
        parts.wait_for(lambda: batcher.kv_pages[0] == 0 and batcher.num_waiting + batcher.num_running == 0)
        assert chat(address).status_code == 200


def test_an_answer_of_many_names_of_tokens_does_not_hold_up_others(model, monkeypatch):
    """They are written in a thread of their own."""
    write, may_end = ChatResponse.whole, threading.Event()
    monkeypatch.setattr(ChatResponse, "whole", lambda *each: (may_end.wait(60), write(*each))[1])
    with serving(model) as (address, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        large = pool.submit(chat, address)
        parts.wait_for(lambda: parts.metric(address, "qerl_generated_tokens_total") >= 4)
        assert httpx.get(f"{address}/models", timeout=60).status_code == 200 and not large.done()
        may_end.set()
        assert large.result().status_code == 200
