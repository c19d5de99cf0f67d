"""o = softmax(q k^T / sqrt(H)) v for one token per row over paged keys and values, one launch per layer.

    q, k, v = split of qkv_BX; q and k rotated by the angles of the row's position (after RMSNorm, if norms)
    k, v are written to the cache at the position; o_BNH covers the positions 0 to the row's own, as stored

Layout of a layer's cache, slot = page * page_tokens + offset in the page:

    k, v      [num_pages, page_tokens, K, H] bfloat16, or float8_e4m3fn with
    scales    fp32 [num_pages, K, page_tokens]: a token's head is codes * scale, scale = absmax / 448

A chunk of positions is one unit of work of one warp: CHUNK of them, or with more than 32 rows as many as
decode_shape.py chooses, for all rows and by their lengths. The results of a row's chunks (largest score, sum
and o, in fp32) are added in one order: by the unit of the last chunk, which waits for the others, or up to 32
rows by a warp for each 16 elements of H. So a row's bits depend on that row and on the chunk alone
(tests/kernels/attention/test_decode_attention.py). Units are ordered by chunk, then row: neighboring rows
that share pages, such as the samples of a group, read them from memory once, then from L2. Rows with
position -1 get zeros.

What attention_options.py lists, a rotation of a head's first elements only or of neighboring elements
(interleaved), and a gate of each query head are compiled in where they are used. A row with a window has the
chunks that the window reaches; no page wholly before it is read, so such a page may belong to another
sequence already.

B rows, X pages of a table or columns of qkv. Positions, tables, pages and chunk_1 are read before the
previous kernel has ended, so no kernel that allows an early launch of this one may write them.
"""

import dataclasses
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.decode_shape import (
    CHUNK,
    Shape,
    Variant,
    choose_shape,
    choose_stages,
    max_chunks,
)
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.attention.fp8_pages import to_fp8
from qerl.kernels.runtime.architectures import gpu_of, num_sms
from qerl.kernels.runtime.nvrtc import addresses, cached_method, compiled

CASES = (  # N, K, H
    (28, 4, 128),
    (14, 2, 64),
    (3, 3, 128),
    (10, 2, 128),
    (6, 2, 64),
    (8, 1, 128),
    (32, 2, 128),
    (16, 1, 64),
    (8, 4, 256),
    (4, 1, 256),
    (8, 1, 256),
)
Norms = tuple[Tensor, Tensor, float]  # q_norm_H, k_norm_H in fp32, eps

