"""Gated DeltaNet: the mixer of a layer that has a recurrent state instead of keys and values.

    q | k | v, z, b, a = linears(x)                one linear each, or in_proj_qkvz and in_proj_ba
    log_decay = -exp(A_log) softplus(a + dt_bias)  beta = sigmoid(b)
    o = recur(q | k | v, log_decay, beta)          short convolution, gated delta rule
    y = norm(o) * silu(z)                          in each value head; out_proj multiplies y

The passes differ in the function recur(layer_index, inputs) -> o_TNV: the learner's goes over packed trees,
the engine's reads and writes the states of its samples (kernels/delta_net/gated_delta_net.py). Weights
besides the linears are frozen and fp32. Source: Yang et al. 2024, as in Qwen3-Next and Qwen3.5.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qerl.kernels.delta_net.gated_delta_net import DeltaInputs, TreeSequences, mix_trees
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LayerSpec
from qerl.models.linear import FrozenWeight, QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mlp import linears_of
from qerl.models.norm import RMSNorm
from qerl.models.packed.packed_linear import project
from qerl.types import Tree

Recur = Callable[[int, DeltaInputs], Tensor]


def recur_over(trees: Sequence[Tree], device: torch.device | str) -> Recur:
    """Return the function for packed trees that together cover the rows 0..T-1."""
    sequences = functools.cache(lambda: TreeSequences.of(trees, device))
    return lambda layer_index, inputs: mix_trees(inputs, sequences())


class GatedDeltaNet(nn.Module):
    def __init__(self, arch: Architecture, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        assert arch.delta is not None
        shape = self.shape = arch.delta
        self._is_by_head = arch.delta_projections == "by_head"
        self._inputs = [linear.short_name for linear in spec.qkv.linears]
        for group in (spec.qkv, spec.o):
            for x, linear in zip(group.linears, linears_of(group, compute, device), strict=True):
                self.add_module(x.short_name, linear)
        self.conv1d = FrozenWeight(shape.channels, 1, shape.num_taps, dtype=torch.float32, device=device)
        self.A_log: Tensor
        self.dt_bias: Tensor
        for name in ("A_log", "dt_bias"):
            self.register_buffer(name, torch.empty(shape.num_value_heads, device=device))
        self.norm = RMSNorm(shape.value_size, arch.norm_eps, compute=compute, device=device)

    def forward(
        self, x_TD: Tensor, layer_index: int, recur: Recur, linear_pass: LinearPass = PLAIN
    ) -> Tensor:
        """Return y_TC, the heads' outputs side by side, which out_proj multiplies."""
        parts = project(x_TD, self.qkv_projs, linear_pass, gaps_are_free=True)
        qkv_TC, z_TC, b_TN, a_TN = self._from_heads(*parts) if self._is_by_head else parts
        log_decay_TN = -self.A_log.exp() * F.softplus(a_TN.float() + self.dt_bias)
        beta_TN = b_TN.float().sigmoid()
        inputs = DeltaInputs(qkv_TC, log_decay_TN, beta_TN, self.conv1d.weight[:, 0], self.shape)
        o_TNV = self.norm(recur(layer_index, inputs))
        gate_TNV = F.silu(z_TC.float()).unflatten(1, (-1, self.shape.value_size))
        return (o_TNV * gate_TNV).to(x_TD.dtype).flatten(1)

    def _from_heads(self, qkvz_TC: Tensor, ba_TN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q | k | v, z, b and a of rows that have these of one key head after the other."""
        shape = self.shape
        group = shape.num_value_heads // shape.num_key_heads
        widths = shape.key_size, shape.key_size, group * shape.value_size, group * shape.value_size
        by_head = qkvz_TC.unflatten(1, (shape.num_key_heads, -1)).split(widths, 2)
        *qkv, z_TC = (part.flatten(1) for part in by_head)
        b_TN, a_TN = (x.flatten(1) for x in ba_TN.unflatten(1, (shape.num_key_heads, -1)).split(group, 2))
        return torch.cat(qkv, 1), z_TC, b_TN, a_TN

    @property
    def qkv_projs(self) -> tuple[QuantLinear, ...]:
        """Linears that read the layer's input."""
        return tuple(self.get_submodule(name) for name in self._inputs)  # type: ignore[return-value]

    @property
    def wide_projs(self) -> tuple[QuantLinear, ...]:
        """The linears of q | k | v and z among them."""
        return self.qkv_projs[: 1 if self._is_by_head else 2]

    @property
    def gate_projs(self) -> tuple[QuantLinear, ...]:
        """The linears of b and a."""
        return self.qkv_projs[len(self.wide_projs) :]

    @property
    def o_proj(self) -> QuantLinear:
        linear = self.out_proj
        assert isinstance(linear, QuantLinear)
        return linear
