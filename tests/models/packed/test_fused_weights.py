"""Weights of one input as one operand: each linear's own numbers, one copy, adapters in the same product."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from models.tiny import logits_of, tiny
from qerl.config import AdapterConfig
from qerl.formats import BF16, FORMATS
from qerl.kernels.linear.int8_codes import Rotation
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.linear import QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mixture import copy_masters
from qerl.models.packed import packed_linear as op
from qerl.models.packed.fused_weights import FusedBF16, FusedPacked, fuse_weights
from qerl.models.peft.adapter import adapter_off, adapter_tensors, add_adapter, publish

CPU, K = torch.device("cpu"), 64
WIDTHS = (96, 64, 64)
JOINED = [name for name in FORMATS if name != "fp8-flow"]

# What torch says when a backward pass is the first to use cuBLAS on its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


@pytest.fixture
def fuses(monkeypatch):
    """Fuse on this device too, as on a GPU."""
    monkeypatch.setattr(op, "_is_fused_on", lambda device: True)


def linears_of(
    rng, *, widths=WIDTHS, format="bf16", compute=torch.bfloat16, ranks=(8, 8, 8), device=CPU, bias=True
):
    made = []
    for n, rank in zip(widths, ranks, strict=False):
        linear = QuantLinear(K, n, has_bias=bias, compute=compute, device=device)
        linear.load_weight(FORMATS[format].encode((torch.randn(n, K, generator=rng) / K**0.5).to(device)))
        if bias:
            linear.bias.copy_(torch.randn(n, generator=rng))
        if rank:
            a_RK, b_NR = torch.randn(rank, K, generator=rng) / K**0.5, torch.randn(n, rank, generator=rng)
            linear.add_adapter(a_RK.to(device), b_NR.to(device), 0.5)
        made.append(linear)
    return made


def masters_of(linears):
    return [m for linear in linears if linear.a_work is not None for m in (linear.lora_A, linear.lora_B)]


def results(function, x, leaves):
    """The value, and the gradient in x and the leaves."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *leaves], dy)]


def exactly(linears):
    """The definition in float64, of what the products multiply."""

    def y_of(x):
        found = []
        for linear in linears:
            y = x @ linear.weight.decode().double().T
            if linear.rank:
                y = y + linear.scaling * (x @ linear.lora_A.double().T) @ linear.lora_B.double().T
            found.append(y if linear.bias is None else y + linear.bias.double())
        return torch.cat(found, 1)

    return y_of


def rounded_masters(linears):
    """Masters that the working copies hold exactly."""
    for linear in linears:
        if linear.a_work is not None:
            linear.lora_A.data.copy_(linear.a_work)
            linear.lora_B.data.copy_(linear.b_work)


@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 0, 8), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("format", JOINED)
def test_fp32_values_and_gradients_are_the_definitions(format, ranks, fuses, rng):
    linears = linears_of(rng, format=format, compute=torch.float32, ranks=ranks)
    x, masters = torch.randn(11, K, generator=rng), masters_of(linears)
    got = results(lambda x: torch.cat(op.project(x, linears), 1), x, masters)
    for ours, want in zip(got, results(exactly(linears), x.double(), masters), strict=True):
        assert rms_error(ours, want) < 1e-5
    assert isinstance(linears[0].fused, FusedPacked)


@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 0, 8), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("format", JOINED)
def test_bf16_loses_no_more_than_products_of_their_own(format, ranks, fuses, device, rng):
    linears = linears_of(rng, format=format, ranks=ranks, device=device)
    rounded_masters(linears)
    x = torch.randn(300, K, generator=rng).bfloat16().to(device)
    masters = masters_of(linears)
    apart = results(lambda x: torch.cat([linear(x) for linear in linears], 1), x, masters)
    joined = results(lambda x: torch.cat(op.project(x, linears), 1), x, masters)
    exact = results(exactly(linears), x.double(), masters)
    for ours, theirs, want in zip(joined, apart, exact, strict=True):
        assert rms_error(ours, want) <= 1.1 * rms_error(theirs, want)
    assert isinstance(linears[0].fused, FusedBF16 if format == "bf16" else FusedPacked)


