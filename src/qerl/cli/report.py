"""Write an HTML report of one or more runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from qerl.cli.arguments import parse_options
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    """Folders of runs, written by `qerl train`."""

    out: Path | None = None
    """File to write; default: report.html in the first run's folder."""


def run(arguments: list[str]) -> None:
    options = parse_options(ReportOptions, arguments, "report", help=__doc__)
    require(len(options.runs) > 0, "report needs the folder of a run: qerl report RUN [RUN ...]")
    from qerl.tracking.report import write_report

    out = options.out or options.runs[0] / "report.html"
    write_report(list(options.runs), out)
    print(out)
