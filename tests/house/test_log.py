"""dev/log: each row of the index has its entry, each entry its row and its verdict, and the log is short."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LOG = ROOT / "dev" / "log"
INDEX = LOG / "index.md"
AREAS = sorted(path for path in LOG.glob("*.md") if path != INDEX and not path.name.startswith("archive-"))
MAX_WORDS, MAX_LINES = 10_000, 300
ROW = re.compile(r"^\|(\d{4}-\d\d-\d\d)\|(\w+)\|\[(.+)\]\((\S+)\)\|([a-z ]+)\|([0-9a-f]{8})\|$", re.M)
ENTRY = re.compile(
    r"(Kept|Not kept|Not built|Open|Measured): (\S.*)\n\n(\d{4}-\d\d-\d\d), ([\w ]+), ([0-9a-f]{8})\. \S"
)
PATH = re.compile(r"\bdev/[\w./-]*\.md\b")


class Claim(NamedTuple):
    date: str
    area: str
    claim: str
    link: str
    verdict: str
    commit: str


def anchor(heading: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def rows(index: str) -> list[Claim]:
    return [Claim(*row) for row in ROW.findall(index)]


def entries(area: str, text: str) -> Iterator[Claim]:
    """Yield the claims of an area's file; an entry without a verdict, date, place or commit is an error."""
    for entry in re.split(r"^##+ ", text, flags=re.M)[1:]:
        match = ENTRY.match(entry)
        assert match, f"{area}.md: no verdict, date, GPU and commit: {entry.splitlines()[0]}"
        verdict, claim, date, _, commit = match.groups()
        heading = entry.splitlines()[0]
        yield Claim(date, area, claim, f"{area}.md#{anchor(heading)}", verdict.lower(), commit)


def all_entries() -> list[Claim]:
    return [claim for path in AREAS for claim in entries(path.stem, path.read_text())]


def broken_links(text: str, place: Path, anchors: set[str]) -> list[str]:
    """Return the links of a page in the log whose file or heading does not exist."""
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [
        link
        for link in links
        if not (place / link.partition("#")[0]).exists() or ("#" in link and link not in anchors)
    ]


def missing_paths(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Return (file, path) of each page in dev/ that a file names and that does not exist."""
    return [
        (f, path) for f, text in texts.items() for path in PATH.findall(text) if not (ROOT / path).exists()
    ]


def test_the_links_of_the_index_resolve():
    index = INDEX.read_text()
    assert len(rows(index)) > 150
    assert not broken_links(index, LOG, {claim.link for claim in all_entries()})


def test_a_link_to_no_heading_or_no_file_is_found():
    links = "[a](head.md#kept-a) [b](head.md#kept-b) [c](none.md)"
    assert broken_links(links, LOG, {"head.md#kept-a"}) == ["head.md#kept-b", "none.md"]


def test_each_entry_has_its_row_and_each_row_its_entry():
    index = INDEX.read_text()
    assert len(rows(index)) == sum(line.startswith("|20") for line in index.splitlines())
    assert sorted(rows(index)) == sorted(all_entries())


def test_an_anchor_leads_to_one_entry():
    links = [claim.link for claim in all_entries()]
    assert len(links) == len(set(links))


@pytest.mark.parametrize("heading", ["Lost: u by wgmma", "u by wgmma", "Kept:", "Kept u by wgmma"])
def test_a_heading_without_a_verdict_is_an_error(heading):
    with pytest.raises(AssertionError, match="no verdict"):
        list(entries("head", f"# Head\n\n## {heading}\n\n2026-11-21, H200, 0123abcd. Text.\n"))


@pytest.mark.parametrize(
    "start", ["H200, 0123abcd. Text.", "2026-11-21, 0123abcd. Text.", "2026-11-21, H200. Text."]
)
def test_an_entry_without_date_place_or_commit_is_an_error(start):
    with pytest.raises(AssertionError, match="no verdict, date"):
        list(entries("head", f"# Head\n\n## Kept: a\n\n{start}\n"))


def test_newest_claims_come_first():
    lists = [rows(INDEX.read_text()), *(list(entries(path.stem, path.read_text())) for path in AREAS)]
    for claims in lists:
        dates = [claim.date for claim in claims]
        assert dates == sorted(dates, reverse=True), claims[0].area


def test_the_log_is_short():
    texts = [path.read_text() for path in (INDEX, *AREAS)]
    assert sum(len(text.split()) for text in texts) <= MAX_WORDS
    assert max(text.count("\n") for text in texts) <= MAX_LINES
    bodies = [
        entry.strip().split("\n")[2:]
        for text in texts[1:]
        for entry in re.split(r"^## ", text, flags=re.M)[1:]
    ]
    assert max(map(len, bodies)) <= 8


def test_pages_of_the_log_that_files_name_exist():
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a clone")
    ends = (".py", ".md", ".cu", ".cuh", ".toml", ".yml")
    here = "tests/house/test_log.py"
    files = [f for f in tracked.stdout.splitlines() if f.endswith(ends) and "archive-" not in f and f != here]
    texts = {f: (ROOT / f).read_text() for f in files if (ROOT / f).is_file()}
    assert sum("dev/log/" in text for text in texts.values()) > 10
    assert not missing_paths(texts)


def test_a_page_that_does_not_exist_is_found():
    assert missing_paths({"a.py": "(dev/log/head.md, dev/LOG.md)", "b.md": "`dev/log/none.md`"}) == [
        ("a.py", "dev/LOG.md"),
        ("b.md", "dev/log/none.md"),
    ]
