"""Load a run's policy in float32."""

from pathlib import Path

import torch

from qerl.config import RunConfig
from qerl.learner import checkpoint
from qerl.models.checkpoint.source import locate
from qerl.models.decoder import Decoder
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import add_adapter, load_adapter


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
