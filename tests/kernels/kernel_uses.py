"""What each kernel uses as NVRTC has compiled it, from a record of the tests' variants.

    PYTHONPATH=. python tests/kernels/kernel_uses.py

It writes kernel_uses.json; run it after a change of a source or of NVRTC.

The tests ask for some 500 variants, of which each takes half a second of a core. A cubin depends on its
source, the headers, the definitions, the architecture and NVRTC's version alone, and a variant is recorded
under a hash of them. So only what has changed since is compiled, and one variant of each file always
(test_cuda_sources.py), which must be what is recorded.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.cubin import KernelUse, kernels_of
from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.architectures import CudaArchitecture
from qerl.kernels.runtime.nvrtc import KernelVariant

RECORD = Path(__file__).with_suffix(".json")
ASKED_BY = (
    *("test_compile_matrix.py", "test_cuda_sources.py", "head/test_head_options.py"),
    *("attention/test_decode_attention_options.py", "attention/test_interleaved_rotation.py"),
    *("delta_net/test_delta_net_step.py", "tiles/test_gated_product.py"),
)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)

asked: dict[str, dict[str, KernelUse]] = {}
"""Kernels of each variant that the tests of this process have asked for, by its hash."""


def measure(variants: Iterable[KernelVariant], card: CudaArchitecture) -> dict[KernelVariant, KernelUse]:
    return {each: uses(each.file, dict(each.defines), card.name)[each.name] for each in variants}


def uses(file: str, defines: Mapping[str, int], architecture: str) -> dict[str, KernelUse]:
    """The use of each of the file's kernels by name, recorded or compiled."""
    key = key_of(file, defines, architecture)
    if key not in asked:
        recorded = _recorded().get(key)
        asked[key] = anew(file, defines, architecture) if recorded is None else recorded
    return asked[key]


def anew(file: str, defines: Mapping[str, int], architecture: str) -> dict[str, KernelUse]:
    return kernels_of(nvrtc.cached_cubin(file, defines, architecture))


def key_of(file: str, defines: Mapping[str, int], architecture: str) -> str:
    """A hash of all that the cubin depends on."""
    parts = texts_of(file), nvrtc._options(defines, architecture), nvrtc_version()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@functools.cache
def texts_of(file: str) -> tuple[str, ...]:
    """The file and what it includes."""
    names, sources = [file], nvrtc.sources()
    for name in names:
        names += [each for each in INCLUDE.findall(sources[name]) if each not in names]
    return tuple(sources[name] for name in names)


@functools.cache
def nvrtc_version() -> tuple[object, ...]:
    """Major and minor, and of its package the patch too."""
    version = nvrtc.checked(importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion())
    try:
        return *version, importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return tuple(version)


@functools.cache
def _recorded() -> dict[str, dict[str, KernelUse]]:
    if not RECORD.exists():
        return {}
    return {
        key: {name: KernelUse(name, *numbers) for name, numbers in kernels.items()}
        for key, kernels in json.loads(RECORD.read_text()).items()
    }


def write() -> None:
    rows = {
        key: {name: dataclasses.astuple(use)[1:] for name, use in kernels.items()}
        for key, kernels in sorted(asked.items())
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kernels)}" for key, kernels in rows.items())
    RECORD.write_text(f"{{\n{lines}\n}}\n")
    print(f"{RECORD.name}: {len(rows)} variants")


class Writer:
    """A plugin that writes the record if the tests pass."""

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            importlib.import_module("kernels.kernel_uses").write()


if __name__ == "__main__":
    files = (str(RECORD.parent / name) for name in ASKED_BY)
    sys.exit(pytest.main(["-q", "-m", "not gpu", *files], plugins=[Writer()]))
