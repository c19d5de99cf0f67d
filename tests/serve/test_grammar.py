"""Schemas that take much time or memory, never end, or lose their process, cost their own request alone."""

import concurrent.futures
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from processes import has_ended
from qerl.serve import grammar
from qerl.serve.schema_loops import find_loop
from serve import parts
from serve.test_app import events

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "seed": 3}
LIMITS = {"max_body_bytes": 200_000, "max_waiting": 200}
PRIME = {"type": "integer", "multipleOf": 999979}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(model):
    app, batcher = parts.app_of(model, **LIMITS)
    with TestClient(app, base_url="http://localhost") as client:
        client.batcher = batcher
        yield client


def asked(schema, **changes):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return HELLO | {"response_format": format} | changes


def nested(levels, wrap, inner):
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def text(pattern):
    return {"type": "string", "pattern": pattern}


HOSTILE = {
    "a large multiple": PRIME,
    "large multiples together": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]},
    "nested repeats": text("^(((a{1,100}b?){1,100}c?){1,100}d?){1,100}$"),
    "states without end": text("^(.*a.{20}|.*b.{30}|.*c.{40})$"),
    "conjunctions": {"allOf": [text(f"^([a-z]{{{n}}})*$") for n in (3, 5, 7, 11, 13, 17)]},
    "a huge enum": {"enum": [f"{i * 2654435761 % 2**32:x}" * 2 for i in range(3000)]},
    "long texts": {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**6},
    "many optional properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(2000)},
        "additionalProperties": False,
    },
    "deep nesting": nested(40, lambda each: {"type": "array", "items": each}, {"type": "integer"}),
    "a long number": {"type": "number", "minimum": 1.23456789e-300, "maximum": 9.87654321e300},
    "a tree of references": {
        "$defs": {
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} if i < 30 else {"type": "integer"}
            for i in range(31)
        },
        "$ref": "#/$defs/d0",
    },
    "nested choices": nested(11, lambda each: {"anyOf": [each, each]}, text("^.*a.{12}$")),
}


