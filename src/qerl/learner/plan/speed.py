"""Estimate how fast a run samples and learns on a GPU, from its memory bandwidth and matrix rate.

    decode step = bytes / bandwidth + operations / (matrix rate * mfu) + num_layers * layer_s
    update      = tokens * (4 or 6) * weights / (matrix rate * mfu)            6 if layers are recomputed;
                  at least the host's time for each layer of each micro-batch

Of a mixture, weights are those of the experts that a token goes through; a decode step reads the experts that
some row chose, if all are equally likely, and an update unpacks all of them in every micro-batch's passes.

mfu and layer_s depend on the kernels of decode steps (`engine.kernels`):

    hopper     within 15 % of the rows in benchmarks/results, which tests/learner/test_plan_speed.py holds
    portable   fitted to an H200's rows of a 7B model, within 3 %; an H100's of a 32B model are up to 12 %
               faster. For another GPU both rates come from its data sheet: an estimate. mfu is a share of
               the rate of wgmma, which these kernels do not use, so GPUs without it may be faster than this.
    torch      of one H100 (7B, rank 32: 141 and 998 tokens/s at batch 8 and 64; 735 and 3,772 with BF16
               weights). Every weight in 4 bits is unpacked at every step.
"""

import dataclasses
from typing import Literal

import torch

from qerl.config import RunConfig
from qerl.cost.cache import slot_bytes, token_bytes
from qerl.cost.weights import (
    PASSES,
    counted_stacks,
    experts_read,
    linear_weights,
    num_active_expert_params,
    num_active_params,
    num_trained_weights,
    stack_bytes,
    weight_bytes,
)
from qerl.errors import UserError, did_you_mean, require
from qerl.formats import FORMATS
from qerl.learner.plan.memory import kv_cache_bytes, microbatch_rows, planned_rows
from qerl.models.architecture import Architecture
from qerl.models.device import Kernels

_BANDWIDTH_SHARE, _MATRIX_SHARE = 0.94, 0.8  # of the data sheet's figures, measured on an H200
_UNPACK_BYTES = 24  # moved by PyTorch's operations to unpack a 4-bit weight
_EXPERT_UNPACK_BYTES = 2.5625  # moved by kernels/experts/stack_unpack.py for each 4-bit weight
_LEARN_MFU = {"none": 0.57, "layer": 0.66, "offload": 0.66}
_INT8_GAIN = {"none": 1.13, "layer": 1.19, "offload": 1.19}  # within 6 % of an H100 and an H200
_HOST_LAYER_S = {"none": 7e-3, "layer": 13e-3, "offload": 13e-3}
"""The host's time for a layer in a micro-batch, which takes no less: within 25 % of the 0.5B and 1.5B shapes
with 8,192 tokens on an H100 and an H200."""
_EXPERT_S = 86e-6
"""PyTorch's operations for one expert with rows: two of the seven linears that take 300 us in a layer. An
estimate."""
_MIXTURE_LAYER_S, _EXPERT_MFU = 27e-6, 0.5
"""Seconds in a decode step, and what its products of experts reach: 14 % off Qwen3-30B-A3B and gpt-oss-20b on
an H100 at 8, 64 and 256 rows."""
_MIXTURE_PASS_S = 2.1e-3
"""A mixture's layer in one pass of a micro-batch, in which the GPU waits for the host: within 15 % of updates
of Qwen3-30B-A3B and gpt-oss-20b on an H200."""
_TORCH_MFU_SHARE = 0.82  # 10,057 of 12,019 tokens/s, layers recomputed


@dataclasses.dataclass(frozen=True, slots=True)
class _DecodeRates:
    layer_s: float
    """Time of a layer that neither bytes nor operations explain: launches and their ends."""
    mfu: float
    """Operations per second / matrix rate."""


