"""The notebook runs from its first cell to its last on a tiny model, and holds the outputs of a whole run.

`python tests/test_notebook.py` runs it with its own model and stores the outputs anew; it needs nbclient and
ipykernel.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from qerl.config.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "examples" / "first_run.ipynb"
NOTEBOOK = json.loads(PLACE.read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join(text for output in cell["outputs"] for text in output.get("text", []))


def test_the_notebook_holds_the_outputs_of_one_whole_run():
    assert NOTEBOOK["nbformat"] == 4 and len({c["id"] for c in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert not [cell["id"] for cell in CELLS if any(o["output_type"] == "error" for o in cell["outputs"])]
    _, _, load, train, plot, samples, export = map(printed, CELLS)
    num_steps = RECIPES["demo"]().num_steps
    assert [f"step {i + 1}/{num_steps}  reward" in train for i in range(num_steps)] == [True] * num_steps
    assert load.count("The sum of") == export.count("The sum of") == 2 and samples.count("\n") == 5
    assert not plot and "image/png" in CELLS[4]["outputs"][0]["data"]


def test_the_outputs_name_no_folder_of_the_machine_that_ran_it():
    outputs = json.dumps([cell["outputs"] for cell in CELLS])
    assert not [place for place in ("/home/", "/root/", "/tmp/", "site-packages") if place in outputs]


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_the_notebook_loads_trains_plots_and_exports(tmp_path, monkeypatch, device):
    model = tiny_run.write_model(tmp_path / "model")
    parameters, *others = ["".join(cell["source"]) for cell in CELLS]
    assert CELLS[0]["metadata"]["tags"] == ["parameters"] and parameters.endswith(" = CPU")
    # The cells run in one namespace, as in a kernel; the figure is saved instead of shown.
    chosen = parameters.removesuffix("CPU") + device
    first = f"{chosen}\nRUN, MODEL, LEARNING_RATE = 'run', {str(model)!r}, 0.01"
    script = "\n\n".join([first, *others]).replace("plt.show()", "figure.savefig('figure.png')")
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
    digits = 6 if device == "GPU" else 2
    assert 10 ** (digits - 1) < max(addends(run)) <= 10**digits


def addends(run: Path) -> list[int]:
    with open(run / "samples.jsonl") as rows:
        words = [word for row in rows for word in json.loads(row)["prompt"].split()]
    return [int(word) for word in words if word.isdigit()]


def stored(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs as they are stored: displayed lines as one text, without warnings that name paths."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        data = output.get("data", {})
        if output["output_type"] == "display_data" and "image/png" not in data:
            output = {"name": "stdout", "output_type": "stream", "text": data["text/plain"]}
        if "site-packages" in "".join(output.get("text", "")):
            continue
        if kept and output["output_type"] == "stream" and kept[-1].get("name") == output["name"]:
            kept[-1] = {**kept[-1], "text": kept[-1]["text"] + output["text"]}
        else:
            kept.append(output)
    return kept


def execute() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.reads(PLACE.read_text(), 4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(output) for output in stored(cell.outputs)]
    PLACE.write_text(nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    execute()
