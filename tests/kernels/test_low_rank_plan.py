import pytest

from qerl.kernels.low_rank_plan import low_rank_plan
from qerl.kernels.nvfp4_decode import choose_tile


@pytest.mark.parametrize(
    ("N", "K", "rows"), [(64, 64, 16), (3584, 18944, 32), (4608, 3584, 96), (192, 576, 48)]
)
@pytest.mark.parametrize("M", [1, 8, 24, 33, 64, 100, 128, 200, 256])
def test_every_piece_of_x_meets_every_row_of_a_once(M, N, K, rows):
    tile = choose_tile(M, N, K)
    units, parts, slices = tile.units(M, N, K), tile.grid(M, N, K, 132), tile.k_block // tile.slice_k
    period = -(-M // tile.tokens) * (K // tile.k_block)
    plan, met = low_rank_plan(units, parts, period, slices, rows // 16), []
    for part in range(parts):
        first, end = units * part // parts, units * (part + 1) // parts
        first_item, begin, end_of, _ = plan[4 * part : 4 * part + 4]
        for item in [first_item, *plan[begin:end_of]] if first_item >= 0 else []:
            assert first + item // 256 < end
            met.append(((first + item // 256) % period, item // 32 % 8, item % 32))
    want = [(x, piece, row) for x in range(period) for piece in range(slices) for row in range(rows // 16)]
    assert sorted(met) == want