@pytest.mark.parametrize("format", JOINED)
def test_swiglu_and_the_residual_ride_in_the_products(format, fuses, device, rng):
    gate_up = linears_of(rng, widths=(64, 64), format=format, device=device, bias=False)
    (down,) = linears_of(rng, widths=(96,), format=format, device=device, bias=False)
    rounded_masters([*gate_up, down])
    x = torch.randn(200, K, generator=rng).bfloat16().to(device)
    h = torch.randn(200, 96, generator=rng).to(device)
    masters = masters_of([*gate_up, down])

    def ours(x):
        return op.project_onto(h.clone(), op.project_swiglu(x, gate_up, room=8), down, gaps_are_free=True)

    def apart(x):
        gate, up = (linear(x) for linear in gate_up)
        return h + down(F.silu(gate) * up)

    def exact(x):
        gate, up = exactly(gate_up)(x).chunk(2, 1)
        return h.double() + exactly([down])(F.silu(gate) * up)

    found = (results(f, z, masters) for f, z in ((ours, x), (apart, x), (exact, x.double())))
    for got, theirs, want in zip(*found, strict=True):
        assert rms_error(got, want) <= 1.1 * rms_error(theirs, want)
    assert not torch.equal(ours(x), h)


def test_bf16_weights_and_b_are_slices_of_one_tensor_and_nothing_is_copied_again(rng):
    linears = linears_of(rng, ranks=(8, 0, 16))
    before = [linear.weight.decode() for linear in linears]
    num_bytes = sum(linear.num_bytes for linear in linears)
    fused = fuse_weights(linears)
    assert fuse_weights(linears) is fused and fused.wide_NC.shape == (sum(WIDTHS), K + 32)
    assert fused.rank == 24 and not fused.wide_NC[:, K + 24 :].any()
    assert fused.wide_NC.stride() == (128, 1)
    row = 0
    for linear, weight, columns in zip(linears, before, ((0, 8), None, (8, 24)), strict=True):
        rows, row = fused.wide_NC[row : row + linear.out_width], row + linear.out_width
        assert linear.weight.weight.data_ptr() == linear.operand().data_ptr() == rows.data_ptr()
        assert torch.equal(linear.weight.decode(), weight)
        b_NR = torch.zeros(linear.out_width, 32).bfloat16()
        if columns is not None:
            b_NR[:, slice(*columns)] = linear.b_work
        assert torch.equal(rows[:, K:], b_NR)
    assert sum(linear.num_bytes for linear in linears) == num_bytes


def test_publish_and_nothing_else_reaches_the_adapters_columns(fuses, rng):
    linears, x = linears_of(rng), torch.randn(5, K, generator=rng).bfloat16()
    before = op.project(x, linears)
    wide_NC = linears[0].fused.wide_NC
    with torch.no_grad():
        for linear in linears:
            linear.lora_A.mul_(2)
            linear.lora_B.add_(1)
    assert all(map(torch.equal, op.project(x, linears), before))
    for linear in linears:
        copy_masters([linear])
    assert linears[0].fused.wide_NC is wide_NC
    rounded_masters(linears)
    got = torch.cat(op.project(x, linears), 1)
    assert rms_error(got, exactly(linears)(x.double())) < 5e-3


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_switched_off_adapters_are_left_out_and_come_back(format, fuses):
    compute = torch.bfloat16 if format == "bf16" else torch.float32
    decoder, tokens_T = tiny("Qwen2", compute=compute), torch.arange(30) * 11 % 61
    for _, linear in decoder.linears():
        linear.load_weight(FORMATS[format].encode(linear.weight.decode()))
    bare = logits_of(decoder, tokens_T)
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    publish(decoder)
    on = logits_of(decoder, tokens_T)
    with adapter_off(decoder):
        assert torch.equal(logits_of(decoder, tokens_T), bare)
    assert torch.equal(logits_of(decoder, tokens_T), on) and (on - bare).abs().max() > 0.1


