"""The gated delta rule: linear attention whose state is a matrix, over packed sequences or one token a row.

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T          a_t = exp(log_decay_t), b_t = beta_t
    o_t = S_t^T q_t / sqrt(H)                                          q, k divided by their lengths first

Value head n has the queries and keys of head n * K // N. The state is fp32 [N, H, V], one a sequence; each
sequence starts from the state that is given and returns the one after its last token. With a state of zeros
before the first token, the split of a sequence into calls makes no difference but rounding.

Within a chunk of C tokens with L_i = log_decay_1 + ... + log_decay_i, all updates are one triangular solve:

    A_ij = b_i k_i.k_j exp(L_i - L_j), j < i      u = (1 + A)^-1 (b v)      w = (1 + A)^-1 (b exp(L) k)
    d = u - w S                   o_i = exp(L_i) q_i S + sum_{j <= i} q_i.k_j exp(L_i - L_j) d_j
    S' = exp(L_C) S + sum_j exp(L_C - L_j) k_j d_j^T

The chunks of all sequences are solved together; only the last two lines go from chunk to chunk. fp32 inside.
On a GPU one launch computes it for bf16 and H = V = 128 (gated_delta_chunks.py); the gradients are those of
PyTorch's operations, and so are the values for other sizes. Source: Yang et al. 2024, Gated Delta Networks.
Letters: T tokens, K key heads, N value heads, H and V sizes, S sequences, C tokens of a chunk, M chunks.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.kernels.delta_net import gated_delta_chunks
from qerl.kernels.pointwise.recomputed import recomputed
from qerl.kernels.runtime.gpu_memory import sent

CASES = (  # K, N, H, V, lengths of the sequences
    (1, 1, 4, 4, (1,)),
    (2, 4, 8, 16, (5, 1, 9)),
    (2, 2, 16, 8, (64, 65, 0, 63, 128)),
    (1, 3, 32, 32, (200, 3, 70)),
)
CHUNK = 64
_EPS = 1e-6  # under the root of a query's or key's length


def reference(
    q_TKH: Tensor,
    k_TKH: Tensor,
    v_TNV: Tensor,
    log_decay_TN: Tensor,
    beta_TN: Tensor,
    lengths: Sequence[int],
    state_SNHV: Tensor,
) -> tuple[Tensor, Tensor]:
    """The definition in float64, token by token; differentiable."""
    group = v_TNV.shape[1] // k_TKH.shape[1]
    q_TNH, k_TNH = (_unit(x.double()).repeat_interleave(group, 1) for x in (q_TKH, k_TKH))
    v_TNV, decay_TN, beta_TN = v_TNV.double(), log_decay_TN.double().exp(), beta_TN.double()
    outputs, states, start = [], [], 0
    for length, S in zip(lengths, state_SNHV.double(), strict=True):
        for t in range(start, start + length):
            S = S * decay_TN[t, :, None, None]
            missing_NV = beta_TN[t, :, None] * (v_TNV[t] - torch.einsum("nhv,nh->nv", S, k_TNH[t]))
            S = S + k_TNH[t, :, :, None] * missing_NV[:, None]
            outputs.append(torch.einsum("nhv,nh->nv", S, q_TNH[t]) * q_TNH.shape[-1] ** -0.5)
        start += length
        states.append(S)
    return torch.stack(outputs), torch.stack(states)


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Consecutive rows of packed sequences, cut into chunks; computed once and used by every layer."""

    lengths: tuple[int, ...]
    ends: Tensor
    """0 and the row after each sequence, int64 [S + 1]."""
    rows_MC: Tensor
    """Row of each chunk's tokens, T in place of none: first chunks, the longest sequence's first, then second
    chunks, ..."""
    places_T: Tensor
    """Index of each row in rows_MC, flattened."""
    order_S: Tensor
    """Sequences, the longest first."""
    num_chunks: tuple[int, ...]
    """Number of sequences that have a first chunk, a second, ..."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", chunk_tokens: int = CHUNK
    ) -> "SequenceLayout":
        C, T = chunk_tokens, sum(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        rows, num_chunks = [], []
        for first in range(0, max(lengths, default=0), C):
            present = [s for s in order if lengths[s] > first]
            starts = ends[present] + first
            rows_SC = starts[:, None] + torch.arange(C)
            rows.append(rows_SC.where(rows_SC < ends[1:][present][:, None], T))
            num_chunks.append(len(present))
        rows_MC = torch.cat(rows) if rows else torch.empty(0, C, dtype=torch.long)
        places_T = torch.empty(T + 1, dtype=torch.long)
        places_T[rows_MC.flatten()] = torch.arange(rows_MC.numel())
        return cls(
            lengths=tuple(lengths),
            ends=sent(ends, device),
            rows_MC=sent(rows_MC, device),
            places_T=sent(places_T[:T], device),
            order_S=sent(torch.tensor(order, dtype=torch.long), device),
            num_chunks=tuple(num_chunks),
        )


def gated_delta(
    q_TKH: Tensor,
    k_TKH: Tensor,
    v_TNV: Tensor,
    log_decay_TN: Tensor,
    beta_TN: Tensor,
    layout: SequenceLayout,
    state_SNHV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (o_TNV in v's dtype, fp32 states after the sequences); differentiable in every tensor."""
    _check(q_TKH, k_TKH, v_TNV, log_decay_TN, beta_TN, state_SNHV)
    assert len(v_TNV) == len(layout.places_T) and len(state_SNHV) == len(layout.lengths)
    if gated_delta_chunks.takes(q_TKH, k_TKH, v_TNV, state_SNHV):
        o_TNV, after_SNHV = recomputed(
            lambda q, k, v, log_decay, beta, state: gated_delta_chunks.gated_delta_chunks(
                q, k, v, log_decay, beta, layout.ends, state
            ),
            lambda q, k, v, log_decay, beta, state: _chunked(q, k, v, log_decay, beta, layout, state),
            *(q_TKH, k_TKH, v_TNV, log_decay_TN, beta_TN, state_SNHV),
        )
        return o_TNV, after_SNHV
    return _chunked(q_TKH, k_TKH, v_TNV, log_decay_TN, beta_TN, layout, state_SNHV)


