import pytest
import torch

from conftest import rms_error
from qerl.kernels.linear import lora_linear as op

SCALING = 0.75


def _case(T, K, N, R, alpha_kind, has_bias, device, dtype, rng):
    def random(*shape, size=1.0):
        return (torch.randn(shape, generator=rng) * size).to(device)

    operand_NK = random(N, K).to(dtype)
    alpha = 0.037 if alpha_kind == "number" else random(N).abs() * 0.05 + 0.01
    x_TK, dy_TN = random(T, K).to(dtype), random(T, N).to(dtype)
    a_RK, b_NR = random(R, K, size=K**-0.5).to(dtype).float(), random(N, R, size=0.3).to(dtype).float()
    bias_N = random(N).to(dtype) if has_bias else None
    return x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, dy_TN


def _with_gradients(function, inputs, dy_TN):
    leaves = [x.detach().requires_grad_() for x in inputs]
    y_TN = function(*leaves)
    return [y_TN, *torch.autograd.grad(y_TN, leaves, dy_TN.to(y_TN.dtype))]


def _ours(case):
    x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, dy_TN = case
    work = a_RK.to(x_TK.dtype), b_NR.to(x_TK.dtype)

    def function(x, a, b):
        return op.lora_linear(x, lambda: operand_NK, alpha, op.Adapter(a, b, *work, SCALING), bias_N)

    return _with_gradients(function, (x_TK, a_RK, b_NR), dy_TN)


def _truth(case):
    x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, dy_TN = case

    def function(x, a, b):
        return op.reference(x, operand_NK, alpha, a, b, SCALING, bias_N)

    return _with_gradients(function, (x_TK, a_RK, b_NR), dy_TN)


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("alpha_kind", ("number", "row"))
@pytest.mark.parametrize(("T", "K", "N", "R"), op.CASES)
def test_fp32_value_and_gradients_are_the_definitions(T, K, N, R, alpha_kind, has_bias, device, rng):
    case = _case(T, K, N, R, alpha_kind, has_bias, device, torch.float32, rng)
    for got, want in zip(_ours(case), _truth(case), strict=True):
        assert rms_error(got, want) < 1e-5


@pytest.mark.parametrize("alpha_kind", ("number", "row"))
@pytest.mark.parametrize(("T", "K", "N", "R"), op.CASES[1:])  # one row is too few to compare errors of
def test_bf16_loses_no_more_than_plain_bf16(T, K, N, R, alpha_kind, device, rng):
    case = _case(T, K, N, R, alpha_kind, True, device, torch.bfloat16, rng)
    x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, dy_TN = case

    def plain(x, a, b):
        lora_TN = (x @ a.bfloat16().T) @ b.bfloat16().T
        return (x @ operand_NK.T * alpha).bfloat16() + SCALING * lora_TN + bias_N

    torchs = _with_gradients(plain, (x_TK, a_RK, b_NR), dy_TN)
    for got, theirs, want in zip(_ours(case), torchs, _truth(case), strict=True):
        assert rms_error(got, want) <= 1.1 * rms_error(theirs, want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_have_their_owners_dtypes(dtype, device, rng):
    case = _case(37, 64, 96, 8, "row", True, device, dtype, rng)
    assert [t.dtype for t in _ours(case)] == [dtype, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("alpha_kind", ("number", "row"))
@pytest.mark.parametrize(("T", "K", "N", "R"), op.CASES)
def test_a_zero_b_changes_no_bit(T, K, N, R, alpha_kind, dtype, device, rng):
    x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, _ = _case(T, K, N, R, alpha_kind, True, device, dtype, rng)
    adapter = op.Adapter(a_RK, b_NR.zero_(), a_RK.to(dtype), b_NR.to(dtype), SCALING)
    without = op.lora_linear(x_TK, lambda: operand_NK, alpha, None, bias_N)
    with_zero = op.lora_linear(x_TK, lambda: operand_NK, alpha, adapter, bias_N)
    assert torch.equal(without, with_zero)


def test_the_forward_reads_the_working_copies_and_not_the_masters(device, rng):
    x_TK, operand_NK, alpha, a_RK, b_NR, bias_N, _ = _case(
        5, 64, 96, 8, "number", True, device, torch.float32, rng
    )
    work = a_RK.clone(), b_NR.clone()
    want = op.reference(x_TK, operand_NK, alpha, *work, SCALING, bias_N)
    adapter = op.Adapter(a_RK + 1, b_NR - 1, *work, SCALING)
    got = op.lora_linear(x_TK, lambda: operand_NK, alpha, adapter, bias_N)
    assert rms_error(got, want) < 1e-5


def test_the_operand_is_unpacked_in_each_pass_and_not_kept_between(device, rng):
    case = _case(5, 64, 96, 8, "number", False, device, torch.float32, rng)
    x_TK, operand_NK, alpha, a_RK, b_NR, _, _ = case
    calls, kept = [], []

    def operand():
        calls.append(1)
        return operand_NK.clone()

    x, a, b = (t.requires_grad_() for t in (x_TK, a_RK, b_NR))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        adapter = op.Adapter(a, b, a.detach().clone(), b.detach().clone(), SCALING)
        y_TN = op.lora_linear(x, operand, alpha, adapter, None)
    assert len(calls) == 1 and kept and torch.Size((96, 64)) not in kept
    y_TN.sum().backward()
    assert len(calls) == 2


def test_an_input_without_a_gradient_costs_no_unpacking(device, rng):
    case = _case(5, 64, 96, 8, "number", False, device, torch.float32, rng)
    x_TK, operand_NK, alpha, a_RK, b_NR, _, dy_TN = case
    calls = []

    def operand():
        calls.append(1)
        return operand_NK

    a, b = a_RK.clone().requires_grad_(), b_NR.clone().requires_grad_()
    op.lora_linear(x_TK, operand, alpha, op.Adapter(a, b, a_RK, b_NR, SCALING), None).backward(dy_TN)
    assert len(calls) == 1
    for got, want in zip((a.grad, b.grad), _truth(case)[2:], strict=True):
        assert rms_error(got, want) < 1e-5
