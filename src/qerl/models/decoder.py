"""The decoder: one module tree and one forward pass for learning, prefill and decode.

    h = embed(tokens)
    h = h + o_proj(attend(rotate(q), rotate(k), v))      q, k, v of input_layernorm(h); L times
    h = h + down_proj(silu(gate) * up)                   gate, up of post_attention_layernorm(h)
    hidden = norm(h),  logits = hidden @ lm_head^T       logits in fp32 (lm_head.py)

A family may place norms after attention and MLP too, scale and cap, rotate in another way, have Gated
DeltaNet (delta_net.py) in the place of attention, or experts (mixture.py) in that of the MLP: Architecture.

The residual stream h is fp32, everything else is in the compute dtype. Rounding h to bf16 at each of a 7B
model's 56 sums would cause most of the difference between the engine and the learner.

The passes differ only in the function attend(layer_index, q_TNH, k_TKH, v_TKH, options) -> o_TNH. The
learner's attends within packed rows; the engine's writes k and v to the KV cache and attends to that. With
Gated DeltaNet they differ in a second function, recur.
Submodules have Hugging Face's names without the leading "model.".
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qerl.aqn.noise_table import NoiseTable
from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.head_norm import HeadNorms, turned_heads
from qerl.kernels.head.trained_embedding import trained_embedding
from qerl.kernels.pointwise.rms_norm import rms_norm
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.adapter_bank import AdapterBank
from qerl.models.architecture import Architecture, LayerKind
from qerl.models.delta_net import GatedDeltaNet, Recur
from qerl.models.layer_spec import LayerSpec, layer_spec
from qerl.models.linear import FrozenWeight, QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.lm_head import LMHead
from qerl.models.mixture import ExpertLinear, MixtureMLP, Route, RowsByLayer
from qerl.models.mlp import MLP, linears_of
from qerl.models.norm import RMSNorm
from qerl.models.packed.packed_linear import project, project_onto, room, tile_linears
from qerl.models.rope import Angles, angles_of, inverse_frequencies, rotate_both
from qerl.models.tiled_experts import ExpertRows, rows_of_gate_up, tile_experts

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]


class RowContext(NamedTuple):
    """Inputs of the layers that belong to rows."""

    angles: dict[str, Angles]
    """The angles of each row's position, by LayerKind.rope."""
    noise_rows_T: Tensor | None
    """Index of each row's noise in the noise table, int32; None uses no table."""
    recur: Recur | None
    """The recurrence of layers with Gated DeltaNet; None: there are no such layers."""
    route: Route | None
    """Sees and may replace the experts that routers choose; None: their own choice."""
    expert_rows: int | None
    """Rows of every product of an expert, for bits that do not depend on other rows; None: those it has."""
    rows_by_layer: RowsByLayer
    """The routes of layers that the host knows. Layers that run add theirs: one that runs again for its
    backward pass has the same routes, and neither asks the device nor sorts again."""
    linear_pass: LinearPass
    """The state of linears in this pass."""


RunLayer = Callable[["Layer", Tensor, RowContext, int, Attend], Tensor]


