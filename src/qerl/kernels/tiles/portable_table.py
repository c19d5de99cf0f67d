"""Measured tiles of the portable packed product, by GPU: the user's file first, then the package's.

    portable_tile.json              of this package: for each GPU commit, date and choices
    $QERL_CACHE/portable_tile.json  what `qerl bench tune` measured on this machine

A product uses the choice of the nearest (N, K), by |log N / N'| + |log K / K'|, with the smallest
`most_tokens` that is at least M, of its own layout; codes of 4 bits without any take NVFP4's. Else, as on a
GPU in neither file, it takes portable_tile.rule.
"""

import dataclasses
import functools
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from qerl.config.cache import cache_folder
from qerl.kernels.runtime.architectures import CudaArchitecture
from qerl.kernels.tiles.nvfp4_tile import TOKEN_BOUNDS
from qerl.kernels.tiles.portable_tile import PortableChoice, PortableTile, rule
from qerl.kernels.tiles.tile_layout import TileLayout

NAME = "portable_tile.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredChoice:
    """The fastest choice for [N, K] up to most_tokens: us=9.3 a launch."""

    N: int
    K: int
    most_tokens: int
    us: float
    choice: PortableChoice
    layout: TileLayout = TileLayout.NVFP4


def choose_portable_tile(
    M: int,
    N: int,
    K: int,
    card: CudaArchitecture,
    choices: tuple[MeasuredChoice, ...],
    layout: TileLayout = TileLayout.NVFP4,
) -> PortableTile:
    """Return the tile of the nearest measured product that the card can run, else the rule's."""
    bound = next(bound for bound in TOKEN_BOUNDS if bound >= M)
    choices = tuple(each for each in choices if each.most_tokens == bound)
    usable = [each for each in choices if each.layout is layout]
    if layout.code_bytes == TileLayout.NVFP4.code_bytes:
        usable = usable or [each for each in choices if each.layout is TileLayout.NVFP4]
    for each in sorted(usable, key=lambda c: abs(math.log(N / c.N)) + abs(math.log(K / c.K))):
        tile = each.choice.tile(M, K, card, layout)
        if tile is not None and each.choice.tile(max(M, min(bound, 32)), K, card, layout) is not None:
            return tile
    return rule(M, N, K, card, layout)


@functools.cache
def choices_of(gpu: str) -> tuple[MeasuredChoice, ...]:
    """Return what was measured on GPUs of this name; empty if nothing was."""
    ours = user_file().read_text() if user_file().exists() else "[]"
    tables = read(ours), read(resources.files("qerl.kernels.tiles").joinpath(NAME).read_text())
    return next((table[gpu] for table in tables if gpu in table), ())


def user_file() -> Path:
    return cache_folder() / NAME


def read(text: str) -> dict[str, tuple[MeasuredChoice, ...]]:
    return {entry["gpu"]: tuple(_parsed(each) for each in entry["choices"]) for entry in json.loads(text)}


def merged(text: str | None, facts: dict[str, str], choices: list[MeasuredChoice]) -> str:
    """Return a table's text with the entry of facts["gpu"] replaced, one line for each choice."""
    entries = {entry["gpu"]: entry for entry in json.loads(text or "[]")}
    entries[facts["gpu"]] = facts | {"choices": [_flat(each) for each in choices]}
    return "[" + ",\n".join(_written(entry) for entry in entries.values()) + "]\n"


def _written(entry: dict[str, Any]) -> str:
    head = json.dumps({key: value for key, value in entry.items() if key != "choices"})[:-1]
    lines = ",\n".join("  " + json.dumps(choice) for choice in entry["choices"])
    return f'{head}, "choices": [\n{lines}\n]}}'


def _flat(each: MeasuredChoice) -> dict[str, Any]:
    sizes: dict[str, Any] = {"N": each.N, "K": each.K, "most_tokens": each.most_tokens, "us": each.us}
    if each.layout is not TileLayout.NVFP4:
        sizes["layout"] = each.layout.name
    return sizes | dataclasses.asdict(each.choice)


def _parsed(values: dict[str, Any]) -> MeasuredChoice:
    names = [field.name for field in dataclasses.fields(PortableChoice)]
    choice = PortableChoice(**{name: values[name] for name in names})
    sizes = {name: values[name] for name in ("N", "K", "most_tokens", "us")}
    return MeasuredChoice(choice=choice, layout=TileLayout[values.get("layout", "NVFP4")], **sizes)
