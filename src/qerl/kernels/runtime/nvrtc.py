"""Compile the kernels' CUDA C++ at run time with NVRTC, and launch it on torch's stream.

A .cu file is compiled once per device and set of definitions, when a kernel of it is first launched; its
headers (.cuh) are given to NVRTC by name. Sources lie beside the modules that launch them, shared headers in
kernels/cuda/; each is found by its name, which is unique. The cubin is cached on disk under a hash of the
source, the headers, the options with the architecture, and NVRTC's version; compile_ahead.py fills the cache
in parallel. No compiler is needed, only `cuda-bindings`, which is imported when the first kernel is compiled.

From Hopper on a launch may begin before the previous kernel on the stream has ended (programmatic dependent
launch), so a kernel calls `grid_dependency_wait` (launch.cuh) before it reads or writes what that kernel
touches. Launches can be captured in a CUDA graph.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.cache import cache_folder
from qerl.kernels.runtime.architectures import architecture_name
from qerl.kernels.runtime.compile_tally import TALLY, locked

Parameter = Tensor | bytes | int | None  # a device pointer, a struct, a 32-bit int, a null pointer


@dataclasses.dataclass(frozen=True, slots=True)
class KernelVariant:
    """A launch's kernel: file, definitions, threads of a CTA, dynamic shared memory, CTAs of a cluster."""

    file: str
    name: str
    defines: tuple[tuple[str, int], ...]
    threads: int
    shared_bytes: int
    cluster: int = 1


_DRY_RUN: contextvars.ContextVar[dict[KernelVariant, None] | None] = contextvars.ContextVar(
    "qerl_dry_run", default=None
)


@contextlib.contextmanager
def dry_run() -> Iterator[dict[KernelVariant, None]]:
    """Inside, launches of this thread only add their variant to the yielded dict; what they would write stays
    unset. Neither the driver nor NVRTC is called."""
    variants: dict[KernelVariant, None] = {}
    token = _DRY_RUN.set(variants)
    try:
        yield variants
    finally:
        _DRY_RUN.reset(token)


def is_dry_run() -> bool:
    """True in a thread's dry run."""
    return _DRY_RUN.get() is not None


