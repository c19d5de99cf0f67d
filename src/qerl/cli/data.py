"""Show rows as the model will see them, and find duplicates, long rows and leaks."""

import dataclasses
import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from qerl.cli.arguments import announce, names_or_help, parse_options
from qerl.config import SftConfig, TaskConfig
from qerl.config.check import check_not_negative, check_numbers, check_positive
from qerl.config.recipes import RECIPES, plain
from qerl.errors import UserError, quantity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

    from qerl.tasks.rows.view import RowView, TableView

DESCRIPTION = f"""{__doc__}

ROWS is what --task of `qerl train` or --data of `qerl sft` and `qerl dpo` takes: a .jsonl, .json, .parquet or
.csv file, or a hub id. The fields after --json are those of `qerl train --task...`, which make prompts of
rows."""
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    model: str = "smollm2-135m-instruct"
    """The model whose tokenizer and chat template are used."""

    kind: Literal["auto", "prompt", "sft", "dpo"] = "auto"
    """prompt: rows of `qerl train`. sft: rows of `qerl sft`. dpo: rows of `qerl dpo`. auto: dpo if the rows
    have chosen and rejected or a label, sft if they have messages, a completion or a text."""

    num: int = 3
    """Number of rows to show."""

    max_tokens: int = 1024
    """Rows with more tokens are listed as too long."""

    assistant_only_loss: bool = True
    """sft: learn only what the assistant says."""

    text_column: str = "text"
    """sft: column of rows that are plain texts."""

    json: bool = False
    """Print one JSON object instead of lines."""

    task: TaskConfig = plain().task

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "max_tokens")
        check_not_negative(self, "num")


def run(arguments: list[str]) -> None:
    names, arguments = names_or_help(DataOptions, arguments, "data ROWS", DESCRIPTION)
    if len(names) != 1:
        raise UserError("data needs one file of rows or hub id: qerl data rows.jsonl")
    if names[0] in RECIPES and not Path(names[0]).exists():
        raise UserError(f"{names[0]} is a recipe: qerl data reads a file of rows or a data set of a hub")
    options = parse_options(DataOptions, arguments, f"data {names[0]}", DataOptions(), DESCRIPTION)
    announce(f"data {names[0]}, tokens of {options.model}", sys.stderr if options.json else sys.stdout)
    from qerl.models.checkpoint.model_place import check_place
    from qerl.tasks.early_checks import check_rows_file

    check_rows_file(names[0])
    check_place(options.model)
    from qerl.models.checkpoint.source import locate
    from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
    from qerl.tasks.rows.view import view_rows  # imports transformers, which takes seconds

    tokenizer = load_tokenizer(options.model)
    stop_ids = stop_token_ids(tokenizer, locate(options.model))
    sft = SftConfig(
        data=names[0],
        assistant_only_loss=options.assistant_only_loss,
        text_column=options.text_column,
        allow_special_tokens=options.task.allow_special_tokens,
        max_length=1 << 30,  # rows are shown and counted whole
    )
    task = dataclasses.replace(options.task, name=names[0])
    kind, train, held_out = view_rows(task, sft, tokenizer, stop_ids, options.kind)
    report = _report(options, kind, train, held_out, tokenizer)
    if options.json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(options, report, sys.stdout.isatty())))


def _report(
    options: DataOptions,
    kind: str,
    train: "TableView",
    held_out: "TableView | None",
    tokenizer: "PreTrainedTokenizerBase",
) -> dict[str, Any]:
    from qerl.tasks.rows.view import leaks

    return {
        "kind": kind,
        "train": _table(train, options.max_tokens, tokenizer),
        "held_out": None if held_out is None else _table(held_out, options.max_tokens, tokenizer),
        "leaks": [] if held_out is None else leaks(train, held_out),
        "too_few": kind == "prompt" and held_out is None and options.task.num_held_out_of(train.num_rows) > 0,
        "shown": [_shown(row, tokenizer) for row in train.rows[: options.num]],
    }


def _table(table: "TableView", max_tokens: int, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    lengths = [len(row.tokens_T) for row in table.rows]
    return {
        "name": table.name,
        "rows": table.num_rows,
        "usable": len({row.place for row in table.rows}),
        "tokens": {"least": min(lengths), "median": median(lengths), "most": max(lengths)} if lengths else {},
        "learned_tokens": sum(sum(row.learned_T) for row in table.rows),
        "bad": table.bad,
        "duplicates": table.duplicates(tokenizer),
        "too_long": table.too_long(max_tokens),
        "unused": table.unused,
    }


def _shown(row: "RowView", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    parts = [{"text": text, "learned": is_learned} for text, is_learned in row.parts(tokenizer)]
    return {"place": row.name, "tokens": len(row.tokens_T), "parts": parts}


def _lines(options: DataOptions, report: dict[str, Any], is_terminal: bool) -> list[str]:
    marks = (_GREEN, _PLAIN) if is_terminal else ("[[", "]]")
    legend = "green" if is_terminal else "in [[ ]]"
    lines = [
        f"{report['kind']} rows" + (f"; what is learned is {legend}" if report["kind"] != "prompt" else "")
    ]
    for row in report["shown"]:
        text = "".join(_marked(part, marks) for part in row["parts"])
        lines += ["", f"--- {row['place']}, {quantity(row['tokens'], 'token')}", text]
    for name in ("train", "held_out"):
        if report[name] is not None:
            lines += ["", *_table_lines(report[name], options.max_tokens)]
    if report["held_out"] is not None:
        pairs = [f"{train} = {held_out}" for train, held_out in report["leaks"]]
        lines.append(_listed("training rows with the prompt of a held-out row", pairs))
    if report["too_few"]:
        num = options.task.num_held_out_of(report["train"]["rows"])
        lines.append(f"  qerl train refuses so few rows: task.num_held_out {num} leaves none to train on")
    return lines


def _marked(part: dict[str, Any], marks: tuple[str, str]) -> str:
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in part["text"])
    return f"{marks[0]}{text}{marks[1]}" if part["learned"] else text


def _table_lines(table: dict[str, Any], max_tokens: int) -> list[str]:
    tokens, learned = table["tokens"], table["learned_tokens"]
    lengths = f", {tokens['least']} to {tokens['most']} tokens, median {tokens['median']:g}" if tokens else ""
    unused = [_listed("not used", table["unused"])] if table["unused"] else []
    return [
        f"{table['name']}: {table['usable']} usable of {quantity(table['rows'], 'row')}{lengths}"
        + (f", {learned} tokens learned" if learned else ""),
        _listed("unusable", table["bad"]),
        _listed("duplicates", [" = ".join(places[:_MAX_LISTED]) for places in table["duplicates"]]),
        _listed(f"more than {max_tokens} tokens", table["too_long"]),
        *unused,
    ]


def _listed(what: str, items: list[str]) -> str:
    named = "; ".join("".join(c if c.isprintable() else "?" for c in item) for item in items[:_MAX_LISTED])
    return f"  {what}: {len(items)}" + (f" ({named}{', ...' * (len(items) > _MAX_LISTED)})" if items else "")
