"""A decoder whose linears are a second copy in another format; all else, adapters too, is the first one's.

What FlashRL does (Liu et al. 2025): the sampler multiplies by weights that were quantized from the
learner's, and the loss corrects for what the two differ by. The copy takes its format's bytes beside
the learner's own.
"""

import copy

from torch import nn

from qerl.formats import FORMATS
from qerl.models.decoder import Decoder
from qerl.models.linear import QuantLinear


def make_sampler_copy(decoder: Decoder, format: str) -> Decoder:
    """Of a decoder that has its adapters: masters and working copies, norms and noise are shared."""
    twin = _copy_module(decoder, format)
    assert isinstance(twin, Decoder)
    return twin


def _copy_module(module: nn.Module, format: str) -> nn.Module:
    if isinstance(module, QuantLinear):
        return _quantized_copy(module, format)
    if not any(isinstance(m, QuantLinear) for m in module.modules()):
        return module
    twin = copy.copy(module)
    twin._modules = {
        name: None if m is None else _copy_module(m, format) for name, m in module._modules.items()
    }
    return twin


def _quantized_copy(linear: QuantLinear, format: str) -> QuantLinear:
    assert linear.weight is not None and linear.full is None
    twin, is_resident = copy.copy(linear), linear.is_resident
    twin.load_weight(FORMATS[format].encode(linear.weight.decode()))
    if is_resident:
        twin.make_resident()
    return twin
