"""The decode step on an NVIDIA GPU: seven to twelve launches a layer, each product with its adapter in it.

    h = embed(token)
    x = norm(h)         q|k|v = x W^T + u B^T + bias                    o = attention(rope(q|k|v))
                        h += o W^T + u B^T
    x = norm(h)         y = silu(gate) * up of x W^T + u B^T
                        h += y W^T + u B^T                              L times
    hidden = norm(h)                                                    h in fp32, all else in bf16

u = scaling * x @ A^T of the product's input x. For few rows the kernels for packed linears make it in the
same launch; otherwise the norm's launch makes it, or one of its own ahead of o and down. For BF16 weights it
is stored behind the rows of x: [x | u] @ [W | B]^T is one cuBLAS call (fused_linear.py).

The step reads the modules' own weights, norms and noise and keeps no copy of them. `publish` refreshes the
stacked working copies of the adapters (A of q|k|v, of gate|up; B in the order of the packed rows) in place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.engine.fused_linear import FusedLinears, LinearGroup, PackedLinears, TorchLinears
from qerl.engine.kv_cache import KVCache
from qerl.kernels.decode_attention import DecodeAttention, Norms
from qerl.kernels.decode_attention import supports as supports_attention
from qerl.kernels.decode_state import DecodeState
from qerl.kernels.lora_shrink import LoraShrink
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import Kernels, best_kernels
from qerl.models.norm import RMSNorm
from qerl.models.rope import cosine_sine, inverse_frequencies, magnitude

MAX_ROWS = 256
NO_KERNELS = "they are for NVIDIA GPUs from Ampere on"


class KernelForward:
    is_capturable = True

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_rows: int,
        max_pages: int,
        products: Callable[[torch.device], FusedLinears] = PackedLinears,
        chunk: int | None = None,
        shrink: Callable[[torch.device], LoraShrink] = LoraShrink,
    ):
        """products: multiplies packed linears; chunk: as DecodeAttention takes it; shrink: norms and u."""
        a, device = decoder.architecture, decoder.device
        self._decoder, self._cache = decoder, cache
        self._shrink = shrink(device)
        packed = products(device)
        self._layers = [_LayerGroups(layer, packed) for layer in decoder.layers if isinstance(layer, Layer)]
        positions_T = torch.arange(max_pages * cache.page_tokens, device=device)
        self._angles = _angles(decoder, positions_T)
        self._attention = DecodeAttention(
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_size=a.head_size,
            page_tokens=cache.page_tokens,
            kv_dtype=cache.k.dtype,
            max_rows=max_rows,
            max_pages=max_pages,
            device=device,
            chunk=chunk,
        )

    @staticmethod
    def obstacle(decoder: Decoder, page_tokens: int, kernels: Kernels | None = None) -> str | None:
        """Return why the kernels cannot run this decoder; None if they can. kernels: default, the best."""
        ranks = {linear.rank for _, linear in decoder.linears()}
        return kernel_obstacle(
            decoder.architecture,
            kernels or best_kernels(decoder.device),
            decoder.compute,
            ranks=ranks,
            page_tokens=page_tokens,
        )

    def publish(self) -> None:
        for layer in self._layers:
            for group in layer.groups:
                group.publish()

    def __call__(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(state, num_rows, self._attention.attend)

    def together(self, state: DecodeState, num_rows: int) -> Tensor:
        return self._run(state, num_rows, self._attention.attend_together)

    def _run(self, state: DecodeState, num_rows: int, attend: Callable[..., Tensor]) -> Tensor:
        decoder = self._decoder
        h_BD = self._shrink.embed(state.tokens_B[:num_rows], decoder.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            h_BD = self._layer(index, layer, h_BD, state, attend)
        return self._shrink.norm(h_BD, decoder.norm.weight, None, decoder.norm.eps)

    def _layer(
        self,
        index: int,
        layer: "_LayerGroups",
        h_BD: Tensor,
        state: DecodeState,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        module = layer.module
        noise_rows_B = state.noise_rows_B[: len(h_BD)]
        x_BD, u = self._normed(h_BD, module.input_layernorm, noise_rows_B, layer, layer.qkv)
        qkv_BX = layer.products.linear(x_BD, layer.qkv, u, None)
        tables = self._cache.state_of(index, state)
        o_BX = attend(qkv_BX, self._angles, self._cache.layer(index), tables, norms=layer.head_norms)
        h_BD = layer.products.linear(*self._shrunk(o_BX, layer, layer.o), h_BD)
        x_BD, u = self._normed(h_BD, module.post_attention_layernorm, noise_rows_B, layer, layer.gate_up)
        y_BF = layer.products.swiglu(x_BD, layer.gate_up, u)
        return layer.products.linear(*self._shrunk(y_BF, layer, layer.down), h_BD)

    def _normed(
        self,
        h_BD: Tensor,
        norm: NoisedRMSNorm,
        noise_rows_B: Tensor,
        layer: "_LayerGroups",
        group: LinearGroup,
    ) -> tuple[Tensor, Tensor | None]:
        noise, rows_B = norm.noise_of(noise_rows_B)
        operands = h_BD, norm.weight, noise, norm.eps
        if group.a is None or layer.products.makes_u(len(h_BD), group):
            return self._shrink.norm(*operands, rows_M=rows_B), None
        out = group.empty_input(len(h_BD), group.a) if group.room else None
        return self._shrink.norm_shrink(*operands, group.a, group.scaling, rows_M=rows_B, out=out)

    def _shrunk(
        self, x_BK: Tensor, layer: "_LayerGroups", group: LinearGroup
    ) -> tuple[Tensor, LinearGroup, Tensor | None]:
        """Return (x, group, u); x is copied if u must lie behind its rows and they have no free columns."""
        if group.a is None or layer.products.makes_u(len(x_BK), group):
            return x_BK, group, None
        if group.room == 0:
            return x_BK, group, self._shrink.shrink(x_BK, group.a, group.scaling)
        if x_BK.stride(0) >= group.in_width + group.room:
            u_BR = self._shrink.shrink(x_BK, group.a, group.scaling, out=group.behind(x_BK))
            return x_BK, group, u_BR
        copy_BK, u_BR = group.empty_input(len(x_BK), x_BK)
        self._shrink.shrink(x_BK, group.a, group.scaling, out=u_BR, copy=copy_BK)
        return copy_BK, group, u_BR


def kernel_obstacle(
    a: Architecture, kernels: Kernels, compute: torch.dtype, *, ranks: set[int], page_tokens: int
) -> str | None:
    """Return why the kernels cannot run such a decoder; None if they can. ranks: of the adapters."""
    if kernels == "torch":
        return NO_KERNELS
    if compute != torch.bfloat16:
        return "they compute in bf16"
    if a.special_part is not None:
        return f"they do not compute {a.special_part}"
    if a.mlp_bias:
        return "they take no biases in the MLP"
    if not supports_attention(a.num_heads, a.num_kv_heads, a.head_size, page_tokens):
        return (
            "attention takes heads of 64 or 128, up to 16 to a key, and pages of a multiple of 16 tokens;"
            f" here {a.num_heads} / {a.num_kv_heads} heads of {a.head_size}, pages of {page_tokens}"
        )
    widths = (a.width, a.ff_width, a.num_heads * a.head_size, a.num_kv_heads * a.head_size)
    if odd := [width for width in widths if width % 64]:
        return f"they take widths that are multiples of 64, here {odd[0]}"
    if odd := [rank for rank in ranks if rank % 16 or rank > 128]:
        return f"they take ranks of 16, 32, ... 128, here {odd[0]}"
    return None


class _LayerGroups:
    """The linears of a layer, grouped as they are launched."""

    def __init__(self, layer: Layer, packed: FusedLinears):
        self.module = layer
        self.groups = tuple(map(LinearGroup, layer.linear_groups))
        self.qkv, self.o, self.gate_up, self.down = self.groups
        is_packed = all(group.tiles is not None for group in self.groups)
        self.products: FusedLinears = packed if is_packed else TorchLinears(self.down.room)
        q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
        self.head_norms: Norms | None = None
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            self.head_norms = (q_norm.weight, k_norm.weight, q_norm.eps)


def _angles(decoder: Decoder, positions_T: Tensor) -> Tensor:
    """Return fp32 [positions, H]: the cosines of all frequencies, then their sines."""
    a = decoder.architecture
    half = a.head_size // 2
    cosine_T1H, sine_T1H = cosine_sine(
        positions_T, inverse_frequencies(a.rope, a.rotated).to(decoder.device), magnitude(a.rope)
    )
    return torch.cat((cosine_T1H[:, 0, :half], sine_T1H[:, 0, half:]), dim=-1).contiguous()
