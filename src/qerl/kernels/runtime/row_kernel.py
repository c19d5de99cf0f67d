"""Compile CUDA kernels over rows of bfloat16, which read eight numbers at a time, and allocate their rows.

`rows` can allocate extra columns behind each row: the linear that reads the rows stores its adapter's part
there (fused_linear.py).
"""

import functools

import torch
from torch import Tensor

from qerl.kernels.runtime.nvrtc import CudaKernel, compiled, is_dry_run


@functools.cache
def kernel(file: str, name: str, device: torch.device, **defines: int) -> CudaKernel:
    """Return one kernel of a .cu file on a device, compiled on first use."""
    return compiled(file, name, device, defines)


def on_gpu(x: Tensor) -> bool:
    """True if kernels compute with it, or stand for doing so: on meta in a dry run."""
    return x.is_cuda or (x.is_meta and is_dry_run())


def are_vectors(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """True if the kernels can read these: this dtype, on a GPU, every row aligned to 16 bytes."""
    return all(
        on_gpu(x)
        and x.dtype == dtype
        and x.stride(-1) == 1
        and x.shape[-1] % 8 == 0
        and x.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def rows(num_rows: int, width: int, room: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized [num_rows, width] view with at least `room` more columns behind each row.

    Its dtype is like's unless `dtype` is given.
    """
    stride = -(-(width + room) // 8) * 8 if room else width
    return unread(torch.empty(num_rows, stride, dtype=dtype or like.dtype, device=like.device))[:, :width]


def unread(whole: Tensor) -> Tensor:
    """Clear rows that have columns behind them, on a CPU: bfloat16 products of CPUs with AMX (torch 2.13)
    multiply what lies behind a row by zero, which a NaN survives."""
    return whole if whole.is_cuda else whole.zero_()
