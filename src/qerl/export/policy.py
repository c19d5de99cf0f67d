"""Load a run's policy in float32, and merge the adapter into a weight."""

from pathlib import Path

import torch
from torch import Tensor

from qerl.config import RunConfig
from qerl.learner import checkpoint
from qerl.models.adapter import add_adapter, load_adapter
from qerl.models.decoder import Decoder
from qerl.models.linear import QuantLinear
from qerl.models.loader import build_decoder
from qerl.models.source import locate


def load_fp32_policy(run: Path, config: RunConfig, device: torch.device) -> Decoder:
    """Load the run's model, in the run's format, with the adapter of its newest checkpoint."""
    learned = checkpoint.latest_adapter(run / "checkpoints")
    decoder = build_decoder(
        locate(config.model.path).open(),
        format=config.model.format,
        compute=torch.float32,
        device=device,
        resident=False,
    )
    add_adapter(decoder, config.adapter, seed=config.seed)
    load_adapter(decoder, learned)
    return decoder


def merged_weight(linear: QuantLinear) -> Tensor:
    """Return W + scaling * B @ A, float64 [N, K], from the frozen weight and the fp32 masters."""
    if linear.full is not None:
        return linear.full.detach().double()
    assert linear.weight is not None
    weight_NK = linear.weight.operand(torch.float32).double() * linear.weight.alpha.double().reshape(-1, 1)
    if linear.lora_A is not None:
        weight_NK += linear.scaling * (linear.lora_B.detach().double() @ linear.lora_A.detach().double())
    return weight_NK
