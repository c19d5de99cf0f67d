import pytest
import torch

from conftest import rms_error
from models.tiny import forest, oracle, packed, ported
from qerl.config import AdapterConfig
from qerl.formats import BF16, INT8, NVFP4
from qerl.kernels.attention.attention import PackedLayout, packed_attention
from qerl.kernels.tiles.nvfp4_decode import row_factors, swiglu_order, unpack
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.linear import QuantLinear
from qerl.models.mixture import copy_masters
from qerl.models.packed.packed_linear import PackedNVFP4, can_tile, project, tile_linears, tiles_of
from qerl.models.peft.adapter import add_adapter

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}

# What torch says when a backward pass is the first to use cuBLAS on its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def decoder_of(compute=torch.float32, weight_format=NVFP4, **settings):
    model = oracle("Qwen2", **(SIZES | settings))
    decoder = ported(model, compute=compute, weight_format=weight_format)
    add_adapter(decoder, AdapterConfig(rank=8), seed=0)
    for _, linear in decoder.linears():
        torch.nn.init.normal_(linear.lora_B, std=0.1, generator=torch.Generator().manual_seed(1))
        copy_masters([linear])
    return decoder


def outputs(decoder):
    trees = forest((90, (40, 20)), (50, ()))
    positions_T = packed(trees)[0].to(decoder.device)
    tokens_T = torch.arange(200, device=decoder.device) % 61
    layout = PackedLayout.of(trees, decoder.device)

    def attend(layer_index, q_TNH, k_TKH, v_TKH, options):
        return packed_attention(q_TNH, k_TKH, v_TKH, layout)

    hidden_TD = decoder(tokens_T, positions_T, attend)
    hidden_TD.float().square().sum().backward()
    return [hidden_TD, *(p.grad for p in decoder.parameters())]


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_a_tiled_decoder_computes_the_same_bits(compute):
    decoder = decoder_of(compute)
    want = outputs(decoder)
    decoder.zero_grad()
    for each in decoder.layers:
        each.tile()
    assert all(isinstance(linear.weight, PackedNVFP4) for _, linear in decoder.linears())
    for before, after in zip(want, outputs(decoder), strict=True):
        assert torch.equal(before, after)


def test_the_bytes_are_those_of_before_and_the_rows_factors():
    decoder = decoder_of()
    before, linears = decoder.num_bytes, dict(decoder.linears())
    for each in decoder.layers:
        each.tile()
    assert decoder.num_bytes == before + sum(4 * linear.out_width for linear in linears.values())
    packed_bytes = {id(t): t.nbytes for linear in linears.values() for t in linear.weight.tensors().values()}
    assert sum(linear.weight.num_bytes for linear in linears.values()) == sum(packed_bytes.values())


def test_the_weights_come_back_plain():
    decoder = decoder_of()
    before = {name: linear.weight for name, linear in decoder.linears()}
    for each in decoder.layers:
        each.tile()
    for name, linear in decoder.linears():
        plain, was = linear.weight.plain(), before[name]
        assert isinstance(plain, NVFP4) and linear.weight.shape == was.shape
        assert torch.equal(plain.codes, was.codes) and torch.equal(plain.global_scale, was.global_scale)
        assert torch.equal(plain.scales.view(torch.uint8), was.scales.view(torch.uint8))
        assert torch.equal(linear.weight.decode(), was.decode())
        assert torch.equal(linear.weight.alpha, was.alpha)


def test_a_layers_tiles_hold_its_linears_in_the_decode_kernels_order():
    decoder = decoder_of()
    layer = decoder.layers[1]
    qkv = [linear.weight for linear in layer.self_attn.qkv_projs]
    gate, up = (linear.weight for linear in layer.mlp.gate_up_projs)
    assert tiles_of(layer.self_attn.qkv_projs) is None
    for each in decoder.layers:
        each.tile()
    group = tiles_of(layer.self_attn.qkv_projs)
    codes, _ = unpack(group.tiles)
    assert torch.equal(codes, torch.cat([weight.codes for weight in qkv]))
    assert torch.equal(group.factors_N, torch.cat([row_factors(w.alpha, 64) for w in qkv]))
    group = tiles_of(layer.mlp.gate_up_projs)
    codes, _ = unpack(group.tiles)
    order = swiglu_order(128, codes.device)
    assert torch.equal(codes, torch.cat((gate.codes, up.codes))[order])
    factors = torch.cat([row_factors(w.alpha, 128) for w in (gate, up)])
    assert torch.equal(group.factors_N, factors[order])
    assert tiles_of((layer.mlp.down_proj,)).widths == tiles_of((layer.self_attn.o_proj,)).widths == (64,)


def test_weights_that_do_not_fit_stay_as_they_are():
    plain = decoder_of(weight_format=BF16)
    for each in plain.layers:
        each.tile()
    assert isinstance(plain.layers[0].mlp.down_proj.weight, BF16)
    narrow = decoder_of(intermediate_size=80)  # K = 80 for down, F = 80 for gate and up
    for each in narrow.layers:
        each.tile()
    assert tiles_of(narrow.layers[0].mlp.gate_up_projs) is None
    assert isinstance(narrow.layers[0].mlp.gate_proj.weight, NVFP4)
    assert isinstance(narrow.layers[0].self_attn.q_proj.weight, PackedNVFP4)


