import pytest
import torch

from conftest import rms_error
from qerl.formats import FP8Flow
from qerl.formats.fp8_flow import quantize_rows, rounded_rows
from qerl.kernels.linear import fp8_linear as op

SCALING = 0.5


def _case(T, K, N, dtype, device, rng, rank=None):
    x, dy = torch.randn(T, K, generator=rng), torch.randn(T, N, generator=rng)
    x[:, ::7] *= 20  # outliers, as a decoder's activations have them
    weight = FP8Flow.encode(torch.randn(N, K, generator=rng) * K**-0.5)
    masters = None
    if rank is not None:
        masters = [torch.randn(shape, generator=rng) * K**-0.5 for shape in ((rank, K), (N, rank))]
        masters = [m.to(dtype).float().to(device).requires_grad_() for m in masters]
    return x.to(device, dtype), dy.to(device, dtype), weight.to(device), masters


def test_a_groups_scale_and_codes_by_hand():
    x = torch.zeros(2, 130)
    x[0, 3], x[0, 4], x[0, 129], x[1, 0] = 896.0, -1.0, 0.5, -448.0
    codes, scales = quantize_rows(x)
    assert scales.flatten().tolist() == pytest.approx([2.0, 0.5 / 448, 1.0, 1.0], rel=1e-7)
    assert codes[0, [3, 4, 129]].tolist() == [448.0, -0.5, 448.0] and codes[1, 0] == -448.0
    assert torch.allclose(rounded_rows(x), x) and codes.shape == (2, 130)
    y = torch.randn(3, 256)
    assert rms_error(rounded_rows(y), y) == pytest.approx(0.026, abs=0.003)  # a uniform error of 2^-4 at most


@pytest.mark.parametrize("rank", (None, 8))
@pytest.mark.parametrize(("T", "K", "N"), op.CASES)
def test_value_and_gradients_are_the_definitions(T, K, N, rank, rng):
    """In fp32; the definition's are float64's autograd with Q straight through."""
    x, dy, weight, masters = _case(T, K, N, torch.float32, "cpu", rng, rank)
    x.requires_grad_()
    adapter = None if masters is None else (*masters, *(m.detach() for m in masters), SCALING)
    y = op.fp8_linear(x, weight, None, adapter, None)
    truth = op.reference(x, weight.decode(), *(masters or (None, None)), SCALING)
    wanted = [x, *(masters or [])]
    assert rms_error(y, truth) < 1e-6
    got, want = torch.autograd.grad(y, wanted, dy), torch.autograd.grad(truth, wanted, dy.double())
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32 and rms_error(g, w) < 1e-5
    plain = torch.autograd.grad(x @ weight.decode().T, x, dy)[0]
    if rank is None:
        assert 0.01 < rms_error(got[0], plain) < 0.05  # the gradient is quantized too


def test_without_a_reader_y_is_zeros_and_gradients_are_the_same(rng):
    x, dy, weight, masters = _case(5, 256, 128, torch.float32, "cpu", rng, 4)
    adapter = (*masters, *(m.detach() for m in masters), SCALING)
    x.requires_grad_()
    grads = []
    for needs_output in (True, False):
        y = op.fp8_linear(x, weight, weight.operand(torch.float32), adapter, None, needs_output=needs_output)
        assert y.any() == needs_output
        grads.append(torch.autograd.grad(y, [x, *masters], dy))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K"), [(1, 128), (5, 576), (37, 3584), (4096, 1536)])
def test_the_kernels_codes_and_scales_are_torchs_to_the_bit(T, K, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    x = _case(T, K, 128, torch.bfloat16, device, rng)[0]
    x[0, :128] = 0
    apart = torch.full((T, K + 16), float("nan"), dtype=x.dtype, device=device)
    apart[:, :K] = x
    codes, scales = quantize_rows(x)
    for given in (x, apart[:, :K]):
        got_codes, got_scales = op.quantized(given)
        assert torch.equal(got_codes[:T].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(got_scales[:T], scales)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K", "N"), [*op.CASES, (8, 3584, 3584), (300, 3584, 18944)])
def test_the_product_on_a_gpu_is_the_definitions(T, K, N, device, rng):
    """bf16 rounds what comes out; the products before it are of the same numbers."""
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    x, dy, weight, _ = _case(T, K, N, torch.bfloat16, device, rng)
    assert op._has_kernels(x, weight)
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    y = op.fp8_linear(x, weight, None, None, None)
    truth = op.reference(exact_x, weight.decode())
    (got,), (want,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(truth, exact_x, dy.double())
    for g, w in ((y, truth), (got, want)):
        assert rms_error(g, w) <= 1.1 * rms_error(w.bfloat16(), w) + 2e-4
    assert rms_error(y, x.double() @ weight.decode().double().T) > 5e-3
