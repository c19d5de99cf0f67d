"""The table of docs/config.md: what does not go together in a config."""

import re

from qerl.config.conflicts import CONFLICTS, NEEDS_OUR_DECODER

_SHOWN = {"distil.is_endpoint": "an endpoint as `distil.teacher`"}


def conflict_table() -> str:
    """Return a row for each setting, with all that it does not work with."""
    rows = {_shown(setting): list(others) for setting, others in CONFLICTS.items()}
    rows["a model that transformers' code runs"] = [str(each) for each in NEEDS_OUR_DECODER.split(" or ")]
    lines = [f"| {setting} | {'; '.join(map(_shown, others))} |" for setting, others in rows.items()]
    return "\n".join(("| setting | does not work with |", "| --- | --- |", *lines))


def _shown(condition: str) -> str:
    """Return "no `ray.address` or `noise.scope` other than `step`"."""
    return "".join(
        part if part in (" and ", " or ") else _term(part) for part in re.split("( and | or )", condition)
    )


def _term(term: str) -> str:
    match term.split():
        case ["no", field]:
            return f"no `{field}`"
        case [field, "not", value]:
            return f"`{field}`" if value == "None" else f"`{field}` other than `{value}`"
        case [field, "has", value]:
            return f"`{value}` in `{field}`"
    return _SHOWN.get(term, f"`{term}`")