def test_a_new_weight_or_adapter_makes_a_new_tensor(fuses, rng):
    linears, x = linears_of(rng), torch.randn(5, K, generator=rng).bfloat16()
    first = fuse_weights(linears)
    linears[1].load_weight(BF16.encode(torch.randn(64, K, generator=rng).bfloat16()))
    linears[2].add_adapter(torch.randn(16, K, generator=rng), torch.randn(64, 16, generator=rng), 0.25)
    second = fuse_weights(linears)
    assert second is not first and second.wide_NC.shape[1] == K + 8 + 8 + 16
    rounded_masters(linears)
    assert rms_error(torch.cat(op.project(x, linears), 1), exactly(linears)(x.double())) < 5e-3
    assert fuse_weights(linears[::-1]) is not second and fuse_weights(linears) is not second


def test_a_weight_that_learns_itself_multiplies_for_itself(fuses, rng):
    linears, x = linears_of(rng, ranks=(0, 0, 0)), torch.randn(5, K, generator=rng).bfloat16()
    fuse_weights(linears)  # as the decode step does
    for linear in linears:
        linear.learn_weight()
    op.project(x, linears)[1].sum().backward()
    assert linears[1].full.grad is not None
    with torch.no_grad():
        linears[1].full.mul_(2)
    copy_masters([linears[1]])
    assert torch.equal(linears[1].fused.wide_NC[96:160], linears[1].full.bfloat16())


def test_what_has_no_common_operand_multiplies_linear_by_linear(fuses, rng):
    assert fuse_weights(linears_of(rng, format="fp8-flow")) is None
    resident = linears_of(rng, format="nf4")
    resident[0].make_resident()
    assert fuse_weights(resident) is None
    plain = linears_of(rng)
    plain[0].make_resident()  # BF16's operand is the weight itself
    assert fuse_weights(plain) is not None and plain[0].is_resident and not plain[1].is_resident


def test_an_unpacked_operand_serves_the_next_product(fuses, rng, monkeypatch):
    linears, x = linears_of(rng, format="nf4"), torch.randn(5, K, generator=rng).bfloat16()
    calls, unpack = [], FORMATS["nf4"].operand
    monkeypatch.setattr(FORMATS["nf4"], "operand", lambda self, dtype: calls.append(1) or unpack(self, dtype))

    def learn(linear_pass):
        calls.clear()
        return results(lambda x: torch.cat(op.project(x, linears, linear_pass), 1), x, masters_of(linears))

    plain, counts = learn(PLAIN), [len(calls)]
    for mode in (PLAIN.repeating(), PLAIN.holding()):
        with mode as linear_pass:
            for found in (learn(linear_pass), learn(linear_pass)):
                counts.append(len(calls))
                assert all(map(torch.equal, found, plain))
    assert counts == [6, 3, 3, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(16, 8, 16), (4, 0, 12)], ids=str)
