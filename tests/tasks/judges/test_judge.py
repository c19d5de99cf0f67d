"""The reward `judge`: a score from a model's reply; a bad reply costs its sample alone; limits; no key."""

import contextlib
import dataclasses
import http.server
import json
import sqlite3
import threading
import time

import pytest

import tiny_run
from qerl.cli.main import command
from qerl.config import JudgeConfig, TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.tasks.judges.judge import KEY_VARIABLE
from qerl.types import Group, Prompt, Sample

REPLIES = {
    "good": "It is right.\nScore: 8",
    "bold": "Score: 3, no, wait.\n**Score:** 4.5",
    "none": "I cannot say.",
    "high": "Score: 11",
    "draw": "Score: 5 and Score: 5",
}


class JudgeHandler(http.server.BaseHTTPRequestHandler):
    """Answers by a word in the last line of what is asked; counts requests, and those at once."""

    asked, keys, delay_s, status = [], [], 0.0, {}
    num_open, max_open, lock = 0, 0, threading.Lock()

    def log_message(self, *given):
        pass

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "judge"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.asked.append((time.monotonic(), text))
        self.keys.append(self.headers.get("Authorization"))
        word = text.split()[-1]
        if word == "slow":
            time.sleep(3)
        if word == "draw":
            self.count_open(1)
            time.sleep(0.8)
            self.count_open(-1)
        if word == "html":
            return self.answer("<html>")
        if self.status.get(word):
            return self.answer('{"error": {"message": "later"}}', self.status[word].pop())
        message = {"choices": [{"message": {"content": REPLIES.get(word, "Score: 10")}}]}
        self.answer(json.dumps(message | {"usage": {"prompt_tokens": 1000, "completion_tokens": 10}}))

    def count_open(self, change):
        kind = type(self)
        with self.lock:
            kind.num_open += change
            kind.max_open = max(kind.max_open, kind.num_open)

    def answer(self, text, status=200):
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())


