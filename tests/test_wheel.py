"""The wheel holds every file of src/qerl, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_package_and_its_data(tmp_path):
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    sources = {str(p.relative_to(tmp_path / "src")) for p in tmp_path.glob("src/**/*") if p.is_file()}
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == sources
    assert {Path(name).suffix for name in packed} >= {".py", ".html", ".css", ".js", ".cu", ".json"}
