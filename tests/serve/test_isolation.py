"""A request that fails, or asks for extremes, changes nothing for the requests beside it."""

import concurrent.futures
import random

import pytest
import torch
from starlette.testclient import TestClient

from qerl.engine.sampling.row_sampler import RowSampler
from qerl.errors import UserError
from qerl.serve.batcher import PendingRequest
from qerl.types import Sampling
from serve import parts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POISON = 90  # the prompt index of the request that fails


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batcher(model):
    batcher = parts.batcher_of(model, max_waiting=64)
    yield batcher
    batcher.close()


def request_of(model, seed, **changes):
    sampling = Sampling(max_tokens=changes.pop("max_tokens", 30), temperature=1.5)
    prompts_P = [parts.prompt_of(model, "one", index=seed)]
    return PendingRequest(prompts_P=prompts_P, num_samples=2, sampling=sampling, **changes)


def answers(batcher, model, poison=None, *, num=3):
    """The tokens of some requests, run beside `poison`, whose error is returned too."""
    jobs = [request_of(model, seed) for seed in range(num)]
    jobs.insert(1, poison or request_of(model, POISON))
    for job in jobs:
        batcher.submit(job)
    batcher.start()
    error = jobs.pop(1).future.exception(timeout=60)
    return [[s.tokens_T for s in job.future.result(timeout=60)] for job in jobs], error


@pytest.fixture(scope="module")
def alone(model):
    batcher = parts.batcher_of(model)
    found, error = answers(batcher, model)
    batcher.close()
    assert error is None
    return found


def has_poison(samples):
    return any(s.group.prompt.index == POISON for s in samples)


def bound_rows(monkeypatch):
    """A list that has the rows of each step."""
    rows, original = [], RowSampler.bind

    def bind(self, samples):
        rows[:] = samples
        original(self, samples)

    monkeypatch.setattr(RowSampler, "bind", bind)
    return rows


def break_logits(model, monkeypatch, value):
    """The logits of the poisonous rows are this, from their third token on."""
    rows, kind = bound_rows(monkeypatch), type(model.engine._model)
    original = kind.logits

    def logits(self, hidden):
        out = original(self, hidden)
        for row, s in enumerate(rows):
            if has_poison([s]) and len(s.tokens_T) >= 2:
                out[row] = value
        return out

    monkeypatch.setattr(kind, "logits", logits)


def break_step(monkeypatch, error, *, after=3):
    """A step fails as a whole if a poisonous row with so many tokens is in it."""
    original, rows = RowSampler.sample, bound_rows(monkeypatch)

    def sample(self, *arguments):
        if has_poison([s for s in rows if len(s.tokens_T) >= after]):
            raise error
        return original(self, *arguments)

    monkeypatch.setattr(RowSampler, "sample", sample)


class FailingConstraint:
    is_complete = False

    def __init__(self, vocab_size, *, accepts):
        self._vocab_size, self._left = vocab_size, accepts

    def accept(self, token):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("not in the grammar")

    def allowed_V(self):
        if self._left < 3:
            raise UserError("the grammar is too complex")
        return torch.ones(self._vocab_size, dtype=torch.bool)


def test_a_grammar_that_fails_in_the_middle_fails_its_request_alone(model, batcher, alone):
    poison = request_of(
        model, POISON, constraint=lambda: FailingConstraint(model.engine.vocab_size, accepts=8)
    )
    poison.constraint = lambda: FailingConstraint(model.engine.vocab_size, accepts=8)
    found, error = answers(batcher, model, poison)
    assert found == alone and isinstance(error, UserError) and "too complex" in str(error)
    parts.wait_for(lambda: batcher.kv_pages[0] == 0)


@pytest.mark.parametrize("num_tokens", [1, 4, 30])
def test_a_callback_or_grammar_that_raises_fails_its_request_alone(model, batcher, alone, num_tokens):
    def fail(choice, token, ended):
        if len(poison.tokens[choice]) == num_tokens:
            raise ValueError("the client's own")

    poison = request_of(model, POISON, on_token=fail)
    found, error = answers(batcher, model, poison)
    assert found == alone and isinstance(error, ValueError)
    parts.wait_for(lambda: batcher.kv_pages[0] == 0)


def test_a_constraint_that_cannot_be_made_fails_its_request_alone(model, batcher, alone):
    def make():
        raise RuntimeError("no grammar")

    found, error = answers(batcher, model, request_of(model, POISON, constraint=make))
    assert found == alone and isinstance(error, RuntimeError)


@pytest.mark.parametrize("error", [RuntimeError("row"), AssertionError(), UserError("row"), MemoryError()])
@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_fails_for_one_row_fails_its_request_alone(
    model, batcher, alone, monkeypatch, error, after, caplog
):
    """The whole step raises: its requests are tried one after the other, and go on from their tokens."""
    break_step(monkeypatch, error, after=after)
    found, raised = answers(batcher, model)
    assert found == alone and raised is error
    assert "tried one by one" in caplog.text or isinstance(error, UserError) or after == 0
    late = request_of(model, 0)
    batcher.submit(late)
    assert [s.tokens_T for s in late.future.result(timeout=60)] == alone[0]


def test_a_stream_goes_on_after_a_failed_step_without_a_token_twice(model, batcher, alone, monkeypatch):
    break_step(monkeypatch, RuntimeError("row"))
    heard = []
    beside = request_of(model, 0, on_token=lambda choice, token, ended: heard.append((choice, token.token)))
    for job in (beside, poison := request_of(model, POISON)):
        batcher.submit(job)
    batcher.start()
    assert isinstance(poison.future.exception(timeout=60), RuntimeError)
    beside.future.result(timeout=60)
    assert [[token for choice, token in heard if choice == c] for c in (0, 1)] == alone[0]


