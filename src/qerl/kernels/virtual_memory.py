"""Memory of a GPU that is given back and taken again while its addresses stay what they are.

    with memory.present():    mapped and zero: tensors and recorded graphs over it may be used
    outside                   the addresses are reserved, the bytes are the device's again

CUDA's virtual memory management: cuMemAddressReserve once; cuMemCreate, cuMemMap and cuMemSetAccess to take,
cuMemUnmap to give back. A tensor over the range keeps the range, so it is freed after the last of them. A
device without such management, or a CPU, has `ResidentMemory`: memory that stays.
"""

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.kernels.gpu_memory import check_limit, mapped, numbered
from qerl.kernels.nvrtc import checked


class Memory(Protocol):
    num_bytes: int
    is_kept: bool
    """Whether it stays where it is when it is not present."""

    def tensor(self) -> Tensor:
        """uint8 [num_bytes]; to be asked for, and used, while the memory is present."""
        ...

    def present(self) -> AbstractContextManager[None]: ...


class ResidentMemory:
    """Zero once, when made."""

    is_kept = True

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes = num_bytes
        self._bytes_N = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        return self._bytes_N

    def present(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class VirtualMemory:
    """num_bytes is what was asked for, rounded up to whole pages of the device (2 MiB)."""

    is_kept = False

    def __init__(self, num_bytes: int, device: torch.device):
        assert num_bytes > 0 and device.type == "cuda"
        torch.cuda.synchronize(device)  # the driver calls below need torch's context
        driver = self._driver = importlib.import_module("cuda.bindings.driver")
        self._device = numbered(device)
        self._properties = _properties(driver, self._device.index)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = checked(driver.cuMemGetAllocationGranularity(self._properties, least))
        self.num_bytes = -(-num_bytes // granule) * granule
        with torch.cuda.device(self._device):
            self._address = checked(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0))
        finalizer = weakref.finalize(self, driver.cuMemAddressFree, self._address, self.num_bytes)
        finalizer.atexit = False  # the process's end frees it

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
        """torch.OutOfMemoryError if there is no room, not even where torch's unused blocks are."""
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
            torch.cuda.synchronize()  # nothing on the device may still use it
            checked(self._driver.cuMemUnmap(self._address, self.num_bytes))

    def _map(self) -> None:
        driver, access = self._driver, self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        handle = checked(driver.cuMemCreate(self.num_bytes, self._properties, 0))
        try:
            checked(driver.cuMemMap(self._address, self.num_bytes, 0, handle, 0))
        finally:
            checked(driver.cuMemRelease(handle))  # the mapping alone holds it from here on
        try:
            checked(driver.cuMemSetAccess(self._address, self.num_bytes, [access], 1))
        except BaseException:
            checked(driver.cuMemUnmap(self._address, self.num_bytes))
            raise


def can_give_back(device: torch.device) -> bool:
    """Whether the device has virtual memory management, and cuda-bindings is there to reach it."""
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


def memory_on(device: torch.device, num_bytes: int) -> Memory:
    """Zero whenever it comes: for AddressRange each time, for Kept when it is made."""
    return VirtualMemory(num_bytes, device) if can_give_back(device) else ResidentMemory(num_bytes, device)


def _properties(driver: Any, index: int) -> Any:
    """Pinned on this device, as cudaMalloc's."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties
