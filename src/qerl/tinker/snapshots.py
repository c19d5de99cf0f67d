"""Adapters of samplers, which do not change: those used last in host memory, the others in files.

An RL loop makes a sampler a step, and none of them ends before its session does. The files lie in a folder
that is locked while the server lives: another server removes those of killed ones.
"""

import collections
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from qerl.models.checkpoint.safetensors_file import load_whole
from qerl.models.hf_writer import locked_folder, remove_abandoned

_PREFIX = ".samplers-"


class Snapshots:
    def __init__(self, folder: Path, max_in_memory: int):
        """folder: where a temporary folder is made once it is needed. max_in_memory 0: all are in files."""
        self._folder, self._max_in_memory = folder, max_in_memory
        self._files: Path | None = None
        self._lock_descriptor: int | None = None
        if folder.is_dir():
            remove_abandoned(folder, _PREFIX)
        self._held: collections.OrderedDict[int, Mapping[str, Tensor]] = collections.OrderedDict()
        self._num_added, self._lock = 0, threading.Lock()

    def add(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number under which the tensors are kept."""
        with self._lock:
            self._num_added += 1
            self._hold(self._num_added, tensors)
            return self._num_added

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        with self._lock:
            held = self._held.get(number)
            tensors = load_whole(self._file(number)) if held is None else held
            self._hold(number, tensors)
            return tensors

    def drop(self, number: int) -> None:
        with self._lock:
            self._held.pop(number, None)
            if self._files is not None:
                self._file(number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._files = self._lock_descriptor = None

    def _hold(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        self._held[number] = tensors
        self._held.move_to_end(number)
        while len(self._held) > self._max_in_memory:
            oldest, tensors = self._held.popitem(last=False)
            if not (file := self._file(oldest)).exists():
                save_file({name: t.contiguous() for name, t in tensors.items()}, file)

    def _file(self, number: int) -> Path:
        if self._files is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files, self._lock_descriptor = locked_folder(self._folder, _PREFIX)
        return self._files / f"{number}.safetensors"
