"""Check a run's files, columns and rewards before torch is imported: a mistake shows within a second or two.

The same mistakes are found again where rows are read and rewards imported; the messages are the same. A file
of the user's code is parsed, not run: what it defines at its top level, and the arguments of its functions.
"""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from qerl.config import DpoConfig, SftConfig, TaskConfig
from qerl.errors import UserError, did_you_mean, did_you_mean_file, require
from qerl.tasks.graders import NEED_ANSWER
from qerl.tasks.reward import REWARDS, check_names_function
from qerl.tasks.rows.known_sets import open_prompt_rows
from qerl.tasks.rows.prompt import prompt_columns, prompt_kind
from qerl.tasks.rows.sft_rows import form_of_rows, tables_of
from qerl.tasks.rows.table import RowTable, check_file, open_rows
from qerl.tasks.scoring import RESERVED, check_reward_columns

_MAX_BYTES = 50_000_000  # larger files are opened once, later
_BINDERS = frozenset({"globals", "exec", "setattr", "vars"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_task_files(config: TaskConfig, *, is_rewarded: bool = True) -> None:
    """Raise UserError for a missing file of rows or of a reward, for a column that neither the rows nor their
    known data set has, and for a name that the reward's file does not define. is_rewarded: task.rewards
    score the samples; False with an agent."""
    check_file("task.name", config.name)
    if config.source == "file":
        check_file("task.held_out_split", config.held_out_split)
    rewards = config.rewards if is_rewarded else ()
    functions = [function for name in rewards for function in _defined(name, "task.rewards")]
    if config.source == "file" and _is_small(config.name, config.held_out_split):
        for table in open_prompt_rows(config)[0]:
            prompt_columns(config, table, prompt_kind(table))
            _check_columns(config, rewards, functions, table)


def check_sft_files(config: SftConfig, dpo: DpoConfig) -> None:
    """Raise UserError for a missing file of rows, or one without the columns to learn from."""
    check_file("data", config.data)
    check_file("eval_data", config.eval_data)
    if config.is_file and _is_small(config.data, config.eval_data):
        for table in open_rows(tables_of(config)):
            if table is not None:
                form_of_rows(dpo).check(table, config)


def check_rows_file(place: str) -> None:
    """Raise UserError for a missing file of rows, or one without a row that can be read."""
    check_file("", place)
    if _is_small(place):
        open_rows(TaskConfig(name=place))


def check_agent_file(name: str) -> None:
    """Raise UserError if the file of agent.function is missing or lacks the function."""
    list(_defined(name, "agent.function"))


def _is_small(*places: str | None) -> bool:
    paths = [Path(place) for place in places if place is not None]
    return all(path.is_file() and path.stat().st_size <= _MAX_BYTES for path in paths)


def _check_columns(
    config: TaskConfig, rewards: Collection[str], functions: list[_Function], table: RowTable
) -> None:
    further = [column for column in table.columns if column != table.prompt_column]
    compares = not {*NEED_ANSWER, "higher_lower"}.isdisjoint(rewards)
    is_missing = compares and config.answer_column not in table.columns
    known = {*RESERVED, *table.columns}
    missing = ((f.name, [name for name in _required(f) if name not in known]) for f in functions)
    check_reward_columns(further, config.answer_column if is_missing else None, missing)


def _required(function: _Function) -> list[str]:
    """Return the parameters that have no default."""
    arguments = function.args
    without = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [each.arg for each in [*without, *(each for each, default in named if default is None)]]


def _defined(name: str, field: str) -> Iterator[_Function]:
    """Yield the function that FILE.py:NAME stands for if it is a plain one; raise UserError if there is none.
    Modules, and names that are bound otherwise, are left to the import."""
    if field == "task.rewards" and name in REWARDS:
        return
    check_names_function(name, field)
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return
    require(Path(place).is_file(), f"{field} {name}: no such file{did_you_mean_file(Path(place))}")
    try:
        tree = ast.parse(Path(place).read_bytes(), place)
    except (SyntaxError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{field} {name}: cannot import {place}: {reason}") from error
    plain = [node for node in tree.body if isinstance(node, _Function)]
    bound = set(_bound(tree))
    hint = did_you_mean(attribute, [node.name for node in plain])
    require(attribute in bound or "*" in bound, f"{field} {name}: {place} has no {attribute!r}{hint}")
    yield from (node for node in plain[::-1] if node.name == attribute and _keeps_arguments(node))


def _keeps_arguments(function: _Function) -> bool:
    """True if the function has no decorator but those of qerl, which say what it sees."""
    names = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    return names <= {"group_reward", "batch_reward"}


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the code may bind at its top level, and "*" for names that cannot be seen."""
    for node in ast.walk(tree):
        if isinstance(node, _Function | ast.ClassDef):
            yield "*" if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Name) and node.id in _BINDERS:
            yield "*"
