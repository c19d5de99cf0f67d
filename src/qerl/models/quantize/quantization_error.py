"""Measure what quantizing a float checkpoint changes in the model's predictions, on a few hundred tokens.

    KL = mean over tokens of sum over v of p_v log(p_v / q_v)      p: float weights, q: the decoder's
    agreement = share of tokens whose most likely next token is the same

The hidden states of both are carried from layer to layer, and one layer's float tensors are read at a time:
the float model needs the memory of a layer. Embedding, final norm and head are the decoder's in both.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qerl.formats import BF16, PackedWeight
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import read_float
from qerl.models.decoder import Attend, Decoder, Layer, RowContext
from qerl.models.expert_loading import load_experts
from qerl.models.linear import QuantLinear
from qerl.models.mlp import MLP
from qerl.models.quantize.awq import run_sequences

_LOGIT_ROWS = 32
"""Rows of logits at a time: 2 x 20 MB in fp32 for 150,000 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Probe(tokens_T=[1, 4093, 35], start=1): what follows 4093 and what follows 35 is compared."""

    tokens_T: list[int]
    start: int
    """Index of the first token whose successor's prediction is compared."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationError:
    """QuantizationError(kl=0.021, agreement=0.96, num_tokens=256, weight_error=0.095)"""

    kl: float
    """Nats a token."""
    agreement: float
    num_tokens: int
    weight_error: float
    """|W - Q| / |W| over the last linear of each layer, or its experts. Weights rounded before have a
    small one."""


@torch.no_grad()
def quantization_error(
    decoder: Decoder, checkpoint: Checkpoint, probes: Sequence[Probe]
) -> QuantizationError:
    """Compare a loaded decoder, with its adapter, to the float weights of its checkpoint."""
    exact_TD, squares_2 = torch.empty(0), torch.zeros(2, dtype=torch.float64)

    def run_both(layer: Layer, h_TD: Tensor, context: RowContext, layer_index: int, attend: Attend) -> Tensor:
        nonlocal exact_TD
        exact = _float_layer(decoder, checkpoint, layer_index)
        for weights in zip(_last_weights(exact), _last_weights(layer), strict=True):
            squares_2.add_(_squares(*weights))
        exact_TD = exact(h_TD.clone() if layer_index == 0 else exact_TD, context, layer_index, attend)
        return layer(h_TD, context, layer_index, attend)

    hidden_TD = run_sequences(decoder, [probe.tokens_T for probe in probes], run_both)
    rows = compared_rows(probes).to(hidden_TD.device)
    kl, agreement = compare_hidden(decoder, decoder.norm(exact_TD)[rows], hidden_TD[rows])
    weight_error = (squares_2[0] / squares_2[1]).sqrt().item()
    return QuantizationError(kl=kl, agreement=agreement, num_tokens=len(rows), weight_error=weight_error)


def _last_weights(layer: Layer) -> Iterator[PackedWeight]:
    """Yield the weight of the layer's last linear, or that of each expert."""
    if isinstance(layer.mlp, MLP):
        assert layer.mlp.down_proj.weight is not None
        yield layer.mlp.down_proj.weight
        return
    stack = layer.experts[-1].weight
    assert stack is not None
    yield from (stack[index] for index in range(len(stack)))


def _squares(exact: PackedWeight, quantized: PackedWeight) -> Tensor:
    """Return |W - Q|^2 and |W|^2, float64."""
    weight_NK = exact.decode()
    difference_NK = weight_NK - quantized.decode()
    return torch.stack([x.square().sum() for x in (difference_NK, weight_NK)]).double().cpu()


def _float_layer(decoder: Decoder, checkpoint: Checkpoint, index: int) -> Layer:
    """Return a layer with the checkpoint's tensors, linears in bf16, without adapter."""
    prefix = f"model.layers.{index}."
    layer = Layer(decoder.architecture, index, decoder.compute, decoder.device)
    for name, buffer in layer.named_buffers():
        if prefix + name in checkpoint.shapes:  # a norm's noise is not
            buffer.copy_(read_float(checkpoint, prefix + name))
    for name, linear in layer.named_modules():
        if isinstance(linear, QuantLinear):
            weight_NK = read_float(checkpoint, f"{prefix}{name}.weight").to(decoder.device)
            linear.load_weight(BF16.encode(weight_NK))
    for experts in layer.experts:
        load_experts(experts, checkpoint, decoder.architecture, index, "bf16", BF16.encode)
    return layer


def compared_rows(probes: Sequence[Probe]) -> Tensor:
    """Return the indices of the compared rows of the concatenated probes."""
    rows, first = [], 0
    for probe in probes:
        rows += range(first + probe.start, first + len(probe.tokens_T))
        first += len(probe.tokens_T)
    return torch.tensor(rows)


def compare_hidden(decoder: Decoder, exact_TD: Tensor, hidden_TD: Tensor) -> tuple[float, float]:
    """Return KL and agreement."""
    kl, num_agreeing, num_tokens = 0.0, 0, len(exact_TD)
    for exact, hidden in zip(exact_TD.split(_LOGIT_ROWS), hidden_TD.split(_LOGIT_ROWS), strict=True):
        p_TV, q_TV = decoder.logits(exact).log_softmax(-1), decoder.logits(hidden).log_softmax(-1)
        num_agreeing += int((p_TV.argmax(-1) == q_TV.argmax(-1)).sum())
        kl += (p_TV.exp() * (p_TV - q_TV)).sum().item()
    return max(kl / num_tokens, 0.0), num_agreeing / num_tokens
