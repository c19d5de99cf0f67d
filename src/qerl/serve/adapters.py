"""LoRA adapters that requests name in `model`, loaded and unloaded while the server runs.

They are PEFT adapters below one folder, so that a client cannot let the server read other files. Requests of
different adapters share decode steps (models/adapter_bank.py). An adapter that is unloaded serves the
requests that it has, and is freed after the last of them.
"""

import dataclasses
import re
import threading
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor, nn

from qerl.errors import UserError, require
from qerl.models.adapter_bank import AdapterBank
from qerl.models.checkpoint.safetensors_file import load_whole
from qerl.models.decoder import Decoder
from qerl.models.peft.adapter import adapted_linears
from qerl.models.peft.peft_names import PEFT_PREFIX, decoder_tensors
from qerl.models.peft.peft_reader import ADAPTER, adapter_config
from qerl.models.policy_model import PolicyModel

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


@dataclasses.dataclass(eq=False, slots=True)
class ServedAdapter:
    row: int
    """Its number in the bank."""
    num_requests: int = 0
    is_unloaded: bool = False


class ServedAdapters:
    def __init__(self, model: PolicyModel, folder: Path, max_adapters: int, max_rank: int = 128):
        """Raise UserError for a model whose rows cannot have adapters of their own."""
        if not isinstance(model, Decoder):
            raise UserError("adapter_folder: adapters by request need qerl's own decoder")
        copies = [linear.b_work for _, linear in model.linears()]  # zeros unless one was loaded
        is_plain = all(b_NR is None or not b_NR.any() for b_NR in copies)
        require(is_plain, "adapter_folder: the run has an adapter already: serve it with --no-with-adapter")
        self._decoder, self._folder, self._max_adapters = model, folder.resolve(), max_adapters
        self.bank = model.adapter_bank = AdapterBank(model.compute, model.device, max_adapters, max_rank)
        self._adapters: dict[str, ServedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def load(self, name: str, path: str) -> None:
        """Load an adapter below the folder. Raise UserError for one that does not fit, or a name in use."""
        require(bool(_NAME.fullmatch(name)), f"lora_name: letters, digits and ._-:/ only, got {name[:150]!r}")
        adapters, scaling = self._read(path)
        with self._lock:
            require(name not in self._adapters, f"lora_name: {name} is loaded: unload it first")
            limit = self._max_adapters
            require(len(self._adapters) < limit, f"{limit} adapters are loaded, the limit (--max-adapters)")
            self._adapters[name] = ServedAdapter(self.bank.add(adapters, scaling))

    def unload(self, name: str) -> bool:
        """Return False if there is none of that name."""
        with self._lock:
            if (adapter := self._adapters.pop(name, None)) is None:
                return False
            adapter.is_unloaded = True
            self._free_if_unused(adapter)
            return True

    def row(self, name: str | None, future: Future) -> int | None:
        """Return the row of a request that ends with the future; None if there is no such adapter."""
        with self._lock:
            adapter = None if name is None else self._adapters.get(name)
            if adapter is None:
                return None
            adapter.num_requests += 1
        future.add_done_callback(lambda _: self._end_request(adapter))
        return adapter.row

    def _end_request(self, adapter: ServedAdapter) -> None:
        with self._lock:
            adapter.num_requests -= 1
            self._free_if_unused(adapter)

    def _free_if_unused(self, adapter: ServedAdapter) -> None:
        if adapter.is_unloaded and adapter.num_requests == 0:
            self.bank.remove(adapter.row)

    def _read(self, path: str) -> tuple[dict[nn.Module, tuple[Tensor, Tensor]], float]:
        """Return the adapter's (A, B) by linear, and its scaling; A has what a linear's own is more."""
        folder = (self._folder / path).resolve()
        is_below = folder.is_relative_to(self._folder)
        require(is_below, f"lora_path: must lie below {self._folder}, got {path[:200]!r}")
        config = adapter_config(str(folder))
        require(config.experts == "none", f"{folder}: adapters of experts cannot be loaded by request")
        require(not config.trains_whole, f"{folder}: modules_to_save: they cannot be loaded by request")
        adapted, usual = adapted_linears(self._decoder, config), config.scaling(config.rank)
        linears = {
            f"{PEFT_PREFIX}{self._decoder.name_prefix}{name}": (linear, adapted[name])
            for name, linear in self._decoder.linears()
            if name in adapted
        }
        masters = [f"{name}.lora_{side}.weight" for name in linears for side in "AB"]
        stored = load_whole(folder / ADAPTER)
        tensors = decoder_tensors(self._decoder.architecture, stored, masters)
        unknown = sorted(tensors.keys() - set(masters))
        require(not unknown, f"{folder}: the model has no linear for {unknown[:1]}")
        result: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for name, (linear, (rank, alpha)) in linears.items():
            a_RK, b_NR = (tensors.get(f"{name}.lora_{side}.weight") for side in "AB")
            if a_RK is None or b_NR is None:
                continue
            shapes = (rank, linear.in_width), (linear.out_width, rank)
            fits = (a_RK.shape, b_NR.shape) == shapes
            require(fits, f"{folder}: {name} has shapes {a_RK.shape}, {b_NR.shape}, the model's are {shapes}")
            result[linear] = a_RK.float() * (config.scaling(rank, alpha) / usual), b_NR
        return result, usual
