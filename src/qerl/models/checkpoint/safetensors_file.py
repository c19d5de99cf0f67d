"""Read the tensors of a folder of safetensors files, one at a time, by their offsets in the file.

    file = length of header (8 bytes, little-endian) | header (JSON) | data
    header = {name: {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, ...}

Tensors are not memory-mapped: mapped pages count as the process's memory until the file is closed, so loading
would peak at twice the checkpoint (`tests/models/test_loader.py` measures the peak). Every header is checked
against the length of its file before the first tensor is read.
"""

import copy
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from qerl.config.regular_file import open_regular, parse_json
from qerl.errors import UserError
from qerl.models.checkpoint.model_folder import read_json, weight_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CPU = torch.device("cpu")
_MAX_HEADER_BYTES = 100_000_000
_MAX_SHOWN_CHARS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class _SafetensorsEntry:
    """Location of one tensor: its bytes are file[begin : begin + num_bytes]."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class SafetensorsFolder:
    """A Checkpoint in a folder with config.json and safetensors files."""

    def __init__(self, folder: Path):
        self.path = folder
        self._device = CPU
        self.config = read_json(folder / "config.json")
        self._entries: dict[str, _SafetensorsEntry] = {}
        for file in weight_files(folder):
            header, data_begin, file_bytes = _header(file)
            for name, fields in header.items():
                if name in self._entries:
                    raise UserError(f"{file}: {name} is also in {self._entries[name].file.name}")
                self._entries[name] = _entry(file, name, fields, data_begin, file_bytes)
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.dtypes = {name: entry.dtype for name, entry in self._entries.items()}

    def on(self, device: torch.device) -> Self:
        """Return the folder with `read` and `read_rows` on this device."""
        folder = copy.copy(self)
        folder._device = device
        return folder

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, in its own memory."""
        return self._read(name, self._entries[name])

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, as `read` does; only they are read."""
        entry = self._entries[name]
        row_bytes, num_rows = entry.num_bytes // max(entry.shape[0], 1), rows.stop - rows.start
        some = dataclasses.replace(
            entry,
            shape=(num_rows, *entry.shape[1:]),
            begin=entry.begin + rows.start * row_bytes,
            num_bytes=num_rows * row_bytes,
        )
        return self._read(name, some)

    def _read(self, name: str, entry: _SafetensorsEntry) -> Tensor:
        try:
            with open_regular(entry.file) as file:
                file.seek(entry.begin)
                data = np.fromfile(file, dtype=np.uint8, count=entry.num_bytes)
        except OSError as error:
            raise UserError(f"{entry.file}: {name} cannot be read: {error.strerror}") from error
        if len(data) < entry.num_bytes:
            raise UserError(f"{entry.file}: truncated: {name} ends before its {entry.num_bytes} bytes")
        if not entry.num_bytes:
            return torch.zeros(entry.shape, dtype=entry.dtype, device=self._device)
        return torch.from_numpy(data).view(entry.dtype).view(entry.shape).to(self._device)


def check_size(file: Path) -> None:
    """Raise UserError for a fifo, a device or a file too large to be parsed whole; it may be missing."""
    try:
        with open_regular(file) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    if num_bytes > _MAX_HEADER_BYTES:
        raise UserError(f"{file}: it has {num_bytes:,} bytes, the limit is {_MAX_HEADER_BYTES:,}")


def stored_names(file: Path) -> list[str]:
    """Return the names of a file's tensors; its path needs not be UTF-8, as for safetensors' `safe_open`."""
    return list(_header(file)[0])


def load_whole(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that is small, such as an adapter's; its path as for `stored_names`.
    Raise OSError or SafetensorError."""
    return safetensors.torch.load(file.read_bytes())


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return (header, offset of the data, bytes in the file)."""
    try:
        with open_regular(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            is_whole = 8 + header_bytes <= file_bytes and header_bytes <= _MAX_HEADER_BYTES
            text = stream.read(header_bytes) if is_whole else b""
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    if not is_whole or len(text) < header_bytes:
        raise UserError(f"{file}: truncated, or not a safetensors file: its header is incomplete")
    try:
        header = parse_json(text)
    except ValueError as error:
        raise UserError(f"{file}: damaged, or not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise UserError(f"{file}: damaged, or not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + header_bytes, file_bytes


def _entry(file: Path, name: str, fields: Any, data_begin: int, file_bytes: int) -> _SafetensorsEntry:
    shown = " ".join(name.split())[:_MAX_SHOWN_CHARS]
    try:
        dtype_name, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        dtype = DTYPES[dtype_name]
        if any(type(number) is not int for number in (*shape, begin, end)):
            raise ValueError("not integers")
    except (KeyError, TypeError, ValueError) as error:
        entry = repr(fields)[:_MAX_SHOWN_CHARS]
        raise UserError(f"{file}: {shown}: its header entry is invalid: {entry}") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if begin < 0 or min(shape, default=0) < 0 or end - begin != num_bytes:
        offsets = f"{begin}..{end}"[:_MAX_SHOWN_CHARS]
        raise UserError(f"{file}: {shown}: its offsets {offsets} do not fit {dtype_name} {list(shape)[:8]}")
    if data_begin + end > file_bytes:
        last = data_begin + end
        raise UserError(f"{file}: truncated: {shown} ends at byte {last}, the file has {file_bytes}")
    return _SafetensorsEntry(file, dtype, shape, data_begin + begin, num_bytes)
