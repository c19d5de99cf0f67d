import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.kernels.linear import fused_linear as op
from qerl.kernels.pointwise import matmul_fp32
from qerl.kernels.runtime import row_kernel

# What torch says when a backward pass is the first to use cuBLAS on its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def _case(T, K, widths, R, dtype, device, rng, *, alphas=None, bias=True, ranks=None):
    def random(*shape, size=1.0):
        return (torch.randn(shape, generator=rng) * size).to(device)

    parts = []
    for i, n in enumerate(widths):
        r, adapter = (R if ranks is None else ranks[i]), None
        if r:
            a, b = random(r, K, size=K**-0.5).to(dtype).float(), random(n, r, size=0.3).to(dtype).float()
            adapter = op.Adapter(a, b, a.to(dtype), b.to(dtype), 0.75)
        alpha = 0.037 if alphas is None else alphas[i]
        if alpha == "rows":
            alpha = random(n).abs() * 0.1 + 0.01
        parts.append(op.LinearPart(n, alpha, random(n).to(dtype) if bias else None, adapter))
    return random(T, K).to(dtype), random(sum(widths), K).to(dtype), parts, random(T, sum(widths)).to(dtype)


def _with_gradients(function, x, parts, dy):
    leaves = [x, *(m for p in parts if p.adapter for m in (p.adapter.a_RK, p.adapter.b_NR))]
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def _operand(operand_NK, parts):
    rank = sum(len(part.adapter.a_RK) for part in parts if part.adapter)

    def operand(dtype, has_b):
        assert dtype == operand_NK.dtype
        w_NK = row_kernel.rows(*operand_NK.shape, rank if has_b else 0, operand_NK).copy_(operand_NK)
        return op.widened(w_NK, parts) if has_b else w_NK

    return operand


def _ours(x, operand, parts, dy, room=0):
    x = row_kernel.rows(*x.shape, room, x).copy_(x.detach())

    def function(x):
        return torch.cat(op.fused_linear(x, _operand(operand, parts), parts, gaps_are_free=room > 0), 1)

    return _with_gradients(function, x, parts, dy)


def _truth(x, operand, parts, dy):
    return _with_gradients(lambda x: op.reference(x, operand, parts), x.detach().double(), parts, dy)


KINDS = {
    "alike": {},
    "own alphas": {"alphas": (0.05, 0.02, 0.09)},
    "rows' alphas": {"alphas": ("rows", "rows", 0.09)},
    "only rows' alphas": {"alphas": ("rows",) * 3, "bias": False},
    "no bias": {"bias": False},
    "some adapters": {"ranks": (0, 8, 24)},
    "no adapters": {"ranks": (0, 0, 0)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "K", "widths", "R"), op.CASES)
def test_fp32_value_and_gradients_are_the_definitions(T, K, widths, R, kind, device, rng):
    case = _case(T, K, widths, R, torch.float32, device, rng, **KINDS[kind])
    for got, want in zip(_ours(*case), _truth(*case), strict=True):
        assert rms_error(got, want) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "K", "widths", "R"), op.CASES)
