"""One HTML page of one or more runs: headlines, curves, time by phase, samples, results, configuration.

The page stands alone: style, script and data are in it, and its content policy lets it load nothing and run
no script but its own. What a model or a file said goes in as escaped text, or as JSON without `<`, `>`, `&`
that the script only ever puts into text nodes.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from qerl.errors import RunError, UserError
from qerl.tracking.atomic_file import encode, write_atomic
from qerl.tracking.report import section
from qerl.tracking.report.read import RecordedRun, read_run

MAX_SAMPLES = 2000


def write_report(folders: list[Path], out: Path) -> None:
    """Reads the runs' folders and writes the page, in one piece."""
    if not folders:
        raise UserError("report: no run's folder was given")
    share = max(1, MAX_SAMPLES // len(folders))
    names = names_of(folders)
    runs = [read_run(folder, name, max_samples=share) for folder, name in zip(folders, names, strict=True)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html(runs).encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    except RunError as error:
        raise UserError(str(error)) from None


def html(runs: Sequence[RecordedRun]) -> str:
    parts, charts = contents(runs)
    data = {"charts": charts, "runs": [{"name": run.name, "groups": run.groups} for run in runs]}
    return document(runs, parts, data, style=asset("page.css"), script=asset("page.js"))


def contents(runs: Sequence[RecordedRun]) -> tuple[dict[str, str], list[Any]]:
    """What changes while a run goes on: the page's parts by name, and the charts' data in its order."""
    charts, chart_data = section.charts(runs, [*section.CHARTS, *section.pass_at(runs)])
    phases, phase_data = section.phases(runs)
    others, other_data = section.charts(runs, section.other_metrics(runs))
    parts = {
        "notices": section.list_of(runs, [run.notices for run in runs]),
        "coverage": section.list_of(runs, [run.coverage for run in runs]),
        "tiles": section.tiles(runs),
        "charts": charts + phases,
        "others": others,
        "results": section.table(runs, [run.result for run in runs]),
        "config": section.table(runs, [run.facts for run in runs]),
    }
    return parts, chart_data + phase_data + other_data


def document(
    runs: Sequence[RecordedRun],
    parts: dict[str, str],
    data: Any,
    *,
    style: str,
    script: str,
    policy: str = "",
) -> str:
    """The page; `policy` says what it may do beside running its own script and style."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    shown = parts | {
        "title": escape(", ".join(run.name for run in runs)),
        "policy": own + policy,
        "legend": section.legend(runs),
        "style": style,
        "data": embedded(data),
        "script": script,
    }
    # One pass over the template: what is put in is never looked at again.
    head, *rest = asset("page.html").split("{{")
    pieces = [(shown[name], text) for name, _, text in (piece.partition("}}") for piece in rest)]
    return head + "".join(part + text for part, text in pieces)


def embedded(data: Any) -> str:
    """JSON that no HTML parser can take for markup."""
    text = encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """A file of this package."""
    return files("qerl.tracking.report").joinpath(name).read_text(encoding="utf-8")


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or whole paths where these are alike."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
