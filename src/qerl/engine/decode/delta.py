"""The Gated DeltaNet of a layer in a decode step: four launches, more with u made apart.

x = norm(h)   q|k|v|z = x W^T + u B^T   b|a = x W^T   o = the slot's next state, norm and gate   h += o W^T

b|a have one row for each value head, too few for tiles of packed weights. So the norm's launch makes them, as
it makes u: their unpacked weight, 0.5 MB a layer of a 9B model, is a matrix A whose x A^T is rounded to bf16
as a product's result is. In any other format all linears are one product. Prefill and the kernel share the
states of engine/cache/state_cache.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.engine.decode.layer import LayerStep, NormedProducts, Published, StepParts, StepRows
from qerl.kernels.delta_net.delta_net_step import DeltaNetStep, DeltaWeights, Gates, supports
from qerl.kernels.tiles.row_slots import kernel_rank
from qerl.models.architecture import Architecture
from qerl.models.decoder import Layer
from qerl.models.linear import QuantLinear
from qerl.models.packed.packed_linear import tiles_of


class DeltaSteps:
    """The kernel of Gated DeltaNet, which all layers share."""

    def __init__(self, parts: StepParts):
        a = parts.decoder.architecture
        assert a.delta is not None and parts.cache.states is not None
        self.parts, self.states = parts, parts.cache.states
        by_head = a.delta_projections == "by_head"
        self.kernel = DeltaNetStep(a.delta, parts.max_rows, parts.decoder.device, is_by_head=by_head)

    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        shape = a.delta
        if shape is None or supports(shape):
            return None
        return (
            f"they do not compute Gated DeltaNet with heads of {shape.key_size} and {shape.value_size} and"
            f" {shape.num_taps} taps, only with heads of 128 and 4 taps"
        )

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep:
        return _DeltaStep(self, layer_index, layer)


class _DeltaStep:
    def __init__(self, shared: DeltaSteps, layer_index: int, layer: Layer):
        mixer = layer.linear_attn
        self._shared, self._norm, self._index = shared, layer.input_layernorm, layer_index
        is_apart = tiles_of(mixer.wide_projs) is not None
        inputs = mixer.wide_projs if is_apart else mixer.qkv_projs
        self._products = NormedProducts(shared.parts, (inputs, (mixer.o_proj,)))
        self._inputs, self._o = self._products.groups
        self._first_gate = self._inputs.ends[len(mixer.wide_projs) - 1]
        self._gates = _GateLinears(mixer.gate_projs) if is_apart else None
        gates = () if self._gates is None else (self._gates,)
        self.groups: Sequence[Published] = (*self._products.groups, *gates)
        self._weights = DeltaWeights(
            conv_CW=mixer.conv1d.weight[:, 0],
            a_log_N=mixer.A_log,
            dt_bias_N=mixer.dt_bias,
            norm_V=mixer.norm.weight,
            eps=mixer.norm.eps,
        )

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        assert not rows.is_together, "rows of one sequence need its states one after the other"
        products, shared = self._products, self._shared
        if self._gates is None:
            x_BD, u = products.normed(h_BD, self._norm, self._inputs, rows)
            y_BX = products.linear(x_BD, self._inputs, u, rows)
            gates = Gates(x_BN=y_BX[:, self._first_gate :])
        else:
            x_BD, u, made_BR = self._normed(h_BD, rows, self._gates)
            y_BX = products.linear(x_BD, self._inputs, u, rows)
            gates = self._gates.of(made_BR)
        conv_SWC, state_SNHV = shared.states.of_layer(self._index)
        o_BX = shared.kernel.step(
            y_BX, gates, self._weights, conv_SWC, state_SNHV, rows.state, room=self._o.room
        )
        return products.added(h_BD, o_BX, self._o, rows)

    def _normed(
        self, h_BD: Tensor, rows: StepRows, gates: "_GateLinears"
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return x = norm(h), u as NormedProducts.normed, and x A^T of the gates."""
        products, group = self._products, self._inputs
        if group.a is not None and not products.products.computes_lora_hidden(len(h_BD), group):
            x_BD, u = products.normed(h_BD, self._norm, group, rows)
            return x_BD, u, products.shrink.shrink(x_BD, gates.a_RK, gates.scaling)
        norm = self._norm
        noise, rows_B = norm.noise_of(rows.noise_rows_B)
        operands = h_BD, norm.weight, noise, norm.eps, gates.a_RK, gates.scaling
        x_BD, made_BR = products.shrink.norm_shrink(*operands, rows_M=rows_B)
        return x_BD, None, made_BR


class _GateLinears:
    """The linears of b and a as one matrix: the adapters' A, then the weights, unpacked."""

    def __init__(self, linears: Sequence[QuantLinear]):
        self._linears, self._rank = linears, kernel_rank(max(linear.rank for linear in linears))
        self.scaling = max(linear.scaling for linear in linears) or 1.0
        weights_NK = torch.cat([linear.operand() for linear in linears])
        first, num_rows = self._rank * len(linears), len(weights_NK)
        self._gate_rows = slice(first, first + num_rows)
        self.a_RK = weights_NK.new_zeros(-(-(first + num_rows) // 16) * 16, weights_NK.shape[1])
        self.a_RK[self._gate_rows] = weights_NK
        alphas = [torch.as_tensor(linear.alpha, dtype=torch.float32) for linear in linears]
        device = weights_NK.device
        factors = [a.to(device).expand(linear.out_width) for a, linear in zip(alphas, linears, strict=True)]
        self._factors_N = (torch.cat(factors) / self.scaling).contiguous()
        self._b_NR = weights_NK.new_zeros(len(weights_NK), self._rank) if self._rank else None
        self.publish()

    def publish(self) -> None:
        """Copy the adapters in place; a linear without one has zeros."""
        if self._b_NR is None:
            return
        row = 0
        for index, linear in enumerate(self._linears):
            if linear.a_work is not None and linear.b_work is not None and linear.rank:
                rank = linear.rank
                self.a_RK[index * self._rank :][:rank].copy_(linear.a_work * (linear.scaling / self.scaling))
                self._b_NR[row : row + linear.out_width, :rank].copy_(linear.b_work)
            row += linear.out_width

    def of(self, made_BR: Tensor) -> Gates:
        """Return the kernel's operands of x A^T."""
        x_BN = made_BR[:, self._gate_rows]
        if self._b_NR is None:
            return Gates(x_BN=x_BN, factors_N=self._factors_N)
        u_BR = made_BR[:, : self._gate_rows.start]
        return Gates(x_BN=x_BN, factors_N=self._factors_N, u_BR=u_BR, b_NR=self._b_NR)