class Attention(nn.Module):
    def __init__(
        self, arch: Architecture, spec: LayerSpec, kind: LayerKind, compute: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.head_size, self.rope = arch.kv_heads(kind).size, kind.rope
        self._is_interleaved = arch.rope_is_interleaved
        self._is_gated = arch.attention_gate
        self.sinks: Tensor | None
        sinks = torch.empty(arch.num_heads, dtype=torch.float32, device=device)
        self.register_buffer("sinks", sinks if arch.attention_sinks else None)
        self.options = AttentionOptions(
            scale=arch.attention_scale, softcap=arch.attention_softcap, window=kind.window, sinks_N=self.sinks
        )
        self.q_proj, self.k_proj, *v_proj = linears_of(spec.qkv, compute, device)
        self.v_proj = v_proj[0] if v_proj else None
        ones_H = torch.ones(self.head_size, device=device)
        self._value_norm = (ones_H, arch.norm_eps) if arch.value_norm else None
        (self.o_proj,) = linears_of(spec.o, compute, device)
        self._norms_heads = arch.qk_norm_over == "head"
        if arch.qk_norm:
            widths = (spec.norm_widths[f"self_attn.{name}"] for name in ("q_norm", "k_norm"))
            q_norm, k_norm = (RMSNorm(n, arch.norm_eps, compute=compute, device=device) for n in widths)
            self.q_norm: nn.Module = q_norm
            self.k_norm: nn.Module = k_norm
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        """Return the heads' outputs side by side, which o_proj multiplies."""
        q_TN, k_TK, *v_TK = project(x_TD, self.qkv_projs, context.linear_pass, gaps_are_free=True)
        gate_TN = None
        if self._is_gated:
            parts = q_TN.unflatten(1, (-1, 2 * self.head_size)).chunk(2, 2)
            q_TN, gate_TN = (part.flatten(1) for part in parts)
        turn = None if self.rope == "none" else context.angles[self.rope]
        if v_TK and turn is not None and self._turns_plain_heads(turn):
            norms = self._head_norms
            q_TNH, k_TKH, v_TKH = turned_heads(q_TN, k_TK, v_TK[0], norms, turn.cosine_T1H, turn.sine_T1H)
        else:
            q_TNH, k_TKH = self._normed(q_TN, self.q_norm), self._normed(k_TK, self.k_norm)
            if turn is not None:
                q_TNH, k_TKH = rotate_both(q_TNH, k_TKH, turn, is_interleaved=self._is_interleaved)
            v_TKH = self._values(v_TK[0] if v_TK else k_TK)
        o_TNH = attend(layer_index, q_TNH, k_TKH, v_TKH, self.options)
        return o_TNH.flatten(1) if gate_TN is None else o_TNH.flatten(1) * gate_TN.sigmoid()

    def _turns_plain_heads(self, turn: Angles) -> bool:
        """True if heads are rotated whole, and normed each by itself or not at all."""
        is_normed_so = self._norms_heads or isinstance(self.q_norm, nn.Identity)
        is_plain = self._value_norm is None and not self._is_interleaved and turn.query_scale_T11 is None
        return is_plain and is_normed_so and turn.cosine_T1H.shape[-1] == self.head_size

    @property
    def _head_norms(self) -> HeadNorms | None:
        q_norm, k_norm = self.q_norm, self.k_norm
        if not (isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)):
            return None
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)

    def _values(self, v_TK: Tensor) -> Tensor:
        """Return heads [T, K, H]."""
        v_TKH = v_TK.unflatten(1, (-1, self.head_size))
        if self._value_norm is None:
            return v_TKH
        ones_H, eps = self._value_norm
        return rms_norm(v_TKH, ones_H, None, eps, dtype=v_TKH.dtype)

    def _normed(self, y_TN: Tensor, norm: nn.Module) -> Tensor:
        """Return heads [T, N, H]."""
        if self._norms_heads:
            return norm(y_TN.unflatten(1, (-1, self.head_size)))
        return norm(y_TN).unflatten(1, (-1, self.head_size))

    @property
    def qkv_projs(self) -> tuple[QuantLinear, ...]:
        return (self.q_proj, self.k_proj, *(() if self.v_proj is None else (self.v_proj,)))


