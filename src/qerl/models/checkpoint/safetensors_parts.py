"""Encode tensors as the parts of a safetensors file, without a copy of them.

    file = length of header (8 bytes, little-endian) | header (JSON) | data

`safetensors.torch.save` copies all tensors into one string and holds Python's lock meanwhile; other threads
run while a file or a hash takes these parts. Safetensors reads them:
tests/models/checkpoint/test_safetensors_parts.py.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from qerl.models.checkpoint.safetensors_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def safetensors_parts(tensors_by_name: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the file's header and the memory of each tensor, which must be contiguous and on the CPU.

    The tensors own the memory: a change of them changes the parts. Wider elements come first, so that every
    tensor is aligned to the size of its elements."""
    named = sorted(tensors_by_name.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in named:
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), name
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *parts]
