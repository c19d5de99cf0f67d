import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from conftest import rms_error
from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.delta_net import short_conv as op
from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.kernels.runtime import row_kernel

KERNEL_CASES = ((8, (1,)), (24, (5, 1, 0, 2, 3, 0)), (16, (0, 40, 33, 16)), (64, (300, 7)))  # C, lengths


def _case(C, W, lengths, device, rng, dtype=torch.float32):
    shapes = (sum(lengths), C), (C, W), (len(lengths), W - 1, C)
    x, weight, state = (torch.randn(shape, generator=rng).to(device) for shape in shapes)
    return x.to(dtype), weight, state.to(dtype)


def _value_and_gradients(function, x, state, dy, ds):
    x, state = (t.detach().requires_grad_() for t in (x, state))
    y, after = function(x, state)
    loss = (y.double() * dy).sum() + (after.double() * ds).sum()
    return [y, after, *torch.autograd.grad(loss, (x, state))]


@pytest.mark.parametrize(("C", "W", "lengths"), op.CASES)
def test_fp32_values_and_gradients_are_the_definitions(C, W, lengths, device, rng):
    x, weight, state = _case(C, W, lengths, device, rng)
    cotangents = [torch.randn(t.shape, generator=rng).to(device, torch.float64) for t in (x, state)]
    layout = SequenceLayout.of(lengths, device)
    got = _value_and_gradients(lambda x, s: op.short_conv(x, weight, layout, s), x, state, *cotangents)
    truth = _value_and_gradients(
        lambda x, s: op.reference(x, weight, lengths, s), x.double(), state.double(), *cotangents
    )
    for ours, exact in zip(got, truth, strict=True):
        assert ours.shape == exact.shape and (ours.double() - exact).abs().sum() <= 1e-5


@pytest.mark.parametrize(("C", "W", "lengths"), op.CASES)
def test_one_token_at_a_time_is_the_whole(C, W, lengths, device, rng):
    x, weight, state = _case(C, W, lengths, device, rng)
    y, after = op.short_conv(x, weight, SequenceLayout.of(lengths, device), state)
    start = 0
    for s, length in enumerate(lengths):
        own = state[s : s + 1]
        for t in range(start, start + length):
            step, own = op.short_conv_step(x[t : t + 1], weight, own)
            torch.testing.assert_close(step, y[t : t + 1], rtol=1e-5, atol=1e-6)
        assert torch.equal(own[0], after[s])
        start += length


def test_it_is_transformers_convolution_and_loses_no_more(device, rng):
    x, weight, state = _case(16, 4, (20,), device, rng, torch.bfloat16)
    weight = weight.bfloat16()
    truth, _ = op.reference(x, weight, (20,), state.zero_())
    function = getattr(theirs.causal_conv1d_fn, "__wrapped__", theirs.causal_conv1d_fn)
    want = function(x.T[None], weight, None, activation="silu")[0].T
    got, _ = op.short_conv(x, weight, SequenceLayout.of((20,), device), state)
    assert got.dtype == torch.bfloat16 and rms_error(got, truth) <= 1.1 * rms_error(want, truth)


def check_kernel(C, lengths, device, rng):
    """It loses no more than PyTorch's operations; the states are the same bits."""
    x, weight, state = _case(C + 8, 4, lengths, device, rng, torch.bfloat16)
    x, weight, state = x[:, :C], weight[:C].contiguous(), state[:, :, :C].contiguous()
    layout = SequenceLayout.of(lengths, device)
    truth, _ = op.reference(x, weight, lengths, state)
    torchs, after = op._by_torch(x, weight, layout, state)
    got, own_after = op._by_kernel(x, weight, layout.ends, state)
    assert rms_error(got, truth) <= 1.1 * rms_error(torchs, truth) and torch.equal(own_after, after)


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize(("C", "lengths"), KERNEL_CASES[:3])
def test_its_source_computes_the_same_on_a_cpu(C, lengths, rng, tmp_path, monkeypatch):
    copy_sources(tmp_path)
    made = lambda file, name, _, **defines: CpuKernel(file, name, defines, tmp_path)  # noqa: E731
    monkeypatch.setattr(row_kernel, "kernel", made)
    check_kernel(C, lengths, "cpu", rng)


@pytest.mark.gpu
@pytest.mark.parametrize(("C", "lengths"), KERNEL_CASES)
def test_the_kernel_loses_no_more_than_torch(C, lengths, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA GPU")
    check_kernel(C, lengths, device, rng)


@pytest.mark.gpu
def test_the_kernel_is_used_and_its_gradients_are_those_of_the_operations(device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA GPU")
    lengths = (70, 5)
    x, weight, state = _case(16, 4, lengths, device, rng, torch.bfloat16)
    layout = SequenceLayout.of(lengths, device)
    found = []
    for function in (op.short_conv, op._by_torch):
        leaves = [t.detach().requires_grad_() for t in (x, state)]
        y, after = function(leaves[0], weight, layout, leaves[1])
        found.append((y, torch.autograd.grad(y.float().sum() + after.float().square().sum(), leaves)))
    assert type(found[0][0].grad_fn).__name__ == "_RecomputedBackward"
    assert all(map(torch.equal, found[0][1], found[1][1]))
