"""Options of the commands whose work is done in other packages: eval, quantize, export, generate, serve,
tinker."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from qerl.config import ModelConfig, TaskConfig
from qerl.config.check import check_numbers, check_positive
from qerl.config.model import Scales, chosen_scales
from qerl.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    with_adapter: bool = True
    """Evaluate a run with its newest checkpoint, or its base model alone."""

    num_prompts: int | None = None
    """Number of problems, from the first; None evaluates all."""

    num_samples: int = 4
    """Samples per problem; 16 for named benchmarks."""

    temperature: float = 1.0
    """Divides the logits; 0.6 for named benchmarks. Greedy accuracy is always reported as well."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability; 0.95 for named benchmarks."""

    max_tokens: int = 1024
    """Maximum tokens of a sample; 4096 for named benchmarks."""

    template: str | None = None
    """User message of a benchmark or file, in place of its own, as task.template."""

    out: Path | None = None
    """Folder of the results; default: eval in the run's folder, or runs/eval for a model."""

    seed: int = 0
    """Seed of the samples, and of the problems of a procedural task."""

    success_threshold: float | None = None
    """A sample is correct if its reward is at least this. None: 1 for built-in rewards; own ones then have
    no accuracy, only their mean."""

    trust: bool = False
    """Import the rewards that the run.json of a folder names, though you did not start that run here."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "num_prompts", "num_samples")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder with safetensors, a .gguf file, a hub id, or smollm2-135m-instruct."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""

    format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    """Format of the weights."""

    scales: Scales = "auto"
    """Choice of the block scales. plain: map the largest weight of a block to the largest code. mse: pick
    the candidate with the least squared error; with gptq weighted by the inputs. auto: mse with gptq, else
    plain."""

    calibrate: Literal["none", "awq", "gptq"] = "none"
    """awq: first scale up the channels with large inputs and scale down the preceding norm or linear. gptq:
    choose the NVFP4 codes that change each layer's outputs least. Both need --data."""

    keep_bf16: tuple[str, ...] = ()
    """Linears that stay in BF16, with those that read the same input: names such as down_proj or
    layers.0.mlp.down_proj, or one budget such as 3%: those whose rounding costs most KL a byte, until the
    checkpoint's linears are this much larger."""

    data: Path | None = None
    """UTF-8 text file for calibration; for gptq also the samples.jsonl of a run, which keeps what the run
    learned."""

    sequences: int = 256
    """Maximum number of calibration sequences."""

    sequence_tokens: int = 2048
    """Tokens per calibration sequence."""

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "sequences", "sequence_tokens")
        if (self.calibrate == "none") != (self.data is None):
            raise UserError("quantize: --calibrate awq or gptq and --data FILE must be given together")
        for name, usual in (("sequences", 256), ("sequence_tokens", 2048)):
            acts = self.calibrate != "none" or getattr(self, name) == usual
            require(acts, f"quantize: --{name.replace('_', '-')} needs --calibrate awq or gptq")
        if self.calibrate == "gptq" and self.format != "nvfp4":
            raise UserError("quantize: --calibrate gptq needs --format nvfp4")
        acts = not self.keep_bf16 or self.calibrate == "none"
        require(acts, f"quantize: --keep-bf16 needs --calibrate none, got {self.calibrate}")

    @property
    def block_scales(self) -> Literal["plain", "mse"]:
        """--scales, with auto replaced."""
        return chosen_scales(self.scales, uses_gptq=self.calibrate == "gptq")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, written by `qerl train`."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""

    form: Annotated[
        Literal["peft", "base", "merged", "nvfp4", "mxfp4", "gguf-ready"], tyro.conf.arg(name="as")
    ] = "peft"
    """peft: the adapter. base: the model on which it was trained, in the run's format. merged: the merged
    model. nvfp4, mxfp4: the merged model in 4 bits, gpt-oss only in mxfp4. gguf-ready: same as merged,
    which llama.cpp's convert_hf_to_gguf.py reads."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Data type of a merged model, or of a base whose format no layout has."""

    calibration_tokens: int | None = None
    """Tokens of the run's prompts and samples, newest first, to calibrate nvfp4 and mxfp4 on. None: 8,192,
    on a GPU as many as its memory allows, up to 65,536."""

    push_to_hub: str | None = None
    """Id of a repository of the Hugging Face hub, OWNER/NAME or NAME, to upload the written folder to. It is
    created, private, if it does not exist."""

    public: bool = False
    """Create that repository so that everyone can read it."""

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "calibration_tokens")
        acts = self.form in ("nvfp4", "mxfp4") or self.calibration_tokens is None
        require(acts, f"--calibration-tokens needs --as nvfp4 or mxfp4, got {self.form}")
        if self.dtype != "bf16" and self.form not in ("merged", "gguf-ready", "base"):
            raise UserError(f"--dtype {self.dtype} needs --as merged, gguf-ready or base, got {self.form}")
        require(self.push_to_hub is not None or not self.public, "--public needs --push-to-hub REPO")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    system_prompt: str | None = None
    """System message; None uses the chat template's default."""

    temperature: float = 1.0
    """Divides the logits; 0 picks the most likely token."""

    top_k: int | None = None
    """Sample from the k most likely tokens."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability."""

    min_p: float | None = None
    """Drop tokens below this fraction of the most likely token's probability."""

    max_tokens: int = 1024
    """Maximum tokens of an answer."""

    stop: tuple[str, ...] = ()
    """Texts that end an answer, which then lacks them."""

    chat: bool = True
    """Give the prompt the chat template. False: the model continues the text, without the texts before it."""

    seed: int | None = None
    """Seed of the answers; None picks a random one."""

    with_adapter: bool = True
    """Use the newest checkpoint of a run, or its base model alone."""

    model: ModelConfig = ModelConfig()

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "max_tokens", "top_k")
        require(self.temperature >= 0, f"temperature must not be negative, got {self.temperature}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, f"{name} must lie in (0, 1], got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach requires an API key."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    api_key_file: Path | None = None
    """File with the API key that requests must send; default: the environment variable QERL_API_KEY."""

    name: str | None = None
    """Model name in the API; default: the last part of MODEL_OR_RUN."""

    system_prompt: str | None = None
    """System message of chats that have none; None uses the chat template's default."""

    allow_special_tokens: bool = False
    """Read control tokens in the text of chat messages as control tokens, not as text: a client's message may
    then forge a system turn. The prompts of /v1/completions are read as written."""

    reasoning_parser: Literal["auto", "none", "think", "harmony"] = "auto"
    """Form of the reasoning in a chat's answer: between <think> and </think>, or in harmony's analysis
    channel; auto: as the chat template shows."""

    tool_call_parser: Literal[
        "auto",
        "deepseek",
        "function_gemma",
        "gemma4",
        "glm4",
        "glm45",
        "granite",
        "harmony",
        "hermes",
        "llama3",
        "mistral",
        "olmo3",
        "phi4",
        "qwen_xml",
    ] = "auto"
    """Form of tool calls in answers; auto: that of the chat template."""

    max_body_bytes: int = 262_144
    """Maximum size of a request's body, in bytes."""

    max_prompt_tokens: int = 4096
    """Maximum tokens of a prompt."""

    max_tokens: int = 1024
    """Maximum tokens of an answer, and the default of requests that do not set one."""

    max_samples: int = 16
    """Maximum answers per request: its prompts times n."""

    max_waiting: int = 256
    """Maximum waiting requests; more are rejected."""

    max_connections: int = 1024
    """Maximum open connections; a new one then replaces the one that has waited longest for its request."""

    max_header_bytes: int = 16_384
    """Maximum size of a request's line and headers, in bytes."""

    header_timeout_s: float = 10.0
    """Seconds from the first byte of a request, or from a new connection, to its last header."""

    body_timeout_s: float = 60.0
    """Seconds from a request's last header to the end of its body."""

    keep_alive_timeout_s: float = 30.0
    """Seconds between an answer and the next request of the same connection."""

    send_timeout_s: float = 60.0
    """Seconds in which a client must take all of the answer that is ready for it."""

    adapter_folder: Path | None = None
    """Folder of PEFT adapters that requests may load and then name as their model; None: none."""

    max_adapters: int = 8
    """Maximum adapters loaded at once."""

    max_lora_rank: int = 64
    """Largest rank of a loaded adapter; on a GPU there is memory for max_adapters of this rank."""

    with_adapter: bool = True
    """Serve the newest checkpoint of a run, or its base model alone."""

    model: ModelConfig = ModelConfig()

    def __post_init__(self):
        check_numbers(self)
        require(0 <= self.port < 65536, f"port must lie in 0 to 65535, got {self.port}")
        check_positive(self, "max_body_bytes", "max_prompt_tokens", "max_tokens")
        check_positive(self, "max_samples", "max_waiting", "max_connections", "max_header_bytes")
        check_positive(self, "max_adapters", "max_lora_rank")
        check_positive(self, "header_timeout_s", "body_timeout_s", "keep_alive_timeout_s", "send_timeout_s")


SHARED_ADAPTERS = 8
"""Adapters that rows of one decode step may have."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TinkerOptions:
    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach requires an API key."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    api_key_file: Path | None = None
    """File with the API key that clients must send, which begins with tml-; default: the environment variable
    QERL_API_KEY."""

    name: str | None = None
    """Model name in the API; default: the last part of MODEL. MODEL itself is understood too."""

    checkpoints: Path = Path("tinker-checkpoints")
    """Folder of the checkpoints that clients save."""

    max_rank: int = 32
    """Largest LoRA rank of a training client."""

    max_adapters: int = 32
    """Maximum number of training clients at once."""

    device_adapters: int = 4
    """Training clients whose adapter and optimizer stay on the device; others wait in host memory."""

    host_samplers: int = 8
    """Adapters of samplers in host memory; those used longest ago lie in files in the checkpoints' folder."""

    shared_adapters: int = SHARED_ADAPTERS
    """Maximum adapters that sample in the same decode step; with 0 they take turns. On a GPU up to 31."""

    max_turn_s: float = 2.0
    """Seconds after which sampling is interrupted if learning, or another sampler, waits."""

    aqn_sigma: float = 0.0
    """Sigma of the noise of samplers, relative to each norm's RMS; a training client's own is the entry
    aqn_sigma of its user_metadata."""

    max_context_tokens: int = 4096
    """Longest sequence, of learning and of a prompt with its sample."""

    max_samples: int = 64
    """Maximum samples per request."""

    max_waiting: int = 1024
    """Maximum waiting sampling requests; a client sends more of them later."""

    max_result_bytes: int = 1_073_741_824
    """Maximum memory of finished requests' results, in bytes; above it the oldest are dropped."""

    max_body_bytes: int = 16_777_216
    """Maximum size of a request's body, in bytes; clients split their requests to fit."""

    max_connections: int = 1024
    """Maximum open connections."""

    session_timeout_s: float = 300.0
    """Seconds without a sign of life after which a client's adapters are freed. Its checkpoints stay."""

    model: ModelConfig = ModelConfig()

    def __post_init__(self):
        check_numbers(self)
        require(0 <= self.port < 65536, f"port must lie in 0 to 65535, got {self.port}")
        check_positive(self, "max_rank", "max_adapters", "device_adapters", "host_samplers")
        check_positive(self, "max_context_tokens", "max_turn_s")
        for name in ("shared_adapters", "aqn_sigma"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}")
        check_positive(self, "max_samples", "max_waiting", "max_body_bytes", "max_connections")
        check_positive(self, "max_result_bytes", "session_timeout_s")