def test_steps_that_fail_for_no_request_alone_end_them_after_some_tries(model, batcher, monkeypatch):
    """As where memory is too small for all of them together: the server does not try for ever."""
    original, rows, num_batches = RowSampler.sample, bound_rows(monkeypatch), []

    def sample(self, *arguments):
        if len(rows) > 2 and all(len(s.tokens_T) >= 4 for s in rows):
            num_batches.append(1)
            raise RuntimeError("too many")
        return original(self, *arguments)

    monkeypatch.setattr(RowSampler, "sample", sample)
    jobs = [request_of(model, seed) for seed in range(3)]
    for job in jobs:
        batcher.submit(job)
    batcher.start()
    for job in jobs:
        job.future.exception(timeout=60)
    assert len(num_batches) < 20
    late = request_of(model, 5)
    batcher.submit(late)
    assert late.future.result(timeout=60)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_their_row_alone(model, batcher, alone, monkeypatch, value):
    break_logits(model, monkeypatch, value)
    found, error = answers(batcher, model)
    assert found == alone and isinstance(error, UserError) and "not finite" in str(error)


NAMES = {
    "top_k": [-2, -1, 0, 1, 2, 259, 260, 261, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 63, 0.5],
    "top_p": [0, 5e-324, 1e-6, 1e-5, 0.5, 0.9999999999999999, 1, 1.0000001, -1],
    "min_p": [0, 5e-324, 1e-300, 1e-40, 0.5, 0.9999999999999999, 1, 1.1, -0.0],
    "temperature": [0, -0.0, 5e-324, 1e-308, 1e-46, 1e-40, 1e-30, 1e-20, 1e-6, 0.01, 1.9999999, 2, 2.1],
    "seed": [-(1 << 63), -1, 0, (1 << 64) - 1, 1 << 64, None],
    "presence_penalty": [0, -0.0, 2, -2, 1e-300],
    "frequency_penalty": [0, 0.0, 2, 1e308],
    "repetition_penalty": [1, 1.0, 0, -1],
    "logit_bias": [{}, {"5": 0}, {"5": -0.0, "7": 0}, {"5": 100}, {"99999999": 0}, {"x": 0}, {"5": None}],
    "max_tokens": [0, 1, 2, 900, 901, 1 << 62, None],
    "n": [1, 2, 4, 5, 1 << 40],
    "stop": [[], "a", "\u0000", ["\ufffd"], ["é" * 100], [chr(c) for c in range(97, 113)], ["<|im_end|>"]],
    "logprobs": [None, True, False, 0, 20, 21],
    "top_logprobs": [0, 1, 20, 21],
    "echo": [True, False],
}
HEALTHY = [
    {"prompt": "hello", "max_tokens": 30, "seed": 1, "temperature": 1.2, "logprobs": 2},
    {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 2, "top_p": 0.9, "n": 2},
    {"prompt": "a", "max_tokens": 25, "seed": 3, "temperature": 0},
]


def extreme(draw):
    """A request with a few extremes."""
    route = draw.choice([CHAT, COMPLETIONS])
    prompt = {"prompt": "x"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    names = [name for name in NAMES if route == COMPLETIONS or name != "echo"]
    fields = {name: draw.choice(NAMES[name]) for name in draw.sample(names, draw.randint(1, 4))}
    return route, {"model": "tiny", "max_tokens": 6} | prompt | fields


def test_requests_with_extremes_leave_those_beside_them_as_they_are_alone(model):
    app, _ = parts.app_of(model, max_waiting=64)
    draw = random.Random(52)
    each = [({name: value}) for name, values in NAMES.items() for value in values]
    hostile = [(COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 6} | fields) for fields in each]
    hostile += [extreme(draw) for _ in range(120)]
    with (
        TestClient(app, base_url="http://localhost") as client,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):

        def healthy(fields):
            choices = client.post(COMPLETIONS, json={"model": "tiny"} | fields).json()["choices"]
            for each in filter(None, [choice["logprobs"] for choice in choices]):
                del each["top_logprobs"], each["token_logprobs"]  # rounded otherwise in another batch
            return choices

        expected = list(map(healthy, HEALTHY))
        for start in range(0, len(hostile), 12):
            found = [pool.submit(healthy, fields) for fields in HEALTHY]
            posted = [pool.submit(client.post, *a, json=b) for *a, b in hostile[start : start + 12]]
            for (_, body), reply in zip(hostile[start:], posted, strict=False):
                assert reply.result().status_code in (200, 400), (body, reply.result().text)
            assert [each.result() for each in found] == expected, hostile[start : start + 12]
        found = {
            name: client.post(
                COMPLETIONS, json={"model": "tiny", "prompt": "x", "max_tokens": 6, "seed": 4} | body
            ).json()
            for name, body in {
                "plain": {},
                "top_k": {"top_k": (1 << 31) - 1},
                "greedy": {"temperature": 0},
                "cold": {"temperature": 1e-40},
                "colder": {"temperature": 5e-324},
                "bias": {"logit_bias": {"5": 0}},
            }.items()
        }
        text = {name: reply["choices"][0]["text"] for name, reply in found.items()}
    assert text["plain"] == text["top_k"] == text["bias"] and text["greedy"] == text["cold"] == text["colder"]
