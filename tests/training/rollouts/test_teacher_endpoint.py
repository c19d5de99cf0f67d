"""A teacher behind an endpoint says what it would say here; when it fails, only samples are lost."""

import contextlib
import http.server
import itertools
import json
import math
import threading
import time

import pytest
import torch

import tiny_run
from qerl.cli.main import command
from qerl.config import DistilConfig, ModelConfig, NoiseConfig, RunConfig
from qerl.errors import RunError, UserError
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.serve.loaded_model import load_model
from qerl.training.policy import load_sampler
from qerl.training.rollouts.teacher import load_teacher
from qerl.training.rollouts.teacher_endpoint import KEY_VARIABLE, EndpointTeacher
from qerl.types import Group, Prompt, Sample
from serve.parts import app_of, serving
from training.test_session import metrics

TOP = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def run_of(files, teacher, **distil):
    return RunConfig(
        model=ModelConfig(path=str(files), dtype="fp32", device="cpu", operand="resident"),
        noise=NoiseConfig(schedule="none"),
        distil=DistilConfig(teacher=str(teacher), retries=0, timeout_s=2.0, **distil),
    )


def groups_of(tokenizer, *texts):
    found = []
    for index, (prompt, *answers) in enumerate(texts):
        ids = [list(tokenizer(text)["input_ids"]) for text in (prompt, *answers)]
        samples = [
            Sample(tokens_T=t, logprobs_T=[-1.0] * len(t), text="", finish="stop", version=0, sample_index=g)
            for g, t in enumerate(ids[1:])
        ]
        prompt = Prompt(index=index, text=prompt, tokens_T=ids[0], messages=None, columns={})
        found.append(Group(prompt=prompt, samples_G=samples))
    return found


