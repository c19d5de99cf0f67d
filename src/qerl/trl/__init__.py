"""TRL's GRPOTrainer and SFTTrainer over `qerl.train` and `qerl sft`: change the import of a TRL script.

    from qerl.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

TRL itself is not needed. docs/trl.md lists what each field of the configs does here.
"""

from typing import Any

from qerl.trl.config import GRPOConfig, SFTConfig
from qerl.trl.grpo_trainer import GRPOTrainer
from qerl.trl.sft_trainer import SFTTrainer

_OTHERS = ("AsyncGRPO", "BCO", "CPO", "DPO", "Distillation", "GKD", "KTO", "NashMD", "ORPO", "OnlineDPO")
_OTHERS += ("PPO", "PRM", "RLOO", "Reward", "XPO")


def __getattr__(name: str) -> Any:
    method = name.removesuffix("Trainer").removesuffix("Config")
    if method != name and method in _OTHERS:
        raise ImportError(f"{name} of TRL is not supported: qerl.trl has GRPOTrainer and SFTTrainer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: import it from trl")


__all__ = ["GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"]
