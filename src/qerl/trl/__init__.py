"""GRPOTrainer and GRPOConfig with TRL's interface, over `qerl.train`: change the import of a TRL script.

    from qerl.trl import GRPOConfig, GRPOTrainer

TRL itself is not needed. docs/trl.md lists what each field of GRPOConfig does here.
"""

from qerl.trl.config import GRPOConfig
from qerl.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
