"""Open a task's rows: reasoning-gym, gsm8k, a file, or a data set of the Hugging Face Hub.

    reasoning-gym         question, answer, metadata; rows are generated on demand
    gsm8k                 question, solution, and derived: answer (the number)
    x.jsonl, x.json       one object per line, or (.json) a list of objects
    x.parquet, x.csv      one table; a CSV's first line names the columns, and its values are strings
    verifiers:NAME        prompt, task: a row for each task; openenv:PLACE: prompt, reset
    anything else         a hub id or a folder of data files, through `datasets`; `id:subset` names a subset

reasoning-gym's rows do not depend on the run's seed, which only orders them: runs with different seeds are
evaluated on the same problems. ("seed", 1) in task.gym_options selects other problems.

A line or row that cannot be read keeps its index and is among the table's `faults`. A file that cannot be
divided into rows is refused.
"""

import csv
import dataclasses
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.algo.seeds import mix
from qerl.config import TaskConfig
from qerl.config.task import is_environment_name
from qerl.errors import UserError, did_you_mean, did_you_mean_file, require
from qerl.tasks.env_packages import environment_rows
from qerl.tasks.rows.values import is_unicode
from qerl.tasks.sources import file_digest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """RowTable(name="sums.jsonl", num_rows=2, columns=("prompt", "answer"), prompt_column="prompt", ...)"""

    name: str
    num_rows: int
    columns: tuple[str, ...]
    get: Callable[[int], dict[str, Any]]
    """Return row 0 .. num_rows - 1 with all columns."""
    values: Callable[[str], list[Any]]
    """Return a column of all rows; [] if the rows are generated on demand."""
    prompt_column: str | None
    """The column with the prompt; None if the template alone makes the prompt."""
    fingerprint: str | None = None
    """The fingerprint of a hub data set, which depends on its revision."""
    scan: Callable[[Collection[str]], Iterable[dict[str, Any]]] | None = None
    """Iterate over all rows, each with these columns if it has them, and with all that may have a fault; None
    if rows are checked when drawn, since they are generated on demand or come from the hub."""
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """{2: "invalid JSON: ..."}: the rows that could not be read, and why; they hold nothing."""
    lines: Sequence[int] | None = None
    """The line of the file in which each row begins; None for a file without lines."""

    def place(self, index: int) -> str:
        """Return "line 7", or "row 7" where rows are not lines of a file; both count from 1."""
        return f"row {index + 1}" if self.lines is None else f"line {self.lines[index]}"


def open_rows(config: TaskConfig) -> tuple[RowTable, RowTable | None]:
    """Return the training rows and, if they are a split of their own, the held-out rows."""
    path = Path(config.name)
    if config.name == "reasoning-gym":
        return gym_rows(config), None
    if config.name == "gsm8k":
        return _splits(config, lambda split: _gsm8k(_hub("openai/gsm8k:main", split, None)))
    if is_environment_name(config.name):
        return _environment_rows(config), None
    if path.suffix in _READERS:
        held_out = config.held_out_split
        require(
            held_out is None or Path(held_out).suffix in _READERS,
            f"task.held_out_split {held_out}: {path} is a file, which has no splits; name a file of held-out"
            " rows, or None to hold out its last rows",
        )
        rows = _read_file("name", path, config)
        return rows, None if held_out is None else _read_file("held_out_split", Path(held_out), config)
    _check_ending("task.name", config.name)
    return _splits(config, lambda split: _hub(config.name, split, config.prompt_column))


def file_sources(*places: str | None) -> dict[str, str]:
    """Return {"rows of sums.jsonl": SHA-256} for each place that is a file with rows; of another file with
    the same name, {"rows of sums.jsonl'": SHA-256}."""
    sources: dict[str, str] = {}
    for path in (Path(place) for place in places if place is not None):
        if path.suffix in _READERS and path.is_file():
            name = f"rows of {path.name}"
            while name in sources:
                name += "'"
            sources[name] = file_digest(path)
    return sources


def check_file(option: str, place: str | None) -> None:
    """Raise UserError if the place that this option names is a file of rows that does not exist, or a file of
    another kind."""
    path = Path(place or "")
    if path.suffix in _READERS and not path.is_file():
        raise UserError(f"{option} {path}: no such file{did_you_mean_file(path)}".lstrip())
    if place and path.suffix not in _READERS and not is_environment_name(place):
        _check_ending(option, place)


def _check_ending(option: str, place: str) -> None:
    """Raise UserError for a file without a known ending; the id of a data set has an owner."""
    path = Path(place)
    if path.is_file() or (path.suffix and path.name == place and not path.is_dir()):
        lacks = "" if path.is_file() else "no such file; "
        hint = "" if path.is_file() else did_you_mean_file(path)
        text = f"{option} {place}: {lacks}a file of rows ends in {', '.join(_READERS)}{hint}"
        raise UserError(text.lstrip())


