"""/metrics: Prometheus' format, what is counted, and that the page lists it."""

import logging
import re
from pathlib import Path

import httpx
import pytest

from qerl.serve.log_limit import OncePerPeriod
from qerl.serve.metrics import LabeledCounter, TimeHistogram
from serve import parts

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
PLAIN = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 3}
SAMPLE = re.compile(r'(qerl_[a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? ([0-9.e+-]+|\+Inf)')


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """/metrics after two whole answers, a stream, a mistake and an unknown path."""
    app, _ = parts.app_of(parts.load_tiny(tmp_path_factory.mktemp("model")))
    with parts.serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        for _ in range(2):
            assert client.post("/completions", json=PLAIN).status_code == 200
        assert client.post("/completions", json=PLAIN | {"stream": True}).text.endswith("[DONE]\n\n")
        assert client.post("/completions", json=PLAIN | {"n": 0}).status_code == 400
        assert client.get("/nothing").status_code == 404
        parts.wait_for(lambda: parts.metric(address, "qerl_kv_pages_used") == 0)
        yield client.get(address.removesuffix("/v1") + "/metrics").text


def values(text):
    return {name + (labels or ""): float(value) for name, labels, value in SAMPLE.findall(text)}


def test_it_is_prometheus_text(text):
    """Each family has its help and its type, and then only its own samples."""
    families = re.split(r"^# HELP ", text, flags=re.MULTILINE)[1:]
    assert len(families) > 10
    for family in families:
        head, kind, *samples = family.splitlines()
        name, _, said = head.partition(" ")
        assert said.endswith(".") and kind.split()[:3] == ["#", "TYPE", name]
        assert (kind.split()[3] == "counter") == name.endswith("_total")
        for sample in samples:
            found = SAMPLE.fullmatch(sample)
            assert found and re.fullmatch(rf"{name}(_bucket|_sum|_count)?", found[1]), sample


def test_it_counts_what_was_answered(text):
    found = values(text)
    assert found['qerl_http_responses_total{path="/v1/completions",status="200"}'] == 3
    assert found['qerl_http_responses_total{path="/v1/completions",status="400"}'] == 1
    assert found['qerl_http_responses_total{path="other",status="404"}'] == 1
    assert found["qerl_prompt_tokens_total"] == 3 * 5
    assert found["qerl_generated_tokens_total"] >= 3 * 8
    assert (
        found["qerl_requests_running"] == found["qerl_requests_waiting"] == found["qerl_kv_pages_used"] == 0
    )
    assert found["qerl_kv_pages"] > 0 and found["qerl_engine_up"] == found["qerl_http_connections"] == 1
    assert (
        found["qerl_time_to_first_token_seconds_count"] == found["qerl_request_duration_seconds_count"] == 3
    )
    assert 0 < found["qerl_time_to_first_token_seconds_sum"] < found["qerl_request_duration_seconds_sum"]


def test_the_page_lists_every_name(text):
    names = set(re.findall(r"^# HELP (\w+)", text, flags=re.MULTILINE))
    rows = re.findall(r"^\| (`qerl_.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert names == {name for row in rows for name in re.findall(r"qerl_\w+", row)}


def test_a_histogram_counts_what_lies_at_or_below_each_bound():
    histogram = TimeHistogram("t_seconds", "Times.", (0.5, 1))
    for value_s in (0.1, 0.5, 0.6, 7.0):
        histogram.observe(value_s)
    assert list(histogram.lines())[2:] == [
        *('t_seconds_bucket{le="0.5"} 2', 't_seconds_bucket{le="1"} 3', 't_seconds_bucket{le="+Inf"} 4'),
        *("t_seconds_sum 8.2", "t_seconds_count 4"),
    ]


def test_a_counter_without_labels_begins_at_zero():
    counter = LabeledCounter("n_total", "Things.")
    assert list(counter.lines())[2:] == ["n_total 0"]
    counter.add()
    assert list(counter.lines())[2:] == ["n_total 1"]


def test_a_line_of_the_log_is_not_repeated_within_a_period(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("qerl.serve.log_limit.time.monotonic", lambda: now_s[0])
    limit, passed = OncePerPeriod(10), []
    for now_s[0], template in (
        (0, "a %d"),
        (1, "a %d"),
        (2, "b %d"),
        (9.9, "a %d"),
        (10, "a %d"),
        (11, "a %d"),
    ):
        record = logging.makeLogRecord({"msg": template, "args": (7,)})
        if limit.filter(record):
            passed.append(record.getMessage())
    assert passed == ["a 7", "b 7", "a 7 (2 more like it were left out)"]
