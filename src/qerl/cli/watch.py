"""Watch one or more runs live in the browser."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from qerl.cli.arguments import parse_options
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    """Folders of runs, written by `qerl train`."""

    port: int = 8080
    """Port on 127.0.0.1; 0 picks a free one."""

    open: bool = False
    """Open the page in this machine's browser."""

    def __post_init__(self):
        require(0 <= self.port < 65536, f"port must lie in 0 to 65535, got {self.port}")


def run(arguments: list[str]) -> None:
    options = parse_options(WatchOptions, arguments, "watch", help=__doc__)
    require(len(options.runs) > 0, "watch needs the folder of a run: qerl watch RUN [RUN ...]")
    from qerl.tracking.dashboard.server import watch

    watch(options.runs, port=options.port, opens_browser=options.open)