@pytest.mark.parametrize("format", JOINED)
def test_on_a_gpu_it_is_the_definition(format, ranks, device, rng):
    """The ranks: some for which a kernel places b, and others."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    linears = linears_of(rng, format=format, ranks=ranks, device=device)
    rounded_masters(linears)
    x = torch.randn(40, K, generator=rng).bfloat16().to(device)
    got = torch.cat(op.project(x, linears), 1)
    assert rms_error(got, exactly(linears)(x.double())) < 5e-3 and linears[0].fused is not None


def test_tiles_stay_tiles(fuses, rng):
    linears = linears_of(rng, widths=(64, 64), format="nvfp4", ranks=(8, 8))
    assert op.tile_linears(linears, UnpackRows.GATE_UP)
    x = torch.randn(9, K, generator=rng).bfloat16()
    op.project(x, linears)
    assert all(linear.fused is None for linear in linears)


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_a_hook_sees_the_input_of_a_product_that_would_be_fused(fuses, rng, format):
    """Calibration reads inputs by hooks; on a GPU a fused product passed them by."""
    linears, seen = linears_of(rng, format=format), []
    x_TK = torch.randn(5, K, generator=rng).bfloat16()
    handle = linears[0].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    op.project(x_TK, linears)
    handle.remove()
    op.project(x_TK, linears)
    assert len(seen) == 1 and torch.equal(seen[0], x_TK)


@pytest.mark.parametrize("format", JOINED)
def test_a_backward_pass_in_int8_rounds_the_inputs_gradient_alone(format, fuses, rng):
    linears = linears_of(rng, widths=(64, 64, 64), format=format)
    x = torch.randn(7, K, generator=rng).bfloat16().requires_grad_()
    dy = torch.randn(7, 192, generator=rng).bfloat16()
    found = []
    for linear_pass in (PLAIN, LinearPass(backward="int8")):
        y = torch.cat(op.project(x, linears, linear_pass), 1)
        found.append([y, *torch.autograd.grad(y, [x, *masters_of(linears)], dy)])
    (y, dx, *masters), (got_y, got_dx, *got_masters) = found
    assert torch.equal(got_y, y) and all(map(torch.equal, got_masters, masters))
    assert 0.002 < rms_error(got_dx, dx) < 0.02


def test_codes_of_int8_are_made_once_while_operands_are_held(fuses, rng, monkeypatch):
    linears = linears_of(rng, widths=(64, 64, 64), format="nvfp4")
    made = []
    codes = Rotation.codes
    monkeypatch.setattr(Rotation, "codes", lambda *given: made.append(1) or codes(*given))
    int8 = LinearPass(backward="int8")

    def learn(linear_pass):
        x = torch.ones(3, K, dtype=torch.bfloat16, requires_grad=True)
        torch.cat(op.project(x, linears, linear_pass), 1).sum().backward()

    with int8.holding() as linear_pass:
        learn(linear_pass), learn(linear_pass)
    assert len(made) == 1
    learn(int8), learn(int8)
    with int8.repeating() as linear_pass:
        learn(linear_pass)
    assert len(made) == 4


def test_a_weight_that_is_loaded_again_is_rounded_by_its_own_maxima(fuses, rng):
    """The second of a group: the first one keeps what is known of both."""
    linears = linears_of(rng, widths=(64, 64), format="nvfp4")
    int8 = LinearPass(backward="int8")
    x = torch.randn(5, K, generator=rng).bfloat16().requires_grad_()
    (before,) = torch.autograd.grad(torch.cat(op.project(x, linears, int8), 1).sum(), x)
    new = FORMATS["nvfp4"].encode(torch.randn(64, K, generator=rng) * 100)
    linears[1].load_weight(new)
    y = torch.cat(op.project(x, linears, int8), 1)
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(torch.cat(op.project(x, linears), 1).sum(), x)
    assert rms_error(got, want) < 0.02 < rms_error(before, want)


@pytest.mark.parametrize("is_repeated", (False, True))
def test_gate_and_up_are_products_of_integers_only_where_gradients_alone_need_them(is_repeated, fuses, rng):
    linears = linears_of(rng, widths=(128, 128), format="nvfp4", bias=False)
    x = torch.randn(7, K, generator=rng).bfloat16().requires_grad_()
    found = []
    for plain in (PLAIN, LinearPass(backward="int8")):
        with plain.repeating() if is_repeated else contextlib.nullcontext(plain) as linear_pass:
            y = op.project_swiglu(x, linears, linear_pass, room=0)
            found.append([y, *torch.autograd.grad(y.sum(), [x, *masters_of(linears)])])
    (y, *gradients), (got_y, *got) = found
    assert torch.equal(y, got_y) != is_repeated and rms_error(got_y, y) < 0.04
    assert all(rms_error(x, want) < 0.06 for x, want in zip(got, gradients, strict=True))
