"""Decide whether `model.calibrate auto` calibrates: where it takes less time than the first evaluation would,
and no more memory than the GPU has.

    calibration   sample `calibration_tokens` of the float model, then round: sum over linears of N K^2 steps
    evaluation    two samples of each held-out problem, one of them greedy

Both are estimated from the model's size, the numbers of samples and rates that are measured on this machine,
in about a second: of a product with as many rows as samples run at once, and of rounding a small weight. A
sample is taken to have half of sample.max_tokens. The decision stays with the run, in calibrate.json.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from qerl.config import RunConfig
from qerl.config.stored import CHOICE
from qerl.cost.calibration import calibration_bytes
from qerl.cost.weights import weight_bytes
from qerl.kernels.runtime.gpu_memory import memory_bytes
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import layout_of, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.device import COMPUTE
from qerl.models.layer_spec import counted_specs
from qerl.models.quantize.calibration import calibration_tokens
from qerl.models.quantize.gptq import FLOAT_DAMPING, SWEEPS
from qerl.models.quantize.rounding import add_damping, round_to_grid
from qerl.models.transformers_backend.backend import backend_of
from qerl.tracking.atomic_file import encode, write_atomic
from qerl.training.calibration_samples import MAX_SAMPLE_TOKENS

_PROBE_WIDTH = {"cpu": 512, "cuda": 2048}


class Rates(NamedTuple):
    """Rates(product_s=3.7e-9, fp32_s=2.9e-11, rounding_s=1.8e-9): of this machine."""

    product_s: float
    """Seconds a weight of a product with the samples that run at once, in the model's dtype."""
    fp32_s: float
    """Seconds a row and weight of a float32 product."""
    rounding_s: float
    """Seconds a weight and input of rounding."""


def obstacle(config: RunConfig) -> str | None:
    """Return why this run cannot calibrate; None if it can."""
    model = config.model
    if model.format != "nvfp4":
        return f"model.format is {model.format}, not nvfp4"
    if config.ray.address:
        return "it does not work with ray.address"
    if backend_of(model) == "transformers":
        return "transformers' code runs the model"
    if layout_of(locate(model.path).open()) is not None:
        return "the model is quantized already"
    return (
        None if config.evaluate.num_prompts else "evaluate.num_prompts is 0: there is nothing to compare with"
    )


def choose(config: RunConfig, notice: Callable[[str], None]) -> str:
    """Return "gptq" or "none", store it in the run's folder, and say why in one line."""
    reason = obstacle(config)
    choice, reason = ("none", reason) if reason else _by_estimate(config)
    notice(f"model.calibrate auto: {'on' if choice == 'gptq' else 'off'}, {reason}")
    write_atomic(Path(config.out) / CHOICE, encode({"calibrate": choice, "reason": reason}))
    return choice


def _by_estimate(config: RunConfig) -> tuple[str, str]:
    """Return the choice by memory and time, and its reason."""
    a, device = architecture_of(locate(config.model.path).open()), torch.device(config.model.device)
    gpu_bytes = memory_bytes(device)  # 0 on a CPU
    need = calibration_bytes(a, config.model.format, gpu_bytes)
    if 0 < gpu_bytes < need:
        return "none", f"calibration needs about {need / 1e9:.0f} GB, the GPU has {gpu_bytes / 1e9:.0f}"
    rates = measure(device, COMPUTE[config.model.dtype], _running(config))
    calibration_s, evaluation_s = estimates(a, config, rates)
    reason = f"calibration takes about {calibration_s:,.0f} s, the first evaluation {evaluation_s:,.0f} s"
    return "gptq" if calibration_s < evaluation_s else "none", reason


def estimates(a: Architecture, config: RunConfig, rates: Rates) -> tuple[float, float]:
    """Return the seconds of calibration and of the first evaluation."""
    num_weights = weight_bytes(a, "bf16") / 2
    linears = [(linear, count) for spec, count in counted_specs(a) for linear in spec.linears]
    dense = sum(count * linear.out_width * linear.in_width for linear, count in linears)
    inputs = sum(count * linear.out_width * linear.in_width**2 for linear, count in linears)
    inputs += max(num_weights - dense, 0) * a.width  # experts
    length = max(config.sample.max_tokens / 2, 1)
    step_s = rates.product_s * (num_weights + a.vocab_size * a.width)
    num_tokens = calibration_tokens(a, torch.device(config.model.device))
    sampled_length = min(length, MAX_SAMPLE_TOKENS / 2)
    rows = config.engine.max_rows(has_kernels=True)
    calls = math.ceil(num_tokens / (rows * sampled_length))
    sampling_s = calls * sampled_length * step_s
    quantizing_s = 4 * num_tokens * num_weights * rates.fp32_s + inputs * rates.rounding_s
    waves = math.ceil(config.evaluate.num_prompts / _running(config))
    return sampling_s + quantizing_s, 2 * waves * length * step_s


def measure(device: torch.device, compute: torch.dtype, rows: int) -> Rates:
    """Measure the rates on this machine."""
    width = _PROBE_WIDTH[device.type]
    generator = torch.Generator(device).manual_seed(0)
    weight_NK = torch.randn(width, width, device=device, generator=generator)
    x_SK = torch.randn(rows, width, device=device, generator=generator)
    h_KK = add_damping(x_SK.T @ x_SK, FLOAT_DAMPING)
    steps_NK = torch.full_like(weight_NK, 0.5)
    w_NK, x_TK = weight_NK.to(compute), x_SK.to(compute)
    return Rates(
        product_s=_seconds(lambda: x_TK @ w_NK.T, device) / width**2,
        fp32_s=_seconds(lambda: x_SK @ weight_NK.T, device) / (rows * width**2),
        rounding_s=_seconds(lambda: round_to_grid(weight_NK, steps_NK, h_KK, sweeps=SWEEPS), device)
        / width**3,
    )


def _running(config: RunConfig) -> int:
    return min(config.evaluate.num_prompts, config.engine.max_rows(has_kernels=True))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the faster of two calls, the first of which may compile."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
