"""CHANGELOG.md: one line for each capability, at most 600 words a release, links to pages that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WORDS = 600


def long_releases(text: str) -> list[str]:
    """Return the headings of releases with more words than MAX_WORDS, text before the first one included."""
    before, *releases = re.split(r"^## ", text, flags=re.M)
    return [
        release.splitlines()[0]
        for release in releases
        if len(before.split()) + len(release.split()) > MAX_WORDS
    ]


def long_entries(text: str) -> list[str]:
    """Return the entries that go on in a second line."""
    return re.findall(r"^- .*\n(?=[ \t]+\S)", text, flags=re.M)


def test_each_release_is_short():
    assert not long_releases((ROOT / "CHANGELOG.md").read_text())


def test_a_release_of_too_many_words_is_found():
    assert long_releases("# C\n\n## 0.2\n\n- a\n\n## 0.1\n\n" + "- word\n" * 300) == ["0.1"]


def test_each_capability_is_one_line():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.count("\n- ") > 30 and not long_entries(text)
    assert long_entries("- a\n- b\n  c\n- d\n") == ["- b\n"]


def test_its_links_resolve():
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "CHANGELOG.md").read_text())
    assert len(links) > 20 and not [link for link in links if not (ROOT / link).exists()]
