"""Read the files of a run's folder for the report.

Damaged lines are skipped with a notice; a folder without a run raises UserError. If there are more samples
than a page can show, some prompts of every step are selected, or of evenly spaced steps.
"""

import contextlib
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qerl.errors import UserError, did_you_mean_folder, quantity
from qerl.tracking.atomic_file import read_object
from qerl.tracking.json_lines import damage_notice, decode
from qerl.tracking.run_folders import runs_in
from qerl.tracking.sample_files import DAMAGE, MAX_LINE_BYTES, open_samples, sample_files, sample_lines

_MAX_CHARACTERS = 20_000
"""Longest prompt or sample on the page."""
_MAX_TURNS, _MAX_TURN_CHARACTERS = 100, 4000
MAX_MOMENTS = 6
"""Evaluations whose answers are shown."""
MAX_OF_PROMPT = 500
"""Samples of one prompt that a live page shows."""
_MAX_STEP = 10**15
_MAX_NUMBER, _MIN_NUMBER = 1e100, 1e-100
"""Limits of the numbers that a chart draws: sums, squares and logarithms of such numbers are finite."""

Points = list[tuple[float, float]]


class Place(NamedTuple):
    """A file of samples, where a line of it starts, and the index of the prompt in it."""

    path: Path
    offset: int
    prompt: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The content of one run's files; empty where a file is missing."""

    name: str
    facts: dict[str, Any]
    """run.json"""
    result: dict[str, Any]
    """result.json"""
    evaluations: dict[str, Any]
    """evaluations.json: {"before": {"accuracy": 0.1, "greedy": 0.2}, "after": ...}"""
    records: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    groups: list[dict[str, Any]]
    """[{"step": 3, "prompt_index": 17, "prompt": "...", "answer": "3", "samples": [{"text": ...}]}]"""
    held_out: list[dict[str, Any]]
    """Answers to held-out problems, as groups; each sample has its moment, in completed steps, and its kind:
    {"step": 0, "kind": "greedy"}."""
    notices: list[str]
    """Problems with the files, and what changed during the run."""
    coverage: list[str]
    """Remark on the samples that are shown, if not all."""
    progress: list[str]
    """Newest messages of a run that is followed, the last one shown and the others folded away."""

    def points(self, key: str) -> Points:
        """Return (step, value) of each step where the value is a number; the first step is 1, as on the
        console."""
        pairs = [(record["step"] + 1, number(record.get(key))) for record in self.records]
        return [(float(step), value) for step, value in pairs if value is not None]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.points(key)]


