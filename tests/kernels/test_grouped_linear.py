"""Products of rows sorted by expert: equal to the reference, and no expert is unpacked that need not be."""

import weakref

import pytest
import torch

from conftest import rms_error
from qerl.errors import UserError
from qerl.formats import BF16, FORMATS, MXFP4, NVFP4
from qerl.formats.stack import PackedStack
from qerl.kernels import clamped_swiglu, grouped_linear, routing
from qerl.kernels.grouped_linear import GroupedAdapter

FORMATS_TRIED = ("nvfp4", "mxfp4", "nf4", "int8", "bf16")


def offsets_of(rows):
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])


def stack_of(kind, num, n, k, rng, spread=1.0):
    return PackedStack.of(
        num, (kind.encode(torch.randn(n, k, generator=rng) * spread**e) for e in range(num))
    )


def adapter_of(num_a, num_b, n, k, rank, rng, dtype=torch.float32):
    a_ERK, b_ENR = torch.randn(num_a, rank, k, generator=rng), torch.randn(num_b, n, rank, generator=rng)
    masters = a_ERK.requires_grad_(), b_ENR.requires_grad_()
    return GroupedAdapter(*masters, *(m.detach().to(dtype) for m in masters), 0.5)


@pytest.mark.parametrize("name", FORMATS_TRIED)
@pytest.mark.parametrize("case", range(len(grouped_linear.CASES)))
def test_the_product_and_its_gradients_are_the_references(name, case, rng):
    rows, k, n, rank = grouped_linear.CASES[case]
    num, (num_a, num_b) = len(rows), [(len(rows), len(rows)), (1, len(rows)), (len(rows), 1)][case]
    stack = stack_of(FORMATS[name], num, n, k, rng, spread=3.0)
    adapter, bias_EN = adapter_of(num_a, num_b, n, k, rank, rng), torch.randn(num, n, generator=rng)
    x_SK = torch.randn(sum(rows), k, generator=rng, requires_grad=True)
    offsets, weights = offsets_of(rows), torch.stack([stack[e].decode() for e in range(num)])
    with torch.enable_grad():
        got = grouped_linear.grouped_linear(x_SK, offsets, stack, bias_EN=bias_EN, adapter=adapter)
        masters = adapter.a_ERK, adapter.b_ENR
        want = grouped_linear.reference(x_SK, offsets.tolist(), weights, bias_EN, *masters, adapter.scaling)
        seen = torch.randn(want.shape, generator=rng)
        inputs = x_SK, *masters
        ours = torch.autograd.grad((got * seen).sum(), inputs)
        theirs = torch.autograd.grad((want * seen).sum(), inputs)
    assert rms_error(got, want) < 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and rms_error(mine, other) < 1e-6


def test_in_bf16_it_loses_what_a_product_of_each_expert_loses(rng):
    rows, (k, n) = (5, 0, 12), (128, 64)
    stack = stack_of(NVFP4, 3, n, k, rng)
    x_SK, weights = torch.randn(17, k, generator=rng).bfloat16(), [stack[e].decode() for e in range(3)]
    got = grouped_linear.grouped_linear(x_SK, offsets_of(rows), stack)
    want = grouped_linear.reference(
        x_SK, offsets_of(rows).tolist(), torch.stack(weights), None, None, None, 0
    )
    pairs = zip(x_SK.split(rows), weights, strict=True)
    plain = torch.cat([(x @ w.bfloat16().T) for x, w in pairs])
    assert got.dtype == torch.bfloat16 and rms_error(got, want) <= 1.1 * rms_error(plain, want)


@pytest.mark.parametrize("kind", (NVFP4, MXFP4, BF16))
def test_one_expert_is_unpacked_at_a_time_and_none_without_rows(kind, rng, monkeypatch):
    stack, alive, most, num_unpacked = stack_of(kind, 6, 32, 64, rng), [], 0, 0
    x_SK = torch.randn(9, 64, generator=rng, requires_grad=True)
    plain = kind.operand

    def watched(self, dtype):
        nonlocal most, num_unpacked
        operand = plain(self, dtype)
        alive.append(weakref.ref(operand))
        num_unpacked += 1
        most = max(most, sum(each() is not None for each in alive))
        return operand

    monkeypatch.setattr(kind, "operand", watched)
    with torch.enable_grad():
        y_SN = grouped_linear.grouped_linear(x_SK, offsets_of((3, 0, 4, 0, 2, 0)), stack)
        assert num_unpacked == 3
        y_SN.sum().backward()
    assert num_unpacked == 6 and most == 1


