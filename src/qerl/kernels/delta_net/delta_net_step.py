"""One token a row through Gated DeltaNet in one launch: all between the product of its inputs and out_proj.

    q | k | v = silu(short convolution of y's columns)       over the slot's last 3 inputs, which move on
    beta = sigmoid(b),  decay = exp(-exp(A_log) softplus(a + dt_bias))
    S = decay S + k (beta (v - decay S^T k))^T               fp32, in the slot; q, k of length 1
    out = norm(S^T q / sqrt(H)) * silu(z)                    in each value head

Layout: y bf16 [B, >= C + N V], columns q | k | v | z, or with is_by_head these of one key head after the
other; conv bf16 [slots, 3, C], oldest first, and state fp32 [slots, N, H, V] of one layer, both written in
place; out bf16 [B, N V]. Rows with position -1 touch no slot and get zeros. fp32 inside, out is rounded once.

A CTA has one value head of a row and keeps its state in registers, so memory is the limit: the 64 KB of a
head are read and written once, 2.1 MB each way for 32 heads. With more heads than CTAs run at once, a CTA has
several, one after the other, and copies the next state to shared memory (AHEAD) where that holds two: not on
GPUs with 100 KB a multiprocessor, whose CTAs have one each. The sums are the same. Without copies ahead 64
rows of 32 heads took 83.9 us on an H200, 71 % of its bandwidth, 8 rows 9.1 us. No sum depends on another row
(tests/kernels/delta_net/test_delta_net_step.py, which also runs the source on a CPU).

The state, the kept inputs, positions and slots are read before the previous kernel has ended, so no kernel
that allows an early launch of this one may write them. This kernel itself wrote them last, one step ago: all
launches of that step are between, and a CUDA graph of a step begins when the one before has ended. Within a
launch a state is read and written by one CTA. Letters: B rows, C channels of q | k | v, N value heads, H =
V = 128 their sizes, R rank.
"""

import dataclasses
import struct

import torch
from torch import Tensor

from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.delta_net.gated_delta import reference as delta_reference
from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.kernels.delta_net.short_conv import reference as conv_reference
from qerl.kernels.runtime.architectures import SYSTEM_SHARED_BYTES, CudaArchitecture, architecture_of, num_sms
from qerl.kernels.runtime.nvrtc import CudaKernel, addresses, cached_method, compiled
from qerl.kernels.runtime.row_kernel import rows

CASES = (  # key heads, value heads, is_by_head, rank of the gates' adapters, positions
    (2, 4, False, 0, (5, -1, 0)),
    (1, 3, False, 16, (7, -1)),
    (4, 4, True, 0, (0, 3, -1, -1, 12)),
    (2, 6, True, 48, (9,)),
    (16, 32, False, 32, tuple(range(17))),
)
_HEAD, _TAPS, _THREADS = 128, 4, 256
_STATE_BYTES, _STATIC_BYTES = 4 * _HEAD * _HEAD, 10_880  # shared memory: a state copied ahead; all else
_CTAS = 2  # at once on a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DeltaWeights:
    """The frozen tensors of one layer besides its linears, all fp32."""

    conv_CW: Tensor
    a_log_N: Tensor
    dt_bias_N: Tensor
    norm_V: Tensor
    eps: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Gates:
    """The rows' b and a: x * factors + u B^T; bf16 x [B, 2 N], columns b | a, or these by key head."""

    x_BN: Tensor
    factors_N: Tensor | None = None
    """fp32 [2 N]; None: 1."""
    u_BR: Tensor | None = None
    """bf16: inputs of the adapters of b, then of a, [B, 2 R]; of one adapter by key head, [B, R]."""
    b_NR: Tensor | None = None
    """bf16 [2 N, R]: B of both."""


def supports(shape: DeltaShape) -> bool:
    return (shape.key_size, shape.value_size, shape.num_taps) == (_HEAD, _HEAD, _TAPS)


def copies_ahead(architecture: CudaArchitecture) -> bool:
    """True if a multiprocessor's shared memory holds the next state of every CTA."""
    wanted = _STATE_BYTES + _STATIC_BYTES + SYSTEM_SHARED_BYTES
    return _CTAS * wanted <= architecture.sm_shared_bytes


def _max_ctas(device: torch.device) -> int | None:
    """Return the CTAs of a launch that copies ahead; None: it does not, and each head has its own CTA."""
    if device.type == "cpu" or not copies_ahead(architecture_of(device)):
        return None
    return _CTAS * num_sms(device)


