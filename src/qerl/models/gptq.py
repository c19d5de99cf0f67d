"""Quantize a run's merged weights to NVFP4 so that what was learned is kept.

Rounding the merged weights to the nearest codes gives the frozen weights again: the adapter's part is far
below a quantization step. Therefore each linear's codes are chosen to preserve its outputs (rounding.py) on
the run's own prompts and samples, computed by the layers before it, which are in NVFP4 already. The grid is
the frozen weight's own if it has one, so only the adapter's part is left to round.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qerl.formats import NVFP4, e2m1
from qerl.formats.nvfp4 import BLOCK_WEIGHTS
from qerl.models.adapter import merged_weight
from qerl.models.calibration import Calibration
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.layer_spec import check_dense
from qerl.models.linear import QuantLinear
from qerl.models.rounding import add_damping, round_to_grid

DAMPING, SWEEPS = 0.01, 2


class _StopForward(Exception):
    """Raised to stop a forward pass at the linear whose input was wanted."""


def requantize(decoder: Decoder, rows: Calibration, *, notice: Callable[[str], None]) -> None:
    """Replace every linear of a float32 decoder by NVFP4 with its adapter merged in, layer by layer."""
    check_dense(decoder.architecture, "GPTQ")

    def run_layer(
        layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> Tensor:
        def run() -> Tensor:
            return layer(h_TD.clone(), context, layer_index, attend)  # a layer may overwrite its input

        for linears in layer.linear_groups:
            x_TK = _inputs(linears[0], run)
            h_KK = add_damping(x_TK.T @ x_TK, DAMPING)
            _requantize_group(linears, h_KK)
        notice(f"layer {layer_index + 1} of {len(decoder.layers)}")
        return run()

    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, run_layer, recur=rows.recur)


def _inputs(linear: QuantLinear, run: Callable[[], Tensor]) -> Tensor:
    """Run the layer up to this linear and return the linear's input."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, arguments: tuple[Tensor]) -> None:
        seen.append(arguments[0])
        raise _StopForward

    handle = linear.register_forward_pre_hook(stop)
    try:
        run()
    except _StopForward:
        pass
    finally:
        handle.remove()
    return seen[0].float()


def _requantize_group(linears: tuple[QuantLinear, ...], h_KK: Tensor) -> None:
    target_NK = torch.cat([merged_weight(linear) for linear in linears]).float()
    scales, global_scale = _grid(linears, target_NK)
    steps_NK = (scales.float() / global_scale).repeat_interleave(BLOCK_WEIGHTS, dim=1)
    codes = e2m1.encode(round_to_grid(target_NK, steps_NK, h_KK, sweeps=SWEEPS))
    first = 0
    for linear in linears:
        some = slice(first, first := first + linear.out_width)
        linear.load_weight(NVFP4(codes[some], scales[some], global_scale))
        linear.register_parameter("full", None)
        linear.adapter_enabled = False


def _grid(linears: tuple[QuantLinear, ...], target_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scales of all rows, shared global scale): the frozen weights' own, or else the target's."""
    weights = [linear.weight for linear in linears]
    own = [weight for weight in weights if isinstance(weight, NVFP4)]
    if len(own) == len(weights) and all(weight.alpha == own[0].alpha for weight in own):
        scales = torch.cat([weight.scales for weight in own])
        if scales.float().min() > 0:
            return scales, own[0].global_scale
    encoded = NVFP4.encode(target_NK)
    return encoded.scales, encoded.global_scale
