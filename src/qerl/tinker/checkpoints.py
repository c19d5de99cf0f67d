"""Checkpoints on the disk, which outlive their clients and the server.

    FOLDER/RUN/weights/NAME           adapter, moments of the optimizer       tinker://RUN/weights/NAME
    FOLDER/RUN/sampler_weights/NAME   the adapter                             tinker://RUN/sampler_weights/NAME
    FOLDER/RUN/external_weights/NAME  the adapter, to be downloaded           tinker://RUN/external_weights/NAME

Each is a PEFT adapter, which `qerl` and PEFT load as it is, with checkpoint.json beside it. Downloaded
files may be encrypted for their readers with age (https://age-encryption.org).
"""

import contextlib
import dataclasses
import datetime
import glob
import importlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qerl.errors import RunError, UserError, require
from qerl.models import hf_writer
from qerl.models.checkpoint.safetensors_file import load_whole
from qerl.models.peft.peft_reader import ADAPTER, ADAPTER_CONFIG
from qerl.tracking.atomic_file import encode, read_object, write_atomic

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_OPTIMIZER, _INFO = "optimizer.safetensors", "checkpoint.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedAdapter:
    tensors: dict[str, Tensor]
    """Under PEFT's names."""
    moments: dict[str, Tensor] | None
    info: dict[str, Any]
    """rank, seed, train_mlp, train_attn, base_model and times."""


