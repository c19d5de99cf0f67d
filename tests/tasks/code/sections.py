"""Read programs and tests from a text file: `=== name` begins an entry, `--- test` a part of it.

A line {NAME} stands for the entry of this name.
"""

import re
from pathlib import Path


def sections(name: str) -> dict[str, dict[str, str]]:
    """Return the parts of each entry of a file beside this one; the first part is the program."""
    text = (Path(__file__).parent / name).read_text()
    entries = dict(re.findall(r"^=== ([^\n]*)\n(.*?)(?=^=== |\Z)", text, re.MULTILINE | re.DOTALL))
    read = {}
    for key, body in entries.items():
        for macro in (each for each in entries if each.startswith("{")):
            body = body.replace(f"{macro}\n", entries[macro].strip("\n") + "\n")
        program, *parts = re.split(r"^--- (.*)\n", body.strip("\n") + "\n", flags=re.MULTILINE)
        read[key.strip("{}")] = {"program": program} | dict(zip(parts[::2], parts[1::2], strict=True))
    return read
