"""Write the verdicts of the studies of the embedded model in a few lines, for a reader of the repository.

- Supported: MXFP4 has a higher entropy than BF16 (+0.778 in entropy, 95 % CI [0.768, 0.787]).
- Refuted: NF4 has a higher entropy than BF16 (-0.129 in entropy, 95 % CI [-0.141, -0.116]).
- Depends on the task: ...
- Not shown: ...
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from qerl.tracking.atomic_file import write_atomic
from studies.analysis import Judged, judge
from studies.catalog import SMALL_STUDIES, STUDIES
from studies.picture import write_picture
from studies.results import Line
from studies.study import Study
from studies.verdict import difference_text, number, title_of

MAX_LINES = 12
Result = tuple[Study, list[Judged]]
_DECIDED = {
    "supported": "Supported",
    "mixed": "Supported overall, but not in every task",
    "refuted": "Refuted",
}


def with_results(folder: Path) -> list[str]:
    """Return the names of the studies that have lines in the folder."""
    return [name for name in STUDIES if (folder / name / "results.jsonl").exists()]


def results_in(folder: Path, names: Collection[str] = SMALL_STUDIES) -> list[Result]:
    """Judge the studies of these names that were run by their lines in FOLDER/NAME/results.jsonl."""
    results = []
    for name in (each for each in with_results(folder) if each in names):
        study = STUDIES[name]()
        results.append((study, judge(study, read_lines(folder / name))))
    return results


def read_lines(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def brief(results: Sequence[Result]) -> str:
    """Return Markdown of at most 12 lines: decided claims with their differences, then the others by name."""
    lines = []
    for verdict, title in _DECIDED.items():
        for study, judged in results:
            lines += [f"- {title}: {_decided(study, one)}." for one in judged if one.verdict == verdict]
    claims = [one for _, judged in results for one in judged]
    depends = [one.claim.says for one in claims if one.verdict == "depends"]
    open_claims = [one for one in claims if one.verdict in ("not shown", "not run")]
    named = [one.claim.says for one in open_claims if one.claim.is_headline]
    if depends:
        lines.append(f"- Depends on the task: {'; '.join(depends)}.")
    if open_claims:
        if others := len(open_claims) - len(named):
            named.append(f"{others} more of {len(claims)} claims")
        lines.append(f"- Not shown: {'; '.join(named)}.")
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines of findings; at most {MAX_LINES} fit the README"
    return "\n".join(lines)


def write_pictures(folder: Path, images: Path) -> list[Path]:
    """Write the pictures of the studies with lines in FOLDER to the folder images; return their paths."""
    written = []
    for name in with_results(folder):
        study = STUDIES[name]()
        written.append(write_picture(study, read_lines(folder / name), images))
    return [path for path in written if path is not None]


def write_findings(folder: Path) -> Path:
    """Write FOLDER/findings.md, which docs/studies.md names; return its path."""
    path = folder / "findings.md"
    write_atomic(path, f"{brief(results_in(folder))}\n".encode())
    return path


def _decided(study: Study, judged: Judged) -> str:
    notes = [difference_text(study, judged)]
    if study.first_look_seeds is not None:
        first, total = study.first_look_seeds, len(study.seeds)
        notes.append(f"{total - first} of {total} seeds were added after the first {first} were read")
    notes += [
        f"on {side.task}, {title_of(study, side.metric)} is {number(side.arm.mean)} against"
        f" {number(side.against.mean)}"
        for side in judged.side_results
    ]
    if judged.claim.note:
        notes.append(judged.claim.note)
    return f"{judged.claim.says} ({'; '.join(notes)})"