def gated_delta_step(
    q_BKH: Tensor, k_BKH: Tensor, v_BNV: Tensor, log_decay_BN: Tensor, beta_BN: Tensor, state_BNHV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o_BNV, fp32 states) after one token of each of B sequences."""
    _check(q_BKH, k_BKH, v_BNV, log_decay_BN, beta_BN, state_BNHV)
    group = v_BNV.shape[1] // k_BKH.shape[1]
    q_BNH, k_BNH = (_unit(x.float()).repeat_interleave(group, 1) for x in (q_BKH, k_BKH))
    state_BNHV = state_BNHV * log_decay_BN.float().exp()[..., None, None]
    known_BNV = (state_BNHV * k_BNH[..., None]).sum(2)
    missing_BNV = (v_BNV.float() - known_BNV) * beta_BN.float()[..., None]
    state_BNHV = torch.addcmul(state_BNHV, k_BNH[..., None], missing_BNV[:, :, None])
    o_BNV = (state_BNHV * q_BNH[..., None]).sum(2) * q_BNH.shape[2] ** -0.5
    return o_BNV.to(v_BNV.dtype), state_BNHV


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> None:
    (T, K, H), (N, V) = k.shape, v.shape[1:]
    assert q.shape == k.shape and v.shape == (T, N, V) and N % K == 0, (q.shape, k.shape, v.shape)
    assert log_decay.shape == beta.shape == (T, N), (log_decay.shape, beta.shape)
    assert state.shape[1:] == (N, H, V) and state.dtype == torch.float32, (state.shape, state.dtype)


def _unit(x: Tensor) -> Tensor:
    """Divide vectors by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _chunked(q_TKH, k_TKH, v_TNV, log_decay_TN, beta_TN, layout: SequenceLayout, state_SNHV):
    group = v_TNV.shape[1] // k_TKH.shape[1]
    q_MKCH, k_MKCH, v_MNCV = (_chunks(x, layout) for x in (q_TKH, k_TKH, v_TNV))
    q_MKCH, k_MKCH = _unit(q_MKCH) * q_MKCH.shape[-1] ** -0.5, _unit(k_MKCH)
    beta_MNC1 = _chunks(beta_TN[..., None], layout)
    log_MNC1 = _chunks(log_decay_TN[..., None], layout).cumsum(2)
    is_later_CC = torch.ones(2 * (log_MNC1.shape[2],), dtype=torch.bool, device=v_TNV.device).triu(1)
    decay_MNCC = (log_MNC1 - log_MNC1.mT).masked_fill(is_later_CC, -torch.inf).exp()
    among_keys_MNCC = (k_MKCH @ k_MKCH.mT).repeat_interleave(group, 1) * decay_MNCC * beta_MNC1
    seen_MNCC = (q_MKCH @ k_MKCH.mT).repeat_interleave(group, 1) * decay_MNCC
    q_MNCH, k_MNCH = (x.repeat_interleave(group, 1) for x in (q_MKCH, k_MKCH))
    grown_MNC1 = log_MNC1.exp()
    wanted = torch.cat((v_MNCV, k_MNCH * grown_MNC1), -1) * beta_MNC1
    solved = torch.linalg.solve_triangular(among_keys_MNCC, wanted, upper=False, unitriangular=True)
    u_MNCV, w_MNCH = solved.split((v_MNCV.shape[-1], k_MNCH.shape[-1]), -1)
    last_MN11 = log_MNC1[:, :, -1:]
    q_MNCH = q_MNCH * grown_MNC1
    k_MNHC = (k_MNCH * (last_MN11 - log_MNC1).exp()).mT
    scan = u_MNCV, w_MNCH, q_MNCH, k_MNHC, seen_MNCC, last_MN11.exp()

    S, outputs, left, first = state_SNHV[layout.order_S], [], [], 0
    for count in layout.num_chunks:
        u, w, q, k, seen, decay = (x[first : first + count] for x in scan)
        left.append(S[count:])  # of sequences that end before this chunk
        S = S[:count]
        d = u - w @ S
        outputs.append(q @ S + seen @ d)
        S = S * decay + k @ d
        first += count
    states = torch.cat([S, *left[::-1]])[layout.order_S.argsort()]
    o_PNV = torch.cat(outputs).transpose(1, 2).flatten(0, 1) if outputs else v_TNV
    return o_PNV[layout.places_T].to(v_TNV.dtype), states


def _chunks(x_TNH: Tensor, layout: SequenceLayout) -> Tensor:
    """Return x's rows chunk by chunk, fp32 [M, N, C, H], zero after a sequence's end."""
    padded = torch.cat((x_TNH.float(), x_TNH.new_zeros(1, *x_TNH.shape[1:], dtype=torch.float32)))
    return padded[layout.rows_MC].transpose(1, 2)