_THREADS = 32
_MULTIPROCESSOR_BYTES = 228 * 1024  # most shared memory that is used
_LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCache:
    """Views of one layer of the cache, written in place."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


def split_heads(
    qkv_BX: Tensor,
    angles: Tensor,
    positions_B: Tensor,
    num_kv_heads: int,
    head_size: int,
    norms: Norms | None,
    is_gated: bool = False,
    is_interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q_BNH, k_BKH, v_BKH as the kernel computes them, and the gates of the query heads, using torch;
    positions must not be negative. is_interleaved: see DecodeAttention."""
    K, H = num_kv_heads, head_size
    q, k, v = qkv_BX.split((qkv_BX.shape[1] - 2 * K * H, K * H, K * H), dim=1)
    q, k, v = (x.unflatten(1, (-1, H)) for x in (q, k, v))
    gate_BNH = None
    if is_gated:
        q, gate_BNH = q[:, ::2], q[:, 1::2]
    R = angles.shape[1]
    cosine, sine = angles[positions_B.long(), None].chunk(2, dim=-1)
    cosine, sine = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)

    def rotated(x: Tensor, norm_H: Tensor | None, eps: float) -> Tensor:
        if norm_H is not None:
            wide = x.float()
            inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            x = (wide * inverse).mul_(norm_H).to(x.dtype)
        if R == 0:
            return x
        turned = x[..., :R]
        if is_interleaved:
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = (turned * cosine).addcmul_(turned.roll(R // 2, -1), sine).to(x.dtype)
        if is_interleaved:
            turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((turned, x[..., R:]), -1)

    q_norm_H, k_norm_H, eps = norms or (None, None, 0.0)
    return rotated(q, q_norm_H, eps), rotated(k, k_norm_H, eps), v, gate_BNH


def reference(
    qkv_BX: Tensor,
    angles: Tensor,
    cache: LayerCache,
    state: DecodeState,
    norms: Norms | None = None,
    options: AttentionOptions = PLAIN,
    is_gated: bool = False,
    is_interleaved: bool = False,
) -> Tensor:
    """Return o [B, N * H] in float64, row by row; writes the cache as the kernel does."""
    (_, page_tokens, K, H), B = cache.k.shape, len(qkv_BX)
    positions_B = state.positions_B[:B]
    q_BNH, k_BKH, v_BKH, gate_BNH = split_heads(
        qkv_BX, angles, positions_B.clamp(min=0), K, H, norms, is_gated, is_interleaved
    )
    o_BNH = torch.zeros(q_BNH.shape, dtype=torch.float64, device=qkv_BX.device)
    for b, position in enumerate(positions_B.tolist()):
        if position < 0:
            continue
        first = 0 if options.window is None else max(position + 1 - options.window, 0)
        at = torch.arange(first, position + 1, device=qkv_BX.device)
        slots = state.tables_BX[b].long()[at // page_tokens] * page_tokens + at % page_tokens
        k_SKH = _write_and_read(cache.k, cache.k_scales, slots, k_BKH[b])
        v_SKH = _write_and_read(cache.v, cache.v_scales, slots, v_BKH[b])
        q_KLH = q_BNH[b].double().view(K, -1, H)
        scores_KLS, _ = options.scaled(torch.einsum("klh,skh->kls", q_KLH, k_SKH), H)
        weights_KLS = options.softmax(scores_KLS[None, :, :, None])[0, :, :, 0]
        o_BNH[b] = torch.einsum("kls,skh->klh", weights_KLS, v_SKH).reshape(-1, H)
    return (o_BNH if gate_BNH is None else o_BNH * gate_BNH.double().sigmoid()).flatten(1)


def _write_and_read(pages: Tensor, scales: Tensor | None, slots: Tensor, new_KH: Tensor) -> Tensor:
    """Write the new keys or values to the row's last slot and return all of the row's in float64."""
    rows = pages.flatten(0, 1)
    if scales is None:
        rows[slots[-1]] = new_KH
        return rows[slots].double()
    codes, new_scales = to_fp8(new_KH)
    rows.view(torch.uint8)[slots[-1]] = codes.view(torch.uint8)
    pages_S, at_S = slots // pages.shape[1], slots % pages.shape[1]
    scales[pages_S[-1], :, at_S[-1]] = new_scales
    scales_SK = scales[pages_S, :, at_S].double()
    return rows.view(torch.uint8)[slots].view(rows.dtype).double() * scales_SK[..., None]


def supports(
    num_heads: int, num_kv_heads: int, head_size: int, page_tokens: int, rotary_size: int | None = None
) -> bool:
    """True if there is a kernel for this shape. rotary_size: elements of a head that are rotated, its first
    ones; None: all. Any AttentionOptions are supported."""
    group, rest = divmod(num_heads, num_kv_heads)
    max_group = {64: 16, 128: 16, 256: 8}.get(head_size, 0)  # more would not fit into the registers
    turned = head_size if rotary_size is None else rotary_size
    is_rotation = turned % 32 == 0 and 0 <= turned <= head_size
    return rest == 0 and 1 <= group <= max_group and page_tokens % 16 == 0 and is_rotation


class DecodeAttention:
    """The kernels for one shape, compiled on first use, and their workspace. Use one object per stream.

    The workspace has 4 (H + 2) bytes for each of max_rows x max_chunks x N, with N / K rounded up to 8 or 16.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        page_tokens: int,
        kv_dtype: torch.dtype,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        chunk: int | None = None,
        is_gated: bool = False,
        is_interleaved: bool = False,
    ):
        """chunk: used for any number of rows, so that sums have one order; None: chosen from the rows.
        is_gated: each query head of qkv is followed by a gate, whose sigmoid multiplies the head's output.
        is_interleaved: of R rotated elements 2 j and 2 j + 1 form a pair, not j and j + R / 2."""
        assert supports(num_heads, num_kv_heads, head_size, page_tokens) and max_rows <= 2**16
        assert kv_dtype in (torch.bfloat16, torch.float8_e4m3fn)
        self._heads, self._kv_heads, self._head_size = num_heads, num_kv_heads, head_size
        self._page_tokens, self._kv_dtype, self._max_rows = page_tokens, kv_dtype, max_rows
        self._max_pages, self._device, self._chunk, self._is_gated = max_pages, device, chunk, is_gated
        self._is_interleaved = is_interleaved
        self._query_rows = num_heads * (1 + is_gated)
        self._fence = torch.zeros(1, device=device)
        self._max_chunks = -(-max_pages * page_tokens // CHUNK)
        self._columns = -(-(num_heads // num_kv_heads) // 8) * 8  # of mma, for the query heads of a K/V head
        a_row = num_kv_heads * self._max_chunks * self._columns
        # up to 32 rows have H / 16 copies of each maximum (MAXIMA_COPIES)
        words = max_rows * a_row * head_size, 2 * max(max_rows, 2 * head_size) * a_row
        # -1 marks a word as not written; every launch leaves all words so
        self.workspace = torch.full((sum(words),), -1, dtype=torch.int32, device=device)
        self._partials, self._maxima = self.workspace.split(words)
        gpu = torch.cuda.get_device_properties(gpu_of(device))
        self._num_sms = num_sms(device)
        self._shared_bytes = min(gpu.shared_memory_per_multiprocessor, _MULTIPROCESSOR_BYTES)
        self._kernel, self._write = cached_method(self._compile), cached_method(self._compile_write)

    def _compile(self, shape: Shape, variant: Variant):
        stages, shared_bytes = choose_stages(
            self._head_size, self._kv_dtype, shape.ctas_per_sm, self._max_rows, self._shared_bytes
        )
        defines = self._defines(shape.chunk, variant) | {"STAGES": stages, "CTAS": shape.ctas_per_sm}
        defines |= {"FEW_ROWS": 1} if shape.has_few_rows else {}
        defines |= {"VARIABLE": 1} if shape.is_variable else {}
        name = "decode_attention"
        return compiled(f"{name}.cu", name, self._device, defines, shared_bytes=shared_bytes)

    def _compile_write(self, variant: Variant):
        defines = self._defines(CHUNK, variant)
        return compiled("decode_attention_write.cu", "decode_attention_write", self._device, defines)

    def _defines(self, chunk: int, variant: Variant) -> dict[str, int]:
        options = {
            "ROTARY": variant.rotary if variant.rotary != self._head_size else None,
            "INTERLEAVED": (self._is_interleaved and variant.rotary > 0) or None,
            "WINDOW": variant.window or None,
            "SOFTCAP": variant.softcap or None,
            "SINKS": variant.sinks or None,
            "GATED": self._is_gated or None,
        }
        return {
            "H": self._head_size,
            "GROUP": self._heads // self._kv_heads,
            "KV_HEADS": self._kv_heads,
            "PAGE": self._page_tokens,
            "CHUNK": chunk,
            "FP8": int(self._kv_dtype != torch.bfloat16),
            **{name: int(value) for name, value in options.items() if value is not None},
        }

    def attend_together(
        self,
        qkv_BX: Tensor,
        angles: Tensor,
        cache: LayerCache,
        state: DecodeState,
        norms: Norms | None = None,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Like `attend`, for rows that may belong to one sequence: writes all keys and values first."""
        parameters = self._parameters(qkv_BX, angles, cache, state, qkv_BX, norms, options)
        write = self._write(Variant.of(angles.shape[1], options))
        write.launch(grid=len(qkv_BX) * self._kv_heads, block_threads=32, parameters=(parameters,))
        # A torch kernel starts after the previous launch has ended, and attention, which reads pages before
        # it waits, starts after the torch kernel.
        self._fence.zero_()
        return self.attend(qkv_BX, angles, cache, state, norms, options)

    def attend(
        self,
        qkv_BX: Tensor,
        angles: Tensor,
        cache: LayerCache,
        state: DecodeState,
        norms: Norms | None = None,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Return o [B, N * H] of the first B rows; angles fp32 [positions, R]: cosines, then sines, of the R
        elements of a head that are rotated. options: of the layer."""
        B, N, K, H = len(qkv_BX), self._heads, self._kv_heads, self._head_size
        out_BNH = torch.empty(B, N * H, dtype=torch.bfloat16, device=qkv_BX.device)
        parameters = self._parameters(qkv_BX, angles, cache, state, out_BNH, norms, options)
        positions = state.tables_BX.shape[1] * self._page_tokens
        seen = positions if options.window is None else min(positions, options.window)
        shape = self._shape(B, seen)
        kernel = self._kernel(shape, Variant.of(angles.shape[1], options))
        resident = kernel.resident_ctas(_THREADS)
        assert resident > 0
        num_chunks = max_chunks(positions, shape.min_chunk, options.window)
        adding = H // 16 if shape.has_few_rows and num_chunks > 1 else 1  # CTAs that add up a row's head
        # CTAs wait for one another, so all must run at once
        grid = min(self._num_sms * resident, B * K * max(num_chunks, adding))
        kernel.launch(grid=grid, block_threads=_THREADS, parameters=(parameters,))
        return out_BNH

    def set_chunk(self, state: DecodeState, lengths_B: Sequence[int], num_rows: int) -> None:
        """Set chunk_1 for launches of num_rows rows, with windows or not; lengths_B: of those in use."""
        shape = self._shape(num_rows, self._max_pages * self._page_tokens)
        if shape.is_variable:
            state.chunk_1.fill_(shape.best_chunk(lengths_B, self._kv_heads, self._num_sms))

    def _shape(self, num_rows: int, max_positions: int) -> Shape:
        is_fp8 = self._kv_dtype != torch.bfloat16
        return choose_shape(num_rows, self._kv_heads, max_positions, is_fp8, self._num_sms, self._chunk)

    def _parameters(
        self,
        qkv_BX: Tensor,
        angles: Tensor,
        cache: LayerCache,
        state: DecodeState,
        out_BNH: Tensor,
        norms: Norms | None,
        options: AttentionOptions,
    ) -> bytes:
        B, N, K, H = len(qkv_BX), self._heads, self._kv_heads, self._head_size
        assert 1 <= B <= self._max_rows and qkv_BX.shape == (B, (self._query_rows + 2 * K) * H)
        assert angles.dtype == torch.float32 and angles.is_contiguous()
        assert supports(N, K, H, self._page_tokens, angles.shape[1])
        for half in (qkv_BX, out_BNH):
            assert half.dtype == torch.bfloat16 and half.is_contiguous() and half.data_ptr() % 16 == 0
        tables = state.tables_BX
        assert tables.shape[0] >= B and tables.shape[1] <= self._max_pages and tables.stride(1) == 1
        assert state.chunk_1.dtype == torch.int32
        for ints in (state.positions_B, tables):
            assert ints.dtype == torch.int32 and len(ints) >= B and ints.stride(-1) == 1
        q_norm_H, k_norm_H, eps = norms or (None, None, 0.0)
        for norm_H in (q_norm_H, k_norm_H):
            assert norm_H is None or (norm_H.shape == (H,) and norm_H.dtype == torch.float32)
        self._check(cache)
        pointers = addresses(
            qkv_BX,
            angles,
            *(cache.k, cache.v, cache.k_scales, cache.v_scales),
            *(state.positions_B, tables),
            *(q_norm_H, k_norm_H, out_BNH, self._partials, self._maxima, state.chunk_1),
        )
        window, cap, sinks_N = options.window, options.softcap, options.sinks_N
        factor = options.scale_of(H) * _LOG2_E * (1.0 if cap is None else 2.0 / cap)
        numbers = (eps, factor, B, tables.stride(0), self._max_chunks)
        if not Variant.of(H, options).has_options:
            return struct.pack("14Q2f3i4x", *pointers, *numbers)
        assert window is None or window > 0
        assert sinks_N is None or (sinks_N.shape == (N,) and sinks_N.dtype == torch.float32)
        assert sinks_N is None or sinks_N.is_contiguous()
        more = window or 0, (cap or 0.0) * _LOG2_E, *addresses(sinks_N)
        return struct.pack("14Q2f3iif4xQ", *pointers, *numbers, *more)

    def _check(self, cache: LayerCache) -> None:
        shape = (cache.k.shape[0], self._page_tokens, self._kv_heads, self._head_size)
        for pages in (cache.k, cache.v):
            assert pages.shape == shape and pages.dtype == self._kv_dtype and pages.is_contiguous()
            assert pages.data_ptr() % 16 == 0
        for scales in (cache.k_scales, cache.v_scales):
            assert (scales is None) == (self._kv_dtype == torch.bfloat16)
            if scales is not None:
                assert scales.shape == (shape[0], shape[2], shape[1]) and scales.is_contiguous()
                assert scales.dtype == torch.float32 and scales.data_ptr() % 16 == 0
