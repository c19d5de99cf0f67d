import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from conftest import rms_error
from qerl.kernels.delta_net import gated_delta as op
from qerl.kernels.delta_net.gated_delta import SequenceLayout


def _case(K, N, H, V, lengths, device, rng, dtype=torch.float32):
    T, S = sum(lengths), len(lengths)
    q, k, v = (torch.randn(T, n, size, generator=rng) for n, size in ((K, H), (K, H), (N, V)))
    log_decay = -torch.rand(T, N, generator=rng) * torch.tensor([0.01, 3.0]).repeat(N)[:N]
    beta = torch.rand(T, N, generator=rng)
    state = torch.randn(S, N, H, V, generator=rng)
    return [*(x.to(device, dtype) for x in (q, k, v)), *(x.to(device) for x in (log_decay, beta, state))]


def _value_and_gradients(function, operands, do, ds):
    operands = [x.detach().requires_grad_() for x in operands]
    o, state = function(*operands)
    loss = (o.double() * do).sum() + (state.double() * ds).sum()
    return [o, state, *torch.autograd.grad(loss, operands)]


def _reference(lengths):
    return lambda *x: op.reference(*x[:-1], lengths, x[-1])


def _cotangents(case, rng):
    return [torch.randn(case[i].shape, generator=rng).to(case[i].device, torch.float64) for i in (2, -1)]


@pytest.mark.parametrize("chunk_tokens", (4, 64))
@pytest.mark.parametrize(("K", "N", "H", "V", "lengths"), op.CASES)
def test_fp32_values_and_gradients_are_the_definitions(K, N, H, V, lengths, chunk_tokens, device, rng):
    case = _case(K, N, H, V, lengths, device, rng)
    cotangents = _cotangents(case, rng)
    layout = SequenceLayout.of(lengths, device, chunk_tokens)
    got = _value_and_gradients(lambda *x: op._chunked(*x[:-1], layout, x[-1]), case, *cotangents)
    truth = _value_and_gradients(_reference(lengths), [x.double() for x in case], *cotangents)
    for ours, exact in zip(got, truth, strict=True):
        assert rms_error(ours, exact) < 2e-6


@pytest.mark.parametrize(("K", "N", "H", "V", "lengths"), op.CASES)
def test_one_token_at_a_time_is_the_definition(K, N, H, V, lengths, device, rng):
    *rows, state = case = _case(K, N, H, V, lengths, device, rng)
    outputs, states, start = [], [], 0
    for s, length in enumerate(lengths):
        own = state[s : s + 1]
        for t in range(start, start + length):
            o, own = op.gated_delta_step(*(x[t : t + 1] for x in rows), own)
            outputs.append(o)
        states.append(own)
        start += length
    truth = _reference(lengths)(*case)
    assert rms_error(torch.cat(outputs), truth[0]) < 1e-6 and rms_error(torch.cat(states), truth[1]) < 1e-6


def test_a_sequence_in_pieces_is_the_whole(device, rng):
    *rows, state = _case(2, 4, 16, 16, (150,), device, rng)
    whole, last = op.gated_delta(*rows, SequenceLayout.of((150,), device), state)
    pieces, start = [], 0
    for length in (1, 63, 64, 20, 2):
        some = (x[start : start + length] for x in rows)
        o, state = op.gated_delta(*some, SequenceLayout.of((length,), device), state)
        pieces.append(o)
        start += length
    assert rms_error(torch.cat(pieces), whole) < 1e-6 and rms_error(state, last) < 1e-6


def test_a_sequence_sees_no_other(device, rng):
    """Bit for bit: the other sequences' rows are NaN in one call."""
    lengths = (70, 5, 130)
    *rows, state = _case(2, 4, 16, 16, lengths, device, rng)
    layout = SequenceLayout.of(lengths, device)
    clean = op.gated_delta(*rows, layout, state)
    for x in rows:
        x[:70], x[75:] = float("nan"), float("nan")
    got = op.gated_delta(*rows, layout, state)
    assert got[0][70:75].isfinite().all() and torch.equal(got[0][70:75], clean[0][70:75])
    assert torch.equal(got[1][1], clean[1][1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_it_is_transformers_function_and_loses_no_more(dtype, device, rng):
    """Rounding of the inputs is in the truth: both get the same 16-bit operands."""
    lengths = (100,)
    case = _case(2, 4, 32, 16, lengths, device, rng, dtype)
    q, k, v, log_decay, beta, state = case
    truth = _reference(lengths)(*case)
    ours = op.gated_delta(*case[:-1], SequenceLayout.of(lengths, device), state)
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(theirs, name)
        o, last = getattr(function, "__wrapped__", function)(
            *(x[None] for x in (q, k, v)),
            g=log_decay[None],
            beta=beta[None],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        limit = 1e-6 if dtype == torch.float32 else 1.1 * rms_error(o[0], truth[0])
        assert ours[0].dtype == dtype and rms_error(ours[0], truth[0]) <= limit
        assert rms_error(ours[0], o[0]) <= limit and rms_error(ours[1], last) < 1e-6


def test_long_products_of_small_decays_stay_finite(device, rng):
    *rows, _ = case = _case(1, 2, 8, 8, (300,), device, rng)
    rows[3].fill_(-40.0)  # exp(-40 * 300) is 0 in any dtype
    got = _value_and_gradients(
        lambda *x: op.gated_delta(*x[:-1], SequenceLayout.of((300,), device), x[-1]),
        case,
        *_cotangents(case, rng),
    )
    assert all(x.isfinite().all() for x in got)
    assert rms_error(got[0], _reference((300,))(*case)[0]) < 1e-6
