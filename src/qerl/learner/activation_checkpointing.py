"""What of each decoder layer is kept from the forward pass to the backward.

    none      all that the backward pass reads
    layer     the layer's input h_TD; the rest is computed again
    offload   the same in the host's memory, pinned: h_TD leaves while the next layers are computed, and comes
              back while the layer above is differentiated; two of them at most are on the device besides

Gradients are bitwise the same: tests/learner/test_activation_checkpointing.py. A weight unpacked for the second forward
serves the input's gradient too, so a layer unpacks no more often than without; and a layer's last product,
29 % of the operations of a forward at the 7B shape, is not repeated, for nothing reads its result.

Peak memory of learning from 8,192 rows at the 7B shape in NVFP4, all else included (H200): 41.2 GB, 13.2
GB and, planned, 10.8 GB: of the inputs, which are fp32, 3.3 GB are on the device, or 0.5.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from qerl.models.decoder import Attend, Layer, RowContext, RunLayer, run_layer
from qerl.models.linear import QuantLinear, repeating

_LEAVING = 2


class SavedInputs(Protocol):
    """The inputs of one pass's layers: put in the layers' order, taken in the reverse order."""

    def put(self, layer_index: int, h_TD: Tensor) -> None: ...

    def take(self, layer_index: int) -> Tensor: ...


class OnDevice:
    def __init__(self):
        self._inputs: dict[int, Tensor] = {}

    def put(self, layer_index: int, h_TD: Tensor) -> None:
        self._inputs[layer_index] = h_TD

    def take(self, layer_index: int) -> Tensor:
        return self._inputs.pop(layer_index)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    """A copy under way; `source` must not be used for anything else before it is done."""

    source: Tensor
    target: Tensor
    is_done: torch.cuda.Event | None

    def wait(self) -> None:
        """What the device is told to do from here on happens after the copy."""
        if self.is_done is not None:
            torch.cuda.current_stream().wait_event(self.is_done)


class OnHost:
    """References say what memory is in use: streams are told to wait before one is dropped."""

    def __init__(self, device: torch.device, lane: torch.cuda.Stream | None):
        self._device, self._lane = device, lane
        self._leaving: dict[int, _Copy] = {}
        self._hosted: dict[int, Tensor] = {}
        self._coming: dict[int, _Copy] = {}

    def put(self, layer_index: int, h_TD: Tensor) -> None:
        if len(self._leaving) == _LEAVING:
            self._leaving.pop(min(self._leaving)).wait()
        host_TD = torch.empty(h_TD.shape, dtype=h_TD.dtype, pin_memory=self._lane is not None)
        self._hosted[layer_index] = host_TD
        self._leaving[layer_index] = self._copy(h_TD, host_TD)

    def take(self, layer_index: int) -> Tensor:
        """What has not left yet comes from where it is; the one below starts on its way back."""
        self._fetch(layer_index)
        is_here = layer_index in self._leaving
        copy = (self._leaving if is_here else self._coming).pop(layer_index)
        copy.wait()
        del self._hosted[layer_index]
        self._fetch(layer_index - 1)
        return copy.source if is_here else copy.target

    def _fetch(self, layer_index: int) -> None:
        if layer_index not in self._hosted or layer_index in self._leaving or layer_index in self._coming:
            return
        host_TD = self._hosted[layer_index]
        h_TD = torch.empty(host_TD.shape, dtype=host_TD.dtype, device=self._device)
        self._coming[layer_index] = self._copy(host_TD, h_TD)

    def _copy(self, source: Tensor, target: Tensor) -> _Copy:
        if self._lane is None:
            target.copy_(source)
            return _Copy(source, target, None)
        self._lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._lane):
            target.copy_(source, non_blocking=True)
            is_done = torch.cuda.Event()
            is_done.record()
        return _Copy(source, target, is_done)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """A layer's call but for its input."""

    layer: Layer
    context: RowContext
    layer_index: int
    attend: Attend
    kept: SavedInputs

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self.layer(h_TD, self.places, self.layer_index, self.attend)


def checkpoint_layers(kept: SavedInputs) -> RunLayer:
    """Runs the layers of one pass and, in its backward pass, runs each again."""

    def run(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(h_TD, context, layer_index, attend)
        call = _Call(layer, context, layer_index, attend, kept)
        return _CheckpointedLayer.apply(call, h_TD, *layer.parameters())

    return run


class _CheckpointedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, h_TD, *masters):
        ctx.call = call
        call.kept.put(call.layer_index, h_TD.detach())  # its history would hold this call: a cycle
        return call(h_TD.clone())  # without a gradient a layer may write its result over its input

    @staticmethod
    def backward(ctx, dy_TD):  # type: ignore[override]
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        inputs = [call.kept.take(call.layer_index).requires_grad_(wanted[0]), *call.layer.parameters()]
        linears = [module for module in call.layer.modules() if isinstance(module, QuantLinear)]
        with torch.enable_grad(), repeating(linears, unread=call.layer.mlp.down_proj):
            y_TD = call(inputs[0])
            asked = [x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(y_TD, asked, dy_TD, allow_unused=True))
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)


def _on_host(device: torch.device) -> Callable[[], RunLayer]:
    lane = torch.cuda.Stream(device) if device.type == "cuda" else None
    return lambda: checkpoint_layers(OnHost(device, lane))


# For a device: what makes each pass's RunLayer.
RECOMPUTE: dict[str, Callable[[torch.device], Callable[[], RunLayer]]] = {
    "auto": lambda device: lambda: run_layer,  # where nobody has settled it: qerl.learner.plan does for a run
    "none": lambda device: lambda: run_layer,
    "layer": lambda device: lambda: checkpoint_layers(OnDevice()),
    "offload": _on_host,
}
