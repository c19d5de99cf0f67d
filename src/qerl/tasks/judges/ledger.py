"""The file (SQLite) that a judge's workers share: replies, and the number, the cost and the pace of requests.

A sample that has been rated is not asked for again. A request reserves the most that it may cost before it is
sent, and settles at what it did cost:

    sent if    cost + sum of open reservations + its own <= max_cost
    refused if cost + its own > max_cost                             else it waits until open ones settle

A request that never settles, as of a worker that was stopped, counts in full: it may have been charged. So
does a try that timed out; the next try is a request of its own. Only an endpoint that counts more tokens than
a message has bytes and max_tokens can exceed max_cost.
"""

import contextlib
import hashlib
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.config import JudgeConfig
from qerl.config.cache import cache_folder
from qerl.errors import UserError
from qerl.tasks.judges.openai_client import longest_request_s
from qerl.tasks.judges.rubric import JudgeFailed

_BUSY_S, _POLL_S = 30.0, 0.1
_TEMPLATE_TOKENS = 256
"""Most tokens that a chat template adds to a message, a default system prompt included."""
# spent.next_s is not used: it was a time of day, which may leap.
_TABLES = """
create table if not exists replies (key text primary key, reply text not null);
create table if not exists spent (
    judge text primary key, requests integer not null, cost real not null, next_s real not null
);
create table if not exists turns (
    judge text not null, boot text not null, next_s real not null, primary key (judge, boot)
);
create table if not exists open_requests (
    id text primary key, judge text not null, boot text not null, end_s real not null, cost real not null
);
"""


def highest_cost(settings: JudgeConfig, message: str) -> float:
    """Return the most that a request may cost: a token has at least one byte."""
    num_bytes = len(message.encode("utf-8", errors="surrogatepass"))
    return _price(settings, num_bytes + _TEMPLATE_TOKENS, settings.max_tokens)


def cost_of(settings: JudgeConfig, usage: Any) -> float | None:
    """Return the cost of a request by the endpoint's own count of tokens; None if it has none."""
    names = "prompt_tokens", "completion_tokens"
    counts = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    counts = [count for count in counts if type(count) is int and count >= 0]
    return _price(settings, *counts) if len(counts) == len(names) else None


def _price(settings: JudgeConfig, num_input: int, num_output: int) -> float:
    prices = settings.price_per_million_input, settings.price_per_million_output
    return (prices[0] * num_input + prices[1] * num_output) / 1e6


class Ledger:
    def __init__(self, settings: JudgeConfig):
        cache = cache_folder() / "judge"
        self._path = Path(settings.cache or cache).expanduser() / "judge.sqlite"
        self._settings, self._name = settings, json.dumps([settings.url, settings.model])
        self._longest_s = longest_request_s(settings.timeout_s, settings.retries)
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

    def begin(self, reserved: float = 0.0) -> str:
        """Count a request, reserve its cost, wait for its turn and return its id. Raise JudgeFailed if a
        limit is reached."""
        # A clock that nobody sets: after a leap back of the time of day all requests waited. All processes
        # have the same one from one boot of the machine to the next.
        request, boot = uuid.uuid4().hex, _boot()
        while True:
            now_s = time.monotonic()
            with self._open() as file:
                file.execute("begin immediate")
                if self._has_room(file, reserved, boot, now_s):
                    turn_s = self._take_turn(file, boot, now_s)
                    row = request, self._name, boot, turn_s + self._longest_s, reserved
                    if reserved:
                        file.execute("insert into open_requests values (?, ?, ?, ?, ?)", row)
                    file.execute("commit")
                    break
                file.execute("commit")
            time.sleep(_POLL_S)
        time.sleep(max(turn_s - now_s, 0.0))
        return request

    def _has_room(self, file: sqlite3.Connection, reserved: float, boot: str, now_s: float) -> bool:
        """True if no limit stops a request, False if one may when open requests have settled; raise
        JudgeFailed if a limit is reached."""
        settings, name = self._settings, self._name
        file.execute("insert or ignore into spent values (?, 0, 0, 0)", (name,))
        is_over = "judge = ? and (boot != ? or end_s < ?)"
        change = f"update spent set cost = cost + (select total(cost) from open_requests where {is_over})"
        file.execute(f"{change} where judge = ?", (name, boot, now_s, name))
        file.execute(f"delete from open_requests where {is_over}", (name, boot, now_s))
        requests, cost = file.execute("select requests, cost from spent where judge = ?", (name,)).fetchone()
        if settings.max_requests is not None and requests >= settings.max_requests:
            raise JudgeFailed(f"task.judge.max_requests is reached: {requests} requests")
        if settings.max_cost is None:
            return True
        if cost + reserved > settings.max_cost:
            more = f"; another one may cost {reserved:.4g}"
            raise JudgeFailed(f"task.judge.max_cost is reached: {cost:.4g} in {requests} requests{more}")
        select = "select total(cost) from open_requests where judge = ?"
        return cost + file.execute(select, (name,)).fetchone()[0] + reserved <= settings.max_cost

    def _take_turn(self, file: sqlite3.Connection, boot: str, now_s: float) -> float:
        """Count the request; return when it may be sent."""
        per_minute = self._settings.requests_per_minute
        select = "select next_s from turns where judge = ? and boot = ?"
        (next_s,) = file.execute(select, (self._name, boot)).fetchone() or (now_s,)
        turn_s = max(now_s, next_s)
        file.execute("update spent set requests = requests + 1 where judge = ?", (self._name,))
        next_s = turn_s + (60 / per_minute if per_minute else 0.0)
        file.execute("insert or replace into turns values (?, ?, ?)", (self._name, boot, next_s))
        return turn_s

    def settle(self, request: str, cost: float | None) -> None:
        """Replace what a request reserved by its cost; None: it counts in full."""
        with self._open() as file:
            file.execute("begin immediate")
            row = file.execute("select cost from open_requests where id = ?", (request,)).fetchone()
            if row is not None:  # else it reserved nothing, or was so late that it counts in full already
                file.execute("delete from open_requests where id = ?", (request,))
                change = "update spent set cost = cost + ? where judge = ?"
                file.execute(change, (row[0] if cost is None else cost, self._name))
            file.execute("commit")


def _boot() -> str:
    """Return what Linux calls the time since the machine was started; elsewhere when that was, in seconds."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(round(time.time() - time.monotonic(), -1))
