"""A token a row through Gated DeltaNet: the kernel against float64, the reference against the modules."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from benchmarks import matrix
from conftest import rms_error
from kernels import kernel_uses
from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.delta_net import delta_net_step as op
from qerl.kernels.delta_net.delta_net_step import DeltaNetStep, DeltaWeights, Gates
from qerl.kernels.delta_net.gated_delta_net import DeltaInputs, DeltaShape, DeltaState, mix_step
from qerl.kernels.runtime.architectures import ARCHITECTURES, architecture_of
from qerl.models.random_weights import SHAPES


def on_gpu(test):
    is_absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(is_absent, reason="needs a CUDA GPU")(test))


@dataclasses.dataclass(eq=False)
class Case:
    shape: DeltaShape
    is_by_head: bool
    y: torch.Tensor
    gates: Gates
    weights: DeltaWeights
    conv: torch.Tensor
    state: torch.Tensor
    rows: DecodeState

    def operands(self):
        return self.y, self.gates, self.weights, self.conv, self.state, self.rows

    def copy(self):
        return dataclasses.replace(self, conv=self.conv.clone(), state=self.state.clone())

    def of_rows(self, index):
        gates = {f.name: getattr(self.gates, f.name) for f in dataclasses.fields(Gates)}
        gates["x_BN"] = gates["x_BN"][index].contiguous()
        gates["u_BR"] = None if gates["u_BR"] is None else gates["u_BR"][index].contiguous()
        names = "positions_B", "states_B"
        rows = dataclasses.replace(self.rows, **{n: getattr(self.rows, n)[index] for n in names})
        return dataclasses.replace(self.copy(), y=self.y[index], gates=Gates(**gates), rows=rows)

    def by_reference(self):
        return op.reference(*self.operands(), self.shape, self.is_by_head)

    def by_kernel(self, max_ctas=-1):
        kernel = DeltaNetStep(self.shape, len(self.y), self.y.device, is_by_head=self.is_by_head)
        if max_ctas != -1:
            kernel._max_ctas = max_ctas
        return kernel.step(*self.operands())

    def by_torch(self):
        """The same through the modules' own functions, in y's dtype."""
        live = self.rows.positions_B >= 0
        slots = self.rows.states_B[live].long()
        qkv, z = op.split_parts(self.y[live], self.shape, self.is_by_head)
        x = op._gates(self.gates).to(self.y.dtype)[live]
        b, a = op._split_gates(x, self.shape, self.is_by_head)
        log_decay = -self.weights.a_log_N.exp() * F.softplus(a.float() + self.weights.dt_bias_N)
        inputs = DeltaInputs(qkv, log_decay, b.float().sigmoid(), self.weights.conv_CW, self.shape)
        o, after = mix_step(inputs, DeltaState(self.conv[slots], self.state[slots]))
        self.conv[slots], self.state[slots] = after
        inverse = (o.float().square().mean(-1, keepdim=True) + self.weights.eps).rsqrt()
        o = (o.float() * inverse * self.weights.norm_V).to(self.y.dtype)
        out = self.y.new_zeros(len(self.y), self.shape.value_width)
        out[live] = (o * F.silu(z.float()).unflatten(1, (-1, 128))).to(self.y.dtype).flatten(1)
        return out


def case_of(settings, device, dtype=torch.bfloat16):
    key_heads, value_heads, is_by_head, rank, positions = settings
    rng = torch.Generator().manual_seed(7)
    shape = DeltaShape(
        num_key_heads=key_heads, num_value_heads=value_heads, key_size=128, value_size=128, num_taps=4
    )
    B, N, C, num_slots = len(positions), value_heads, shape.channels, 2 * len(positions) + 1

    def normal(*size, std=1.0, dtype=torch.float32):
        return (torch.randn(*size, generator=rng) * std).to(device, dtype)

    rows = DecodeState.empty(B, 1, 1, device)
    rows.positions_B.copy_(torch.tensor(positions, dtype=torch.int32))
    rows.states_B.copy_(torch.randperm(num_slots, generator=rng)[:B].int())
    parts = 1 if is_by_head else 2
    gates = Gates(
        x_BN=normal(B, 2 * N, dtype=dtype),
        factors_N=normal(2 * N).abs() if rank else None,
        u_BR=normal(B, parts * rank, dtype=dtype) if rank else None,
        b_NR=normal(2 * N, rank, std=0.2, dtype=dtype) if rank else None,
    )
    weights = DeltaWeights(
        conv_CW=normal(C, 4, std=0.5),
        a_log_N=(torch.rand(N, generator=rng) * 16).log().to(device),
        dt_bias_N=normal(N),
        norm_V=1 + normal(128, std=0.1),
        eps=1e-6,
    )
    width = C + shape.value_width
    y = normal(B, width + 8, dtype=dtype)[:, :width]
    conv, state = normal(num_slots, 3, C, dtype=dtype), normal(num_slots, N, 128, 128)
    return Case(shape, is_by_head, y, gates, weights, conv, state, rows)


def untouched(case):
    """Slots that no live row has."""
    used = case.rows.states_B[case.rows.positions_B >= 0].long()
    index = torch.ones(len(case.state), dtype=torch.bool, device=case.state.device)
    index[used] = False
    return index


@pytest.mark.parametrize("settings", op.CASES[:4], ids=str)
def test_the_reference_is_the_modules_step(settings):
    """In fp32 on a CPU."""
    ours = case_of(settings, "cpu", torch.float32)
    theirs = ours.copy()
    assert rms_error(theirs.by_torch(), ours.by_reference()) < 1e-5
    assert rms_error(theirs.state, ours.state) < 1e-5 and torch.equal(theirs.conv, ours.conv)


@on_gpu
@pytest.mark.parametrize("settings", op.CASES, ids=str)
def test_it_loses_no_more_than_torch(settings):
    check(case_of(settings, "cuda"))


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize("settings", op.CASES[1:4:2], ids=str)
def test_its_source_computes_the_same_on_a_cpu(settings, tmp_path):
    with on_cpu(op, tmp_path):
        check(case_of(settings, "cpu"))


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize(
    ("settings", "ctas"), [(op.CASES[0], 3), (op.CASES[1], 1), (op.CASES[2], 5)], ids=str
)
def test_its_source_copies_ahead_on_a_cpu(settings, ctas, tmp_path):
    with on_cpu(op, tmp_path):
        check_ahead(case_of(settings, "cpu"), ctas)


@on_gpu
@pytest.mark.parametrize("settings", op.CASES, ids=str)
@pytest.mark.parametrize("ctas", [1, 2, 5, 264])
def test_copies_ahead_change_no_bit(settings, ctas):
    if not op.copies_ahead(architecture_of(torch.device("cuda"))):
        pytest.skip("too little shared memory")
    check_ahead(case_of(settings, "cuda"), ctas)


def check_ahead(case, ctas):
    """However many units a CTA has, out, states and kept inputs are those of one CTA a unit."""
    plain, ahead = case.copy(), case.copy()
    assert torch.equal(ahead.by_kernel(ctas), plain.by_kernel(None))
    assert torch.equal(ahead.state, plain.state) and torch.equal(ahead.conv, plain.conv)
    assert not torch.equal(ahead.state, case.state), "the state did not change"


@pytest.mark.parametrize(
    ("name", "rows", "is_ahead"),
    [("sm_90a", 8, 0), ("sm_90a", 64, 1), ("sm_80", 64, 1), ("sm_86", 64, 0), ("sm_120a", 256, 0)],
)
def test_states_are_copied_ahead_where_ctas_have_several(name, rows, is_ahead):
    variants = matrix.delta_variants(SHAPES["qwen3.5-9b"], ARCHITECTURES[name], rows)
    assert {dict(v.defines)["AHEAD"] for v in variants} == {is_ahead}
    assert {v.shared_bytes for v in variants} == {is_ahead * op._STATE_BYTES}


def test_two_ctas_with_a_state_ahead_fit():
    """The static memory that `copies_ahead` counts is what the kernel has."""
    (variant, _) = matrix.delta_variants(SHAPES["qwen3.5-9b"], ARCHITECTURES["sm_90a"], 64)
    use = kernel_uses.measure([variant], ARCHITECTURES["sm_90a"])[variant]
    assert use.shared_bytes <= op._STATIC_BYTES and use.local_bytes == 0
    shared = use.shared_bytes + variant.shared_bytes
    assert ARCHITECTURES["sm_90a"].resident_ctas(variant.threads, use.registers, shared) == op._CTAS


def check(exact):
    """The kernel loses no more than torch, moves its slots on, and touches no others."""
    ours, theirs, before = exact.copy(), exact.copy(), exact.copy()
    truth, got, torchs = exact.by_reference(), ours.by_kernel(), theirs.by_torch()
    assert rms_error(got, truth) <= 1.1 * rms_error(torchs, truth)
    assert rms_error(ours.state, exact.state) <= 1.1 * rms_error(theirs.state, exact.state)
    assert rms_error(ours.state, before.state) > 1e-3, "the state did not change"
    assert torch.equal(ours.conv, exact.conv)
    idle = untouched(ours)
    assert torch.equal(ours.state[idle], before.state[idle])
    assert torch.equal(ours.conv[idle], before.conv[idle])
    assert not got[ours.rows.positions_B < 0].any()


@on_gpu
def test_a_row_does_not_depend_on_the_others():
    whole = case_of(op.CASES[-1], "cuda")
    alone, start = [], whole.copy()
    got = whole.by_kernel()
    for b in (0, 5, 16):
        one = start.of_rows(slice(b, b + 1))
        alone.append(one.by_kernel())
        slot = one.rows.states_B.long()
        assert torch.equal(one.state[slot], whole.state[slot])
        assert torch.equal(one.conv[slot], whole.conv[slot])
    assert torch.equal(torch.cat(alone), got[[0, 5, 16]])


@on_gpu
def test_a_second_launch_goes_on_from_the_first():
    """The turns that value heads take are left at zero."""
    exact = case_of(op.CASES[-1], "cuda")
    ours = exact.copy()
    kernel = DeltaNetStep(ours.shape, len(ours.y), ours.y.device, is_by_head=False)
    for _ in range(4):
        truth, got = exact.by_reference(), kernel.step(*ours.operands())
        assert torch.equal(ours.conv, exact.conv) and rms_error(got, truth) < 4e-3
    assert rms_error(ours.state, exact.state) < 1e-5 and not kernel._turns.any()


@on_gpu
def test_the_gates_may_be_columns_of_y_and_out_has_room():
    case = case_of((2, 4, False, 0, (5, 2, 0)), "cuda")
    case.y = torch.cat((case.y, case.gates.x_BN), 1)
    case.gates = Gates(x_BN=case.y[:, -8:])
    truth = case.copy().by_reference()
    kernel = DeltaNetStep(case.shape, 3, case.y.device, is_by_head=False)
    out = kernel.step(*case.operands(), room=16)
    assert out.stride(0) >= 512 + 16 and rms_error(out, truth) < 4e-3
