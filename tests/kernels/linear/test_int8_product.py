import pytest
import torch

from conftest import rms_error
from qerl.formats import FORMATS
from qerl.kernels.linear import fused_linear
from qerl.kernels.linear import int8_product as op
from qerl.kernels.linear.fused_linear import Adapter, LinearPart, RotatedOperand
from qerl.kernels.linear.int8_codes import RotatedWeight, Rotation, WeightTiles, hadamard
from qerl.kernels.runtime import row_kernel
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.packed.packed_linear import tile_group

# What torch says when a backward pass is the first to use cuBLAS on its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
GPU_CASES = (*op.CASES, (1, 64, 8), (257, 4608, 3584), (129, 3584, 1544))


RANK = 24


def _case(T, N, K, dtype, device, rng):
    dy, w = torch.randn(T, N, generator=rng), torch.randn(N, K, generator=rng) * N**-0.5
    factors = torch.rand(N, generator=rng) + 0.5
    du, a = torch.randn(T, RANK, generator=rng), torch.randn(RANK, K, generator=rng) / 4
    return (
        [x.to(device, dtype) for x in (dy, w)] + [factors.to(device)] + [x.to(device, dtype) for x in (du, a)]
    )


def _rotated(w, factors, *, along_k=False):
    rotation = Rotation.of(w, factors, along_k=along_k)
    return RotatedWeight(rotation.codes(w), rotation)


def _gradient(dy, w, factors, *adapter):
    return op.input_gradient(dy, _rotated(w, factors), *adapter)


