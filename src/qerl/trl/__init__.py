"""TRL's trainers over `qerl train`, `qerl sft` and `qerl dpo`: change the import of a TRL script.

    from qerl.trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
    from qerl.trl import SFTConfig, SFTTrainer

TRL itself is not needed. docs/trl.md lists what each field of the configs does here.
"""

from typing import Any

from qerl.trl.config import DPOConfig, GRPOConfig, KTOConfig, SFTConfig
from qerl.trl.dpo_trainer import DPOTrainer, KTOTrainer
from qerl.trl.grpo_trainer import GRPOTrainer
from qerl.trl.sft_trainer import SFTTrainer

_OTHERS = ("AsyncGRPO", "BCO", "CPO", "Distillation", "GKD", "NashMD", "ORPO", "OnlineDPO")
_TRAINERS = "GRPOTrainer, SFTTrainer, DPOTrainer and KTOTrainer"
_OTHERS += ("PPO", "PRM", "RLOO", "Reward", "XPO")


def __getattr__(name: str) -> Any:
    method = name.removesuffix("Trainer").removesuffix("Config")
    if method != name and method in _OTHERS:
        raise ImportError(f"{name} of TRL is not supported: qerl.trl has {_TRAINERS}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: import it from trl")


__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "SFTConfig",
    "SFTTrainer",
]
