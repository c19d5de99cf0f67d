"""A run's config, and its parts but for the algorithm and the noise."""

import dataclasses
from typing import Literal

from qerl.config.algo import AlgoConfig
from qerl.config.environment import EnvironmentConfig
from qerl.config.noise import NoiseConfig
from qerl.config.ray import RayConfig
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = "smollm2-135m-instruct"
    """A folder with safetensors, a .gguf file, a hub id such as Qwen/Qwen2.5-7B-Instruct, or the built-in
    smollm2-135m-instruct."""

    format: Literal["nvfp4", "mxfp4", "nf4", "fp8", "fp8-flow", "int8", "bf16"] = "nvfp4"
    """What the frozen linear weights are held in. A checkpoint that is already NVFP4 is taken as it is.
    fp8-flow: FP8, and what multiplies them is quantized to FP8 too, in sampling and learning alike."""

    sampler_format: Literal["fp8", "fp8-flow", "int8"] | None = None
    """A second copy of the linear weights for the sampler, quantized from model.format's to this (FlashRL):
    the policies then differ, which algo.importance corrects. None: sampler and learner share one copy."""

    head_format: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """What the LM head is held in, for sampling and learning alike. bf16: in model.dtype, as the embedding,
    whose own table it is if they are tied. fp8 and nvfp4 need a width that is a multiple of 128, nvfp4 also a
    vocabulary that is a multiple of 64."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a CUDA device if there is one."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Activations, and the adapter's working copies. auto: bf16 where the device multiplies it natively."""

    operand: Literal["auto", "packed", "resident"] = "auto"
    """packed: a weight is unpacked for each product. resident: the unpacked operand is kept beside the codes,
    the same numbers, for devices without a fused kernel. auto: resident on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    kind: Literal["lora", "full"] = "lora"
    """lora: low-rank adapters beside frozen weights. full: the targets' weights learn themselves, from fp32
    masters; for model.format bf16. rank and alpha then mean nothing."""

    rank: int = 32
    """LoRA rank R."""

    alpha: float = 32.0
    """The adapter's product is multiplied by alpha / rank."""

    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The linears that learn, by the last part of their name."""

    init_from: str | None = None
    """A PEFT folder to go on from; a KL penalty still measures from the model without an adapter."""

    def __post_init__(self):
        for name in ("rank", "alpha"):
            require(getattr(self, name) > 0, f"adapter.{name} must be positive, got {getattr(self, name)}")
        require(
            len(self.target_modules) > 0, "adapter.target_modules must name at least one linear, got none"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig:
    """Of the reward `code`."""

    credit: Literal["fraction", "all"] = "fraction"
    """fraction: the share of tests that pass. all: 1 if every one passes, else 0."""

    test_timeout_s: float = 4.0
    """A program that takes longer on one test is killed; all tests share 0.8 of task.reward_timeout_s."""

    memory_mb: int = 1024
    """Address space of a program, MiB."""

    max_tests: int = 16
    """Of a row's tests, the first ones are run."""

    def __post_init__(self):
        for name in ("test_timeout_s", "memory_mb", "max_tests"):
            value = getattr(self, name)
            require(value > 0, f"task.code.{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    name: str = "reasoning-gym"
    """reasoning-gym, gsm8k, a .jsonl, .json, .parquet or .csv file, or a hub data set's id."""

    gym: str = "basic_arithmetic"
    """Which of reasoning-gym's tasks."""

    gym_options: tuple[tuple[str, int | float | bool | str], ...] = ()
    """That task's own settings, e.g. (("min_digits", 1), ("max_terms", 2))."""

    template: str = "{question}"
    """The user message; braces name columns. `{question}\\nAnswer with just the number.` for example."""

    system_prompt: str | None = None
    """The system message; None leaves it to the chat template."""

    chat: Literal["all", "messages"] = "all"
    """What a tokenizer's chat template is for. all: a text too, as a user message. messages: a text is given
    to the model as it is, and rewards get texts."""

    prompt_column: str = "prompt"
    """A data set's column with the prompt: a string, or a list of messages."""

    answer_column: str = "answer"
    """A data set's column with the reference answer."""

    split: str = "train"
    """A hub data set's split to learn from."""

    held_out_split: str | None = None
    """A hub data set's split to evaluate on; None keeps the last rows of `split` for it."""

    num_rows: int = 100_000
    """How many problems a procedural task makes, held-out ones included."""

    num_held_out: int = 256
    """How many rows are kept from learning, for evaluation."""

    rewards: tuple[str, ...] = ("numeric",)
    """Built-in names (exact, numeric, math, tags, gym, code, higher_lower), or module:function, or
    file.py:function. One of them may be an environment, a class with reset and step: docs/environments.md."""

    reward_weights: tuple[float, ...] = ()
    """One for each reward; empty means 1 each."""

    reward_timeout_s: float = 10.0
    """A reward that takes longer on one sample, or an environment on one call, is killed and the sample left
    out."""

    reward_workers: int = 2
    """Processes that run rewards."""

    reward_memory_gb: float = 8.0
    """What each of them may map beyond what it began with; more is a MemoryError (on Linux)."""

    code: CodeConfig = CodeConfig()
    """For the reward `code`, which runs a sample's Python against the tests in answer_column."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """For an environment among the rewards."""

    def __post_init__(self):
        require(len(self.rewards) > 0, "task.rewards must name at least one reward, got none")
        for name in ("reward_timeout_s", "reward_workers", "reward_memory_gb", "num_rows"):
            value = getattr(self, name)
            require(value > 0, f"task.{name} must be positive, got {value}")
        weights, rewards = len(self.reward_weights), len(self.rewards)
        require(
            weights in (0, rewards),
            f"task.reward_weights must be one for each of {rewards} rewards, got {weights}",
        )
        require(self.num_held_out >= 0, f"task.num_held_out must not be negative, got {self.num_held_out}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    max_tokens: int = 1024
    """Longest sample, the stop token included; with an environment, all turns and what is said between."""

    temperature: float = 1.0
    """Divides the logits, in sampling and in learning alike."""

    top_k: int | None = None
    """Draw from the k most likely tokens; the learner then sees a policy that was cut."""

    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability."""

    min_p: float | None = None
    """Drop tokens under this fraction of the most likely one's probability."""

    stop: tuple[str, ...] = ()
    """Strings that end a sample."""

    def __post_init__(self):
        require(self.max_tokens > 0, f"sample.max_tokens must be positive, got {self.max_tokens}")
        require(self.temperature > 0, f"sample.temperature must be positive, got {self.temperature}")
        require(self.top_k is None or self.top_k > 0, f"sample.top_k must be positive, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, f"sample.{name} must be in (0, 1], got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    block_size: int = 16
    """Tokens a KV page holds."""

    kv_cache_gb: float | None = None
    """Most memory for KV pages, in 1e9 bytes. None: 1 on a CPU; on a GPU 90 % of what is free once the model
    is loaded and a prefill's working memory set aside: learning has the same memory in its turn."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """What keys and values are kept in: model.dtype, or FP8 with a scale for each token and head."""

    max_num_seqs: int = 128
    """Most samples decoded at once; on a Hopper GPU 256."""

    max_num_batched_tokens: int = 4096
    """Most prompt tokens computed in one forward."""

    decode_steps_per_sync: int | None = None
    """Decode steps between two looks of the host at what was drawn. None: 16 on a GPU, 1 on a CPU."""

    exact: bool = False
    """Compute prompts, samples and the learner's logprobs by one forward of max_running rows, however few
    run, whose bits depend on no other row: the two policies then differ by nothing but noise."""

    def __post_init__(self):
        for name in (
            "block_size",
            "kv_cache_gb",
            "max_num_seqs",
            "max_num_batched_tokens",
            "decode_steps_per_sync",
        ):
            value = getattr(self, name)
            require(value is None or value > 0, f"engine.{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearnConfig:
    learning_rate: float = 1e-5
    """Peak rate of the adapter; the frozen base has none."""

    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"
    """After the warm-up; cosine ends at zero with the last update."""

    warmup_ratio: float = 0.1
    """Share of all updates over which the rate rises linearly from zero."""

    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and second moment."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    max_nonfinite_updates: int = 8
    """An update whose gradient is not finite is skipped; so many in a row end the run."""

    updates_per_step: int = 1
    """Optimizer updates from one step's samples; each takes an equal share of the groups."""

    num_iterations: int = 1
    """How often the step's samples are gone through."""

    max_tokens_per_microbatch: int = 8192
    """Most packed tokens in one forward and backward; the gradient does not depend on it."""

    logprob_chunk_tokens: int = 512
    """Rows of logits that exist at a time."""

    gradient_checkpointing: Literal["auto", "none", "layer", "offload"] = "auto"
    """What is kept for the backward pass. none: all it reads. layer: each layer's input, the rest is computed
    again. offload: the same in the host's memory. auto: the first of them with which learning is planned to
    fit the GPU's memory; on a CPU none."""

    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps the moments in 8 bits; it needs the package bitsandbytes."""

    def __post_init__(self):
        require(self.learning_rate > 0, f"learn.learning_rate must be positive, got {self.learning_rate}")
        require(
            0 <= self.warmup_ratio <= 1,
            f"learn.warmup_ratio must be in [0, 1], got {self.warmup_ratio}",
        )
        require(all(0 <= beta < 1 for beta in self.betas), f"learn.betas must be in [0, 1), got {self.betas}")
        require(self.weight_decay >= 0, f"learn.weight_decay must not be negative, got {self.weight_decay}")
        for name in (
            "updates_per_step",
            "num_iterations",
            "max_tokens_per_microbatch",
            "logprob_chunk_tokens",
            "max_grad_norm",
            "max_nonfinite_updates",
        ):
            value = getattr(self, name)
            require(value > 0, f"learn.{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    num_prompts: int = 256
    """Held-out problems evaluated before and after; 0 skips evaluation."""

    every: int | None = None
    """Also evaluate after every so many steps."""

    success_threshold: float = 1.0
    """A sample counts as right when its reward is at least this."""

    def __post_init__(self):
        require(self.num_prompts >= 0, f"evaluate.num_prompts must not be negative, got {self.num_prompts}")
        require(self.every is None or self.every > 0, f"evaluate.every must be positive, got {self.every}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 10
    """Steps between checkpoints; the last step always makes one."""

    keep: int = 2
    """How many checkpoints stay on the disk."""

    def __post_init__(self):
        require(self.every > 0, f"checkpoint.every must be positive, got {self.every}")
        require(self.keep > 0, f"checkpoint.keep must be positive, got {self.keep}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    out: str = "runs/qerl"
    """The run's folder; the same command continues what it finds there."""

    seed: int = 0
    """Every random number of the run follows from it."""

    num_steps: int = 100
    """Times that samples are drawn and learned from."""

    num_prompts: int = 16
    """Prompts P in a step."""

    num_generations: int = 8
    """Samples G of each prompt."""

    max_mismatch: float | None = None
    """Stop when the mean absolute difference of the sampler's and the learner's logprobs exceeds this."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Where the metrics are shown beside the run's own files. Each needs the package of its name."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    task: TaskConfig = TaskConfig()
    sample: SampleConfig = SampleConfig()
    engine: EngineConfig = EngineConfig()
    noise: NoiseConfig = NoiseConfig()
    algo: AlgoConfig = AlgoConfig()
    learn: LearnConfig = LearnConfig()
    evaluate: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ray: RayConfig = RayConfig()

    def __post_init__(self):
        for name in ("num_steps", "num_prompts"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive, got {value}")
        group = self.num_generations
        require(group >= 2, f"num_generations must be at least 2 to compare within a group, got {group}")
        cuts = [f"sample.{n}" for n in ("top_k", "top_p", "min_p") if getattr(self.sample, n) is not None]
        require(not (self.engine.exact and cuts), f"engine.exact needs every token: unset {', '.join(cuts)}")
        require(
            self.ray.max_staleness == 0 or (self.ray.address is not None and self.algo.importance != "none"),
            "ray.max_staleness needs ray.address, and an algo.importance that corrects for older samples",
        )
        require(
            self.model.sampler_format is None or (self.adapter.kind == "lora" and not self.engine.exact),
            f"model.sampler_format {self.model.sampler_format} needs adapter.kind lora, for the copy is made once, and"
            " engine.exact off, for the two copies differ",
        )
        require(
            self.algo.branching == "none" or (self.noise.scope, self.noise.noise_in) != ("sample", "both"),
            "noise.scope sample with noise_in both needs algo.branching none: the learner computes a branch's"
            " first tokens as its prompt, without the sample's noise",
        )
        require(
            self.algo.branching == "none" or self.ray.address is None,
            "algo.branching deep does not go with ray.address: branches need the pages of their samples",
        )
        noise, updates, buffer = self.noise, self.learn.updates_per_step, self.algo.overlong_buffer
        require(
            not noise.is_steered or noise.control.warmup_steps < self.num_steps,
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

    @property
    def num_noises(self) -> int:
        """Different Z that the samples of one call are drawn under."""
        return {"step": 1, "group": self.num_prompts, "sample": self.num_generations}[self.noise.scope]

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.num_steps * self.learn.updates_per_step * self.learn.num_iterations
