from types import SimpleNamespace

import pytest
import torch

from conftest import rms_error
from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.kernels.runtime.architectures import architecture_of
from qerl.kernels.tiles import lora_shrink as op
from qerl.kernels.tiles import lora_shrink_portable as portable
from qerl.kernels.tiles import nvfp4_decode

EPS, SCALING = 1e-6, 2.0
ALL_K = (64, 896, 1152, 1536, 3584, 5120, 8192, 18944, 27648, 29568)


def case(M, K, R, rng):
    """h, weight, noise and a as one model's: h's entries near 1, an adapter as it is made."""
    h = torch.randn(M, K, generator=rng)
    weight, noise = torch.rand(K, generator=rng) + 0.5, torch.randn(K, generator=rng) * 0.1
    a = (torch.rand(R, K, generator=rng) * 2 - 1).div(K**0.5).bfloat16()
    return h, weight, noise, a


def torch_path(h, weight, noise, a):
    x = (h * (h.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight + noise)).bfloat16()
    return x, SCALING * (x @ a.T)


def test_the_reference_is_the_models_norm_and_a_product(rng):
    h, weight, noise, a = case(5, 128, 16, rng)
    norm = NoisedRMSNorm(128, EPS, compute=torch.float32, device=h.device)
    norm.weight.copy_(weight)
    norm.noise.copy_(noise)
    x, u = op.reference(h, weight, noise, EPS, a, SCALING)
    assert rms_error(norm(h)[0], x) < 1e-6
    assert rms_error(SCALING * norm(h)[0] @ a.float().T, u) < 1e-5


@pytest.mark.parametrize("K", ALL_K)
def test_the_warps_of_a_cluster_hold_all_of_k(K):
    split = op.choose_split(K)
    pieces = K // 32
    for rank in range(split.cluster):
        mine = pieces * (rank + 1) // split.cluster - pieces * rank // split.cluster
        assert mine <= 8 * split.units
    assert split.units <= 8


