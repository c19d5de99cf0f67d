"""A stored run is read by every command that takes a run.

tests/data/stored_run is of commit 169ad83, in the folder of tiny_run.write_files("files"):

    qerl train demo_long <tiny_run.options> --num-steps 4 --learn.optim adamw_8bit --checkpoint.keep 1
        --evaluate.every 2

Its metrics, samples and config have the present names and checksums.
"""

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

import tiny_run
from qerl.cli.main import command
from qerl.config.stored import read_run_config

STORED = Path(__file__).parents[1] / "data" / "stored_run"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of the run beside its model and task, whose paths in run.json are relative."""
    monkeypatch.chdir(tmp_path)
    Path("files").mkdir()
    tiny_run.write_files(Path("files"))
    shutil.copytree(STORED, "run")
    return Path("run")


def test_the_stored_config_is_read():
    config = read_run_config(str(STORED))
    assert (config.num_generations, config.model.dtype, config.learn.optim) == (4, "fp32", "adamw_8bit")
    assert (config.engine.kv_cache_dtype, config.engine.block_size) == ("auto", 16)


def test_eval_reads_it(run, capsys):
    command(["eval", "run", "--num-prompts", "2", "--num-samples", "2", "--trust"])
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["num_prompts"], result["num_samples"]) == ("run", 2, 2)


def test_export_reads_it(run):
    command(["export", "run", "adapter", "--as", "peft"])
    assert len(load_file("adapter/adapter_model.safetensors")) == 2 * 2 * 7
    command(["export", "run", "merged", "--as", "merged"])
    assert "model.layers.1.mlp.down_proj.weight" in load_file("merged/model.safetensors")


def test_report_reads_it(run):
    command(["report", "run"])
    page = Path("run/report.html").read_text()
    assert page.count("engine.max_num_seqs") == 1
    assert "Held-out accuracy" in page and "100%" in page


def test_watch_reads_it(run):
    def work():
        command(["watch", "run", "--port", "0"])

    server = tiny_run.Forked(work)
    try:
        end_s = time.monotonic() + 60
        while "\n" not in server.written and time.monotonic() < end_s:
            time.sleep(0.01)
        address = server.written.split()[-1]
        update = httpx.get(f"{address}update").json()
    finally:
        server.kill()
        server.wait()
    assert update["data"]["runs"][0]["steps"] == [0, 1, 2, 3]
