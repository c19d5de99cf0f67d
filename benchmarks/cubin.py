"""Read from a compiled CUDA binary what each of its kernels uses: registers, local memory, shared memory.

A cubin is a little-endian ELF64 file. Of each kernel NAME it has the sections

    .text.NAME        the code; the low 24 bits of sh_info are the index of the kernel's symbol
    .nv.shared.NAME   as long as the kernel's static shared memory; absent without any
    .nv.info          records of all kernels: registers (0x2F) and stack frame (0x11) by symbol
    .nv.info.NAME     records of one kernel: most threads of a CTA (0x05), from __launch_bounds__

A record is u8 kind, u8 attribute, u16 n; kind 4 has n bytes behind it, the others keep their value in n. From
Hopper on .nv.shared.NAME also has the 1,024 bytes that the system takes of each CTA; `shared_bytes` has not.
NVIDIA documents none of this: tests/kernels/runtime/test_cubin.py compares every field with what ptxas
reports.
"""

import dataclasses
import struct
from collections.abc import Iterator

from qerl.kernels.runtime.architectures import SYSTEM_SHARED_BYTES

_MACHINE, _SECTION = "<HHIQQQIHHHHHH", "<IIQQQQIIQQ"
_REGISTERS, _FRAME, _THREADS = 0x2F, 0x11, 0x05
_SIZED = 4
_SPLIT_COPY, _OPCODE, _INSTRUCTION = 0xDAE, 0xFFF, 16  # LDGSTS [R + UR], its bits, bytes of an instruction


@dataclasses.dataclass(frozen=True, slots=True)
class KernelUse:
    """KernelUse("rms_norm", registers=64, local_bytes=0, shared_bytes=32, most_threads=256)"""

    name: str
    registers: int
    """Registers of a thread."""
    local_bytes: int
    """Stack frame of a thread, which holds what registers cannot (spills) and indexed arrays."""
    shared_bytes: int
    """Static, of a CTA."""
    most_threads: int | None
    """Threads of a CTA, by the kernel's own __launch_bounds__."""
    split_copies: int = 0
    """Asynchronous copies whose shared address is split over a uniform register; wrong with an L2 policy."""


def kernels_of(cubin: bytes) -> dict[str, KernelUse]:
    """Return the use of every kernel by name.

    Raises ValueError if the bytes are no cubin.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no cubin: it does not begin as a 64-bit little-endian ELF file")
    sections = _sections(cubin)
    by_symbol: dict[tuple[int, int], int] = {}
    for attribute, body in _records(sections[".nv.info"][1]):
        if attribute in (_REGISTERS, _FRAME):
            symbol, value = struct.unpack("<II", body)
            by_symbol[attribute, symbol] = value
    kernels = {}
    for section, (info, code) in sections.items():
        if section.startswith(".text."):
            name, symbol = section.removeprefix(".text."), info & 0xFFFFFF
            registers, frame = by_symbol[_REGISTERS, symbol], by_symbol[_FRAME, symbol]
            shared = _static_shared(cubin, sections, name)
            threads, split = _most_threads(sections, name), _split_copies(code)
            kernels[name] = KernelUse(name, registers, frame, shared, threads, split)
    return kernels


def _split_copies(code: bytes) -> int:
    words = struct.unpack(f"<{len(code) // 8}Q", code)[:: _INSTRUCTION // 8]
    return sum(word & _OPCODE == _SPLIT_COPY for word in words)


def _sections(cubin: bytes) -> dict[str, tuple[int, bytes]]:
    """Return (sh_info, bytes) by name; of a section without bytes in the file, zeros."""
    header = struct.unpack_from(_MACHINE, cubin, 16)
    start, size, count, names_index = header[5], header[10], header[11], header[12]
    rows = [struct.unpack_from(_SECTION, cubin, start + i * size) for i in range(count)]
    names = rows[names_index][4]
    records = {}
    for name, kind, _, _, offset, length, _, info, *_ in rows:
        text = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        records[text] = (info, bytes(length) if kind == 8 else cubin[offset : offset + length])
    return records


def _records(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(section):
        kind, attribute, n = struct.unpack_from("<BBH", section, at)
        at += 4
        body = section[at : at + n] if kind == _SIZED else b""
        at += len(body)
        yield attribute, body


def _static_shared(cubin: bytes, sections: dict[str, tuple[int, bytes]], name: str) -> int:
    if f".nv.shared.{name}" not in sections:
        return 0
    has_system = _number(cubin) >= 90
    return len(sections[f".nv.shared.{name}"][1]) - (SYSTEM_SHARED_BYTES if has_system else 0)


def _number(cubin: bytes) -> int:
    """Return 80 for sm_80: bits 8 to 15 of the ELF header's flags."""
    return struct.unpack_from(_MACHINE, cubin, 16)[6] >> 8 & 0xFF


def _most_threads(sections: dict[str, tuple[int, bytes]], name: str) -> int | None:
    for attribute, body in _records(sections[f".nv.info.{name}"][1]):
        if attribute == _THREADS:
            x, y, z = struct.unpack("<III", body)
            return x * y * z
    return None
