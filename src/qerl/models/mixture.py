"""A mixture of experts in the place of the MLP: each token goes through k of E experts.

    logits = router(x), in fp32      ids = the k largest      weights = softmax over all or over the chosen
    y = sum over the chosen e of weights_e * down_e(act(gate_e(x), up_e(x)))

Rows are sorted by expert once a layer; the stacks of experts multiply them
(kernels/experts/grouped_linear.py). No token is dropped and no expert has a limit. The router is not
quantized, and multiplies in fp32 whatever the compute dtype, so that rounding changes few routes. `Route`
sees each layer's choice and may replace it: the engine records with it, the learner replays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl.formats import BF16
from qerl.formats.stack import WeightStack
from qerl.kernels.experts.clamped_swiglu import clamped_swiglu, clamped_swiglu_pairs
from qerl.kernels.experts.expert_product import RowEnds
from qerl.kernels.experts.grouped_linear import GroupedAdapter, grouped_linear
from qerl.kernels.experts.routing import SortedRows, choose, combine, sort_rows, spread, weigh
from qerl.kernels.pointwise.matmul_fp32 import frozen_linear
from qerl.kernels.pointwise.swiglu import swiglu, swiglu_halves
from qerl.models.architecture import Architecture, Mixture
from qerl.models.layer_spec import ExpertSpec, LayerSpec
from qerl.models.linear import QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mlp import linears_of

Route = Callable[[int, Tensor], Tensor]
"""Function (layer_index, the router's own ids_TK) -> ids_TK that are used."""


@dataclasses.dataclass(slots=True)
class ChosenRows:
    """A layer's routes, once they are known to the host."""

    ids_TK: Tensor
    rows: SortedRows
    ends: RowEnds
    is_compared: bool
    """False until the router's own choice has been seen."""


RowsByLayer = dict[int, ChosenRows]


class ExpertLinear(nn.Module):
    """One linear of every expert, as a stack; with adapters as a QuantLinear has."""

    def __init__(self, spec: ExpertSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.spec, self.compute, self.device = spec, compute, device
        self.weight: WeightStack | None = None
        self.bias: Tensor | None
        bias = torch.empty(spec.num_experts, spec.out_width, dtype=compute, device=device)
        self.register_buffer("bias", bias if spec.has_bias else None)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.a_work: Tensor | None = None
        self.b_work: Tensor | None = None
        self.adapter_enabled, self.scaling = True, 0.0

    def load_weight(self, stack: WeightStack) -> None:
        assert stack.shape == (self.spec.num_experts, self.spec.out_width, self.spec.in_width), stack.shape
        self.weight = stack

    def add_adapter(self, a_ERK: Tensor, b_ENR: Tensor, scaling: float) -> None:
        """Create masters and working copies with these values; a leading dimension of 1 is shared."""
        spec, num = self.spec, (1, self.spec.num_experts)
        assert len(a_ERK) in num and a_ERK.shape[2] == spec.in_width
        assert len(b_ENR) in num and b_ENR.shape[1:] == (spec.out_width, a_ERK.shape[1])
        self.lora_A, self.lora_B = nn.Parameter(a_ERK.float()), nn.Parameter(b_ENR.float())
        self.a_work, self.b_work = a_ERK.to(self.compute, copy=True), b_ENR.to(self.compute, copy=True)
        self.scaling = scaling

    @property
    def working_copies(self) -> list[tuple[Tensor, Tensor]]:
        """(working copy, master) of the adapter's tensors."""
        pairs = (self.a_work, self.lora_A), (self.b_work, self.lora_B)
        return [(work, master) for work, master in pairs if work is not None]

    @property
    def adapter(self) -> GroupedAdapter | None:
        """The adapters as the kernels take them; None without any or while they are switched off."""
        if self.a_work is None or self.b_work is None or not self.adapter_enabled:
            return None
        return GroupedAdapter(self.lora_A, self.lora_B, self.a_work, self.b_work, self.scaling)

    @property
    def tensors(self) -> list[Tensor]:
        packed = [] if self.weight is None else list(self.weight.tensors().values())
        return packed if self.bias is None else [*packed, self.bias]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def forward(
        self,
        x_SK: Tensor,
        offsets: Tensor,
        ends: Sequence[int] | None = None,
        rows_at_once: int | None = None,
    ) -> Tensor:
        """Return y_SN; offsets, ends and rows_at_once: as grouped_linear takes them."""
        assert self.weight is not None, "no weight was loaded"
        options: Any = {"ends": ends, "rows_at_once": rows_at_once}
        return grouped_linear(x_SK, offsets, self.weight, bias_EN=self.bias, adapter=self.adapter, **options)


@torch.no_grad()
def copy_masters(linears: Sequence[QuantLinear | ExpertLinear]) -> None:
    """Copy the masters into the working copies, in place: 392 tensors of a 7B model in a few launches."""
    trained = [pair for linear in linears for pair in linear.working_copies]
    fused = [pair for x in linears if isinstance(x, QuantLinear) for pair in x.fused_copies]
    for copies in filter(None, (trained, fused)):
        to, masters = ([pair[i] for pair in copies] for i in (0, 1))
        torch._foreach_copy_(to, masters)  # pyright: ignore[reportPrivateImportUsage]


class Experts(nn.Module):
    def __init__(self, mixture: Mixture, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        self._mixture = mixture
        gate_up, down = spec.experts
        self.gate_up_proj = ExpertLinear(gate_up, compute, device)
        self.down_proj = ExpertLinear(down, compute, device)

    def forward(self, x_SD: Tensor, chosen: ChosenRows, rows_at_once: int | None = None) -> Tensor:
        """Return y_SD of rows sorted by expert; rows_at_once as that of grouped_linear."""
        rows = chosen.rows.offsets, chosen.ends, rows_at_once
        return self.down_proj(self._activated(self.gate_up_proj(x_SD, *rows)), *rows)

    def _activated(self, gate_up_SF: Tensor) -> Tensor:
        mixture = self._mixture
        alpha, limit = mixture.swiglu_alpha, mixture.swiglu_limit
        if mixture.is_interleaved and alpha is not None:
            return clamped_swiglu_pairs(gate_up_SF, alpha=alpha, limit=limit)
        if mixture.is_interleaved:
            return swiglu(*gate_up_SF.unflatten(1, (-1, 2)).unbind(2))
        if alpha is None:
            return swiglu_halves(gate_up_SF)
        return clamped_swiglu(*gate_up_SF.chunk(2, 1), alpha=alpha, limit=limit)


class MixtureMLP(nn.Module):
    def __init__(self, arch: Architecture, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        assert arch.mixture is not None
        mixture = self.mixture = arch.mixture
        (self.router,) = linears_of(spec.mlp[0], torch.float32, device)
        self.experts = Experts(mixture, spec, compute, device)
        self.reads_noise = True
        """False: the router reads the norm without AQN's noise."""

    def forward(
        self,
        x_TD: Tensor,
        router_x_TD: Tensor,
        layer_index: int,
        route: Route | None,
        expert_rows: int | None,
        rows_by_layer: RowsByLayer,
        linear_pass: LinearPass = PLAIN,
        onto_TD: Tensor | None = None,
    ) -> Tensor:
        """Return y_TD in fp32; the router reads router_x, the experts x. expert_rows: rows of every product
        of an expert; None: those that it has. rows_by_layer: of this pass; this layer's are added. onto_TD:
        fp32, takes the sum and is returned."""
        mixture, logits_TE = self.mixture, self._logits(router_x_TD, expert_rows, linear_pass)
        chosen = self._chosen(logits_TE, layer_index, route, rows_by_layer)
        ids_TK, rows = chosen.ids_TK, chosen.rows
        weights_TK = weigh(logits_TE, ids_TK, mixture.softmax_over)
        x_SD = spread(x_TD, rows, mixture.num_chosen)
        y_SD = self.experts(x_SD, chosen, expert_rows)
        needed = linear_pass.without_output.needs_output
        return combine(y_SD, weights_TK, rows, onto_TD=onto_TD, needs_output=needed)

    def _logits(self, x_TD: Tensor, expert_rows: int | None, linear_pass: LinearPass) -> Tensor:
        """Return the router's logits in fp32. On a GPU x and weights in bfloat16 are multiplied as they are,
        unless a row's bits must not depend on the number of rows."""
        router = self.router
        is_plain = isinstance(router.weight, BF16) and router.rank == 0 and not router.is_unfused(linear_pass)
        if not (is_plain and expert_rows is None and x_TD.is_cuda and x_TD.dtype == torch.bfloat16):
            return router(x_TD.float(), linear_pass)
        assert router.weight is not None
        logits_TE = frozen_linear(x_TD, router.weight.operand(torch.bfloat16))
        return logits_TE if router.bias is None else logits_TE + router.bias

    def _chosen(
        self, logits_TE: Tensor, layer_index: int, route: Route | None, rows_by_layer: RowsByLayer
    ) -> ChosenRows:
        known = rows_by_layer.get(layer_index)
        if known is not None and known.is_compared:
            return known
        ids_TK = choose(logits_TE, self.mixture.num_chosen)
        if route is not None:
            ids_TK = route(layer_index, ids_TK)
        if known is None:
            rows = sort_rows(ids_TK, self.mixture.num_experts)
            ends = RowEnds(rows.offsets.tolist())  # the host waits for the device here
            known = rows_by_layer[layer_index] = ChosenRows(ids_TK, rows, ends, True)
        known.is_compared = True
        return known

    @property
    def linear_groups(self) -> tuple[tuple[QuantLinear, ...], ...]:
        return ((self.router,),)

    @property
    def stacks(self) -> tuple[ExpertLinear, ExpertLinear]:
        return self.experts.gate_up_proj, self.experts.down_proj
