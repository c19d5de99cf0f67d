"""The attention of a layer in a decode step: three launches, four with u of o made apart.

x = norm(h)   q|k|v = x W^T + u B^T + bias   o = attention(rope(q|k|v))   h += o W^T + u B^T
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.engine.decode_layer import LayerStep, NormedProducts, StepParts, StepRows
from qerl.engine.fused_linear import LinearGroup
from qerl.kernels.decode_attention import Norms, supports
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.norm import RMSNorm
from qerl.models.rope import cosine_sine, inverse_frequencies, magnitude


class AttentionSteps:
    """What the attention of all layers shares: the kernels, their workspace and the table of angles."""

    def __init__(self, parts: StepParts):
        a, cache, device = parts.decoder.architecture, parts.cache, parts.decoder.device
        self.parts = parts
        positions_T = torch.arange(parts.max_pages * cache.page_tokens, device=device)
        self.angles = angles_of(parts.decoder, positions_T)
        self.kernel = parts.attention(
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_size=a.head_size,
            page_tokens=cache.page_tokens,
            kv_dtype=cache.k.dtype,
            max_rows=parts.max_rows,
            max_pages=parts.max_pages,
            device=device,
            chunk=parts.chunk,
            is_gated=a.attention_gate,
        )

    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        if supports(a.num_heads, a.num_kv_heads, a.head_size, page_tokens, a.rotated):
            return None
        return (
            "attention takes heads of 64 or 128, up to 16 to a key, or of 256, up to 8, of which a multiple"
            " of 32 elements is rotated, and pages of a multiple of 16 tokens;"
            f" here {a.num_heads} / {a.num_kv_heads} heads of {a.head_size}, {a.rotated} rotated, pages of"
            f" {page_tokens}"
        )

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep:
        return _AttentionStep(self, layer_index, layer)


class _AttentionStep:
    def __init__(self, shared: AttentionSteps, layer_index: int, layer: Layer):
        self._shared, self._index, self._layer = shared, layer_index, layer
        self._products = NormedProducts(shared.parts, layer.linear_groups[:2])
        self._qkv, self._o = self._products.groups
        q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
        self._head_norms: Norms | None = None
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            self._head_norms = (q_norm.weight, k_norm.weight, q_norm.eps)

    @property
    def groups(self) -> Sequence[LinearGroup]:
        return self._products.groups

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        products, shared, cache = self._products, self._shared, self._shared.parts.cache
        x_BD, u = products.normed(h_BD, self._layer.input_layernorm, self._qkv, rows)
        qkv_BX = products.products.linear(x_BD, self._qkv, u, None)
        attend = shared.kernel.attend_together if rows.is_together else shared.kernel.attend
        tables = cache.state_of(self._index, rows.state)
        o_BX = attend(qkv_BX, shared.angles, cache.layer(self._index), tables, norms=self._head_norms)
        return products.added(h_BD, o_BX, self._o)


def angles_of(decoder: Decoder, positions_T: Tensor) -> Tensor:
    """Return fp32 [positions, R]: the cosines of all frequencies, then their sines. R elements of a head are
    rotated."""
    a = decoder.architecture
    half = a.rotated // 2
    cosine_T1H, sine_T1H = cosine_sine(
        positions_T, inverse_frequencies(a.rope, a.rotated).to(decoder.device), magnitude(a.rope)
    )
    return torch.cat((cosine_T1H[:, 0, :half], sine_T1H[:, 0, half:]), dim=-1).contiguous()
