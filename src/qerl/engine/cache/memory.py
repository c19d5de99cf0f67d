"""Tensors of a cache in one address range, which is mapped only while the cache is present."""

import math

import torch
from torch import Tensor

from qerl.kernels.runtime.virtual_memory import ResidentMemory, VirtualMemory, memory_on

_ALIGNMENT = 256  # bytes, as for torch's own allocations


def tensors_on(
    device: torch.device, specs: list[tuple[tuple[int, ...], torch.dtype]]
) -> tuple[ResidentMemory | VirtualMemory, list[Tensor]]:
    """Return the memory and tensors of these shapes and dtypes in it."""
    starts, end = [], 0
    for shape, dtype in specs:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = memory_on(device, end)
    with memory.present():
        bytes_N = memory.tensor()
        tensors = [
            bytes_N[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, specs, strict=True)
        ]
    return memory, tensors
