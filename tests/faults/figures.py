"""Every fault that the tests try a few of, tried throughout; the figures go into dev/faults.md.

PYTHONPATH=src python tests/faults/figures.py      half an hour of two cores, as root for the full disk
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_run
from faults import damage, disks, kills, runs

NUM_KILLS, SEED = 50, 0
RESULTS = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[2] / "dev" / "faults.md"


def killed(files: Path, folder: Path) -> dict[str, Any]:
    whole, whole_s = kills.unbroken(files, folder)
    moments_s = kills.moments_s(NUM_KILLS, SEED, whole_s)
    return kills.figures([kills.trial(files, folder / str(i), whole, s) for i, s in enumerate(moments_s)])


def full(files: Path, folder: Path) -> dict[str, Any]:
    whole = folder / "whole"
    num_syncs = disks.num_syncs(files, whole)
    by_sync = [disks.sync_trial(files, folder / str(n), whole, n) for n in range(num_syncs)]
    needed = disks.needed_bytes(whole)
    with runs.small_disk(1 << 22) as disk:
        sizes = range(0, needed, needed // 12)
        by_size = [
            disks.space_trial(files, disk, folder / f"space-{size}.log", whole, size) for size in sizes
        ]
    return {
        "syncs": num_syncs,
        "syncs_well": by_sync.count(None),
        "sizes": len(by_size),
        "sizes_well": by_size.count(None),
        "wrong": [wrong for wrong in by_sync + by_size if wrong],
    }


def damaged(files: Path, folder: Path) -> dict[str, Any]:
    whole = folder / "whole"
    runs.finish(files, whole, *damage.MORE)
    half = damage.half_done(files, folder / "half")
    outcomes: dict[str, dict[str, str]] = {}
    for name in (*damage.CHECKPOINT, *damage.RECORD):
        outcomes[name] = {}
        for harm in damage.HARMS:
            out = folder / f"{len(outcomes)}-{harm}"
            outcomes[name][harm] = damage.trial(files, half, out, whole, name, harm)
    return outcomes


MEASURES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "kills": killed,
    "disk": full,
    "damage": damaged,
}


def page(found: dict[str, Any]) -> dict[str, str]:
    """The text of each marked block of dev/faults.md."""
    one, disk, files = (found[name] for name in MEASURES)
    places = "\n".join(f"| {place} | {count} |" for place, count in one["places"].items())
    harms = list(damage.HARMS)
    rows = "\n".join(
        f"| `{name}` | {' | '.join(label(outcomes[harm]) for harm in harms)} |"
        for name, outcomes in files.items()
    )
    counts = Counter(label(outcome) for row in files.values() for outcome in row.values())
    return {
        "kills": f"{one['kills']} kills, {one['same']} runs equal to the uninterrupted one,"
        f" {one['survivors']} processes left over.\n\n| killed | times |\n| --- | --- |\n{places}",
        "disk": f"Full from the n-th flush on, for each of the {disk['syncs']} flushes of a run:"
        f" {disk['syncs_well']} of {disk['syncs']} ended in one line, or had ended before,\n"
        f"and were resumed to the same run. On a file system of its own with {disk['sizes']} amounts of"
        f" space, none to nearly enough: {disk['sizes_well']} of {disk['sizes']}.",
        "damage": f"| file | {' | '.join(harms)} |\n| --- |{' --- |' * len(harms)}\n{rows}\n\n"
        + f"{sum(counts.values())} in all: {', '.join(f'{count} {name}' for name, count in counts.items())}.",
    }


def label(outcome: str) -> str:
    """The outcome's name on the page."""
    name = outcome.partition(":")[0]
    return "reported" if name == "told" else name


def written(text: str, blocks: dict[str, str]) -> str:
    """The page's text with the blocks anew; each stands between its mark and the next heading."""
    for mark, block in blocks.items():
        pattern = rf"(<!-- {mark} -->\n\n).*?(\n\n## |\Z)"
        text, count = re.subn(pattern, lambda m, b=block: m[1] + b + m[2], text, count=1, flags=re.DOTALL)
        assert count == 1, mark
    return text


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        files = tiny_run.write_files(Path(place))
        for name in sys.argv[1:] or MEASURES:
            found[name] = MEASURES[name](files, Path(place) / name)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(name, json.dumps(found[name]), flush=True)
    PAGE.write_text(written(PAGE.read_text(), page(found)))
