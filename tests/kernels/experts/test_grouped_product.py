import itertools

import pytest
import torch

from conftest import rms_error
from qerl.formats import NVFP4
from qerl.kernels.experts import grouped_product as op
from qerl.kernels.experts import routing
from qerl.kernels.experts.clamped_swiglu import clamped_swiglu
from qerl.kernels.experts.grouped_hopper import HopperGroupedProduct
from qerl.kernels.experts.grouped_product import (
    Activation,
    AdapterRows,
    ExpertAdapter,
    GroupedProduct,
    TiledExperts,
    grouped_tile,
    item_rows,
)
from qerl.kernels.experts.moe_route import MoERoute
from qerl.kernels.pointwise.swiglu import swiglu
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles.portable_tile import PortableTile
from qerl.models.random_weights import random_nvfp4


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("K", [2880, 2048, 768, 1024, 320, 64])
def test_the_rule_fits_every_card(name, K):
    card = ARCHITECTURES[name]
    for tokens, N in itertools.product(op.ITEM_ROWS, (64, 5760)):
        tile = grouped_tile(tokens, N, K, card)
        assert K % tile.k_block == 0 and tile.stages >= 3 and tile.tokens == tokens
        registers = min(168, 65_536 // (tile.threads * tile.ctas_per_sm))  # what __launch_bounds__ leave
        assert card.resident_ctas(tile.threads, registers, tile.shared_bytes) >= tile.ctas_per_sm


@pytest.mark.parametrize(
    ("rows", "chosen", "experts", "N", "K", "tile"),
    [
        (64, 4, 32, 5760, 2880, (16, 4, 2, 192, 3, 3)),  # gpt-oss-20b
        (64, 4, 32, 2880, 2880, (16, 4, 2, 192, 3, 3)),
        (256, 4, 32, 5760, 2880, (64, 4, 4, 64, 6, 2)),
        (256, 4, 32, 2880, 2880, (64, 8, 2, 192, 3, 1)),
        (256, 8, 128, 1536, 2048, (32, 8, 1, 256, 3, 2)),  # Qwen3-30B-A3B; as fast as (32, 4, 2, ...)
        (256, 8, 128, 2048, 768, (32, 8, 1, 256, 3, 2)),
        (256, 4, 128, 5760, 2880, (16, 4, 2, 192, 3, 3)),  # gpt-oss-120b: the items of 20b at 64
        (256, 4, 128, 2880, 2880, (16, 4, 2, 192, 3, 3)),
    ],
)
@pytest.mark.parametrize("name", ["sm_90a", "sm_100a"])
def test_a_decode_step_takes_the_fastest_of_the_measured_tiles(rows, chosen, experts, N, K, tile, name):
    items = item_rows(rows, chosen, experts)
    tokens, row_warps, *others = tile
    assert grouped_tile(items, N, K, ARCHITECTURES[name]) == PortableTile(tokens, row_warps, 1, *others)


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_120a"])
def test_a_card_with_less_shared_memory_keeps_its_ctas(name):
    for tokens in (8, 16):
        assert grouped_tile(tokens, 5760, 2880, ARCHITECTURES[name]).ctas_per_sm == 3


def test_an_item_has_room_for_what_an_expert_gets_when_rows_are_spread():
    assert [item_rows(rows, 4, 32) for rows in (1, 8, 64, 256)] == [8, 8, 16, 64]
    assert [item_rows(rows, 8, 128) for rows in (8, 64, 256)] == [8, 8, 32]


def experts_of(E, N, K, rng, *, biased):
    """Return each expert's weight, and the biases or None."""
    each = [random_nvfp4(N, K, rng) for _ in range(E)]
    bias = torch.randn(E, N, device=rng.device, generator=rng) if biased else None
    return each, bias


def tiled(each, bias, order=None):
    """Return TiledExperts; order: of the rows in the tiles."""
    order = slice(None) if order is None else order
    tiles = [
        nvfp4_decode.pack(w.codes[order], w.scales.view(torch.uint8)[order].view(torch.float8_e4m3fn))
        for w in each
    ]
    factors = torch.stack([nvfp4_decode.row_factors(w.alpha, len(w.codes)) for w in each])
    bias = None if bias is None else bias[:, order].contiguous()
    return TiledExperts(torch.stack(tiles), factors, bias)


def adapter_of(E, N, K, rows, rng):
    a, b = (torch.randn(E, *shape, device=rng.device, generator=rng).bfloat16() for shape in ((4, K), (N, 4)))
    return ExpertAdapter(a, b, 0.1, rows)


def logits_of(ids_BK, E, rng):
    """Return logits whose largest are those of ids."""
    logits = torch.rand(len(ids_BK), E, device=rng.device, generator=rng)
    return logits.scatter(1, ids_BK, torch.rand(ids_BK.shape, device=rng.device, generator=rng) + 2)


def torch_path(x_SK, offsets, each, bias, activation, adapter=None):
    """Compute it by PyTorch's 16-bit operations."""
    y = []
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        product = (x_SK[start:end] @ each[e].operand(torch.bfloat16).T).float() * each[e].alpha
        if adapter is not None:
            a, b = (t[e if len(t) > 1 else 0] for t in adapter[:2])
            product += (x_SK[start:end] @ a.T * adapter[2]) @ b.T
        product = (product if bias is None else product + bias[e]).bfloat16()
        y.append(product)
    y_SN = torch.cat(y)
    if activation is None:
        return y_SN
    gate, up = y_SN.chunk(2, 1)
    if activation.alpha is None:
        return swiglu(gate.contiguous(), up.contiguous())
    return clamped_swiglu(gate, up, alpha=activation.alpha, limit=activation.limit)


def ids_for(counts, num_chosen):
    """Return ids_BK whose experts have these counts: each row has different experts."""
    left, rows = list(counts), []
    while sum(left):
        best = sorted(range(len(left)), key=lambda e: -left[e])[:num_chosen]
        rows.append(sorted(best))
        for e in best:
            left[e] -= 1
    return torch.tensor(rows)


COUNTS = [
    *([n, 0, 0, 2] for n in (0, 1, 2, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 100, 129, 200, 254)),
    [0, 0, 256, 0],
    [60, 1, 0, 60],
    [64, 64, 64, 64],
]


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(params=[GroupedProduct, HopperGroupedProduct])
def kernels(request, device):
    if request.param is HopperGroupedProduct and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return request.param(device)


def swiglu_of(kernels, x, experts, routed, activation):
    return kernels.swiglu(x if kernels.gathers else routed.x_SK, experts, routed, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("activation", [None, Activation(None, 7.0), Activation(1.702, 7.0)], ids=str)
def test_no_less_exact_than_torch_for_every_group_size(counts, activation, kernels, device):
    rng = torch.Generator(device).manual_seed(sum(counts))
    E, N, K = len(counts), 192, 320
    ids = ids_for(counts, 1).to(device)
    each, bias = experts_of(E, N, K, rng, biased=True)
    x = torch.randn(len(ids), K, device=device, generator=rng).bfloat16()
    rows = routing.sort_rows(ids, E)
    offsets, x_SK = rows.offsets.tolist(), x[rows.tokens_S]
    weights = torch.stack([w.decode() for w in each])
    truth = op.reference(x_SK, offsets, weights, bias, activation)
    plain = torch_path(x_SK, offsets, each, bias, activation)
    routes = MoERoute(device)
    for tokens in op.ITEM_ROWS:
        routed = routes.route(logits_of(ids, E, rng), 1, "chosen", tokens, x_BK=x)
        if activation is None:
            got = kernels.linear(x_SK.contiguous(), tiled(each, bias), routed)
        else:
            order = nvfp4_decode.swiglu_order(N // 2, device)
            got = swiglu_of(kernels, x, tiled(each, bias, order), routed, activation)
        assert got.isfinite().all() and rms_error(got, truth) <= 1.1 * rms_error(plain, truth), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("nums", [(4, 4), (1, 4), (4, 1)], ids=("each", "shared_a", "shared_b"))
@pytest.mark.parametrize("rows", list(AdapterRows), ids=lambda rows: rows.name)
def test_adapters_are_no_less_exact_than_torch(rows, nums, rank, kernels, device):
    rng = torch.Generator(device).manual_seed(rank)
    counts, N, K = (5, 0, 70, 33), 192, 320
    ids = ids_for(counts, 1).to(device)
    each, bias = experts_of(len(counts), N, K, rng, biased=True)
    x = torch.randn(len(ids), K, device=device, generator=rng).bfloat16()
    sorted_rows = routing.sort_rows(ids, len(counts))
    offsets, x_SK = sorted_rows.offsets.tolist(), x[sorted_rows.tokens_S].contiguous()
    a = (torch.randn(nums[0], rank, K, device=device, generator=rng) / K**0.5).bfloat16()
    b = torch.randn(nums[1], N, rank, device=device, generator=rng).bfloat16()
    activation = None if rows is AdapterRows.AS_TILES else Activation(1.702, 7.0)
    weights, adapter = torch.stack([w.decode() for w in each]), (a, b, 0.5)
    truth = op.reference(x_SK, offsets, weights, bias, activation, adapter)
    without = op.reference(x_SK, offsets, weights, bias, activation)
    plain = torch_path(x_SK, offsets, each, bias, activation, adapter)
    routes = MoERoute(device)
    stored = torch.stack(b.chunk(2, 1), 2).flatten(1, 2) if rows is AdapterRows.ALTERNATING else b
    for tokens in op.ITEM_ROWS:
        routed = routes.route(logits_of(ids, len(counts), rng), 1, "chosen", tokens, x_BK=x)
        order = None if activation is None else nvfp4_decode.swiglu_order(N // 2, device)
        experts = tiled(each, bias, order)._replace(adapter=ExpertAdapter(a, stored, 0.5, rows))
        if activation is None:
            got = kernels.linear(x_SK, experts, routed)
        else:
            got = swiglu_of(kernels, x, experts, routed, activation)
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth), tokens
    assert rms_error(without, truth) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize(("F", "D", "E", "chosen"), [(2880, 2880, 8, 4), (768, 2048, 16, 8), (64, 64, 4, 2)])
def test_a_row_does_not_depend_on_its_batch(F, D, E, chosen, kernels, device):
    rng = torch.Generator(device).manual_seed(0)
    each, bias = experts_of(E, 2 * F, D, rng, biased=True)
    gate_up = tiled(each, bias, nvfp4_decode.swiglu_order(F, device))
    gate_up = gate_up._replace(adapter=adapter_of(E, 2 * F, D, AdapterRows.GATE_UP, rng))
    down = tiled(*experts_of(E, D, F, rng, biased=True))
    down = down._replace(adapter=adapter_of(E, D, F, AdapterRows.AS_TILES, rng))
    x = torch.randn(256, D, device=device, generator=rng).bfloat16()
    logits = torch.randn(256, E, device=device, generator=rng)
    h = torch.randn(256, D, device=device, generator=rng)
    routes = MoERoute(device)

    def run(rows, tokens):
        some = x[rows].contiguous()
        routed = routes.route(logits[rows].contiguous(), chosen, "chosen", tokens, x_BK=some)
        y = swiglu_of(kernels, some, gate_up, routed, Activation(1.702, 7.0))
        return routes.add(h[rows].clone(), kernels.linear(y, down, routed), routed, E)

    whole = run(slice(0, 256), 64)
    assert all(torch.equal(run(slice(0, 256), tokens), whole) for tokens in op.ITEM_ROWS)
    for start, end in ((0, 1), (5, 13), (100, 164), (255, 256)):
        assert torch.equal(run(slice(start, end), item_rows(end - start, chosen, E)), whole[start:end])


@pytest.mark.gpu
def test_the_weights_of_a_whole_mixture_give_its_output(kernels, device):
    """The steps together, against float64 of the definition of models/mixture.py."""
    rng = torch.Generator(device).manual_seed(1)
    E, F, D, B, chosen = 8, 128, 192, 37, 3
    each, bias = experts_of(E, 2 * F, D, rng, biased=False)
    lower, lower_bias = experts_of(E, D, F, rng, biased=True)
    x, h = (torch.randn(B, D, device=device, generator=rng) for _ in range(2))
    x, logits = x.bfloat16(), torch.randn(B, E, device=device, generator=rng)
    routes = MoERoute(device)
    routed = routes.route(logits, chosen, "all", 8, x_BK=x)
    y = swiglu_of(
        kernels, x, tiled(each, bias, nvfp4_decode.swiglu_order(F, device)), routed, Activation(None, 7.0)
    )
    got = routes.add(h.clone(), kernels.linear(y, tiled(lower, lower_bias), routed), routed, E, scale=0.5)
    ids, weights = (t.to(device) for t in routing.reference(logits, chosen, "all"))
    truth, plain = h.double(), h.clone()
    for b in range(B):
        for e, weight in zip(ids[b].tolist(), weights[b], strict=True):
            up_gate = op.reference(x[b : b + 1], [0, 1], each[e].decode()[None], None, Activation(None, 7.0))
            z = up_gate @ lower[e].decode().double().T + lower_bias[e].double()
            truth[b] += 0.5 * weight * z[0]
            half = torch_path(x[b : b + 1], [0, 1], [each[e]], None, Activation(None, 7.0))
            plain[b] += (
                0.5
                * weight.float()
                * torch_path(half, [0, 1], [lower[e]], lower_bias[e : e + 1], None)[0].float()
            )
    assert rms_error(got - h, truth - h) <= 1.1 * rms_error(plain - h, truth - h)


def test_the_reference_is_the_products_by_hand():
    weights = torch.eye(4).repeat(2, 1, 1)
    weights[1] *= 2
    x = torch.tensor([[1.0, 2, 3, 4], [1.0, 0, 0, 1]])
    assert op.reference(x, [0, 1, 2], weights).tolist() == [[1, 2, 3, 4], [2, 0, 0, 2]]
    got = op.reference(x, [0, 1, 2], weights, None, Activation(None, 7.0))
    assert torch.allclose(got[0, 0], torch.tensor(3 / (1 + 2.718281828**-1), dtype=torch.float64))
    assert isinstance(random_nvfp4(64, 64, torch.Generator()), NVFP4)
