"""Quantize a run's merged weights to NVFP4 or MXFP4 so that what was learned is kept.

Rounding the merged weights to the nearest codes gives the frozen weights again: the adapter's part is far
below a quantization step. Therefore each linear's codes are chosen to preserve its outputs (rounding.py) on
the run's own prompts and samples, computed by the layers before it, which are in NVFP4 already. The grid is
the frozen weight's own if it has one, so only the adapter's part is left to round. An expert's outputs are
those of the rows that are routed to it; one without rows gets the nearest codes. Routers stay as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl.formats import MXFP4, NVFP4, PackedWeight, e2m1
from qerl.formats.stack import PackedStack
from qerl.models.checkpoint.layouts.rows import cut_rows
from qerl.models.checkpoint.state_dict import unquantized_linears
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.expert_writing import as_written
from qerl.models.linear import QuantLinear
from qerl.models.mixture import ExpertLinear, MixtureMLP
from qerl.models.peft.adapter import merged_expert, merged_weight
from qerl.models.quantize.calibration import Calibration
from qerl.models.quantize.rounding import add_damping, round_to_grid

DAMPING, SWEEPS = 0.01, 2


class _StopForward(Exception):
    """Raised to stop a forward pass at the linear whose input was wanted."""


Kind = type[NVFP4] | type[MXFP4]


def requantize(
    decoder: Decoder, rows: Calibration, *, notice: Callable[[str], None], kind: Kind = NVFP4
) -> None:
    """Quantize every linear and expert of a float32 decoder to 4 bits, its adapter merged in, layer by layer;
    what `qerl quantize` leaves in BF16 stays. Raise UserError if experts cannot be written in this format."""
    plain = unquantized_linears(as_written(decoder.architecture, kind.name))
    names = {id(linear): name for name, linear in decoder.linears()}

    def run_layer(
        layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> Tensor:
        def run() -> Tensor:
            return layer(h_TD.clone(), context, layer_index, attend)  # a layer may overwrite its input

        for linears in layer.linear_groups:
            if f"model.{names[id(linears[0])]}" not in plain:
                (x_TK,) = _inputs(linears[0], run)[:1]
                _requantize_group(linears, add_damping(x_TK.float().T @ x_TK.float(), DAMPING), kind)
        if isinstance(layer.mlp, MixtureMLP):
            for experts in layer.mlp.stacks:
                _requantize_experts(experts, *_inputs(experts, run)[:3], kind=kind)
        notice(f"layer {layer_index + 1} of {len(decoder.layers)}")
        return run()

    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, run_layer, recur=rows.recur)


def _inputs(linear: QuantLinear | ExpertLinear, run: Callable[[], Tensor]) -> tuple[Any, ...]:
    """Run the layer up to this linear and return the linear's arguments."""
    seen: list[tuple[Any, ...]] = []

    def stop(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments)
        raise _StopForward

    handle = linear.register_forward_pre_hook(stop)
    try:
        run()
    except _StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


def _requantize_group(linears: tuple[QuantLinear, ...], h_KK: Tensor, kind: Kind) -> None:
    target_NK = torch.cat([merged_weight(linear) for linear in linears]).float()
    whole = _rounded([linear.weight for linear in linears], target_NK, h_KK, kind)
    first = 0
    for linear in linears:
        weight = cut_rows(whole, slice(first, first := first + linear.out_width))
        assert weight is not None
        linear.load_weight(weight)
        linear.register_parameter("full", None)
        linear.adapter_enabled = False


def _requantize_experts(
    experts: ExpertLinear, x_SK: Tensor, _offsets: Tensor, ends: Sequence[int], *, kind: Kind
) -> None:
    assert experts.weight is not None
    frozen = experts.weight

    def rounded(e: int) -> PackedWeight:
        x_sK = x_SK[ends[e] : ends[e + 1]].float()
        h_KK = x_sK.T @ x_sK if len(x_sK) else torch.eye(x_SK.shape[1], device=x_SK.device)
        return _rounded([frozen[e]], merged_expert(experts, e).float(), add_damping(h_KK, DAMPING), kind)

    num = experts.spec.num_experts
    experts.load_weight(PackedStack.of(num, (rounded(e) for e in range(num))))
    experts.adapter_enabled = False


def _rounded(weights: list[PackedWeight | None], target_NK: Tensor, h_KK: Tensor, kind: Kind) -> PackedWeight:
    """Return the target on the grid of the frozen weights, its codes chosen for the outputs."""
    if kind is MXFP4:
        frozen = [weight.scales for weight in weights if isinstance(weight, MXFP4)]
        scales = torch.cat(frozen) if len(frozen) == len(weights) else MXFP4.encode(target_NK).scales
        # A block of zeros has the scale 0, too small for rounding's sums: its codes stay 0 at any scale.
        steps = scales.view(torch.float8_e8m0fnu).float().clamp(min=1e-30)
        codes = e2m1.encode(round_to_grid(target_NK, _spread(steps, target_NK), h_KK, sweeps=SWEEPS))
        return MXFP4(codes, scales)
    scales, global_scale = _grid(weights, target_NK)
    steps_NK = _spread(scales.float() / global_scale, target_NK)
    return NVFP4(e2m1.encode(round_to_grid(target_NK, steps_NK, h_KK, sweeps=SWEEPS)), scales, global_scale)


def _spread(steps_NB: Tensor, like_NK: Tensor) -> Tensor:
    return steps_NB.repeat_interleave(like_NK.shape[1] // steps_NB.shape[1], dim=1)


def _grid(weights: list[PackedWeight | None], target_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scales of all rows, shared global scale) of the frozen weights, if they share one, else of the
    target."""
    frozen = [weight for weight in weights if isinstance(weight, NVFP4)]
    if len(frozen) == len(weights) and all(weight.alpha == frozen[0].alpha for weight in frozen):
        scales = torch.cat([weight.scales for weight in frozen])
        if scales.float().min() > 0:
            return scales, frozen[0].global_scale
    encoded = NVFP4.encode(target_NK)
    return encoded.scales, encoded.global_scale
