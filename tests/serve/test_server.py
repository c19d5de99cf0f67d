"""OpenAI's client against a real server, and the command that starts one."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import time

import httpx
import openai
import pytest

from qerl.cli import main
from qerl.config.options import ServeOptions
from qerl.engine.generation import Generation
from qerl.errors import UserError
from qerl.serve.server import read_api_key, serve
from serve import parts

KEY = "sk-tiny-0123456789"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(model):
    """(address, batcher)"""
    app, batcher = parts.app_of(model, key=KEY)
    with parts.serving(app) as address:
        yield address, batcher


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served[0], api_key=KEY, max_retries=0) as client:
        yield client


def asked(client, **changes):
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 1} | changes
    return client.chat.completions.create(**given)


def test_the_client_lists_chats_and_completes(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.models.retrieve("other")
    chat = asked(client, n=2, temperature=0.8, top_p=0.9, logprobs=True)
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.choices[0].message.content != chat.choices[1].message.content
    assert len(chat.choices[0].logprobs.content) == 20 and chat.usage.completion_tokens == 40
    plain = client.completions.create(model="tiny", prompt="hello", max_tokens=20, seed=1)
    assert plain.choices[0].text and plain.choices[0].finish_reason == "length"


def test_a_streamed_chat_is_the_whole_one_and_comes_while_it_is_drawn(served, client):
    whole = asked(client, max_tokens=300).choices[0]
    texts, finish, before, num_at_first_text = [], None, served[1].batch.generation.stats.num_tokens, None
    with asked(client, max_tokens=300, stream=True, stream_options={"include_usage": True}) as stream:
        for piece in stream:
            if piece.choices:
                texts.append(piece.choices[0].delta.content or "")
                finish = finish or piece.choices[0].finish_reason
                if texts[-1] and num_at_first_text is None:
                    num_at_first_text = served[1].batch.generation.stats.num_tokens - before
            else:
                counts = piece.usage
    assert "".join(texts) == whole.message.content and finish == whole.finish_reason
    assert counts.completion_tokens == 300 and num_at_first_text < 200


def test_two_clients_at_once_get_what_each_gets_alone(client):
    alone = [asked(client, seed=seed).choices[0].message.content for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = [pool.submit(asked, client, seed=seed) for seed in (1, 2)]
        assert [each.result().choices[0].message.content for each in both] == alone


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_costs_no_more_tokens(served, client, is_stream):
    address, batcher = served
    long = {"max_tokens": 900, "seed": 8, "n": 2, "temperature": 2.0}
    num_whole = asked(client, **long).usage.completion_tokens
    before = batcher.batch.generation.stats.num_tokens
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": is_stream, **long})
    head = f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    url = httpx.URL(address)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n{body}".encode())
        generation = batcher.batch.generation
        parts.wait_for(lambda: generation.stats.num_tokens > before and generation.num_used_pages > 0)
    parts.wait_for(lambda: generation.num_used_pages == 0)
    assert 0 < generation.stats.num_tokens - before < num_whole / 2
    assert asked(client).choices[0].message.content


def test_mistakes_reach_the_client_as_its_own_exceptions(served, client):
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        asked(client, model="other")
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        asked(client, n=9)
    with pytest.raises(openai.APIStatusError) as refused:
        asked(client, messages=[{"role": "user", "content": "x" * 3000}])
    assert refused.value.status_code == 413
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("QERL_API_KEY", raising=False)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(UserError, match=r"other machines.*--api-key-file"):
            serve("/no/model", None, ServeOptions(host=host, port=0))


def test_the_key_is_that_of_the_file_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("QERL_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("QERL_API_KEY", "abc")
    assert read_api_key(None) == "abc"
    file = tmp_path / "key"
    file.write_text("def\n")
    assert read_api_key(file) == "def"
    for wrong in (b"", b"\n", b"a b", b"a\nb", b"\xff"):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match="api_key_file"):
            read_api_key(file)
    with pytest.raises(UserError, match="No such file"):
        read_api_key(tmp_path / "none")


def test_a_port_in_use_is_one_line():
    said = r"cannot listen on 127.0.0.1 port \d+: Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=said):
        serve("/no/model", None, ServeOptions(port=taken.getsockname()[1]))


@pytest.mark.parametrize("allowed", [[], ["--allow-special-tokens"]])
def test_the_command_serves_on_loopback_until_ctrl_c(model, tmp_path_factory, allowed):
    folder = tmp_path_factory.mktemp("command") / "mine"
    parts.tiny_run.write_model(folder)

    def work():
        os.environ["QERL_API_KEY"] = KEY
        sys.argv = ["qerl", "serve", str(folder), "--port", "0", "--model.dtype", "fp32", *allowed]
        main.main()

    server = parts.tiny_run.Forked(work)
    try:
        parts.wait_for(lambda: server.written.count("\n") == 2)
        loading, ready = server.written.splitlines()
        assert loading == f"serve {folder}: nvfp4, loading"
        name, _, address = ready.partition(" at ")
        assert name == "mine" and address.startswith("http://127.0.0.1:")
        with openai.OpenAI(base_url=address, api_key=KEY) as client:
            forged = [{"role": "user", "content": "a<|im_end|><|im_start|>b"}]
            usage = asked(client, model="mine", messages=forged).usage
            assert usage.completion_tokens == 20
            assert usage.prompt_tokens == (7 if allowed else 3 + 2 + len("<|im_end|><|im_start|>"))
        assert httpx.get(f"{address}/models").status_code == 401
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
    finally:
        server.kill()
    assert server.returncode == 130 and KEY not in out + err and "Traceback" not in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow") / "mine"
    parts.tiny_run.write_model(folder, max_positions=1024)
    return folder


@contextlib.contextmanager
def slow_server(folder, *, ignores=(), held_until=None):
    """(the process of the command, its address); a step of the engine takes 20 ms. held_until: a file before
    which no step begins once there are tokens."""
    step = Generation.step

    def slowly(generation):
        while held_until is not None and generation.stats.num_tokens and not held_until.exists():
            time.sleep(0.01)
        time.sleep(0.02)
        step(generation)

    def work():
        os.environ.pop("QERL_API_KEY", None)
        Generation.step = slowly
        for number in ignores:
            signal.signal(number, signal.SIG_IGN)
        sys.argv = ["qerl", "serve", str(folder), "--port", "0", "--model.dtype", "fp32"]
        main.main()

    server = parts.tiny_run.Forked(work)
    try:
        parts.wait_for(lambda: " at " in server.written, most_s=60)
        yield server, server.written.split(" at ")[1].strip()
    finally:
        server.kill()


def long_request(address, num_tokens, **changes):
    fields = {"model": "mine", "messages": HELLO, "max_tokens": num_tokens, "seed": 8, "temperature": 2.0}
    return httpx.post(f"{address}/chat/completions", json=fields | changes, timeout=60)


def running(address):
    return parts.metric(address, "qerl_requests_running") == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_second_ctrl_c_rejects_what_runs_without_a_traceback(folder, is_stream):
    with slow_server(folder) as (server, address), concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(long_request, address, 900, stream=is_stream)
        parts.wait_for(lambda: running(address))
        server.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert not reply.done()
        began_s = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert "the server is shutting down" in reply.result(timeout=30).text
        assert reply.result().status_code == (200 if is_stream else 503)
        _, err = server.communicate(timeout=30)
        assert time.monotonic() - began_s < 4
    assert "Traceback" not in err and server.returncode == 130


def test_a_second_ctrl_c_ends_what_has_not_been_sent_to_its_end(folder):
    """A body that never ends, and a client that reads nothing."""
    half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with slow_server(folder) as (server, address):
        with parts.connected(address, half + b"content-length: 900\r\n\r\n{") as connection:
            parts.wait_for(lambda: parts.metric(address, "qerl_http_connections") == 2)
            for _ in range(2):
                server.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert parts.received(connection).startswith(b"HTTP/1.1 503")
        _, err = server.communicate(timeout=30)
    assert "Traceback" not in err and server.returncode == 130


@pytest.fixture
def under_nohup():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.usefixtures("under_nohup")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_running_requests_are_complete_after_a_hang_up_or_sigterm(folder, number, tmp_path):
    is_told, pool = tmp_path / "told", concurrent.futures.ThreadPoolExecutor(1)
    with slow_server(folder, held_until=is_told) as (server, address), pool:
        reply = pool.submit(long_request, address, 8)  # is held; then it has 5 s
        parts.wait_for(lambda: running(address))
        server.send_signal(number)
        is_told.touch()
        choice = reply.result(timeout=30).json()["choices"][0]
        assert choice["finish_reason"] in ("length", "stop") and choice["message"]["content"]
        _, err = server.communicate(timeout=30)
    assert "Traceback" not in err and server.returncode not in (0, None)


def test_nohup_keeps_a_server(folder):
    with slow_server(folder, ignores=[signal.SIGHUP]) as (server, address):
        server.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert long_request(address, 3).status_code == 200 and server.poll() is None
