"""The reader of cubins finds what ptxas reports when it compiles them."""

import re
import struct

import pytest

from benchmarks.cubin import _split_copies, kernels_of
from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.architectures import TESTED
from qerl.kernels.runtime.nvrtc import checked

SPILLING = {"TABLE": 0, "TOKEN_TILES": 4, "ROW_TILES": 2, "UNITS": 8, "WARPS": 8, "CLUSTER": 8}


def ptxas_says(file, defines, architecture):
    """{kernel: (registers, stack frame, shared memory)} and the cubin, of one compilation"""
    binding = pytest.importorskip("cuda.bindings.nvrtc")
    headers = nvrtc._headers()
    options = (*nvrtc._options(defines, architecture), "--ptxas-options=-v")
    program = checked(
        binding.nvrtcCreateProgram(
            nvrtc._source(file).encode(),
            file.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    checked(binding.nvrtcCompileProgram(program, len(options), [each.encode() for each in options]))
    cubin = bytes(checked(binding.nvrtcGetCUBINSize(program)))
    checked(binding.nvrtcGetCUBIN(program, cubin))
    found = {}
    for part in nvrtc.program_log(program).split("Compiling entry function ")[1:]:
        numbers = [
            re.search(rf"(\d+) {what}", part) for what in ("registers", "bytes stack frame", "bytes smem")
        ]
        found[part.split("'")[1]] = tuple(int(number[1]) if number else 0 for number in numbers)
    return found, cubin


@pytest.mark.parametrize("architecture", TESTED)
@pytest.mark.parametrize(
    ("file", "defines", "threads"),
    [
        ("rms_norm.cu", {"WIDTH": 896, "THREADS": 128, "X_BYTES": 4, "TABLE": 1}, {128}),
        ("lora_shrink_portable.cu", SPILLING, {256, 512}),
    ],
)
def test_a_cubin_says_what_ptxas_says(file, defines, threads, architecture):
    defines = defines | ({"CLUSTER": 16} if 512 in threads else {})
    said, cubin = ptxas_says(file, defines, architecture)
    found = kernels_of(cubin)
    assert {use.name: (use.registers, use.local_bytes, use.shared_bytes) for use in found.values()} == said
    assert {use.most_threads for use in found.values()} == threads
    if file == "lora_shrink_portable.cu":
        assert found["shrink"].local_bytes > 0


def test_other_bytes_are_no_cubin():
    with pytest.raises(ValueError, match="no cubin"):
        kernels_of(b"\x7fELF but of 32 bits")


def test_copies_to_a_split_address_are_counted_by_the_first_word_of_an_instruction():
    """As disassembled: LDGSTS.E.BYPASS.128 [R163+UR8], desc[UR9][R6.64] and the same to [R7]."""
    split, whole = (0x0000000006A37DAE, 0x0003E2200B901C48), (0x0000000008077FAE, 0x0003E2000B901DAE)
    assert _split_copies(struct.pack("<8Q", *split, *whole, *split, *whole)) == 2
