"""The config of a run."""

import dataclasses
from typing import Annotated, Literal

import tyro

from qerl.config.agent import AgentConfig
from qerl.config.algo import AlgoConfig
from qerl.config.check import check_finite, check_not_negative, check_positive
from qerl.config.distil import DistilConfig
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

    def __post_init__(self):
        check_not_negative(self, "num_prompts", prefix="evaluate.")
        check_positive(self, "every", prefix="evaluate.")


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
    """Set by `qerl sft`, whose options its fields are; empty in a run with rewards."""

    def __post_init__(self):
        check_finite(self)
        check_positive(self, "num_steps", "num_prompts", "rank_timeout_s")
        check_not_negative(self, "seed")
        size, why = self.num_generations, "samples are compared within a group"
        least = 1 if self.distil.is_on else 2
        require(size >= least, f"num_generations must be at least {least} ({why}), got {size}")
        if self.distil.is_on:
            self._check_distil()
        else:
            require(len(self.task.rewards) > 0, "task.rewards must name at least one reward, got none")
        cuts = [f"sample.{n}" for n in ("top_k", "top_p", "min_p") if getattr(self.sample, n) is not None]
        unsupported = f"engine.exact does not support truncated sampling: unset {', '.join(cuts)}"
        require(not (self.engine.exact and cuts), unsupported)
        require(
            self.ray.max_staleness == 0 or (self.ray.address is not None and self.algo.importance != "none"),
            "ray.max_staleness needs ray.address and an algo.importance other than none",
        )
        require(
            self.model.sampler_format is None or (self.adapter.kind == "lora" and not self.engine.exact),
            f"model.sampler_format {self.model.sampler_format} needs adapter.kind lora and engine.exact off",
        )
        require(
            self.algo.branching == "none" or (self.noise.scope, self.noise.noise_in) != ("sample", "both"),
            "noise.scope sample with noise_in both needs algo.branching none: the learner treats a branch's"
            " prefix as prompt, without the sample's noise",
        )
        require(
            self.algo.branching == "none" or self.ray.address is None or self.noise.scope == "step",
            f"noise.scope {self.noise.scope} does not work with algo.branching deep and ray.address, where a"
            " branch's prompt has the tokens before its pivot: set it to step",
        )
        self._check_agent()
        self._check_partial()
        self._check_judge()
        is_plain = not self.rollout.partial and self.algo.branching == "none" and not self.distil.is_on
        require(
            self.rollout.admission == "given" or (is_plain and self.ray.address is None),
            "rollout.admission longest_first does not work with rollout.partial, algo.branching,"
            " distil.teacher or ray.address",
        )
        noise, updates, buffer = self.noise, self.learn.updates_per_step, self.algo.overlong_buffer
        require(
            not noise.is_controlled or noise.control.warmup_steps < self.num_steps,
            f"noise.control.warmup_steps must be under num_steps ({self.num_steps}),"
            f" got {noise.control.warmup_steps}",
        )
        require(
            updates <= self.num_prompts,
            f"learn.updates_per_step must not exceed num_prompts ({self.num_prompts}), got {updates}",
        )
        require(
            self.algo.overlong != "shape" or buffer < self.sample.max_tokens,
            f"algo.overlong_buffer must be under sample.max_tokens ({self.sample.max_tokens}), got {buffer}",
        )

    def _check_agent(self) -> None:
        """Refuse what an agent's episodes, which are sampled request by request, cannot do."""
        if self.agent.function is None:
            return
        most, answer = self.agent.context_tokens, self.sample.max_tokens
        require(answer < most, f"sample.max_tokens must be under agent.context_tokens ({most}), got {answer}")
        for is_set, what in (
            (self.noise.scope != "step", f"noise.scope {self.noise.scope}: set it to step"),
            (self.algo.overlong == "shape", "algo.overlong shape: set it to keep or mask"),
        ):
            require(not is_set, f"an agent does not work with {what}")

    def _check_judge(self) -> None:
        """Refuse what the run's own base model cannot be a judge beside."""
        if self.task.judge.url != "base" or "judge" not in self.task.rewards:
            return
        for is_set, what in (
            (self.ray.address is not None, "--ray: give the URL of an endpoint"),
            (self.algo.branching != "none", f"algo.branching {self.algo.branching}: its KV cache stays open"),
            (self.adapter.kind != "lora", f"adapter.kind {self.adapter.kind}: the base model changes"),
        ):
            require(not is_set, f"task.judge.url base does not work with {what}")

    def _check_partial(self) -> None:
        """Refuse what groups that several steps sample cannot do."""
        if not self.rollout.partial:
            return
        algo, extra = self.algo, self.rollout.extra_prompts
        for is_set, what in (
            (algo.importance == "none", "algo.importance none: older tokens need a correction"),
            (algo.branching != "none", f"algo.branching {algo.branching}"),
            (algo.dynamic_sampling, "algo.dynamic_sampling"),
            (self.agent.function is not None, "an agent"),
            (self.distil.is_on, "distil.teacher"),
            (self.ray.address is not None, "ray.address"),
            (self.noise.scope != "step", f"noise.scope {self.noise.scope}"),
        ):
            require(not is_set, f"rollout.partial does not work with {what}")
        is_exact = self.engine.exact and self.rollout.keep_kv_cache
        require(not is_exact, "rollout.keep_kv_cache does not work with engine.exact")
        got = f"got {extra}" if extra != RolloutConfig().extra_prompts else f"got its default, {extra}"
        most = f"must not exceed num_prompts ({self.num_prompts})"
        require(extra <= self.num_prompts, f"rollout.extra_prompts {most}, {got}")

    def _check_distil(self) -> None:
        algo, distil = self.algo, self.distil
        at_one = self.sample.temperature == 1
        require(self.agent.function is None, "distil.teacher does not work with an agent")
        require(
            self.noise.schedule == "none",
            f"distil.teacher needs noise.schedule none, got {self.noise.schedule}: noise would reach it",
        )
        require(
            algo.branching == "none" and not algo.dynamic_sampling,
            "distil.teacher does not work with algo.branching or dynamic_sampling, which select by reward",
        )
        require(
            distil.is_divergence or algo.loss_type != "gspo",
            "distil.loss policy_gradient has an advantage for each token: set algo.loss_type gspo_token",
        )
        require(
            at_one or not distil.is_endpoint,
            f"an endpoint's logprobs are at temperature 1: set sample.temperature 1,"
            f" got {self.sample.temperature}",
        )

    @property
    def num_noises(self) -> int:
        """Number of different noise draws in one call."""
        return {"step": 1, "group": self.num_prompts, "sample": self.num_generations}[self.noise.scope]

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the whole run."""
        return self.num_steps * self.learn.updates_per_step * self.learn.num_iterations
