"""Writes a run's policy as an NVFP4 checkpoint that keeps what was learned.

Rounded to the nearest codes, the merged weights are the frozen ones again: the adapter's part is far below a
quantization step. So each linear's codes are chosen for its outputs (rounding.py), on inputs that the run
itself gives: its prompts and samples, as they come out of the layers before, which are in NVFP4 by then. The
grid is the frozen weight's own where it has one: all that is left to round is what the adapter adds.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qerl.export.calibration import Calibration
from qerl.export.policy import merged
from qerl.export.rounding import damped, rounded
from qerl.formats import NVFP4, e2m1
from qerl.formats.nvfp4 import BLOCK_WEIGHTS
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.linear import QuantLinear

DAMPING, SWEEPS = 0.01, 2


class _Enough(Exception):
    """The layer has come as far as was asked for."""


def requantize(decoder: Decoder, rows: Calibration, *, notice: Callable[[str], None]) -> None:
    """Puts every linear of a float32 decoder into NVFP4 with its adapter merged in, layer by layer."""

    def run_layer(
        layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> Tensor:
        def run() -> Tensor:
            return layer(h_TD.clone(), context, layer_index, attend)  # it may write over its input

        for linears in layer.linear_groups:
            x_TK = _inputs(linears[0], run)
            h_KK = damped(x_TK.T @ x_TK, DAMPING)
            _requantize_group(linears, h_KK)
        notice(f"layer {layer_index + 1} of {len(decoder.layers)}")
        return run()

    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, run_layer)


def _inputs(linear: QuantLinear, run: Callable[[], Tensor]) -> Tensor:
    """What the linear is given in a run, which goes no further."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, arguments: tuple[Tensor]) -> None:
        seen.append(arguments[0])
        raise _Enough

    handle = linear.register_forward_pre_hook(stop)
    try:
        run()
    except _Enough:
        pass
    finally:
        handle.remove()
    return seen[0].float()


def _requantize_group(linears: tuple[QuantLinear, ...], h_KK: Tensor) -> None:
    target_NK = torch.cat([merged(linear) for linear in linears]).float()
    scales, global_scale = _grid(linears, target_NK)
    steps_NK = (scales.float() / global_scale).repeat_interleave(BLOCK_WEIGHTS, dim=1)
    codes = e2m1.encode(rounded(target_NK, steps_NK, h_KK, sweeps=SWEEPS))
    first = 0
    for linear in linears:
        some = slice(first, first := first + linear.out_width)
        linear.load_weight(NVFP4(codes[some], scales[some], global_scale))
        linear.register_parameter("full", None)
        linear.adapter_enabled = False


def _grid(linears: tuple[QuantLinear, ...], target_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(scales of all rows, the global scale that they share): the frozen weights' own, or the target's."""
    weights = [linear.weight for linear in linears]
    own = [weight for weight in weights if isinstance(weight, NVFP4)]
    if len(own) == len(weights) and all(weight.alpha == own[0].alpha for weight in own):
        scales = torch.cat([weight.scales for weight in own])
        if scales.float().min() > 0:
            return scales, own[0].global_scale
    encoded = NVFP4.encode(target_NK)
    return encoded.scales, encoded.global_scale
