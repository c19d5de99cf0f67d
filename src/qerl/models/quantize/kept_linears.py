"""Select the linears that stay in BF16 in a 4-bit checkpoint: by name, or those that rounding hurts most.

    sensitivity of a group = KL(float model || the same model with this group alone rounded), nats a token
    extra bytes            = its bytes in BF16 - its bytes in 4 bits

A group is the linears that read the same input (q | k | v, gate | up): engines multiply them as one, in one
format. A budget is a share of the bytes of all linears in 4 bits. It is spent on groups by KL a byte, the
largest first; a group that no longer fits is left out. Equal ones are in the order of the model.

The rounded group's layer and those behind it run again on what the float model gave its layer: half a
forward pass a group on average, so the KL is measured and not estimated from gradients.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.errors import UserError, did_you_mean
from qerl.formats import BF16, FORMATS
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.encoding import SelectScales, encode_group
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import linear_groups
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.quantize.awq import run_sequences
from qerl.models.quantize.quantization_error import Probe, compared_rows
from qerl.tracking.progress import ignore
from qerl.types import Report


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupSensitivity:
    names: tuple[str, ...]
    """As the checkpoint names them, without ".weight"."""
    kl: float
    """Nats a token."""
    packed_bytes: int
    extra_bytes: int
    """Added if it stays in BF16."""


def budget_share(values: Sequence[str]) -> float | None:
    """Return 0.03 for ("3%",); None if names are asked for. Raise UserError for other percentages."""
    if not any(each.endswith("%") for each in values):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", values[0])
    if len(values) > 1 or match is None or not 0 < float(match[1]) <= 100:
        raise UserError(f"--keep-bf16 {' '.join(values)}: must be names, or one budget such as 3%")
    return float(match[1]) / 100


def named_linears(architecture: Architecture, values: Sequence[str]) -> tuple[str, ...]:
    """Return the linears of each group in which a linear has such a name, or ends with its parts."""
    groups, linears = linear_groups(architecture), dict[str, None]()
    for name in values:
        matches = [group for group in groups if any(f".{linear}".endswith(f".{name}") for linear in group)]
        if not matches:
            full = [linear.removeprefix("model.") for group in groups for linear in group]
            known = full if "." in name else dict.fromkeys(linear.rsplit(".", 1)[1] for linear in full)
            raise UserError(f"--keep-bf16 {name}: the model has no such linear{did_you_mean(name, known)}")
        linears |= dict.fromkeys(linear for group in matches for linear in group)
    return tuple(linears)


@torch.no_grad()
def sensitivities(
    decoder: Decoder,
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    format: str,
    scales: SelectScales,
    report: Report = ignore,
) -> list[GroupSensitivity]:
    """Measure each group on the probes. decoder: in BF16, from the same checkpoint; it is left as it was.
    report: gets the number of measured layers."""
    groups = iter(linear_groups(decoder.architecture))
    sequences, rows = [probe.tokens_T for probe in probes], compared_rows(probes).to(decoder.device)
    exact_TV = decoder.logits(run_sequences(decoder, sequences)[rows]).log_softmax(-1)
    results = list[GroupSensitivity]()

    def run_rest(h_TD: Tensor, context: RowContext, first: int, attend: Attend) -> Tensor:
        for index in range(first, len(decoder.layers)):
            h_TD = decoder.layers[index](h_TD, context, index, attend)
        return decoder.norm(h_TD)[rows]

    def run_variants(layer: Layer, h_TD: Tensor, context: RowContext, index: int, attend: Attend) -> Tensor:
        for linears in layer.linear_groups:
            names, exact = next(groups), [linear.weight for linear in linears]
            is_resident, packed_bytes, bf16_bytes = linears[0].is_resident, 0, 0
            encoded = dict(encode_group(checkpoint, names, FORMATS[format], decoder.device, scales))
            for name, linear in zip(names, linears, strict=True):
                linear.load_weight(encoded[name])
                packed_bytes += encoded[name].num_bytes
                bf16_bytes += int(BF16.bytes_per_weight * math.prod(encoded[name].shape))
            logprobs_TV = decoder.logits(run_rest(h_TD.clone(), context, index, attend)).log_softmax(-1)
            kl = F.kl_div(logprobs_TV, exact_TV, log_target=True, reduction="batchmean").clamp(min=0).item()
            extra = bf16_bytes - packed_bytes
            results.append(GroupSensitivity(names=names, kl=kl, packed_bytes=packed_bytes, extra_bytes=extra))
            for linear, weight in zip(linears, exact, strict=True):
                assert weight is not None
                linear.load_weight(weight)
                if is_resident:
                    linear.make_resident()
        report(index + 1, len(decoder.layers), "layers")
        return layer(h_TD, context, index, attend)

    run_sequences(decoder, sequences, run_variants)
    return results


def within_budget(groups: Sequence[GroupSensitivity], share: float) -> list[GroupSensitivity]:
    """Return the groups to keep, those with the largest KL a byte first."""
    left, chosen = share * sum(group.packed_bytes for group in groups), list[GroupSensitivity]()
    for group in sorted(groups, key=lambda group: -group.kl / group.extra_bytes):
        if group.extra_bytes <= left:
            left -= group.extra_bytes
            chosen.append(group)
    return chosen


def describe(chosen: Sequence[GroupSensitivity], groups: Sequence[GroupSensitivity]) -> str:
    """Return the line on what stays in BF16."""
    total, extra = sum(group.packed_bytes for group in groups), sum(group.extra_bytes for group in chosen)
    names = ", ".join("|".join(name.removeprefix("model.") for name in group.names) for group in chosen)
    alone, all_alone = sum(group.kl for group in chosen), sum(group.kl for group in groups)
    return (
        f"bf16: {names or 'none fits the budget'}; {extra:,} bytes more ({extra / total:.1%});"
        f" rounded alone they cost {alone:.4f} of {all_alone:.4f} nats per token"
    )
