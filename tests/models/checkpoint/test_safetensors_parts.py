"""Parts of a safetensors file: safetensors itself reads them."""

import pytest
import safetensors.torch
import torch

from qerl.models.checkpoint.safetensors_parts import safetensors_parts

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).half(),
    "odd": torch.arange(3, dtype=torch.uint8),
    "scalar": torch.tensor(7.0),
    "count": torch.tensor(1 << 40),
    "none": torch.empty(0, 4),
    "brain": torch.ones(3, dtype=torch.bfloat16),
}


def test_safetensors_reads_every_tensor_to_the_bit():
    found = safetensors.torch.load(b"".join(safetensors_parts(TENSORS)))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_file_is_as_long_as_that_of_safetensors_and_its_data_are_aligned():
    parts = safetensors_parts(TENSORS)
    data_bytes = sum(map(len, parts[1:]))
    assert len(parts[0]) % 8 == 0
    assert len(safetensors.torch.save(TENSORS, metadata={"format": "pt"})) == len(parts[0]) + data_bytes
    widths = [tensor.itemsize for tensor in sorted(TENSORS.values(), key=lambda each: -each.itemsize)]
    assert widths == sorted(widths, reverse=True)


def test_parts_are_the_tensors_own_memory():
    tensor = torch.zeros(4)
    _, data = safetensors_parts({"x": tensor})
    tensor.fill_(1.0)
    assert torch.frombuffer(data, dtype=torch.float32).tolist() == [1.0] * 4


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(AssertionError, match="turned"):
        safetensors_parts({"turned": torch.zeros(2, 3).T})