def reference(
    y_BX: Tensor,
    gates: Gates,
    weights: DeltaWeights,
    conv_SWC: Tensor,
    state_SNHV: Tensor,
    state: DecodeState,
    shape: DeltaShape,
    is_by_head: bool,
) -> Tensor:
    """Return out [B, N V] in float64 without rounding; writes the slots as the kernel does."""
    out_BX = torch.zeros(len(y_BX), shape.value_width, dtype=torch.float64, device=y_BX.device)
    live_B = (state.positions_B[: len(y_BX)] >= 0).nonzero()[:, 0]
    if len(live_B) == 0:
        return out_BX
    slots_B, lengths = state.states_B[live_B].long(), (1,) * len(live_B)
    qkv_BC, z_BX = split_parts(y_BX[live_B].double(), shape, is_by_head)
    b_BN, a_BN = _split_gates(_gates(gates)[live_B], shape, is_by_head)
    convolved_BC, conv = conv_reference(qkv_BC, weights.conv_CW, lengths, conv_SWC[slots_B])
    q, k, v = convolved_BC.split((shape.key_width, shape.key_width, shape.value_width), 1)
    q, k, v = (x.unflatten(1, (-1, _HEAD)) for x in (q, k, v))
    log_decay_BN = -weights.a_log_N.double().exp() * torch.nn.functional.softplus(
        a_BN + weights.dt_bias_N.double()
    )
    o_BNV, after = delta_reference(q, k, v, log_decay_BN, b_BN.sigmoid(), lengths, state_SNHV[slots_B])
    conv_SWC[slots_B], state_SNHV[slots_B] = conv.to(conv_SWC.dtype), after.to(state_SNHV.dtype)
    inverse = (o_BNV.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    gate_BNV = torch.nn.functional.silu(z_BX).unflatten(1, (-1, _HEAD))
    out_BX[live_B] = (o_BNV * inverse * weights.norm_V.double() * gate_BNV).flatten(1)
    return out_BX


def split_parts(y_BX: Tensor, shape: DeltaShape, is_by_head: bool) -> tuple[Tensor, Tensor]:
    """Return q | k | v and z of y's first columns."""
    width = shape.channels + shape.value_width
    if not is_by_head:
        return y_BX[:, : shape.channels], y_BX[:, shape.channels : width]
    group = shape.num_value_heads // shape.num_key_heads
    widths = shape.key_size, shape.key_size, group * shape.value_size, group * shape.value_size
    by_head = y_BX[:, :width].unflatten(1, (shape.num_key_heads, -1)).split(widths, 2)
    *qkv, z_BX = (part.flatten(1) for part in by_head)
    return torch.cat(qkv, 1), z_BX


def _split_gates(x_BN: Tensor, shape: DeltaShape, is_by_head: bool) -> tuple[Tensor, Tensor]:
    """Return b and a, [B, N] each."""
    if not is_by_head:
        b_BN, a_BN = x_BN.chunk(2, 1)
        return b_BN, a_BN
    b_BN, a_BN = (x.flatten(1) for x in x_BN.unflatten(1, (shape.num_key_heads, -1)).chunk(2, 2))
    return b_BN, a_BN


def _gates(gates: Gates) -> Tensor:
    """Return b and a in float64, [B, 2 N]."""
    x_BN = gates.x_BN.double()
    if gates.factors_N is not None:
        x_BN = x_BN * gates.factors_N.double()
    if gates.u_BR is None or gates.b_NR is None:
        return x_BN
    u_BR, b_NR = gates.u_BR.double(), gates.b_NR.double()
    if u_BR.shape[1] == b_NR.shape[1]:
        return x_BN + u_BR @ b_NR.T
    added = [u @ b.T for u, b in zip(u_BR.chunk(2, 1), b_NR.chunk(2), strict=True)]
    return x_BN + torch.cat(added, 1)


class DeltaNetStep:
    """The kernel for one shape, compiled on first use. Use one object per stream."""

    def __init__(self, shape: DeltaShape, max_rows: int, device: torch.device, *, is_by_head: bool):
        assert supports(shape) and shape.num_value_heads % shape.num_key_heads == 0
        self._shape, self._device, self._is_by_head = shape, device, is_by_head
        self._kernel = cached_method(self._compile)
        self._max_ctas = _max_ctas(device)
        # value heads that have read their key head's kept inputs; every launch leaves zeros
        self._turns = torch.zeros(max_rows * shape.num_key_heads, dtype=torch.int32, device=device)

    def _compile(self, rank: int, ahead: bool) -> CudaKernel:
        shape = self._shape
        defines = {
            "KEY_HEADS": shape.num_key_heads,
            "GROUP": shape.num_value_heads // shape.num_key_heads,
            "BY_HEAD": int(self._is_by_head),
            "RANK": rank,
            "AHEAD": int(ahead),
        }
        shared_bytes = _STATE_BYTES if ahead else 0
        return compiled(
            "delta_net_step.cu", "delta_net_step", self._device, defines, shared_bytes=shared_bytes
        )

    def step(
        self,
        y_BX: Tensor,
        gates: Gates,
        weights: DeltaWeights,
        conv_SWC: Tensor,
        state_SNHV: Tensor,
        state: DecodeState,
        *,
        room: int = 0,
    ) -> Tensor:
        """Return out [B, N V], with at least `room` more columns behind each row; writes the slots."""
        B, shape = len(y_BX), self._shape
        out_BX = rows(B, shape.value_width, room, y_BX)
        operands = self._operands(y_BX, gates, weights, conv_SWC, state_SNHV, state, out_BX)
        units = B * shape.num_value_heads
        ahead = self._max_ctas is not None and units > self._max_ctas
        kernel = self._kernel(0 if gates.b_NR is None else gates.b_NR.shape[1], ahead)
        grid = self._max_ctas if ahead else units
        kernel.launch(grid=grid, block_threads=_THREADS, parameters=(operands,))
        return out_BX

    def _operands(
        self,
        y_BX: Tensor,
        gates: Gates,
        weights: DeltaWeights,
        conv_SWC: Tensor,
        state_SNHV: Tensor,
        state: DecodeState,
        out_BX: Tensor,
    ) -> bytes:
        """Return the kernel's `Operands` after checking the tensors."""
        B, shape = len(y_BX), self._shape
        N, C = shape.num_value_heads, shape.channels
        assert B * shape.num_key_heads <= len(self._turns), "more rows than max_rows"
        assert y_BX.shape[1] >= C + shape.value_width and gates.x_BN.shape == (B, 2 * N)
        if gates.b_NR is not None and gates.u_BR is not None:
            rank = gates.b_NR.shape[1]
            parts = 1 if self._is_by_head else 2
            assert gates.b_NR.shape == (2 * N, rank) and gates.u_BR.shape == (B, parts * rank)
            assert gates.b_NR.is_contiguous()
        _check_rows(y_BX, gates.x_BN, gates.u_BR, gates.b_NR, out_BX)
        for x, dtype, size in (
            (gates.factors_N, torch.float32, (2 * N,)),
            (weights.conv_CW, torch.float32, (C, _TAPS)),
            (weights.a_log_N, torch.float32, (N,)),
            (weights.dt_bias_N, torch.float32, (N,)),
            (weights.norm_V, torch.float32, (_HEAD,)),
            (conv_SWC, torch.bfloat16, (len(state_SNHV), _TAPS - 1, C)),
            (state_SNHV, torch.float32, (len(conv_SWC), N, _HEAD, _HEAD)),
        ):
            assert x is None or (x.dtype == dtype and x.shape == size and x.is_contiguous()), x.shape
        assert state_SNHV.data_ptr() % 16 == weights.conv_CW.data_ptr() % 16 == conv_SWC.data_ptr() % 4 == 0
        for ints in (state.positions_B, state.states_B):
            assert ints.dtype == torch.int32 and len(ints) >= B and ints.is_contiguous()
        pointers = addresses(
            *(y_BX, gates.x_BN, gates.u_BR, gates.b_NR, gates.factors_N),
            *(weights.conv_CW, weights.a_log_N, weights.dt_bias_N, weights.norm_V),
            *(conv_SWC, state_SNHV, state.positions_B, state.states_B, out_BX, self._turns),
        )
        strides = (0 if t is None else t.stride(0) for t in (y_BX, gates.x_BN, gates.u_BR, out_BX))
        return struct.pack("15Q4ifi", *pointers, *strides, weights.eps, B * N)


def _check_rows(*tensors: Tensor | None) -> None:
    """Assert bf16 with columns side by side and rows at even places."""
    for x in tensors:
        assert x is None or (x.dtype == torch.bfloat16 and x.stride(1) == 1), x
        assert x is None or x.stride(0) % 2 == x.data_ptr() % 4 == 0, x.stride()
