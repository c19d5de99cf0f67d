"""The file of a judge's workers: the pace of requests, and a cost that is not exceeded."""

import contextlib
import sqlite3
import threading
import time

import pytest

from qerl.config import JudgeConfig, TaskConfig
from qerl.tasks.judges.judge import Judge
from qerl.tasks.judges.ledger import Ledger, cost_of, highest_cost
from qerl.tasks.judges.openai_client import RequestFailed
from qerl.tasks.judges.rubric import JudgeFailed

PRICES = {"price_per_million_input": 1.0, "price_per_million_output": 10.0, "max_tokens": 100}
REQUEST = 10 + 256 + 10 * 100  # of a message of 10 bytes, in millionths


def settings_of(folder, **fields):
    return JudgeConfig(**({"url": "http://judge/v1", "cache": str(folder)} | PRICES | fields))


def spent(folder):
    with contextlib.closing(sqlite3.connect(folder / "judge.sqlite")) as file:
        return file.execute("select requests, cost from spent").fetchone()


@pytest.mark.parametrize("leaps_s", [[86400.0, 0.0], [600.0, 0.0], [0.0, -86400.0], [0.0, 86400.0, -86400.0]])
def test_a_clock_that_leaps_neither_stops_requests_nor_lets_them_run(tmp_path, monkeypatch, leaps_s):
    real, waits_s = time.time, []
    monkeypatch.setattr(time, "sleep", waits_s.append)
    settings = JudgeConfig(url="http://judge/v1", cache=str(tmp_path), requests_per_minute=6.0)
    for leap_s in leaps_s:
        monkeypatch.setattr(time, "time", lambda leap_s=leap_s: real() + leap_s)
        Ledger(settings).begin()
    assert waits_s == pytest.approx([10.0 * i for i in range(len(leaps_s))], abs=2.0)


def test_turns_of_before_the_machine_was_started_are_over(tmp_path, monkeypatch):
    waits_s = []
    monkeypatch.setattr(time, "sleep", waits_s.append)
    settings = JudgeConfig(
        url="http://judge/v1", cache=str(tmp_path), requests_per_minute=6.0, max_requests=2
    )
    for boot in "first", "second":
        monkeypatch.setattr("qerl.tasks.judges.ledger._boot", lambda boot=boot: boot)
        Ledger(settings).begin()
    assert waits_s == [0.0, 0.0]
    with pytest.raises(JudgeFailed, match="max_requests is reached: 2"):
        Ledger(settings).begin()


def test_a_request_may_cost_a_token_a_byte_and_the_whole_reply(tmp_path):
    settings = settings_of(tmp_path)
    assert highest_cost(settings, "0123456789") == pytest.approx(REQUEST / 1e6)
    assert highest_cost(settings, "\U0001f600" * 2 + "\udc80") > highest_cost(settings, "0123456789")
    assert cost_of(settings, {"prompt_tokens": 7, "completion_tokens": 3}) == pytest.approx(37e-6)
    for usage in None, {}, {"prompt_tokens": 7}, {"prompt_tokens": 7, "completion_tokens": -3}:
        assert cost_of(settings, usage) is None


def test_parallel_requests_do_not_exceed_the_cost(tmp_path):
    settings = settings_of(tmp_path, max_cost=3.5 * REQUEST / 1e6)
    ledger, gate, refused = Ledger(settings), threading.Barrier(9), []

    def ask():
        gate.wait()
        try:
            request = ledger.begin(REQUEST / 1e6)
            time.sleep(0.2)  # the others begin while it is open
            ledger.settle(request, 0.9 * REQUEST / 1e6)
        except JudgeFailed as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    assert spent(tmp_path) == (3, pytest.approx(2.7 * REQUEST / 1e6)) and len(refused) == 5
    assert "max_cost is reached: 0.003418 in 3 requests; another one may cost 0.001266" in refused[0]