class Layer(nn.Module):
    input_layernorm: NoisedRMSNorm
    """This and the next one in plain layers; the norms of others are those of `norms`."""
    post_attention_layernorm: NoisedRMSNorm

    def __init__(self, arch: Architecture, layer_index: int, compute: torch.dtype, device: torch.device):
        super().__init__()
        kind = arch.kind(layer_index)
        self.spec, self.norms, self._residual_scale = layer_spec(arch, kind), arch.norms, arch.residual_scale
        if kind.mixer == "attention":
            self.self_attn = Attention(arch, self.spec, kind, compute, device)
        else:
            self.linear_attn = GatedDeltaNet(arch, self.spec, compute, device)
        self.mlp = (MLP if kind.mlp == "dense" else MixtureMLP)(arch, self.spec, compute, device)
        self.layer_scalar: Tensor | None
        scalar = torch.empty(1, dtype=torch.float32, device=device)
        self.register_buffer("layer_scalar", scalar if arch.layer_scalar else None)
        for name in arch.norms.names:
            kind = NoisedRMSNorm if name in arch.norms.noised else RMSNorm
            self.add_module(name, kind(arch.width, arch.norm_eps, compute=compute, device=device))

    def forward(self, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        return self.feed(self.mix(h_TD, context, layer_index, attend), context, layer_index)

    def mix(self, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        """Return h after attention, or what is in its place: the part that reads other rows."""
        norms, mixer, linear_pass = self.norms, self.mixer, context.linear_pass
        x_TD, h_TD = self._before(norms.before_attention, h_TD, context.noise_rows_T, mixer.qkv_projs)
        if isinstance(mixer, Attention):
            o_TC = mixer(x_TD, context, layer_index, attend)
        else:
            assert context.recur is not None, "this pass has no function for recurrent states"
            o_TC = mixer(x_TD, layer_index, context.recur, linear_pass)
        return self._add(h_TD, o_TC, mixer.o_proj, norms.after_attention, context.noise_rows_T, linear_pass)

    def feed(self, h_TD: Tensor, context: RowContext, layer_index: int) -> Tensor:
        """Return h after the MLP or the experts, each row from itself alone."""
        _, noise_rows_T, _, *routing, linear_pass = context
        norms, mlp = self.norms, self.mlp
        if isinstance(mlp, MixtureMLP):
            assert norms.before_mlp is not None
            plain_TD = None if mlp.reads_noise else getattr(self, norms.before_mlp).plain(h_TD)
            x_TD, h_TD = self._before(norms.before_mlp, h_TD, noise_rows_T, ())
            router_x_TD = x_TD if plain_TD is None else plain_TD
            inputs = x_TD, router_x_TD, layer_index, *routing, linear_pass
            if norms.after_mlp is None and self._residual_scale == 1:
                h_TD = mlp(*inputs, onto_TD=h_TD)
            else:
                h_TD = self._add_normed(h_TD, mlp(*inputs), norms.after_mlp, noise_rows_T)
        else:
            x_TD, h_TD = self._before(norms.before_mlp, h_TD, noise_rows_T, mlp.gate_up_projs)
            y_TF = mlp(x_TD, linear_pass)
            last = linear_pass.without_output if norms.after_mlp is None else linear_pass
            h_TD = self._add(
                h_TD, y_TF, mlp.down_proj, norms.after_mlp, noise_rows_T, last, gaps_are_free=True
            )
        return h_TD if self.layer_scalar is None else h_TD.mul_(self.layer_scalar)

    def _before(
        self, norm: str | None, h_TD: Tensor, noise_rows_T: Tensor | None, readers: tuple[QuantLinear, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return what the linears read, and an h that may be modified in place."""
        if norm is None:
            x_TD = h_TD.to(readers[0].compute, copy=True)
            return x_TD, h_TD.clone() if torch.is_grad_enabled() else h_TD
        return getattr(self, norm)(h_TD, noise_rows_T, room=room(readers))

    def _add(
        self,
        h_TD: Tensor,
        x_TK: Tensor,
        linear: QuantLinear,
        norm: str | None,
        noise_rows_T: Tensor | None,
        linear_pass: LinearPass,
        *,
        gaps_are_free: bool = False,
    ) -> Tensor:
        """Return h plus the product, normed and scaled as the family does; h is overwritten."""
        if norm is None and self._residual_scale == 1:
            return project_onto(h_TD, x_TK, linear, linear_pass, gaps_are_free=gaps_are_free)
        (y_TD,) = project(x_TK, (linear,), linear_pass, gaps_are_free=gaps_are_free)
        return self._add_normed(h_TD, y_TD, norm, noise_rows_T)

    def _add_normed(
        self, h_TD: Tensor, y_TD: Tensor, norm: str | None, noise_rows_T: Tensor | None
    ) -> Tensor:
        """Return h plus y, normed and scaled as the family does; h is overwritten."""
        if norm is not None:
            y_TD = getattr(self, norm).normed(y_TD, noise_rows_T)
        return h_TD.add_(y_TD, alpha=self._residual_scale)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        return self.self_attn if self.spec.kind.mixer == "attention" else self.linear_attn

    @property
    def linear_groups(self) -> tuple[tuple[QuantLinear, ...], ...]:
        """Linears that read the same input are together: q|k|v, o, gate|up, down, as `spec.groups`."""
        return self.mixer.qkv_projs, (self.mixer.o_proj,), *self.mlp.linear_groups

    @property
    def experts(self) -> tuple[ExpertLinear, ...]:
        """Stacks of experts, as `spec.experts`."""
        return self.mlp.stacks if isinstance(self.mlp, MixtureMLP) else ()

    @property
    def expert_rows(self) -> tuple[ExpertRows, ...]:
        """The rows that the stacks of `experts` have in tiles."""
        mlp, plain = self.mlp, ExpertRows.PLAIN
        return (rows_of_gate_up(mlp.mixture.is_interleaved), plain) if isinstance(mlp, MixtureMLP) else ()

    def tile(self) -> None:
        """Put weights that fit into the decode kernels' tiles (packed_linear.py), if their format's tiles are
        used; free their plain form. The gates of Gated DeltaNet are too narrow and stay as they are."""
        for group, linears in zip(self.spec.groups, self.linear_groups, strict=True):
            if group.name == "qkv" and isinstance(self.mixer, GatedDeltaNet):
                linears = self.mixer.wide_projs
            if linears[0].weight is not None:
                tile_linears(linears, UnpackRows.GATE_UP if group.name == "gate_up" else UnpackRows.ALL)
        for experts, rows in zip(self.experts, self.expert_rows, strict=True):
            tile_experts(experts, rows)


def run_layer(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
    """Call the layer: the default of `Decoder.forward`."""
    return layer(h_TD, context, layer_index, attend)


class Decoder(nn.Module):
    """Created with unset weights. Frozen tensors are buffers; the parameters are the trained ones."""

    name_prefix = "model."
    notices: Sequence[str] = ()

    def __init__(self, architecture: Architecture, *, compute: torch.dtype, device: torch.device):
        super().__init__()
        arch = self.architecture = architecture
        self.family, self.vocab_size, self.max_positions = arch.family, arch.vocab_size, arch.max_positions
        self.compute, self.device = compute, device
        self.embed_tokens = FrozenWeight(arch.vocab_size, arch.width, dtype=compute, device=device)
        self.layers = nn.ModuleList(Layer(arch, i, compute, device) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.width, arch.norm_eps, compute=compute, device=device)
        table = self.embed_tokens
        if not arch.tied_head:
            table = FrozenWeight(arch.vocab_size, arch.width, dtype=compute, device=device)
        self.lm_head = LMHead(table.weight, scale=arch.logit_scale, softcap=arch.logit_softcap)
        # rounded, as the models that scale it were trained
        self.embedding_scale = torch.tensor(arch.embedding_scale, dtype=compute).item()
        ropes = {"main": arch.rope} | ({} if arch.local_rope is None else {"local": arch.local_rope})
        self._ropes = {
            name: (rope, inverse_frequencies(rope, arch.rotated_by(name)).to(device))
            for name, rope in ropes.items()
        }
        self.noise_table = NoiseTable([m for m in self.modules() if isinstance(m, NoisedRMSNorm)])
        self.adapter_bank: AdapterBank | None = None
        """Adapters by row of passes that sample; None: all rows have the linears' own."""
        self.reserved_bank: AdapterBank | None = None
        """A bank that is adapter_bank at times, whose memory a KV cache leaves free."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        run_layer: RunLayer = run_layer,
        noise_rows_T: Tensor | None = None,
        recur: Recur | None = None,
        route: Route | None = None,
        expert_rows: int | None = None,
        rows_by_layer: RowsByLayer | None = None,
        linear_pass: LinearPass = PLAIN,
    ) -> Tensor:
        """Return hidden_TD after the final norm, in the compute dtype. `run_layer` calls each layer;
        noise_rows_T are rows of noise_table and of adapter_bank, int32, or None; recur is needed if layers
        have states; route may choose experts; expert_rows, rows_by_layer, linear_pass: of RowContext."""
        angles = {name: angles_of(rope, positions_T, f) for name, (rope, f) in self._ropes.items()}
        known = {} if rows_by_layer is None else rows_by_layer
        if self.adapter_bank is not None and noise_rows_T is not None:
            linear_pass = dataclasses.replace(linear_pass, row_adapters=self.adapter_bank.at(noise_rows_T))
        context = RowContext(angles, noise_rows_T, recur, route, expert_rows, known, linear_pass)
        h_TD = self._embedded(tokens_T)
        if self.embedding_scale != 1:
            h_TD.mul_(self.embedding_scale)
        for layer_index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            h_TD = run_layer(layer, h_TD, context, layer_index, attend)
        return self.norm(h_TD)

    def _embedded(self, tokens_T: Tensor) -> Tensor:
        weight, master = self.embed_tokens.weight, self.embed_tokens.full
        if master is None or not torch.is_grad_enabled():
            return F.embedding(tokens_T, weight).float()
        return trained_embedding(tokens_T, weight, master)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits, fp32 [T, V], without a gradient."""
        return self.lm_head.logits(hidden_TD)

    def linears(self) -> Iterator[tuple[str, QuantLinear]]:
        """Yield every linear with its name, layer by layer: ("layers.0.self_attn.q_proj", ...)."""
        return ((name, m) for name, m in self.named_modules() if isinstance(m, QuantLinear))

    def expert_linears(self) -> Iterator[tuple[str, ExpertLinear]]:
        """Yield every stack of experts with its name: ("layers.0.mlp.experts.gate_up_proj", ...)."""
        return ((name, m) for name, m in self.named_modules() if isinstance(m, ExpertLinear))

    def make_resident(self) -> None:
        """Unpack and keep every linear's operand, and the head's; call it after all weights are loaded.
        Experts stay packed."""
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
            *(t for _, experts in self.expert_linears() for t in experts.tensors),
        ]
        return sum({id(t): t.nbytes for t in tensors}.values())
