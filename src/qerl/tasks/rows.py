"""Open a task's rows: reasoning-gym, gsm8k, a file, or a data set of the Hugging Face Hub.

    reasoning-gym         question, answer, metadata; rows are generated on demand
    gsm8k                 problem, solution, and derived: question (asks for tags), answer (the number)
    x.jsonl, x.json       one object per line, or a list of objects
    x.parquet, x.csv      one table; a CSV's first line names the columns, and its values are strings
    anything else         a hub id or a folder of data files, through `datasets`; `id:subset` names a subset

reasoning-gym's rows do not depend on the run's seed, which only orders them: runs with different seeds are
evaluated on the same problems. ("seed", 1) in task.gym_options selects other problems.
"""

import csv
import dataclasses
import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.algo.seeds import mix
from qerl.config import TaskConfig
from qerl.config.recipes.paper import GSM8K_REQUEST
from qerl.errors import UserError, did_you_mean
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

    def first_empty(self, column: str) -> int | None:
        """Return the first row in which this column is empty."""
        return next((i for i, value in enumerate(self.values(column)) if value is None), None)


def open_rows(config: TaskConfig) -> tuple[RowTable, RowTable | None]:
    """Return the training rows and, if they are a split of their own, the held-out rows."""
    path = Path(config.name)
    if config.name == "reasoning-gym":
        return gym_rows(config), None
    if config.name == "gsm8k":
        return _splits(config, lambda split: _gsm8k(_hub("openai/gsm8k:main", split, None)))
    if path.suffix in _READERS:
        held_out = Path(config.held_out_split or "")  # a recipe for the hub may name a split such as test
        has_held_out = held_out.suffix in _READERS
        rows = _read_file("name", path, config)
        return rows, _read_file("held_out_split", held_out, config) if has_held_out else None
    if path.is_file():
        raise UserError(f"task.name {config.name}: a file of rows ends in {', '.join(_READERS)}")
    return _splits(config, lambda split: _hub(config.name, split, config.prompt_column))


def file_sources(config: TaskConfig) -> dict[str, str]:
    """Return {"rows of sums.jsonl": SHA-256} for each file with rows; {} if they come from elsewhere."""
    paths = [Path(name) for name in (config.name, config.held_out_split) if name is not None]
    files = [path for path in paths if path.suffix in _READERS and path.is_file()]
    return {f"rows of {path.name}": file_digest(path) for path in files}


def _read_file(field: str, path: Path, config: TaskConfig) -> RowTable:
    if not path.is_file():
        raise UserError(f"task.{field} {path}: no such file")
    return _READERS[path.suffix](path, config.prompt_column)


def _splits(config: TaskConfig, load: Callable[[str], RowTable]) -> tuple[RowTable, RowTable | None]:
    return load(config.split), None if config.held_out_split is None else load(config.held_out_split)


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
            "question": f"{row['question']}\n\n{GSM8K_REQUEST}",
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
            "problem": row["question"],
            "solution": row["answer"],
        }

    columns = {"question": "question", "answer": "answer", "problem": "question", "solution": "answer"}
    values = lambda column: rows.values(columns[column])  # noqa: E731  no derived one is empty if its source is not
    return dataclasses.replace(rows, columns=tuple(columns), get=get, values=values)


def _hub(name: str, split: str, prompt_column: str | None) -> RowTable:
    import datasets

    path, _, subset = name.partition(":")
    try:
        with _quiet("huggingface_hub"):  # it logs every attempt
            dataset = datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:  # network, hub or data set files may raise anything
        reason = str(error).strip().partition("\n")[0]
        hint = did_you_mean(name, ("reasoning-gym", "gsm8k")) or f"; a {', '.join(_READERS)} file works too"
        raise UserError(f"task.name {name}, split {split}: {type(error).__name__}: {reason}{hint}") from error
    assert isinstance(dataset, datasets.Dataset)
    rows = _arrow_rows(f"{name} ({split})", dataset.data.table, prompt_column)
    return dataclasses.replace(rows, fingerprint=dataset._fingerprint)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_csv(path: Path, prompt_column: str) -> RowTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns, rows = reader.fieldnames or [], [dict(row) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable CSV file: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UserError(f"{path}: row {number} has more values than the {len(columns)} columns")
    return _object_rows(path, rows, prompt_column)


def _read_parquet(path: Path, prompt_column: str) -> RowTable:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).partition(chr(10))[0]}") from error
    return _arrow_rows(str(path), table, prompt_column)


def _arrow_rows(name: str, table: Any, prompt_column: str | None) -> RowTable:
    if table.num_rows == 0:
        raise UserError(f"{name}: has no rows")

    return RowTable(
        name=name,
        num_rows=table.num_rows,
        columns=tuple(table.column_names),
        get=lambda index: {column: table.column(column)[index].as_py() for column in table.column_names},
        values=lambda column: table.column(column).to_pylist(),
        prompt_column=prompt_column if prompt_column in table.column_names else None,
    )


def _read_jsonl(path: Path, prompt_column: str) -> RowTable:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_parse_json(line, f"{path}, line {number}"))
                if not isinstance(rows[-1], dict):
                    raise UserError(f"{path}, line {number}: not a JSON object but {_shorten(line)}")
    return _object_rows(path, rows, prompt_column)


def _read_json(path: Path, prompt_column: str) -> RowTable:
    rows = _parse_json(path.read_bytes(), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: a list of objects was expected")
    return _object_rows(path, rows, prompt_column)


def _parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: invalid JSON: {error}") from error


def _shorten(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 40 else f"{text[:40]}..."


def _object_rows(path: Path, rows: list[dict[str, Any]], prompt_column: str) -> RowTable:
    if not rows:
        raise UserError(f"{path}: has no rows")
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return RowTable(
        name=str(path),
        num_rows=len(rows),
        columns=columns,
        get=lambda index: {column: rows[index].get(column) for column in columns},
        values=lambda column: [row.get(column) for row in rows],
        prompt_column=prompt_column if prompt_column in columns else None,
    )


_READERS: dict[str, Callable[[Path, str], RowTable]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
