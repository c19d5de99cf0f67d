"""A decode step's products of FP8Flow: joined where whole blocks meet, and each linear's own to rounding."""

import pytest
import torch

from conftest import rms_error
from qerl.engine.decode.linears import LinearGroup, TorchLinears
from qerl.formats import FP8Flow
from qerl.models.linear import QuantLinear

K, RANK = 256, 4


def linears(widths, rng):
    made = []
    for n in widths:
        linear = QuantLinear(K, n, has_bias=True, compute=torch.float32, device=torch.device("cpu"))
        linear.load_weight(FP8Flow.encode(torch.randn(n, K, generator=rng) * (1 + len(made))))
        linear.bias.copy_(torch.randn(n, generator=rng))
        linear.add_adapter(torch.randn(RANK, K, generator=rng), torch.randn(n, RANK, generator=rng), 0.5)
        made.append(linear)
    return made


@pytest.mark.parametrize("widths", [(256, 128, 128), (128, 192), (192, 64, 64), (384,)])
def test_a_groups_product_is_its_linears(widths, rng):
    each = linears(widths, rng)
    x = torch.randn(7, K, generator=rng)
    want = torch.cat([linear(x) for linear in each], 1)
    num_bytes = sum(linear.num_bytes for linear in each)
    group = LinearGroup(each)
    assert (group.fp8 is None) == any(n % 128 for n in widths[:-1])
    u = 0.5 * x @ group.a.T
    residual = torch.randn(7, sum(widths), generator=rng)
    assert rms_error(TorchLinears().linear(x, group, u, None), want) < 1e-6
    assert rms_error(TorchLinears().linear(x, group, u, residual.clone()), residual + want) < 1e-6
    assert rms_error(torch.cat([linear(x) for linear in each], 1), want) < 1e-6
    assert sum(linear.num_bytes for linear in each) == num_bytes
    if group.fp8 is not None:  # one copy: the linears' weights are rows of the group's
        storage = group.fp8.codes.untyped_storage().data_ptr()
        assert {linear.weight.codes.untyped_storage().data_ptr() for linear in each} == {storage}