def _read_file(field: str, path: Path, config: TaskConfig) -> RowTable:
    check_file(f"task.{field}", str(path))
    return read_file(path, config.prompt_column)


def read_file(path: Path, prompt_column: str) -> RowTable:
    """Return the rows of a file with one of the known endings."""
    return _READERS[path.suffix](path, prompt_column)


def _splits(config: TaskConfig, load: Callable[[str], RowTable]) -> tuple[RowTable, RowTable | None]:
    return load(config.split), None if config.held_out_split is None else load(config.held_out_split)


def _environment_rows(config: TaskConfig) -> RowTable:
    rows = environment_rows(config)
    return RowTable(
        name=config.name,
        num_rows=len(rows),
        columns=tuple(rows[0]),
        get=lambda index: dict(rows[index]),
        values=lambda column: [],
        prompt_column="prompt",
    )


def gym_dataset(config: TaskConfig) -> Any:
    """Return reasoning-gym's own data set, which also scores answers."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.gym not in DATASETS:
        hint = did_you_mean(config.gym, DATASETS)
        raise UserError(f"task.gym: reasoning-gym has no task {config.gym!r}{hint}")
    options = dict(config.gym_options)
    if "size" in options:
        raise UserError("task.gym_options: the number of rows is task.num_rows, not the option size")
    known = [field.name for field in dataclasses.fields(DATASETS[config.gym][1]) if field.name != "size"]
    for name in options:
        if name not in known:
            raise UserError(
                f"task.gym_options: {config.gym} has no option {name!r}{did_you_mean(name, known)}"
                f" (there are: {', '.join(known)})"
            )
    try:
        return reasoning_gym.create_dataset(config.gym, **{"seed": 0, **options, "size": config.num_rows})
    except Exception as error:
        raise UserError(f"task.gym_options: {config.gym} rejects them: {error}") from error


def gym_rows(config: TaskConfig) -> RowTable:
    dataset = gym_dataset(config)

    def get(index: int) -> dict[str, Any]:
        # list_functions of reasoning-gym 0.1.25 uses the global generator: without this its rows would
        # differ from call to call and change the random numbers of other code.
        state = random.getstate()
        random.seed(mix(dataset.seed, index))
        try:
            return dataset[index]
        finally:
            random.setstate(state)

    return RowTable(
        name=f"reasoning-gym {config.gym}",
        num_rows=config.num_rows,
        columns=("question", "answer", "metadata"),
        get=get,
        values=lambda column: [],
        prompt_column=None,
    )


def _gsm8k(rows: RowTable) -> RowTable:
    def get(index: int) -> dict[str, Any]:
        row = rows.get(index)
        return {
            "question": row["question"],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
            "solution": row["answer"],
        }

    columns = {"question": "question", "answer": "answer", "solution": "answer"}
    values = lambda column: rows.values(columns[column])  # noqa: E731  no derived one is empty if its source is not
    return dataclasses.replace(rows, columns=tuple(columns), get=get, values=values)


def _hub(name: str, split: str, prompt_column: str | None) -> RowTable:
    import datasets

    path, _, subset = name.partition(":")
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it logs every attempt
    try:
        dataset = datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:  # network, hub or data set files may raise anything
        reason = str(error).strip().partition("\n")[0]
        hint = did_you_mean(name, ("reasoning-gym", "gsm8k")) or f"; a {', '.join(_READERS)} file works too"
        raise UserError(f"task.name {name}, split {split}: {type(error).__name__}: {reason}{hint}") from error
    finally:
        logger.setLevel(level)
    assert isinstance(dataset, datasets.Dataset)
    rows = _arrow_rows(f"{name} ({split})", dataset.data.table, prompt_column)
    return dataclasses.replace(rows, fingerprint=dataset._fingerprint)


def _read_csv(path: Path, prompt_column: str) -> RowTable:
    rows, lines, faults = [], [], {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or [])
            name, count = Counter(columns).most_common(1)[0] if columns else ("", 1)
            if count > 1:
                raise UserError(f"{path}: has the column {name} twice")
            line = reader.line_num + 1
            for row in reader:
                if None in row:
                    faults[len(rows)] = f"has more values than the {len(columns)} columns"
                rows.append({} if None in row else dict(row))
                lines.append(line)
                line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable CSV file: {error}") from error
    return _object_rows(path, rows, prompt_column, faults=faults, lines=lines)


def _read_parquet(path: Path, prompt_column: str) -> RowTable:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).partition(chr(10))[0]}") from error
    rows = _arrow_rows(str(path), table, prompt_column)

    def scan(columns: Collection[str]) -> Iterator[dict[str, Any]]:
        names = [name for name in rows.columns if name in columns or not _is_valid(table.column(name))]
        values = zip(*map(rows.values, names), strict=True)
        return (dict(zip(names, row, strict=True)) for row in values)

    return dataclasses.replace(rows, scan=scan)


def _is_valid(column: Any) -> bool:
    """True if every text in an Arrow column is UTF-8 and every number finite; its type bounds how deep its
    values nest."""
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return all(map(_is_finite, column.chunks))


def _is_finite(array: Any) -> bool:
    """True if no number in an Arrow array, nested or not, is NaN or infinite."""
    import numpy
    from pyarrow import types

    if types.is_floating(array.type):
        return bool(numpy.isfinite(array.drop_null().to_numpy(zero_copy_only=False)).all())
    if types.is_dictionary(array.type):
        return _is_finite(array.dictionary)
    if types.is_struct(array.type):
        return all(map(_is_finite, array.flatten()))
    if types.is_map(array.type):
        return _is_finite(array.keys) and _is_finite(array.items)
    return not types.is_nested(array.type) or types.is_union(array.type) or _is_finite(array.flatten())


def _arrow_rows(name: str, table: Any, prompt_column: str | None) -> RowTable:
    if table.num_rows == 0:
        raise UserError(f"{name}: has no rows")
    return RowTable(
        name=name,
        num_rows=table.num_rows,
        columns=tuple(table.column_names),
        get=lambda index: {column: _cell(table.column(column)[index]) for column in table.column_names},
        values=lambda column: _cells(table.column(column)),
        prompt_column=prompt_column if prompt_column in table.column_names else None,
    )


def _cells(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        return [_cell(scalar) for scalar in column]


def _cell(scalar: Any) -> Any:
    """Return the value; for one that Python cannot hold (bytes that are not UTF-8) a text that is not valid
    Unicode, by which its row is found to be bad."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return "\udcff"


