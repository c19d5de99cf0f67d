"""Read a GGUF file: its metadata, and its tensors under the decoder's names (gguf_tensors.py).

    file = "GGUF" | version | counts | metadata (key, type, value) | tensor infos | padding | tensor data

Tensors are read by offset and decoded to float32 one at a time, on the device that they are for: only the
file's bytes go there (ggml_blocks.py). The metadata are parsed here, because the package's GGUFReader
    makes a numpy array of each token and merge: 1.8 s for SmolLM2's 98 MB file, where this takes 0.05 s;
    loops over an array's stored length without checking it: a damaged length of 2^40 does not return;
    maps the whole file, whose pages then count as the process's memory.
"""

import dataclasses
import functools
import io
import math
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qerl.config.regular_file import open_regular
from qerl.errors import UserError, naming
from qerl.models.checkpoint.ggml_blocks import decode_blocks
from qerl.models.checkpoint.gguf_families import FAMILIES, ROPE_TENSORS, GgufKeys, hf_config
from qerl.models.checkpoint.gguf_tensors import places
from qerl.models.checkpoint.one_thread import one_thread
from qerl.models.checkpoint.safetensors_file import CPU

_CPU_CHUNK_BYTES, _GPU_CHUNK_BYTES = 1 << 18, 1 << 23
"""Bytes of the file decoded at a time: a CPU's cache holds them; a GPU takes 150 MB for 4-bit codes."""
_SETTLED_NS = 2_000_000_000
"""A file written later than this ago may be written again without a new time: clocks of files are coarse."""
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)
"""ggml's types that `decode_blocks` decodes. NVFP4 needs scales that are tensors of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class _GgufEntry:
    """Location and ggml type of one tensor."""

    ggml_name: str
    ggml_type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class GgufFile:
    """A Checkpoint in a GGUF file; `metadata` has its keys and values, `config` those of a config.json."""

    def __init__(self, file: Path, device: torch.device = CPU):
        """device: where tensors are decoded."""
        self.path = file
        self._device = device
        metadata, entries = _parse(file)
        self.metadata = dict(metadata)
        self._entries = {entry.ggml_name: entry for entry in entries}
        keys = GgufKeys(
            file=file,
            metadata=self.metadata,
            family=self.metadata["general.architecture"],
            shapes={name: entry.shape for name, entry in self._entries.items()},
            rope_tensors={name: self._decode(name, CPU) for name in ROPE_TENSORS if name in self._entries},
        )
        self.config = hf_config(keys)
        self._places = places(keys, self.config)
        self.shapes = {name: place.shape for name, place in self._places.items()}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self.read(name)[rows]

    def read(self, name: str) -> Tensor:
        """Return the tensor in float32, with rows in Hugging Face's order."""
        place = self._places[name]
        weight = self._decode(place.ggml_name, self._device, place.rows)
        return weight if place.change is None else place.change(weight)

    def _decode(self, ggml_name: str, device: torch.device, rows: slice | None = None) -> Tensor:
        """Return these rows in float32; of a vector these elements."""
        entry = self._entries[ggml_name]
        num_rows, is_vector = math.prod(entry.shape[:-1]), len(entry.shape) == 1
        first, last = (0, num_rows) if rows is None or is_vector else (rows.start, rows.stop)
        weight = torch.empty(last - first, entry.shape[-1], device=device)
        try:
            with open_regular(self.path) as file:
                file.seek(entry.begin + first * (entry.num_bytes // num_rows))
                with one_thread():
                    _decode_rows(file, entry, weight)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"{self.path}: {ggml_name} cannot be read: {error}") from error
        if is_vector:
            return weight[0] if rows is None else weight[0, rows].clone()
        return weight.view(-1, *entry.shape[1:])


def _decode_rows(file: BinaryIO, entry: _GgufEntry, out: Tensor) -> None:
    """Decode the file's next rows into `out`, a few at a time."""
    assert isinstance(file, io.BufferedReader)
    row_bytes = entry.num_bytes // math.prod(entry.shape[:-1])
    block_bytes = gguf.GGML_QUANT_SIZES[entry.ggml_type][1]
    chunk_bytes = _CPU_CHUNK_BYTES if out.device.type == "cpu" else _GPU_CHUNK_BYTES
    chunk_rows = min(max(1, chunk_bytes // row_bytes), len(out))
    buffer = torch.empty(chunk_rows * row_bytes, dtype=torch.uint8)
    for rows in out.split(chunk_rows):
        raw = buffer[: len(rows) * row_bytes]
        if file.readinto(raw.numpy().data) < len(raw):
            raise ValueError("the file is truncated")
        blocks = raw.to(out.device).view(-1, block_bytes)
        rows.copy_(decode_blocks(blocks, entry.ggml_type).view_as(rows))


def _parse(file: Path) -> tuple[dict[str, Any], list[_GgufEntry]]:
    """Return metadata and tensors; once for a file that does not change, which a run opens six times."""
    try:
        with open_regular(file) as stream:
            stat = os.fstat(stream.fileno())
        is_settled = time.time_ns() - stat.st_mtime_ns > _SETTLED_NS
        parse = _parse_version if is_settled else _parse_version.__wrapped__
        return parse(file, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (_DamagedError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: damaged, or not a GGUF file: {reason}") from error


@functools.lru_cache(maxsize=2)
def _parse_version(file: Path, version: tuple[int, ...]) -> tuple[dict[str, Any], list[_GgufEntry]]:
    """version: what changes when the file does."""
    with open_regular(file) as stream, naming(file):
        file_bytes = os.fstat(stream.fileno()).st_size
        return _parse_stream(GgufCursor(stream, file_bytes), file_bytes)


class _DamagedError(Exception):
    pass


class GgufCursor:
    """Read values in sequence; raise _DamagedError at the end of the file."""

    def __init__(self, stream: BinaryIO | io.BufferedReader, num_bytes: int):
        self.stream, self.num_bytes, self.offset = stream, num_bytes, 0

    def take(self, num_bytes: int) -> bytes:
        self.offset += num_bytes
        if self.offset > self.num_bytes:
            raise _DamagedError(f"it ends before byte {self.offset}")
        return self.stream.read(num_bytes)

    def numbers(self, kind: npt.DTypeLike, count: int) -> list[Any]:
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def number(self, kind: npt.DTypeLike) -> Any:
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8")

    def value(self, kind: int) -> Any:
        value_type = gguf.GGUFValueType(kind)
        if value_type == gguf.GGUFValueType.STRING:
            return self.string()
        if value_type != gguf.GGUFValueType.ARRAY:
            return self.number(gguf.GGUFReader.gguf_scalar_to_np[value_type])
        item_type, count = gguf.GGUFValueType(self.number("I")), self.number("Q")
        if item_type == gguf.GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if item_type == gguf.GGUFValueType.ARRAY:
            raise _DamagedError("it holds an array of arrays")
        return self.numbers(gguf.GGUFReader.gguf_scalar_to_np[item_type], count)


def _parse_stream(cursor: GgufCursor, file_bytes: int) -> tuple[dict[str, Any], list[_GgufEntry]]:
    if cursor.take(4) != b"GGUF":
        raise _DamagedError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise _DamagedError(f"its version is {version}, 2 and 3 are supported")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise _DamagedError(f"it has the key {key!r:.80} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or family not in FAMILIES:  # its tensors may have other names and types
        supported = ", ".join(FAMILIES)
        raise UserError(f"architecture {family!r:.80} is not supported in GGUF; supported: {supported}")
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        infos.append((name, shape, gguf.GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    if len({name for name, *_ in infos}) < len(infos):
        raise _DamagedError("it has a tensor twice")
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _DamagedError(f"general.alignment is {alignment}")
    begin = math.ceil(cursor.offset / alignment) * alignment
    return metadata, [_entry(name, shape, kind, begin + at, file_bytes) for name, shape, kind, at in infos]


def _entry(
    name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, begin: int, file_bytes: int
) -> _GgufEntry:
    if kind.name not in TYPES:
        raise UserError(f"{name} is of ggml type {kind.name}; supported: {', '.join(TYPES)}")
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block_size:
        raise _DamagedError(f"{name} {list(shape)} does not divide into blocks of {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if begin + num_bytes > file_bytes:
        raise _DamagedError(f"truncated: {name} ends at byte {begin + num_bytes}, the file has {file_bytes}")
    return _GgufEntry(name, kind, shape, begin, num_bytes)
