"""GPU memory that can be released and mapped again at the same addresses.

    with memory.present():    mapped and zeroed: tensors and captured graphs over it may be used
    outside                   the addresses stay reserved, the bytes are free for other uses

It uses CUDA's virtual memory management: cuMemAddressReserve once; cuMemCreate, cuMemMap and cuMemSetAccess
to map, cuMemUnmap to release. A tensor over the range keeps the range alive, so it is freed after the last
tensor. A CPU, or a device without such management, has `ResidentMemory`, which stays allocated.
"""

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.runtime.gpu_memory import check_limit, mapped, numbered
from qerl.kernels.runtime.nvrtc import checked


class ResidentMemory:
    """Memory that is zeroed once, when allocated, and stays allocated."""

    is_kept = True
    """True if its contents survive while it is not present."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes = num_bytes
        self._bytes_N = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        """Return uint8 [num_bytes]; call and use it only while the memory is present."""
        return self._bytes_N

    def present(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class VirtualMemory:
    """Memory mapped only while present; num_bytes is rounded up to whole device pages (2 MiB)."""

    is_kept = False

    def __init__(self, num_bytes: int, device: torch.device):
        assert num_bytes > 0 and device.type == "cuda"
        torch.cuda.synchronize(device)  # the driver calls below need torch's context
        driver = self._driver = importlib.import_module("cuda.bindings.driver")
        self._device = numbered(device)
        self._properties = _properties(driver, self._device.index)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = checked(driver.cuMemGetAllocationGranularity(self._properties, minimum))
        self.num_bytes = -(-num_bytes // granule) * granule
        with torch.cuda.device(self._device):
            self._address = checked(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0))
        finalizer = weakref.finalize(self, driver.cuMemAddressFree, self._address, self.num_bytes)
        finalizer.atexit = False  # the end of the process frees it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (int(self._address), False),
            "version": 3,
        }

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Map the memory. Raise torch.OutOfMemoryError if it does not fit, even in torch's unused blocks."""
        with torch.cuda.device(self._device), contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._mapped())
            except torch.OutOfMemoryError:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                stack.enter_context(self._mapped())
            self.tensor().zero_()
            yield

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        check_limit(self._device, self.num_bytes)
        self._map()
        try:
            with mapped(self._device, self.num_bytes):
                yield
        finally:
            torch.cuda.synchronize()  # no kernel may still use it
            checked(self._driver.cuMemUnmap(self._address, self.num_bytes))

    def _map(self) -> None:
        driver, access = self._driver, self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        handle = checked(driver.cuMemCreate(self.num_bytes, self._properties, 0))
        try:
            checked(driver.cuMemMap(self._address, self.num_bytes, 0, handle, 0))
        finally:
            checked(driver.cuMemRelease(handle))  # from here on the mapping alone keeps it
        try:
            checked(driver.cuMemSetAccess(self._address, self.num_bytes, [access], 1))
        except BaseException:
            checked(driver.cuMemUnmap(self._address, self.num_bytes))
            raise


def can_give_back(device: torch.device) -> bool:
    """True if the device supports virtual memory management and cuda-bindings is installed."""
    if device.type != "cuda":
        return False
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    torch.cuda.synchronize(device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(
        checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(numbered(device).index))))
    )


def memory_on(device: torch.device, num_bytes: int) -> ResidentMemory | VirtualMemory:
    """Return memory on the device: VirtualMemory is zeroed each time it is mapped, ResidentMemory once."""
    return VirtualMemory(num_bytes, device) if can_give_back(device) else ResidentMemory(num_bytes, device)


def _properties(driver: Any, index: int) -> Any:
    """Return the properties of memory pinned on this device, like cudaMalloc's."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties
