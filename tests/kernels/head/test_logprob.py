import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import rms_error
from qerl.kernels.head import head_operand
from qerl.kernels.head import logprob as op


def fourths(vocab_size, width, *, is_packed):
    """Slices begin at whole bytes of a mask."""
    return max(vocab_size // 32 * 8, 8)


@pytest.fixture(params=["whole", "slices"], autouse=True)
def columns(request, monkeypatch):
    """Return the number of columns of logits that are read at once, for a vocabulary."""
    if request.param == "slices":
        monkeypatch.setattr(head_operand, "slice_columns", fourths)
    return functools.partial(head_operand.slice_columns, width=8, is_packed=False)


def operands(T, D, V, device, rng, dtype=torch.float32):
    hidden_TD = torch.randn(T, D, generator=rng).to(device, dtype)
    head_VD = (torch.randn(V, D, generator=rng) / D**0.5 * 3).to(device, dtype)
    targets_T = torch.randint(V, (T,), generator=rng).to(device)
    return hidden_TD.requires_grad_(), head_VD, targets_T


def eager(hidden_TD, head_VD, targets_T, temperature):
    """Compute it as torch users write it: log_softmax over the logits in the operands' dtype, upcast."""
    logprobs_TV = ((hidden_TD @ head_VD.T).float() / temperature).log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, targets_T[:, None]).squeeze(1), entropy_T


def gradient(logprob_T, weights_T, hidden_TD):
    return torch.autograd.grad(logprob_T, hidden_TD, weights_T.to(logprob_T.dtype))[0]


@pytest.mark.parametrize(("T", "D", "V", "chunk_tokens"), op.CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_less_exact_than_eager(T, D, V, chunk_tokens, temperature, dtype, device, rng):
    hidden_TD, head_VD, targets_T = operands(T, D, V, device, rng, dtype)
    weights_T = torch.randn(T, generator=rng).to(device)

    truth = op.reference(hidden_TD, head_VD, targets_T, temperature=temperature)
    plain = eager(hidden_TD, head_VD, targets_T, temperature)
    got = op.chunked_logprob(
        hidden_TD, head_VD, targets_T, temperature=temperature, chunk_tokens=chunk_tokens
    )
    gradients = [gradient(both[0], weights_T, hidden_TD) for both in (truth, plain, got)]

    truths, others = (*truth, gradients[0]), (*plain, gradients[1])
    for want, other, mine in zip(truths, others, (*got, gradients[2]), strict=True):
        # The floor is 5 ulp of fp32: the order of torch's sums depends on its number of threads. With one,
        # a gradient of 64 numbers has an error of 5.4e-7 where torch's own has 4.8e-7. The entropy of
        # a single row can be small beside its logits: over 30 seeds up to 92 ulp, torch's 34.
        floor = (5 if T > 1 else 100) * 2**-23
        assert rms_error(mine, want) <= max(1.1 * rms_error(other, want), floor)


@pytest.mark.parametrize("target", [0, 9, 20])
def test_the_gradient_stays_relatively_exact_where_the_target_is_nearly_certain(target, device, rng):
    """1 - p is 1e-5 here: what is left of it after rounding p is the whole gradient. Others are likely in a
    slice before the target's, in its own and in one after it."""
    hidden_TD = torch.tensor([[12.0, 0.0]], device=device, requires_grad=True)
    head_VD = torch.randn(24, 2, generator=rng).to(device) - torch.tensor([5.0, 0.0], device=device)
    head_VD[[2, 10, 21]] = torch.tensor([[0.0, 1.0], [-0.1, 0.5], [0.02, -1.0]], device=device)
    head_VD[target] = torch.tensor([1.0, 0.5], device=device)
    targets_T = torch.tensor([target], device=device)
    truth = op.reference(hidden_TD, head_VD, targets_T, temperature=1.0)[0]
    got = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=4)[0]
    want = gradient(truth, torch.ones(1, device=device), hidden_TD)
    assert want.abs().max() < 3e-5
    assert rms_error(gradient(got, torch.ones(1, device=device), hidden_TD), want) < 2e-2


def test_a_chunk_does_not_know_of_the_others(device, rng):
    hidden_TD, head_VD, targets_T = operands(13, 16, 100, device, rng)
    whole = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=13)
    parts = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=5)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_the_values_are_the_same(device, rng):
    hidden_TD, head_VD, targets_T = operands(9, 16, 100, device, rng)
    kept = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=0.7, chunk_tokens=4)
    with torch.no_grad():
        read = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=0.7, chunk_tokens=4)
    assert kept[0].requires_grad and not kept[1].requires_grad and not read[0].requires_grad
    assert torch.equal(kept[0], read[0]) and torch.equal(kept[1], read[1])


