"""A decode step's products of BF16 weights: one for all linears of an input and their adapters."""

import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from models.packed.test_fused_weights import K, exactly, linears_of, rounded_masters
from qerl.engine.decode import linears as op
from qerl.kernels.tiles.row_slots import kernel_rank
from qerl.models.mixture import copy_masters

WIDTHS = (96, 64, 64)


def group_of(rng, **settings):
    linears = linears_of(rng, **settings)
    rounded_masters(linears)
    return op.LinearGroup(linears), exactly(linears)


def given(group, x):
    """(x, u) as the kernels leave them: side by side."""
    x_BK, u_BR = group.empty_input(len(x), x)
    x_BK.copy_(x)
    return x_BK, u_BR.copy_(group.scaling * x @ group.a.T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (0, 16, 0), (8, 0, 24), (8, 8, 8), (1, 0, 0)], ids=str)
def test_a_groups_product_is_its_linears(ranks, bias, device, rng):
    group, exact = group_of(rng, ranks=ranks, bias=bias, device=device)
    assert group.room == len(group.a) == kernel_rank(sum(ranks)) and group.b is None
    x = torch.randn(7, K, generator=rng).bfloat16().to(device)
    residual = torch.randn(7, sum(WIDTHS), generator=rng).to(device)
    want, linears = exact(x.double()), op.TorchLinears()
    apart = torch.cat([linear(x) for linear in group.linears], 1)
    for inputs in (given(group, x), (x, group.scaling * x @ group.a.T)):  # u somewhere else is copied
        got = linears.linear(inputs[0], group, inputs[1], None)
        assert got.dtype == torch.bfloat16 and rms_error(got, want) <= 1.1 * rms_error(apart, want)
        place = residual.clone()
        onto = linears.linear(inputs[0], group, inputs[1], place)
        assert onto.data_ptr() == place.data_ptr() and onto.dtype == torch.float32
        assert rms_error(onto, residual.double() + want) < rms_error(apart, want)


def test_x_and_u_side_by_side_are_multiplied_at_once(device, rng, monkeypatch):
    group, _ = group_of(rng, device=device)
    x, u = given(group, torch.randn(7, K, generator=rng).bfloat16().to(device))
    calls, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *a: calls.append([t.data_ptr() for t in a[:2]]) or linear(*a))
    monkeypatch.setattr(torch, "cat", None)
    op.TorchLinears().linear(x, group, u, None)
    assert calls == [[x.data_ptr(), group.linears[0].operand().data_ptr()]]


def test_swiglu_leaves_room_for_the_next_products_u(device, rng):
    gate_up, exact = group_of(rng, widths=(64, 64), device=device, bias=False)
    down, _ = group_of(rng, widths=(96,), device=device)
    x, u = given(gate_up, torch.randn(7, K, generator=rng).bfloat16().to(device))
    y = op.TorchLinears(down.room).swiglu(x, gate_up, u)
    gate, up = exact(x.double()).chunk(2, 1)
    assert rms_error(y, F.silu(gate) * up) < 1e-2
    if device.type == "cuda":
        assert down.behind(y).data_ptr() == y.data_ptr() + 2 * K
    else:
        assert y.is_contiguous()


def test_without_adapters_or_with_them_switched_off_the_weight_alone_is_multiplied(device, rng):
    x = torch.randn(7, K, generator=rng).bfloat16().to(device)
    bare, exact = group_of(rng, ranks=(0, 0, 0), device=device)
    assert bare.a is None and bare.room == 0 and bare.wide_NC.is_contiguous()
    assert rms_error(op.TorchLinears().linear(x, bare, None, None), exact(x.double())) < 5e-3
    linears = linears_of(rng, device=device)
    for linear in linears:
        linear.adapter_enabled = False
    off = op.LinearGroup(linears)
    assert off.a is None and off.wide_NC.shape[1] == K + 32  # ranks of 24 in all
    assert rms_error(op.TorchLinears().linear(x, off, None, None), exactly(linears)(x.double())) < 5e-3


def test_publishing_the_linears_and_the_group_takes_over_both_matrices(device, rng):
    group, exact = group_of(rng, device=device)
    a, wide_NC = group.a, group.wide_NC
    with torch.no_grad():
        for linear in group.linears:
            linear.lora_A.mul_(2)
            linear.lora_B.mul_(4)
    copy_masters(group.linears)
    group.publish()
    x = torch.randn(7, K, generator=rng).bfloat16().to(device)
    x, u = given(group, x)
    assert group.a is a and group.wide_NC is wide_NC
    assert rms_error(op.TorchLinears().linear(x, group, u, None), exact(x.double())) < 5e-3


def test_a_second_group_of_the_same_linears_takes_no_memory(rng):
    group, _ = group_of(rng)
    assert op.LinearGroup(group.linears).wide_NC is group.wide_NC
