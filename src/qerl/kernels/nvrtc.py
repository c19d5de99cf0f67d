"""CUDA C++ compiled while the program runs, and launched on torch's stream.

NVRTC compiles the source once for a device; the cubin is kept on disk under a hash of the source, the
options, the device's architecture and the versions of NVRTC and the driver, so that a later process reads
it. No compiler is needed where it runs, only `cuda-bindings`, imported when the first module is made.

A launch may begin before the kernel ahead of it on the stream has ended (programmatic dependent launch), so
a kernel calls `griddepcontrol.wait` before it reads or writes what that one touches. It records into a CUDA
graph like any other.
"""

import ctypes
import dataclasses
import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Parameter = Tensor | bytes | int | None  # a device pointer, a struct, a 32-bit int, a null pointer


def cache_folder() -> Path:
    return Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl").expanduser() / "cubin"


class CudaModule:
    """One source with its definitions, compiled for one device."""

    def __init__(self, source: str, defines: Mapping[str, int], device: torch.device, folder: Path):
        assert device.type == "cuda"
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._device = device
        torch.cuda.synchronize(device)  # the driver calls below need torch's context
        major, minor = torch.cuda.get_device_capability(device)
        options = (f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}", "-default-device")
        options += tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
        cubin = _cubin(source, options, folder, self._driver)
        with torch.cuda.device(device):
            self._module = checked(self._driver.cuModuleLoadData(cubin))

    def kernel(self, name: str, shared_bytes: int, cluster: int = 1) -> "CudaKernel":
        """cluster: CTAs that share their shared memory; above 8 a device need not be able to."""
        driver = self._driver
        function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        attributes = driver.CUfunction_attribute
        wanted = [(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)]
        if cluster > 8:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in wanted:
            checked(driver.cuFuncSetAttribute(function, attribute, value))
        return CudaKernel(driver, self, function, shared_bytes, cluster, self._device)


@dataclasses.dataclass(frozen=True, eq=False)
class CudaKernel:
    """kernel.launch(grid=132, block_threads=160, parameters=[x, None, 8])"""

    driver: Any
    module: CudaModule  # keeps the code loaded
    function: Any
    shared_bytes: int
    cluster: int
    device: torch.device

    def launch(self, *, grid: int, block_threads: int, parameters: Sequence[Parameter]) -> None:
        driver = self.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block_threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream(self.device).cuda_stream
        config.attrs = attributes = self._attributes()
        config.numAttrs = len(attributes)
        values = [_c_value(parameter) for parameter in parameters]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))

    def _attributes(self) -> list:
        driver, ids = self.driver, self.driver.CUlaunchAttributeID
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        if self.cluster == 1:
            return [early]
        together = driver.CUlaunchAttribute()
        together.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x = self.cluster
        together.value.clusterDim.y = together.value.clusterDim.z = 1
        return [early, together]


def tensor_map(x_MK: Tensor, rows: int, columns: int) -> bytes:
    """A bulk copy's description of x_MK (16-bit) as [K / 64, M, 64]: boxes of [columns / 64, rows, 64].

    In shared memory each row of 64 has its 16-byte pieces exchanged as `wgmma`'s 128-byte swizzle wants
    them; rows beyond M read as 0.
    """
    driver = importlib.import_module("cuda.bindings.driver")
    (m, k), size = x_MK.shape, x_MK.element_size()
    encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        3,
        x_MK.data_ptr(),
        [driver.cuuint64_t(n) for n in (64, m, k // 64)],
        [driver.cuuint64_t(n) for n in (k * size, 64 * size)],
        [driver.cuuint32_t(n) for n in (64, rows, columns // 64)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(checked(encoded).getPtr(), 128)


def _c_value(parameter: Parameter) -> ctypes.Array | ctypes.c_void_p | ctypes.c_int:
    if isinstance(parameter, bytes):
        return ctypes.create_string_buffer(parameter, len(parameter))
    if isinstance(parameter, int):
        return ctypes.c_int(parameter)
    return ctypes.c_void_p(0 if parameter is None else parameter.data_ptr())


def _cubin(source: str, options: Sequence[str], folder: Path, driver: Any) -> bytes:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    versions = (*checked(nvrtc.nvrtcVersion()), checked(driver.cuDriverGetVersion()))
    key = hashlib.sha256(repr((source, tuple(options), versions)).encode()).hexdigest()
    path = folder / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = _compiled(source, options, nvrtc)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(cubin)
    partial.replace(path)  # a process that reads at the same time finds all of it or nothing
    return cubin


def _compiled(source: str, options: Sequence[str], nvrtc: Any) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"source.cu", 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(result) != 0:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC {result}: {log.decode()}")
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def checked(returned: tuple) -> Any:
    """What a driver or NVRTC call gives besides its status: nothing, one value or several."""
    status, *values = returned
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError(f"CUDA: {status}")
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if len(values) == 1 else values
