"""The dense MLP of a layer in a decode step: three launches, more with u made apart or a norm after it.

x = norm(h)   y = silu(gate) * up of x W^T + u B^T + bias   h += y W^T + u B^T + bias
"""

from collections.abc import Sequence

from torch import Tensor

from qerl.engine.decode.layer import LayerStep, NormedProducts, StepParts, StepRows, norm_of
from qerl.engine.decode.linears import LinearGroup
from qerl.kernels.pointwise.swiglu import Activation
from qerl.models.architecture import Architecture
from qerl.models.decoder import Layer


class MLPSteps:
    def __init__(self, parts: StepParts):
        self.parts = parts

    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        return None

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep:
        return _MLPStep(self.parts, layer)


class _MLPStep:
    def __init__(self, parts: StepParts, layer: Layer):
        self._before = norm_of(layer, layer.norms.before_mlp)
        after = norm_of(layer, layer.norms.after_mlp)
        self._products = NormedProducts(parts, layer.linear_groups[2:], after)
        self.groups: Sequence[LinearGroup] = self._products.groups
        self._gate_up, self._down = self.groups
        self._activation: Activation = parts.decoder.architecture.activation

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        products = self._products
        x_BD, u = products.normed(h_BD, self._before, self._gate_up, rows)
        y_BF = products.swiglu(x_BD, self._gate_up, u, rows, self._activation)
        return products.added(h_BD, y_BF, self._down, rows)
