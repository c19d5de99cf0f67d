"""A tiny loaded model, an app around it, and a real server on a free port."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import torch
from starlette.testclient import TestClient

import tiny_run
from models import tiny
from qerl.config import ModelConfig
from qerl.config.options import ServeOptions
from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.serve.app import make_app
from qerl.serve.batcher import Batcher
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.serve.request import RequestParser
from qerl.serve.server import make_server
from qerl.types import Prompt, Sample

NAME = "tiny"
LIMITS = {"max_prompt_tokens": 60, "max_tokens": 900, "max_samples": 4, "max_body_bytes": 2000}


# As Qwen's: the functions come before the messages, calls and their results are marked.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>{% for t in tools %}{{ t['function']['name'] }},{% endfor %}"
    "<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['content'] }}{% if m['tool_calls'] %}"
    "{% for c in m['tool_calls'] %}{{ c['function'] | tojson }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ mood }}{% endif %}"
)


def load_tiny(folder: Path, *, template: str | None = None) -> LoadedModel:
    tiny_run.write_model(folder, max_positions=1024)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_model(str(folder), None, ModelConfig(path=str(folder), dtype="fp32"), with_adapter=True)


def batcher_of(model: LoadedModel, *, max_waiting: int = 8) -> Batcher:
    return Batcher(model.engine, max_waiting=max_waiting, max_positions=model.max_positions)


def app_of(model: LoadedModel, *, key: str | None = None, max_waiting: int = 8, **options):
    """(the app, its batcher)."""
    batcher = batcher_of(model, max_waiting=max_waiting)
    parser = RequestParser(model=model, options=ServeOptions(**(LIMITS | options)), name=NAME)
    return make_app(parser, batcher, api_key=key), batcher


@contextlib.contextmanager
def serving(app, **options):
    """The address of a real server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )  # what a client does not take shows soon
        server = make_server(app, ServeOptions(**(LIMITS | options)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def connected(address: str, sent: bytes = b"", *, receive_bytes: int | None = None):
    """A bare connection to the server, which has sent these bytes."""
    url = httpx.URL(address)
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(60)
        connection.connect((url.host, url.port))
        connection.sendall(sent)
        yield connection


def received(connection: socket.socket) -> bytes:
    """All that the server sends until it ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            found += piece
    return found


def post(body: object, *, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a request."""
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n{content}".encode()


def metric(address: str, name: str) -> float:
    """The value of one line of /metrics; 0 if it is not there."""
    text = httpx.get(f"{address.removesuffix('/v1')}/metrics", timeout=60).text
    found = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == name]
    return float(found[0]) if found else 0.0


def wait_for(holds, *, most_s: float = 20) -> None:
    end_s = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def prompt_of(model: LoadedModel, text: str, *, index: int = 0) -> Prompt:
    tokens_T = list(model.engine.tokenizer(text)["input_ids"])
    return Prompt(index=index, text=text, tokens_T=tokens_T, messages=None, columns={})


def logits_of(model, tokens_T):
    """Return the logits after each of the tokens, of one forward pass without a KV cache."""
    with torch.no_grad():
        return tiny.logits_of(model.engine._decoder, torch.tensor(tokens_T))


class RecordedParser(RequestParser):
    """Has each choice answered with what the tokenizer makes of `answer`."""

    answer = ""

    def _request(self, *args, **kwargs):
        request = super()._request(*args, **kwargs)
        engine = self.model.engine
        tokens_T = list(engine.tokenizer(self.answer, add_special_tokens=False)["input_ids"])
        text = Detokenizer(engine.tokenizer, ()).decode(tokens_T)
        sample = Sample(
            tokens_T=tokens_T, logprobs_T=[0.0] * len(tokens_T), text=text, finish="stop", version=0
        )
        request.pending.recorded = [sample] * request.pending.num_choices
        return request


@contextlib.contextmanager
def recorded(model: LoadedModel, **options):
    """post(answer, body) -> the response to a chat, or the deltas of a stream, with this answer."""
    parser = RecordedParser(model=model, options=ServeOptions(**(LIMITS | options)), name=NAME)
    app = make_app(parser, batcher_of(model), api_key=None)

    def post(answer: str, *, path: str = "/v1/chat/completions", **body):
        with mock.patch.object(RecordedParser, "answer", answer):
            reply = client.post(path, json={"model": NAME, **body})
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            return reply.json()
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    with TestClient(app, base_url="http://localhost") as client:
        post.metrics = lambda: client.get("/metrics").text
        yield post


def add_special_tokens(model: LoadedModel, *texts: str) -> None:
    model.engine.tokenizer.add_special_tokens({"additional_special_tokens": [*texts]})
    assert len(model.engine.tokenizer) <= model.engine.vocab_size
    vars(model).pop("token_bytes", None)
