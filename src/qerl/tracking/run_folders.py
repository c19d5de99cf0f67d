"""Find folders of runs, by their names alone: imports nothing heavy."""

from pathlib import Path


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, the newest first; none if it cannot be read."""
    try:
        files = [file for each in folder.iterdir() if (file := each / "run.json").is_file()]
        times = {file.parent: file.stat().st_mtime for file in files}
    except OSError:
        return []
    return sorted(times, key=lambda run: times[run], reverse=True)
