"""Write the HTML page of one or more runs: headlines, metrics, time by phase, samples, results and config.

The page is self-contained: it includes style, script and data, and its content security policy lets it load
nothing and run no other script. Text of a model or a file is escaped, or is JSON without `<`, `>` and `&`
that the script only puts into text nodes.
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
from qerl.tracking.report.facts import facts_list
from qerl.tracking.report.read import RecordedRun, read_run

MAX_SAMPLES = 2000


def write_report(folders: list[Path], out: Path) -> None:
    """Read the runs' folders and write the page atomically."""
    if not folders:
        raise UserError("report: give the folder of at least one run")
    share = max(1, MAX_SAMPLES // len(folders))
    names = run_names(folders)
    runs = [read_run(folder, name, max_samples=share) for folder, name in zip(folders, names, strict=True)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        parts, data = contents(runs, [{"groups": run.groups, "heldOut": run.held_out} for run in runs])
        write_atomic(out, document(runs, parts, data))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    except RunError as error:
        raise UserError(str(error)) from None


def contents(
    runs: Sequence[RecordedRun], samples: Sequence[dict[str, Any]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the parts of the page that change during a run, by name, and the data of its script.

    The data are the charts in the page's order, and the runs, each with its `samples`.
    """
    main, constant = section.by_change(runs, section.main_charts(runs))
    changing, rest = section.by_change(runs, section.other_metrics(runs))
    charts, chart_data = section.charts(runs, main)
    phases, phase_data = section.phases(runs)
    others, other_data = section.charts(runs, [*changing, *constant, *rest])
    parts = {
        "notices": section.notice_list(runs, [run.notices for run in runs]) + section.progress(runs),
        "coverage": section.notice_list(runs, [run.coverage for run in runs]),
        "facts": facts_list(runs),
        "tiles": section.tiles(runs),
        "charts": charts + phases,
        "others": others,
        "results": section.table(runs, [run.result for run in runs]),
        "config": section.table(runs, [run.facts for run in runs]),
    }
    timelines = [section.timeline(run) for run in runs]
    return parts, {
        "charts": chart_data + phase_data + other_data,
        "ticks": section.ticks(timelines),
        "runs": [timeline | groups for timeline, groups in zip(timelines, samples, strict=True)],
    }


def document(
    runs: Sequence[RecordedRun],
    parts: dict[str, str],
    data: Any,
    *,
    style: str = "",
    script: str = "",
    policy: str = "",
) -> bytes:
    """Return the page; `style`, `script` and `policy` are added to its own."""
    style, script = asset("page.css") + style, asset("page.js") + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sources = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    values = parts | {
        "title": escape(", ".join(run.name for run in runs)),
        "policy": sources + policy,
        "legend": section.legend(runs),
        "style": style,
        "data": script_json(data),
        "script": script,
    }
    # One pass over the template: inserted text is never expanded again.
    head, *rest = asset("page.html").split("{{")
    pieces = [(values[name], text) for name, _, text in (piece.partition("}}") for piece in rest)]
    text = head + "".join(part + text for part, text in pieces)
    return text.encode("utf-8", errors="backslashreplace")


def script_json(data: Any) -> str:
    """Return JSON without any character that starts HTML markup."""
    text = encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str, package: str = "qerl.tracking.report") -> str:
    """Return the text of a file of this package, or of another one."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, or their paths if two names are equal."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
