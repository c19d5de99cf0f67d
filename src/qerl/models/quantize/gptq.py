"""Quantize a run's merged weights to NVFP4 or MXFP4 so that what was learned is kept.

Rounding the merged weights to the nearest codes gives the frozen weights again: the adapter's part is far
below a quantization step. Therefore each linear's codes are chosen to preserve its outputs (rounding.py) on
the run's own prompts and samples, computed by the layers before it, which are in NVFP4 already, in one pass:
a linear is quantized when its input is there, then multiplies by its new weight. Linears that read the same
input are rounded as one matrix. The grid is the frozen weight's own if it has one, so only the adapter's part
is left to round; else its scales are those of the least squared error, weighted by the mean square of the
inputs (formats/block_scale.py). An expert's outputs are those of the rows that are routed to it; one with too
few gets the nearest codes. Routers stay as they are.

Outputs are drawn to what they were before the layers below were rounded, a float model's half-way: the hidden
states of that model, or of the run with its adapter apart, go through each layer first (float_stream.py), a
mixture by its own routing. What one linear loses of the adapter's part the later ones then make up for. An
expert's target is its own weight, for the rows that the quantized model routes to it, as the float model may
route other ones: `tests/models/quantize/test_mixture_targets.py`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl.formats import MXFP4, NVFP4, PackedWeight, e2m1
from qerl.formats.block_scale import least_squares
from qerl.formats.stack import PackedStack
from qerl.models.checkpoint.encoding import SelectScales
from qerl.models.checkpoint.layouts.rows import cut_rows
from qerl.models.checkpoint.state_dict import unquantized_linears
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.expert_writing import as_written
from qerl.models.linear import QuantLinear
from qerl.models.mixture import ExpertLinear
from qerl.models.peft.adapter import merged_expert, merged_weight
from qerl.models.quantize.calibration import Calibration
from qerl.models.quantize.float_stream import FloatStream
from qerl.models.quantize.rounding import add_damping, gram, round_to_grid, shifted_target
from qerl.tracking.progress import ignore
from qerl.types import Report

DAMPING, FLOAT_DAMPING, SWEEPS = 0.01, 0.1, 2
"""Damping of a merged model, whose adapter's part must stay, and of a float one, whose inputs are few. By 0.1
Qwen2.5-Coder-0.5B has a KL of 0.0175 for 0.0185, SmolLM2 of 0.0456 for 0.0502."""
MIN_EXPERT_ROWS = 8
"""An expert of a float model to which fewer rows are routed gets the nearest codes. On a grid of its own,
where these would lose all that was learned, one row suffices."""


Kind = type[NVFP4] | type[MXFP4]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GptqSettings:
    """GptqSettings(): of an adapter merged into weights of this kind. FLOAT: of all others."""

    kind: Kind = NVFP4
    select_scales: SelectScales = least_squares
    damping: float = DAMPING
    float_share: float = 1.0
    """Share of the unrounded model's inputs in a linear's target: W ((1 - share) x + share z), where z is
    what x was before the layers below were rounded: of the float model, or of the run with its adapter apart.
    Experts have none."""


FLOAT = GptqSettings(damping=FLOAT_DAMPING, float_share=0.5)
"""KL of Qwen2.5-Coder-0.5B and 1.5B with a share of 0.5: 0.0131 and 0.0114, with 0: 0.0176 and 0.0134, in 2.4
and 6.4 s for 1.7 and 4.8. With 0.25: 0.0141."""


def requantize(
    decoder: Decoder,
    rows: Calibration,
    settings: GptqSettings,
    *,
    notice: Callable[[str], None],
    report: Report = ignore,
) -> None:
    """Quantize every linear and expert of a decoder to 4 bits, its adapter merged in, layer by layer;
    what `qerl quantize` leaves in BF16 stays. notice: gets how many experts have the nearest codes. report:
    gets the number of quantized layers. Raise UserError if experts cannot be written in this format."""
    nearest, num_experts = set[tuple[int, int]](), 0
    plain = unquantized_linears(as_written(decoder.architecture, settings.kind.name))
    names = {id(linear): name for name, linear in decoder.linears()}
    stream = FloatStream() if settings.float_share else None

    def run_layer(
        layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend
    ) -> Tensor:
        nonlocal num_experts
        num_experts += layer.experts[0].spec.num_experts if layer.experts else 0
        inputs = {} if stream is None else stream.run(layer, h_TD, context, layer_index, attend)
        with contextlib.ExitStack() as hooks:
            for group in layer.linear_groups:
                if linears := tuple(x for x in group if f"model.{names[id(x)]}" not in plain):
                    act = functools.partial(_requantize_group, linears, settings, inputs, group[0])
                    hooks.enter_context(_before_first_call(linears[0], act))
            for experts in layer.experts:
                act = functools.partial(_requantize_experts, experts, settings, nearest, layer_index)
                hooks.enter_context(_before_first_call(experts, act))
            h_TD = layer(h_TD, context, layer_index, attend)
        report(layer_index + 1, len(decoder.layers), "layers")
        return h_TD

    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, run_layer, recur=rows.recur)
    if nearest:
        notice(f"{len(nearest)} of {num_experts} experts saw too few tokens and have the nearest codes")


@contextlib.contextmanager
def _before_first_call(module: nn.Module, act: Callable[..., None]) -> Iterator[None]:
    """Inside, call act with the arguments of the module's first call, before it."""

    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        handle.remove()
        act(*arguments)

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _requantize_group(
    linears: tuple[QuantLinear, ...],
    settings: GptqSettings,
    inputs: dict[QuantLinear, Tensor],
    first_of_group: QuantLinear,
    x_TK: Tensor,
    *_: Any,
) -> None:
    """inputs: of the float model's groups, by their first linears; the group's own are freed."""
    z_TK = inputs.pop(first_of_group, None)
    target_NK = torch.cat([merged_weight(linear) for linear in linears]).float()
    frozen = _frozen_grid([linear.weight for linear in linears], settings.kind)
    h_KK = add_damping(gram(x_TK), settings.damping)
    if z_TK is not None:
        target_NK = shifted_target(target_NK, settings.float_share * (z_TK - x_TK), x_TK, h_KK)
    whole = _rounded(frozen, target_NK, h_KK, settings)
    first = 0
    for linear in linears:
        weight = cut_rows(whole, slice(first, first := first + linear.out_width))
        assert weight is not None
        linear.load_weight(weight)
        linear.register_parameter("full", None)
        linear.adapter_enabled = False


