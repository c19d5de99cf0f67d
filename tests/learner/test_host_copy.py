"""Copies in host memory: complete, independent of their source, in the memory of the copy before."""

import pytest
import torch

from qerl.learner import host_copy
from qerl.learner.host_copy import HostCopy


def test_a_copy_keeps_its_values_when_the_source_changes():
    source = torch.arange(6.0).view(2, 3).T
    (copy,) = HostCopy().take({"x": source}).values()
    source.zero_()
    assert copy.is_contiguous() and copy.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_the_next_copy_uses_the_same_memory_unless_the_shape_differs():
    memory = HostCopy()
    first = memory.take({"x": torch.zeros(3), "y": torch.zeros(3)})
    second = memory.take({"x": torch.ones(3), "y": torch.ones(4)})
    assert first["x"].data_ptr() == second["x"].data_ptr() and first["x"].tolist() == [1.0] * 3
    assert second["y"].tolist() == [1.0] * 4 and first["y"].tolist() == [0.0] * 3


def test_much_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(host_copy, "_MAX_KEPT_BYTES", 11)
    memory = HostCopy()
    first = memory.take({"x": torch.zeros(3)})
    second = memory.take({"x": torch.ones(3)})
    assert first["x"].tolist() == [0.0] * 3 and second["x"].tolist() == [1.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_a_gpu_is_complete_and_pinned():
    source = torch.arange(1 << 24, device="cuda", dtype=torch.float32)
    (copy,) = HostCopy().take({"x": source}).values()
    assert copy.is_pinned() and torch.equal(copy, torch.arange(1 << 24, dtype=torch.float32))