@pytest.mark.parametrize("loss", ["policy_gradient", "jsd"])
def test_our_server_says_what_the_model_says_here(files, loss):
    tokenizer = load_tokenizer(str(files))
    groups = groups_of(tokenizer, ("1 + 2 =", "3", "abc"), ("hello", "you there"))
    model = load_model(
        str(files), None, ModelConfig(path=str(files), dtype="fp32", device="cpu"), with_adapter=True
    )
    app, _ = app_of(model, max_body_bytes=20_000)
    with serving(app, max_body_bytes=20_000) as address:
        away = EndpointTeacher(run_of(files, address, loss=loss, top_k=TOP).distil, tokenizer, vocab_size=272)
        asked = away.score(groups)
    config = run_of(files, files, loss=loss, top_k=TOP)
    student, _ = load_sampler(config, tokenizer)
    here = load_teacher(config, student, tokenizer, print).score(groups)
    for a, b in zip(itertools.chain(*asked), itertools.chain(*here), strict=True):
        torch.testing.assert_close(a.logprob_C, b.logprob_C, rtol=1e-3, atol=1e-3)
        if loss == "jsd":
            assert a.ids_CK.equal(b.ids_CK)
            torch.testing.assert_close(a.outcomes_CX, b.outcomes_CX, rtol=1e-3, atol=1e-3)


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers as a model would that has a logprob of -1 everywhere; `bad` says how it fails, and on what."""

    bad, only, keys = "", None, []

    def log_message(self, *given):
        pass

    def do_GET(self):
        self.answer({"data": [{"id": "model"}]})

    def do_POST(self):
        self.keys.append(self.headers.get("Authorization"))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else list(self.tokenizer(prompt)["input_ids"])
        if body["max_tokens"]:
            return self.answer({"choices": [{"text": "4"}]})
        is_bad = self.bad and isinstance(prompt, list) and (self.only is None or self.only in prompt)
        own, bad = [None, *[-1.0] * (len(ids) - 1)], self.bad if is_bad else ""
        if bad == "hangs":
            time.sleep(5)
        if bad == "dies":
            return self.connection.close()
        if bad == "HTTP 500":
            return self.answer({"error": {"message": "boom"}}, 500)
        if bad == "not JSON":
            return self.answer(None)
        own = {"nan": [*own[:-1], math.nan], "null": [*own[:-1], None], "too few": own[:-1]}.get(bad, own)
        top = [None, *[{f"token_id:{t}": -1.5 for t in range(TOP)} for _ in ids[1:]]]
        if bad == "text":
            top = [None, *[{"abc"[t]: -1.5 for t in range(TOP)} for _ in ids[1:]]]
        if bad == "too likely":
            top = [None, *[{f"token_id:{t}": -0.1 for t in range(TOP)} for _ in ids[1:]]]
        if bad == "few top":
            top = [None, *[{"token_id:1": -0.1} for _ in ids[1:]]]
        self.answer({"choices": [{"text": "", "logprobs": {"token_logprobs": own, "top_logprobs": top}}]})

    def answer(self, value, status=200):
        data = b"<html>" if value is None else json.dumps(value).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def endpoint(files, bad="", only=None):
    tokenizer = load_tokenizer(str(files))
    fields = {"bad": bad, "only": only, "keys": [], "tokenizer": staticmethod(tokenizer)}
    kind = type("OneEndpoint", (Endpoint,), fields)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", kind, tokenizer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("bad", "loss", "cause"),
    [
        ("dies", "policy_gradient", "not reachable"),
        ("hangs", "policy_gradient", "timed out"),
        ("HTTP 500", "policy_gradient", "HTTP 500"),
        ("not JSON", "policy_gradient", "not JSON"),
        ("nan", "policy_gradient", "not a number"),
        ("null", "policy_gradient", "not a number"),
        ("too few", "policy_gradient", "too few logprobs"),
        ("few top", "jsd", "too few logprobs"),
        ("text", "jsd", "no token ids"),
        ("too likely", "jsd", "not logprobs"),
    ],
)
def test_a_bad_answer_costs_its_sample_alone(files, bad, loss, cause):
    with endpoint(files, bad, only=load_tokenizer(str(files))("z")["input_ids"][0]) as (url, _, tokenizer):
        config = run_of(files, url, loss=loss, top_k=TOP)
        config = RunConfig(
            model=config.model,
            noise=config.noise,
            distil=DistilConfig(teacher=url, retries=0, timeout_s=0.5, loss=loss, top_k=TOP),
        )
        teacher = EndpointTeacher(config.distil, tokenizer, vocab_size=272)
        found = list(itertools.chain(*teacher.score(groups_of(tokenizer, ("a", "b", "z", "c")))))
    assert [getattr(each, "cause", None) for each in found] == [None, cause, None]
    assert found[0].logprob_C.tolist() == [-1.0]


def options(files, out, url, *more):
    given = tiny_run.options(files, out)
    place = given.index("--noise.num-stages")
    distil = ["--distil.retries", "0", "--distil.timeout-s", "1", "--teacher", url]
    return ["distil", "demo_long", *given[:place], *given[place + 2 :], *distil, "--num-steps", "2", *more]


def test_a_run_counts_what_it_lost_and_goes_on(files, tmp_path):
    token = load_tokenizer(str(files))("3")["input_ids"][0]  # some of the sums have it
    with endpoint(files, "nan", only=token) as (url, _, _):
        command(options(files, tmp_path / "run", url, "--distil.timeout-s", "60"))
    steps = metrics(tmp_path / "run")
    lost = sum(step["num_failed_teacher"] for step in steps)
    assert 0 < lost < 32 and sum(step["trained_samples"] for step in steps) == 32 - lost
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    notices = [json.loads(line)["text"] for line in lines]
    assert any("no teacher's logprobs" in text and "not a number" in text for text in notices), notices
    assert json.loads((tmp_path / "run" / "evaluations.json").read_text())["teacher"]["reward"] is not None


def test_a_teacher_that_dies_ends_the_run_in_one_line_and_it_resumes(files, tmp_path):
    with endpoint(files, "dies") as (url, _, _), pytest.raises(RunError, match="no sample of the step has"):
        command(options(files, tmp_path / "run", url))
    with pytest.raises(UserError, match="not reachable"):
        command(options(files, tmp_path / "other", url))


def test_the_key_comes_from_the_environment_and_stays_out_of_the_run(files, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "very-private-word")
    with endpoint(files) as (url, kind, _):
        command(options(files, tmp_path / "run", url))
    assert set(kind.keys) == {"Bearer very-private-word"}
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written and not any(b"very-private-word" in path.read_bytes() for path in written)


def test_an_endpoint_with_other_tokens_is_refused(files):
    other = staticmethod(lambda text: {"input_ids": [1, 2, 3]})
    with endpoint(files) as (url, kind, tokenizer), pytest.raises(UserError, match="into other tokens"):
        kind.tokenizer = other
        EndpointTeacher(run_of(files, url).distil, tokenizer, vocab_size=272)
