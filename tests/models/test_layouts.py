"""Checkpoints of other tools: codes and logits of every family are those of the tools' own decoding."""

import copy
import functools

import pytest
import torch

from conftest import rms_error
from models import stored_layouts
from models.family_rows import ROWS as FAMILIES
from models.family_rows import oracle, save
from models.tiny import logits_of
from qerl.models.loader import build_decoder
from qerl.models.source import locate

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
CHANGES = {
    "GraniteMoeHybrid": {"shared_intermediate_size": 128},
    "Qwen3_5": {"linear_num_value_heads": 16, "linear_value_head_dim": 4},
    "Qwen3Next": {"linear_num_value_heads": 16, "linear_value_head_dim": 4},
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    @functools.cache
    def made(family):
        model = oracle(family, **WIDE, **CHANGES.get(family, {}))
        return model, save(model, tmp_path_factory.mktemp(family) / "float")

    return made


def load(folder, format):
    checkpoint = locate(str(folder)).open()
    return build_decoder(
        checkpoint, format=format, compute=torch.float32, device=torch.device("cpu"), resident=True
    )


EVERY_LAYOUT = "Llama", "Phi3", "Qwen3_5"  # of plain linears, of fused ones, of Gated DeltaNet
SOME = "ct-nvfp4", "ct-int4-asymmetric", "ct-fp8-channel", "modelopt-nvfp4", "fp8-128"
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in (stored_layouts.ROWS if family in EVERY_LAYOUT else SOME)
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_are_those_of_transformers_with_the_decoded_weights(model_of, tmp_path, family, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of(family)
    truth = stored_layouts.write(row, model, source, tmp_path / layout)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight_NK in truth.items():
            model.get_parameter(name).copy_(weight_NK if row.format else weight_NK.bfloat16())
        theirs_TV = model(TOKENS[None]).logits[0]
    ours_TV = logits_of(load(tmp_path / layout, row.format or "bf16"), TOKENS)
    assert rms_error(ours_TV, theirs_TV) < 1e-5


@pytest.mark.parametrize("layout", [name for name, row in stored_layouts.ROWS.items() if row.format])
def test_codes_that_fit_a_format_are_loaded_without_a_change(model_of, tmp_path, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of("Llama")
    stored_layouts.write(row, model, source, tmp_path / layout)
    checkpoint = locate(str(tmp_path / layout)).open()
    decoder = load(tmp_path / layout, row.format)
    for name, linear in decoder.linears():
        weight = linear.weight
        assert weight.name == row.format
        state = row.compress(model.get_parameter(f"model.{name}.weight"))
        stored = state.get("weight_packed", state.get("weight"))
        if stored.dtype == torch.int32:
            stored = stored_layouts.compressed_codes(state)
        assert torch.equal(weight.codes.view(torch.uint8), stored.view(torch.uint8))
        assert checkpoint.stored(f"model.{name}").kind == row.kind
