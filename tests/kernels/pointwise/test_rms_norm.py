import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.kernels.pointwise import matmul_fp32
from qerl.kernels.pointwise import rms_norm as op

EPS = 1e-3


def _case(rows, width, dtype, device, rng):
    x, dy = (torch.randn(rows, width, generator=rng).to(device, dtype) for _ in range(2))
    weight, noise = (torch.randn(width, generator=rng).to(device) for _ in range(2))
    return x, dy, weight, noise * 0.1


def _with_gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y, *torch.autograd.grad(y, x, dy.to(y.dtype))


@pytest.mark.parametrize("has_noise", (False, True))
@pytest.mark.parametrize(("rows", "width"), op.CASES)
def test_fp32_value_and_gradient_are_the_definitions(rows, width, has_noise, device, rng):
    x, dy, weight, noise = _case(rows, width, torch.float32, device, rng)
    noise = noise if has_noise else None
    got = _with_gradient(lambda x: op.rms_norm(x, weight, noise, EPS, dtype=x.dtype), x, dy)
    truth = _with_gradient(lambda x: op.reference(x, weight, noise, EPS), x.double(), dy)
    assert all(rms_error(g, t) < 1e-6 for g, t in zip(got, truth, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("has_noise", (False, True))
@pytest.mark.parametrize(("rows", "width"), op.CASES)
def test_to_bf16_loses_no_more_than_rounding_results_and_an_fp32_x_has_an_fp32_gradient(
    rows, width, has_noise, dtype, device, rng
):
    x, dy, weight, noise = _case(rows, width, dtype, device, rng)
    dy = dy.bfloat16()
    noise = noise if has_noise else None
    w = weight if noise is None else weight + noise

    def plain(x):
        return F.rms_norm(x.float(), (width,), w, EPS).bfloat16()

    truth = _with_gradient(lambda x: op.reference(x, weight, noise, EPS), x.double(), dy)
    for room in (0, 24):
        got = _with_gradient(
            lambda x, room=room: op.rms_norm(x, weight, noise, EPS, dtype=torch.bfloat16, room=room), x, dy
        )
        assert [g.dtype for g in got] == [torch.bfloat16, dtype]
        for g, p, t in zip(got, _with_gradient(plain, x, dy), truth, strict=True):
            assert rms_error(g, t) <= max(1.1 * rms_error(p, t), 1e-6)


@pytest.mark.gpu
def test_rows_that_lie_apart_are_read_and_written_in_place(device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    for dtype in (torch.float32, torch.bfloat16):
        x, _, weight, noise = _case(5, 96, dtype, device, rng)
        apart = torch.full((5, 128), float("nan"), device=device, dtype=dtype)
        apart[:, :96] = x
        y = op.rms_norm(apart[:, :96], weight, noise, EPS, dtype=torch.bfloat16, room=32)
        assert y.stride() == (128, 1)
        assert torch.equal(y, op.rms_norm(x, weight, noise, EPS, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("rows", "width"), op.CASES)
def test_a_table_gives_each_row_its_own_noise(rows, width, dtype, device, rng):
    """Value and gradient are the definition's; a row's bits are those of its noise for all rows."""
    x, dy, weight, _ = _case(rows, width, torch.float32, device, rng)
    table = torch.randn(4, width, generator=rng).mul_(0.3).to(device)
    rows_T = torch.randint(0, 4, (rows,), generator=rng).to(device, torch.int32)

    def normed(x, noise, rows_T=None):
        return op.rms_norm(x, weight, noise, EPS, dtype=dtype, rows_T=rows_T)

    got = _with_gradient(lambda x: normed(x, table, rows_T), x, dy)
    truth = _with_gradient(lambda x: op.reference(x, weight, table, EPS, rows_T), x.double(), dy.to(dtype))
    assert all(
        rms_error(g, t) < (1e-6 if dtype == torch.float32 else 5e-3) for g, t in zip(got, truth, strict=True)
    )
    alone = [_with_gradient(lambda x, s=s: normed(x, table[s].contiguous()), x, dy) for s in range(4)]
    for t, s in enumerate(rows_T.tolist()):
        assert torch.equal(got[0][t], alone[s][0][t]) and torch.equal(got[1][t], alone[s][1][t])


def test_heads_are_normed_one_by_one(device, rng):
    x, _, weight, _ = _case(12, 64, torch.bfloat16, device, rng)
    heads = x.view(4, 3, 64)
    assert torch.equal(
        op.rms_norm(heads, weight, None, EPS, dtype=torch.bfloat16),
        op.rms_norm(x, weight, None, EPS, dtype=torch.bfloat16).view(4, 3, 64),
    )


@pytest.mark.parametrize(("rows", "width"), op.CASES)
def test_a_fork_is_the_norm_and_a_copy_and_both_gradients_reach_h(rows, width, device, rng):
    h, dy, weight, noise = _case(rows, width, torch.float32, device, rng)
    dy, dh = dy.bfloat16(), torch.randn(rows, width, generator=rng).to(device)
    h.requires_grad_()
    y = op.rms_norm(h, weight, noise, EPS, dtype=torch.bfloat16)
    (alone,) = torch.autograd.grad(y, h, dy)
    x, copy = op.fork(h, weight, noise, EPS, dtype=torch.bfloat16, room=24)
    assert torch.equal(x, y) and torch.equal(copy, h)
    own = copy.add_(1.0)  # saved nowhere
    (both,) = torch.autograd.grad([x, own], h, [dy, dh])
    assert rms_error(both, alone + dh) < 1e-6
    with torch.no_grad():
        assert op.fork(h, weight, noise, EPS, dtype=torch.bfloat16)[1] is h


@pytest.mark.parametrize("form", ("vector", "table", "fork", "heads"))
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize(("rows", "width"), op.CASES)
def test_the_master_of_a_weight_gets_the_definitions_gradient(
    rows, width, x_dtype, dtype, form, device, rng, monkeypatch
):
    """Also in chunks of rows, and whatever the noise; the input's gradient stays the same."""
    monkeypatch.setattr(op, "_SUMMED_ROWS", 4)
    monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", 10)
    x, dy, weight, noise = _case(rows, width, x_dtype, device, rng)
    dy, rows_T = dy.to(dtype), None
    if form == "table":
        noise = torch.randn(3, width, generator=rng).to(device)
        rows_T = torch.randint(0, 3, (rows,), generator=rng).to(device, torch.int32)
    master = weight.clone().requires_grad_()

    def normed(x, master_D=None):
        options = {"dtype": dtype, "rows_T": rows_T, "master_D": master_D}
        if form == "heads":
            return op.rms_norm(x.view(1, rows, width), weight, noise, EPS, **options).view(rows, width)
        return (
            (op.fork(x, weight, noise, EPS, **options)[0])
            if form == "fork"
            else op.rms_norm(x, weight, noise, EPS, **options)
        )

    x = x.requires_grad_()
    dx, dmaster = torch.autograd.grad(normed(x, master), [x, master], dy)
    weight64 = weight.double().requires_grad_()
    truth = op.reference(x.detach(), weight64, noise, EPS, rows_T)
    (expected,) = torch.autograd.grad(truth, weight64, dy.double())
    assert dmaster.dtype == torch.float32 and rms_error(dmaster, expected) < 1e-6
    assert torch.equal(dx, *torch.autograd.grad(normed(x), x, dy))
    (alone,) = torch.autograd.grad(normed(x.detach(), master), master, dy)
    assert torch.equal(alone, dmaster)
