"""TRL's GRPOTrainer and SFTTrainer over `qerl.train` and `qerl sft`: change the import of a TRL script.

    from qerl.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

TRL itself is not needed. docs/trl.md lists what each field of the configs does here.
"""

from qerl.trl.config import GRPOConfig, SFTConfig
from qerl.trl.grpo_trainer import GRPOTrainer
from qerl.trl.sft_trainer import SFTTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"]
