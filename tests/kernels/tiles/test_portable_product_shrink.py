"""u made inside the portable product; test_portable_shrink.py runs its kernel without a GPU."""

import pytest
import torch

from conftest import rms_error
from kernels.tiles.test_code_tiles import by_name, weights
from kernels.tiles.test_nvfp4_decode import case, low_ranks, torch_path
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED
from qerl.kernels.tiles import nvfp4_decode as op
from qerl.kernels.tiles.lora_shrink_portable import PortableLoraShrink
from qerl.kernels.tiles.packed_product import PackedAdapter
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.portable_shrink import MAX_ROWS
from qerl.kernels.tiles.portable_tile import PortableTile, rule
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.packed.packed_linear import tile_group

CASES = (  # M, N, K, R
    (64, 4608, 3584, 32),
    (200, 768, 2304, 32),
    (256, 3584, 1792, 16),
    (8, 64, 18944, 32),
    (256, 128, 8192, 64),
    (1, 128, 64, 48),
    (7, 3584, 18944, 16),
    (40, 128, 29568, 32),
)


@pytest.mark.parametrize("name", TESTED)
def test_a_tile_of_tokens_is_whole_groups_of_an_item(name):
    """Four or two groups of 8 above 32 tokens, one up to there (GROUPS of portable_shrink.cuh)."""
    for M in range(1, 257):
        tile = rule(M, 3584, 3584, ARCHITECTURES[name])
        padded = tile.padded(M)
        assert padded >= M and padded % tile.tokens == 0
        assert tile.tokens % (16 if tile.tokens > 32 else 8) == 0  # 48: two groups, 64, 96 and 128: four


@pytest.fixture
def kernels_of():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return lambda choose=None, layout=TileLayout.NVFP4: PortableProduct(torch.device("cuda"), choose, layout)


def is_clean(kernels):
    """Sums and the buffer of the next launch are empty, and no launch is under way."""
    shrink = kernels._shrink
    turn, count = shrink.turns.tolist()
    return count == 0 and (shrink.partials == -1).all() and (shrink.u[turn] == -1).all()


def last_u(kernels, M, rows):
    """u of the last launch, as its buffer has it."""
    shrink = kernels._shrink
    turn = shrink.turns[0].item()
    return shrink.u[turn ^ 1].view(torch.bfloat16)[: M * rows].view(M, rows).clone()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K", "R"),
    [*(each for each in op.CASES if each[3]), *CASES],
)
def test_no_less_exact_than_torch(M, N, K, R, kernels_of, rng):
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng)
    kernels, bias, residual = kernels_of(), torch.randn(N).cuda(), torch.randn(M, N).cuda() * 8
    exact, plain_u = low_ranks(x, a, 0.75)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, N)
    assert kernels.computes_lora_hidden(M, N, K, R) == (M <= MAX_ROWS)
    for extra in ((None, None), (bias, None), (bias, residual)):
        got = kernels.linear(
            x, tiles, factors, adapter=PackedAdapter(a, b, 0.75), bias_N=extra[0], residual_MN=extra[1]
        )
        truth = op.reference(x, codes, scales, alpha, exact, b, *extra)
        plain = torch_path(codes, scales, x, alpha, plain_u, b, *extra)
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
        assert is_clean(kernels)
        u = last_u(kernels, M, R)
        assert rms_error(u, exact) <= 1.1 * rms_error(plain_u, exact)
    assert (kernels.workspace == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "R"), [(896, 48), (3584, 96), (18944, 16)])
def test_u_of_a_row_is_the_same_in_any_batch(K, R, kernels_of, rng):
    """To the bit, at any number of tokens and with other cards' tiles."""
    N = 320
    codes, scales, x, alpha, a, b = case(256, N, K, R, rng)
    tiles, factors, adapter = op.pack(codes, scales), op.row_factors(alpha, N), PackedAdapter(a, b, 1.0)
    kernels = kernels_of()
    kernels.linear(x, tiles, factors, adapter=adapter)
    whole = last_u(kernels, 256, R)
    for M in (1, 7, 8, 9, 24, 32, 33, 48, 64, 65, 100, 128, 200, 255):
        kernels.linear(x[256 - M :].contiguous(), tiles, factors, adapter=adapter)
        assert torch.equal(last_u(kernels, M, R), whole[256 - M :])
    for name in TESTED:
        kernels = kernels_of(lambda M, N, K, name=name: rule(M, N, K, ARCHITECTURES[name]))
        kernels.linear(x[:64].contiguous(), tiles, factors, adapter=adapter)
        assert torch.equal(last_u(kernels, 64, R), whole[:64]) and is_clean(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 24, 64, 130])
def test_groups_of_rows_use_their_own_adapter(M, kernels_of, rng):
    N, K, R = 1152, 896, 32
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng, groups=3)
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha, N), kernels_of()
    got = kernels.linear(x, tiles, factors, adapter=PackedAdapter(a, b, 0.5, (896, 1024)))
    given = PackedAdapter(a, b, 0.5, (896, 1024), last_u(kernels, M, 3 * R))
    assert torch.equal(got, kernels.linear(x, tiles, factors, adapter=given))


