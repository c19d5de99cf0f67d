"""gpt-oss stores experts in MXFP4; transformers' own decoding of the same tensors is the oracle."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qerl.errors import UserError
from qerl.formats import MXFP4
from qerl.models.checkpoint.layouts.folder import QuantizedFolder
from qerl.models.checkpoint.layouts.layout import Layout, StoredWeight
from qerl.models.checkpoint.layouts.mxfp4_blocks import block_tensors, read_expert, read_layout
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder

NAME = "model.layers.0.mlp.experts.gate_up_proj"
E, N, GROUPS = 3, 20, 2


def stored(seed=0):
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (E, N, GROUPS, 16), dtype=torch.uint8, generator=rng)
    scales = torch.randint(100, 140, (E, N, GROUPS), dtype=torch.uint8, generator=rng)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}


def folder_of(tmp_path, tensors):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsFolder(tmp_path)


def test_experts_decode_to_what_transformers_decodes(tmp_path):
    tensors = stored()
    theirs_EKN = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32)
    folder = folder_of(tmp_path, tensors)
    experts = [read_expert(folder, NAME, expert) for expert in range(E)]
    assert torch.equal(torch.stack([expert.decode().T for expert in experts]), theirs_EKN)


def test_codes_are_not_changed_and_only_one_expert_is_read(tmp_path, monkeypatch):
    tensors, sizes = stored(), []
    folder = folder_of(tmp_path, tensors)
    plain = folder.read_rows
    monkeypatch.setattr(folder, "read_rows", lambda *at: sizes.append((t := plain(*at)).nbytes) or t)
    weights = read_layout(folder, {}).weights
    assert list(weights) == [NAME.replace("experts.", f"experts.{e}.") for e in range(E)]
    for e, weight in enumerate(weights.values()):
        expert = weight.read()
        assert isinstance(expert, MXFP4) and expert.shape == weight.shape == (N, GROUPS * 32)
        assert torch.equal(expert.codes, tensors[f"{NAME}_blocks"][e].flatten(1))
        assert torch.equal(expert.scales, tensors[f"{NAME}_scales"][e])
    assert max(sizes) == tensors[f"{NAME}_blocks"][0].nbytes


def test_what_is_written_is_what_is_read():
    tensors = stored()
    blocks, scales = tensors.values()
    written = block_tensors(NAME, blocks.flatten(2), scales)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scales": None}, f"has no tensor {NAME}_scales"),
        ({"blocks": None}, f"has no tensor {NAME}_blocks"),
        ({"blocks": torch.zeros(E, N, 32, dtype=torch.uint8)}, "must be [experts, N, K / 32, 16]"),
        ({"blocks": torch.zeros(E, N, GROUPS, 16)}, f"{NAME}_blocks must be torch.uint8, is torch.float32"),
        ({"scales": torch.zeros(E, N, 3, dtype=torch.uint8)}, "_scales is [3, 20, 3], must be [3, 20, 2]"),
        ({"scales": torch.full((E, N, GROUPS), 255, dtype=torch.uint8)}, "_scales holds NaN or infinity"),
        ({"scales": torch.full((E, N, GROUPS), 253, dtype=torch.uint8)}, "_scales holds NaN or infinity"),
    ],
)
def test_tensors_that_make_no_sense_are_named(tmp_path, change, says):
    tensors = stored() | {f"{NAME}_{key}": value for key, value in change.items()}
    folder = folder_of(tmp_path, {name: value for name, value in tensors.items() if value is not None})
    read = partial(read_expert, folder, NAME, 0)
    layout = Layout("gpt-oss", {"expert": StoredWeight((N, 32 * GROUPS), "MXFP4", "mxfp4", (), read)})
    with pytest.raises(UserError) as caught:
        QuantizedFolder(folder, layout).packed("expert")
    assert says in str(caught.value) and str(tmp_path) in str(caught.value)
