"""The gated delta rule over packed sequences in one launch (gated_delta.py has the definition).

Layout: q, k bf16 [T, K, 128] and v bf16 [T, N, 128], whose rows may be views of wider ones; log_decay and
beta fp32 [T, N]; ends int64 [S + 1]; states fp32 [S, N, 128, 128]; o bf16 [T, N, 128]. o and the states after
the sequences are new.

A CTA has one sequence, one value head and 64 of its 128 values, and goes through chunks of 64 tokens with its
half of the state in registers: 2 S N CTAs, two at once on a multiprocessor where shared memory allows. Three
fit on Hopper's and were as fast, but registers spilled. 64 sequences of 256 tokens with 32 heads take 1.0 ms
on an H200, a thirteenth of what PyTorch's operations take. The products are mma.sync of bf16, from Ampere on.
q and k enter as they are; the state, the updates and the matrices of a chunk are sums of two bf16, which keep
16 bits, so that o loses no more than its own rounding (tests/kernels/delta_net/test_gated_delta_chunks.py,
which also runs the source on a CPU). No sum depends on another sequence. Letters: T tokens, K key heads, N
value heads, S sequences.
"""

import functools
import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.architectures import SYSTEM_SHARED_BYTES, CudaArchitecture, architecture_of
from qerl.kernels.runtime.nvrtc import CudaKernel, addresses, compiled

FILE, NAME = "gated_delta_chunks.cu", "gated_delta_chunks"
HEAD, COLUMNS = 128, 64
SHARED_BYTES = 67_328  # struct Shared
_THREADS, _MAX_CTAS = 128, 2


def takes(q_TKH: Tensor, k_TKH: Tensor, v_TNV: Tensor, state_SNHV: Tensor) -> bool:
    """True if the kernel computes with these."""
    return (
        len(v_TNV) > 0
        and state_SNHV.shape[2:] == (HEAD, HEAD)
        and row_kernel.are_vectors(q_TKH, k_TKH, v_TNV)
        and all(x.stride(1) == HEAD for x in (q_TKH, k_TKH, v_TNV))
    )


def gated_delta_chunks(
    q_TKH: Tensor,
    k_TKH: Tensor,
    v_TNV: Tensor,
    log_decay_TN: Tensor,
    beta_TN: Tensor,
    ends: Tensor,
    state_SNHV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (o_TNV, the states after the sequences)."""
    (T, K, H), (N, V), S = q_TKH.shape, v_TNV.shape[1:], len(state_SNHV)
    assert H == V == HEAD and N % K == 0 and q_TKH.dtype == k_TKH.dtype == v_TNV.dtype == torch.bfloat16
    assert ends.dtype == torch.int64 and ends.shape == (S + 1,)
    log_decay_TN, beta_TN, state_SNHV = (x.float().contiguous() for x in (log_decay_TN, beta_TN, state_SNHV))
    after_SNHV, o_TNV = torch.empty_like(state_SNHV), v_TNV.new_empty(T, N, V)
    pointers = addresses(q_TKH, k_TKH, v_TNV, log_decay_TN, beta_TN, ends, state_SNHV, after_SNHV, o_TNV)
    strides = (x.stride(0) for x in (q_TKH, k_TKH, v_TNV))
    operands = struct.pack("9Q5i4x", *pointers, *strides, N, N // K)
    grid = S * N * (HEAD // COLUMNS)
    kernel_of(v_TNV.device).launch(grid=grid, block_threads=_THREADS, parameters=(operands,))
    return o_TNV, after_SNHV


def kernel_of(device: torch.device) -> CudaKernel:
    """Return the kernel for a device, the same object each time: a new one would load its module again."""
    return _kernel(device, max_ctas(architecture_of(device)))


@functools.cache
def _kernel(device: torch.device, ctas: int) -> CudaKernel:
    return compiled(FILE, NAME, device, {"CTAS": ctas}, shared_bytes=SHARED_BYTES)


def max_ctas(architecture: CudaArchitecture) -> int:
    """Return how many CTAs a multiprocessor's shared memory allows at once."""
    return min(architecture.sm_shared_bytes // (SHARED_BYTES + SYSTEM_SHARED_BYTES), _MAX_CTAS)
