"""The dense MLP of a layer: down_proj(silu(gate) * up), without its last product."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qerl.kernels.pointwise.swiglu import Activation, gated
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LayerSpec, LinearGroupSpec
from qerl.models.linear import QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.packed.packed_linear import project, project_swiglu, room


def linears_of(group: LinearGroupSpec, compute: torch.dtype, device: torch.device) -> Iterator[QuantLinear]:
    for x in group.linears:
        yield QuantLinear(x.in_width, x.out_width, has_bias=x.has_bias, compute=compute, device=device)


class MLP(nn.Module):
    def __init__(self, arch: Architecture, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        self._activation: Activation = arch.activation
        gate_up, down = spec.mlp
        self.gate_proj, self.up_proj = linears_of(gate_up, compute, device)
        (self.down_proj,) = linears_of(down, compute, device)

    def forward(self, x_TD: Tensor, linear_pass: LinearPass = PLAIN) -> Tensor:
        """Return silu(gate) * up, which down_proj multiplies; with room behind its rows, or with none."""
        if self._activation == "silu":
            return project_swiglu(x_TD, self.gate_up_projs, linear_pass, room=room((self.down_proj,)))
        gate_TF, up_TF = project(x_TD, self.gate_up_projs, linear_pass, gaps_are_free=True)
        return gated(gate_TF, up_TF, self._activation)

    @property
    def gate_up_projs(self) -> tuple[QuantLinear, QuantLinear]:
        return self.gate_proj, self.up_proj

    @property
    def linear_groups(self) -> tuple[tuple[QuantLinear, ...], ...]:
        return self.gate_up_projs, (self.down_proj,)
