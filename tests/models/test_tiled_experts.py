"""Experts in tiles: the same weights, the same products, and what does not fit stays as it is."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import rms_error
from models.family_rows import oracle, save
from qerl.formats import BF16, MXFP4, NVFP4
from qerl.formats.stack import PackedStack
from qerl.kernels.experts import expert_product, grouped_linear
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles.nvfp4_decode import swiglu_order
from qerl.models import loader, random_weights
from qerl.models.checkpoint.source import locate
from qerl.models.layer_spec import ExpertSpec
from qerl.models.mixture import ExpertLinear
from qerl.models.tiled_experts import (
    ExpertRows,
    TiledStack,
    in_tile_order,
    stacked,
    tile_experts,
    tiled_stack,
)

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
@pytest.mark.parametrize("rows", ExpertRows)
def test_decode_steps_and_the_learner_multiply_by_the_same_numbers(kind, rows):
    rng, spread_N1 = torch.Generator().manual_seed(0), 4.0 ** torch.arange(-64, 64)[:, None].div(16).round()
    weights = [kind.encode(torch.randn(128, 64, generator=rng) * spread_N1) for _ in range(3)]
    stack = tiled_stack(3, weights.__getitem__, rows)
    order_N = in_tile_order(torch.arange(128.0)[None], rows)[0].long()
    chosen_G, out = torch.tensor([2, 0], dtype=torch.int32), torch.empty(2, 128, 64)
    stack.unpack_chosen(chosen_G, out, times_alpha=kind is MXFP4)
    for place, index in enumerate(chosen_G.tolist()):
        wanted_NK = weights[index].decode().double()
        codes, scales = nvfp4_decode.unpack(stack.tiles[index])
        factors_N1 = stack.factors_EN[index, :, None].double() / nvfp4_decode.ALPHA_FACTOR
        decoded_NK = NVFP4(codes, scales, torch.ones(1)).operand(torch.float32) * factors_N1
        alpha = 1 if kind is MXFP4 else weights[index].alpha.double()
        torch.testing.assert_close(decoded_NK, wanted_NK[order_N], rtol=0 if kind is MXFP4 else 1e-6, atol=0)
        torch.testing.assert_close(
            out[place].double() * alpha, wanted_NK, rtol=0 if kind is MXFP4 else 1e-6, atol=0
        )


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


class Largest(TorchDispatchMode):
    """Lists the bytes of the tensors that operations made, without views of others."""

    def __init__(self):
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        storages = [x.untyped_storage() for x in tree_leaves(out) if torch.is_tensor(x)]
        self.made += [storage.nbytes() for storage in storages if storage._cdata not in given]
        return out


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
def test_tiles_are_allocated_once_and_nothing_else_is_as_large_as_a_few_experts(kind):
    rng, num = torch.Generator().manual_seed(0), 64
    with Largest() as counted:
        stack = tiled_stack(
            num, lambda _: kind.encode(torch.randn(64, 64, generator=rng)), ExpertRows.GATE_UP
        )
    assert sum(size == stack.tiles.nbytes for size in counted.made) == 1
    rest = max(size for size in counted.made if size != stack.tiles.nbytes)
    assert rest <= 4 * 64 * 64 * 2 < stack.tiles.nbytes / 4  # one expert in float32, and int32 while packed


MIXTURE = dataclasses.replace(
    random_weights.SHAPES["gpt-oss-20b"],
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=97,
    layer_kinds=random_weights.SHAPES["gpt-oss-20b"].layer_kinds[:2],
    mixture=dataclasses.replace(random_weights.SHAPES["gpt-oss-20b"].mixture, num_experts=8, width=64),
)


def refuse(*_):
    raise AssertionError("a plain stack was made")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_random_experts_go_into_tiles_without_a_plain_stack(format, monkeypatch):
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda _: True)
    monkeypatch.setattr(PackedStack, "of", refuse)
    decoder = random_weights.random_decoder(
        MIXTURE, format=format, rank=16, device=CPU, seed=0, expert_rank=4
    )
    for _, experts in decoder.expert_linears():
        assert isinstance(experts.weight, TiledStack) and experts.a_work.shape == (8, 4, 64)
        assert 0.5 < experts.weight[3].decode().std() * 8 < 2


def test_experts_of_a_checkpoint_go_into_tiles_without_a_plain_stack(tmp_path, monkeypatch):
    folder = save(oracle("GptOss", hidden_size=64, intermediate_size=64, num_attention_heads=4), tmp_path)
    settings = {"format": "mxfp4", "compute": torch.bfloat16, "device": CPU, "resident": False}
    plain = loader.build_decoder(locate(str(folder)).open(), **settings)
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda _: True)
    monkeypatch.setattr(PackedStack, "of", refuse)
    tiled = loader.build_decoder(locate(str(folder)).open(), **settings)
    for (name, ours), (_, stored) in zip(tiled.expert_linears(), plain.expert_linears(), strict=True):
        assert isinstance(ours.weight, TiledStack), name
        pairs = zip(ours.weight, stored.weight, strict=False)
        assert all(torch.equal(a.decode(), b.decode()) for a, b in pairs), name


def test_a_stack_with_one_weight_that_does_not_fit_is_kept_plain(monkeypatch):
    weights = [MXFP4.encode(torch.randn(128, 64)) for _ in range(3)]
    weights[2].scales[5] = torch.tensor([90, 130])
    stack = stacked(3, weights.__getitem__, ExpertRows.PLAIN)
    assert isinstance(stack, PackedStack)
    assert all(torch.equal(stack[e].codes, weights[e].codes) for e in range(3))