@dataclasses.dataclass(frozen=True, eq=False)
class CudaKernel:
    """kernel.launch(grid=132, block_threads=160, parameters=[x, None, 8]); the first launch compiles."""

    file: str
    name: str
    device: torch.device
    defines: Mapping[str, int]
    shared_bytes: int
    cluster: int

    def launch(self, *, grid: int, block_threads: int, parameters: Sequence[Parameter]) -> None:
        variants = _DRY_RUN.get()
        if variants is not None:
            defines = tuple(sorted(self.defines.items()))
            variants[
                KernelVariant(self.file, self.name, defines, block_threads, self.shared_bytes, self.cluster)
            ] = None
            return
        driver, function = self._loaded
        configs = self._configs.by_threads
        config = configs.get(block_threads)
        if config is None:
            config = configs[block_threads] = self._config(driver, block_threads)
        config.gridDimX = grid
        config.hStream = _current_stream(self.device)
        arguments = _ARGUMENTS.of(parameters)
        checked(driver.cuLaunchKernelEx(config, function, arguments.address, 0))

    def _config(self, driver: Any, block_threads: int) -> Any:
        """Return the parts of a launch that stay; making them takes longer than a launch."""
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block_threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.attrs = attributes = launch_attributes(driver, self._starts_early, self.cluster)
        config.numAttrs = len(attributes)
        return config

    @functools.cached_property
    def _configs(self) -> "_Configs":
        return _Configs()

    def resident_ctas(self, block_threads: int) -> int:
        """Return how many CTAs run at once on a multiprocessor; 1 in a dry run."""
        if _DRY_RUN.get() is not None:
            return 1
        if block_threads not in self._resident:
            driver, function = self._loaded
            self._resident[block_threads] = checked(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block_threads, self.shared_bytes)
            )
        return self._resident[block_threads]

    @functools.cached_property
    def _resident(self) -> dict[int, int]:
        return {}

    @functools.cached_property
    def _starts_early(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= (9, 0)

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """Return (driver, function)."""
        assert self.device.type == "cuda"
        driver = importlib.import_module("cuda.bindings.driver")
        torch.cuda.synchronize(self.device)  # the driver calls below need torch's context
        architecture = architecture_name(torch.cuda.get_device_capability(self.device))
        with TALLY.waiting():
            cubin = cached_cubin(self.file, self.defines, architecture)
        TALLY.use(cubin_path(self.file, self.defines, architecture))
        with torch.cuda.device(self.device):
            module = checked(driver.cuModuleLoadData(cubin))
        function = checked(driver.cuModuleGetFunction(module, self.name.encode()))
        attributes = driver.CUfunction_attribute
        settings = [(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared_bytes)]
        if self.cluster > 8:
            settings.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in settings:
            checked(driver.cuFuncSetAttribute(function, attribute, value))
        return driver, function


def launch_attributes(driver: Any, starts_early: bool, cluster: int) -> list:
    """Return a launch's attributes. starts_early: it may begin before the previous kernel on the stream has
    ended, which devices before Hopper do not have."""
    ids, attributes = driver.CUlaunchAttributeID, []
    if starts_early:
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if cluster > 1:
        wide = driver.CUlaunchAttribute()
        wide.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        wide.value.clusterDim.x = cluster
        wide.value.clusterDim.y = wide.value.clusterDim.z = 1
        attributes.append(wide)
    return attributes


def compiled(
    file: str,
    name: str,
    device: torch.device,
    defines: Mapping[str, int],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> CudaKernel:
    """Return a kernel of a .cu file with these definitions, for one device.

    cluster: number of CTAs that access each other's shared memory; above 8 is not portable.
    """
    return CudaKernel(file, name, device, defines, shared_bytes, cluster)


def cached_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a method that caches its results by its arguments, to be stored on its object.

    `functools.lru_cache` around a bound method makes a reference cycle: the object, and its device memory,
    would stay until Python's cycle collector runs.
    """
    weak, results = weakref.WeakMethod(method), {}

    def call(*arguments: Any) -> Any:
        if arguments not in results:
            bound = weak()
            assert bound is not None
            results[arguments] = bound(*arguments)
        return results[arguments]

    return call


def addresses(*tensors: Tensor | None) -> list[int]:
    """Return the pointers that a struct of parameters holds; None is a null pointer."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def tensor_map(x_MK: Tensor, rows: int, columns: int) -> bytes:
    """Return the tensor map of x_MK (16-bit) as [K / 64, M, 64], for copies of [columns / 64, rows, 64].

    In shared memory each row of 64 is in `wgmma`'s 128-byte swizzle; rows past M read as 0.
    """
    if _DRY_RUN.get() is not None:
        return bytes(128)
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


def _current_stream(device: torch.device) -> int:
    """Return the address of the device's current stream; making torch's object takes as long as a launch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


class _Configs(threading.local):
    """Launch configurations by the threads of a CTA. A launch writes to them: each thread has its own."""

    def __init__(self) -> None:
        self.by_threads: dict[int, Any] = {}


class _Arguments:
    """Memory for the parameters of a launch, which copies them: a slot of 8 bytes for each."""

    def __init__(self, count: int):
        self._slots = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._slots)
        self._slot_addresses = [first + 8 * i for i in range(count)]
        self._pointers = (ctypes.c_void_p * count)(*self._slot_addresses)
        self._structs: dict[int, ctypes.Array] = {}
        self.address = ctypes.addressof(self._pointers)

    def fill(self, parameters: Sequence[Parameter]) -> None:
        for i in self._structs:
            self._pointers[i] = self._slot_addresses[i]
        self._structs = {}
        slots = self._slots
        for i, parameter in enumerate(parameters):
            if parameter is None:
                slots[i] = 0
            elif isinstance(parameter, int):
                slots[i] = parameter & 0xFFFFFFFF
            elif not isinstance(parameter, bytes):
                slots[i] = parameter.data_ptr()
            elif len(parameter) <= 8:
                slots[i] = int.from_bytes(parameter, "little")
            else:
                self._structs[i] = ctypes.create_string_buffer(parameter, len(parameter))
                self._pointers[i] = ctypes.addressof(self._structs[i])


class _ArgumentsByCount(threading.local):
    def __init__(self) -> None:
        self._by_count: dict[int, _Arguments] = {}

    def of(self, parameters: Sequence[Parameter]) -> _Arguments:
        """Return this thread's arguments with these values, which its next launch may overwrite."""
        count = len(parameters)
        if count not in self._by_count:
            self._by_count[count] = _Arguments(count)
        arguments = self._by_count[count]
        arguments.fill(parameters)
        return arguments


_ARGUMENTS = _ArgumentsByCount()


def compile_cubin(file: str, defines: Mapping[str, int], architecture: str) -> bytes:
    """Compile a .cu file for an architecture such as sm_90a; needs no GPU."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    headers, options = _headers(), [option.encode() for option in _options(defines, architecture)]
    program = checked(
        nvrtc.nvrtcCreateProgram(
            _source(file).encode(),
            file.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result) != 0:
            raise RuntimeError(f"NVRTC cannot compile {file}: {result}\n{program_log(program)}")
        cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def program_log(program: Any) -> str:
    """Return what NVRTC says of a program. The buffer has a byte more than an empty log's one, since NVRTC
    writes into it and Python shares every bytes object of one byte."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)) + 1)
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode()


def cache_key(file: str, defines: Mapping[str, int], architecture: str, versions: tuple) -> str:
    """Return a hash of everything that a cubin depends on."""
    parts = (_source(file), _headers(), _options(defines, architecture), versions)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cached_cubin(file: str, defines: Mapping[str, int], architecture: str) -> bytes:
    """Return the compiled file from the disk cache, after compiling it if it is not there."""
    path = cubin_path(file, defines, architecture)
    if path.exists():
        return path.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if path.exists():  # compiled by another thread or process in the meantime
            return path.read_bytes()
        with TALLY.compiling(path):
            cubin = compile_cubin(file, defines, architecture)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_bytes(cubin)
        partial.replace(path)  # atomic: other processes see the whole file or none
    return cubin


def cubin_path(file: str, defines: Mapping[str, int], architecture: str) -> Path:
    """Return where the disk cache has this cubin."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    folder = cache_folder() / "cubin"
    return folder / f"{cache_key(file, defines, architecture, checked(nvrtc.nvrtcVersion()))}.cubin"


def _options(defines: Mapping[str, int], architecture: str) -> tuple[str, ...]:
    macros = (f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"--gpu-architecture={architecture}", "-default-device", *macros)


def _source(file: str) -> str:
    return sources()[file]


@functools.cache
def _headers() -> dict[str, str]:
    """Return the text of every .cuh file by name."""
    return {name: text for name, text in sources().items() if name.endswith(".cuh")}


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of every .cu and .cuh file of the kernels by its name, which is unique, in order."""
    texts: dict[str, str] = {}
    folders = [resources.files("qerl.kernels")]
    for folder in folders:
        for file in folder.iterdir():
            if file.is_dir():
                folders.append(file)
            elif file.name.endswith((".cu", ".cuh")):
                assert file.name not in texts, file.name
                texts[file.name] = file.read_text()
    return dict(sorted(texts.items()))


def checked(returned: tuple) -> Any:
    """Return the values of a driver or NVRTC call, or raise if its status is an error."""
    status, *values = returned
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError(f"CUDA driver call failed: {status}")
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver or NVRTC call failed: {status}")
    return values[0] if len(values) == 1 else values
