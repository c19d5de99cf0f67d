"""A copy of a decoder for the sampler, with linears in another format; everything else is shared.

As in FlashRL (Liu et al. 2025), the sampler multiplies by weights quantized from the learner's, and the loss
corrects for the difference. The copy takes its format's bytes in addition to the learner's.
"""

import copy

from torch import nn

from qerl.formats import FORMATS
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import keeps_tiles
from qerl.models.layer_spec import check_dense
from qerl.models.linear import QuantLinear


def make_sampler_copy(decoder: Decoder, format: str) -> Decoder:
    """Copy a decoder that has its adapters: masters and working copies, norms and noise are shared. Weights
    are put into tiles as the loader does."""
    check_dense(decoder.architecture, f"model.sampler_format {format}")
    duplicate = _copy_module(decoder, format)
    assert isinstance(duplicate, Decoder)
    is_resident = any(linear.is_resident for _, linear in duplicate.linears())
    if not is_resident and keeps_tiles(decoder.compute, decoder.device):
        for layer in duplicate.layers:
            assert isinstance(layer, Layer)
            layer.tile()
    return duplicate


def _copy_module(module: nn.Module, format: str) -> nn.Module:
    if isinstance(module, QuantLinear):
        assert module.weight is not None and module.full is None
        linear, is_resident = copy.copy(module), module.is_resident
        linear.load_weight(FORMATS[format].encode(module.weight.decode()))
        if is_resident:
            linear.make_resident()
        return linear
    if not any(isinstance(m, QuantLinear) for m in module.modules()):
        return module
    duplicate = copy.copy(module)
    duplicate._modules = {
        name: None if m is None else _copy_module(m, format) for name, m in module._modules.items()
    }
    return duplicate
