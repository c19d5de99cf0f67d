"""learn.backward: the numbers whose products give a linear's gradient (kernels/linear/int8_product.py)."""

from typing import Literal

import torch

from qerl.errors import require
from qerl.models.device import best_kernels
from qerl.models.policy_model import PolicyModel


def check_backward(decoder: PolicyModel, backward: Literal["bf16", "int8"]) -> None:
    """Raise UserError for int8 on other devices or with activations that it has no kernels for."""
    if backward == "int8":
        is_hopper = best_kernels(decoder.device) == "hopper"
        require(is_hopper, "learn.backward int8 needs a Hopper GPU (H100, H200): set it to bf16")
        is_bf16 = decoder.compute == torch.bfloat16
        require(is_bf16, "learn.backward int8 needs model.dtype bf16: set one or the other")
