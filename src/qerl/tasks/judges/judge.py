"""The reward `judge`: a model behind an OpenAI-compatible endpoint rates samples by a rubric (rubric.py).

    reward = (score - min_score) / (max_score - min_score)        score: the last one in the judge's reply

Replies are kept in a file (SQLite), which the worker processes share: a sample that has been rated is not
asked for again. The same file spaces the requests of all workers, and adds up their number and cost. A reply
without a score, or a request that fails, costs its sample alone. A call of several requests has 4 of them
open at once. The key is in the environment variable QERL_JUDGE_KEY, and nowhere else.
"""

import contextlib
import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qerl.config import JudgeConfig, TaskConfig
from qerl.config.cache import cache_folder
from qerl.errors import UserError, require
from qerl.tasks.judges.openai_client import OpenAIClient, RequestFailed
from qerl.tasks.judges.rubric import JudgeFailed, JudgeRequest, rubric_of
from qerl.tasks.scoring import Failure, Scope, failure_of

KEY_VARIABLE = "QERL_JUDGE_KEY"
_BUSY_S = 30.0
_OPEN_REQUESTS = 4
# spent.next_s is not used: it was a time of day, which may leap.
_TABLES = """
create table if not exists replies (key text primary key, reply text not null);
create table if not exists spent (
    judge text primary key, requests integer not null, cost real not null, next_s real not null
);
create table if not exists turns (
    judge text not null, boot text not null, next_s real not null, primary key (judge, boot)
);
"""


class Judge:
    """The reward; raises UserError if its settings cannot work."""

    __name__ = "judge"

    def __init__(self, config: TaskConfig):
        settings = config.judge
        require(settings.url != "", "the reward judge needs task.judge.url: the URL of an endpoint, or base")
        self._settings, self._model = settings, settings.model
        self._rubric = rubric_of(settings)
        self._client = OpenAIClient(
            settings.url, key_variable=KEY_VARIABLE, timeout_s=settings.timeout_s, retries=settings.retries
        )
        self._ledger = Ledger(settings)

    @property
    def reward_scope(self) -> Scope:
        return self._rubric.scope

    def num_deadlines(self, num_samples: int) -> int:
        """Return the largest number of requests of a call that are made one after the other."""
        return max(1, math.ceil(self._rubric.max_requests(num_samples) / _OPEN_REQUESTS))

    def __call__(self, **arguments: list[Any]) -> list[float | Failure]:
        """Return a number in [0, 1] for each sample of the call, or why there is none."""
        requests = self._rubric.requests(arguments)
        with ThreadPoolExecutor(_OPEN_REQUESTS) as threads:
            scores = list(threads.map(self._scores, requests))
        return self._rubric.rewards(arguments, scores)

    def _scores(self, request: JudgeRequest) -> list[float] | Failure:
        try:
            reply = self._ledger.reply(request.message)
            if reply is not None:
                return self._rubric.scores(reply, request)
            reply = self._ask(request.message)
            scores = self._rubric.scores(reply, request)
        except JudgeFailed as error:
            return failure_of("judge", error)
        self._ledger.keep(request.message, reply)  # only what can be read: another try may be better
        return scores

    def _ask(self, message: str) -> str:
        try:
            self._ledger.take_turn()
            self._model = self._model or self._client.first_model()
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": message}],
                "temperature": 0,
                "max_tokens": self._settings.max_tokens,
            }
            answer = self._client.post("chat/completions", body)
        except RequestFailed as error:
            raise JudgeFailed(f"{error.cause}: {error.message}") from None
        self._ledger.pay(answer.get("usage"))
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            raise JudgeFailed("the endpoint's answer has no message")
        return content


class Ledger:
    """The file that a judge's workers share: replies, and the requests so far."""

    def __init__(self, settings: JudgeConfig):
        cache = cache_folder() / "judge"
        self._path = Path(settings.cache or cache).expanduser() / "judge.sqlite"
        self._settings, self._name = settings, json.dumps([settings.url, settings.model])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as file:
                file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"task.judge.cache: {self._path} cannot be used ({error}); choose another folder"
            ) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open it for one transaction: a connection must not be shared by forked processes."""
        file = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        try:
            yield file
        finally:
            file.close()

    def _key(self, message: str) -> str:
        question = json.dumps([self._settings.url, self._settings.model, self._settings.max_tokens, message])
        return hashlib.sha256(question.encode("utf-8", errors="surrogatepass")).hexdigest()

    def reply(self, message: str) -> str | None:
        with self._open() as file:
            row = file.execute("select reply from replies where key = ?", (self._key(message),)).fetchone()
        return None if row is None else row[0]

    def keep(self, message: str, reply: str) -> None:
        with self._open() as file:
            file.execute("insert or replace into replies values (?, ?)", (self._key(message), reply))

    def take_turn(self) -> None:
        """Count a request and wait for its place; raise JudgeFailed if a limit is reached."""
        # A clock that nobody sets: after a leap back of the time of day all requests waited. All processes
        # have the same one from one boot of the machine to the next.
        settings, now_s, boot = self._settings, time.monotonic(), _boot()
        pause_s = 60 / settings.requests_per_minute if settings.requests_per_minute else 0.0
        with self._open() as file:
            file.execute("begin immediate")
            file.execute("insert or ignore into spent values (?, 0, 0, 0)", (self._name,))
            select = "select requests, cost from spent where judge = ?"
            requests, cost = file.execute(select, (self._name,)).fetchone()
            if settings.max_requests is not None and requests >= settings.max_requests:
                raise JudgeFailed(f"task.judge.max_requests is reached: {requests} requests")
            if settings.max_cost is not None and cost >= settings.max_cost:
                raise JudgeFailed(f"task.judge.max_cost is reached: {cost:.4g} in {requests} requests")
            select = "select next_s from turns where judge = ? and boot = ?"
            (next_s,) = file.execute(select, (self._name, boot)).fetchone() or (now_s,)
            turn_s = max(now_s, next_s)
            change = "update spent set requests = requests + 1 where judge = ?"
            file.execute(change, (self._name,))
            change = "insert or replace into turns values (?, ?, ?)"
            file.execute(change, (self._name, boot, turn_s + pause_s))
            file.execute("commit")
        time.sleep(max(turn_s - now_s, 0.0))

    def pay(self, usage: Any) -> None:
        """Add the cost of a request by the endpoint's own count of tokens."""
        settings, cost = self._settings, 0.0
        prices = {
            "prompt_tokens": settings.price_per_million_input,
            "completion_tokens": settings.price_per_million_output,
        }
        for name, price in prices.items():
            count = usage.get(name) if isinstance(usage, dict) else None
            cost += price * count / 1e6 if isinstance(count, int) else 0.0
        if cost:
            with self._open() as file:
                file.execute("update spent set cost = cost + ? where judge = ?", (cost, self._name))


def _boot() -> str:
    """Return what Linux calls the time since the machine was started; elsewhere when that was, in seconds."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(round(time.time() - time.monotonic(), -1))
