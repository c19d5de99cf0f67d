"""Every setting of a run, as frozen dataclasses that check themselves when they are made.

The defaults are the recommended run. A recipe (`recipes/`) returns a complete RunConfig; the command line
overrides its fields. Values such as `loss_type="dapo"` are looked up once, where the run is built.
"""

from qerl.config.agent import AgentConfig
from qerl.config.algo import AlgoConfig, DeepConfig, MaspoConfig, SapoConfig
from qerl.config.distil import DistilConfig
from qerl.config.dpo import DpoConfig
from qerl.config.engine import EngineConfig, SampleConfig
from qerl.config.judge import JudgeConfig, RewardModelConfig
from qerl.config.learn import LearnConfig
from qerl.config.model import AdapterConfig, ModelConfig
from qerl.config.noise import ControlConfig, NoiseConfig
from qerl.config.rollout import RolloutConfig
from qerl.config.run import CheckpointConfig, EvalConfig, RayConfig, RunConfig, SamplesConfig
from qerl.config.sft import SftConfig
from qerl.config.task import CodeConfig, EnvironmentConfig, TaskConfig
