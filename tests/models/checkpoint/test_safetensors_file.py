import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoints import save_tiny
from qerl.errors import UserError
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder, load_whole, stored_names

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def save(folder, tensors, name="model.safetensors"):
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / name)
    return folder / name


def refusal(folder):
    with pytest.raises(UserError) as caught:
        SafetensorsFolder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_raw(folder, header, data=b""):
    (folder / "config.json").write_text("{}")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, rng):
    tensors = {str(d): (torch.randn(3, 8, generator=rng) * 9).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "line": torch.arange(5)}
    save(tmp_path, tensors)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.shapes) == set(tensors)
    for name, truth in reversed(tensors.items()):
        got = folder.read(name)
        assert got.dtype == truth.dtype and got.shape == truth.shape == folder.shapes[name]
        assert torch.equal(
            got.view(torch.uint8) if truth.dim() else got, truth.view(torch.uint8) if truth.dim() else truth
        )


def test_tensors_come_on_the_device_that_is_asked_for(tmp_path, device):
    truth = {"w": torch.arange(12.0).view(3, 4), "none": torch.zeros(0, 4)}
    save(tmp_path, truth)
    here = SafetensorsFolder(tmp_path)
    there = here.on(device)
    for name, tensor in truth.items():
        assert there.read(name).device.type == device.type and here.read(name).device.type == "cpu"
        assert torch.equal(there.read(name).cpu(), tensor)
    assert torch.equal(there.read_rows("w", slice(1, 3)).cpu(), truth["w"][1:3])


def test_the_shards_of_an_index_are_read_as_one_checkpoint(tmp_path):
    truth = save_tiny(tmp_path / "one").state_dict()
    save_tiny(tmp_path / "many").save_pretrained(tmp_path / "many", max_shard_size="40KB")
    (tmp_path / "many" / "model.safetensors").unlink(missing_ok=True)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    folder = SafetensorsFolder(tmp_path / "many")
    assert set(folder.shapes) == set(truth)
    assert all(torch.equal(folder.read(name), value) for name, value in truth.items())


def test_files_beside_an_index_or_model_safetensors_are_not_read(tmp_path):
    save(tmp_path, {"a": torch.ones(2)})
    save(tmp_path, {"a": torch.zeros(2)}, "consolidated.safetensors")
    assert SafetensorsFolder(tmp_path).read("a").sum() == 2


def test_a_missing_shard_is_named(tmp_path):
    save_tiny(tmp_path).save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: is missing" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save(tmp_path, {"a": torch.ones(2)}, "x.safetensors")
    save(tmp_path, {"a": torch.zeros(2)}, "y.safetensors")
    assert "y.safetensors: a is also in x.safetensors" in refusal(tmp_path)


def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path):
    save(tmp_path, {"a": torch.ones(2)})
    shutil.copytree(tmp_path, tmp_path / "inside")
    for name in ("../model.safetensors", "/etc/passwd", "model.bin", 3):
        index = {"weight_map": {"a": name}}
        (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "is not the name of a safetensors file" in refusal(tmp_path / "inside")


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 60])
def test_a_cut_header_is_refused(tmp_path, num_bytes):
    file = save(tmp_path, {"a": torch.ones(64)})
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert "model.safetensors: truncated" in refusal(tmp_path)


def test_a_cut_tensor_is_refused_before_anything_is_read(tmp_path):
    file = save(tmp_path, {"a": torch.ones(64)})
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors: truncated: a ends at byte" in refusal(tmp_path)


def test_a_file_cut_after_it_was_opened_is_refused_when_read(tmp_path):
    file = save(tmp_path, {"a": torch.ones(64)})
    folder = SafetensorsFolder(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated: a ends before its 256 bytes"):
        folder.read("a")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"a: its offsets 0..4 do not fit F32 \[2\]"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}, "do not fit"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "do not fit"),
        ({"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}, "a: its header entry is invalid"),
        ({"shape": [1], "data_offsets": [0, 4]}, "header entry is invalid"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "header entry is invalid"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}, "header entry is invalid"),
        ([], "header entry is invalid"),
    ],
)
def test_a_header_entry_that_makes_no_sense_is_refused(tmp_path, entry, says):
    write_raw(tmp_path, {"a": entry}, bytes(8))
    with pytest.raises(UserError, match=says):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xfe"])
def test_a_header_that_is_no_json_object_is_refused(tmp_path, header):
    write_raw(tmp_path, header)
    assert "not a safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    save(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text(text)
    assert "config.json: " in refusal(tmp_path)


def test_a_small_file_is_read_at_a_path_that_is_not_utf_8(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    file = save(folder, tensors)
    assert sorted(stored_names(file)) == ["a", "b"]
    found = load_whole(file)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
