import dataclasses
import json

import pytest
import torch

from conftest import rms_error
from kernels.tiles.test_nvfp4_decode import case, low_ranks, torch_path
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED
from qerl.kernels.tiles import nvfp4_decode as op
from qerl.kernels.tiles.nvfp4_tile import TOKEN_BOUNDS
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.portable_table import MeasuredChoice, choose_portable_tile, merged, read
from qerl.kernels.tiles.portable_tile import PortableChoice, PortableTile, candidates, rule
from qerl.kernels.tiles.tile_layout import TileLayout

SIZES = ((3584, 3584), (37888, 3584), (3584, 18944), (576, 1536), (128, 64), (1152, 320))
H100 = ARCHITECTURES["sm_90a"]


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_the_rule_fits_every_card(name, N, K):
    card = ARCHITECTURES[name]
    for M in (1, 7, 8, 9, 24, 32, 33, 48, 63, 64, 65, 96, 100, 128, 129, 192, 255, 256):
        tile = rule(M, N, K, card)
        assert K % tile.k_block == 0 and tile.tokens * -(-M // tile.tokens) >= M and tile.stages >= 3
        assert tile.shared_bytes <= card.shared_bytes
        assert card.resident_ctas(tile.threads, 1, tile.shared_bytes) >= tile.ctas_per_sm


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_up_to_32_tokens_k_is_split_at_the_same_places(name, N, K):
    tiles = [rule(M, N, K, ARCHITECTURES[name]) for M in range(1, 33)]
    assert len({(t.rows, t.k_block, t.ctas_per_sm) for t in tiles}) == 1


@pytest.mark.parametrize("most_tokens", TOKEN_BOUNDS)
def test_candidates_are_different_tiles_that_fit(most_tokens):
    for name in TESTED:
        card = ARCHITECTURES[name]
        tiles = [choice.tile(most_tokens, 3584, card) for choice in candidates(most_tokens, 3584, card)]
        assert len(tiles) == len(set(tiles)) > 3
        assert all(tile is not None and tile.shared_bytes <= card.shared_bytes for tile in tiles)


def test_a_table_is_read_as_it_was_written_and_the_nearest_is_chosen():
    fast = PortableChoice(token_tiles=1, row_warps=4, token_warps=1, row_blocks=1, k_block=128, ctas_per_sm=1)
    measured = [
        MeasuredChoice(N=4096, K=4096, most_tokens=32, us=5.0, choice=fast),
        MeasuredChoice(N=40960, K=4096, most_tokens=64, us=9.0, choice=fast),
    ]
    text = merged(None, {"gpu": "a card"}, measured)
    assert read(text) == {"a card": tuple(measured)} and len(json.loads(text)) == 1
    assert read(merged(text, {"gpu": "a card"}, measured[:1])) == {"a card": tuple(measured[:1])}
    assert choose_portable_tile(8, 3584, 3584, H100, tuple(measured)) == fast.tile(8, 3584, H100)
    assert choose_portable_tile(96, 3584, 3584, H100, tuple(measured)) == rule(96, 3584, 3584, H100)


def test_a_format_takes_its_own_choices():
    """Codes of 4 bits without any take NVFP4's, codes of 8 bits the rule's."""
    fast = PortableChoice(token_tiles=1, row_warps=4, token_warps=1, row_blocks=1, k_block=128, ctas_per_sm=1)
    other = dataclasses.replace(fast, k_block=64)
    measured = (
        MeasuredChoice(N=3584, K=3584, most_tokens=64, us=5.0, choice=fast),
        MeasuredChoice(N=3584, K=3584, most_tokens=64, us=9.0, choice=other, layout=TileLayout.INT8),
    )
    assert read(merged(None, {"gpu": "a card"}, list(measured))) == {"a card": measured}
    wanted = {TileLayout.NVFP4: fast, TileLayout.NF4: fast, TileLayout.INT8: other}
    for layout in TileLayout:
        own = wanted.get(layout)
        tile = own.tile(64, 3584, H100, layout) if own else rule(64, 3584, 3584, H100, layout)
        assert choose_portable_tile(64, 3584, 3584, H100, measured, layout) == tile


@pytest.fixture
def kernels_of():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return lambda choose=None: PortableProduct(torch.device("cuda"), choose)


def with_u(a, b, x, scaling=1.0, starts=()):
    """An adapter whose u torch has made."""
    u = ((x @ a.T).float() * scaling).bfloat16().contiguous()
    return op.PackedAdapter(a, b, scaling, starts, u)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K", "R"), (*op.CASES, (64, 4608, 3584, 32), (200, 768, 2304, 32), (256, 3584, 1792, 16))
)
def test_no_less_exact_than_torch(M, N, K, R, kernels_of, rng):
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng)
    kernels, bias, residual = kernels_of(), torch.randn(N).cuda(), torch.randn(M, N).cuda() * 8
    adapter = with_u(a, b, x, 0.75) if R else None
    exact, plain_u = low_ranks(x, a, 0.75) if R else (None, None)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, N)
    for extra in ((None, None), (bias, None), (bias, residual)):
        got = kernels.linear(x, tiles, factors, adapter=adapter, bias_N=extra[0], residual_MN=extra[1])
        assert got.dtype == (torch.bfloat16 if extra[1] is None else torch.float32)
        truth = op.reference(x, codes, scales, alpha, exact, b, *extra)
        plain = torch_path(codes, scales, x, alpha, plain_u, b, *extra)
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
    assert (kernels.workspace == -1).all()


