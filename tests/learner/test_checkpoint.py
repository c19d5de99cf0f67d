import json
import os
import random
import resource
import shutil
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch

import tiny_run
from learner import saver
from learner.samples import random_groups
from learner.saver import mark, save
from learner.tiny import VOCAB, tiny_learner
from qerl.errors import RunError, UserError
from qerl.learner import checkpoint
from qerl.learner.checkpoint import CheckpointError, latest_adapter, load_latest
from qerl.models.checkpoint.source import base_name

FILES = [
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved(folder, *steps, keep=9):
    """Checkpoints at these steps, the weights of each filled with its step."""
    learner = tiny_learner()
    for next_step in steps:
        mark(learner, next_step)
        save(folder, learner, next_step=next_step, keep=keep, extra={"marked": next_step})


def loaded_step(folder):
    """The step gone back to; the learner, state and extra must all be of it."""
    learner = tiny_learner()
    next_step, extra, _ = load_latest(folder, learner)
    assert extra == {"marked": next_step}
    assert all((tensor == next_step).all() for tensor in learner.adapter_state().values())
    return next_step


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


@pytest.mark.parametrize("first", [1, 2])
def test_a_resumed_learner_goes_on_bit_for_bit(first, folder, rng):
    """Weights, moments and metrics, where the gradient, AdamW's step and the schedule all matter."""
    steps = [random_groups(4, 3, vocab=VOCAB, rng=rng) for _ in range(3)]
    learn = {"updates_per_step": 2, "warmup_ratio": 0.2, "weight_decay": 0.1}
    through, before, after = (tiny_learner(learn=learn) for _ in range(3))
    want = [through.step(groups) for groups in steps]

    for groups in steps[:first]:
        before.step(groups)
    save(folder, before, next_step=first, keep=1, extra={"seen": [1, 2.5, "x"]})
    assert load_latest(folder, after) == (first, {"seen": [1, 2.5, "x"]}, [])
    got = [after.step(groups) for groups in steps[first:]]

    assert got == want[first:] and after.version == through.version == 6
    for a, b in (
        (after.adapter_state(), through.adapter_state()),
        (after.optimizer_state(), through.optimizer_state()),
    ):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_before_the_first_update_there_is_something_to_save_too(folder):
    learner = tiny_learner()
    save(folder, learner, next_step=0, keep=1)
    assert load_latest(folder, tiny_learner()) == (0, {}, [])


def test_loading_drops_the_moments_the_learner_had(folder, rng):
    fresh, used = tiny_learner(), tiny_learner()
    save(folder, fresh, next_step=0, keep=1)
    used.step(random_groups(4, 3, vocab=VOCAB, rng=rng))
    load_latest(folder, used)
    assert used.optimizer_state() == {} and used.version == 0


def test_where_nothing_was_saved_nothing_is_loaded(folder):
    assert load_latest(folder, tiny_learner()) is None
    folder.mkdir()
    (folder / "notes.txt").write_text("not ours")
    assert load_latest(folder, tiny_learner()) is None
    assert names(folder) == ["notes.txt"]


def test_the_newest_by_number_is_loaded_and_only_so_many_are_kept(folder):
    saved(folder, 5, 10, 999_999, 1_000_005, keep=3)
    assert names(folder) == ["step-000010", "step-1000005", "step-999999"]
    assert loaded_step(folder) == 1_000_005


def test_the_folder_is_an_adapter_as_peft_writes_it(folder):
    learner = tiny_learner()
    path = save(folder, learner, next_step=1, keep=1)
    tensors = safetensors.torch.load_file(path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert tensors.keys() == learner.adapter_state().keys()
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (
        4,
        8.0,
        0.0,
        "none",
    )
    assert config["target_modules"] == list(learner.config.adapter.target_modules)
    assert config["base_model_name_or_path"] == base_name(learner.config.model.path)


def test_the_adapter_alone_can_be_read_while_the_run_goes_on(folder):
    """The newest whole checkpoint is read; what a save is just writing is left alone."""
    saved(folder, 5, 10)
    flip(folder / "step-000010" / "optimizer.safetensors")
    (folder / ".unfinished-step-000015").mkdir()
    tensors = latest_adapter(folder)
    assert tensors.keys() == tiny_learner().adapter_state().keys()
    assert all((tensor == 5).all() for tensor in tensors.values())
    assert names(folder) == [".unfinished-step-000015", "step-000005", "step-000010"]


def test_a_checkpoint_that_the_run_removes_while_it_is_read_gives_way_to_a_newer(monkeypatch, folder):
    """Once before it is looked at, once between that and reading it."""
    saved(folder, 1, keep=1)
    find_damage = checkpoint.find_damage

    def meanwhile(path):
        if path.name == "step-000001":
            saved(folder, 2, keep=1)
        damage = find_damage(path)
        if path.name == "step-000002":
            saved(folder, 3, keep=1)
        return damage

    monkeypatch.setattr(checkpoint, "find_damage", meanwhile)
    assert all((tensor == 3).all() for tensor in latest_adapter(folder).values())


def test_a_folder_without_a_checkpoint_has_no_adapter_to_read(folder):
    with pytest.raises(UserError, match="holds no checkpoint"):
        latest_adapter(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, truncate, empty, delete])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(name, harm, folder):
    saved(folder, 5, 10)
    harm(folder / "step-000010" / name)
    assert loaded_step(folder) == 5
    (notice,) = load_latest(folder, tiny_learner()).notices
    # A bit of the manifest may be one of another file's checksum.
    blamed = name if (name, harm) != ("manifest.json", flip) else ""
    assert notice.startswith(f"checkpoints/step-000010 is damaged ({blamed}")
    assert notice.endswith("); using step-000005") and "\n" not in notice


def test_a_checksum_that_differs_is_said(folder):
    saved(folder, 5, 10)
    flip(folder / "step-000010" / "adapter_model.safetensors")
    assert load_latest(folder, tiny_learner()).notices == [
        "checkpoints/step-000010 is damaged (adapter_model.safetensors: checksum differs); using step-000005"
    ]


@pytest.mark.parametrize(
    "manifest", ["[]", "3", "null", '{"sha256": 3}', '{"sha256": {}}', '{"sha256": []}', "\xff"]
)
def test_a_manifest_of_another_form_is_damage_too(manifest, folder):
    saved(folder, 5, 10)
    (folder / "step-000010" / "manifest.json").write_text(manifest, encoding="latin-1")
    assert loaded_step(folder) == 5


def test_without_a_whole_checkpoint_the_run_is_not_started_over(folder):
    saved(folder, 5, 10)
    for step in ("step-000005", "step-000010"):
        flip(folder / step / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"step-000010 is damaged.*step-000005 is damaged.*and train"):
        load_latest(folder, tiny_learner())


def test_saving_after_going_back_replaces_what_was_abandoned(folder):
    """Going on from 5, the damaged 10 must not outlive the new 6 as the newest."""
    saved(folder, 5, 10)
    flip(folder / "step-000010" / "state.json")
    saved(folder, 6, keep=1)
    assert names(folder) == ["step-000006"]


def test_a_checkpoint_of_the_same_step_is_replaced(folder):
    saved(folder, 5, 10)
    flip(folder / "step-000010" / "state.json")
    saved(folder, 10, keep=2)
    assert names(folder) == ["step-000005", "step-000010"]
    assert loaded_step(folder) == 10


def test_of_two_of_the_same_step_the_one_that_replaced_the_other_is_loaded(folder):
    saved(folder, 5, 10)
    (folder / "step-000005").rename(folder / "step-000010-replaced")
    assert loaded_step(folder) == 10
    shutil.rmtree(folder / "step-000010")
    assert loaded_step(folder) == 5


def test_what_a_killed_save_left_is_in_nobodys_way(folder):
    for name in ("step-000005", "step-000010"):
        (folder / f".unfinished-{name}" / "manifest.json").mkdir(parents=True)
    saved(folder, 10)
    assert names(folder) == ["step-000010"]


class Killed(BaseException):
    """Stands for the end of the process: nothing in the package may catch it."""


@contextmanager
def killed_at(event: int):
    """Every fsync, rename and removal of a tree is an event; the process ends just before this one."""
    left = event
    originals = {(os, "fsync"): os.fsync, (os, "rename"): os.rename, (shutil, "rmtree"): shutil.rmtree}

    def dying(original):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for (module, name), original in originals.items():
            patch.setattr(module, name, dying(original))
        yield


@pytest.mark.parametrize(("next_step", "keep"), [(10, 2), (15, 1)])
def test_killed_at_any_moment_of_a_save_the_old_or_the_new_is_loaded(next_step, keep, folder, tmp_path):
    """Into a folder with 5 and 10: one of the same step is replaced, or older ones are removed."""
    saved(tmp_path / "before", 5, 10)
    learner, seen = tiny_learner(), set()
    mark(learner, next_step)
    for event in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "before", folder)
        try:
            with killed_at(event):
                save(folder, learner, next_step=next_step, keep=keep, extra={"marked": next_step})
        except Killed:
            seen.add(loaded_step(folder))
            assert not [name for name in names(folder) if name.startswith(".")]
            saved(folder, 20, keep=keep)
            assert loaded_step(folder) == 20 and len(names(folder)) == keep
        else:
            break
    assert event > 7  # five files and two folders are flushed, at least one is renamed
    assert seen == {10, next_step}


