"""What a launch gives to the driver: its configuration and the bytes of its parameters."""

import ctypes
import struct
import threading

import pytest
import torch

from qerl.kernels.runtime import nvrtc

driver = pytest.importorskip("cuda.bindings.driver")


class Recorder:
    """A driver whose launches read what a kernel would: as many bytes of each parameter as `sizes` says."""

    def __init__(self):
        self.sizes: list[int] = []
        self.launches: list[tuple] = []

    def __getattr__(self, name):
        return getattr(driver, name)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        read = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]
        grid, threads = config.gridDimX, config.blockDimX
        self.launches.append((grid, threads, int(config.hStream), config.numAttrs, read))
        return (driver.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def kernel(recorder, monkeypatch):
    monkeypatch.setattr(nvrtc, "_current_stream", lambda device: 7)
    kernel = nvrtc.compiled("rotary.cu", "rotate", torch.device("cuda:0"), {}, shared_bytes=64, cluster=2)
    kernel.__dict__["_loaded"], kernel.__dict__["_starts_early"] = (recorder, None), True
    return kernel


def test_the_driver_gets_every_parameter_bit_for_bit(kernel, recorder):
    x = torch.zeros(3)
    wide = bytes(range(1, 101))
    recorder.sizes = [8, 8, 4, 4, 4, 100]
    kernel.launch(grid=3, block_threads=96, parameters=(x, None, -2, 1 << 20, struct.pack("f", 0.5), wide))
    kernel.launch(grid=5, block_threads=128, parameters=[None, x, 9, -1, struct.pack("f", -1.0), wide[::-1]])
    first, second = recorder.launches
    assert first[:4] == (3, 96, 7, 2) and second[:4] == (5, 128, 7, 2)
    address = struct.pack("q", x.data_ptr())
    numbers = struct.pack("2if", -2, 1 << 20, 0.5)
    assert b"".join(first[4]) == address + bytes(8) + numbers + wide
    assert b"".join(second[4]) == bytes(8) + address + struct.pack("2if", 9, -1, -1.0) + wide[::-1]


def test_a_slot_that_held_a_struct_holds_a_number_again(kernel, recorder):
    recorder.sizes = [100]
    kernel.launch(grid=1, block_threads=32, parameters=(bytes(100),))
    recorder.sizes = [4]
    kernel.launch(grid=2, block_threads=32, parameters=(11,))
    assert recorder.launches[-1][4] == [struct.pack("i", 11)]
    assert [launch[0] for launch in recorder.launches] == [1, 2]


def test_threads_do_not_share_what_a_launch_writes(kernel, recorder):
    kernel.launch(grid=1, block_threads=32, parameters=(1,))
    found = []

    def look():
        kernel.launch(grid=2, block_threads=32, parameters=(2,))
        found.append((kernel._configs.by_threads[32], nvrtc._ARGUMENTS.of((2,))))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0][0] is not kernel._configs.by_threads[32]
    assert found[0][1] is not nvrtc._ARGUMENTS.of((1,))
