"""learn.backward: the numbers whose products give a linear's gradient (kernels/linear/int8_product.py)."""

import torch

from qerl.config import RunConfig
from qerl.errors import require
from qerl.models.device import best_kernels
from qerl.models.policy_model import PolicyModel


def check_backward(decoder: PolicyModel, config: RunConfig) -> None:
    """Raise UserError for int8 on other devices or with weights or activations that it has no kernels for."""
    if config.learn.backward == "int8":
        is_hopper = best_kernels(decoder.device) == "hopper"
        require(is_hopper, "learn.backward int8 needs a Hopper GPU (H100, H200): set it to bf16")
        is_bf16 = decoder.compute == torch.bfloat16
        require(is_bf16, "learn.backward int8 needs model.dtype bf16: set one or the other")
        has_own = config.model.format == "fp8-flow"
        require(not has_own, "model.format fp8-flow has its own backward pass: set learn.backward to bf16")
        is_fused = config.adapter.kind == "lora" and config.adapter.dropout == 0
        require(is_fused, "learn.backward int8 needs adapter.kind lora and adapter.dropout 0: set it to bf16")
