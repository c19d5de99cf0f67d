"""Linears that stay in BF16 are those named, or those whose rounding alone changes most a byte."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.checkpoints import save_tiny, store_in_bf16
from models.family_rows import oracle
from qerl.config.options import QuantizeOptions
from qerl.cost.weights import embedding_bytes, linear_weights, weight_bytes
from qerl.errors import UserError
from qerl.formats import BF16, NVFP4
from qerl.learner.plan.shapes import read_architecture
from qerl.models.checkpoint.encoding import default_scales
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of, linear_groups
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized
from qerl.models.quantize.kept_linears import (
    GroupSensitivity,
    budget_share,
    describe,
    named_linears,
    sensitivities,
    within_budget,
)
from qerl.models.quantize.quantization_error import Probe

TOKENS = torch.arange(3, 60).mul(7).remainder(250)
CPU = torch.device("cpu")


def weight_of(model, name):
    weight = model.get_parameter(f"{name}.weight")
    assert isinstance(weight, torch.Tensor)
    return weight.data


def decoder_of(checkpoint, format, resident=True):
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=CPU, resident=resident)


@torch.no_grad()
def logits_of(model):
    return model(TOKENS[None]).logits[0].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("resident", [True, False])
def test_a_group_s_kl_is_that_of_a_float64_model_with_it_alone_rounded(tmp_path, family, resident):
    save_tiny(tmp_path, family, dtype=torch.bfloat16)
    checkpoint = locate(str(tmp_path)).open()
    decoder, probe = decoder_of(checkpoint, "bf16", resident), Probe(tokens_T=TOKENS.tolist(), start=0)
    calls = list[tuple[int, int, str]]()
    results = sensitivities(
        decoder, checkpoint, [probe], "nvfp4", default_scales, lambda *call: calls.append(call)
    )
    assert calls == [(1, 2, "layers"), (2, 2, "layers")]
    rounded = {
        name: x.weight for name, x in decoder_of(checkpoint, "nvfp4").linears() if x.weight is not None
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    p_TV = logits_of(model)
    assert [group.names for group in results] == linear_groups(architecture_of(checkpoint))
    for group in results:
        exact = {name: weight_of(model, name).clone() for name in group.names}
        for name in group.names:
            weight = rounded[name.removeprefix("model.")].decode()
            weight_of(model, name).copy_(weight)
        expected = (p_TV.exp() * (p_TV - logits_of(model))).sum(-1).mean().item()
        for name, weight in exact.items():
            weight_of(model, name).copy_(weight)
        torch.testing.assert_close(group.kl, expected, rtol=5e-3, atol=1e-8)
        weights = [rounded[name.removeprefix("model.")] for name in group.names]
        assert group.packed_bytes == sum(weight.num_bytes for weight in weights)
    assert all(isinstance(linear.weight, BF16) for _, linear in decoder.linears())
    assert all(linear.is_resident == resident for _, linear in decoder.linears())


def group(name, kl, extra_bytes):
    return GroupSensitivity(names=(name,), kl=kl, packed_bytes=100, extra_bytes=extra_bytes)


def test_a_budget_is_spent_by_kl_a_byte_and_never_exceeded():
    groups = [group("a", 1.0, 20), group("b", 3.0, 30), group("c", 1.0, 10), group("d", 1.0, 10)]
    names = {share: [x.names[0] for x in within_budget(groups, share)] for share in (0.01, 0.05, 0.1, 0.125)}
    assert names == {0.01: [], 0.05: ["c", "d"], 0.1: ["b", "c"], 0.125: ["b", "c", "d"]}
    line = "bf16: c, d; 20 bytes more (5.0%); rounded alone they cost 2.0000 of 6.0000 nats per token"
    assert describe(within_budget(groups, 0.05), groups) == line


def test_names_keep_whole_groups(tmp_path):
    save_tiny(tmp_path)
    architecture = architecture_of(locate(str(tmp_path)).open())
    qkv = tuple(f"model.layers.1.self_attn.{x}_proj" for x in "qkv")
    assert named_linears(architecture, ["layers.1.self_attn.k_proj"]) == qkv
    down = named_linears(architecture, ["mlp.down_proj"])
    assert down == tuple(f"model.layers.{i}.mlp.down_proj" for i in range(architecture.num_layers))
    for wrong, near in (
        ("down_prj", "down_proj"),
        ("layers.0.mlp.dwn_proj", "layers.0.mlp.down_proj"),
        ("own_proj", "down_proj"),
    ):
        with pytest.raises(UserError, match=f"{wrong}: the model has no such linear; did you mean .*{near}"):
            named_linears(architecture, [wrong])


@pytest.mark.parametrize("asked", [("0%",), ("101%",), ("x%",), ("3%", "down_proj"), ("-1%",)])
def test_a_wrong_budget_is_refused(asked):
    with pytest.raises(UserError, match="must be names, or one budget such as 3%"):
        budget_share(asked)
    assert (budget_share(("2.5%",)), budget_share(("down_proj",))) == (0.025, None)


def test_calibrated_codes_are_refused(tmp_path):
    with pytest.raises(UserError, match="--keep-bf16 needs --calibrate none, got awq"):
        QuantizeOptions(model="m", out=tmp_path, calibrate="awq", data=tmp_path, keep_bf16=("down_proj",))


def test_kept_linears_are_written_in_bf16_and_read_by_transformers(tmp_path):
    save_tiny(tmp_path / "float")  # in float32
    source = locate(str(tmp_path / "float")).open()
    kept = named_linears(architecture_of(source), ["layers.0.mlp.down_proj", "layers.1.self_attn.q_proj"])
    write_quantized(str(tmp_path / "float"), tmp_path / "mixed", bf16_linears=kept)
    checkpoint = locate(str(tmp_path / "mixed")).open()
    assert set(kept) < set(checkpoint.config["quantization_config"]["ignore"])
    mixed, packed = decoder_of(checkpoint, "nvfp4"), dict(decoder_of(source, "nvfp4").linears())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", dtype=torch.bfloat16)
    theirs(TOKENS[None])  # the first forward decompresses
    for name, linear in mixed.linears():
        is_kept = f"model.{name}" in kept
        plain = packed[name].weight
        assert plain is not None and isinstance(linear.weight, BF16 if is_kept else NVFP4)
        exact = source.read(f"model.{name}.weight").bfloat16().float()
        ours = linear.weight.decode()
        assert torch.equal(ours, exact if is_kept else plain.decode())
        their_weight = theirs.get_submodule(f"model.{name}").weight.float()
        torch.testing.assert_close(their_weight, ours, rtol=0 if is_kept else 2**-7, atol=0)


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_the_plan_counts_the_bytes_of_linears_in_bf16(tmp_path, format):
    """Also where one linear of a group alone is in BF16; tiles have a factor for each output besides."""
    save_tiny(tmp_path / "float", dtype=torch.bfloat16)
    write_quantized(str(tmp_path / "float"), tmp_path / "mixed")
    in_bf16 = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"]
    store_in_bf16(tmp_path / "mixed", tmp_path / "float", in_bf16)
    decoder = decoder_of(locate(str(tmp_path / "mixed")).open(), format, resident=False)
    architecture = read_architecture(str(tmp_path / "mixed"))
    planned = weight_bytes(architecture, format) + embedding_bytes(architecture, element_bytes=4)
    packed = [x for name, x in decoder.linears() if f"model.{name}" not in in_bf16] * (format == "nvfp4")
    assert planned - decoder.num_bytes == sum(4 * x.out_width - 4 for x in packed)
    weights = sum(x.out_width * x.in_width for _, x in decoder.linears())
    plain = sum(x.out_width * x.in_width for name, x in decoder.linears() if f"model.{name}" in in_bf16)
    assert linear_weights(architecture) == (weights - plain, plain)


def test_ignore_has_the_names_of_the_checkpoint_s_class(tmp_path):
    model = oracle("Phi3")
    model.save_pretrained(tmp_path / "float")
    kept = named_linears(architecture_of(locate(str(tmp_path / "float")).open()), ["0.self_attn.k_proj"])
    write_quantized(str(tmp_path / "float"), tmp_path / "mixed", bf16_linears=kept)
    checkpoint = locate(str(tmp_path / "mixed")).open()
    qkv = "model.layers.0.self_attn.qkv_proj"
    assert checkpoint.config["quantization_config"]["ignore"] == ["lm_head", qkv]
    assert qkv in dict(model.named_modules())
    assert architecture_of(checkpoint).bf16_linears == {name.removeprefix("model.") for name in kept}
