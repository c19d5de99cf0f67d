"""A run's folder read as it grows: each line once, and all of a file anew where the run went back in it."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qerl.tracking.atomic_file import decode
from qerl.tracking.metric_text import clock, seconds_left
from qerl.tracking.report.read import RecordedRun, check_folder, damaged, groups_at, number, read_object

_NOTICES = 5
"""The newest that are shown."""

_STEP = re.compile(rb'\{"step": (\d{1,15}), .*\}\n', re.DOTALL)


def step_of(line: bytes) -> dict[str, Any] | None:
    """What a follower keeps of a sample, without reading all of it where the journal wrote it."""
    return {"step": int(found[1])} if (found := _STEP.fullmatch(line)) else decode(line)


class Tail:
    """The whole lines of a file of JSON lines. A last one without its end waits until it is whole."""

    def __init__(self, path: Path, read: Callable[[bytes], dict[str, Any] | None] = decode):
        self.path, self._read = path, read
        self.num_damaged = self.num_anew = self.end = 0
        self._last = b""

    def more(self) -> tuple[bool, list[tuple[int, dict[str, Any]]]]:
        """Whether all lines until now are void, and (where it begins, its object) for each new one."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return self._forget(), []
        with file:
            # A run that goes on after a kill cuts its files, and they may have grown beyond the cut since.
            file.seek(self.end - len(self._last))
            is_void = file.read(len(self._last)) != self._last and self._forget()
            file.seek(self.end)
            return is_void, list(self._taken(file))

    def _taken(self, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
        for line in file:
            if not line.endswith(b"\n"):
                break
            begin, self.end, self._last = self.end, self.end + len(line), line
            if (record := self._read(line)) is None:
                self.num_damaged += 1
            else:
                yield begin, record

    def _forget(self) -> bool:
        had = self.end > 0
        self.num_anew += had
        self.num_damaged = self.end = 0
        self._last = b""
        return had


class Follower:
    """One run: look() reads what is new, the rest says what is known by then."""

    def __init__(self, folder: Path, name: str):
        check_folder(folder)
        self.name, self._folder = name, folder
        self._metrics, self._events = (Tail(folder / f"{part}.jsonl") for part in ("metrics", "events"))
        self._samples = Tail(folder / "samples.jsonl", step_of)
        self._records: list[dict[str, Any]] = []
        self._begins: dict[int, list[int]] = {}
        self._notices: list[str] = []
        self._objects: dict[str, dict[str, Any]] = {}
        self._damage: list[str] = []
        self.look()

    @property
    def tag(self) -> str:
        """Changes with all that is known."""
        tails = (self._metrics, self._samples, self._events)
        seen = [*((tail.num_anew, tail.end) for tail in tails), self._objects, self._damage]
        return str(hash(repr(seen)) & (1 << 48) - 1)

    def look(self) -> None:
        is_void, lines = self._metrics.more()
        known = [] if is_void else self._records
        self._records = known + [record for _, record in lines if isinstance(record.get("step"), int)]
        is_void, lines = self._samples.more()
        if is_void:
            self._begins = {}
        for begin, record in lines:
            if isinstance(record.get("step"), int):
                self._begins.setdefault(record["step"], []).append(begin)
        is_void, lines = self._events.more()
        told = [_told(record) for _, record in lines]
        self._notices = ([] if is_void else self._notices)[-_NOTICES:] + told[-_NOTICES:]
        self._damage = [
            damaged(tail.path, tail.num_damaged)
            for tail in (self._metrics, self._samples)
            if tail.num_damaged
        ]
        self._objects = {
            name: read_object(self._folder / f"{name}.json", self._damage)
            for name in ("run", "result", "evaluations")
        }

    def run(self) -> RecordedRun:
        return RecordedRun(
            name=self.name,
            facts=self._objects["run"],
            result=self._objects["result"],
            evaluations=self._objects["evaluations"],
            records=self._records,
            groups=[],
            notices=[*self._damage, *self._notices[-_NOTICES:]],
            coverage=[],
        )

    def steps(self) -> list[int]:
        """Those whose samples are whole: a step's metrics follow them."""
        last = self._records[-1]["step"] if self._records else -1
        return sorted(step for step in self._begins if step <= last)

    def groups(self, step: int) -> list[dict[str, Any]]:
        return groups_at(self._samples.path, self._begins.get(step, []))

    def state(self) -> dict[str, Any]:
        """{"state": "running", "text": "step 13 of 60, 4:31 left, last step 0:06 ago", "done": 0.22}"""
        has_ended = (self._folder / "result.json").exists()
        state = "ended" if has_ended else "running" if _is_alive(self._folder / ".lock") else "stopped"
        config = self._objects["run"].get("config")
        planned = number(config.get("num_steps")) if isinstance(config, dict) else None
        taken = self._records[-1]["step"] + 1 if self._records else 0
        words = [f"step {taken} of {planned:.0f}" if planned else f"step {taken}"]
        if state == "running":
            pace = [number(record.get("step_s")) or 0.0 for record in self._records[-20:]]
            if planned and (left_s := seconds_left(pace, int(planned) - taken)):
                words.append(f"{clock(left_s)} left")
            if self._records and (at := number(self._records[-1].get("wall_time"))):
                words.append(f"last step {clock(max(0.0, time.time() - at))} ago")
        else:
            words.insert(0, state)
        return {
            "state": state,
            "text": ", ".join(words),
            "done": min(1.0, taken / planned) if planned else 0.0,
        }


def _told(event: dict[str, Any]) -> str:
    at = number(event.get("wall_time"))
    when = "" if at is None else time.strftime("%H:%M  ", time.localtime(at))
    return f"{when}{event.get('text', '')}"


def _is_alive(lock: Path) -> bool:
    """Whether the process that wrote its number there is still running, on this machine."""
    try:
        process = int(lock.read_text())
        os.kill(max(process, 1), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return process > 0
