import pytest
import torch

from conftest import rms_error
from qerl.formats import FORMATS
from qerl.formats.fp8_flow import rounded_rows
from qerl.models.linear import QuantLinear
from qerl.models.mixture import copy_masters

CPU = torch.device("cpu")


def _linear(rng, *, weight_format="nvfp4", compute=torch.float32, has_bias=True, rank=None):
    linear = QuantLinear(64, 96, has_bias=has_bias, compute=compute, device=CPU)
    linear.load_weight(FORMATS[weight_format].encode(torch.randn(96, 64, generator=rng)))
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(96, generator=rng))
    if rank is not None:
        a_RK, b_NR = torch.randn(rank, 64, generator=rng), torch.randn(96, rank, generator=rng)
        linear.add_adapter(a_RK, b_NR, 0.5)
    return linear


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("rank", (None, 4))
def test_the_product_is_that_of_the_decoded_weight(weight_format, rank, rng):
    linear = _linear(rng, weight_format=weight_format, rank=rank)
    x_TK = torch.randn(11, 64, generator=rng)
    read_TK = rounded_rows(x_TK) if weight_format == "fp8-flow" else x_TK
    y_TN = read_TK.double() @ linear.weight.decode().double().T
    if rank is not None:
        y_TN = y_TN + 0.5 * x_TK.double() @ linear.lora_A.double().T @ linear.lora_B.double().T
    assert rms_error(linear(x_TK), y_TN + linear.bias.double()) < 1e-5


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_a_resident_operand_changes_no_bit(weight_format, compute, rng):
    linear = _linear(rng, weight_format=weight_format, compute=compute, rank=4)
    x_TK = torch.randn(11, 64, generator=rng).to(compute)
    fresh = linear(x_TK)
    before = linear.num_bytes
    linear.make_resident()
    assert fresh.dtype == compute and torch.equal(linear(x_TK), fresh)
    itemsize = 4 if weight_format == "fp8-flow" else compute.itemsize
    shared = weight_format == "bf16" and compute == torch.bfloat16
    assert linear.num_bytes - before == (0 if shared else 96 * 64 * itemsize)


def test_bytes_are_those_of_weight_and_bias(rng):
    assert _linear(rng).num_bytes == 96 * 64 // 2 + 96 * 64 // 16 + 4 + 96 * 4
    assert _linear(rng, has_bias=False, rank=4).num_bytes == 96 * 64 // 2 + 96 * 64 // 16 + 4


def test_a_new_weight_replaces_a_resident_one(rng):
    linear, other = _linear(rng, has_bias=False), _linear(rng, has_bias=False)
    linear.make_resident()
    linear.load_weight(other.weight)
    x_TK = torch.randn(3, 64, generator=rng)
    assert torch.equal(linear(x_TK), other(x_TK))


def test_a_weight_of_another_shape_is_refused(rng):
    linear = QuantLinear(96, 64, has_bias=False, compute=torch.float32, device=CPU)
    with pytest.raises(AssertionError):
        linear.load_weight(_linear(rng).weight)


def test_publish_copies_in_place_and_nothing_else_does(rng):
    linear, x_TK = _linear(rng, rank=4), torch.randn(3, 64, generator=rng)
    before, places = linear(x_TK), [w.data_ptr() for w in (linear.a_work, linear.b_work)]
    with torch.no_grad():
        linear.lora_A.mul_(2)
        linear.lora_B.add_(1)
    assert torch.equal(linear(x_TK), before)
    copy_masters([linear])
    assert [w.data_ptr() for w in (linear.a_work, linear.b_work)] == places
    w_NK = linear.weight.decode().double() + 0.5 * linear.lora_B.double() @ linear.lora_A.double()
    assert rms_error(linear(x_TK), x_TK.double() @ w_NK.T + linear.bias.double()) < 1e-5


def test_a_switched_off_adapter_leaves_the_weight_alone(rng):
    linear, x_TK = _linear(rng, rank=4), torch.randn(3, 64, generator=rng)
    linear.adapter_enabled = False
    want = x_TK.double() @ linear.weight.decode().double().T + linear.bias.double()
    assert rms_error(linear(x_TK), want) < 1e-5
    x_TK.requires_grad_()
    linear(x_TK).sum().backward()
    assert rms_error(x_TK.grad, linear.weight.decode().sum(0).expand(3, 64)) < 1e-5
