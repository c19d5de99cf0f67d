"""What the commands other than train and bench can be told."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

import tyro

from qerl.config import ModelConfig, RunConfig, TaskConfig
from qerl.config.counts import check_counts
from qerl.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    with_adapter: bool = True
    """Of a run: with what it learned (its newest checkpoint), or without."""

    num_prompts: int | None = None
    """Problems to try, the first ones; None takes all."""

    num_samples: int = 4
    """Samples of each problem at the temperature; of named sets 16."""

    temperature: float = 1.0
    """Divides the logits; of named sets 0.6. The greedy figure is always given too."""

    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability; of named sets 0.95."""

    max_tokens: int = 1024
    """Longest sample; of named sets 4096."""

    template: str | None = None
    """Of named sets: the user message in place of the set's own, as task.template."""

    out: Path | None = None
    """Folder of the results; by default eval in the run's folder, for a model runs/eval."""

    seed: int = 0
    """Names the random numbers of the samples, and the problems of a procedural task."""

    success_threshold: float = 1.0
    """A sample counts as right when its reward is at least this."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()

    def __post_init__(self):
        prompts = () if self.num_prompts is None else (self.num_prompts,)
        check_counts(num_prompts=prompts, num_samples=(self.num_samples,))


def of_run(config: RunConfig) -> EvalOptions:
    """The run's own task and sampling; what else it samples by, eval/run.py takes from its config."""
    return EvalOptions(
        model=config.model,
        max_tokens=config.sample.max_tokens,
        temperature=config.sample.temperature,
        top_p=config.sample.top_p,
        success_threshold=config.evaluate.success_threshold,
        seed=config.seed,
        task=config.task,
    )


def paper_sampling(options: EvalOptions) -> EvalOptions:
    """QeRL's evaluation, arXiv 2510.11696, 4; it does not say how many samples a problem has."""
    drawn = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 4096,
        "num_samples": 16,
        "success_threshold": 1.0,
    }
    return dataclasses.replace(options, **drawn)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpu_gb: float
    """Memory of the GPU, in 1e9 bytes."""

    prompt_tokens: int = 256
    """Length of each prompt."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunConfig)
    """The run, as `qerl train` takes it."""

    def __post_init__(self):
        if not 0 < self.gpu_gb < math.inf:
            raise UserError(f"gpu_gb must be positive, got {self.gpu_gb}")
        check_counts(prompt_tokens=(self.prompt_tokens,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    model: tyro.conf.Positional[str]
    """A folder with safetensors, a .gguf file, a hub id, or smollm2-135m-instruct."""

    out: tyro.conf.Positional[Path]
    """The folder to write."""

    format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    """The weights' format."""

    scales: Literal["plain", "mse"] = "plain"
    """Block scales. plain: the largest weight of a block on the largest code. mse: those of a few with the
    least squared error."""

    calibrate: Literal["none", "awq"] = "none"
    """awq: before that, channels with large inputs are scaled up, and the norm or the linear before them
    down; needs --data."""

    data: Path | None = None
    """The text that inputs are measured on: a UTF-8 file."""

    sequences: int = 256
    """Most sequences of it."""

    sequence_tokens: int = 2048
    """Tokens of each."""

    def __post_init__(self):
        check_counts(sequences=(self.sequences,), sequence_tokens=(self.sequence_tokens,))
        if (self.calibrate == "none") != (self.data is None):
            raise UserError("quantize: --calibrate awq and --data TEXT need each other")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    run: tyro.conf.Positional[Path]
    """A folder that `qerl train` wrote."""

    out: tyro.conf.Positional[Path]
    """The folder to write."""

    form: Annotated[Literal["peft", "merged", "nvfp4", "gguf-ready"], tyro.conf.arg(name="as")] = "peft"
    """The adapter, the merged model, or the merged model in 4 bits; gguf-ready is merged."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """What a merged model is rounded to."""

    calibration_tokens: int = 8192
    """Tokens of the run's prompts and samples, newest first, that nvfp4 is fitted to."""

    def __post_init__(self):
        check_counts(calibration_tokens=(self.calibration_tokens,))
        if self.dtype != "bf16" and self.form not in ("merged", "gguf-ready"):
            raise UserError(f"dtype {self.dtype} is for --as merged, not for {self.form}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    system_prompt: str | None = None
    """The system message; None leaves it to the chat template."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""

    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability."""

    max_tokens: int = 1024
    """Longest answer."""

    seed: int | None = None
    """Names the answers' random numbers; None draws one."""

    with_adapter: bool = True
    """Of a run: with what it learned (its newest checkpoint), or without."""

    model: ModelConfig = ModelConfig()

    def __post_init__(self):
        check_counts(max_tokens=(self.max_tokens,))
        require(0 <= self.temperature < math.inf, f"temperature must not be negative, got {self.temperature}")
        top_p = 1 if self.top_p is None else self.top_p
        require(0 < top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    """The address to listen on; one that other machines reach needs an API key."""

    port: int = 8000
    """0 takes a free one."""

    api_key_file: Path | None = None
    """A file with the key that requests must bear; without it, the environment's QERL_API_KEY."""

    name: str | None = None
    """What requests call the model; by default the last part of MODEL_OR_RUN."""

    system_prompt: str | None = None
    """The system message of chats that bring none; None leaves it to the chat template."""

    max_body_bytes: int = 262_144
    """Longest body of a request."""

    max_prompt_tokens: int = 4096
    """Longest prompt."""

    max_tokens: int = 1024
    """Longest answer, and what a request gets that asks for no length."""

    max_samples: int = 16
    """Most answers of one request: its prompts times n."""

    max_waiting: int = 256
    """Most requests that wait; more are turned away."""

    with_adapter: bool = True
    """Of a run: with what it learned (its newest checkpoint), or without."""

    model: ModelConfig = ModelConfig()

    def __post_init__(self):
        require(0 <= self.port < 65536, f"port must lie in 0 to 65535, got {self.port}")
        names = ("max_body_bytes", "max_prompt_tokens", "max_tokens", "max_samples", "max_waiting")
        check_counts(**{name: (getattr(self, name),) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `qerl train` wrote."""

    out: Path | None = None
    """The page; by default report.html in the first run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `qerl train` writes or wrote."""

    port: int = 8080
    """On 127.0.0.1; 0 takes a free one."""

    open: bool = False
    """Opens the page in this machine's browser."""

    def __post_init__(self):
        require(0 <= self.port < 65536, f"port must lie in 0 to 65535, got {self.port}")