@pytest.mark.gpu
def test_every_token_count_is_right(kernels_of, rng):
    codes, scales, x, alpha, *_ = case(256, 1152, 1024, 0, rng)
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha, 1152), kernels_of()
    truth, plain = op.reference(x, codes, scales, alpha), torch_path(codes, scales, x, alpha)
    for M in range(1, 257):
        got = kernels.linear(x[:M].contiguous(), tiles, factors)
        assert rms_error(got, truth[:M]) <= 1.1 * rms_error(plain[:M], truth[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("card", TESTED)
@pytest.mark.parametrize("M", [8, 32, 64, 128, 256])
def test_the_tiles_of_every_card_compute_the_same_numbers(card, M, kernels_of, rng):
    """Other cards' tiles run on this one, which has more memory than each of them."""
    N, K = 3584, 1536
    kernels = kernels_of(lambda M, N, K: rule(M, N, K, ARCHITECTURES[card]))
    codes, scales, x, alpha, a, b = case(M, N, K, 32, rng)
    tiles, factors = op.pack(codes, scales), op.row_factors(alpha, N)
    adapter = with_u(a, b, x)
    got = kernels.linear(x, tiles, factors, adapter=adapter)
    exact, plain_u = low_ranks(x, a)
    truth = op.reference(x, codes, scales, alpha, exact, b)
    assert rms_error(got, truth) <= 1.1 * rms_error(torch_path(codes, scales, x, alpha, plain_u, b), truth)
    assert all(torch.equal(kernels.linear(x, tiles, factors, adapter=adapter), got) for _ in range(10))


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch_up_to_32_tokens(kernels_of, rng):
    codes, scales, x, alpha, a, b = case(32, 3584, 3584, 32, rng)
    tiles, factors, kernels = op.pack(codes, scales), op.row_factors(alpha, 3584), kernels_of()
    whole = kernels.linear(x, tiles, factors, adapter=with_u(a, b, x))
    u = with_u(a, b, x).lora_hidden
    for M in (1, 8, 13, 24):
        adapter = op.PackedAdapter(a, b, 1.0, (), u[:M].contiguous())
        assert torch.equal(kernels.linear(x[:M].contiguous(), tiles, factors, adapter=adapter), whole[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 24, 64, 130])
def test_groups_of_rows_use_their_own_adapter(M, kernels_of, rng):
    N, K, R = 1152, 896, 32
    codes, scales, x, alpha, a, b = case(M, N, K, R, rng, groups=3)
    adapter = with_u(a, b, x, starts=(896, 1024))
    got = kernels_of().linear(x, op.pack(codes, scales), op.row_factors(alpha, N), adapter=adapter)
    rows = [slice(0, 896), slice(896, 1024), slice(1024, N)]
    exact, plain_u = (
        torch.cat([u[:, i * R : (i + 1) * R] @ b[r].to(u.dtype).T for i, r in enumerate(rows)], dim=1)
        for u in low_ranks(x, a)
    )
    truth = op.reference(x, codes, scales, alpha) + exact
    assert rms_error(got, truth) <= 1.1 * rms_error(torch_path(codes, scales, x, alpha) + plain_u, truth)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "R"), [(3, 0), (16, 32), (48, 16), (100, 32), (256, 0), (256, 64)])
def test_swiglu_is_no_less_exact_than_torch(M, R, kernels_of, rng):
    F, K = 1536, 576
    codes, scales, x, alpha, a, b = case(M, 2 * F, K, R, rng, groups=2)
    alpha, adapter = alpha * 0.02, None
    truth, plain = op.reference(x, codes, scales, alpha), torch_path(codes, scales, x, alpha)
    order = op.swiglu_order(F, x.device)
    if R:
        adapter = with_u(a, b[order].contiguous(), x, 0.02)
        exact, plain_u = (
            torch.cat((u[:, :R] @ b[:F].to(u.dtype).T, u[:, R:] @ b[F:].to(u.dtype).T), dim=1)
            for u in low_ranks(x, a, 0.02)
        )
        truth, plain = truth + exact, plain + plain_u
    tiles = op.pack(codes[order], scales.view(torch.uint8)[order].view(torch.float8_e4m3fn))
    got = kernels_of().swiglu(x, tiles, op.row_factors(alpha[order], 2 * F), adapter=adapter)
    truth = torch.nn.functional.silu(truth[:, :F]) * truth[:, F:]
    plain = torch.nn.functional.silu(plain[:, :F]) * plain[:, F:]
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)


@pytest.mark.gpu
def test_a_tile_that_many_share_leaves_a_clean_workspace(kernels_of, rng):
    kernels = kernels_of(lambda M, N, K: PortableTile(64, 8, 1, 2, 128, 4, 1))
    codes, scales, x, alpha, a, b = case(64, 832, 41216, 32, rng)
    residual = torch.randn(64, 832).cuda()
    tiles, factors, adapter = op.pack(codes, scales), op.row_factors(alpha, 832), with_u(a, b, x)
    got = kernels.linear(x, tiles, factors, adapter=adapter, residual_MN=residual)
    for _ in range(20):
        again = kernels.linear(x, tiles, factors, adapter=adapter, residual_MN=residual)
        assert torch.equal(again, got)
    assert (kernels.workspace == -1).all()
