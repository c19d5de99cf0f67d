import pytest

from benchmarks.tile import candidates
from qerl.kernels.tiles import nvfp4_tile as op


@pytest.mark.parametrize("K", [64, 128, 192, 576, 896, 3584, 4096, 18944])
@pytest.mark.parametrize("N", [64, 192, 3584, 37888])
def test_every_size_has_a_tile_that_fits(N, K):
    for M in range(1, op.MAX_TOKENS + 1):
        assert_fits(op.choose_tile(M, N, K), M, N, K)


def assert_fits(tile, M, N, K):
    assert K % tile.k_block == 0 and tile.stages >= 2
    assert (tile.shared_bytes + 1024) * tile.ctas_per_sm <= 228 * 1024
    assert tile.rows * tile.tokens * tile.ctas_per_sm <= 128 * 256  # the workspace's bound
    assert M <= tile.padded_tokens(M) <= op.MAX_TOKENS
    units = -(-N // tile.rows) * -(-M // tile.tokens) * (K // tile.k_block)
    assert 1 <= tile.grid(M, N, K, num_sms=132) <= min(units, 132 * tile.ctas_per_sm)


@pytest.mark.parametrize(("N", "K"), [(3584, 3584), (37888, 3584), (64, 64), (3584, 18944)])
def test_every_candidate_fits_for_all_its_tokens(N, K):
    for most_tokens, fewest in zip(
        op.TOKEN_BOUNDS, (1, *(most + 1 for most in op.TOKEN_BOUNDS)), strict=False
    ):
        choices = candidates(N, K, most_tokens)
        assert choices
        for choice in choices:
            for M in range(fewest, most_tokens + 1):
                tile = choice.tile(M, K)
                assert tile is not None
                assert_fits(tile, M, N, K)


@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 18944), (1000 * 64, 576)])
def test_the_split_of_k_is_the_same_up_to_32_tokens(N, K):
    tiles = [op.choose_tile(M, N, K) for M in range(1, 33)]
    assert len({(tile.rows, tile.k_block, tile.ctas_per_sm) for tile in tiles}) == 1


def test_a_tile_has_fewer_stages_beside_u():
    tile = op.Tile(64, 2, 256, 4, 1)
    with_u = tile.with_room_for(30000)
    assert with_u is not None and 2 <= with_u.stages < tile.stages
    assert with_u.shared_bytes + 30000 + 1024 <= 228 * 1024
    assert tile.with_room_for(0) == tile and tile.with_room_for(200000) is None


def test_a_measured_product_takes_its_own_choice():
    for gpu, choices in op.read().items():
        assert {choice.most_tokens for choice in choices} == set(op.TOKEN_BOUNDS)
        for choice in choices:
            assert op.choose_tile(choice.most_tokens, choice.N, choice.K, gpu) == choice.tile(
                choice.most_tokens, choice.K
            )


def test_other_sizes_take_the_nearest_choice_and_other_gpus_the_first_table():
    first = next(iter(op.read().values()))
    for choice in first:
        tile = op.choose_tile(choice.most_tokens, choice.N + 64, choice.K, "a GPU that nobody measured")
        assert tile == choice.tile(choice.most_tokens, choice.K)
    assert op.choose_tile(64, 3584, 64 * 61).k_block == 64  # 61 is prime: no larger block divides it