def test_large_weights_are_packed_in_pieces(monkeypatch, rng):
    monkeypatch.setattr("qerl.models.packed.packed_linear._CHUNK_WEIGHTS", 128 * 64)
    for rows, widths in ((UnpackRows.ALL, (192, 64, 320)), (UnpackRows.GATE_UP, (160, 160))):
        linears = []
        for n in widths:
            linear = QuantLinear(64, n, has_bias=False, compute=torch.float32, device=torch.device("cpu"))
            linear.load_weight(NVFP4.encode(torch.randn(n, 64, generator=rng)))
            linears.append(linear)
        before = [linear.operand() for linear in linears]
        assert tile_linears(linears, rows)
        group = tiles_of(linears)
        assert torch.equal(group.operand(torch.float32), torch.cat(before))
        for linear, operand in zip(linears, before, strict=True):
            assert torch.equal(linear.operand(), operand)
        assert tiles_of(linears[::-1]) is None and tiles_of(linears[:1]) is None
        x_TK = torch.randn(3, 64, generator=rng)
        for y, operand, linear in zip(project(x_TK, linears), before, linears, strict=True):
            torch.testing.assert_close(y, x_TK @ operand.T * linear.alpha)


def test_gate_and_up_of_other_shapes_are_not_tiled_together(rng):
    weights = [NVFP4.encode(torch.randn(n, 64, generator=rng)) for n in (64, 128)]
    assert can_tile(weights, UnpackRows.ALL) and not can_tile(weights, UnpackRows.GATE_UP)


@pytest.mark.gpu
@pytest.mark.parametrize("has_adapter", (False, True))
def test_on_a_gpu_joined_products_lose_no_more_than_separate_ones(has_adapter, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    x_TD = torch.randn(300, 576, generator=rng).bfloat16().to(device)
    for rows, widths in ((UnpackRows.ALL, (576, 192, 192)), (UnpackRows.GATE_UP, (1536, 1536))):
        linears = [_linear(576, n, 32 if has_adapter else None, device, rng) for n in widths]
        truth = [_exact(x_TD, linear) for linear in linears]
        separate = [linear(x_TD) for linear in linears]
        assert tile_linears(linears, rows)
        for got, plain, exact in zip(project(x_TD, linears), separate, truth, strict=True):
            assert rms_error(got, exact) <= 1.1 * rms_error(plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", [NVFP4, BF16, INT8], ids=lambda f: f.name)
def test_on_a_gpu_a_decoder_of_fused_products_loses_no_more_than_a_plain_one(
    weight_format, device, monkeypatch
):
    """Hidden states and gradients, against the same decoder in fp32; NVFP4 in tiles too."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    computes = (torch.float32, *[torch.bfloat16] * 3)
    decoders = [_on(device, decoder_of(compute, weight_format)) for compute in computes]
    for each in decoders[3].layers:
        each.tile()
    with monkeypatch.context() as apart:
        apart.setattr("qerl.models.packed.packed_linear._is_fused_on", lambda device: False)
        exact, plain = (outputs(decoder) for decoder in decoders[:2])
    plain_error, *errors = (
        [rms_error(g, e) for g, e in zip(got, exact, strict=True)]
        for got in (plain, *(outputs(decoder) for decoder in decoders[2:]))
    )
    assert decoders[2].layers[0].mlp.gate_proj.fused is not None
    for error in errors:
        assert error[0] <= 1.1 * plain_error[0]
        means = [torch.tensor(e).square().mean().sqrt() for e in (error, plain_error)]
        assert means[0] <= 1.1 * means[1]  # one gradient alone has few terms


def _on(device, decoder):
    decoder.to(device)
    decoder.device = device
    decoder._ropes = {name: (rope, f.to(device)) for name, (rope, f) in decoder._ropes.items()}
    for _, linear in decoder.linears():
        linear.load_weight(linear.weight.to(device))
        linear.a_work, linear.b_work = linear.a_work.to(device), linear.b_work.to(device)
    return decoder


def _linear(in_width, out_width, rank, device, rng):
    linear = QuantLinear(in_width, out_width, has_bias=True, compute=torch.bfloat16, device=device)
    linear.load_weight(NVFP4.encode(torch.randn(out_width, in_width, generator=rng).to(device)))
    linear.bias.copy_(torch.randn(out_width, generator=rng))
    if rank is not None:
        a_RK = torch.randn(rank, in_width, generator=rng) * in_width**-0.5
        linear.add_adapter(a_RK.to(device), torch.randn(out_width, rank, generator=rng).to(device), 0.5)
    return linear


def _exact(x_TD, linear):
    y = x_TD.double() @ linear.weight.decode().double().T
    if linear.bias is not None:
        y = y + linear.bias.double()
    if linear.a_work is not None:
        y = y + linear.scaling * (x_TD.double() @ linear.a_work.double().T) @ linear.b_work.double().T
    return y.detach()