def memory_mb(pid: int | str = "self", column: int = 1):
    """Memory in use; column 0: addresses."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[column]) * os.sysconf("SC_PAGESIZE") / 1e6


def test_hostile_schemas_neither_stop_nor_change_the_requests_beside_them(client):
    """Those that are refused say why; the others are answered."""
    plain = HELLO | {"temperature": 0, "max_tokens": 60}
    expected, is_over, slowest_s = client.post(CHAT, json=plain).json()["choices"], threading.Event(), [0.0]
    before_mb = memory_mb()

    def healthy():
        while not is_over.is_set():
            begin_s = time.monotonic()
            assert client.post(CHAT, json=plain).json()["choices"] == expected
            assert client.get("/health").status_code == 200
            slowest_s.append(time.monotonic() - begin_s)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        beside = pool.submit(healthy)
        posted = {name: pool.submit(client.post, CHAT, json=asked(each)) for name, each in HOSTILE.items()}
        concurrent.futures.wait(posted.values(), timeout=120)
        is_over.set()
        beside.result(timeout=60)
    replies = {name: each.result() for name, each in posted.items()}
    for name, reply in replies.items():
        assert reply.status_code in (200, 400), (name, reply.text)
        assert reply.status_code == 200 or "JSON schema" in reply.json()["error"]["message"], (
            name,
            reply.text,
        )
    refused = {name for name, reply in replies.items() if reply.status_code == 400}
    assert {"a large multiple", "many optional properties"} <= refused
    assert "2 s of processor time" in replies["a large multiple"].json()["error"]["message"]
    assert len(slowest_s) > 3 and memory_mb() - before_mb < 150


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"allOf": [{"type": "object"}, {"$ref": "#"}]},
        {"definitions": {"a/b": {"allOf": [{"$ref": "#/definitions/a~1b"}]}}, "$ref": "#/definitions/a~1b"},
    ],
)
def test_a_reference_that_never_ends_is_refused(client, schema):
    reply = client.post(CHAT, json=asked(schema))
    assert reply.status_code == 400 and "$ref" in reply.json()["error"]["message"]
    function = {"name": "call", "parameters": schema}
    ask = HELLO | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert client.post(CHAT, json=ask).status_code == 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"],
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "integer"}}, "$ref": "#/$defs/a"},
        {"$defs": {"loop": {"$ref": "#/$defs/loop"}}, "type": "integer"},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    ],
)
def test_a_reference_that_ends_is_taken(client, schema):
    assert find_loop(schema) is None
    assert client.post(CHAT, json=asked(schema)).status_code == 200


def test_loops_are_found_in_a_schema_of_any_size():
    num = 3000
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    begin_s = time.monotonic()
    assert find_loop({"$defs": chain | {f"d{num}": {"type": "null"}}, "$ref": "#/$defs/d0"}) is None
    assert find_loop({"$defs": chain | {f"d{num}": {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"}) is not None
    assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize("schema", [False, {"enum": []}, {"type": "string", "minLength": 3, "maxLength": 2}])
def test_a_schema_without_any_text_is_refused(client, schema):
    reply = client.post(CHAT, json=asked({"type": "object", "properties": {"a": schema}, "required": ["a"]}))
    assert reply.status_code == 400 and "JSON schema" in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_masks_that_take_too_long_fail_their_request_alone(client, monkeypatch, is_stream):
    plain = HELLO | {"temperature": 0, "max_tokens": 60}
    expected = client.post(CHAT, json=plain).json()["choices"]
    monkeypatch.setattr(grammar, "MASKS_CPU_S", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_CPU_S", 1e-7)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        beside = pool.submit(client.post, CHAT, json=plain)
        reply = client.post(CHAT, json=asked(text("^(.*a.{20}|.*b.{30})$"), max_tokens=800, stream=is_stream))
        assert beside.result().json()["choices"] == expected
    assert reply.status_code == (200 if is_stream else 400)
    assert "the JSON schema takes more than" in reply.text and "[DONE]" not in reply.text
    parts.wait_for(lambda: client.batcher.kv_pages[0] == 0)


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # each thread has those that it made
    return [int(n) for task in tasks for n in task.read_text().split()]


def workers():
    """(the parents of grammars' processes, these processes)."""
    found = [
        pid for pid in children(os.getpid()) if b"grammar_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found, [pid for parent in found for pid in children(parent)]


def test_a_grammars_process_ends_with_its_request(client):
    ok = asked({"enum": ["aa", "bb"]})
    for change in ({}, {"stream": True}, {"n": 4}):
        assert client.post(CHAT, json=ok | change).status_code == 200
        assert workers()[0]
    assert client.post(CHAT, json=asked({"type": "objec"})).status_code == 400
    parts.wait_for(lambda: not workers()[1])


def test_a_grammars_process_takes_no_addresses_for_threads(model, monkeypatch):
    """Its limit is of addresses: each thread with an arena of malloc would take 72 MiB of 256."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "128")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1024")
    parts.wait_for(lambda: not workers()[1])  # of the tests before
    one = grammar.Grammars(model).of(HOSTILE["nested repeats"])
    try:
        one.compile()
        choices = [one.choice() for _ in range(8)]
        assert all(choice.allowed_V().any() for choice in choices)
        (child,) = workers()[1]
        (parent,) = [pid for pid in workers()[0] if child in children(pid)]
        assert memory_mb(child, 0) - memory_mb(parent, 0) < 32
    finally:
        one.close()


def test_a_request_whose_grammars_process_dies_fails_alone_and_the_next_one_gets_another(client):
    long = asked({"type": "string", "minLength": 700}, max_tokens=800, temperature=1.5, n=4)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lost = pool.submit(client.post, CHAT, json=long)
        parts.wait_for(lambda: client.batcher.num_running == 1 and workers()[1])
        for pid in workers()[1]:
            os.kill(pid, signal.SIGKILL)
        assert lost.result().status_code == 400
        parents, _ = workers()
        for parent in parents:
            os.kill(parent, signal.SIGKILL)
        assert all(has_ended(pid, within_s=20) for pid in parents)  # their sockets are closed then
    assert (
        client.post(CHAT, json=asked({"enum": ["aa"]})).json()["choices"][0]["message"]["content"] == '"aa"'
    )


def test_more_grammars_than_may_be_at_once_are_refused_as_busy(client, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 0)
    reply = client.post(CHAT, json=asked({"enum": ["aa"]}))
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "busy"
    monkeypatch.undo()
    assert client.post(CHAT, json=asked({"enum": ["aa"]})).status_code == 200


def test_a_stream_of_a_refused_schema_is_an_error_before_it_begins(client):
    reply = client.post(CHAT, json=asked(PRIME, stream=True))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "response_format"
    assert events(client.post(CHAT, json=HELLO | {"stream": True}))