def test_killed_for_real_while_saving_without_end(folder):
    """Eight kills at a time, until one has come in the middle of a save."""
    left = []
    for seed in range(10):
        delays_ms = random.Random(seed).sample(range(300), k=8)
        process = tiny_run.started(saver.__file__, str(folder / str(seed)), *map(str, delays_ms))
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        left += [names(folder / str(seed) / str(delay_ms)) for delay_ms in delays_ms]
        for delay_ms in delays_ms:
            assert loaded_step(folder / str(seed) / str(delay_ms)) >= 1
        if any(".unfinished" in name for found in left for name in found):
            return
    raise AssertionError(left)


@contextmanager
def largest_file(num_bytes: int):
    """The kernel refuses to let a file of this process grow beyond it: OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 100, 1000, 10_000])
def test_a_save_that_runs_out_of_space_leaves_the_last_one_and_no_rubbish(num_bytes, folder):
    """The adapter takes about 13 kB here, its config 500 bytes."""
    saved(folder, 5)
    with largest_file(num_bytes), pytest.raises(CheckpointError, match="step-000010: File too large"):
        saved(folder, 10)
    assert names(folder) == ["step-000005"]
    assert loaded_step(folder) == 5


def test_a_checkpoint_error_is_one_line_for_the_command_line(folder, tmp_path):
    folder.write_text("a file is in the way")
    with pytest.raises(RunError) as caught:
        saved(folder, 5)
    assert "\n" not in str(caught.value) and str(folder / "step-000005") in str(caught.value)


def test_a_checkpoint_reaches_the_disk_before_it_has_its_name_and_has_it_before_others_go(
    folder, monkeypatch
):
    """A power cut would test this order of flushes (by file name) and renames."""
    saved(folder, 5)
    events, fsync, rename = [], os.fsync, os.rename

    def flushed(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source, target):
        events.append(f"-> {os.path.basename(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    saved(folder, 10, keep=1)
    assert events == [
        *FILES,
        ".unfinished-step-000010",
        "-> step-000010",
        "checkpoints",
        "-> .unfinished-step-000005",
        "checkpoints",
    ]


def test_nothing_in_a_checkpoint_is_a_pickle(folder):
    saved(folder, 5)
    assert {path.suffix for path in (folder / "step-000005").iterdir()} == {".safetensors", ".json"}
    assert sorted(names(folder / "step-000005")) == sorted(FILES)
    assert checkpoint.find_damage(folder / "step-000005") is None


def test_what_a_killed_copy_left_is_not_in_the_way_of_the_next(tmp_path):
    saved(tmp_path / "from", 3)
    folder = tmp_path / "run" / "checkpoints"
    (folder / ".unfinished-step-000003" / "half").mkdir(parents=True)
    checkpoint.copy(tmp_path / "from" / "step-000003", folder)
    assert [path.name for path in folder.iterdir()] == ["step-000003"]
    assert checkpoint.find_damage(folder / "step-000003") is None


@pytest.mark.parametrize("write", ["saved", "copied"])
def test_a_checkpoint_and_every_name_above_it_are_on_the_disk(tmp_path, monkeypatch, write):
    synced, fsync = set(), os.fsync

    def recorded(number):
        synced.add(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    saved(tmp_path / "from", 3)
    monkeypatch.setattr(os, "fsync", recorded)
    if write == "saved":
        saved(tmp_path / "run" / "checkpoints", 3)
    else:
        checkpoint.copy(tmp_path / "from" / "step-000003", tmp_path / "run" / "checkpoints")
    folder = tmp_path / "run" / "checkpoints"
    assert {str(path) for path in (tmp_path, tmp_path / "run", folder)} <= synced
    unfinished = folder / ".unfinished-step-000003"
    assert {str(path) for path in (unfinished, *(unfinished / name for name in FILES))} <= synced
