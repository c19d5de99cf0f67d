"""Adapters by row: each row has the bits of its adapter alone, and the float64 reference's values."""

import pytest
import torch

from conftest import rms_error
from kernels.tiles.test_nvfp4_decode import case, torch_path
from qerl.kernels.runtime.architectures import architecture_of
from qerl.kernels.tiles import nvfp4_decode as op
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.kernels.tiles.lora_shrink_portable import PortableLoraShrink
from qerl.kernels.tiles.packed_product import PackedAdapter
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.row_slots import MAX_SLOTS, RowSlots, expand, hidden
from qerl.models.linear_pass import RowAdapters

MIXES = {
    "sorted": lambda M, S: torch.arange(M) * S // M,
    "in turns": lambda M, S: torch.arange(M) % S,
    "one": lambda M, S: torch.full((M,), S - 1),
    "none": lambda M, S: torch.zeros(M),
}


def test_the_reference_is_that_of_passes_by_torch(rng):
    S, R, K, N = 3, 4, 16, 24
    a, b = torch.randn(S, R, K, generator=rng), torch.randn(S, N, R, generator=rng)
    x, numbers = torch.randn(5, K, generator=rng), torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32)
    rows = RowSlots(numbers, torch.tensor([0.0, 0.5, 2.0]))
    owner_S = torch.arange(S).repeat_interleave(R)[R:]
    tables = a[1:].flatten(0, 1), b[1:].transpose(1, 2).flatten(0, 1).T, owner_S, rows.scalings_S[owner_S]
    linear = torch.nn.Identity()
    want = RowAdapters({linear: tables}, numbers).add(torch.zeros(5, N), x, linear)
    assert rms_error(want, expand(hidden(x, a, rows), b, rows)) < 1e-6


@pytest.fixture(scope="module", params=["hopper", "portable"])
def kernels(request):
    """(shrink, product)"""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    if request.param == "portable":
        return PortableLoraShrink(device), PortableProduct(device)
    if not architecture_of(device).has_wgmma:
        pytest.skip("needs a Hopper GPU")
    return LoraShrink(device), op.NVFP4Decode(device, shares_lora_hidden=lambda *_: False)


def slots_of(mix, M, S):
    scalings_S = torch.linspace(0, 2, S).cuda()
    return RowSlots(MIXES[mix](M, S).int().cuda(), scalings_S)


def adapters_of(S, R, K, N, groups, rng):
    """a as an adapter is made, b of a size that shows; slot 0 has none."""
    a = (torch.rand(S, groups * R, K, generator=rng) * 2 - 1) / K**0.5
    b = torch.randn(S, N, R, generator=rng)
    a[0] = 0
    return a.bfloat16().cuda(), b.bfloat16().cuda()