def _read_jsonl(path: Path, prompt_column: str) -> RowTable:
    rows, lines, faults = [], [], {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = _parse_json(line)
                fault = None if isinstance(row, dict) else f"not a JSON object but {_shorten(line)}"
            except json.JSONDecodeError as error:  # its text counts lines too, within this one
                row, fault = None, f"invalid JSON: {error.msg} at character {error.pos + 1}"
            except (ValueError, RecursionError) as error:
                row, fault = None, f"invalid JSON: {error}"
            if fault is not None:
                faults[len(rows)] = fault
            rows.append(row if isinstance(row, dict) else {})
            lines.append(number)
    return _object_rows(path, rows, prompt_column, faults=faults, lines=lines)


def _read_json(path: Path, prompt_column: str) -> RowTable:
    content = path.read_bytes()
    try:
        rows = _parse_json(content)
    except (ValueError, RecursionError) as error:
        if _has_lines(content):
            return _read_jsonl(path, prompt_column)
        raise UserError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: a list of objects was expected")
    faults = {i: "not an object" for i, row in enumerate(rows) if not isinstance(row, dict)}
    rows = [row if isinstance(row, dict) else {} for row in rows]
    return _object_rows(path, rows, prompt_column, faults=faults)


def _has_lines(content: bytes) -> bool:
    """True if the first line is an object: some data sets name JSON lines .json."""
    try:
        return isinstance(_parse_json(content.lstrip().partition(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"an object has {names.most_common(1)[0][0]!r} twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # json.loads would make one for each line


def _parse_json(text: bytes) -> Any:
    return _DECODER.decode(text.decode(json.detect_encoding(text), "surrogatepass"))


def _shorten(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 40 else f"{text[:40]}..."


def _object_rows(
    path: Path,
    rows: list[dict[str, Any]],
    prompt_column: str,
    *,
    faults: dict[int, str],
    lines: list[int] | None = None,
) -> RowTable:
    if not rows:
        raise UserError(f"{path}: has no rows")
    if len(faults) == len(rows):
        place = "row 1" if lines is None else f"line {lines[0]}"
        raise UserError(f"{path}: none of its {len(rows):,} rows can be read ({place}: {faults[0]})")
    columns = tuple(filter(is_unicode, dict.fromkeys(column for row in rows for column in row)))
    return RowTable(
        name=str(path),
        num_rows=len(rows),
        columns=columns,
        get=lambda index: dict.fromkeys(columns) | rows[index],
        values=lambda column: [row.get(column) for row in rows],
        prompt_column=prompt_column if prompt_column in columns else None,
        scan=lambda columns: rows,
        faults=faults,
        lines=lines,
    )


_READERS: dict[str, Callable[[Path, str], RowTable]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
