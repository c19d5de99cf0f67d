"""The decoder: one module tree and one forward pass for learning, prefill and decode.

    h = embed(tokens)
    h = h + o_proj(attend(rotate(q), rotate(k), v))      q, k, v of input_layernorm(h); L times
    h = h + down_proj(silu(gate) * up)                   gate, up of post_attention_layernorm(h)
    hidden = norm(h),  logits = hidden @ lm_head^T       logits in fp32 (lm_head.py)

The residual stream h is fp32, everything else is in the compute dtype. Rounding h to bf16 at each of a 7B
model's 56 sums would cause most of the difference between the engine and the learner.

The passes differ only in the function attend(layer_index, q_TNH, k_TKH, v_TKH) -> o_TNH. The learner's
attends within packed rows; the engine's writes k and v to the KV cache and attends to that. Submodules have
Hugging Face's names without the leading "model.".
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qerl.aqn.noise_table import NoiseTable
from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.kernels.nvfp4_unpack import UnpackRows
from qerl.kernels.rotary import rotate
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LayerSpec, LinearGroupSpec, layer_spec
from qerl.models.linear import QuantLinear
from qerl.models.lm_head import LMHead
from qerl.models.norm import RMSNorm
from qerl.models.packed_linear import project, project_onto, project_swiglu, room, tile_linears
from qerl.models.rope import cosine_sine, inverse_frequencies, magnitude

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RowContext(NamedTuple):
    """Inputs of the layers that belong to rows."""

    angles: tuple[Tensor, Tensor]
    """Cosines and sines of each row's position."""
    noise_rows_T: Tensor | None
    """Index of each row's noise in the noise table, int32; None uses no table."""


RunLayer = Callable[["Layer", Tensor, RowContext, int, Attend], Tensor]


class EmbeddingTable(nn.Module):
    """One vector for each token: the embedding, or an untied head."""

    def __init__(self, vocab_size: int, width: int, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(vocab_size, width, dtype=compute, device=device))


def _linears(group: LinearGroupSpec, compute: torch.dtype, device: torch.device) -> Iterator[QuantLinear]:
    for x in group.linears:
        yield QuantLinear(x.in_width, x.out_width, has_bias=x.has_bias, compute=compute, device=device)


class Attention(nn.Module):
    def __init__(self, arch: Architecture, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.head_size = arch.head_size
        self.q_proj, self.k_proj, self.v_proj = _linears(spec.qkv, compute, device)
        (self.o_proj,) = _linears(spec.o, compute, device)
        if arch.qk_norm:
            self.q_norm: nn.Module = RMSNorm(arch.head_size, arch.norm_eps, compute=compute, device=device)
            self.k_norm: nn.Module = RMSNorm(arch.head_size, arch.norm_eps, compute=compute, device=device)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self, h_TD: Tensor, x_TD: Tensor, angles: tuple[Tensor, Tensor], layer_index: int, attend: Attend
    ) -> Tensor:
        """Return h plus attention over x; h is overwritten."""
        q_TNH, k_TKH, v_TKH = (
            y_TN.unflatten(1, (-1, self.head_size))
            for y_TN in project(x_TD, self.qkv_projs, gaps_are_free=True)
        )
        q_TNH, k_TKH = rotate(self.q_norm(q_TNH), *angles), rotate(self.k_norm(k_TKH), *angles)
        o_TNH = attend(layer_index, q_TNH, k_TKH, v_TKH)
        return project_onto(h_TD, o_TNH.flatten(1), self.o_proj)

    @property
    def qkv_projs(self) -> tuple[QuantLinear, QuantLinear, QuantLinear]:
        return self.q_proj, self.k_proj, self.v_proj