def _gate_up(x, w, factors, u, b):
    y, gate = (torch.empty(len(x), len(factors) // 2, dtype=x.dtype, device=x.device) for _ in range(2))
    op.put_gate_up(x, u, b, _rotated(w, factors, along_k=True), y, gate)
    return y, gate


def test_the_rotation_is_its_own_inverse():
    r = hadamard(torch.device("cpu"))
    assert torch.equal(r, r.T) and torch.equal((r @ r), torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize(("T", "N", "K"), op.CASES)
def test_rounding_is_all_that_differs_from_the_definition(T, N, K, rng):
    """A uniform error of half a 127th of the largest number, which is 3 to 4.5 times the root mean square."""
    dy, w, factors, du, a = _case(T, N, K, torch.float32, "cpu", rng)
    got, want = _gradient(dy, w, factors), op.reference(dy, w, factors)
    assert 0.006 < rms_error(got, want) < 0.016
    assert rms_error(_gradient(dy, w, factors, du, a), got.double() + du @ a) < 1e-6


def test_gate_and_up_are_rounded_as_much(rng):
    x, w, factors, u, _ = _case(40, 320, 512, torch.float32, "cpu", rng)
    w, factors, b = (
        w.T.contiguous(),
        torch.rand(512, generator=rng) + 0.5,
        torch.randn(512, RANK, generator=rng) / 9,
    )
    y, gate = _gate_up(x, w, factors, u, b)
    want = op.gate_up_reference(x, w, factors, u, b)
    assert 0.006 < rms_error(y, want) < 0.03
    plain = (x.double() @ w.double().T + u.double() @ b.double().T)[:, :256] * factors[:256]
    assert 0.004 < rms_error(gate, plain) < 0.016


def test_outliers_cost_no_more_than_other_numbers(rng):
    """Without the rotation, a number 50 times the others takes all but 3 bits of the row's."""
    dy, w, factors, *_ = _case(40, 1152, 320, torch.float32, "cpu", rng)
    dy[:, 100] *= 50
    assert rms_error(_gradient(dy, w, factors), op.reference(dy, w, factors)) < 0.03
    plain = (dy * 127 / dy.abs().amax(1, True)).round() * dy.abs().amax(1, True) / 127
    assert rms_error(plain[:, :100], dy[:, :100]) > 0.1


def test_rows_and_columns_of_zeros_give_zeros(rng):
    dy, w, factors, *_ = _case(3, 64, 8, torch.float32, "cpu", rng)
    dy[1], w[:, 2] = 0, 0
    dx = _gradient(dy, w, factors)
    assert not dx[1].any() and not dx[:, 2].any() and dx[0, 0] != 0


def test_a_fused_linear_gets_it_for_its_input_and_nothing_else(rng):
    """Two linears with an alpha each, one for its rows; the adapters' gradients keep their bits."""
    x, w = torch.randn(9, 64, generator=rng).bfloat16(), torch.randn(128, 64, generator=rng).bfloat16()
    alphas = 0.25, torch.rand(64, generator=rng) + 0.5
    a, b = (torch.randn(shape, generator=rng).bfloat16() for shape in ((8, 64), (64, 8)))
    parts = [LinearPart(64, alpha, None, Adapter(a.float(), b.float(), a, b, 0.5)) for alpha in alphas]
    dy = torch.randn(9, 128, generator=rng).bfloat16()

    def operand(dtype, has_b):
        wide = row_kernel.rows(128, 64, 16 if has_b else 0, w).copy_(w)
        return fused_linear.widened(wide, parts) if has_b else wide

    factors = torch.cat([torch.full((64,), 0.25), alphas[1]])
    rotated = RotatedOperand(operand, lambda: _rotated(w, factors))
    found = []
    for each in (operand, rotated):
        leaves = [x.clone().requires_grad_()]
        for part in parts:
            leaves += [m.requires_grad_() for m in (part.adapter.a_RK, part.adapter.b_NR)]
        y = torch.cat(fused_linear.fused_linear(leaves[0], each, parts), 1)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    (y, dx, *masters), (got_y, got_dx, *got_masters) = found
    assert torch.equal(y, got_y) and all(map(torch.equal, masters, got_masters))
    assert 0.002 < rms_error(got_dx, dx) < 0.02


def _needs_hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("has_adapter", (False, True))
@pytest.mark.parametrize(("T", "N", "K"), GPU_CASES)
def test_the_kernels_round_as_the_cpu_does(T, N, K, has_adapter, device, rng):
    """dx is the CPU's but for bf16's rounding, and for codes on the edge between two integers."""
    _needs_hopper(device)
    case = _case(T, N, K, torch.bfloat16, "cpu", rng)[: 5 if has_adapter else 3]
    want = _gradient(*(x.float() for x in case))
    got = _gradient(*(x.to(device) for x in case))
    assert rms_error(got.cpu(), want) < 0.002  # bf16's own is 0.0017
    truth = op.reference(*case)
    assert rms_error(got.cpu(), truth) <= 1.1 * max(rms_error(want, truth), 0.0017)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", (8, 20, 64, 96))
def test_an_adapter_of_any_rank_is_added(rank, device, rng):
    """Of one block and of two, of whole vectors or not."""
    _needs_hopper(device)
    dy, w, factors, *_ = _case(70, 256, 320, torch.bfloat16, device, rng)
    du, a = (
        torch.randn(size, generator=rng).to(device, torch.bfloat16) for size in ((70, rank), (rank, 320))
    )
    plain = _gradient(dy, w, factors).double()
    assert rms_error(_gradient(dy, w, factors, du, a), plain + du.double() @ a.double()) < 0.003


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "F", "K"), ((5, 64, 64), (130, 1536, 576), (300, 18_944, 192), (257, 200, 3584))
)
def test_gate_and_up_round_as_the_cpu_does(T, F, K, device, rng):
    _needs_hopper(device)
    x, w = torch.randn(T, K, generator=rng), torch.randn(2 * F, K, generator=rng) * K**-0.5
    u, b = torch.randn(T, RANK, generator=rng), torch.randn(2 * F, RANK, generator=rng) / 9
    x, w, u, b = (each.bfloat16() for each in (x, w, u, b))
    factors = torch.rand(2 * F, generator=rng) + 0.5
    want = _gate_up(*(each.float() for each in (x, w)), factors, u.float(), b.float())
    got = _gate_up(*(each.to(device) for each in (x, w, factors, u, b)))
    assert all(rms_error(g.cpu(), each) < 0.004 for g, each in zip(got, want, strict=True))
    truth = op.gate_up_reference(x, w, factors, u, b)
    assert rms_error(got[0].cpu(), truth) <= 1.1 * rms_error(want[0], truth)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", (0, 20, 96))
def test_gate_and_up_have_an_adapter_of_any_rank_or_none(rank, device, rng):
    _needs_hopper(device)
    x, w = torch.randn(130, 192, generator=rng), torch.randn(512, 192, generator=rng) / 14
    u, b = torch.randn(130, rank, generator=rng), torch.randn(512, rank, generator=rng) / 9
    x, w, u, b = (each.bfloat16() for each in (x, w, u, b))
    factors = torch.rand(512, generator=rng) + 0.5
    none = None, None
    want = _gate_up(x.float(), w.float(), factors, *((u.float(), b.float()) if rank else none))
    x, w, factors, u, b = (each.to(device) for each in (x, w, factors, u, b))
    got = _gate_up(x, w, factors, *((u, b) if rank else none))
    assert all(rms_error(g.cpu(), each) < 0.004 for g, each in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (UnpackRows.ALL, UnpackRows.GATE_UP))
@pytest.mark.parametrize("format", ("nvfp4", "mxfp4", "nf4", "fp8", "int8"))
def test_codes_from_tiles_are_those_of_the_operand(format, rows, device, rng):
    """Exactly: a decoded number times the row's factor has no rounding of its own, or the same."""
    _needs_hopper(device)
    weights = [FORMATS[format].encode(torch.randn(192, 448, generator=rng).to(device)) for _ in range(2)]
    group = tile_group(weights, rows)
    tiles = WeightTiles(group.tiles, group.factors_N, group.layout, rows is UnpackRows.GATE_UP)
    alphas = [torch.as_tensor(w.alpha, dtype=torch.float32, device=device).expand(192) for w in weights]
    w, factors = group.operand(torch.bfloat16), torch.cat(alphas)
    rotations = [Rotation.of(each, factors) for each in (w, tiles)]
    unit = torch.eye(384, device=device).bfloat16()
    dx = [
        op.input_gradient(unit, RotatedWeight(r.codes(x), r))
        for r, x in zip(rotations, (w, tiles), strict=True)
    ]
    assert torch.equal(*dx) and torch.equal(rotations[0].maxima, rotations[1].maxima)
    if rows is UnpackRows.GATE_UP:
        x = torch.randn(50, 448, generator=rng).to(device, torch.bfloat16)
        none = torch.zeros(50, 8, device=device).bfloat16(), torch.zeros(384, 8, device=device).bfloat16()
        found = [_gate_up(x, each, factors, *none) for each in (w, tiles)]
        assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_a_nan_stays_in_its_row(device, rng):
    _needs_hopper(device)
    dy, w, factors, *_ = _case(130, 192, 64, torch.bfloat16, device, rng)
    dy[3, 7] = torch.nan
    is_nan = _gradient(dy, w, factors).isnan()
    assert is_nan[3].all() and not is_nan[:3].any() and not is_nan[4:].any()


@pytest.mark.gpu
def test_rows_with_columns_behind_them_are_read_in_place(device, rng):
    _needs_hopper(device)
    dy, w, factors, du, a = _case(130, 576, 192, torch.bfloat16, device, rng)
    want = _gradient(dy, w, factors, du, a)
    wide_dy, wide_w, wide_du = (row_kernel.rows(*x.shape, 40, x).copy_(x) for x in (dy, w, du))
    assert torch.equal(_gradient(wide_dy, wide_w, factors, wide_du, a), want)
