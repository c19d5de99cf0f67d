"""Follow a growing run: read only new lines, and a whole file again after a resume truncated it."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qerl.config.regular_file import open_regular, read_regular
from qerl.tracking.json_lines import damage_notice, decode, is_intact
from qerl.tracking.metric_text import clock, seconds_left
from qerl.tracking.report import read
from qerl.tracking.sample_files import segments

_NUM_LINES = 50
"""Number of the newest messages that the page has."""

_STEP = re.compile(rb'\{"step": (\d{1,15}), "prompt_index": (\d{1,15}), .*\}\n', re.DOTALL)


def step_of(line: bytes) -> dict[str, Any] | None:
    """Return a sample's record, or only its step and prompt if the line has the journal's form, which is much
    faster."""
    match = _STEP.fullmatch(line)
    if match is None or not is_intact(line):
        return decode(line)
    return {"step": int(match[1]), "prompt_index": int(match[2])}


class LineReader:
    """Reads the complete lines of a growing file of JSON lines; an incomplete last line waits."""

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any] | None] = decode):
        self.path, self._parse = path, parse
        self.num_restarts = self.end = 0
        self._restart()

    def read_new(self) -> tuple[bool, list[tuple[int, dict[str, Any]]]]:
        """Return whether earlier lines are void, and (offset, JSON object) of each new line."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return self._restart(), []
        with file:
            # A resumed run truncates its files, which may have grown beyond the cut since.
            file.seek(self.end - len(self._last_line))
            is_void = file.read(len(self._last_line)) != self._last_line and self._restart()
            file.seek(self.end)
            return is_void, list(self._records(file))

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset, self.end, self._last_line = self.end, self.end + len(line), line
            self._num_lines += 1
            if (record := self._parse(line)) is None:
                self.damaged.append(self._num_lines)
            else:
                yield offset, record

    def _restart(self) -> bool:
        had_lines = self.end > 0
        self.num_restarts += had_lines
        self.end = self._num_lines = 0
        self.damaged: list[int] = []
        self._last_line = b""
        return had_lines


class RunFollower:
    """Follows one run: refresh() reads what is new, the other methods return what is known."""

    def __init__(self, folder: Path, name: str):
        read.check_folder(folder)
        self.name, self._folder = name, folder
        self._metrics, self._events = (LineReader(folder / f"{part}.jsonl") for part in ("metrics", "events"))
        self._samples = LineReader(folder / "samples.jsonl", step_of)
        self._records: list[dict[str, Any]] = []
        self._newest: dict[int, list[read.Place]] = {}
        self._older: dict[Path, dict[int, list[read.Place]]] = {}
        self._older_damage: dict[Path, list[str]] = {}
        self._progress: list[str] = []
        self._objects: dict[str, dict[str, Any]] = {}
        self._damage: list[str] = []
        with read.refusing_unreadable():
            self.refresh()

    @property
    def tag(self) -> str:
        """Changes whenever anything known about the run changes."""
        files = (self._metrics, self._samples, self._events)
        known = [*((file.num_restarts, file.end) for file in files), self._objects, self._damage]
        known.append(list(self._older))
        return str(hash(repr(known)) & (1 << 48) - 1)

    def refresh(self) -> None:
        is_void, lines = self._metrics.read_new()
        known = [] if is_void else self._records
        self._records = known + [record for _, record in lines if read.has_step(record)]
        is_void, lines = self._samples.read_new()
        if is_void:
            self._newest = {}
        for offset, record in lines:
            if read.has_step(record):
                place = read.Place(self._samples.path, offset, str(record.get("prompt_index")))
                self._newest.setdefault(record["step"], []).append(place)
        self._read_older()
        is_void, lines = self._events.read_new()
        events = [record for _, record in lines if "checkpoint" not in record]
        texts = [f"{_time_of_day(each.get('wall_time'))}{each.get('text', '')}" for each in events]
        self._progress = (([] if is_void else self._progress) + texts)[-_NUM_LINES:]
        damaged = [file for file in (self._metrics, self._samples) if file.damaged]
        self._damage = [damage_notice(file.path.name, file.damaged) for file in damaged]
        self._damage += [text for texts in self._older_damage.values() for text in texts]
        self._objects = read.read_objects(self._folder, self._damage)

    def run(self) -> read.RecordedRun:
        return read.RecordedRun(
            name=self.name,
            **self._objects,
            records=self._records,
            groups=[],
            held_out=[],
            notices=self._damage,
            coverage=[],
            progress=self._progress,
        )

    def steps(self) -> list[int]:
        """Return the steps whose samples are complete, since their metrics are there too."""
        num_completed = read.completed_steps(self._records)
        known = {*self._newest, *(step for places in self._older.values() for step in places)}
        return sorted(step for step in known if step < num_completed)

    def groups(self, step: int) -> list[dict[str, Any]]:
        """Return the samples of a step, by prompts."""
        return read.read_groups(self._places(step))

    def groups_of(self, prompt: str) -> list[dict[str, Any]]:
        """Return the samples of one prompt in all steps that have it, the newest ones of too many."""
        places = [place for step in self.steps() for place in self._places(step) if place.prompt == prompt]
        return read.read_groups(places[-read.MAX_OF_PROMPT :])

    @property
    def has_held_out(self) -> bool:
        return (self._folder / "held_out.jsonl").exists()

    def held_out(self) -> list[dict[str, Any]]:
        """Return the answers to held-out problems, by problem."""
        return read.read_held_out(self._folder, read.completed_steps(self._records), [])

    def _places(self, step: int) -> list[read.Place]:
        older = [places[step] for places in self._older.values() if step in places]
        return older[0] if older else self._newest.get(step, [])

    def _read_older(self) -> None:
        """Look for compressed files that are new, and forget those that are gone."""
        paths = [segment.path for segment in segments(self._folder)]
        for path in self._older.keys() - set(paths):
            del self._older[path], self._older_damage[path]
        for path in paths:
            if path not in self._older:
                self._older_damage[path] = []
                self._older[path] = read.sample_places(path, self._older_damage[path])

    def state(self) -> dict[str, Any]:
        """{"state": "running", "text": "step 13 of 60, 4:31 left, last step 0:06 ago", "done": 0.22}"""
        is_complete = (self._folder / "result.json").exists()
        state = "complete" if is_complete else "running" if _is_alive(self._folder / ".lock") else "stopped"
        config = self._objects["facts"].get("config")
        planned = read.number(config.get("num_steps")) if isinstance(config, dict) else None
        num_steps = read.completed_steps(self._records)
        words = [f"step {num_steps} of {planned:.0f}" if planned else f"step {num_steps}"]
        if state == "running":
            step_seconds = [read.number(record.get("step_s")) or 0.0 for record in self._records[-20:]]
            if planned and (left_s := seconds_left(step_seconds, int(planned) - num_steps)):
                words.append(f"{clock(left_s)} left")
            if self._records and (at := read.number(self._records[-1].get("wall_time"))):
                words.append(f"last step {clock(max(0.0, time.time() - at))} ago")
        else:
            words.insert(0, state)
        share = min(1.0, num_steps / planned) if planned else 0.0
        return {"state": state, "text": ", ".join(words), "done": share}


def _time_of_day(value: Any) -> str:
    at = read.number(value)
    try:
        return "" if at is None else time.strftime("%H:%M  ", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # beyond the years that a clock knows
        return ""


def _is_alive(lock: Path) -> bool:
    """True if the process whose id is in the lock file is running on this machine."""
    try:
        process = int(read_regular(lock, 100))
        os.kill(max(process, 1), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return process > 0
