"""Experts in tiles: the same weights, the same products, and what does not fit stays as it is."""

import pytest
import torch

from qerl.formats import MXFP4, NVFP4
from qerl.formats.stack import PackedStack
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
    experts, plain = experts_of(MXFP4)
    plain.parts["scales"][1, 5] = torch.tensor([90, 130])
    assert not tile_experts(experts, ExpertRows.PLAIN) and experts.weight is plain
