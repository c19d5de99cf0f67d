"""Calibrated models in $QERL_CACHE, so that a second run with the same settings need not calibrate again.

    calibrated/<key>/           the checkpoint; its files are hard links to those of the run that made it
    calibrated/<key>.json       SHA-256 of each file, written last
    digests/<files' state>      SHA-256 of a model's files, by their paths, sizes and times

The key is a SHA-256 of the content of the model's files, the prompts' tokens, the settings and the seed.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl.config import RunConfig
from qerl.config.cache import cache_folder
from qerl.errors import RunError, UserError
from qerl.models import hf_writer
from qerl.models.checkpoint.source import ModelSource
from qerl.tasks import Task
from qerl.tasks.sources import file_digest
from qerl.tracking.atomic_file import encode, make_folder, read_object, write_atomic
from qerl.types import Prompt

NOTE = "qerl_calibrated.json"
METHOD = 3
"""Raise it when the same inputs give other codes."""
_WITHOUT_EFFECT = "path", "backend", "calibrate", "sampler_format", "head_format", "operand"
"""Fields of ModelConfig that do not change the calibrated checkpoint."""


def calibration_key(
    config: RunConfig, source: ModelSource, prompts: Iterator[list[int]], settings: dict[str, Any]
) -> str:
    """Return the name of what this calibration makes. prompts: tokens, in the order in which they are
    sampled, as many as may be used; settings: of the samples and of GPTQ."""
    model = {name: value for name, value in asdict(config.model).items() if name not in _WITHOUT_EFFECT}
    model["scales"] = config.model.block_scales
    parts = [METHOD, model_digest(source), model, asdict(config.sample), asdict(config.engine)]
    parts += [config.seed, config.num_prompts, settings, list(prompts)]
    return hashlib.sha256(encode(parts)).hexdigest()


def calibration_prompts(
    config: RunConfig, task: Task, num_calls: int, max_tokens: int
) -> Iterator[list[int]]:
    """Yield the tokens of each prompt that calibration may sample: until they alone have
    max_tokens."""
    num_tokens = 0
    for prompts in new_prompts(config, task, num_calls):
        yield from (prompt.tokens_T for prompt in prompts)
        num_tokens += sum(len(prompt.tokens_T) for prompt in prompts)
        if num_tokens >= max_tokens:
            return


def new_prompts(config: RunConfig, task: Task, num_calls: int) -> Iterator[list[Prompt]]:
    """Yield the training prompts of each call that no earlier one had, until a call has none."""
    seen: set[int] = set()
    for call in range(num_calls):
        new = [prompt for prompt in task.train_prompts(call, config.num_prompts) if prompt.index not in seen]
        if not new:
            return
        seen |= {prompt.index for prompt in new}
        yield new


def model_digest(source: ModelSource) -> str:
    """Return the SHA-256 of the names and contents of the model's files. Files whose path, size and times are
    known are not read again."""
    files = sorted(source.path.iterdir()) if source.path.is_dir() else [source.path]
    files = [file for file in files if file.is_file()]
    states = [(str(f.resolve()), s.st_ino, s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]]
    memo = cache_folder() / "digests" / hashlib.sha256(repr(states).encode()).hexdigest()
    try:
        return memo.read_text()
    except (OSError, UnicodeDecodeError):
        contents = [f"{'' if source.is_gguf else file.name} {file_digest(file)}" for file in files]
        digest = hashlib.sha256("\n".join(contents).encode()).hexdigest()
        _write(memo, digest.encode())
        return digest


def take(key: str, base: Path, model: str, notice: Callable[[str], None]) -> dict[str, Any] | None:
    """Make `base` of the stored checkpoint of this key, for the model of this path, and return its note; None
    if there is none, or a damaged one, which is removed with a notice."""
    folder, manifest = _places(key)
    if not manifest.is_file() or not folder.is_dir():
        return None
    if (damage := _damage(folder, manifest)) is not None:
        notice(f"{folder}: {damage}; calibrating again")
        manifest.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    note = read_object(folder / NOTE)
    with hf_writer.atomic_folder(base) as unfinished:
        _link_files(folder, unfinished)
        (unfinished / NOTE).unlink()  # a link to the cache's
        hf_writer.write_json(unfinished / NOTE, note | {"model": model})
    return note


def store(key: str, base: Path, notice: Callable[[str], None]) -> None:
    """Keep the checkpoint in `base`; a cache that cannot be written is a notice."""
    folder, manifest = _places(key)
    try:
        make_folder(folder.parent)
        manifest.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        with hf_writer.atomic_folder(folder) as unfinished:
            _link_files(base, unfinished)
        write_atomic(manifest, encode({file.name: file_digest(file) for file in sorted(folder.iterdir())}))
    except (OSError, RunError, UserError) as error:
        notice(f"{folder}: the calibrated model is not cached ({error})")


def _places(key: str) -> tuple[Path, Path]:
    folder = cache_folder() / "calibrated" / key
    return folder, folder.with_suffix(".json")


def _damage(folder: Path, manifest: Path) -> str | None:
    """Return what is wrong with a stored checkpoint; None: nothing."""
    try:
        sums = read_object(manifest)
        for name in sums.keys() | {file.name for file in folder.iterdir()}:
            if name not in sums or file_digest(folder / name) != sums[name]:
                return f"{name} is damaged"
    except (OSError, RunError, UserError, ValueError) as error:
        return f"cannot be read ({error})"
    return None


def _link_files(folder: Path, to: Path) -> None:
    """Link each file, or copy it where the two folders are on different disks."""
    for file in folder.iterdir():
        try:
            os.link(file, to / file.name)
        except OSError:
            shutil.copy2(file, to / file.name)


def _write(file: Path, content: bytes) -> None:
    """Write a file of the cache, unless it cannot be written."""
    try:
        make_folder(file.parent)
        write_atomic(file, content)
    except (OSError, RunError):
        pass
