"""Every knob of a run, as frozen dataclasses: made in Python, checked when made, written whole into the run.

The defaults are the recommended run. A recipe (`recipes/`) returns a complete RunConfig; the command line
overrides any field of it. Names such as `loss="dapo"` are looked up once, where the run is assembled.
"""

from qerl.config.algo import AlgoConfig, DeepConfig, MaspoConfig, SapoConfig
from qerl.config.environment import EnvironmentConfig
from qerl.config.noise import ControlConfig, NoiseConfig
from qerl.config.ray import RayConfig
from qerl.config.run import (
    AdapterConfig,
    CheckpointConfig,
    CodeConfig,
    EngineConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)

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
