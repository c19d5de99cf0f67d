"""Every setting of a run, as frozen dataclasses that check themselves when they are made.

The defaults are the recommended run. A recipe (`recipes/`) returns a complete RunConfig; the command line
overrides its fields. Values such as `loss_type="dapo"` are looked up once, where the run is built.
"""

from qerl.config.algo import AlgoConfig, DeepConfig, MaspoConfig, SapoConfig
from qerl.config.engine import EngineConfig, SampleConfig
from qerl.config.environment import EnvironmentConfig
from qerl.config.learn import LearnConfig
from qerl.config.model import AdapterConfig, ModelConfig
from qerl.config.noise import ControlConfig, NoiseConfig
from qerl.config.ray import RayConfig
from qerl.config.run import CheckpointConfig, EvalConfig, RunConfig
from qerl.config.task import CodeConfig, TaskConfig

__all__ = [
    "AdapterConfig",
    "AlgoConfig",
    "CheckpointConfig",
    "CodeConfig",
    "ControlConfig",
    "DeepConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LearnConfig",
    "MaspoConfig",
    "ModelConfig",
    "NoiseConfig",
    "RayConfig",
    "RunConfig",
    "SampleConfig",
    "SapoConfig",
    "TaskConfig",
]