def changes(facts: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield (completed steps, what) of each reward, data set or other source that the run changed."""
    history = facts.get("history")
    for entry in history if isinstance(history, list) else ():
        changed = entry.get("changed") if isinstance(entry, dict) and has_step(entry) else None
        for name in changed if isinstance(changed, dict) else ():
            if name != "config.num_steps":
                yield entry["step"], name.partition(".")[2]


def number(value: Any) -> float | None:
    """Return the value if it is a number of at most 1e100, else None; 0 if it is nearer to 0 than 1e-100."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_NUMBER:
        return None
    return float(value) if abs(value) >= _MIN_NUMBER else 0.0


def completed_steps(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the steps that the run has completed, by its last record: damaged ones before are missing."""
    return records[-1]["step"] + 1 if records else 0


def has_step(record: Mapping[str, Any]) -> bool:
    """True if the record says which step of a run it is from."""
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MAX_STEP


@contextlib.contextmanager
def refusing_unreadable() -> Iterator[None]:
    """Raise UserError for a file of a run that cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


@refusing_unreadable()
def read_run(folder: Path, name: str, *, max_samples: int) -> RecordedRun:
    check_folder(folder)
    notices: list[str] = []
    objects = read_objects(folder, notices)
    records = [record for _, record in _lines(folder / "metrics.jsonl", notices)]
    if not records:
        notices.append("metrics.jsonl: no step has finished yet")
    groups, coverage = _groups(folder, notices, max_samples)
    for step, what in changes(objects["facts"]):
        notices.append(f"changed from step {step + 1} on: {what}; the headlines are of what came after")
    return RecordedRun(
        name=name,
        **objects,
        records=records,
        groups=groups,
        held_out=read_held_out(folder, completed_steps(records), notices),
        notices=notices,
        coverage=coverage,
        progress=[],
    )


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def check_folder(folder: Path) -> None:
    if not is_run(folder):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder{did_you_mean_folder(folder)}")
        newest = "".join(f"; the newest run in it is {run}" for run in runs_in(folder)[:1])
        raise UserError(f"{folder}: has no metrics.jsonl, so it is not the folder of a run{newest}")


def select_places(places: Mapping[int, Sequence[Place]], max_samples: int) -> list[Place]:
    """Select whole groups of every step, or of evenly spaced steps if there are more steps than groups; of
    the newest step all that fit in a quarter of the page. Prompts that come in several steps go first."""
    groups = {step: _by_prompt(places[step]) for step in sorted(places)}
    if sum(map(len, places.values())) <= max_samples:
        return [place for step in groups for place in places[step]]
    sizes = [len(rows) for of_step in groups.values() for rows in of_step.values()]
    num_groups = max(1, max_samples // max(sizes))
    num_steps_of = Counter(prompt for of_step in groups.values() for prompt in of_step)

    def first(step: int, number: int) -> list[Place]:
        often = sorted(groups[step], key=lambda prompt: -num_steps_of[prompt])[:number]
        return [place for prompt in groups[step] if prompt in often for place in groups[step][prompt]]

    *older, newest = groups
    last = first(newest, max(1, num_groups // 4))
    num_left = num_groups - len({place.prompt for place in last})
    num_spread = min(len(older), num_left)
    steps = [older[i * len(older) // num_spread] for i in range(num_spread)]
    spread = [place for step in steps for place in first(step, num_left // num_spread)]
    return [*spread, *last[:max_samples]]


def _by_prompt(places: Sequence[Place]) -> dict[str, list[Place]]:
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.prompt, []).append(place)
    return groups


def read_objects(folder: Path, notices: list[str]) -> dict[str, dict[str, Any]]:
    """Return the parts of a RecordedRun that are one file; {} if it is missing or damaged, with a notice."""
    objects = {}
    for name, file in (("facts", "run"), ("result", "result"), ("evaluations", "evaluations")):
        path, objects[name] = folder / f"{file}.json", {}
        try:
            objects[name] = read_object(path) if path.exists() else {}
        except UserError:
            notices.append(f"{path.name}: skipped, the file is damaged")
    return objects


def sample_places(path: Path, notices: list[str], *, after: int = -1) -> dict[int, list[Place]]:
    """Return where each sample of a file is, by steps; only those of steps after one."""
    places: dict[int, list[Place]] = {}
    for offset, record in _lines(path, notices):
        if record["step"] > after:
            place = Place(path, offset, str(record.get("prompt_index")))
            places.setdefault(record["step"], []).append(place)
    return places


def _lines(path: Path, notices: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset, JSON object) of each line that has a step."""
    offset, line_number, damaged = 0, 0, []
    try:
        for line_number, line in enumerate(sample_lines(path), start=1):
            record = decode(line)
            if record is not None and has_step(record):
                yield offset, record
            else:
                damaged.append(line_number)
            offset += len(line)
    except DAMAGE:
        notices.append(f"{path.name}: is damaged after line {line_number}")
    if damaged:
        notices.append(damage_notice(path.name, damaged))


def _groups(folder: Path, notices: list[str], max_samples: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups, and a remark if not all samples are among them."""
    places: dict[int, list[Place]] = {}
    for path, _, last in sample_files(folder):
        places |= sample_places(path, notices, after=max(places, default=-1) if last < 0 else -1)
    if not places:
        return [], []
    shown = select_places(places, max_samples)
    num_samples, selected = sum(map(len, places.values())), set(shown)
    num_steps = sum(not selected.isdisjoint(of_step) for of_step in places.values())
    remark = (
        f"This page shows {len(shown):,} of {num_samples:,} samples, from {num_steps:,} of"
        f" {quantity(len(places), 'step')}; samples.jsonl has all."
    )
    return read_groups(shown), [remark] if len(shown) < num_samples else []


def read_held_out(folder: Path, num_steps: int, notices: list[str]) -> list[dict[str, Any]]:
    """Return the answers to held-out problems by problem; of many evaluations the first, the last and evenly
    spaced ones, and of two at the same step the later one."""
    path = folder / "held_out.jsonl"
    if not path.exists():
        return []
    answers: dict[tuple[str, int, str], dict[str, Any]] = {}
    for _, record in _lines(path, notices):
        if record["step"] <= num_steps:
            answers[str(record.get("prompt_index")), record["step"], str(record.get("kind"))] = record
    steps = sorted({step for _, step, _ in answers})
    number = min(len(steps), MAX_MOMENTS)
    shown = {steps[i * (len(steps) - 1) // max(1, number - 1)] for i in range(number)}
    groups: dict[tuple[int, Any], dict[str, Any]] = {}
    for (_, step, kind), record in sorted(answers.items(), key=lambda item: (item[0][1], item[0][2])):
        if step in shown:
            sample = _add_sample(groups, record | {"step": 0})
            sample |= {"step": step, "kind": kind}
    return list(groups.values())


def read_groups(places: Sequence[Place]) -> list[dict[str, Any]]:
    """Return the groups of the samples whose lines start at these places."""
    groups: dict[tuple[int, Any], dict[str, Any]] = {}
    for path, in_file in itertools.groupby(places, key=operator.attrgetter("path")):
        with contextlib.suppress(*DAMAGE), open_samples(path) as file:
            for place in in_file:
                file.seek(place.offset)
                record = decode(file.readline(MAX_LINE_BYTES))
                if record is not None and has_step(record):  # a resumed run may have truncated the file
                    _add_sample(groups, record)
    return list(groups.values())


def _add_sample(groups: dict[tuple[int, Any], dict[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
    """Add the record to its group; return what the page has of it."""
    key = record["step"], str(record.get("prompt_index"))
    if key not in groups:
        groups[key] = {
            "step": record["step"],
            "prompt_index": key[1],
            "prompt": _shortened(record.get("prompt", "")),
            "answer": None if record.get("answer") is None else _shortened(record["answer"]),
            "samples": [],
        }
    sample = (
        {
            "text": _shortened(record.get("text", "")),
            "reward": number(record.get("reward")),
            "advantage": number(record.get("advantage")),
            "finish": str(record.get("finish", "")),
            "num_tokens": number(record.get("num_tokens")),
        }
        | ({"prefix_tokens": prefix} if (prefix := number(record.get("prefix_tokens"))) else {})
        | ({"turns": turns} if (turns := _turns(record.get("turns"))) else {})
        | ({"failure": _shortened(record["failure"])} if record.get("failure") else {})
    )
    groups[key]["samples"].append(sample)
    return sample


def _turns(value: Any) -> list[list[str]]:
    """Return [role, text] of each message of a conversation, of which the page shows the first ones."""
    messages = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    shown = [
        [str(each.get("role", "")), _shortened(each.get("content", ""), _MAX_TURN_CHARACTERS)]
        for each in messages[:_MAX_TURNS]
    ]
    num_left = len(messages) - len(shown)
    return shown + ([["more", f"{num_left} more messages in samples.jsonl"]] if num_left else [])


def _shortened(value: Any, limit: int = _MAX_CHARACTERS) -> str:
    text = str(value)
    num_cut = len(text) - limit
    return text if num_cut <= 0 else f"{text[:limit]}\n[{num_cut} more characters in samples.jsonl]"