def test_bf16_loses_no_more_than_products_of_their_own(T, K, widths, R, kind, device, rng):
    case = x, operand, parts, dy = _case(T, K, widths, R, torch.bfloat16, device, rng, **KINDS[kind])

    def plain(x):
        found = []
        for part, w in zip(parts, operand.split([p.width for p in parts]), strict=True):
            y = ((x @ w.T) * part.alpha).to(x.dtype)
            if part.adapter:
                a = part.adapter
                y = y + a.scaling * (x @ a.a_RK.bfloat16().T) @ a.b_NR.bfloat16().T
            found.append(y if part.bias_N is None else y + part.bias_N)
        return torch.cat(found, 1)

    torchs = _with_gradients(plain, x, parts, dy)
    for got, theirs, want in zip(_ours(*case), torchs, _truth(*case), strict=True):
        assert rms_error(got, want) <= 1.1 * rms_error(theirs, want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_room_behind_the_rows_changes_no_bit(dtype, device, rng):
    case = _case(37, 128, (64, 32), 16, dtype, device, rng)
    for room in (32, 40):
        for got, want in zip(_ours(*case, room=room), _ours(*case), strict=True):
            assert torch.equal(got, want)


def test_room_is_used_without_a_copy(device, rng):
    x, operand, parts, _ = _case(37, 128, (64, 32), 16, torch.float32, device, rng)
    apart = row_kernel.rows(37, 128, 32, x).copy_(x)
    op.fused_linear(apart, _operand(operand, parts), parts, gaps_are_free=True)
    behind = apart.as_strided((37, 160), apart.stride())[:, 128:]
    want = 0.75 / 0.037 * x @ torch.cat([p.adapter.a_RK for p in parts]).T
    assert rms_error(behind, want.detach()) < 1e-5


def test_what_lies_between_rows_is_left_alone_unless_it_is_free(device, rng):
    x, operand, parts, _ = _case(37, 128, (64, 32), 16, torch.float32, device, rng)
    whole = torch.cat((x, torch.full((37, 64), 5.0, device=device)), 1)
    op.fused_linear(whole[:, :128], _operand(operand, parts), parts)
    assert (whole[:, 128:] == 5).all()


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_a_product_is_added_to_is_in_the_sum_and_gets_its_gradient(dtype, bias, device, rng):
    x, operand, parts, dy = _case(37, 128, (96,), 16, dtype, device, rng, bias=bias)
    h = torch.randn(37, 96, generator=rng).to(device).mul_(30).requires_grad_()  # fp32 in either case

    def function(x):
        return op.linear_onto(h.clone(), x, _operand(operand, parts), parts[0])

    got, truth = _with_gradients(function, x, parts, dy), _truth(x, operand, parts, dy)
    (dh,) = torch.autograd.grad(function(x), h, dy.float())
    assert torch.equal(dh, dy.float())
    limit = 1e-5 if dtype == torch.float32 else 5e-3  # u is rounded
    for ours, want in zip(got, truth, strict=True):
        ours = ours.double() - h.double() if ours.shape == h.shape else ours
        assert rms_error(ours, want) < limit
    place = h.detach().clone()
    y = op.linear_onto(place, x, _operand(operand, parts), parts[0])
    assert y.data_ptr() == place.data_ptr() and torch.equal(y, got[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_b_by_chunks_of_rows_add_up_to_those_of_all_rows_to_the_bit(
    dtype, device, rng, monkeypatch
):
    """A layer that is recomputed in chunks then learns what one that is not does (learner/chunked_mlp.py)."""
    monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", 16)
    _, _, parts, dy = _case(37, 64, (64, 32, 32), 16, dtype, device, rng)
    u = torch.randn(37, 48, generator=rng).to(device, dtype)
    chunks = [op._b_gradients(dy[rows], u[rows], parts) for rows in matmul_fp32.row_chunks(37)[::-1]]
    for whole, *each in zip(op._b_gradients(dy, u, parts), *chunks, strict=True):
        total = each[0].clone()
        for of_chunk in each[1:]:
            total.add_(of_chunk)
        assert torch.equal(whole, total)


@pytest.mark.parametrize(("alphas", "num_products"), (((0.05,) * 3, 1), ((0.05, 0.05, 0.02), 2)))
def test_neighbors_of_one_alpha_have_one_product_for_the_gradients_of_b(
    alphas, num_products, rng, monkeypatch
):
    _, _, parts, dy = _case(37, 64, (64, 32, 32), 16, torch.float32, "cpu", rng, alphas=alphas)
    u, calls = torch.randn(37, 48, generator=rng), []
    monkeypatch.setattr(
        op, "summed", lambda *operands: calls.append(operands) or matmul_fp32.summed(*operands)
    )
    found = op._b_gradients(dy, u, parts)
    assert len(calls) == num_products
    for i, (row, width) in enumerate(((0, 64), (64, 32), (96, 32))):
        want = alphas[i] * dy[:, row : row + width].double().T @ u[:, 16 * i : 16 * i + 16].double()
        assert rms_error(found[i], want) < 1e-5


def _swiglu_truth(x, operand, parts, dy):
    def definition(x):
        gate, up = op.reference(x, operand, parts).chunk(2, 1)
        return F.silu(gate) * up

    return _with_gradients(definition, x.detach().double(), parts, dy)


GATED = [case for case in op.CASES if len(case[2]) == 2] + [(37, 128, (64, 64), 16)]


@pytest.mark.parametrize("rows", (16, 2048))
@pytest.mark.parametrize(
    ("T", "K", "widths", "R", "kind"),
    [
        (*case, kind)
        for case in GATED
        for kind in KINDS
        if case[1] < 576 or kind in ("alike", "only rows' alphas")
    ],
)
def test_gated_value_and_gradients_are_the_definitions(T, K, widths, R, kind, rows, device, rng, monkeypatch):
    monkeypatch.setattr(op, "wide_rows", lambda width: rows)
    for dtype in (torch.float32, torch.bfloat16):
        x, operand, parts, dy = _case(T, K, widths, R, dtype, device, rng, **KINDS[kind])
        dy = dy[:, : widths[0]].contiguous()

        def plain(x, operand=operand, parts=parts):
            gate, up = torch.cat(op.fused_linear(x, _operand(operand, parts), parts), 1).chunk(2, 1)
            return F.silu(gate) * up

        def ours(x, operand=operand, parts=parts):
            return op.fused_swiglu(x, _operand(operand, parts), parts, room=24)

        truth, theirs = _swiglu_truth(x, operand, parts, dy), _with_gradients(plain, x, parts, dy)
        for got, other, want in zip(_with_gradients(ours, x, parts, dy), theirs, truth, strict=True):
            limit = 1e-5 if dtype == torch.float32 else 1.1 * rms_error(other, want)
            assert got.dtype in (dtype, torch.float32) and rms_error(got, want) <= limit


def test_parts_with_an_alpha_for_each_row_share_one_product(device, rng, monkeypatch):
    x, operand, parts, _ = _case(37, 128, (64, 32, 32), 0, torch.float32, device, rng, alphas=("rows",) * 3)
    calls, addmm = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: calls.append(1) or addmm(*a, **k))
    op.fused_linear(x, _operand(operand, parts), parts)
    assert len(calls) == 1


def test_neither_gate_nor_up_is_rounded(device, rng):
    x, operand, parts, dy = _case(130, 576, (1536, 1536), 0, torch.bfloat16, device, rng)
    want = _swiglu_truth(x, operand, parts, dy[:, :1536])[0]
    once = rms_error(want.bfloat16(), want)
    with torch.no_grad():
        assert rms_error(op.fused_swiglu(x, _operand(operand, parts), parts), want) <= 1.1 * once
        gate, up = (y.double() for y in op.fused_linear(x, _operand(operand, parts), parts))
    assert rms_error((F.silu(gate) * up).bfloat16(), want) > 1.5 * once


def test_gate_is_kept_for_the_gradient_alone_and_up_never(device, rng, monkeypatch):
    x, operand, parts, _ = _case(37, 128, (64, 64), 16, torch.bfloat16, device, rng)
    parts[0].adapter.a_RK.requires_grad_()
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append((a, k.get("dtype"))) or empty(*a, **k))
    gate = (37, 64), torch.bfloat16
    with torch.no_grad():
        op.fused_swiglu(x, _operand(operand, parts), parts, room=16)
    assert made and gate not in made
    op.fused_swiglu(x, _operand(operand, parts), parts, room=16)
    assert made.count(gate) == 1 and ((37, 128), torch.bfloat16) not in made


def test_the_result_is_kept_once_for_its_own_gradient_and_the_next_products(device, rng):
    """The u of the next products is stored behind its rows meanwhile."""
    x, operand, parts, _ = _case(37, 128, (64, 64), 16, torch.bfloat16, device, rng)
    _, down, last, dy = _case(37, 64, (96,), 16, torch.bfloat16, device, rng)
    h, found = torch.zeros(37, 96, device=device), []
    for room in (16, 0):
        places = {}

        def keep(t, places=places):
            places.setdefault(t.data_ptr(), []).append(t.shape)
            return t

        def function(x, room=room):
            act = op.fused_swiglu(x, _operand(operand, parts), parts, room=room)
            return op.linear_onto(h.clone(), act, _operand(down, last), last[0], gaps_are_free=True)

        found.append(_with_gradients(function, x, [*parts, *last], dy))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            function(x)
        assert ([(37, 64), (37, 80)] in places.values()) == (room == 16)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_columns_of_one_tensor_are_joined_without_a_copy(rng):
    whole = torch.randn(5, 12, generator=rng)
    pieces = whole.split((4, 6, 2), 1)
    assert op.side_by_side(pieces).data_ptr() == whole.data_ptr()
    assert torch.equal(op.side_by_side(pieces), whole)
    for others in (pieces[::-1], (pieces[0], pieces[2]), (pieces[0], pieces[1].clone()), pieces[1:]):
        assert torch.equal(op.side_by_side(others), torch.cat(others, 1))


def test_the_operand_is_unpacked_in_each_pass_and_not_kept(device, rng):
    x, operand, parts, dy = _case(5, 64, (96,), 8, torch.float32, device, rng)
    calls, kept = [], []

    def counted(dtype, has_b):
        calls.append(1)
        return _operand(operand, parts)(dtype, has_b)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(len(t)) or t, lambda t: t):
        (y,) = op.fused_linear(x.requires_grad_(), counted, parts)
    assert len(calls) == 1 and kept == [5]
    y.backward(dy)
    assert len(calls) == 2
