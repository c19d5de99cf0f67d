import itertools
import re

import pytest
import torch

from conftest import rms_error
from qerl.formats import e2m1
from qerl.kernels.runtime.nvrtc import sources
from qerl.kernels.tiles import nvfp4_decode as op
from qerl.kernels.tiles.nvfp4_tile import TOKEN_TILES
from qerl.models.layer_spec import layer_spec
from qerl.models.random_weights import shape

POSITIVE_SCALES = torch.arange(1, 127, dtype=torch.uint8)  # every E4M3 byte but 0, NaN and the negative ones


def weight(N, K, rng):
    codes = torch.randint(0, 256, (N, K // 2), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(N, K // 16, generator=rng) * 4 + 0.01).to(torch.float8_e4m3fn)
    return codes, scales


def every_code_with_every_scale():
    """[128, 256]: row r holds every code beside scales number r, r + 1, ..."""
    codes = torch.arange(256).repeat(128, 1).add_(torch.arange(128)[:, None]).remainder_(256)
    scales = POSITIVE_SCALES[(torch.arange(128)[:, None] + torch.arange(32)).remainder(126)]
    return codes.to(torch.uint8), scales.view(torch.float8_e4m3fn)


def test_unpacking_gives_back_every_code_with_every_scale():
    codes, scales = every_code_with_every_scale()
    tiles = op.pack(codes, scales)
    assert tiles.shape == (2, 8, 2304)
    got_codes, got_scales = op.unpack(tiles)
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_scales.view(torch.uint8), scales.view(torch.uint8))


def test_a_block_of_scale_zero_comes_back_as_zeros(rng):
    codes, scales = weight(64, 128, rng)
    scales = scales.float().index_fill(1, torch.tensor([3]), 0.0).to(torch.float8_e4m3fn)
    got_codes, got_scales = op.unpack(op.pack(codes, scales))
    assert torch.equal(got_scales.float(), scales.float())
    assert not got_codes[:, 24:32].any()
    got_codes[:, 24:32] = codes[:, 24:32]
    assert torch.equal(got_codes, codes)


def test_every_word_is_the_packing_of_its_codes(rng):
    tiles = torch.randint(0, 256, (3, 2, 2304), generator=rng, dtype=torch.uint8)
    tiles[..., 2048:] = op.pack(*weight(192, 128, rng))[..., 2048:]
    assert torch.equal(op.pack(*op.unpack(tiles)), tiles)


def test_a_packed_word_decodes_to_code_times_scale():
    """By the kernels' own bit operations, read from their source."""
    codes, scales = every_code_with_every_scale()
    truth = e2m1.decode(codes, torch.float32).double() * scales.double().repeat_interleave(16, dim=1)
    # to k half, row half; n64, k64, warp, g, t, j, pair
    truth = truth.view(2, 4, 2, 8, 8, 4, 2, 4, 2).permute(6, 2, 0, 4, 1, 3, 7, 5, 8).flatten(0, 1)
    words = op.pack(codes, scales).view(torch.int32).long() & 0xFFFFFFFF
    even = words[..., 512:].view(2, 8, 4, 8, 1, 2)
    s = torch.stack((even, (even << 8) | (even >> 24)), dim=-1).flatten(-2)
    s = (s & 0x0FF00FF0) | 0x70007000
    for i, placed in enumerate(decoded(words[..., :512].view(2, 8, 4, 8, 4, 4))):
        got = torch.stack((bfloat16(placed), bfloat16(placed >> 16)), dim=-1)
        got = got * bfloat16(s >> (16 * (i % 2)))[..., None]
        assert torch.equal(got * 2.0**19, truth[i])


def decoded(words):
    """Decode words as a kernel does before it multiplies by scales: rows g and g + 8, then both at k + 8."""
    source = sources()["nvfp4_codes.cuh"]
    (mask,) = re.findall(r"const u32 m = (0x\w+)u", source)
    assigned = re.findall(r"a\[(\d)\] = mul_\w*\((.*), s\)", source)
    assert [int(i) for i, _ in assigned] == [0, 1, 2, 3]
    names = {
        "w": words,
        "m": int(mask, 16),
        "__funnelshift_r": lambda high, low, by: ((high << 32) | low) >> by,
    }
    return [eval(re.sub(r"(\d)u\b", r"\1", text), names) for _, text in assigned]


def bfloat16(bits):
    return (bits & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double()


def test_the_order_of_gate_and_up_alternates_by_eight_rows():
    order = op.swiglu_order(32, torch.device("cpu"))
    assert order[:24].tolist() == [*range(8), *range(32, 40), *range(8, 16)]
    assert torch.equal(order.sort().values, torch.arange(64))


@pytest.fixture(scope="module", params=[False, True], ids=["u by warp", "u shared"])
def kernels(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return op.NVFP4Decode(torch.device("cuda"), shares_lora_hidden=lambda *_: request.param)


@pytest.fixture(params=[False, True], ids=["u by warp", "u shared"])
def kernels_of(request):
    """The kernels with one tile for every size."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return lambda tile: op.NVFP4Decode(torch.device("cuda"), lambda *_: tile, lambda *_: request.param)


def case(M, N, K, R, rng, groups=1):
    codes, scales = weight(N, K, rng)
    x = torch.randn(M, K, generator=rng)
    alpha = torch.rand(N, generator=rng) + 0.5
    a = torch.randn(groups * R, K, generator=rng)
    b = torch.randn(N, R, generator=rng)
    operands = (codes, scales, x.bfloat16(), alpha, a.bfloat16(), b.bfloat16())
    return tuple(t.cuda() for t in operands)


def low_ranks(x, a, scaling=1.0):
    """u in float64, and as torch has it in bfloat16."""
    return scaling * (x.double() @ a.double().T), (x @ a.T) * scaling


def torch_path(codes, scales, x, alpha, u=None, b=None, bias=None, residual=None):
    """Compute it in torch with the weight unpacked to bfloat16, each step rounded."""
    w = (e2m1.decode(codes, torch.bfloat16) * scales.bfloat16().repeat_interleave(16, 1)).float()
    y = x @ (w * alpha[:, None]).bfloat16().T
    y = y if u is None else y + u @ b.T
    y = y if bias is None else y + bias.bfloat16()
    return y if residual is None else y + residual


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K", "R"),
    (*op.CASES, (64, 4608, 3584, 32), (200, 768, 2304, 32), (224, 3584, 18944, 32), (256, 3584, 1792, 16)),
)
def test_no_less_exact_than_torch(M, N, K, R, kernels, rng):
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng)
    bias, residual = torch.randn(N).cuda(), torch.randn(M, N).cuda() * 8
    adapter = op.PackedAdapter(a, b, 0.75) if R else None
    exact, plain_u = low_ranks(x, a, 0.75) if R else (None, None)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, N)
    for extra in ((None, None), (bias, None), (bias, residual)):
        got = kernels.linear(x, tiles, factors, adapter=adapter, bias_N=extra[0], residual_MN=extra[1])
        assert got.dtype == (torch.bfloat16 if extra[1] is None else torch.float32)
        truth = op.reference(x, codes, scales, alpha, exact, b, *extra)
        plain = torch_path(codes, scales, x, alpha, plain_u, b, *extra)
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
    assert_is_clean(kernels)


def assert_is_clean(kernels):
    """Every word that CTAs hand to one another is empty again."""
    assert (kernels.workspace == -1).all() and (kernels.partials == -1).all()


def check_sums(kernels, M, N, K, rng, num_repeats=0):
    """The product with an adapter and a residual against float64, and its bits again."""
    codes, scales, x, alpha, a, b = case(M, N, K, 32, rng)
    residual = torch.randn(M, N).cuda()
    operands = x, op.pack(codes, scales), op.row_factors(alpha, N)
    rest = {"adapter": op.PackedAdapter(a, b, 1.0), "residual_MN": residual}
    got = kernels.linear(*operands, **rest)
    exact, plain_u = low_ranks(x, a)
    truth = op.reference(x, codes, scales, alpha, exact, b, None, residual)
    plain = torch_path(codes, scales, x, alpha, plain_u, b, None, residual)
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
    assert all(torch.equal(kernels.linear(*operands, **rest), got) for _ in range(num_repeats))
    assert_is_clean(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N", "K"), [(64, 832, 41216), (100, 3584, 9728), (128, 3584, 18944)])
def test_a_tile_shared_by_many_is_right_and_bitwise_repeatable(M, N, K, kernels_of, rng):
    """From 4 to 20 CTAs add up a tile together; 832 rows end in half a tile."""
    tile = op.Tile(64, 2, 256, 4, 1) if M == 64 else op.Tile(128, 2, 128, 5, 1)
    assert tile.splits_sums(M, N, K, num_sms=132)
    check_sums(kernels_of(tile), M, N, K, rng, num_repeats=50)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "groups"), [*((w, 2) for w in TOKEN_TILES), *((w, 3) for w in (48, 64, 96, 128))]
)
@pytest.mark.parametrize(("N", "K", "splits"), [(1152, 8192, False), (832, 41216, True)])
def test_a_tile_of_any_width_may_be_shared(width, groups, N, K, splits, kernels_of, rng):
    """8 to 20 CTAs share a tile; one of them adds up the sums, or all do."""
    tile = op.Tile(width, groups, 128, 3 if width <= 128 else 2, 1)
    M = (2 * width if width <= 128 else width) - 3
    assert tile.splits_sums(M, N, K, num_sms=132) == (splits and width >= 48)
    check_sums(kernels_of(tile), M, N, K, rng)


def test_large_weights_share_u_from_33_rows_with_swiglu_and_from_65_without():
    wide, narrow = 37888 * 3584, 4608 * 3584
    assert [op.pays_to_share_lora_hidden(M, wide, True) for M in (32, 33, 256)] == [False, True, True]
    assert [op.pays_to_share_lora_hidden(M, wide, False) for M in (64, 65, 256)] == [False, True, True]
    assert not any(
        op.pays_to_share_lora_hidden(M, narrow, swiglu) for M in (33, 256) for swiglu in (False, True)
    )


def test_all_products_compute_lora_hidden_up_to_96_rows_and_beyond_that_all_but_gate_and_up():
    assert all(op.pays_to_compute_lora_hidden(96, 18944, 128, swiglu) for swiglu in (False, True))
    assert op.pays_to_compute_lora_hidden(256, 18944, 32, swiglu=False) and op.pays_to_compute_lora_hidden(
        256, 3584, 96, swiglu=False
    )
    assert not op.pays_to_compute_lora_hidden(97, 3584, 64, swiglu=True)
    assert not op.pays_to_compute_lora_hidden(256, 18944, 128, swiglu=False)  # its sums would not fit


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b"])
def test_where_a_product_computes_lora_hidden_its_sums_fit(name):
    for group, rank, M in itertools.product(layer_spec(shape(name)).groups, (16, 128), range(1, 257)):
        K, rows = group.in_width, rank * len(group.out_widths)
        if op.pays_to_compute_lora_hidden(M, K, rows, group.name == "gate_up"):
            tile = op.choose_tile(M, group.out_width, K)
            assert K // tile.slice_k * tile.padded_tokens(M) * rows <= op._PARTIAL_WORDS


@pytest.mark.gpu
def test_every_token_count_is_right(kernels, rng):
    codes, scales, x, alpha, *_ = case(256, 1152, 1024, 0, rng)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, 1152)
    truth, plain = op.reference(x, codes, scales, alpha), torch_path(codes, scales, x, alpha)
    for M in range(1, 257):
        got = kernels.linear(x[:M].contiguous(), tiles, factors)
        assert rms_error(got, truth[:M]) <= 1.1 * rms_error(plain[:M], truth[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("R", [32, 128])
def test_rows_do_not_depend_on_the_batch_up_to_32_tokens(R, kernels, rng):
    codes, scales, x, alpha, a, b = case(32, 3584, 3584, R, rng)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, 3584)
    whole = kernels.linear(x, tiles, factors, adapter=op.PackedAdapter(a, b, 1.0))
    for M in (1, 8, 13, 24):
        part = kernels.linear(x[:M].contiguous(), tiles, factors, adapter=op.PackedAdapter(a, b, 1.0))
        assert torch.equal(part, whole[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 24, 64, 130])
@pytest.mark.parametrize("starts", [(896, 1024), (880, 928)])
def test_groups_of_rows_use_their_own_adapter(M, starts, kernels, rng):
    """The second starts are within the 64 rows of four warps."""
    N, K, R = 1152, 896, 32
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng, groups=3)
    got = kernels.linear(
        x, op.pack(codes, scales), op.row_factors(alpha, N), adapter=op.PackedAdapter(a, b, 1.0, starts)
    )
    rows = [slice(0, starts[0]), slice(*starts), slice(starts[1], N)]
    truth, plain = op.reference(x, codes, scales, alpha), torch_path(codes, scales, x, alpha)
    exact, plain_u = (
        torch.cat([u[:, i * R : (i + 1) * R] @ b[r].to(u.dtype).T for i, r in enumerate(rows)], dim=1)
        for u in low_ranks(x, a)
    )
    truth, plain = truth + exact, plain + plain_u
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "R"), [(3, 0), (16, 32), (48, 16), (100, 32), (256, 0)])
def test_swiglu_is_no_less_exact_than_torch(M, R, kernels, rng):
    check_swiglu(kernels, M, 1536, 576, R, rng)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [op.Tile(64, 3, 256, 3, 1), op.Tile(96, 3, 128, 4, 1), op.Tile(256, 2, 64, 4, 1)]
)
def test_swiglu_in_tiles_that_take_registers_over(tile, kernels_of, rng):
    """Its 3,008 rows end in two thirds of a tile of 192."""
    check_swiglu(kernels_of(tile), tile.tokens - 3, 1504, 1792, 32, rng)


def check_swiglu(kernels, M, F, K, R, rng):
    codes, scales, x, alpha, a, b = case(M, 2 * F, K, R, rng, groups=2)
    alpha, adapter = alpha * 0.02, None
    truth, plain = op.reference(x, codes, scales, alpha), torch_path(codes, scales, x, alpha)
    order = op.swiglu_order(F, x.device)
    if R:
        adapter = op.PackedAdapter(a, b[order].contiguous(), 0.02)
        exact, plain_u = (
            torch.cat((u[:, :R] @ b[:F].to(u.dtype).T, u[:, R:] @ b[F:].to(u.dtype).T), dim=1)
            for u in low_ranks(x, a, 0.02)
        )
        truth, plain = truth + exact, plain + plain_u
    tiles = op.pack(codes[order], scales.view(torch.uint8)[order].view(torch.float8_e4m3fn))
    got = kernels.swiglu(x, tiles, op.row_factors(alpha[order], 2 * F), adapter=adapter)
    truth = torch.nn.functional.silu(truth[:, :F]) * truth[:, F:]
    plain = torch.nn.functional.silu(plain[:, :F]) * plain[:, F:]
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        *(op.Tile(tokens, 1, 512, 2, 2) for tokens in (8, 24, 32)),
        op.Tile(32, 1, 64, 2, 1),
        op.Tile(64, 2, 256, 4, 1),
    ],
)
@pytest.mark.parametrize(("R", "groups"), [(16, 1), (128, 1), (32, 3), (80, 2)])
def test_u_is_added_up_right_from_every_slice(tile, R, groups, kernels_of, rng):
    """A CTA has up to 24 items, more than stages; x and a are whole numbers, so the sums are exact."""
    K = 1536
    kernels = kernels_of(tile)
    for M, N in ((tile.tokens, 64), (tile.tokens - 3, 1152), (2 * tile.tokens, 64)):
        codes, scales, x, alpha, a, _ = case(M, N, K, R, rng, groups=groups)
        x, a, b = x.sign(), (a * 0.7).round().clamp(-1, 1), torch.eye(N, R).bfloat16().cuda()
        starts = tuple(N // 3 // 16 * 16 * i for i in range(1, groups))
        for first in starts:
            b[first:] = torch.eye(N - first, R)
        u = 0.5 * (x.double() @ a.double().T)
        truth = torch.zeros(M, N, device="cuda", dtype=torch.float64)
        for i, first in enumerate((0, *starts)):
            end = (*starts, N)[i]
            count = min(R, end - first)
            truth[:, first : first + count] = u[:, i * R : i * R + count]
        tiles = op.pack(codes * 0, scales)
        adapter = op.PackedAdapter(a, b, 0.5, starts)
        for _ in range(3):
            got = kernels.linear(x, tiles, op.row_factors(alpha, N), adapter=adapter)
            assert torch.equal(got.double(), truth.bfloat16().double())
        assert_is_clean(kernels)


@pytest.mark.gpu
def test_the_rows_of_u_do_not_depend_on_the_batch(kernels, rng):
    """A weight of zeros and b of ones and zeros leave u itself; M is up to 32."""
    codes, scales, x, alpha, a, _ = case(32, 64, 18944, 64, rng)
    tiles, factors = op.pack(codes * 0, scales), op.row_factors(alpha, 64)
    adapter = op.PackedAdapter(a, torch.eye(64).bfloat16().cuda(), 0.5)
    whole = kernels.linear(x, tiles, factors, adapter=adapter)
    exact, plain = low_ranks(x, a, 0.5)
    assert rms_error(whole, exact) <= 1.1 * rms_error(plain, exact)
    for M in (1, 8, 13, 24):
        assert torch.equal(kernels.linear(x[:M].contiguous(), tiles, factors, adapter=adapter), whole[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 64, 100, 160, 200, 256])
def test_a_u_that_is_ready_gives_what_one_made_here_gives(M, kernels, rng):
    """x and a of small whole numbers: u is exact, in whatever order it is added up."""
    codes, scales, x, alpha, a, b = case(M, 1152, 896, 32, rng, groups=3)
    x, a = x.clamp(-1, 1).round(), a.clamp(-1, 1).round()
    tiles, factors, starts = op.pack(codes, scales), op.row_factors(alpha, 1152), (896, 1024)
    made = kernels.linear(x, tiles, factors, adapter=op.PackedAdapter(a, b, 0.5, starts))
    u = (0.5 * (x.double() @ a.double().T)).bfloat16()
    assert torch.equal(
        kernels.linear(x, tiles, factors, adapter=op.PackedAdapter(a, b, 0.5, starts, u)), made
    )


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 64, 256])
def test_runs_and_graph_replays_are_bitwise_equal(M, kernels, rng):
    """An odd number of launches with an adapter: the next replay takes the other u."""
    codes, scales, x, alpha, a, b = case(M, 3584, 3584, 32, rng)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, 3584)

    def step():
        y = kernels.linear(x, tiles, factors * 0.01, adapter=op.PackedAdapter(a, b, 0.01))
        y = kernels.linear(y, tiles, factors * 0.01, adapter=op.PackedAdapter(a, b, 0.01))
        return kernels.linear(y, tiles, factors * 0.01, adapter=op.PackedAdapter(a, b, 0.01))

    eager = step()
    assert torch.isfinite(eager).all()
    for _ in range(20):
        assert torch.equal(step(), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(20):
        recorded.fill_(float("nan"))
        graph.replay()
        assert torch.equal(recorded, eager)
    assert_is_clean(kernels)


@pytest.mark.gpu
def test_nan_inputs_end_as_nan_and_leave_the_workspace_clean(kernels, rng):
    codes, scales, x, alpha, a, b = case(8, 3584, 3584, 16, rng)
    x[3, 7] = float("nan")
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, 3584)
    y = kernels.linear(x, tiles, factors, adapter=op.PackedAdapter(a, b, 1.0))
    assert y[3].isnan().all() and torch.isfinite(y[[0, 1, 2, 4, 5, 6, 7]]).all()
    assert_is_clean(kernels)
