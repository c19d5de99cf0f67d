"""No body, however wrong, is a failure of the server: 200, or an error of 400 to 499."""

import itertools
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from qerl.serve.fields import ChatBody, CompletionBody
from qerl.serve.responses import ResponsesBody
from serve import parts

MESSAGES = [{"role": "user", "content": "hello"}]
ROUTES = {
    "/v1/chat/completions": (ChatBody, {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}),
    "/v1/completions": (CompletionBody, {"model": "tiny", "prompt": "hello", "max_tokens": 1}),
    "/v1/responses": (ResponsesBody, {"model": "tiny", "input": "hello", "max_output_tokens": 1}),
}
FIELDS = [(route, name) for route, (body, _) in ROUTES.items() for name in (*body.model_fields, "unknown")]
RAW = [
    *("null", "true", "0", "-1", "1", "2", "0.5", "-0.0", "1e400", "-1e400", "NaN", "-Infinity", "1e308"),
    *("1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1." + "1" * 400, str(1 << 63), str(1 << 64)),
    *('""', '"x"', '"auto"', '"\\ud800"', '{"\\udfff": 1}', '["\\ud800"]', '"\\u0000"', '"é😀"'),
    *(
        "[]",
        "[[]]",
        "{}",
        "[null]",
        "[1, null]",
        "[1e400]",
        '["", 1]',
        '[{"type": "text"}]',
        '[{"role": "user"}]',
    ),
    *("[" * 99 + "]" * 99, '{"a":' * 99 + "1" + "}" * 99, '{"type": "function", "function": {"name": "x"}}'),
    *(
        '{"type": "json_schema", "json_schema": {"schema": {}}}',
        '{"type": "json_object"}',
        '{"a": 1, "a": 2}',
    ),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A failure inside the server is raised by this client, not only answered by 500."""
    model = parts.load_tiny(tmp_path_factory.mktemp("model"), template=parts.TOOLS_TEMPLATE)
    app, _ = parts.app_of(model, max_body_bytes=20_000, max_tokens=2)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def posted(client, route, content):
    reply = client.post(route, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
    assert reply.status_code == 200 or reply.json()["error"]["message"]
    return reply


def kind_of(body, name):
    """The field's type; a field that the body does not have has none."""
    return body.model_fields[name].annotation if name in body.model_fields else None


@pytest.mark.parametrize(("route", "name"), FIELDS)
def test_no_value_of_a_field_is_a_failure(client, route, name):
    """Routes that read a field in the same way share the values among them."""
    body, fine = ROUTES[route]
    alike = [other for other, (each, _) in ROUTES.items() if kind_of(each, name) == kind_of(body, name)]
    for raw in RAW[alike.index(route) :: len(alike)]:
        others = json.dumps({key: value for key, value in fine.items() if key != name})
        posted(client, route, f'{others[:-1]}, "{name}": {raw}}}'.encode())


HUGE = [10**400, -(10**400), 10**5000]


@pytest.mark.parametrize(("route", "name"), FIELDS)
def test_a_huge_number_is_the_clients_mistake(client, route, name):
    """In every field that is not ignored; free JSON such as a template's variables may have them inside."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        bodies = [json.dumps(ROUTES[route][1] | {name: value}).encode() for value in HUGE]
    finally:
        sys.set_int_max_str_digits(limit)
    assert {posted(client, route, body).status_code for body in bodies} <= {400, 404}


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(HUGE[:2]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
surrogates = st.text(st.characters(codec=None), max_size=10)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_combination_of_fields_is_a_failure(client, data):
    route = data.draw(st.sampled_from(sorted(ROUTES)))
    body, fine = ROUTES[route]
    names = st.sampled_from(sorted(body.model_fields)) | surrogates
    changes = data.draw(st.dictionaries(names, values | surrogates, max_size=5))
    posted(client, route, json.dumps(fine | changes).encode())


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_are_a_failure(client, noise, place):
    """Noise written over a correct body."""
    for route, (_, fine) in itertools.islice(ROUTES.items(), 2):
        content = json.dumps(fine).encode()
        posted(client, route, content[:place] + noise + content[place + len(noise) :])
