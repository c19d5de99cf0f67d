"""CUDA kernels over rows of bfloat16, eight numbers at a time: how they are built, kept and given their rows.

A row may be longer than what is used of it: `rows` makes tensors with room behind each row, where the linear
that reads them puts its adapter's part (lora_linear.py).
"""

import functools
from importlib import resources
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qerl.kernels.nvrtc import CudaKernel


@functools.cache
def kernel(
    file: str, name: str, device: torch.device, *, ahead: tuple[str, ...] = (), **defines: int
) -> "CudaKernel":
    """One kernel of a .cu file on a device, behind those of `ahead`, compiled when first asked for."""
    from qerl.kernels import nvrtc

    folder = resources.files("qerl.kernels")
    source = "".join(folder.joinpath(f).read_text() for f in ("vectors.cu", *ahead, file))
    return nvrtc.CudaModule(source, defines, device, nvrtc.cache_folder()).kernel(name, 0)


def are_vectors(*tensors: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels can take them: of this dtype on a GPU, every row at a multiple of 16 bytes."""
    return all(
        x.is_cuda
        and x.dtype == dtype
        and x.stride(-1) == 1
        and x.shape[-1] % 8 == 0
        and x.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def rows(num_rows: int, width: int, room: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Unset [num_rows, width], in like's dtype unless another is given; `room` or more columns lie behind
    each row, out of sight."""
    apart = -(-(width + room) // 8) * 8 if room else width
    return torch.empty(num_rows, apart, dtype=dtype or like.dtype, device=like.device)[:, :width]
