"""List what a multiprocessor of each CUDA architecture holds, and count the CTAs that it runs at once.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the occupancy
calculation of cuda_occupancy.h. Bytes are bytes, not KB.
"""

import dataclasses

import torch

REGISTERS, MAX_REGISTERS = 65536, 255  # 32-bit registers: of a multiprocessor and of a CTA; most of a thread
SYSTEM_SHARED_BYTES = 1024  # taken from the multiprocessor's memory for each CTA
_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_REGISTER_UNIT = 256  # registers of a warp are allocated in these
_SHARED_UNIT = 128


@dataclasses.dataclass(frozen=True, slots=True)
class CudaArchitecture:
    """CudaArchitecture("sm_86", shared_bytes=101376, ...): the limits that a kernel's tile must respect."""

    name: str
    cards: str
    shared_bytes: int
    """Shared memory of one CTA, static and dynamic together."""
    sm_shared_bytes: int
    """Shared memory of all CTAs of a multiprocessor, with SYSTEM_SHARED_BYTES each."""
    max_threads: int
    """Threads of all CTAs of a multiprocessor."""
    max_ctas: int

    @property
    def has_wgmma(self) -> bool:
        """True on Hopper alone."""
        return self.name == "sm_90a"

    @property
    def number(self) -> int:
        """Return 86 for sm_86 and 90 for sm_90a."""
        return int(self.name.removeprefix("sm_").rstrip("a"))

    def resident_ctas(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many CTAs run at once on a multiprocessor; 0 if not even one does.

        threads: of a CTA; registers: of a thread; shared_bytes: of a CTA, static and dynamic.
        """
        if not 0 < threads <= 1024 or registers > MAX_REGISTERS or shared_bytes > self.shared_bytes:
            return 0
        warps = -(-threads // 32)
        warp_registers = max(-(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT, _REGISTER_UNIT)
        if -(-warps // _PARTITIONS) * _PARTITIONS * warp_registers > REGISTERS:  # as a launch is checked
            return 0
        resident_warps = REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
        shared = -(-(shared_bytes + SYSTEM_SHARED_BYTES) // _SHARED_UNIT) * _SHARED_UNIT
        return min(
            resident_warps // warps,
            self.sm_shared_bytes // shared,
            self.max_threads // (warps * 32),
            self.max_ctas,
        )


def _architecture(
    name: str, cards: str, sm_shared_kb: int, max_threads: int, max_ctas: int
) -> CudaArchitecture:
    sm_bytes = sm_shared_kb * 1024
    return CudaArchitecture(name, cards, sm_bytes - SYSTEM_SHARED_BYTES, sm_bytes, max_threads, max_ctas)


ARCHITECTURES = {
    each.name: each
    for each in (
        _architecture("sm_80", "A100, A30", 164, 2048, 32),
        _architecture("sm_86", "RTX 30, A40, A10, A6000", 100, 1536, 16),
        _architecture("sm_87", "Orin", 164, 1536, 16),
        _architecture("sm_89", "RTX 40, L4, L40S", 100, 1536, 24),
        _architecture("sm_90a", "H100, H200, GH200", 228, 2048, 32),
        _architecture("sm_100a", "B200, GB200", 228, 2048, 32),
        _architecture("sm_103a", "B300, GB300", 228, 2048, 32),
        _architecture("sm_110a", "Thor", 228, 1536, 24),
        _architecture("sm_120a", "RTX 50, RTX PRO Blackwell", 100, 1536, 24),
        _architecture("sm_121a", "GB10 (DGX Spark)", 100, 1536, 24),
    )
}
TESTED = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""The architectures for which tests/kernels/test_compile_matrix.py compiles every kernel."""


def architecture_name(capability: tuple[int, int]) -> str:
    """Return NVRTC's name: sm_86 for (8, 6), sm_90a for (9, 0), with the architecture's own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def gpu_of(device: torch.device) -> torch.device | None:
    """Return the GPU that tensors on this device mean to torch.cuda: for those without memory (meta), whose
    launches are only noted (nvrtc.py: dry_run), None, torch's current one."""
    return None if device.type == "meta" else device


def num_sms(device: torch.device) -> int:
    """Return the number of a CUDA device's multiprocessors."""
    return torch.cuda.get_device_properties(gpu_of(device)).multi_processor_count


def architecture_of(device: torch.device) -> CudaArchitecture:
    """Return the limits of a CUDA device. One that is not in the table gets those of sm_86, the tightest."""
    name = architecture_name(torch.cuda.get_device_capability(gpu_of(device)))
    return ARCHITECTURES.get(name) or dataclasses.replace(ARCHITECTURES["sm_86"], name=name, cards="unknown")
