"""Activation checkpointing: what each decoder layer keeps for the backward pass.

    none      all activations
    layer     the layer's input h_TD; the rest is recomputed
    offload   the same in pinned host memory, as far as it has room (kept_on_host.py)

Gradients are bitwise the same (tests/learner/test_activation_checkpointing.py), unless learn.backward is
int8: gate and up are then recomputed in 8-bit integers. In bf16 a weight unpacked for the second forward pass
serves the input gradient too, so a layer unpacks no more often than without checkpointing. A layer's last
product, 29 % of a forward pass at the 7B shape, is not recomputed: nothing reads it. With more than 16,384
rows its MLP runs some rows at a time (chunked_mlp.py).

Peak memory of learning from 8,192 rows, 7B shape, NVFP4 (H200): 41.2 GB with none, 13.2 GB with layer (3.3 GB
of it are layer inputs in fp32), 10.8 GB planned with offload (0.5 GB of inputs).
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qerl.kernels.runtime.host_memory import usable_host_bytes
from qerl.learner.chunked_mlp import fed_modules, feed_backward, feed_forward, num_chunks
from qerl.learner.kept_on_host import OnHost
from qerl.models.decoder import Attend, Layer, RowContext, RunLayer, run_layer
from qerl.models.linear_pass import LinearPass


class OnDevice:
    """Layer inputs of one pass, put in the layers' order and taken in reverse order."""

    def __init__(self):
        self._inputs: dict[int, Tensor] = {}

    def put(self, layer_index: int, h_TD: Tensor) -> None:
        self._inputs[layer_index] = h_TD

    def take(self, layer_index: int) -> Tensor:
        return self._inputs.pop(layer_index)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """A layer's call without its input."""

    layer: Layer
    context: RowContext
    layer_index: int
    attend: Attend
    inputs: OnDevice | OnHost

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self.layer(h_TD, self.context, self.layer_index, self.attend)

    def run(self, h_TD: Tensor) -> Tensor:
        """Call the layer without a gradient; it may write its result over its input."""
        if not self.is_chunked(h_TD):
            return self(h_TD)
        return feed_forward(self.layer, self.mix(h_TD), self.context, self.layer_index)

    def mix(self, h_TD: Tensor) -> Tensor:
        return self.layer.mix(h_TD, self.context, self.layer_index, self.attend)

    def is_chunked(self, h_TD: Tensor) -> bool:
        return num_chunks(self.layer, len(h_TD), self.context.linear_pass) > 1

    def within(self, linear_pass: LinearPass) -> "_Call":
        return dataclasses.replace(self, context=self.context._replace(linear_pass=linear_pass))


def checkpoint_layers(inputs: OnDevice | OnHost) -> RunLayer:
    """Run the layers of a pass, and rerun each of them in the backward pass."""

    def run(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        call = _Call(layer, context, layer_index, attend, inputs)
        if not torch.is_grad_enabled():
            return call.run(h_TD)
        return _CheckpointedLayer.apply(call, h_TD, *layer.parameters())

    return run


class _CheckpointedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, h_TD, *masters):
        ctx.call = call
        # With its autograd history the input would reference this call: a cycle.
        call.inputs.put(call.layer_index, h_TD.detach())
        return call.run(h_TD.clone())

    @staticmethod
    def backward(ctx, dy_TD):  # type: ignore[override]
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        h_TD = call.inputs.take(call.layer_index).requires_grad_(wanted[0])
        masters = [x for x, is_wanted in zip(call.layer.parameters(), wanted[1:], strict=True) if is_wanted]
        with torch.enable_grad(), call.context.linear_pass.repeating() as linear_pass:
            dh_TD, *dmasters = _gradients(call.within(linear_pass), h_TD, masters, dy_TD)
        gradients = iter(dmasters)
        return None, dh_TD, *(next(gradients) if is_wanted else None for is_wanted in wanted[1:])


def _gradients(call: _Call, h_TD: Tensor, masters: list[Tensor], dy_TD: Tensor) -> list[Tensor | None]:
    """Return the gradients in h, None if it needs none, and in each master, None if it was not used."""
    if not call.is_chunked(h_TD):
        return _grad(call(h_TD), h_TD, masters, dy_TD)
    mixed_TD = call.mix(h_TD)
    edge = get_gradient_edge(mixed_TD)
    mixed_TD = mixed_TD.detach()
    of_mlp = {id(x) for module in fed_modules(call.layer) for x in module.parameters()}
    fed, mixing = ([x for x in masters if (id(x) in of_mlp) is is_fed] for is_fed in (True, False))
    dmixed_TD, dfed = feed_backward(call.layer, mixed_TD, call.context, call.layer_index, dy_TD, fed)
    del mixed_TD  # as large as h
    dh_TD, *dmixing = _grad(edge, h_TD, mixing, dmixed_TD)
    by_master = dict(zip(map(id, [*fed, *mixing]), [*dfed, *dmixing], strict=True))
    return [dh_TD, *(by_master[id(x)] for x in masters)]


def _grad(
    y_TD: Tensor | GradientEdge, h_TD: Tensor, masters: list[Tensor], dy_TD: Tensor
) -> list[Tensor | None]:
    inputs = [h_TD, *masters] if h_TD.requires_grad else masters
    gradients = torch.autograd.grad(y_TD, inputs, dy_TD, allow_unused=True)
    return [*gradients] if h_TD.requires_grad else [None, *gradients]


def _on_host(device: torch.device) -> Callable[[], RunLayer]:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    max_bytes = usable_host_bytes()  # now: later passes use the memory of the first again
    return lambda: checkpoint_layers(OnHost(device, stream, max_bytes))


# By device: the factory of each pass's RunLayer.
RECOMPUTE: dict[str, Callable[[torch.device], Callable[[], RunLayer]]] = {
    "auto": lambda device: lambda: run_layer,  # not resolved: qerl.learner.plan resolves auto for a run
    "none": lambda device: lambda: run_layer,
    "layer": lambda device: lambda: checkpoint_layers(OnDevice()),
    "offload": _on_host,
}
