"""The notebook runs from its first cell to its last on a tiny model, and holds no outputs."""

import json
from pathlib import Path

import tiny_run

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs():
    assert NOTEBOOK["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_the_notebook_loads_trains_plots_and_exports(tmp_path, monkeypatch):
    model = tiny_run.write_model(tmp_path / "model")
    first, *others = ["".join(cell["source"]) for cell in CELLS]
    assert CELLS[0]["metadata"]["tags"] == ["parameters"] and first.startswith("MODEL = ")
    # The cells run in one namespace, as in a kernel; the figure is saved instead of shown.
    cells = [f"MODEL, RUN, LEARNING_RATE = {str(model)!r}, 'run', 0.01", *others]
    script = "\n\n".join(cells).replace("plt.show()", "figure.savefig('figure.png')")
    (tmp_path / "cells.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    process = tiny_run.started(str(tmp_path / "cells.py"), environment={"MPLBACKEND": "agg"})
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    run = tmp_path / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 24
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        p.name for p in (run / "adapter").iterdir()
    }
    assert (tmp_path / "figure.png").stat().st_size > 1000 and "The sum of 12 + 30 is" in stdout