def alone(shrink, run, x, a, b, rows, starts):
    """Each row of a launch with its own adapter for all rows."""
    found = run(None)
    for slot in rows.slots_M.unique().tolist():
        if slot:
            scaling = rows.scalings_S[slot].item()
            u = shrink.shrink(x, a[slot].contiguous(), scaling)
            y = run(PackedAdapter(a[slot].contiguous(), b[slot].contiguous(), scaling, starts, u))
            found = torch.where((rows.slots_M == slot)[:, None], y, found)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("M", "N", "K", "R", "S", "groups"),
    [(1, 576, 576, 16, 2, 1), (8, 1152, 896, 32, 9, 3), (33, 4608, 3584, 32, 5, 3), (64, 896, 4864, 16, 9, 1),
     (100, 3584, 18944, 32, 9, 1), (256, 1152, 896, 64, 32, 3)],
)  # fmt: skip
def test_a_row_of_a_product_has_the_bits_of_its_adapter_alone(M, N, K, R, S, groups, mix, kernels, rng):
    codes, scales, x, alpha, *_ = case(M, N, K, 0, rng)
    a, b = adapters_of(S, R, K, N, groups, rng)
    starts = (N // 2 // 64 * 64, N // 4 * 3 // 64 * 64) if groups == 3 else ()
    (shrink, product), rows = kernels, slots_of(mix, M, S)
    bias, residual = torch.randn(N).cuda(), torch.randn(M, N).cuda()
    operands = op.pack(codes, scales), op.row_factors(alpha, N)
    u = shrink.shrink(x, a, 0.0, slots=rows)
    adapter = PackedAdapter(a, b, 0.0, starts, u, False, rows)
    for extra in ((None, None), (bias, None), (bias, residual)):

        def run(adapter, extra=extra):
            return product.linear(x, *operands, adapter=adapter, bias_N=extra[0], residual_MN=extra[1])

        got = run(adapter)
        assert torch.equal(got, alone(shrink, run, x, a, b, rows, starts))
        exact = expand(hidden(x, a, rows), b, rows, starts)
        truth = op.reference(x, codes, scales, alpha, None, None, *extra) + exact
        plain_u = expand(hidden(x, a, rows).bfloat16(), b, rows, starts).bfloat16()
        plain = torch_path(codes, scales, x, alpha, None, None, *extra) + plain_u
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
    assert (product.workspace == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mix", ["sorted", "in turns"])
@pytest.mark.parametrize(("M", "R"), [(3, 16), (48, 32), (100, 32), (256, 16)])
def test_a_row_of_swiglu_has_the_bits_of_its_adapter_alone(M, R, mix, kernels, rng):
    F, K, S = 1536, 576, 5
    codes, scales, x, alpha, *_ = case(M, 2 * F, K, 0, rng)
    a, b = adapters_of(S, R, K, 2 * F, 2, rng)
    alpha, (shrink, product), rows = alpha * 0.02, kernels, slots_of(mix, M, S)
    order = op.swiglu_order(F, x.device)
    tiles = op.pack(codes[order], scales.view(torch.uint8)[order].view(torch.float8_e4m3fn))
    factors, packed_b = op.row_factors(alpha[order], 2 * F), b[:, order].contiguous()

    def run(adapter):
        return product.swiglu(x, tiles, factors, adapter=adapter)

    u = shrink.shrink(x, a, 0.0, slots=rows)
    got = run(PackedAdapter(a, packed_b, 0.0, (), u, False, rows))
    assert torch.equal(got, alone(shrink, run, x, a, packed_b, rows, ()))
    y = op.reference(x, codes, scales, alpha) + expand(hidden(x, a, rows), b, rows, (F,))
    plain = (
        torch_path(codes, scales, x, alpha) + expand(hidden(x, a, rows).bfloat16(), b, rows, (F,)).bfloat16()
    )
    truth, plain = (torch.nn.functional.silu(each[:, :F]) * each[:, F:] for each in (y, plain))
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("M", "K", "R", "S"),
    [(1, 896, 16, 2), (17, 1152, 96, 9), (64, 18944, 32, 5), (256, 2048, 384, MAX_SLOTS)],
)
def test_x_and_u_have_the_bits_of_one_adapter(M, K, R, S, mix, kernels, rng):
    shrink, rows = kernels[0], slots_of(mix, M, S)
    h, weight, noise = torch.randn(M, K).cuda(), torch.rand(K).cuda() + 0.5, torch.randn(K).cuda() * 0.1
    a, _ = adapters_of(S, R, K, 16, 1, rng)
    for _ in range(2):  # the second finds what the first has left
        x, u = shrink.norm_shrink(h, weight, noise, 1e-6, a, 0.0, slots=rows)
        wide = torch.full((M, K), torch.nan, dtype=torch.bfloat16, device=h.device)
        again = shrink.shrink(x, a, 0.0, slots=rows, copy=wide)
        assert torch.equal(x, shrink.norm(h, weight, noise, 1e-6)) and torch.equal(wide, x)
        for slot in rows.slots_M.unique().tolist():
            of_slot, scaling = rows.slots_M == slot, rows.scalings_S[slot].item()
            _, want = shrink.norm_shrink(h, weight, noise, 1e-6, a[slot].contiguous(), scaling)
            assert torch.equal(u[of_slot], want[of_slot]) and torch.equal(again[of_slot], want[of_slot])


@pytest.mark.gpu
def test_one_graph_serves_every_mix(kernels, rng):
    M, N, K, R, S = 40, 896, 896, 32, 5
    codes, scales, x, alpha, *_ = case(M, N, K, 0, rng)
    a, b = adapters_of(S, R, K, N, 1, rng)
    (shrink, product), rows = kernels, slots_of("none", M, S)
    operands = op.pack(codes, scales), op.row_factors(alpha, N)
    follows = isinstance(product, PortableProduct)

    def step():
        u = shrink.shrink(x, a, 0.0, slots=rows)
        return product.linear(x, *operands, adapter=PackedAdapter(a, b, 0.0, (), u, follows, rows))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for mix, make in MIXES.items():
        rows.slots_M.copy_(make(M, S))
        graph.replay()
        assert torch.equal(recorded, step()), mix