def test_large_logits_do_not_overflow(device):
    hidden_TD = torch.tensor([[200.0, 0.0]], device=device, requires_grad=True)
    head_VD = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], device=device)
    targets_T = torch.tensor([0], device=device)
    logprob_T, entropy_T = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=0.5, chunk_tokens=1)
    log_two = torch.tensor([2.0], device=device).log()
    torch.testing.assert_close(logprob_T.detach(), -log_two)
    torch.testing.assert_close(entropy_T, log_two)
    assert gradient(logprob_T, torch.ones(1, device=device), hidden_TD).isfinite().all()


def test_no_tokens_are_no_error(device):
    hidden_TD = torch.zeros(0, 4, device=device, requires_grad=True)
    none_T = torch.zeros(0, dtype=torch.int64, device=device)
    logprob_T, entropy_T = op.chunked_logprob(
        hidden_TD, torch.zeros(8, 4, device=device), none_T, temperature=1.0, chunk_tokens=4
    )
    assert logprob_T.shape == entropy_T.shape == (0,)
    assert gradient(logprob_T, logprob_T.detach(), hidden_TD).shape == (0, 4)


class Sizes(TorchDispatchMode):
    """The elements of every tensor made under it."""

    def __init__(self):
        super().__init__()
        self.elements = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements |= {t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(columns, dtype, device, rng):
    T, D, V, chunk_tokens = 64, 8, 3000, 4
    hidden_TD, head_VD, targets_T = operands(T, D, V, device, rng, dtype)
    with Sizes() as made:
        logprob_T, _ = op.chunked_logprob(
            hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=chunk_tokens
        )
        logprob_T.sum().backward()
    made.elements.discard(head_VD.numel())  # views of the head itself
    made.elements.discard(columns(V) * D)
    assert max(made.elements) == chunk_tokens * columns(V)


def test_nothing_of_a_chunk_outlives_it(device, rng):
    """The autograd graph keeps [T, D], however large the vocabulary."""
    hidden_TD, head_VD, targets_T = operands(12, 8, 3000, device, rng)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=1.0, chunk_tokens=4)
    assert saved == [(12, 8), (12,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_may_be_asked_for_many_targets_and_sums_their_gradients_in_fp32(dtype, device, rng):
    """As if the rows had been gathered in fp32 before: chunks end between targets of one row."""
    hidden_TD, head_VD, _ = operands(6, 16, 100, device, rng, dtype)
    rows_C = torch.tensor([2, 0, 1, 2, 5, 2, 2, 2, 2, 3] * 30, device=device)
    targets_C = torch.randint(100, (300,), generator=rng).to(device)
    weights_C = torch.randn(300, generator=rng).to(device)
    settings = {"temperature": 0.8, "chunk_tokens": 4}
    got = op.chunked_logprob(hidden_TD, head_VD, targets_C, rows_C=rows_C, **settings)
    gathered = op.chunked_logprob(hidden_TD.float()[rows_C], head_VD, targets_C, **settings)
    assert torch.equal(got[0], gathered[0]) and torch.equal(got[1], gathered[1])
    grads = [gradient(both[0], weights_C, hidden_TD) for both in (got, gathered)]
    assert rms_error(*grads) < (1e-6 if dtype == torch.float32 else 1e-3) and not grads[0][4].any()


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_a_gpu_a_real_vocabulary_loses_no_more_than_torchs_operations(temperature, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    hidden_TD, head_VD, targets_T = operands(70, 256, 151_936, device, rng, torch.bfloat16)
    weights_T = torch.randn(70, generator=rng).to(device)
    truth = op.reference(hidden_TD, head_VD, targets_T, temperature=temperature)
    plain = eager(hidden_TD, head_VD, targets_T, temperature)
    got = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=temperature, chunk_tokens=32)
    again = op.chunked_logprob(hidden_TD, head_VD, targets_T, temperature=temperature, chunk_tokens=32)
    assert torch.equal(got[0], again[0]) and torch.equal(got[1], again[1])
    grads = [gradient(both[0], weights_T, hidden_TD) for both in (truth, plain, got)]
    for want, other, mine in zip((*truth, grads[0]), (*plain, grads[1]), (*got, grads[2]), strict=True):
        assert rms_error(mine, want) <= 1.1 * rms_error(other, want)
