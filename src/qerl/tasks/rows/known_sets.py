"""Rows of known data sets in the columns of their own files, so that a file works as it was published.

    GSM8K        question, answer (ends in #### and a number)
    MATH         problem, solution or answer
    MBPP         text, code, test_list                   HumanEval    prompt, canonical_solution, test
    BFCL         id, question, function; ground_truth by id from possible_answer/, beside the file

Where the rows lack the prompt or the answer column that the config names, and it names one of a recipe or the
default, a column of this name is added. `Task` reports it in one line.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from qerl.config import TaskConfig
from qerl.config.recipes.paper import CODE_TEMPLATE, GSM8K_TEMPLATE, MATH_TEMPLATE
from qerl.errors import UserError, require
from qerl.tasks.rows.table import RowTable, open_rows, read_file

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownSet:
    """A data set that is known by its columns."""

    name: str
    columns: tuple[str, ...]
    """All of them are there."""
    prompt: str
    answers: tuple[str, ...]
    """The first that is there has the answer."""
    reward: str
    template: str
    prompt_of: Callable[[Row], Any] | None = None
    """Returns a row's prompt; None: it is that of the column. answer_of does so for the answer."""
    answer_of: Callable[[Row], Any] | None = None
    tools_of: Callable[[Row], Any] | None = None
    """Returns the functions that a row offers, for a column tools."""


def _mbpp_prompt(row: Row) -> Any:
    """Return the text with the tests, which alone say what the function is called."""
    tests = row.get("test_list")
    lines = "\n".join(map(str, tests)) if isinstance(tests, list) else tests
    return f"{row['text']}\n\nThe program must pass these tests:\n{lines}" if row.get("text") else None


def _mbpp_tests(row: Row) -> Any:
    """Return the tests, each after the code that sets it up."""
    setup, tests = row.get("test_setup_code"), row.get("test_list")
    return [f"{setup}\n{test}" for test in tests] if setup and isinstance(tests, list) else tests


def _bfcl_prompt(row: Row) -> Any:
    """Return the messages of a question's one turn; several turns as they are: no prompt is made of them."""
    turns = row.get("question")
    return turns[0] if isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], list) else turns


def _bfcl_tools(row: Row) -> Any:
    functions = row.get("function")
    functions = functions if isinstance(functions, list) else [functions]
    return [
        f | {"parameters": _json_schema(f["parameters"])}
        if isinstance(f, dict) and isinstance(f.get("parameters"), dict)
        else f
        for f in functions
    ]


_JSON_TYPES = {"dict": "object", "float": "number", "double": "number", "tuple": "array", "any": "string"}


