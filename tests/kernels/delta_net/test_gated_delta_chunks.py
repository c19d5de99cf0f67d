"""The gated delta rule in one launch: the kernel against float64, on a GPU and as C++ on a CPU."""
# pyright: reportCallIssue=false

import pytest
import torch

from benchmarks.product_variants import delta_chunks_variant
from conftest import rms_error
from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.kernels.delta_net import gated_delta
from qerl.kernels.delta_net import gated_delta_chunks as op
from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.architectures import ARCHITECTURES

CASES = (  # key heads, value heads, lengths
    (1, 1, (70, 0, 3)),
    (1, 2, (64,)),
    (2, 4, (200, 1, 0, 64, 65, 17)),
    (16, 32, (256, 300, 31)),
)


def on_gpu(test):
    is_absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(is_absent, reason="needs a CUDA GPU")(test))


def operands(K, N, lengths, device, decay=3.0):
    """Return q, k, v as views of one tensor, the gates and the states."""
    rng = torch.Generator().manual_seed(5)
    T, H = sum(lengths), op.HEAD
    y_TC = torch.randn(T, (2 * K + N) * H + 8, generator=rng).bfloat16().to(device)[:, : (2 * K + N) * H]
    q, k, v = (x.unflatten(1, (-1, H)) for x in y_TC.split((K * H, K * H, N * H), 1))
    # heads that forget at once, and heads that keep all
    log_decay = -torch.rand(T, N, generator=rng) * torch.linspace(decay, 0.001, N)
    beta = torch.rand(T, N, generator=rng)
    state = torch.randn(len(lengths), N, H, H, generator=rng)
    return q, k, v, *(x.to(device) for x in (log_decay, beta, state))


def check(case, lengths, layout):
    """o loses no more than PyTorch's operations in fp32, which round it once; the states keep 15 bits."""
    *rows, state = case
    truth_o, truth_state = gated_delta.reference(*rows, lengths, state)
    torch_o, _ = gated_delta._chunked(*rows, layout, state)
    o, after = op.gated_delta_chunks(*rows, layout.ends, state)
    assert o.dtype == torch.bfloat16 and rms_error(o, truth_o) <= 1.1 * rms_error(torch_o, truth_o)
    assert rms_error(after, truth_state) < 2.0**-15
    empty = [s for s, length in enumerate(lengths) if length == 0]
    assert torch.equal(after[empty], state[empty])


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_its_source_computes_the_same_on_a_cpu(case, tmp_path, monkeypatch):
    K, N, lengths = case
    monkeypatch.setattr(
        op, "kernel_of", lambda _: op.compiled(op.FILE, op.NAME, torch.device("cpu"), {"CTAS": 1})
    )
    with on_cpu(op, tmp_path):
        check(operands(K, N, lengths, "cpu"), lengths, SequenceLayout.of(lengths))


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_loses_no_more_than_torch(case):
    K, N, lengths = case
    check(operands(K, N, lengths, "cuda"), lengths, SequenceLayout.of(lengths, "cuda"))


@on_gpu
def test_a_long_sequence_that_forgets_nothing_stays_exact():
    lengths = (1500,)
    case = operands(1, 2, lengths, "cuda", decay=0.002)
    check(case, lengths, SequenceLayout.of(lengths, "cuda"))


@on_gpu
def test_a_sequence_does_not_depend_on_the_others():
    lengths = (70, 130, 5)
    *rows, state = operands(2, 4, lengths, "cuda")
    layout = SequenceLayout.of(lengths, "cuda")
    o, after = op.gated_delta_chunks(*rows, layout.ends, state)
    alone = SequenceLayout.of((130,), "cuda")
    own_o, own_after = op.gated_delta_chunks(*(x[70:200] for x in rows), alone.ends, state[1:2])
    assert torch.equal(o[70:200], own_o) and torch.equal(after[1:2], own_after)


@on_gpu
def test_gradients_are_those_of_the_operations():
    lengths = (70, 130)
    layout = SequenceLayout.of(lengths, "cuda")
    *rows, state = operands(2, 4, lengths, "cuda")
    got, want = [], []
    for found, function in ((got, gated_delta.gated_delta), (want, gated_delta._chunked)):
        leaves = [x.detach().requires_grad_() for x in (*rows, state)]
        o, after = function(*leaves[:-1], layout, leaves[-1])
        found += [o, *torch.autograd.grad(o.float().square().sum() + after.sum(), leaves)]
    assert got[0].grad_fn is not None and type(got[0].grad_fn).__name__ == "_RecomputedBackward"
    for ours, torchs in zip(got, want, strict=True):
        assert rms_error(ours, torchs) < 2.0**-7  # dy = 2 o, whose rounding differs


@pytest.mark.parametrize("name", ["sm_90a", "sm_86"])
def test_its_module_is_loaded_once(name, monkeypatch):
    monkeypatch.setattr(op, "architecture_of", lambda device: ARCHITECTURES[name])
    kernel = op.kernel_of(torch.device("cuda", 0))
    assert op.kernel_of(torch.device("cuda", 0)) is kernel
    assert dict(kernel.defines) == dict(delta_chunks_variant(ARCHITECTURES[name]).defines)


def test_it_is_not_used_where_it_cannot_compute(monkeypatch):
    monkeypatch.setattr(row_kernel, "on_gpu", lambda x: True)
    q, k, v, _, _, state = operands(1, 2, (5,), "cpu")
    assert op.takes(q, k, v, state)
    assert not op.takes(q.float(), k.float(), v.float(), state)
    assert not op.takes(q, k, v, state[..., :64])
    assert not op.takes(q[:0], k[:0], v[:0], state)
