"""Products of rows sorted by expert: equal to the reference, and no expert is unpacked that need not be."""

import functools
import math
import weakref

import pytest
import torch

from conftest import rms_error
from qerl.errors import UserError
from qerl.formats import BF16, FORMATS, MXFP4, NVFP4
from qerl.formats.stack import PackedStack
from qerl.kernels.experts import clamped_swiglu, expert_product, grouped_linear, routing, stack_unpack
from qerl.kernels.experts.grouped_linear import GroupedAdapter
from qerl.kernels.pointwise.matmul_fp32 import frozen_linear

FORMATS_TRIED = ("nvfp4", "mxfp4", "nf4", "int8", "bf16")


def offsets_of(rows):
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])


def stack_of(kind, num, n, k, rng, spread=1.0, device="cpu"):
    weights = (kind.encode(torch.randn(n, k, generator=rng) * spread**e) for e in range(num))
    stack = PackedStack.of(num, weights)
    return PackedStack(kind, {name: tensor.to(device) for name, tensor in stack.parts.items()})


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
        want = grouped_linear.reference(x_SK, offsets.tolist(), weights, bias_EN, *masters, 0.5)
        seen = torch.randn(want.shape, generator=rng)
        inputs = x_SK, *masters
        ours = torch.autograd.grad((got * seen).sum(), inputs)
        theirs = torch.autograd.grad((want * seen).sum(), inputs)
    assert rms_error(got, want) < 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and rms_error(mine, other) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_pieces_of_fixed_rows_a_rows_bits_are_its_own(dtype, rng):
    rows, (k, n) = (21, 0, 3, 16), (128, 64)
    stack, bias_EN = stack_of(NVFP4, 4, n, k, rng), torch.randn(4, n, generator=rng).to(dtype)
    adapter = adapter_of(4, 1, n, k, 8, rng, dtype)
    x_SK = torch.randn(sum(rows), k, generator=rng).to(dtype)
    multiply = functools.partial(grouped_linear.grouped_linear, bias_EN=bias_EN, adapter=adapter)
    together, whole = (multiply(x_SK, offsets_of(rows), stack, rows_at_once=r) for r in (16, None))
    assert rms_error(together, whole.double()) < 4 * torch.finfo(dtype).eps
    starts = offsets_of(rows).tolist()
    for expert, count in enumerate(rows):
        for at in range(starts[expert], starts[expert] + count):
            own = offsets_of([int(e == expert) for e in range(4)])
            alone = multiply(x_SK[at : at + 1], own, stack, rows_at_once=16)
            assert torch.equal(alone, together[at : at + 1])


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
    experts_S = ids_TK.flatten()[rows.inverse_S.argsort()]
    assert torch.equal(rows.tokens_S, rows.inverse_S.argsort() // k)
    assert torch.equal(experts_S, experts_S.sort().values)
    counts = [int((ids_TK == e).sum()) for e in range(E)]
    assert rows.offsets.diff().tolist() == counts and rows.offsets[0] == 0
    factor_E = torch.randn(E, generator=rng)  # an expert that only multiplies by a number
    weights_TK = routing.weigh(logits_TE, ids_TK, "all")
    y_SD = routing.spread(x_TD, rows, k) * factor_E[experts_S][:, None]
    want_TD = x_TD * (weights_TK * factor_E[ids_TK]).sum(1, keepdim=True)
    torch.testing.assert_close(routing.combine(y_SD, weights_TK, rows), want_TD)


@pytest.mark.parametrize("needs_output", (True, False))
def test_a_sum_in_place_has_the_bits_and_gradients_of_a_sum_that_is_added(needs_output, rng):
    T, E, k = routing.CASES[1]
    logits_TE = torch.randn(T, E, generator=rng)
    rows = routing.sort_rows(routing.choose(logits_TE, k), E)
    inputs = [
        torch.randn(*shape, generator=rng, requires_grad=True) for shape in ((T * k, 6), (T, k), (T, 6))
    ]
    seen = torch.randn(T, 6, generator=rng)
    with torch.enable_grad():
        y_SD, weights_TK, h_TD = inputs
        want = h_TD + routing.combine(y_SD, weights_TK, rows)
        given = h_TD.clone()
        got = routing.combine(y_SD, weights_TK, rows, onto_TD=given, needs_output=needs_output)
    assert got is given and torch.equal(got, want if needs_output else h_TD)
    ours, theirs = (torch.autograd.grad(y, inputs, seen) for y in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("T", "E", "D"), ((1, 4, 64), (70, 128, 256)))
def test_a_routers_logits_are_fp32_and_its_gradient_loses_what_bf16_does(T, E, D, device, rng):
    x_TD, router_ED = (torch.randn(n, D, generator=rng).bfloat16().to(device) for n in (T, E))
    seen = torch.randn(T, E, generator=rng).to(device)
    with torch.enable_grad():
        logits_TE = frozen_linear(x_TD.requires_grad_(), router_ED)
    (dx_TD,) = torch.autograd.grad(logits_TE, x_TD, seen)
    assert logits_TE.dtype == torch.float32 and dx_TD.dtype == torch.bfloat16
    assert rms_error(logits_TE, x_TD.detach().double() @ router_ED.double().T) < 2e-5
    assert rms_error(dx_TD, seen.double() @ router_ED.double()) < 2.0**-8


def test_layers_are_sorted_as_each_alone(rng):
    ids_LTK = torch.rand(3, 11, 6, generator=rng).topk(2).indices.sort(-1).values
    for ids_TK, rows in zip(ids_LTK, routing.sort_layers(ids_LTK.flatten(1), 2, 6), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rows, routing.sort_rows(ids_TK, 6), strict=True))


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