def test_no_rows_are_no_result(rng):
    got = grouped_linear.grouped_linear(
        torch.empty(0, 64), torch.zeros(4).long(), stack_of(MXFP4, 3, 32, 64, rng)
    )
    assert got.shape == (0, 32)


def test_a_stack_holds_each_weight_as_it_is(rng):
    for name in FORMATS_TRIED:
        weights = [torch.randn(64, 128, generator=rng) * 10**e for e in range(3)]
        stack = PackedStack.of(3, (FORMATS[name].encode(w) for w in weights))
        assert stack.shape == (3, 64, 128)
        for e, weight in enumerate(weights):
            alone = FORMATS[name].encode(weight)
            assert torch.equal(stack[e].decode(), alone.decode())
            assert stack[e].num_bytes == alone.num_bytes
        assert stack.num_bytes == 3 * alone.num_bytes


def test_one_weight_is_encoded_at_a_time(rng):
    made = []

    def weights():
        for _ in range(4):
            assert all(each() is None for each in made[:-1])
            weight = NVFP4.encode(torch.randn(32, 64, generator=rng))
            made.append(weakref.ref(weight))
            yield weight

    PackedStack.of(4, weights())
    assert len(made) == 4


def test_a_weight_that_cannot_be_encoded_is_refused(rng):
    with pytest.raises(UserError, match="multiple of 32"):
        PackedStack.of(1, (MXFP4.encode(torch.randn(4, 33, generator=rng)) for _ in range(1)))


@pytest.mark.parametrize("over", ("all", "chosen"))
@pytest.mark.parametrize(("T", "E", "k"), routing.CASES)
def test_the_choice_and_the_weights_are_the_references(T, E, k, over, rng):
    logits_TE = torch.randn(T, E, generator=rng) * 3
    ids_TK, weights_TK = routing.reference(logits_TE, k, over)
    assert torch.equal(routing.choose(logits_TE, k), ids_TK)
    torch.testing.assert_close(routing.weigh(logits_TE, ids_TK, over).double(), weights_TK, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("T", "E", "k"), routing.CASES)
def test_sorted_rows_come_back_to_their_tokens(T, E, k, rng):
    x_TD, logits_TE = torch.randn(T, 6, generator=rng), torch.randn(T, E, generator=rng)
    ids_TK = routing.choose(logits_TE, k)
    rows = routing.sort_rows(ids_TK, E)
    experts_S = ids_TK.flatten()[rows.order_S]
    assert torch.equal(experts_S, experts_S.sort().values)
    counts = [int((ids_TK == e).sum()) for e in range(E)]
    assert rows.offsets.diff().tolist() == counts and rows.offsets[0] == 0
    factor_E = torch.randn(E, generator=rng)  # an expert that only multiplies by a number
    weights_TK = routing.weigh(logits_TE, ids_TK, "all")
    y_SD = routing.spread(x_TD, rows, k) * factor_E[experts_S][:, None]
    want_TD = x_TD * (weights_TK * factor_E[ids_TK]).sum(1, keepdim=True)
    torch.testing.assert_close(routing.combine(y_SD, weights_TK, rows), want_TD)


@pytest.mark.parametrize(("T", "F"), clamped_swiglu.CASES)
def test_the_clamped_swiglu_and_its_gradients_are_the_references(T, F, rng):
    inputs = [torch.randn(T, F, generator=rng, requires_grad=True) for _ in range(2)]
    settings = {"alpha": 1.702, "limit": 0.7}
    with torch.enable_grad():
        got, want = (
            clamped_swiglu.clamped_swiglu(*inputs, **settings),
            clamped_swiglu.reference(*inputs, **settings),
        )
        ours, theirs = (torch.autograd.grad(y.sum(), inputs) for y in (got, want))
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
    assert not ours[0][inputs[0] > 0.7].any() and not ours[1][inputs[1].abs() > 0.7].any()
