"""The attention of a layer in a decode step: three launches, four with u of o made apart.

    x = norm(h)   q|k|v = x W^T + u B^T + bias   o = attention(rope(q|k|v))   h += o W^T + u B^T

The attention kernel computes windows, caps, sinks, gates, scales, partial and interleaved rotation. Norms
over all heads, and queries that grow with the position, are launches of PyTorch's before it; norms after o
are launches behind the product, which then does not add the residual stream.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qerl.engine.decode.layer import LayerStep, NormedProducts, StepParts, StepRows, norm_of
from qerl.engine.decode.linears import LinearGroup
from qerl.kernels.attention.decode_attention import Norms, supports
from qerl.models.architecture import Architecture, Rope
from qerl.models.decoder import Layer
from qerl.models.norm import RMSNorm
from qerl.models.rope import angles_of, cosine_sine, inverse_frequencies, magnitude

Edit = Callable[[Tensor, StepRows], Tensor]
"""Changes q|k|v before attention."""


class AttentionSteps:
    """Everything that the attention of all layers shares: kernels, their workspace and tables of angles."""

    def __init__(self, parts: StepParts):
        a, cache, device = parts.decoder.architecture, parts.cache, parts.decoder.device
        self.parts = parts
        positions_T = torch.arange(parts.max_pages * cache.page_tokens, device=device)
        self.angles, self.growth = rope_tables(a, positions_T, parts.decoder.compute)
        self.kernel = parts.attention(
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_size=a.head_size,
            page_tokens=cache.page_tokens,
            kv_dtype=cache.pages.k.dtype,
            max_rows=parts.max_rows,
            max_pages=parts.max_pages,
            device=device,
            chunk=parts.chunk,
            is_gated=a.attention_gate,
            is_interleaved=a.rope_is_interleaved,
        )

    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        if a.value_norm or a.layer_scalar or len(set(a.each_kv_heads)) > 1:
            return "they do not compute norms of values and heads that differ by layer"
        if a.qk_norm and a.qk_norm_over == "head" and any(rope.query_growth for rope in _ropes(a).values()):
            return "they do not compute queries that are both normed and scaled by position"
        if a.qk_norm and a.qk_norm_over == "projection" and a.attention_gate:
            return "they do not compute gated attention with norms over all heads"
        if not supports(a.num_heads, a.num_kv_heads, a.head_size, page_tokens):
            return (
                "attention takes heads of 64 or 128 (up to 16 to a key) or 256 (up to 8), and pages of a"
                f" multiple of 16 tokens; here {a.num_heads} / {a.num_kv_heads} heads of {a.head_size}, pages"
                f" of {page_tokens}"
            )
        if not supports(a.num_heads, a.num_kv_heads, a.head_size, page_tokens, a.rotated):
            return f"RoPE must rotate a multiple of 32 elements of a head, here {a.rotated}"
        return None

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep:
        return _AttentionStep(self, layer_index, layer)


class _AttentionStep:
    def __init__(self, shared: AttentionSteps, layer_index: int, layer: Layer):
        attention, norms = layer.self_attn, layer.norms
        self._shared, self._index = shared, layer_index
        self._before = norm_of(layer, norms.before_attention)
        after = norm_of(layer, norms.after_attention)
        self._products = NormedProducts(shared.parts, layer.linear_groups[:2], after)
        self.groups: Sequence[LinearGroup] = self._products.groups
        self._qkv, self._o = self.groups
        self._angles, self._options = shared.angles[attention.rope], attention.options
        self._head_norms: Norms | None = None
        self._edits: list[Edit] = []
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            if shared.parts.decoder.architecture.qk_norm_over == "head":
                self._head_norms = (q_norm.weight, k_norm.weight, q_norm.eps)
            else:
                self._edits.append(_ProjectionNorms(q_norm, k_norm))
        if (growth_T1 := shared.growth.get(attention.rope)) is not None:
            self._edits.append(_Growth(growth_T1, self._qkv.ends[0]))

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        products, shared, cache = self._products, self._shared, self._shared.parts.cache
        x_BD, u = products.normed(h_BD, self._before, self._qkv, rows)
        qkv_BX = products.linear(x_BD, self._qkv, u, rows)
        for edit in self._edits:
            qkv_BX = edit(qkv_BX, rows)
        attend = shared.kernel.attend_together if rows.is_together else shared.kernel.attend
        tables = cache.state_of(self._index, rows.state)
        pages = cache.of_layer(self._index).layer(self._index)
        o_BX = attend(qkv_BX, self._angles, pages, tables, norms=self._head_norms, options=self._options)
        return products.added(h_BD, o_BX, self._o, rows)


class _ProjectionNorms:
    """Norms of q and of k, each over all heads together."""

    def __init__(self, q_norm: RMSNorm, k_norm: RMSNorm):
        self._q_norm, self._k_norm = q_norm, k_norm
        self._ends = len(q_norm.weight), len(q_norm.weight) + len(k_norm.weight)

    def __call__(self, qkv_BX: Tensor, rows: StepRows) -> Tensor:
        q_BN, k_BK, v_BK = qkv_BX.tensor_split(self._ends, dim=1)
        return torch.cat((self._q_norm(q_BN), self._k_norm(k_BK), v_BK), dim=1)


class _Growth:
    """Queries times a factor of their position; -1, an empty row, takes the last one."""

    def __init__(self, factors_T1: Tensor, q_width: int):
        self._factors_T1, self._q_width = factors_T1, q_width

    def __call__(self, qkv_BX: Tensor, rows: StepRows) -> Tensor:
        positions_B = rows.state.positions_B[: rows.num_rows].long()
        qkv_BX[:, : self._q_width].mul_(self._factors_T1[positions_B])
        return qkv_BX


def _ropes(a: Architecture) -> dict[str, Rope]:
    """Return the ropes that layers with attention use."""
    used = {kind.rope for kind in a.kinds if kind.mixer == "attention"}
    ropes = {"main": a.rope} | ({} if a.local_rope is None else {"local": a.local_rope})
    return {name: rope for name, rope in ropes.items() if name in used}


def rope_tables(
    a: Architecture, positions_T: Tensor, compute: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return, by LayerKind.rope, the angles of positions and the growth of queries, where they grow.

    angles   fp32 [positions, R]: the cosines of all frequencies, then their sines; R elements are rotated
    growth   [positions, 1]: the factor of the queries
    """
    half, growth = a.rotated // 2, {}
    angles = {"none": torch.zeros(len(positions_T), 0, device=positions_T.device)}
    for name, rope in _ropes(a).items():
        frequencies = inverse_frequencies(rope, a.rotated).to(positions_T.device)
        cosine_T1R, sine_T1R = cosine_sine(positions_T, frequencies, magnitude(rope))
        angles[name] = torch.cat((cosine_T1R[:, 0, :half], sine_T1R[:, 0, half:]), dim=-1).contiguous()
        scale_T11 = angles_of(rope, positions_T, frequencies).query_scale_T11
        if scale_T11 is not None:
            growth[name] = scale_T11[:, 0].to(compute)
    return angles, growth
