"""The config of a run."""

import dataclasses
from typing import Annotated, Literal

import tyro

from qerl.config.agent import AgentConfig
from qerl.config.algo import AlgoConfig
from qerl.config.bounds import MAX_SAMPLES
from qerl.config.check import check_not_negative, check_numbers, check_positive
from qerl.config.conflicts import check_conflicts
from qerl.config.distil import DistilConfig
from qerl.config.dpo import DpoConfig
from qerl.config.engine import EngineConfig, SampleConfig
from qerl.config.learn import LearnConfig
from qerl.config.model import AdapterConfig, ModelConfig
from qerl.config.noise import NoiseConfig
from qerl.config.rollout import RolloutConfig
from qerl.config.sft import SftConfig
from qerl.config.task import TaskConfig
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    num_prompts: int = 256
    """Number of held-out problems to evaluate before and after training; 0 skips evaluation."""

    every: int | None = None
    """Steps between evaluations during training; None: only before and after it."""

    success_threshold: float | None = None
    """A sample is correct if its reward is at least this. None: 1 for built-in rewards; own ones then have
    no accuracy, only their mean."""

    float: bool = False
    """Before training, also evaluate the model with its weights as loaded, in BF16, on up to 256 of the
    held-out problems: what quantization costs."""

    def __post_init__(self):
        check_not_negative(self, "num_prompts", prefix="evaluate.")
        check_positive(self, "every", prefix="evaluate.")
        check_conflicts(self, "evaluate")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 10
    """Steps between checkpoints; the last step always writes one."""

    keep: int = 2
    """Number of checkpoints to keep."""

    def __post_init__(self):
        check_positive(self, "every", "keep", prefix="checkpoint.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplesConfig:
    """The record of samples in the run's folder: samples.jsonl, and older steps compressed in samples/."""

    keep_steps: int | None = None
    """Keep the samples of at least this many of the newest steps and remove older files; None: keep all."""

    keep_mb: int | None = None
    """Keep about this many megabytes of compressed samples and remove older files; None: keep all."""

    def __post_init__(self):
        check_positive(self, "keep_steps", "keep_mb", prefix="samples.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """Sampling by Ray workers."""

    address: str | None = None
    """Address of a Ray cluster whose workers sample: HOST:PORT, auto, or local to start one here. None: the
    learner's process samples."""

    num_samplers: int = 1
    """Number of workers, each with its own GPU if the model is on one."""

    max_staleness: int = 0
    """Number of steps that workers sample ahead, and so of versions by which their policy is older."""

    def __post_init__(self):
        check_positive(self, "num_samplers", prefix="ray.")
        check_not_negative(self, "max_staleness", prefix="ray.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    out: str = "runs/qerl"
    """The run's folder; the same command resumes what it finds there."""

    run_name: str | None = None
    """Name of the run in wandb, mlflow and trackio; None: the folder's name."""

    seed: int = 0
    """Seed of every random number of the run."""

    num_steps: int = 100
    """Number of steps: sample, then learn."""

    num_prompts: int = 16
    """Number of prompts P per step."""

    num_generations: int = 8
    """Number of samples G per prompt."""

    rank_timeout_s: float = 600.0
    """With torchrun: a rank that is frozen for this long is lost; the others save the last step and end. A
    rank that runs is not lost, however long its step takes."""

    max_mismatch: float | None = None
    """Stop if the mean absolute difference of the sampler's and the learner's logprobs exceeds this, in
    nats."""

    accept_changes: bool = False
    """Resume although a reward's source or the rows have changed since the run began (run.json records from
    which step on), or start again although the run's checkpoints are gone."""

    strict: bool = False
    """Stop with an error, not a notice, if rows or a part of the checkpoint are not used as they are."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Loggers of metrics besides the run's own files. Each needs the package of its name."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    task: TaskConfig = TaskConfig()
    agent: AgentConfig = AgentConfig()
    sample: SampleConfig = SampleConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    noise: NoiseConfig = NoiseConfig()
    algo: AlgoConfig = AlgoConfig()
    learn: LearnConfig = LearnConfig()
    evaluate: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples: SamplesConfig = SamplesConfig()
    ray: RayConfig = RayConfig()
    distil: DistilConfig = DistilConfig()
    sft: Annotated[SftConfig, tyro.conf.Suppress] = SftConfig()
    """Set by `qerl sft` and `qerl dpo`, whose options its fields are; empty in a run with rewards."""
    dpo: Annotated[DpoConfig, tyro.conf.Suppress] = DpoConfig()
    """Set by `qerl dpo`."""

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "num_steps", "num_prompts", "rank_timeout_s")
        check_not_negative(self, "seed")
        size, why = self.num_generations, "samples are compared within a group"
        minimum = 1 if self.distil.is_on or self.sft.data else 2
        require(size >= minimum, f"num_generations must be at least {minimum} ({why}), got {size}")
        has_reward = self.distil.is_on or len(self.task.rewards) > 0
        require(has_reward, "task.rewards must name at least one reward, got none")
        check_conflicts(self)
        self._check_limits()

    def _check_limits(self) -> None:
        """Check numbers that others limit."""
        extra, excess = self.rollout.extra_prompts, f"must not exceed num_prompts ({self.num_prompts})"
        is_default = extra == RolloutConfig().extra_prompts
        require(
            not self.rollout.partial or extra <= self.num_prompts,
            f"rollout.extra_prompts {excess}, got {'its default, ' if is_default else ''}{extra}",
        )
        context, answer = self.agent.context_tokens, self.sample.max_tokens
        require(
            self.agent.function is None or answer < context,
            f"sample.max_tokens must be under agent.context_tokens ({context}), got {answer}",
        )
        warmup, updates = self.noise.control.warmup_steps, self.learn.updates_per_step
        require(
            not self.noise.is_controlled or warmup < self.num_steps,
            f"noise.control.warmup_steps must be under num_steps ({self.num_steps}), got {warmup}",
        )
        samples = self.num_prompts * self.num_generations
        require(
            samples <= MAX_SAMPLES,
            f"num_prompts * num_generations must be at most {MAX_SAMPLES:,} samples a step, got {samples:,}",
        )
        excess = f"must not exceed num_prompts * num_generations ({samples})"
        require(updates <= samples, f"learn.updates_per_step {excess}, got {updates}")
        buffer = self.algo.overlong_buffer
        require(
            self.algo.overlong != "shape" or buffer < answer,
            f"algo.overlong_buffer must be under sample.max_tokens ({answer}), got {buffer}",
        )

    @property
    def num_noises(self) -> int:
        """Number of different noise draws in one call."""
        return {"step": 1, "group": self.num_prompts, "sample": self.num_generations}[self.noise.scope]

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the whole run."""
        return self.num_steps * self.learn.updates_per_step * self.learn.num_iterations