def gradients_of(work, inputs, seed):
    with torch.enable_grad():
        y = work()
        rng = torch.Generator(y.device).manual_seed(seed)
        seen = torch.randn(y.shape, generator=rng, device=y.device)
        return y, *torch.autograd.grad((y.double() * seen).sum(), inputs)


@pytest.mark.parametrize("limit", (1 << 29, 64 * 96 * 4 * 2), ids=("one_part", "parts_of_two"))
@pytest.mark.parametrize("nums", ((6, 6), (1, 6), (6, 1)), ids=("per_expert", "shared_a", "shared_b"))
@pytest.mark.parametrize("name", ("nvfp4", "mxfp4", "bf16"))
def test_expert_products_and_their_gradients_are_the_references(name, nums, limit, rng, monkeypatch):
    monkeypatch.setattr(expert_product, "BUFFER_BYTES", limit)
    rows, (k, n, rank) = (3, 0, 7, 1, 0, 5), (96, 64, 4)
    stack, adapter = stack_of(FORMATS[name], 6, n, k, rng, spread=3.0), adapter_of(*nums, n, k, rank, rng)
    bias_EN, x_SK = torch.randn(6, n, generator=rng), torch.randn(16, k, generator=rng, requires_grad=True)
    ends, weights = offsets_of(rows).tolist(), torch.stack([stack[e].decode() for e in range(6)])
    masters = adapter.a_ERK, adapter.b_ENR
    found = gradients_of(
        lambda: expert_product.multiply(x_SK, ends, stack, bias_EN, adapter), (x_SK, *masters), 1
    )
    wanted = gradients_of(
        lambda: grouped_linear.reference(x_SK, ends, weights, bias_EN, *masters, 0.5),
        (x_SK, *masters),
        1,
    )
    for mine, other in zip(found, wanted, strict=True):
        assert rms_error(mine, other) < 1e-6


def test_a_buffer_holds_what_its_bytes_allow_and_at_least_one_expert():
    assert (
        expert_product.buffer_experts(128, 5760, 2880)
        == expert_product.BUFFER_BYTES // (5760 * 2880 * 2)
        == 8
    )
    assert expert_product.buffer_experts(8, 1 << 15, 1 << 15) == 1
    assert expert_product.buffer_experts(4, 64, 64) == 4


def test_experts_are_cut_evenly_into_the_fewest_parts():
    ends = expert_product.RowEnds(range(0, 129))
    for n, k, sizes in ((1536, 2048, [43, 43, 42]), (2048, 768, [64, 64])):
        parts = ends.grouped(expert_product.buffer_experts(128, n, k), torch.device("cpu")).parts
        assert [len(part.chosen) for part in parts] == sizes
        assert [part.rows for part in parts] == [slice(part.chosen[0], part.chosen[-1] + 1) for part in parts]
    assert expert_product.RowEnds([0, 0, 0]).grouped(4, torch.device("cpu")).parts == []


