"""The hidden states of the float model beside those of the quantized one, layer by layer.

A layer runs on the float model's hidden states before its first linear is quantized. That gives what each
group of linears reads in the float model, and how large the residual stream is where the group's output is
added to it: the next norm divides an error by that.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl.models.decoder import Attend, Layer, RowContext
from qerl.models.linear import QuantLinear


class FloatInput(NamedTuple):
    x_TK: Tensor | None
    """What the float model's linears read; None where only its rows' weights are known."""
    weight_T1: Tensor | None
    """Factor of each row's error: 1 / RMS of the residual stream behind the group; None: all are 1, as where
    a norm is in between."""


class FloatStream:
    def __init__(self) -> None:
        self._h_TD: Tensor | None = None

    def run(
        self, layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> dict[QuantLinear, FloatInput]:
        """Return the input of each group by its first linear. h_TD: that of the quantized model, which the
        first layer has in common with it."""
        before_TD = h_TD.clone() if self._h_TD is None else self._h_TD
        before_T1 = _per_rms(before_TD)
        inputs: dict[QuantLinear, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for group in layer.linear_groups:
                handle = group[0].register_forward_pre_hook(_recorder(inputs))
                hooks.callback(handle.remove)
            own_routes = context._replace(rows_by_layer={})
            self._h_TD = after_TD = layer(before_TD, own_routes, layer_index, attend)
        weights: dict[QuantLinear, Tensor] = {}
        if layer.norms.after_attention is None:
            weights[layer.mixer.o_proj] = before_T1
        if layer.norms.after_mlp is None and not layer.experts:
            weights[layer.linear_groups[-1][0]] = _per_rms(after_TD)
        return {linear: FloatInput(x_TK, weights.get(linear)) for linear, x_TK in inputs.items()}


def _recorder(inputs: dict[QuantLinear, Tensor]) -> Callable[..., None]:
    def hook(linear: QuantLinear, arguments: tuple[Any, ...]) -> None:
        inputs[linear] = arguments[0]

    return hook


def _per_rms(h_TD: Tensor) -> Tensor:
    return torch.rsqrt(h_TD.square().mean(1, keepdim=True) + torch.finfo(torch.float32).tiny)
