"""The hidden states of the float model beside those of the quantized one, layer by layer.

A layer runs on the float model's hidden states before its first linear is quantized, which gives what each
group of linears reads in the float model.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qerl.models.decoder import Attend, Layer, RowContext
from qerl.models.linear import QuantLinear


class FloatStream:
    def __init__(self) -> None:
        self._h_TD: Tensor | None = None

    def run(
        self, layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> dict[QuantLinear, Tensor]:
        """Return the input of each group by its first linear. h_TD: that of the quantized model, which the
        first layer has in common with it."""
        before_TD = h_TD.clone() if self._h_TD is None else self._h_TD  # a layer may overwrite it
        inputs: dict[QuantLinear, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for group in layer.linear_groups:
                hooks.callback(group[0].register_forward_pre_hook(_recorder(inputs)).remove)
            own_routes = context._replace(rows_by_layer={})
            self._h_TD = layer(before_TD, own_routes, layer_index, attend)
        return inputs


def _recorder(inputs: dict[QuantLinear, Tensor]) -> Callable[..., None]:
    def hook(linear: QuantLinear, arguments: tuple[Any, ...]) -> None:
        inputs[linear] = arguments[0]

    return hook