def _requantize_experts(
    experts: ExpertLinear,
    settings: GptqSettings,
    nearest: set[tuple[int, int]],
    layer_index: int,
    x_SK: Tensor,
    _offsets: Tensor,
    ends: Sequence[int],
    *_: Any,
) -> None:
    assert experts.weight is not None
    frozen = experts.weight

    def rounded(e: int) -> PackedWeight:
        x_sK = x_SK[ends[e] : ends[e + 1]]
        grid = _frozen_grid([frozen[e]], settings.kind)
        has_few = len(x_sK) < (MIN_EXPERT_ROWS if grid is None else 1)
        if has_few:
            nearest.add((layer_index, e))
        h_KK = torch.eye(x_SK.shape[1], device=x_SK.device) if has_few else gram(x_sK)
        target_NK = merged_expert(experts, e).float()
        return _rounded(grid, target_NK, add_damping(h_KK, settings.damping), settings)

    num = experts.spec.num_experts
    experts.load_weight(PackedStack.of(num, (rounded(e) for e in range(num))))
    experts.adapter_enabled = False


def _rounded(
    grid: NVFP4 | MXFP4 | None, target_NK: Tensor, h_KK: Tensor, settings: GptqSettings
) -> PackedWeight:
    """Return the target on this grid, else on its own, its codes chosen for the outputs."""
    packed = grid
    if packed is None:
        packed = settings.select_scales(settings.kind.encode(target_NK), target_NK, h_KK.diagonal())
    assert isinstance(packed, NVFP4 | MXFP4)
    steps_NK = _steps(packed).repeat_interleave(target_NK.shape[1] // packed.scales.shape[1], dim=1)
    return dataclasses.replace(
        packed, codes=e2m1.encode(round_to_grid(target_NK, steps_NK, h_KK, sweeps=SWEEPS))
    )


def _steps(packed: NVFP4 | MXFP4) -> Tensor:
    """Return the value of a code of 1 in each block, fp32 [N, B]."""
    if isinstance(packed, NVFP4):
        return packed.scales.float() / packed.global_scale
    # A block of zeros has the scale 0, too small for rounding's sums: its codes stay 0 at any scale.
    return packed.scales.view(torch.float8_e8m0fnu).float().clamp(min=1e-30)


def _frozen_grid(weights: Sequence[PackedWeight | None], kind: Kind) -> NVFP4 | MXFP4 | None:
    """Return the frozen weights as one, row after row; None if they are not of this kind or, in NVFP4, have
    several global scales or a scale of 0."""
    if not all(isinstance(weight, kind) for weight in weights):
        return None
    parts = [weight.tensors() for weight in weights if weight is not None]
    codes, scales = (torch.cat([part[name] for part in parts]) for name in ("codes", "scales"))
    if kind is MXFP4:
        return MXFP4(codes, scales)
    global_scale = parts[0]["global_scale"]
    has_one = all(torch.equal(part["global_scale"], global_scale) for part in parts)
    return NVFP4(codes, scales, global_scale) if has_one and scales.float().min() > 0 else None
