"""The reward `judge`: a model behind an OpenAI-compatible endpoint rates each sample by a rubric.

    reward = (score - min_score) / (max_score - min_score)        score: the last one in the judge's reply

Replies are kept in a file (SQLite), which the worker processes share: a sample that has been rated is not
asked for again. The same file spaces the requests of all workers, and adds up their number and cost. A reply
without a score, or a request that fails, costs its sample alone. The key is in the environment variable
QERL_JUDGE_KEY, and nowhere else.
"""

import contextlib
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.config import JudgeConfig, TaskConfig
from qerl.config.cache import cache_folder
from qerl.errors import UserError, require
from qerl.tasks.openai_client import OpenAIClient, RequestFailed
from qerl.tasks.scoring import Text

KEY_VARIABLE = "QERL_JUDGE_KEY"
_BUSY_S = 30.0
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


class JudgeFailed(Exception):
    """Failure of one sample."""


def readable(text: Text) -> str:
    """Return a text, or the messages of a conversation with their roles; of a single one its content."""
    if isinstance(text, str):
        return text
    if len(text) == 1:
        return str(text[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in text)


class Rubric:
    """The question to a judge about a sample, and the reward in its reply."""

    def __init__(self, settings: JudgeConfig):
        self._settings, self._text = settings, _rubric(settings.rubric)

    def message(self, prompt: str, completion: str, row: dict[str, Any]) -> str:
        settings, fields = self._settings, {"prompt": prompt, "completion": completion}
        fields |= {"min_score": f"{settings.min_score:g}", "max_score": f"{settings.max_score:g}"}
        values = row | fields
        # In one pass: braces of a sample's own text stay as they are.
        return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), self._text)

    def reward(self, reply: str) -> float:
        """Return a number in [0, 1]; raise JudgeFailed if the reply has no score, or one out of range."""
        settings = self._settings
        scores = re.findall(settings.pattern, reply[-20_000:], flags=re.IGNORECASE)
        try:
            score = float(scores[-1])
        except (IndexError, ValueError):
            raise JudgeFailed(f"no score in the reply {reply[-80:]!r}") from None
        low, high = settings.min_score, settings.max_score
        if not low <= score <= high:
            raise JudgeFailed(f"the score {score:g} is not in {low:g} to {high:g}")
        return (score - low) / (high - low)


class Judge:
    """The reward; raises UserError if its settings cannot work."""

    __name__ = "judge"

    def __init__(self, config: TaskConfig):
        settings = config.judge
        require(settings.url != "", "the reward judge needs task.judge.url: the URL of an endpoint, or base")
        self._settings, self._model = settings, settings.model
        self._rubric = Rubric(settings)
        self._client = OpenAIClient(
            settings.url, key_variable=KEY_VARIABLE, timeout_s=settings.timeout_s, retries=settings.retries
        )
        self._ledger = Ledger(settings)

    def __call__(self, prompts: list[Text], completions: list[Text], **columns: list[Any]) -> list[float]:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = rows or [{}] * len(prompts)
        texts = map(readable, prompts), map(readable, completions)
        return [self._reward(*each) for each in zip(*texts, rows, strict=True)]

    def _reward(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        """Return a number in [0, 1]; raise JudgeFailed."""
        message = self._rubric.message(prompt, completion, row)
        reply = self._ledger.reply(message)
        if reply is not None:
            return self._rubric.reward(reply)
        reply = self._ask(message)
        reward = self._rubric.reward(reply)
        self._ledger.keep(message, reply)  # only what can be read: another try may be better
        return reward

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


def _rubric(text: str) -> str:
    """Return the text, or for @FILE that of the file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"task.judge.rubric {text}: cannot be read: {error}") from None