@pytest.mark.gpu
@by_name
@pytest.mark.parametrize("M", [7, 32, 64])
def test_other_formats_compute_lora_hidden_too(kind, M, kernels_of, rng):
    device, N, K = torch.device("cuda"), 1152, 1024
    group = tile_group(weights(kind, N, K, rng, device), UnpackRows.ALL)
    x, a, b = (torch.randn(s, generator=rng).bfloat16().to(device) for s in ((M, K), (32, K), (N, 32)))
    kernels, operands = kernels_of(layout=group.layout), (group.tiles, group.factors_N)
    assert kernels.computes_lora_hidden(M, N, K, 32)
    got = kernels.linear(x, *operands, adapter=PackedAdapter(a, b, 0.1))
    u, (exact, plain) = last_u(kernels, M, 32), low_ranks(x, a, 0.1)
    assert is_clean(kernels) and rms_error(u, exact) <= 1.1 * rms_error(plain, exact)
    assert torch.equal(got, kernels.linear(x, *operands, adapter=PackedAdapter(a, b, 0.1, (), u)))


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "R"), [(3, 16), (16, 32), (48, 16), (100, 32), (256, 64)])
def test_gate_and_up_use_their_own_adapter(M, R, kernels_of, rng):
    F, K = 1536, 576
    codes, scales, x, alpha, a, b = case(M, 2 * F, K, R, rng, groups=2)
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha * 0.02, 2 * F), kernels_of()
    got = kernels.swiglu(x, tiles, factors, adapter=PackedAdapter(a, b, 0.02))
    given = PackedAdapter(a, b, 0.02, (), last_u(kernels, M, 2 * R))
    assert torch.equal(got, kernels.swiglu(x, tiles, factors, adapter=given))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 5, 13, 40, 100])
def test_rows_past_the_last_are_not_read(M, kernels_of, rng):
    N, K, R = 512, 896, 48
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng)
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha, N), kernels_of()
    want = kernels.linear(x, tiles, factors, adapter=PackedAdapter(a, b, 1.0))
    inside = []
    for rows in (x, a):
        big = rows.new_full((len(rows) + 128, rows.shape[1]), float("nan"))
        big[64 : 64 + len(rows)] = rows
        inside.append(big[64 : 64 + len(rows)])
    got = kernels.linear(inside[0], tiles, factors, adapter=PackedAdapter(inside[1], b, 1.0))
    assert torch.equal(got, want) and torch.isfinite(got).all()


@pytest.mark.gpu
def test_a_nan_stays_in_its_row(kernels_of, rng):
    codes, scales, x, alpha, a, b = case(20, 512, 3584, 32, rng)
    x[3, 7] = float("nan")
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha, 512), kernels_of()
    got = kernels.linear(x, tiles, factors, adapter=PackedAdapter(a, b, 1.0))
    assert got[3].isnan().all() and torch.isfinite(torch.cat((got[:3], got[4:]))).all() and is_clean(kernels)


@pytest.mark.gpu
def test_a_tile_that_many_share_leaves_clean_buffers(kernels_of, rng):
    kernels = kernels_of(lambda M, N, K: PortableTile(64, 8, 1, 2, 128, 4, 1))
    codes, scales, x, alpha, a, b = case(64, 832, 29696, 32, rng)
    tiles, factors, adapter = op.pack(codes, scales), op.row_factors(alpha, 832), PackedAdapter(a, b, 1.0)
    got = kernels.linear(x, tiles, factors, adapter=adapter)
    for _ in range(20):
        assert torch.equal(kernels.linear(x, tiles, factors, adapter=adapter), got)
    assert (kernels.workspace == -1).all() and is_clean(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 64, 200])
def test_replays_of_a_chain_are_bitwise_equal(M, kernels_of, rng):
    """Each kernel may begin before the one ahead has ended; an odd number of products, so that a replay
    begins with the other buffer. New inputs make what an earlier replay left wrong."""
    D = 3584
    kernels, shrink = kernels_of(), PortableLoraShrink(torch.device("cuda"))
    codes, scales, x, alpha, a, b = case(M, D, D, 32, rng)
    tiles, factors, adapter = op.pack(codes, scales), op.row_factors(alpha, D), PackedAdapter(a, b, 0.1)
    norm = torch.rand(D, generator=rng).cuda()

    def step(between=lambda: None):
        h = kernels.linear(x, tiles, factors, adapter=adapter, residual_MN=x.float())
        between()
        y = kernels.linear(shrink.norm(h, norm, None, 1e-6), tiles, factors, adapter=adapter)
        between()
        return kernels.linear(y, tiles, factors, adapter=adapter, residual_MN=h)

    assert torch.equal(step(torch.cuda.synchronize), step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(recorded, step(torch.cuda.synchronize))
    assert is_clean(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [3, 96, 130, 256])
def test_beside_the_launch_of_u_it_gives_the_same_bits(M, kernels_of, rng):
    """Norm, u and product, layer upon layer in a graph whose input changes: nothing is read too early."""
    N, K, R = 3584, 3584, 32
    codes, scales, h, alpha, a, b = case(M, N, K, R, rng)
    operands, kernels = (op.pack(codes, scales), op.row_factors(alpha, N)), kernels_of()
    shrink, weight, h_in = PortableLoraShrink(h.device), torch.ones(K, device=h.device), h.float()

    def layers(follows_shrink):
        y = h_in.clone()
        for _ in range(12):
            x, u = shrink.norm_shrink(y, weight, None, 1e-6, a, 0.5)
            adapter = PackedAdapter(a, b, 0.5, (), u, follows_shrink)
            y = kernels.linear(x, *operands, adapter=adapter, residual_MN=y)
        return y

    found = {}
    for follows_shrink in (False, True):
        layers(follows_shrink)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(follows_shrink)
        for i in range(10):
            h_in.copy_(h.float().roll(i, 1) * (1 + i))
            graph.replay()
            found[follows_shrink, i] = y.clone()
    assert all(
        found[True, i].isfinite().all() and torch.equal(found[True, i], found[False, i]) for i in range(10)
    )
    assert not torch.equal(found[True, 0], found[True, 1])
