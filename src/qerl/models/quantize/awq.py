"""Activation-aware quantization (AWQ, arXiv 2306.00978): channels with large inputs are quantized more
finely.

    y = W x = (W diag(s)) (diag(1 / s) x)        s_k = m_k^alpha / sqrt(max m^alpha * min m^alpha)

m_k is the mean |x_k| over a text. diag(1 / s) is folded into the module that makes x, so only weights change:

    q | k | v    into the norm before them          gate | up    into the norm before them
    o            into v's rows; heads that share a v head (GQA) share s too, with the mean of their m
    down         into up's rows

The norm's weight is stored in bfloat16: s is recomputed from the rounded weight, so that the two still
cancel. Nothing is folded where linears read the residual stream without a norm, nor into the gated norm of
Gated DeltaNet.

alpha is the value among 0, 1/20, ... 1 that minimizes the sum over the linears of
|W x - Q(W diag(s)) diag(1 / s) x|^2 over rows x of the text. alpha 0 gives s = 1, plain rounding, so the
search never increases a group's error. Each group is searched alone, with the original model's inputs;
folding the factors of o and down rescales rows of v and up, and the block scales follow. AWQ's clipping is
`least_squares` here.

A ScaledCheckpoint is a Checkpoint: it is read, quantized and written like any other.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.algo.batches import batches
from qerl.errors import UserError
from qerl.formats import PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import linear_groups, read_float
from qerl.models.decoder import Decoder, RunLayer, run_layer
from qerl.models.layer_spec import check_dense, layer_specs
from qerl.models.quantize.calibration import pack_groups

NUM_ALPHAS = 20
NUM_ERROR_ROWS = 512
"""Number of input rows per group on which errors are measured; the means are over all rows."""
BATCH_TOKENS = 4096

Encode = Callable[[list[Tensor]], list[PackedWeight]]
"""Encode the weights of linears that read the same input."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearInputs:
    """Inputs of a group of linears: mean |x| [K] over a text, and some rows [S, K]; fp32."""

    mean_K: Tensor
    rows_SK: Tensor


