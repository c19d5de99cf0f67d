"""Copy tensors to host memory at one moment, into the memory of the copy before.

Memory that is used again costs a fifth of memory that the process gets anew, page by page, and from a GPU
pinned memory is the fastest to copy to. More than 4 GB, as full fine-tuning has, is not kept.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_MAX_KEPT_BYTES = 4 << 30


class HostCopy:
    """The host memory of one copy; the next copy overwrites it."""

    def __init__(self):
        self._memory: dict[str, Tensor] = {}

    def take(self, tensors_by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous copies. They are complete, and valid until the next call."""
        is_kept = sum(x.numel() * x.dtype.itemsize for x in tensors_by_name.values()) <= _MAX_KEPT_BYTES
        copies = {
            name: self._place(name, tensor, is_pinned=is_kept and tensor.is_cuda)
            for name, tensor in tensors_by_name.items()
        }
        for name, tensor in tensors_by_name.items():
            copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors_by_name.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._memory = copies if is_kept else {}
        return copies

    def _place(self, name: str, tensor: Tensor, *, is_pinned: bool) -> Tensor:
        place = self._memory.get(name)
        if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype):
            return place
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
