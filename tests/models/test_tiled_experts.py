"""Experts in tiles: the same weights, the same products, and what does not fit stays as it is."""

import pytest
import torch

from conftest import rms_error
from qerl.formats import BF16, MXFP4, NVFP4
from qerl.formats.stack import PackedStack
from qerl.kernels import expert_product, grouped_linear
from qerl.kernels.nvfp4_decode import swiglu_order
from qerl.models.layer_spec import ExpertSpec
from qerl.models.mixture import ExpertLinear
from qerl.models.tiled_experts import ExpertRows, TiledStack, in_tile_order, tile_experts

CPU = torch.device("cpu")


def experts_of(kind, n=128, k=64, num=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    spec = ExpertSpec(name="x", num_experts=num, in_width=k, out_width=n, has_bias=True)
    experts = ExpertLinear(spec, torch.float32, CPU)
    weights = [torch.randn(n, k, generator=rng) * (1 + index) for index in range(num)]
    stack = PackedStack.of(num, (kind.encode(weight) for weight in weights))
    experts.load_weight(stack)
    experts.bias.copy_(torch.randn(num, n, generator=rng))
    return experts, stack


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
@pytest.mark.parametrize("rows", ExpertRows)
def test_an_expert_in_tiles_is_bitwise_the_same_weight(kind, rows):
    experts, plain = experts_of(kind)
    assert tile_experts(experts, rows) and isinstance(experts.weight, TiledStack)
    assert experts.weight.shape == plain.shape and len(experts.weight) == 3
    for tiled, stored in zip(experts.weight, plain, strict=False):
        assert torch.equal(tiled.decode(), stored.decode())
    ours, theirs = (torch.as_tensor(stack.alphas).reshape(3, -1) for stack in (experts.weight, plain))
    if kind is NVFP4:
        assert torch.equal(ours, theirs)
        assert torch.equal(experts.weight.factors_EN, theirs.expand(3, 128) * 2.0**19)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
def test_products_of_experts_in_tiles_are_bitwise_the_same(kind):
    experts, _ = experts_of(kind)
    x_SK, offsets = torch.randn(9, 64), torch.tensor([0, 4, 4, 9])
    before = experts(x_SK, offsets)
    tile_experts(experts, ExpertRows.ALTERNATING)
    assert torch.allclose(experts(x_SK, offsets), before, rtol=1e-5, atol=1e-5)
    assert experts.num_bytes == sum(t.nbytes for t in experts.tensors)


@pytest.mark.parametrize(("rows", "order"), [(ExpertRows.GATE_UP, 0), (ExpertRows.ALTERNATING, 1)])
def test_biases_follow_the_rows_of_the_tiles(rows, order):
    bias = torch.arange(128.0).expand(2, 128)
    gate, up = (bias[:, :64], bias[:, 64:]) if order == 0 else (bias[:, ::2], bias[:, 1::2])
    expected = torch.cat((gate, up), 1)[:, swiglu_order(64, CPU)]
    assert torch.equal(in_tile_order(bias, rows), expected)
    assert torch.equal(in_tile_order(bias, ExpertRows.PLAIN), bias)


def test_what_does_not_fit_tiles_stays_as_it_is():
    experts, plain = experts_of(NVFP4, n=96)
    assert not tile_experts(experts, ExpertRows.PLAIN) and experts.weight is plain
    for rows in ExpertRows:
        experts, plain = experts_of(BF16)
        assert not tile_experts(experts, rows) and experts.weight is plain
    experts, plain = experts_of(MXFP4)
    plain.parts["scales"][1, 5] = torch.tensor([90, 130])
    assert not tile_experts(experts, ExpertRows.PLAIN) and experts.weight is plain


@pytest.mark.parametrize("rows", ExpertRows)
@pytest.mark.parametrize("kind", (NVFP4, MXFP4))
def test_chosen_experts_are_unpacked_at_once_and_multiplied_by_one_product(kind, rows, rng):
    spec = ExpertSpec(name="mlp.experts.x", num_experts=6, in_width=64, out_width=128, has_bias=False)
    experts = ExpertLinear(spec, torch.float32, torch.device("cpu"))
    plain = PackedStack.of(6, (kind.encode(torch.randn(128, 64, generator=rng) * 3.0**e) for e in range(6)))
    experts.load_weight(plain)
    assert tile_experts(experts, rows)
    tiled = experts.weight
    out = torch.full((3, 128, 64), float("nan"))
    chosen_G = torch.tensor((1, 3, 4), dtype=torch.int32)
    tiled.unpack_chosen(chosen_G, out)
    assert torch.equal(out, torch.stack([tiled[e].operand(torch.float32) for e in (1, 3, 4)]))
    if kind is MXFP4:
        tiled.unpack_chosen(chosen_G, out, times_alpha=True)
        assert torch.equal(out, torch.stack([plain[e].decode() for e in (1, 3, 4)]))
        assert not torch.equal(out[0], tiled[1].operand(torch.float32))
        assert torch.equal(tiled.alpha_E.log2(), tiled.alpha_E.log2().round())
    ends, x_SK = [0, 3, 3, 10, 11, 11, 16], torch.randn(16, 64, generator=rng)
    weights = torch.stack([plain[e].decode() for e in range(6)])
    want = grouped_linear.reference(x_SK, ends, weights, None, None, None, 0.0)
    assert rms_error(expert_product.multiply(x_SK, ends, tiled, None, None), want) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ExpertRows)
def test_on_a_gpu_chosen_experts_are_unpacked_exactly(rows, rng, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    spec = ExpertSpec(name="mlp.experts.x", num_experts=6, in_width=192, out_width=256, has_bias=False)
    experts = ExpertLinear(spec, torch.bfloat16, device)
    weights = (NVFP4.encode(torch.randn(256, 192, generator=rng).to(device)) for _ in range(6))
    experts.load_weight(PackedStack.of(6, weights))
    want = torch.stack([experts.weight[e].operand(torch.bfloat16) for e in range(6)])
    assert tile_experts(experts, rows)
    out = torch.full((3, 256, 192), float("nan"), dtype=torch.bfloat16, device=device)
    chosen_G = torch.tensor((0, 2, 5), dtype=torch.int32, device=device)
    experts.weight.unpack_chosen(chosen_G, out)
    assert torch.equal(out, want[chosen_G.long()])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ExpertRows)
def test_on_a_gpu_powers_of_two_of_the_rows_are_multiplied_exactly(rows, rng, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    spec = ExpertSpec(name="mlp.experts.x", num_experts=6, in_width=192, out_width=256, has_bias=False)
    experts = ExpertLinear(spec, torch.bfloat16, device)
    spread = 2.0 ** torch.randint(-9, 9, (6, 256, 1), generator=rng)
    weights = (MXFP4.encode((torch.randn(256, 192, generator=rng) * each).to(device)) for each in spread)
    experts.load_weight(PackedStack.of(6, weights))
    want = torch.stack([experts.weight[e].operand(torch.bfloat16) for e in range(6)])
    assert tile_experts(experts, rows)
    out = torch.full((3, 256, 192), float("nan"), dtype=torch.bfloat16, device=device)
    chosen_G = torch.tensor((1, 2, 4), dtype=torch.int32, device=device)
    experts.weight.unpack_chosen(chosen_G, out, times_alpha=True)
    assert torch.equal(out, want[chosen_G.long()])
