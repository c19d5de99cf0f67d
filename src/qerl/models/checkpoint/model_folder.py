"""Choose the weight files of a folder, which may hold copies for several programs.

    model.safetensors.index.json    the files that it lists
    model.safetensors               this file
    else                            every *.safetensors but adapters and copies for other programs

What is beside them (consolidated.safetensors, pytorch_model.bin, .gguf files) is not read.
"""

import re
from pathlib import Path
from typing import Any

from qerl.config.regular_file import MAX_JSON_BYTES, parse_json, read_regular
from qerl.errors import UserError

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 100_000_000
_OTHERS = re.compile(r"(consolidated|adapter_model|adapters)\b.*\.safetensors")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLED = "*.bin", "*.pt", "*.pth", "*.ckpt"
_BESIDE = "*.safetensors", "*.gguf", *_PICKLED
_NO_WEIGHTS = "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "optimizer.bin"


def check_folder(folder: Path) -> Path:
    """Return the folder; raise UserError that says what to do if it is not a model in safetensors."""
    if not (folder / "config.json").is_file():
        lack = "config.json is missing" if any(folder.iterdir()) else "the folder is empty"
        raise UserError(f"{folder} is not a model: {lack}{_instead(folder)}")
    if not (_model_files(folder) or (folder / INDEX_NAME).exists()):
        raise UserError(f"{folder}: has no *.safetensors file{_instead(folder)}")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files to read; raise UserError for one that is missing."""
    if (folder / INDEX_NAME).exists():
        files = [folder / name for name in sorted(set(_weight_map(folder / INDEX_NAME).values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: is missing, but {INDEX_NAME} lists it; download the model again")
        return files
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    files = _model_files(folder)
    _check_parts(folder, files)
    return files


def unused_files(folder: Path) -> list[str]:
    """Return the names of weight files in the folder that are not read."""
    read = set(weight_files(folder))
    beside = {file for pattern in _BESIDE for file in folder.glob(pattern)} - read
    return sorted(file.name for file in beside if file.name not in _NO_WEIGHTS)


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file; raise UserError if there is none."""
    try:
        value = parse_json(read_regular(file, max_bytes))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def _model_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.safetensors") if not _OTHERS.fullmatch(file.name))


def _check_parts(folder: Path, files: list[Path]) -> None:
    """Raise UserError if a part of {name}-00001-of-00003 is missing where no index lists the parts."""
    for match in filter(None, (_PART.fullmatch(file.name) for file in files)):
        stem, total = match[1], match[3]
        for number in range(1, int(total) + 1):
            part = folder / f"{stem}-{number:05}-of-{total}.safetensors"
            if not part.is_file():
                raise UserError(f"{part}: is missing, one of {int(total)} parts; download the model again")


def _instead(folder: Path) -> str:
    """Return what to do with what the folder has, as the end of an error."""

    def first(*patterns: str) -> str | None:
        return next((file.name for pattern in patterns for file in sorted(folder.glob(pattern))), None)

    if file := first("*.gguf"):
        return f"; to load {file}, pass the file itself: {folder / file}"
    if (folder / "adapter_config.json").is_file():
        return ": this is an adapter; give its base model with --model, and this folder with --init-adapter"
    if file := first("consolidated*.safetensors"):
        return f"; {file} has Mistral's names: download the model's *.safetensors with Hugging Face's names"
    if file := first(*_PICKLED):
        return (
            f" (pickled weights such as {file} are never loaded; convert them once:"
            " transformers' AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT))"
        )
    return ""


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return weight_map