def test_a_stack_is_unpacked_into_the_buffer_by_the_chosen_weights(rng):
    for name, num, n, k in stack_unpack.CASES:
        stack, chosen = stack_of(FORMATS[name], num, n, k, rng), [0, num - 1]
        buffer = torch.full((num, n, k), float("nan"))
        got = stack_unpack.unpack_stack(stack, chosen, torch.tensor(chosen, dtype=torch.int32), buffer)
        assert torch.equal(got.double(), stack_unpack.reference(stack, chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(len(stack_unpack.CASES)))
def test_the_kernel_unpacks_every_weight_exactly(case, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    name, num, n, k = stack_unpack.CASES[case]
    rng = torch.Generator().manual_seed(case)
    stack, chosen = stack_of(FORMATS[name], num, n, k, rng, 3.0, "cuda"), [0, num - 1]
    buffer = torch.full((num, n, k), float("nan"), dtype=torch.bfloat16, device="cuda")
    chosen_G = torch.tensor(chosen, dtype=torch.int32, device="cuda")
    got = stack_unpack.unpack_stack(stack, chosen, chosen_G, buffer)
    assert torch.equal(got.double(), stack_unpack.reference(stack, chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("nums", ((6, 6), (1, 6), (6, 1)), ids=("per_expert", "shared_a", "shared_b"))
@pytest.mark.parametrize("name", ("nvfp4", "mxfp4", "bf16"))
def test_on_a_gpu_expert_products_lose_what_torch_loses(name, nums, monkeypatch, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    rng, rows, (k, n, rank) = torch.Generator().manual_seed(0), (33, 0, 70, 1, 0, 150), (320, 256, 4)
    monkeypatch.setattr(expert_product, "BUFFER_BYTES", k * n * 2 * 2)
    stack = stack_of(FORMATS[name], 6, n, k, rng, 2.0, "cuda")
    cpu = adapter_of(*nums, n, k, rank, rng)
    masters = [m.detach().cuda().bfloat16().float().requires_grad_() for m in cpu[:2]]
    adapter = GroupedAdapter(*masters, *(m.detach().bfloat16() for m in masters), 0.5)
    bias_EN = torch.randn(6, n, generator=rng).cuda().bfloat16()
    x_SK = torch.randn(sum(rows), k, generator=rng).cuda().bfloat16().requires_grad_()
    ends, weights = offsets_of(rows).tolist(), torch.stack([stack[e].decode() for e in range(6)])
    inputs = x_SK, *masters
    assert expert_product.can_multiply(x_SK, stack)
    offsets = offsets_of(rows).cuda()
    found = gradients_of(
        lambda: grouped_linear.grouped_linear(x_SK, offsets, stack, bias_EN=bias_EN, adapter=adapter),
        inputs,
        1,
    )
    wanted = gradients_of(
        lambda: grouped_linear.reference(x_SK, ends, weights, bias_EN, *masters, 0.5), inputs, 1
    )
    monkeypatch.setattr(grouped_linear, "can_multiply", lambda x, stack: False)
    plain = gradients_of(
        lambda: grouped_linear.grouped_linear(x_SK, offsets, stack, bias_EN=bias_EN, adapter=adapter),
        inputs,
        1,
    )
    for what, mine, other, torchs in zip(("y", "dx", "da", "db"), found, wanted, plain, strict=True):
        error, theirs = rms_error(mine, other), rms_error(torchs, other)
        print(f"{name} {what} {error:.2e} torch {theirs:.2e}")
        # The experts' product, what adapters add and their sum are each rounded; torch rounds two of them.
        assert error <= 1.1 * math.sqrt(3 / 2) * max(theirs, 2.0**-9), what


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E", "k", "D"), ((5, 4, 2, 64), (64, 32, 4, 2880), (9, 8, 3, 4104)))
def test_on_a_gpu_sums_over_a_tokens_rows_and_their_gradients_are_the_references(T, E, k, D, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    rng = torch.Generator("cuda").manual_seed(0)
    x_TD = torch.randn(T, D, generator=rng, device="cuda").bfloat16().requires_grad_()
    logits_TE = torch.randn(T, E, generator=rng, device="cuda", requires_grad=True)
    ids_TK = routing.choose(logits_TE, k)
    rows = routing.sort_rows(ids_TK, E)

    # Experts that did the same would leave the logits no gradient; powers of two are exact in bf16.
    factors_TK1 = 2.0 ** (ids_TK[..., None] % 5)

    def work(x, dtype):
        weights_TK = routing.weigh(logits_TE, ids_TK, "chosen").to(dtype)
        if dtype == torch.float32:
            factors_S1 = factors_TK1.flatten(0, 1)[rows.inverse_S.argsort()].to(x.dtype)
            return routing.combine(routing.spread(x, rows, k) * factors_S1, weights_TK, rows)
        return (x[:, None] * factors_TK1 * weights_TK[..., None]).sum(1)

    found = gradients_of(lambda: work(x_TD, torch.float32), (x_TD, logits_TE), 1)
    wanted = gradients_of(lambda: work(x_TD.double(), torch.float64), (x_TD, logits_TE), 1)
    for mine, other, most in zip(found, wanted, (1e-6, 4e-3, 1e-5), strict=True):
        assert rms_error(mine, other) < most
    y_SD, weights_TK = routing.spread(x_TD.detach(), rows, k), torch.rand(T, k, device="cuda")
    h_TD = torch.randn(T, D, generator=rng, device="cuda")
    want_TD = h_TD + routing.combine(y_SD, weights_TK, rows)
    assert torch.equal(routing.combine(y_SD, weights_TK, rows, onto_TD=h_TD), want_TD)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "F"), clamped_swiglu.CASES)
def test_on_a_gpu_the_clamped_swiglu_of_pairs_and_its_gradient_are_the_references(T, F, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    rng, settings = torch.Generator("cuda").manual_seed(0), {"alpha": 1.702, "limit": 0.7}
    x_T2F = torch.randn(T, 2 * F, generator=rng, device="cuda").bfloat16().requires_grad_()
    found = gradients_of(lambda: clamped_swiglu.clamped_swiglu_pairs(x_T2F, **settings), (x_T2F,), 1)
    wanted = gradients_of(
        lambda: clamped_swiglu.reference(*x_T2F.double().unflatten(1, (-1, 2)).unbind(2), **settings),
        (x_T2F,),
        1,
    )
    for mine, other in zip(found, wanted, strict=True):
        assert rms_error(mine, other) < 2.0**-8