def test_a_request_waits_for_one_whose_cost_is_open(tmp_path):
    ledger = Ledger(settings_of(tmp_path, max_cost=1.5 * REQUEST / 1e6))
    first = ledger.begin(REQUEST / 1e6)
    timer = threading.Timer(0.3, ledger.settle, (first, 0.1 * REQUEST / 1e6))
    timer.start()
    begin_s = time.monotonic()
    ledger.settle(ledger.begin(REQUEST / 1e6), None)
    assert time.monotonic() - begin_s >= 0.25
    timer.join()
    assert spent(tmp_path) == (2, pytest.approx(1.1 * REQUEST / 1e6))


def test_a_request_of_a_worker_that_was_stopped_counts_in_full(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, max_cost=1.5 * REQUEST / 1e6, timeout_s=1.0, retries=0)
    late, real = Ledger(settings).begin(REQUEST / 1e6), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 5.0)
    with pytest.raises(JudgeFailed, match="max_cost is reached"):
        Ledger(settings).begin(REQUEST / 1e6)
    Ledger(settings).settle(Ledger(settings).begin(0.4 * REQUEST / 1e6), 0.0)
    Ledger(settings).settle(late, 0.0)  # it counts already
    assert spent(tmp_path) == (2, pytest.approx(REQUEST / 1e6))


@pytest.mark.parametrize(("is_free", "cost"), [(True, 0.0), (False, REQUEST / 1e6)])
def test_a_request_without_an_answer_is_free_if_nothing_was_computed(tmp_path, monkeypatch, is_free, cost):
    settings = settings_of(tmp_path, model="m", rubric="{completion}")
    judge = Judge(TaskConfig(rewards=("judge",), judge=settings))
    failed = RequestFailed("HTTP 400" if is_free else "timed out", "", is_free=is_free)

    def fail(*request):
        raise failed

    monkeypatch.setattr(judge._client, "post", fail)
    judge(prompts=["Q"], completions=["0123456789"])
    assert spent(tmp_path) == (1, pytest.approx(cost))


def test_each_try_that_may_be_charged_counts_in_full(tmp_path, monkeypatch):
    """An endpoint that answers too late has computed each answer; an answer in time costs what it says."""
    settings = settings_of(tmp_path, model="m", rubric="{completion}", retries=3)
    judge, answers = Judge(TaskConfig(rewards=("judge",), judge=settings)), [TimeoutError(), TimeoutError()]
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    answers.append({"choices": [{"message": {"content": "Score: 1"}}], "usage": usage})
    trying(judge, answers, monkeypatch)
    judge(prompts=["Q"], completions=["0123456789"])
    assert spent(tmp_path) == (3, pytest.approx((2 * REQUEST + 37) / 1e6))


def test_no_try_is_sent_that_may_exceed_the_cost(tmp_path, monkeypatch):
    limit = 2.5 * REQUEST / 1e6
    settings = settings_of(tmp_path, model="m", rubric="{completion}", retries=3, max_cost=limit)
    judge, answers = Judge(TaskConfig(rewards=("judge",), judge=settings)), [TimeoutError()] * 4
    trying(judge, answers, monkeypatch)
    (failure,) = judge(prompts=["Q"], completions=["0123456789"])
    assert "max_cost is reached" in failure.message and len(answers) == 2
    assert spent(tmp_path) == (2, pytest.approx(2 * REQUEST / 1e6))


def test_a_try_after_one_that_was_free_is_the_same_request(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, model="m", rubric="{completion}", retries=1)
    judge = Judge(TaskConfig(rewards=("judge",), judge=settings))
    trying(judge, [ConnectionRefusedError(), TimeoutError()], monkeypatch)
    judge(prompts=["Q"], completions=["0123456789"])
    assert spent(tmp_path) == (1, pytest.approx(REQUEST / 1e6))


def trying(judge, answers, monkeypatch):
    """Let the judge's endpoint answer these one after the other, without pauses between tries."""

    def answer(path, data):
        one = answers.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(judge._client, "_try", answer)
    monkeypatch.setattr(time, "sleep", lambda s: None)