class MLP(nn.Module):
    def __init__(self, spec: LayerSpec, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.gate_proj, self.up_proj = _linears(spec.gate_up, compute, device)
        (self.down_proj,) = _linears(spec.down, compute, device)

    def forward(self, h_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return h plus the MLP of x; h is overwritten."""
        act_TF = project_swiglu(x_TD, self.gate_up_projs, room=room((self.down_proj,)))
        return project_onto(h_TD, act_TF, self.down_proj, gaps_are_free=True)

    @property
    def gate_up_projs(self) -> tuple[QuantLinear, QuantLinear]:
        return self.gate_proj, self.up_proj


class Layer(nn.Module):
    def __init__(self, arch: Architecture, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.spec = layer_spec(arch)
        self.self_attn = Attention(arch, self.spec, compute, device)
        self.mlp = MLP(self.spec, compute, device)
        self.input_layernorm = NoisedRMSNorm(arch.width, arch.norm_eps, compute=compute, device=device)
        self.post_attention_layernorm = NoisedRMSNorm(
            arch.width, arch.norm_eps, compute=compute, device=device
        )

    def forward(self, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        angles, noise_rows_T = context
        x_TD, h_TD = self.input_layernorm(h_TD, noise_rows_T, room=room(self.self_attn.qkv_projs))
        h_TD = self.self_attn(h_TD, x_TD, angles, layer_index, attend)
        x_TD, h_TD = self.post_attention_layernorm(h_TD, noise_rows_T, room=room(self.mlp.gate_up_projs))
        return self.mlp(h_TD, x_TD)

    @property
    def linear_groups(self) -> tuple[tuple[QuantLinear, ...], ...]:
        """Linears that read the same input are together: q|k|v, o, gate|up, down, as `spec.groups`."""
        attention, mlp = self.self_attn, self.mlp
        return attention.qkv_projs, (attention.o_proj,), mlp.gate_up_projs, (mlp.down_proj,)

    def tile(self) -> None:
        """Put weights that fit into the decode kernel's tiles (packed_linear.py); free their plain form."""
        for group, linears in zip(self.spec.groups, self.linear_groups, strict=True):
            tile_linears(linears, UnpackRows.GATE_UP if group is self.spec.gate_up else UnpackRows.ALL)


def run_layer(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
    """Call the layer: the default of `Decoder.forward`."""
    return layer(h_TD, context, layer_index, attend)


class Decoder(nn.Module):
    """Created with unset weights. Frozen tensors are buffers; the parameters are the trained ones."""

    def __init__(self, architecture: Architecture, *, compute: torch.dtype, device: torch.device):
        super().__init__()
        arch = self.architecture = architecture
        self.compute, self.device = compute, device
        self.embed_tokens = EmbeddingTable(arch.vocab_size, arch.width, compute, device)
        self.layers = nn.ModuleList(Layer(arch, compute, device) for _ in range(arch.num_layers))
        self.norm = RMSNorm(arch.width, arch.norm_eps, compute=compute, device=device)
        table = (
            self.embed_tokens
            if arch.tied_head
            else EmbeddingTable(arch.vocab_size, arch.width, compute, device)
        )
        self.lm_head = LMHead(table.weight)
        self._frequencies = inverse_frequencies(arch.rope, arch.head_size).to(device)
        self._magnitude = magnitude(arch.rope)
        self.noise_table = NoiseTable([m for m in self.modules() if isinstance(m, NoisedRMSNorm)])

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        run_layer: RunLayer = run_layer,
        noise_rows_T: Tensor | None = None,
    ) -> Tensor:
        """Return hidden_TD after the final norm, in the compute dtype. `run_layer` calls each layer;
        noise_rows_T are rows of noise_table, int32, or None."""
        context = RowContext(cosine_sine(positions_T, self._frequencies, self._magnitude), noise_rows_T)
        h_TD = F.embedding(tokens_T, self.embed_tokens.weight).float()
        for layer_index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            h_TD = run_layer(layer, h_TD, context, layer_index, attend)
        return self.norm(h_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits, fp32 [T, V], without a gradient."""
        return self.lm_head.logits(hidden_TD)

    def linears(self) -> Iterator[tuple[str, QuantLinear]]:
        """Yield every linear with its name, layer by layer: ("layers.0.self_attn.q_proj", ...)."""
        return ((name, m) for name, m in self.named_modules() if isinstance(m, QuantLinear))

    def make_resident(self) -> None:
        """Unpack and keep every linear's operand, and the head's; call it after all weights are loaded."""
        self.lm_head.make_resident()
        for _, linear in self.linears():
            linear.make_resident()

    @property
    def num_bytes(self) -> int:
        """Bytes of all frozen weights in their formats, without the adapter."""
        tensors = [
            *self.buffers(),
            *self.lm_head.tensors,
            *(t for _, linear in self.linears() for t in linear.tensors),
        ]
        return sum({id(t): t.nbytes for t in tensors}.values())