class Checkpoints:
    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.RLock()
        """While the folder of a name is exchanged or removed, or its times change."""

    def save(
        self,
        run: str,
        kind: str,
        name: str,
        tensors: Mapping[str, Tensor],
        description: Mapping[str, Any],
        info: Mapping[str, Any],
        *,
        moments: Mapping[str, Tensor] | None = None,
        ttl_s: int | None = None,
        overwrite: bool = False,
        encrypt: Callable[[Path], None] | None = None,
    ) -> str:
        """Write a checkpoint; return its tinker:// path. Raise UserError if there is one of that name.
        encrypt: replaces a file by its encrypted form."""
        path = f"tinker://{run}/{kind}/{name}"
        place, now = self._place(path), datetime.datetime.now(datetime.UTC)
        require(overwrite or not place.exists(), f"{path} exists: choose another name, or set overwrite")
        times = {"time": now.isoformat(), "expires_at": _expiry(ttl_s)}
        locked = contextlib.ExitStack()
        try:
            with locked, hf_writer.atomic_folder(place, overwrite=overwrite) as folder:
                save_file(
                    {name: t.contiguous() for name, t in tensors.items()}, folder / ADAPTER, {"format": "pt"}
                )
                hf_writer.write_json(folder / ADAPTER_CONFIG, dict(description))
                if moments is not None:
                    save_file({name: t.contiguous() for name, t in moments.items()}, folder / _OPTIMIZER)
                if encrypt is not None:
                    for file in list(folder.iterdir()):
                        encrypt(file)
                hf_writer.write_json(folder / _INFO, {**info, **times})
                locked.enter_context(self._lock)  # what set_ttl has read is not of another checkpoint
        except (RunError, UserError) as error:
            reason = getattr(error.__cause__, "strerror", None) or error
            raise RunError(f"{path}: cannot be written: {reason}") from error
        return path

    def load(self, path: str) -> SavedAdapter:
        place, info = self._place(path), self.info(path)
        try:
            tensors = load_whole(place / ADAPTER)
            moments = load_whole(place / _OPTIMIZER) if (place / _OPTIMIZER).exists() else None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        return SavedAdapter(tensors, moments, info)

    def info(self, path: str) -> dict[str, Any]:
        info = self._info(self._place(path))
        if info is None:
            raise _missing(path)
        return info

    def files(self, path: str) -> dict[str, Path]:
        """Return a checkpoint's files that are downloaded, by name."""
        self.info(path)
        with _deleted(path):
            files = sorted(self._place(path).iterdir())
        return {file.name: file for file in files if not file.name.startswith(_INFO)}

    def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let the checkpoint expire so long from now; None: never. A crash leaves the time before or this."""
        place = self._place(path)
        with self._lock:
            info = {**self.info(path), "expires_at": _expiry(ttl_s)}
            try:
                write_atomic(place / _INFO, encode(info, indent=2))
            except RunError as error:
                if not place.exists():
                    raise _missing(path) from None
                raise RunError(f"{path}: its time cannot be set: {error.__cause__ or error}") from error

    def listed(self, run: str | None = None) -> list[dict[str, Any]]:
        """Return the checkpoints of a run, or of all, as the API describes them, the newest first."""
        return [entry for _, entry, _ in self.all(run)]

    def all(self, run: str | None = None) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Return (run, as the API describes it, what is known of it) of each checkpoint, the newest first."""
        result = []
        pattern = f"{run if run is not None and _NAME.fullmatch(run) else '*'}/*/*/{_INFO}"
        # pathlib's glob raises an error for a folder that is deleted meanwhile
        files = glob.iglob(pattern, root_dir=self._folder) if run is None or _NAME.fullmatch(run) else ()
        for place in (self._folder.joinpath(file).parent for file in files):
            run_name, kind, name = place.parts[-3:]
            if kind not in KINDS:
                continue
            try:
                info, files = self._info(place), place.iterdir()
                size = sum(x.stat().st_size for x in files if x.suffix != ".part")  # set_ttl replaces a file
            except (
                UserError,
                FileNotFoundError,
            ):  # damaged: an error where it is loaded; or deleted
                continue
            if info is None:
                continue
            entry = {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": KINDS[kind], "size_bytes": size}
            entry |= {
                "time": info["time"],
                "tinker_path": f"tinker://{run_name}/{kind}/{name}",
                "public": False,
            }
            entry |= {"expires_at": info["expires_at"], "user_metadata": info.get("user_metadata")}
            result.append((run_name, entry, info))
        return sorted(result, key=lambda each: each[1]["time"], reverse=True)

    def delete(self, path: str) -> None:
        self.info(path)
        try:
            with self._lock, _deleted(path):
                shutil.rmtree(self._place(path))
        except OSError as error:
            raise RunError(f"{path}: cannot be deleted: {error.strerror}") from error

    def _place(self, path: str) -> Path:
        parts = path.removeprefix("tinker://").split("/")
        is_path = path.startswith("tinker://") and len(parts) == 3 and parts[1] in KINDS
        is_path = is_path and all(_NAME.fullmatch(parts[i]) for i in (0, 2))
        kinds = " or ".join(KINDS)
        what = f"a checkpoint is named tinker://RUN/KIND/NAME, where KIND is {kinds}"
        require(is_path, f"{what}, and names are letters, digits, '.', '_', '-' and ':', got {path[:300]!r}")
        return self._folder.joinpath(*parts)

    def _info(self, place: Path) -> dict[str, Any] | None:
        """Return what is known of the checkpoint; None if there is none, or one that has expired."""
        info, expires = self._read(place)
        if expires is None or expires >= datetime.datetime.now(datetime.UTC):
            return info
        with self._lock:
            _, expires = self._read(place)  # unless its time has changed
            if expires is not None and expires < datetime.datetime.now(datetime.UTC):
                shutil.rmtree(place, ignore_errors=True)
        return None

    @staticmethod
    def _read(place: Path) -> tuple[dict[str, Any] | None, datetime.datetime | None]:
        """Return what is known of the checkpoint, and when it expires; None if there is none."""
        try:
            info = read_object(place / _INFO)
        except UserError:
            if (place / _INFO).exists():
                raise
            return None, None  # it was never there, or was deleted
        try:
            return info, _checked(info)
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{place / _INFO}: is damaged; restore it or remove the checkpoint") from None


def _missing(path: str) -> UserError:
    return UserError(f"there is no checkpoint {path[:300]}")


@contextlib.contextmanager
def _deleted(path: str) -> Iterator[None]:
    """Say that there is no such checkpoint if its files disappear: it is deleted or expires meanwhile."""
    try:
        yield
    except FileNotFoundError:
        raise _missing(path) from None


def encryption(recipients: list[str] | None) -> Callable[[Path], None] | None:
    """Return a function that replaces a file by one encrypted for these keys; None: for nobody. Raise
    UserError without the package pyrage, and for a key that is not one of age or SSH."""
    if recipients is None:
        return None
    try:
        pyrage = importlib.import_module("pyrage")
    except ImportError:
        raise UserError("age_encryption_recipients: needs `pip install pyrage` at the server") from None
    keys = []
    for text in recipients:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise UserError(f"age_encryption_recipients: {text[:100]!r}: {error}") from None
    require(len(keys) > 0, "age_encryption_recipients: name at least one key")

    def encrypt(file: Path) -> None:
        pyrage.encrypt_file(str(file), f"{file}.age", keys)
        file.unlink()

    return encrypt


def _expiry(ttl_s: int | None) -> str | None:
    now = datetime.datetime.now(datetime.UTC)
    return None if ttl_s is None else (now + datetime.timedelta(seconds=ttl_s)).isoformat()


def _checked(info: Mapping[str, Any]) -> datetime.datetime | None:
    """Return when the checkpoint expires, None: never; raise KeyError, TypeError or ValueError for fields
    that no server writes."""
    numbers, texts = [info["rank"], info["seed"]], [info["base_model"], info["time"]]
    flags = [info["train_mlp"], info["train_attn"]]
    is_whole = all(type(each) is int and each >= 0 for each in numbers)
    if not is_whole or not all(isinstance(each, str) for each in texts) or not set(flags) <= {True, False}:
        raise ValueError("fields")
    expires = info["expires_at"]
    time = None if expires is None else datetime.datetime.fromisoformat(expires)
    if time is not None and time.tzinfo is None:
        raise ValueError("a time without a zone")
    return time
