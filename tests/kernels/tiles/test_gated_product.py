"""Packed products that end in gelu(gate) * up, with biases, for Hopper and for any GPU."""

import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from kernels import kernel_uses
from kernels.tiles.test_nvfp4_decode import case, low_ranks, torch_path
from qerl.kernels.runtime.architectures import ARCHITECTURES
from qerl.kernels.tiles import nvfp4_decode as op
from qerl.kernels.tiles.packed_product import gate_defines
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.portable_tile import FILE, rule

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def test_silu_has_the_constants_that_it_had():
    assert gate_defines(0) == {"SWIGLU": 0} and gate_defines(1) == {"SWIGLU": 1}
    assert gate_defines(3) == {"SWIGLU": 1, "GATE": 3}


@pytest.mark.parametrize("gate", [2, 3])
def test_gelu_compiles(gate):
    pytest.importorskip("cuda.bindings.nvrtc")
    tile = rule(8, 512, 256, ARCHITECTURES["sm_90a"])
    assert kernel_uses.uses(FILE, tile.defines(16, gate), "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("kind", [op.NVFP4Decode, PortableProduct])
def test_no_less_exact_than_torch(kind, activation, has_bias, rng):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    function, kernels = FUNCTIONS[activation], kind(torch.device("cuda"))
    for M, F_, K, R in ((1, 64, 256, 0), (8, 512, 576, 16), (100, 256, 896, 32)):
        codes, scales, x, alpha, a, b = case(M, 2 * F_, K, R, rng, groups=2)
        alpha, adapter = alpha * 0.02, None
        bias = torch.randn(2 * F_, generator=rng).cuda() if has_bias else None
        truth = op.reference(x, codes, scales, alpha, bias_N=bias)
        plain = torch_path(codes, scales, x, alpha, bias=bias)
        order = op.swiglu_order(F_, x.device)
        if R:
            exact, plain_u = (
                torch.cat((u[:, :R] @ b[:F_].to(u.dtype).T, u[:, R:] @ b[F_:].to(u.dtype).T), dim=1)
                for u in low_ranks(x, a, 0.02)
            )
            truth, plain = truth + exact, plain + plain_u
            u = ((x @ a.T).float() * 0.02).bfloat16().contiguous()
            adapter = op.PackedAdapter(a, b[order].contiguous(), 0.02, (), u)
        tiles = op.pack(codes[order], scales.view(torch.uint8)[order].view(torch.float8_e4m3fn))
        got = kernels.swiglu(
            x,
            tiles,
            op.row_factors(alpha[order], 2 * F_),
            adapter=adapter,
            bias_N=None if bias is None else bias[order],
            activation=activation,
        )
        wanted = function(truth[:, :F_]) * truth[:, F_:]
        theirs = function(plain[:, :F_]) * plain[:, F_:]
        assert rms_error(got, wanted) <= 1.1 * rms_error(theirs, wanted), (M, F_, K)