def _json_schema(schema: Any) -> Any:
    """Return BFCL's description of a value, in whose types Python's names are, as a JSON schema."""
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    changed: Row = {"type": _JSON_TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    if isinstance(schema.get("properties"), dict):
        changed["properties"] = {name: _json_schema(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        changed["items"] = _json_schema(schema["items"])
    return schema | changed


_SETS = (
    KnownSet(
        name="BFCL",
        columns=("id", "question", "function"),
        prompt="question",
        answers=("ground_truth",),
        reward="calls",
        template="{question}",
        prompt_of=_bfcl_prompt,
        tools_of=_bfcl_tools,
    ),
    KnownSet(
        name="MBPP",
        columns=("text", "code", "test_list"),
        prompt="text",
        answers=("test_list",),
        reward="code",
        template=CODE_TEMPLATE,
        prompt_of=_mbpp_prompt,
        answer_of=_mbpp_tests,
    ),
    KnownSet(
        name="HumanEval",
        columns=("prompt", "canonical_solution", "test", "entry_point"),
        prompt="prompt",
        answers=("test",),
        reward="code",
        template=CODE_TEMPLATE,
    ),
    KnownSet(
        name="GSM8K",
        columns=("question", "answer"),
        prompt="question",
        answers=("answer",),
        reward="numeric",
        template=GSM8K_TEMPLATE,
    ),
    KnownSet(
        name="MATH",
        columns=("problem",),
        prompt="problem",
        answers=("solution", "answer"),
        reward="math",
        template=MATH_TEMPLATE,
    ),
)
_PROMPT_COLUMNS = frozenset({"prompt", "problem", "problem_statement"})
_ANSWER_COLUMNS = frozenset({"answer", "solution", "verification_info"})
"""The default and those of the recipes: another one was named by the user, for other rows."""
_COMPARED = frozenset({"exact", "numeric", "math"})  # with an answer, not with tests


def known_set(rows: RowTable) -> KnownSet | None:
    """Return the data set whose columns these are."""
    present = set(rows.columns)
    return next((s for s in _SETS if present.issuperset(s.columns) and present & set(s.answers)), None)


def open_prompt_rows(config: TaskConfig) -> tuple[list[RowTable], list[str]]:
    """Open the training rows and, if there are such, the held-out rows of a split of their own. Return a line
    for each table that got a column; raise UserError for a reward that cannot read it."""
    opened = [with_known_columns(table, config) for table in open_rows(config) if table is not None]
    lines = [line for _, line in opened if line is not None]
    known, wrong = known_set(opened[0][0]), sorted(_COMPARED.intersection(config.rewards))
    if lines and known is not None and known.reward in ("code", "calls") and wrong:
        raise UserError(f"task.rewards {wrong[0]}: {lines[0]}, which is for the reward {known.reward}")
    return [table for table, _ in opened], lines


def with_known_defaults(
    config: TaskConfig, notice: Callable[[str], None], *, keeps_rewards: bool
) -> TaskConfig:
    """Return the config with the template of the data set whose file this is, where the config has the
    default, and with its reward unless keeps_rewards; notice says what they are."""
    rows, line = with_known_columns(open_rows(config)[0], config)
    known = known_set(rows)
    if known is None:
        return config
    template = known.template if config.template == TaskConfig().template else config.template
    rewards = config.rewards if keeps_rewards else (known.reward,)
    weights = config.reward_weights if keeps_rewards else ()
    notice(f"{line or f'{rows.name} has the columns of {known.name}'}; reward {' + '.join(rewards)}")
    return dataclasses.replace(config, template=template, rewards=rewards, reward_weights=weights)


def with_known_columns(rows: RowTable, config: TaskConfig) -> tuple[RowTable, str | None]:
    """Return the table with the columns that the config names and its data set has by another name, and a
    line about them."""
    rows = with_possible_answers(rows) if config.source == "file" else rows
    known = known_set(rows) if config.source in ("file", "hub") else None
    if known is None:
        return rows, None
    added: dict[str, tuple[str, Callable[[Row], Any] | None]] = {}
    source = next(name for name in known.answers if name in rows.columns)
    named = {config.prompt_column, "question"}  # which any template may name
    is_named = not named.isdisjoint(rows.columns) and known.tools_of is None
    if not is_named and config.prompt_column in _PROMPT_COLUMNS - set(rows.columns):
        added[config.prompt_column] = known.prompt, known.prompt_of
    if config.answer_column not in rows.columns and config.answer_column in _ANSWER_COLUMNS:
        added[config.answer_column] = source, known.answer_of
    if known.tools_of is not None and "tools" not in rows.columns:
        added["tools"] = "function", known.tools_of
    if not added:
        return rows, None
    pairs = " and ".join(f"{name} is its {source}" for name, (source, _) in added.items())
    return _derived(
        rows, added, config.prompt_column
    ), f"{rows.name} has the columns of {known.name}: {pairs}"


def with_possible_answers(rows: RowTable) -> RowTable:
    """Return a table of BFCL with the answers by id that a file of the same name in possible_answer has."""
    path = Path(rows.name)
    place = path.parent / "possible_answer" / path.name
    is_complete = "ground_truth" in rows.columns
    if is_complete or not {"id", "question", "function"} <= set(rows.columns) or not _is_bfcl(rows):
        return rows
    if not place.is_file():
        hint = f"the answers of BFCL are expected in {place}, or in a column ground_truth"
        require("irrelevance" in path.name, f"{path}: has no answers: {hint}")
        return _derived(rows, {"ground_truth": ("id", lambda row: [])}, rows.prompt_column)
    answers = read_file(place, "prompt")
    by_id = dict(zip(answers.values("id"), answers.values("ground_truth"), strict=True))
    return _derived(rows, {"ground_truth": ("id", lambda row: by_id.get(row.get("id")))}, rows.prompt_column)


def _is_bfcl(rows: RowTable) -> bool:
    """True if the first usable row has turns of a question and descriptions of functions, as in BFCL."""
    first: Row = next((rows.get(i) for i in range(rows.num_rows) if i not in rows.faults), {})
    return isinstance(first.get("question"), list) and isinstance(first.get("function"), list | dict)


def _derived(
    rows: RowTable, added: dict[str, tuple[str, Callable[[Row], Any] | None]], prompt_column: str | None
) -> RowTable:
    """Return the table with more columns: {"answer": ("test_list", a function of the row or None)}."""

    def extend(row: Row) -> Row:
        more = {name: row.get(src) if of is None else of(row) for name, (src, of) in added.items()}
        return row | more

    def values(column: str) -> list[Any]:
        if column not in added:
            return rows.values(column)
        source, of = added[column]
        if of is None or not (first := rows.values(source)):
            return rows.values(source)
        return [of(rows.get(index)) for index in range(len(first))]

    def scan(columns: Collection[str]) -> Iterator[Row]:
        assert rows.scan is not None
        sources = [name for name in rows.columns if name in columns or columns & added.keys()]
        return map(extend, rows.scan(sources))

    return dataclasses.replace(
        rows,
        columns=(*rows.columns, *added),
        get=lambda index: extend(rows.get(index)),
        values=values,
        prompt_column=prompt_column if prompt_column in added else rows.prompt_column,
        scan=None if rows.scan is None else scan,
    )