_DECODE = {
    "hopper": _DecodeRates(30e-6, 0.6),
    "portable": _DecodeRates(29e-6, 0.4),
    "torch": _DecodeRates(300e-6, 0.6),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: Gpu(25.2, 1.01e12, 165e12) is an RTX 4090."""

    memory_gb: float
    """Memory that CUDA reports, in units of 1e9 bytes."""
    bytes_per_s: float
    flop_per_s: float
    """Dense bfloat16 products, summed in fp32."""
    is_hopper: bool = False


GPUS = {
    "rtx-3060": Gpu(12.5, 0.36e12, 25e12),
    "rtx-3060-ti": Gpu(8.6, 0.45e12, 32e12),
    "rtx-3070": Gpu(8.6, 0.45e12, 41e12),
    "rtx-3080": Gpu(10.4, 0.76e12, 59e12),
    "rtx-3080-ti": Gpu(12.5, 0.91e12, 68e12),
    "rtx-3090": Gpu(25.2, 0.94e12, 71e12),
    "rtx-3090-ti": Gpu(25.2, 1.01e12, 80e12),
    "rtx-4060": Gpu(8.2, 0.27e12, 30e12),
    "rtx-4060-ti": Gpu(16.7, 0.29e12, 44e12),
    "rtx-4070": Gpu(12.5, 0.50e12, 58e12),
    "rtx-4070-super": Gpu(12.5, 0.50e12, 71e12),
    "rtx-4070-ti": Gpu(12.5, 0.50e12, 80e12),
    "rtx-4070-ti-super": Gpu(16.7, 0.67e12, 88e12),
    "rtx-4080": Gpu(16.7, 0.72e12, 97e12),
    "rtx-4080-super": Gpu(16.7, 0.74e12, 104e12),
    "rtx-4090": Gpu(25.2, 1.01e12, 165e12),
    "rtx-5060-ti": Gpu(16.6, 0.45e12, 47e12),
    "rtx-5070": Gpu(12.4, 0.67e12, 62e12),
    "rtx-5070-ti": Gpu(16.6, 0.90e12, 88e12),
    "rtx-5080": Gpu(16.6, 0.96e12, 113e12),
    "rtx-5090": Gpu(33.6, 1.79e12, 210e12),
    "rtx-a6000": Gpu(50.8, 0.77e12, 155e12),
    "rtx-6000-ada": Gpu(50.8, 0.96e12, 364e12),
    "rtx-pro-6000": Gpu(101.9, 1.79e12, 504e12),
    "a10": Gpu(23.6, 0.60e12, 125e12),
    "a30": Gpu(25.2, 0.93e12, 165e12),
    "a40": Gpu(47.7, 0.70e12, 150e12),
    "a100-40": Gpu(42.3, 1.56e12, 312e12),
    "a100-80": Gpu(84.9, 2.04e12, 312e12),
    "l4": Gpu(23.6, 0.30e12, 121e12),
    "l40": Gpu(47.7, 0.86e12, 181e12),
    "l40s": Gpu(47.7, 0.86e12, 362e12),
    "h20": Gpu(102.0, 4.00e12, 148e12, is_hopper=True),
    "h100": Gpu(84.9, 3.35e12, 989e12, is_hopper=True),
    "h100-pcie": Gpu(84.9, 2.04e12, 756e12, is_hopper=True),
    "gh200": Gpu(102.0, 4.00e12, 989e12, is_hopper=True),
    "h200": Gpu(150.1, 4.80e12, 989e12, is_hopper=True),
    "b200": Gpu(191.5, 8.00e12, 2250e12),
}


def gpu_named(name: str) -> Gpu:
    """Return the GPU of this name, in the table's spelling or CUDA's; raise UserError if it is unknown."""
    if name not in GPUS and name.strip() and (gpu := gpu_of_cuda_name(name)) is not None:
        return gpu
    if name not in GPUS:
        hint = did_you_mean(name, GPUS) or f"; known: {', '.join(GPUS)}"
        raise UserError(f"--gpu: unknown GPU {name!r}; for one that is not listed give --gpu-gb GB{hint}")
    return GPUS[name]


def gpu_of_cuda_name(name: str) -> Gpu | None:
    """Return the GPU that CUDA calls NVIDIA GeForce RTX 4090 or NVIDIA A100-SXM4-80GB; None if unknown."""
    words = name.lower().removeprefix("nvidia ").removeprefix("geforce ").replace("-", " ").split()
    if "laptop" in words or ("ti" in words and "-".join(words) not in GPUS):
        return None
    if words[0] == "a100":
        return GPUS["a100-80" if "80gb" in words else "a100-40"]
    prefixes = ("-".join(words[:count]) for count in range(len(words), 0, -1))
    return next((GPUS[prefix] for prefix in prefixes if prefix in GPUS), None)


def planned_kernels(gpu: Gpu, wanted: Kernels | Literal["auto"]) -> Kernels:
    """Return the kernels of decode steps on this GPU where engine.kernels is `wanted`. Raises UserError for
    Hopper's on another one."""
    require(
        wanted != "hopper" or gpu.is_hopper, "engine.kernels is hopper, which needs a Hopper GPU; use auto"
    )
    if wanted == "auto":
        return "hopper" if gpu.is_hopper else "portable"  # all GPUs of the table are Ampere or later
    return wanted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpeedEstimate:
    sampled_tokens_per_s: float
    learned_tokens_per_s: float
    """Prompt and sample tokens that an update reads, per second."""
    step_s: float
    """Sampling and update; publishing and rewards are left out."""


def estimate_speed(
    gpu: Gpu, a: Architecture, config: RunConfig, *, prompt_tokens: int, mean_tokens: int
) -> SpeedEstimate:
    """Return the speed of a run whose learn.gradient_checkpointing is resolved and whose samples have
    mean_tokens tokens. The KV cache holds as many samples at once as kv_cache_bytes says."""
    num_samples = config.num_prompts * config.num_generations
    cached = kv_cache_bytes(a, config, prompt_tokens) / token_bytes(a, config.engine.kv_cache_dtype)
    fitting = cached / (mean_tokens / 2 + prompt_tokens / config.num_generations)
    running = max(min(num_samples, planned_rows(config), int(fitting)), 1)
    cached_tokens = running * (mean_tokens / 2 + prompt_tokens / config.num_generations)
    rate = running / _decode_step_s(gpu, a, config, running, cached_tokens)
    mode = config.learn.gradient_checkpointing
    mfu = _LEARN_MFU[mode] * (1 if gpu.is_hopper else _TORCH_MFU_SHARE)
    if config.learn.backward == "int8":
        require(gpu.is_hopper, "learn.backward int8 needs a Hopper GPU (H100, H200): set it to bf16")
        mfu *= _INT8_GAIN[mode]
    rows = microbatch_rows(config, prompt_tokens)
    token_s = 2 * PASSES[mode] * num_active_params(a) / (_MATRIX_SHARE * gpu.flop_per_s * mfu)
    experts = 0 if config.model.format == "bf16" else sum(n * x.num_weights for x, n in counted_stacks(a))
    unpack_s = experts * _EXPERT_UNPACK_BYTES / (_BANDWIDTH_SHARE * gpu.bytes_per_s)
    batch_s = PASSES[mode] * (unpack_s + len(a.layers_with_experts) * _MIXTURE_PASS_S)
    batch_s = max(rows * token_s + batch_s, _HOST_LAYER_S[mode] * a.num_layers)
    learn_rate = rows / batch_s
    learned = config.num_prompts * prompt_tokens + num_samples * mean_tokens
    return SpeedEstimate(
        sampled_tokens_per_s=rate,
        learned_tokens_per_s=learn_rate,
        step_s=num_samples * mean_tokens / rate + learned / learn_rate,
    )


def _decode_step_s(gpu: Gpu, a: Architecture, config: RunConfig, running: int, cached_tokens: float) -> float:
    """Return the time of a decode step of `running` samples that read `cached_tokens` of the cache."""
    bandwidth, matrix = _BANDWIDTH_SHARE * gpu.bytes_per_s, _MATRIX_SHARE * gpu.flop_per_s
    format = config.model.sampler_format or config.model.format
    stacks, read = counted_stacks(a), experts_read(a, running)
    kernels = planned_kernels(gpu, config.engine.kernels)
    weights = weight_bytes(a, format)
    weights -= sum(n * (1 - read / x.num_experts) * stack_bytes(x, format) for x, n in stacks)
    if kernels == "torch" and format != "bf16":
        unpacked = linear_weights(a)[0] + sum(n * read / x.num_experts * x.num_weights for x, n in stacks)
        weights += (_UNPACK_BYTES - FORMATS[format].bytes_per_weight) * unpacked
    adapter = 2 * num_trained_weights(a, config.adapter) if config.adapter.kind == "lora" else 0
    states = 2 * running * slot_bytes(a, torch.bfloat16)  # read and written
    cache = cached_tokens * token_bytes(a, config.engine.kv_cache_dtype) + states
    num_bytes = weights + 2 * a.vocab_size * a.width + adapter + cache
    rates = _DECODE[kernels]
    mfu = _DECODE["hopper"].mfu if format == "bf16" and kernels == "portable" else rates.mfu  # of cuBLAS
    active = num_active_expert_params(a)
    operations = 2 * running * ((num_active_params(a) - active) / mfu + active / _EXPERT_MFU)
    launches = a.num_layers * rates.layer_s + len(a.layers_with_experts) * _MIXTURE_LAYER_S
    launches += (kernels == "torch") * _EXPERT_S * read * len(a.layers_with_experts)
    return num_bytes / bandwidth + operations / matrix + launches
