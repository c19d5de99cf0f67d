import gc
import weakref

import pytest
import torch

from alone import alone
from qerl.kernels.runtime import gpu_memory
from qerl.kernels.runtime.virtual_memory import ResidentMemory, VirtualMemory, can_give_back, memory_on

MIB = 1 << 20
CPU = torch.device("cpu")
GPU = torch.device("cuda")


def on_gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    )


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_memory_of_a_cpu_stays_with_what_is_in_it():
    assert not can_give_back(CPU)
    found = memory_on(CPU, 100)
    assert isinstance(found, ResidentMemory) and found.is_kept
    with found.present():
        assert found.tensor().shape == (100,) and not found.tensor().any()
        found.tensor().fill_(7)
    with found.present():
        assert (found.tensor() == 7).all()


@on_gpu
def test_tensors_and_graphs_over_it_outlive_its_memory(monkeypatch):
    """The driver may hand out memory as it was: here it is never zero."""
    take = VirtualMemory._map

    def dirty(self):
        take(self)
        self.tensor().fill_(77)

    monkeypatch.setattr(VirtualMemory, "_map", dirty)
    found = memory_on(GPU, 3 * MIB + 5)
    assert isinstance(found, VirtualMemory) and found.num_bytes == 4 * MIB and not found.is_kept
    source = torch.arange(256, device="cuda", dtype=torch.uint8)
    with found.present():
        bytes_N = found.tensor()
        view = bytes_N[MIB : MIB + 256]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            view.copy_(source).add_(1)
        graph.replay()
        assert torch.equal(view, source + 1)
    blocker = [torch.full((64 * MIB,), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for _ in range(3):
        with found.present():
            assert found.tensor().data_ptr() == bytes_N.data_ptr() and not bytes_N.any()
            graph.replay()
            assert torch.equal(view, source + 1) and int(bytes_N.count_nonzero()) == 255
    assert all(int(b.min()) == int(b.max()) == 9 for b in blocker)


@alone
@on_gpu
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_its_memory_is_the_devices_again(error):
    found, before = VirtualMemory(512 * MIB, GPU), free_bytes()
    for _ in range(3):
        try:
            with found.present():
                assert before - free_bytes() == 512 * MIB
                torch.cuda._sleep(10_000_000)  # work may be under way
                found.tensor().add_(1)
                if error:
                    raise error
        except (RuntimeError, KeyboardInterrupt):
            pass
        assert free_bytes() == before


@on_gpu
def test_the_last_tensor_takes_the_addresses_along():
    found = VirtualMemory(2 * MIB, GPU)
    with found.present():
        view = found.tensor()[5:9]
    is_there = weakref.ref(found)
    del found
    gc.collect()
    assert is_there() is not None
    del view
    assert is_there() is None


@on_gpu
def test_it_counts_against_the_process_limit(limited):
    found = VirtualMemory(256 * MIB, GPU)
    limited(200 * MIB)
    with pytest.raises(torch.OutOfMemoryError), found.present():
        pass
    limited(400 * MIB)
    fraction = torch.cuda.get_per_process_memory_fraction()
    with found.present():
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by blocks of earlier tests
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(200 * MIB + unused, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")


@on_gpu
def test_torchs_unused_blocks_make_room(limited):
    found = VirtualMemory(256 * MIB, GPU)
    limited(400 * MIB)
    torch.empty(350 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= 350 * MIB
    with found.present():
        assert not found.tensor().any()


@on_gpu
def test_peaks_are_of_torchs_and_mapped_memory_together(limited):
    limited(4 << 30)
    found, start = VirtualMemory(256 * MIB, GPU), torch.cuda.memory_allocated()

    def peak():
        return gpu_memory.peak_bytes(GPU) - start

    gpu_memory.reset_peaks(GPU)
    torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert peak() == 300 * MIB
    with found.present():
        assert 300 * MIB <= peak() < 301 * MIB  # not 556: they were not there at once
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        assert 356 * MIB <= peak() < 357 * MIB
    torch.empty(310 * MIB, dtype=torch.uint8, device="cuda")
    assert 356 * MIB <= peak() < 357 * MIB
    assert gpu_memory.peak_reserved_bytes(GPU) >= gpu_memory.peak_bytes(GPU)
    gpu_memory.reset_peaks(GPU)
    assert peak() < MIB
