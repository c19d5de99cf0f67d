"""The adapters of linears in tiles, as the kernels of a decode step read them."""

import pytest
import torch

from engine.decode.test_decode_steps import SMALL
from qerl.engine.decode.linears import LinearGroup
from qerl.kernels.tiles.nvfp4_decode import swiglu_order
from qerl.models.mixture import copy_masters
from qerl.models.random_weights import random_decoder

CPU = torch.device("cpu")


def groups_of(rank):
    decoder = random_decoder(SMALL, format="nvfp4", rank=rank, device=CPU, seed=3)
    layer = decoder.layers[0]
    layer.tile()
    return list(map(LinearGroup, layer.linear_groups))


def added(group):
    """What the adapters add to each linear's weight, in the linears' own order."""
    order = swiglu_order(group.ends[0], CPU) if group.is_interleaved else slice(None)
    b_NR = torch.empty_like(group.b)
    b_NR[order] = group.b
    firsts, rank = (0, *group.ends[:-1]), group.b.shape[1]
    return [
        group.scaling * b_NR[first:end].double() @ a_RK.double()
        for first, end, a_RK in zip(firsts, group.ends, group.a.split(rank), strict=True)
    ]


@pytest.mark.parametrize(("rank", "padded"), [(1, 16), (8, 16), (16, 16), (20, 32), (128, 128)])
def test_operands_have_zeros_up_to_a_rank_of_the_kernels(rank, padded):
    for group in groups_of(rank):
        a, b = group.a, group.b
        assert b.shape[1] == padded and len(a) == padded * len(group.linears)
        with torch.no_grad():
            for linear in group.linears:
                linear.lora_A.mul_(2)
        copy_masters(group.linears)
        group.publish()
        assert group.a is a and group.b is b and a.is_contiguous() and b.is_contiguous()
        for got, linear in zip(added(group), group.linears, strict=True):
            want = linear.scaling * linear.b_work.double() @ linear.a_work.double()
            assert want.std() > 0 and torch.equal(got, want)
