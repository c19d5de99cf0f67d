"""Fill the tables that README.md, docs/*.md and dev/*.md mark:

<!-- table speed -->
...
<!-- end -->

Names: speed and exact (summary.py), those of TABLES in table.py, all (every one of these), gpus, cards,
conflicts, peers and vllm (peer_table.py) and rounding (rounding_cost.py); STUDY-headline, -verdicts and
-curve of gsm8k and gsm8k_small, parts of studies/STUDY, which `python -m studies pages` writes.
`tests/house/test_tables.py` holds the pages to the committed rows.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import table
from benchmarks.cards import card_tables
from benchmarks.conflicts import conflict_table
from benchmarks.peer_table import PEERS, peer_table, vllm_table
from benchmarks.rounding_cost import cost_table, read_accuracies, read_arms
from benchmarks.rows import Row, coverage, read_rows
from benchmarks.summary import exact_table, speed_table
from qerl.bench.record import RESULTS, ROOT
from qerl.errors import UserError

_MARKED = re.compile(r"<!-- table ([\w-]+) -->\n(?:.*?\n)??<!-- end -->", flags=re.DOTALL)
_STUDIES = ROOT / "studies"
TABLES: dict[str, Callable[[list[Row]], str]] = {
    "speed": speed_table,
    "exact": exact_table,
    "gpus": coverage,
    "cards": card_tables,
    "conflicts": lambda rows: conflict_table(),
    "peers": lambda rows: peer_table(read_rows(PEERS)),
    "vllm": lambda rows: vllm_table(read_rows(PEERS), rows),
    "rounding": lambda rows: cost_table(read_arms(), read_accuracies()),
    **{
        f"{study}-{part}": lambda rows, file=f"{study}/{part}.md": (_STUDIES / file).read_text().strip()
        for study in ("gsm8k", "gsm8k_small")
        for part in ("headline", "verdicts", "curve")
    },
    **table.TABLES,
    "all": table.all_tables,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    write: bool = False
    """Fill the marked tables of README.md, docs/ and dev/; otherwise print all tables."""


def write_tables(options: TableOptions) -> None:
    """Print all tables, or fill the marked tables of README.md, docs/ and dev/."""
    rows = read_rows(ROOT / RESULTS)
    if not options.write:
        names = (name for name in TABLES if name != "all")
        print("\n\n".join(f"## {name}\n\n{TABLES[name](rows)}" for name in names))
        return
    for page in pages(ROOT):
        text = page.read_text()
        filled = fill(text, rows, page.name)
        if filled != text:
            page.write_text(filled)
            print(page)


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "dev").glob("*.md"))]


def fill(text: str, rows: list[Row], page: str) -> str:
    """Return the text with every marked table made from the rows."""

    def marked(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise UserError(f"{page}: unknown table {name}; choose from {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n\n{TABLES[name](rows)}\n\n<!-- end -->"

    return _MARKED.sub(marked, text)