@torch.no_grad()
def collect_inputs(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> dict[str, LinearInputs]:
    """Run the decoder over a text and return each group's inputs by the name of the group's first linear
    (q_proj, o_proj, gate_proj and down_proj of every layer). The sampled rows are spread evenly over the
    text."""
    num_tokens = sum(map(len, sequences))
    if num_tokens == 0:
        raise UserError("the calibration text is empty")
    every = max(1, num_tokens // NUM_ERROR_ROWS)
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    seen = 0

    def recorder(name: str) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            x_TK = arguments[0].float()
            sums[name] = sums.get(name, torch.zeros_like(x_TK[0])) + x_TK.abs().sum(0)
            rows.setdefault(name, []).append(x_TK[-seen % every :: every].clone())

        return hook

    firsts = [group[0].removeprefix("model.") for group in linear_groups(decoder.architecture)]
    hooks = [
        linear.register_forward_pre_hook(recorder(f"model.{name}"))
        for name, linear in decoder.linears()
        if name in firsts
    ]
    try:
        for batch in batches(sequences, len, BATCH_TOKENS):
            run_sequences(decoder, batch)
            seen += sum(map(len, batch))
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: LinearInputs(sums[name] / num_tokens, torch.cat(rows[name])[:NUM_ERROR_ROWS]) for name in sums
    }


def run_sequences(
    decoder: Decoder, sequences: Sequence[Sequence[int]], run_layer: RunLayer = run_layer
) -> Tensor:
    """Return hidden_TD of the concatenated sequences; `run_layer` calls each layer."""
    groups = ((list(tokens), []) for tokens in sequences)
    rows = pack_groups(groups, max_tokens=sum(map(len, sequences)), device=decoder.device)
    return decoder(rows.tokens_T, rows.positions_T, rows.attend, run_layer, recur=rows.recur)


def awq(
    checkpoint: Checkpoint, architecture: Architecture, inputs: dict[str, LinearInputs], encode: Encode
) -> "ScaledCheckpoint":
    """Return the checkpoint with the factors folded in that minimize this encoding's error."""
    check_dense(architecture, "AWQ")
    factors: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for layer_index, layer in enumerate(layer_specs(architecture)):
        at = f"model.layers.{layer_index}"
        for spec in layer.groups:
            if spec.input_from is None:
                continue
            group, before = [f"{at}.{x.name}" for x in spec.linears], f"{at}.{spec.input_from}"
            mean_K, rows_SK, is_o = inputs[group[0]].mean_K, inputs[group[0]].rows_SK, spec is layer.o
            mean_K = _mean_over_shared_heads(mean_K, architecture) if is_o else mean_K
            weights = [read_float(checkpoint, f"{linear}.weight").to(mean_K.device) for linear in group]
            s_K = search_scales(weights, mean_K, rows_SK, encode).cpu()
            if spec.input_from in layer.norm_widths:
                s_K = _exact_in_bf16(read_float(checkpoint, f"{before}.weight").float(), s_K)
            for linear in group:
                factors[f"{linear}.weight"] = (factors.get(f"{linear}.weight", (None, None))[0], s_K)
            shared = s_K
            if is_o:
                shared = s_K.view(architecture.num_kv_heads, -1, architecture.head_size)[:, 0].reshape(-1)
            for name in (f"{before}.weight", f"{before}.bias"):
                factors[name] = (1 / shared, factors.get(name, (None, None))[1])
    return ScaledCheckpoint(checkpoint, factors)


def search_scales(weights: list[Tensor], mean_K: Tensor, rows_SK: Tensor, encode: Encode) -> Tensor:
    """Return s [K] of the best alpha, fp32."""
    best, lowest = torch.ones_like(mean_K), math.inf
    for step in range(NUM_ALPHAS + 1):
        s_K = channel_scales(mean_K, step / NUM_ALPHAS)
        packed = encode([weight.float() * s_K for weight in weights])
        error = sum(
            ((p.decode() / s_K - weight.float()) @ rows_SK.T).square().sum().item()
            for p, weight in zip(packed, weights, strict=True)
        )
        if error < lowest:
            best, lowest = s_K, error
    return best


def channel_scales(mean_K: Tensor, alpha: float) -> Tensor:
    powers = mean_K.clamp(min=1e-4 * mean_K.max().item() or 1.0).pow(alpha)
    return powers / (powers.max() * powers.min()).sqrt()


def _exact_in_bf16(norm_K: Tensor, s_K: Tensor) -> Tensor:
    """Return the factors nearest to s that divide the norm's weight exactly in bfloat16."""
    divided = (norm_K / s_K).bfloat16().float()
    return torch.where(divided == 0, torch.ones_like(s_K), norm_K / divided)


def _mean_over_shared_heads(mean_NH: Tensor, a: Architecture) -> Tensor:
    """Average over the query heads that share a v head."""
    by_head = mean_NH.view(a.num_kv_heads, -1, a.head_size)
    return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)


class ScaledCheckpoint:
    """A checkpoint whose tensors' rows and columns are multiplied by fp32 factors as they are read."""

    def __init__(self, checkpoint: Checkpoint, factors: dict[str, tuple[Tensor | None, Tensor | None]]):
        self.path: Path = checkpoint.path
        self.config: dict[str, Any] = checkpoint.config
        self.shapes: dict[str, tuple[int, ...]] = checkpoint.shapes
        self._checkpoint, self._factors = checkpoint, factors

    def read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        if name not in self._factors:
            return tensor
        # float32: rounding to the file's 16 bits would change what the model computes
        rows_N, columns_K = self.rows(name), self.columns(name)
        return tensor.float() * (rows_N if tensor.dim() == 1 else rows_N[:, None] * columns_K)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self.read(name)[rows]

    def rows(self, name: str) -> Tensor:
        """Return the factor of each row, or of each element of a vector."""
        return self._of(name, 0)

    def columns(self, name: str) -> Tensor:
        return self._of(name, 1)

    def _of(self, name: str, axis: int) -> Tensor:
        factors, shape = self._factors.get(name, (None, None))[axis], self.shapes[name]
        return torch.ones(shape[min(axis, len(shape) - 1)]) if factors is None else factors
