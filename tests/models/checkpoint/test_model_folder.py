"""Folders with several formats, or with parts missing: what is read, and what the one line says."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qerl.errors import UserError
from qerl.models.checkpoint.model_folder import INDEX_NAME, check_folder, unused_files, weight_files
from qerl.models.checkpoint.notices import skipped_notices
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder


def folder_with(folder, *names, config="{}"):
    if config is not None:
        (folder / "config.json").write_text(config)
    for name in names:
        if name.endswith(".safetensors"):
            save_file({f"{name}.weight": torch.zeros(2, 2)}, folder / name)
        elif name == INDEX_NAME:
            (folder / name).write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors"}}))
        else:
            (folder / name).touch()
    return folder


def refusal(call, folder):
    with pytest.raises(UserError) as caught:
        call(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["model.safetensors", "consolidated.safetensors", "m.Q4_0.gguf"], ["model.safetensors"]),
        (["consolidated-00001-of-00002.safetensors", "one.safetensors"], ["one.safetensors"]),
        (["model.safetensors", "adapter_model.safetensors", "training_args.bin"], ["model.safetensors"]),
        (["x.safetensors", "adapter_model.safetensors", "pytorch_model.bin"], ["x.safetensors"]),
        ([INDEX_NAME, "model-1.safetensors", "model.safetensors"], ["model-1.safetensors"]),
        (
            ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
    ],
)
def test_one_copy_is_read_and_the_others_are_named(tmp_path, names, read):
    folder = folder_with(tmp_path, *names)
    assert [file.name for file in weight_files(check_folder(folder))] == read
    others = sorted(set(names) - set(read) - {INDEX_NAME, "training_args.bin"})
    assert unused_files(folder) == others
    said = skipped_notices(SafetensorsFolder(folder))
    assert said == [f"{folder}: not read: {', '.join(others)}"] * bool(others)


@pytest.mark.parametrize(
    ("names", "config", "says"),
    [
        ([], None, "is not a model: the folder is empty"),
        (["model.safetensors"], None, "is not a model: config.json is missing"),
        ([], "{}", "has no *.safetensors file"),
        (["m.gguf"], None, "config.json is missing; to load m.gguf, pass the file itself"),
        (["m.gguf", "consolidated.safetensors"], "{}", "to load m.gguf, pass the file itself"),
        (["consolidated.safetensors"], "{}", "consolidated.safetensors has Mistral's names"),
        (["adapter_config.json", "adapter_model.safetensors"], None, "an adapter; give its base model"),
        (["pytorch_model.bin"], "{}", "pickled weights such as pytorch_model.bin are never loaded; convert"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_what_to_do(tmp_path, names, config, says):
    assert says in refusal(check_folder, folder_with(tmp_path, *names, config=config))


def test_a_missing_part_is_named_with_and_without_an_index(tmp_path):
    folder = folder_with(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert "model-00002-of-00003.safetensors: is missing, one of 3 parts" in refusal(weight_files, folder)
    folder_with(tmp_path, INDEX_NAME)
    assert f"model-1.safetensors: is missing, but {INDEX_NAME} lists it" in refusal(weight_files, folder)


@pytest.mark.parametrize(
    ("index", "says"),
    [("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "has no weight_map")],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, index, says):
    folder = folder_with(tmp_path, "model.safetensors")
    (folder / INDEX_NAME).write_text(index)
    assert says in refusal(weight_files, folder)