@pytest.mark.parametrize("K", ALL_K)
@pytest.mark.parametrize("sms", [20, 58, 82, 108, 132, 170])
def test_sums_that_ctas_pass_on_fit_the_workspace(K, sms, monkeypatch):
    """From a small card to an RTX 5090."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=sms)
    )
    kernels, split = portable.PortableLoraShrink(torch.device("cpu")), op.choose_split(K)
    for M in (1, 8, 9, 33, 64, 100, 129, 200, 250, 256):
        for R in (16, 48, 96, 368, 384):
            tile = op.choose_tile(M, K, R, kernels._ctas_at_once)
            tiles = tile.clusters(M, R)
            assert tiles <= len(kernels._turns)
            assert tiles * split.cluster * tile.tokens * tile.rows <= len(kernels._partials)


@pytest.mark.parametrize("K", ALL_K)
def test_the_threads_of_a_norm_hold_a_row(K):
    split = op.choose_split(K)
    assert portable.norm_threads(split) * split.units * 8 >= K and portable.norm_threads(split) <= 512


@pytest.mark.parametrize("K", ALL_K)
@pytest.mark.parametrize("R", [0, 16, 48, 96, 384])
def test_every_size_has_a_tile(K, R):
    for M in range(1, op.MAX_TOKENS + 1):
        tile = op.choose_tile(M, K, R)
        assert tile.tokens in (8, 16, 32) and (tile.rows == 0) == (R == 0)
        clusters = tile.clusters(M, R)
        assert clusters * tile.tokens * max(tile.rows, 1) >= M * max(R, 1)
        shared = 8 * tile.tokens * (tile.rows + 4) * 4 + tile.tokens * tile.rows * 4 + 24 * tile.tokens * 4
        assert shared <= 48 * 1024 - 64


def on_hopper():
    return torch.cuda.is_available() and architecture_of(torch.device("cuda")).has_wgmma


@pytest.fixture(scope="module", params=["clusters", "portable"])
def kernels(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "portable":
        return portable.PortableLoraShrink(torch.device("cuda"))
    if not on_hopper():
        pytest.skip("needs a Hopper GPU")
    return op.LoraShrink(torch.device("cuda"))


@pytest.fixture(scope="module")
def both():
    if not on_hopper():
        pytest.skip("needs a Hopper GPU")
    device = torch.device("cuda")
    return op.LoraShrink(device), portable.PortableLoraShrink(device)


def on_gpu(tensors):
    return tuple(t.cuda() for t in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "K", "R"), (*op.CASES, (5, 5120, 112), (130, 3584, 32), (256, 18944, 32), (9, 29568, 32))
)
def test_no_less_exact_than_torch(M, K, R, kernels, rng):
    h, weight, noise, a = on_gpu(case(M, K, R, rng))
    truth = op.reference(h, weight, noise, EPS, a, SCALING)
    plain = torch_path(h, weight, noise, a)
    got = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    for mine, torchs, true in zip(got, plain, truth, strict=True):
        assert rms_error(mine, true) <= 1.1 * rms_error(torchs, true)
    assert torch.equal(kernels.norm(h, weight, noise, EPS), got[0])
    x = h.bfloat16()
    true_u = SCALING * x.double() @ a.double().T
    alone = kernels.shrink(x, a, SCALING)
    assert rms_error(alone, true_u) <= 1.1 * rms_error(SCALING * (x @ a.T), true_u)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "K", "R"), (*op.CASES, (5, 5120, 112), (130, 3584, 32), (256, 18944, 32), (9, 29568, 32))
)
@pytest.mark.parametrize("with_table", [False, True])
def test_without_clusters_the_bits_are_the_same(M, K, R, with_table, both, rng):
    """Twice, so that the second launch finds what the first has left in the counters and the sums."""
    h, weight, noise, a = on_gpu(case(M, K, R, rng))
    rows_M = torch.randint(0, 3, (M,), generator=rng).int().cuda() if with_table else None
    noise = torch.stack((noise, -noise, 2 * noise)) if with_table else noise
    wide = torch.randn(M, K, generator=rng).bfloat16().cuda()
    clusters, plain = both
    for _ in range(2):
        want = clusters.norm_shrink(h, weight, noise, EPS, a, SCALING, rows_M=rows_M)
        got = plain.norm_shrink(h, weight, noise, EPS, a, SCALING, rows_M=rows_M)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        got = plain.shrink(wide, a, SCALING)
        assert torch.equal(got, clusters.shrink(wide, a, SCALING))
        assert not plain._turns.any()


@pytest.mark.gpu
def test_u_is_the_product_of_the_rounded_x(kernels, rng):
    h, weight, noise, a = on_gpu(case(24, 3584, 96, rng))
    x, u = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    assert torch.equal(kernels.shrink(x, a, SCALING), u)


@pytest.mark.gpu
def test_noise_acts_and_none_is_none(kernels, rng):
    h, weight, noise, a = on_gpu(case(8, 3584, 32, rng))
    quiet = kernels.norm_shrink(h, weight, None, EPS, a, SCALING)
    zero = kernels.norm_shrink(h, weight, torch.zeros_like(noise), EPS, a, SCALING)
    loud = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    for i in range(2):
        assert torch.equal(quiet[i], zero[i]) and not torch.equal(quiet[i], loud[i])


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "R"), [(896, 48), (3584, 96), (18944, 32), (29568, 384)])
def test_a_row_is_bitwise_the_same_at_any_token_count(K, R, kernels, rng):
    h, weight, noise, a = on_gpu(case(256, K, R, rng))
    x, u = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    alone = kernels.shrink(x, a, SCALING)
    for M in (1, 7, 8, 33, 64, 65, 128, 200):
        part = h[256 - M :].contiguous()
        got_x, got_u = kernels.norm_shrink(part, weight, noise, EPS, a, SCALING)
        assert torch.equal(got_x, x[256 - M :]) and torch.equal(got_u, u[256 - M :])
        assert torch.equal(kernels.shrink(got_x, a, SCALING), alone[256 - M :])
        assert torch.equal(kernels.norm(part, weight, noise, EPS), x[256 - M :])


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "R"), [(64, 128), (896, 48), (3584, 96), (8192, 64)])
def test_a_table_gives_each_token_its_own_noise_to_the_bit(K, R, kernels, rng):
    h, weight, noise, a = on_gpu(case(200, K, R, rng))
    table = torch.stack((torch.zeros_like(noise), noise, -2 * noise, noise.flip(0)))
    rows = torch.randint(0, 4, (200,), generator=rng).int().cuda()
    for M in (1, 7, 64, 200):
        part, rows_M = h[:M].contiguous(), rows[:M].contiguous()
        x, u = kernels.norm_shrink(part, weight, table, EPS, a, SCALING, rows_M=rows_M)
        assert torch.equal(kernels.norm(part, weight, table, EPS, rows_M=rows_M), x)
        for s in range(4):
            want = kernels.norm_shrink(part, weight, table[s].contiguous(), EPS, a, SCALING)
            assert torch.equal(x[rows_M == s], want[0][rows_M == s])
            assert torch.equal(u[rows_M == s], want[1][rows_M == s])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 5, 13, 40, 100])
def test_rows_past_the_last_are_neither_read_nor_written(M, kernels, rng):
    """Around each operand and output lie NaNs: what is read there shows, what is written there is seen."""
    K, R = 3584, 48
    h, weight, noise, a = on_gpu(case(M, K, R, rng))
    (h_big, h_in), (a_big, a_in) = framed(h), framed(a)
    (x_big, x), (u_big, u) = (
        framed(torch.zeros_like(h).bfloat16()),
        framed(torch.zeros(M, R).bfloat16().cuda()),
    )
    kernels.norm_shrink(h_in, weight, noise, EPS, a_in, SCALING, out=(x, u))
    want = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    assert torch.equal(x, want[0]) and torch.equal(u, want[1]) and torch.isfinite(u).all()
    for big, rows in ((x_big, M), (u_big, M), (h_big, M), (a_big, R)):
        assert big[:64].isnan().all() and big[64 + rows :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "R"), [(3584, 96), (896, 48), (18944, 32)])
@pytest.mark.parametrize("M", [1, 8, 40, 200])
def test_x_and_u_of_one_tensor_are_the_same_bits(M, K, R, kernels, rng):
    """As a BF16 weight takes them, [x | u]; x copied on the way, or read and left where it is."""
    h, weight, noise, a = on_gpu(case(M, K, R, rng))
    x, u = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
    alone = kernels.shrink(x, a, SCALING)

    def side_by_side():
        big = torch.full((M, K + R + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
        return big, (big[:, :K], big[:, K : K + R])

    big, out = side_by_side()
    kernels.norm_shrink(h, weight, noise, EPS, a, SCALING, out=out)
    assert torch.equal(out[0], x) and torch.equal(out[1], u) and big[:, K + R :].isnan().all()
    big, out = side_by_side()
    kernels.shrink(x, a, SCALING, out=out[1], copy=out[0])
    assert torch.equal(out[0], x) and torch.equal(out[1], alone) and big[:, K + R :].isnan().all()
    big, out = side_by_side()
    out[0].copy_(x)
    kernels.shrink(out[0], a, SCALING, out=out[1])
    assert torch.equal(out[0], x) and torch.equal(out[1], alone) and big[:, K + R :].isnan().all()


def framed(rows):
    """(rows between 64 rows of NaN on each side, the rows inside it)"""
    big = rows.new_full((len(rows) + 128, rows.shape[1]), float("nan"))
    big[64 : 64 + len(rows)] = rows
    return big, big[64 : 64 + len(rows)]


@pytest.mark.gpu
def test_a_nan_stays_in_its_row(kernels, rng):
    h, weight, noise, a = on_gpu(case(20, 3584, 96, rng))
    h[3, 7] = float("nan")
    for got in kernels.norm_shrink(h, weight, noise, EPS, a, SCALING):
        assert got[3].isnan().all()
        assert torch.isfinite(torch.cat((got[:3], got[4:]))).all()


@pytest.mark.gpu
def test_embedding_takes_rows_and_clamps_what_is_no_token(kernels, rng):
    table = torch.randn(1000, 896, generator=rng).bfloat16().cuda()
    tokens = torch.tensor([0, 999, 5, -1, 2**31 - 1, -(2**31), 1000], dtype=torch.int32).cuda()
    assert torch.equal(kernels.embed(tokens, table), table[[0, 999, 5, 0, 999, 0, 999]].float())


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 64, 256])
def test_runs_and_graph_replays_are_bitwise_equal(M, kernels, rng):
    """A chain in which each kernel may begin before the one ahead has ended; new tokens make what an earlier
    replay left in its buffers wrong."""
    D, F = 3584, 18944
    table, weight, noise, a = on_gpu(case(500, D, 96, rng))
    table = table.bfloat16()
    wide = torch.randn(M, F, generator=rng).bfloat16().cuda()
    a_F = torch.randn(32, F, generator=rng).bfloat16().cuda()
    tokens, others = torch.randint(0, 500, (2, M), generator=rng, dtype=torch.int32).cuda()

    def step(between=lambda: None):
        h = kernels.embed(tokens, table)
        between()
        x, u = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
        between()
        v = kernels.shrink(x, a, SCALING)
        between()
        h = kernels.embed(others, table)
        between()
        y = kernels.norm(h, weight, None, EPS)
        between()
        return y, torch.cat((u, v, kernels.shrink(wide, a_F, 0.1)), dim=1)

    eager = step(torch.cuda.synchronize)
    _, u = torch_path(table[tokens].float(), weight, noise, a)
    x, _ = torch_path(table[others].float(), weight, torch.zeros_like(noise), a)
    assert rms_error(eager[0], x) < 0.01
    assert rms_error(eager[1][:, :96], u) < 0.01 and torch.equal(eager[1][:, :96], eager[1][:, 96:192])
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(step(), eager, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(20):
        tokens.random_(0, 500)
        others.random_(0, 500)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(recorded, step(torch.cuda.synchronize), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 16, 128])
def test_each_waits_for_the_gemm_that_let_it_start_early(M, kernels, rng):
    """Each replay has a new x, which makes what an earlier replay left in the buffers wrong."""
    if not on_hopper():
        pytest.skip("the product needs a Hopper GPU")
    D = 3584
    gemm = nvfp4_decode.NVFP4Decode(torch.device("cuda"))
    codes = torch.randint(0, 256, (D, D // 2), generator=rng, dtype=torch.uint8).cuda()
    tiles = nvfp4_decode.pack(codes, torch.ones(D, D // 16).to(torch.float8_e4m3fn).cuda())
    factors = nvfp4_decode.row_factors(torch.tensor(0.01), D).cuda()
    start, weight, noise, a = on_gpu(case(M, D, 96, rng))
    x = start.bfloat16()

    def step(between=lambda: None):
        h = gemm.linear(x, tiles, factors, residual_MN=start)
        between()
        x1, u = kernels.norm_shrink(h, weight, noise, EPS, a, SCALING)
        between()
        y = gemm.linear(x1, tiles, factors)
        between()
        v = kernels.shrink(y, a, SCALING)
        between()
        h = gemm.linear(x, tiles, factors, residual_MN=h)
        between()
        return u, v, kernels.norm(h, weight, noise, EPS)

    step(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(10):
        x.normal_()
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(recorded, step(torch.cuda.synchronize), strict=True))