@pytest.fixture
def endpoint():
    kind = type("OneJudge", (JudgeHandler,), {"asked": [], "keys": [], "status": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kind.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield kind
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def task(endpoint, tmp_path, **settings):
    given = {"rubric": "{prompt} {answer} {completion}", "retries": 0, "cache": str(tmp_path / "cache")}
    judge = JudgeConfig(url=endpoint if isinstance(endpoint, str) else endpoint.url, **(given | settings))
    return TaskConfig(rewards=("judge",), judge=judge, reward_workers=2, reward_timeout_s=2.0)


def groups_of(*texts):
    prompt = Prompt(index=0, text="Q", tokens_T=[1], messages=None, columns={"answer": "A"})
    samples = [Sample(tokens_T=[1], logprobs_T=[-1.0], text=text, finish="stop", version=0) for text in texts]
    return [Group(prompt=prompt, samples_G=samples)]


def test_the_last_score_in_the_reply_becomes_a_reward(endpoint, tmp_path):
    with RewardPool(task(endpoint, tmp_path)) as pool:
        assert pool.score(groups_of("good", "bold", "{prompt} good")) == [[0.8, 0.45, 0.8]]
        assert pool.success_threshold(None) is None  # no score makes a sample correct
    assert sorted(text for _, text in endpoint.asked) == ["Q A bold", "Q A good", "Q A {prompt} good"]


def test_each_bad_reply_costs_its_sample_alone(endpoint, tmp_path):
    with RewardPool(task(endpoint, tmp_path, timeout_s=1.0)) as pool:
        rewards = pool.score(groups_of("good", "none", "html", "high", "slow", "bold"))
        failures = pool.take_failures()
    assert rewards == [[0.8, None, None, None, None, 0.45]]
    assert sum(count for count, _ in failures.values()) == 4


@pytest.mark.parametrize(
    ("word", "told"),
    [("none", "no score"), ("html", "not JSON"), ("high", "not in 0 to 10"), ("slow", "no answer within")],
)
def test_a_failure_says_what_it_was(endpoint, tmp_path, word, told):
    with RewardPool(task(endpoint, tmp_path, timeout_s=0.5)) as pool, pytest.raises(UserError, match=told):
        pool.score(groups_of(word))


def test_a_judge_that_is_down_is_an_error_in_one_line(tmp_path):
    down = task("http://127.0.0.1:9/v1", tmp_path)
    line = r"raised JudgeFailed: judge: not reachable: http://127.0.0.1:9/v1"
    with RewardPool(down) as pool, pytest.raises(UserError, match=line):
        pool.score(groups_of("good", "bold"))


def test_what_was_rated_is_not_asked_again_and_what_failed_is(endpoint, tmp_path):
    for _ in range(2):
        with RewardPool(task(endpoint, tmp_path)) as pool:
            assert pool.score(groups_of("good", "none")) == [[0.8, None]]
    assert sorted(text for _, text in endpoint.asked) == ["Q A good", "Q A none", "Q A none"]


def test_a_busy_judge_is_asked_again(endpoint, tmp_path):
    endpoint.status["good"] = [503, 429]
    config = dataclasses.replace(task(endpoint, tmp_path, retries=2), reward_timeout_s=30.0)
    with RewardPool(config) as pool:
        assert pool.score(groups_of("good")) == [[0.8]]
    assert len(endpoint.asked) == 3


def test_the_rate_holds_for_all_workers_together(endpoint, tmp_path):
    with RewardPool(task(endpoint, tmp_path, requests_per_minute=300.0)) as pool:
        pool.score(groups_of("a", "b", "c", "d"))
    times = sorted(at for at, _ in endpoint.asked)
    assert times[-1] - times[0] >= 0.45  # three pauses of 0.2 s, less the start of the first


def test_the_number_and_the_cost_of_requests_are_limited_over_runs(endpoint, tmp_path):
    for _ in range(2):
        with (
            RewardPool(task(endpoint, tmp_path, max_requests=2)) as pool,
            contextlib.suppress(UserError),
        ):
            rewards = pool.score(groups_of("a", "b", "c"))
    assert len(endpoint.asked) == 2 and sum(r is None for r in rewards[0]) == 1
    costs = {"max_cost": 0.022, "price_per_million_input": 10.0, "cache": str(tmp_path / "other")}
    config = task(endpoint, tmp_path, **costs)
    config = TaskConfig(rewards=("judge",), judge=config.judge, reward_workers=1)
    with RewardPool(config) as pool:
        assert pool.score(groups_of("e", "f", "g")) == [[1.0, 1.0, None]]  # 0.01 each
        assert "max_cost is reached" in str(pool.take_failures())
    with contextlib.closing(sqlite3.connect(tmp_path / "other" / "judge.sqlite")) as file:
        assert file.execute("select requests, cost from spent").fetchall() == [(2, pytest.approx(0.02))]


def test_a_run_with_a_judge_keeps_the_key_to_itself(endpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(KEY_VARIABLE, "very-private-word")
    tiny_run.write_files(tmp_path)
    given = tiny_run.options(tmp_path, tmp_path / "run")
    given[given.index("--task.rewards") + 1] = "judge"
    judge = {
        "url": endpoint.url,
        "rubric": "{completion} high",
        "max_score": "20",
        "cache": tmp_path / "cache",
    }
    more = [part for name, value in judge.items() for part in (f"--task.judge.{name}", str(value))]
    command(["train", "demo_long", *given, *more, "--num-steps", "1"])
    assert set(endpoint.keys) == {"Bearer very-private-word"}
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert step["reward"] == pytest.approx(11 / 20) and step["num_failed_rewards"] == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"very-private-word" in path.read_bytes() for path in written)
    assert "very-private-word" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, "needs task.judge.url"),
        ({"url": "http://me:secret@host/v1"}, "without a user or password"),
        ({"pattern": "score"}, "one group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"min_score": 5.0, "max_score": 5.0}, "must be less"),
        ({"max_cost": 1.0}, "needs a price"),
        (
            {"max_cost": 0.001, "price_per_million_output": 10.0},
            "but a request may cost 0.00512 and more",
        ),
        ({"rubric": "@/nowhere/rubric.txt"}, "cannot be read"),
        ({"cache": "/dev/null/judge"}, "cannot be used"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        given = {"url": "http://127.0.0.1:9/v1", "cache": str(tmp_path)} | settings
        RewardPool(TaskConfig(rewards=("judge",), judge=JudgeConfig(**given)))
