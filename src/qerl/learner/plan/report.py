"""The table that `qerl plan` prints: memory by part, and the largest settings or the options that fit."""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from qerl.config import RunConfig
from qerl.cost.calibration import calibration_bytes
from qerl.cost.operands import operand_cache_bytes
from qerl.errors import UserError, quantity
from qerl.learner.plan.clients import clients_bytes, with_clients
from qerl.learner.plan.memory import (
    CONTEXT_BYTES,
    USABLE_SHARE,
    MemoryPart,
    can_cache_operands,
    float_evaluation_bytes,
    form_of,
    full_rows,
    memory_parts,
    peak_bytes,
    planned_rows,
    resident_samples,
    resolve_checkpointing,
    with_fields,
    with_free_cache,
    with_microbatches,
)
from qerl.learner.plan.shapes import read_architecture, read_layout
from qerl.learner.plan.speed import Gpu, estimate_speed, planned_kernels
from qerl.models.architecture import Architecture

KERNEL_NAMES = {
    "hopper": "Hopper kernels",
    "portable": "portable kernels, measured on an H100 and an H200 only",
    "torch": "PyTorch's operations",
}
_MAX_SAMPLES, _MAX_RANK = 4096, 1024


def _needed_bytes(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> float:
    resolved = resolve_checkpointing(a, config, prompt_tokens, gpu_bytes)
    before = _before_training(a, config, prompt_tokens, gpu_bytes).values()
    return max(peak_bytes(memory_parts(a, resolved, prompt_tokens)), *before)


def _before_training(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> dict[str, float]:
    """Return the peaks in bytes of what is done before training, 0 where it is not."""
    model, calibration = config.model, 0.0
    if model.calibrate != "none":
        calibration = calibration_bytes(a, model.format, gpu_bytes) + CONTEXT_BYTES
    return {
        f"calibration in BF16, {model.block_scales} scales": calibration,
        "evaluation in BF16": float_evaluation_bytes(a, config, prompt_tokens),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LargestSettings:
    """The largest value of each setting that fits while the others stay; 0 if not even the smallest fits."""

    num_prompts: int
    max_tokens: int
    rank: int


def largest_settings(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> LargestSettings:
    def fits(changed: RunConfig) -> bool:
        return _needed_bytes(a, changed, prompt_tokens, gpu_bytes) <= USABLE_SHARE * gpu_bytes

    def with_prompts(count: int) -> RunConfig:
        """All of their samples run at once."""
        running = max(planned_rows(config), count * config.num_generations)
        return dataclasses.replace(with_fields(config, "engine", max_num_seqs=running), num_prompts=count)

    max_prompts = max(_MAX_SAMPLES // config.num_generations, 1)
    max_tokens = max(a.max_positions - prompt_tokens, 1)
    return LargestSettings(
        num_prompts=_largest(max_prompts, lambda n: fits(with_prompts(n))),
        max_tokens=_largest(max_tokens, lambda n: fits(with_fields(config, "sample", max_tokens=n))),
        rank=16 * _largest(_MAX_RANK // 16, lambda n: fits(with_fields(config, "adapter", rank=16 * n))),
    )


def options_that_fit(
    a: Architecture, config: RunConfig, lengths: tuple[int, int], gpu_bytes: float, gpu: Gpu | None
) -> list[str]:
    """Return the sets of options with which the run fits, with memory, samples at once and time, smallest
    sets first. No set contains another. lengths: tokens of a prompt and of a sample."""
    prompt_tokens = lengths[0]
    lines: list[str] = []
    sufficient: list[tuple[Any, ...]] = []
    for options in _TRAINING_SETS if config.model.calibrate == "none" else _CALIBRATED_SETS:
        if any(set(fewer) <= set(options) for fewer in sufficient):
            continue
        changed = config
        for part, name, value in options:
            changed = with_fields(changed, part, **{name: value})
        resolved = _as_run(a, changed, prompt_tokens, gpu_bytes)
        need = _needed_bytes(a, resolved, prompt_tokens, gpu_bytes)
        if changed != config and need <= USABLE_SHARE * gpu_bytes:
            takes = f"{need / 1e9:8.2f} GB, {_rate(gpu, a, resolved, lengths)}"
            lines.append(f"{as_options(options):64}{takes}")
            sufficient.append(options)
    return lines


_NOT_CALIBRATED = "model", "calibrate", "none"
LAYER = "learn", "gradient_checkpointing", "layer"
OFFLOAD = "learn", "gradient_checkpointing", "offload"
MICROBATCH, _FP8_CACHE = ("learn", "max_tokens_per_microbatch", 2048), ("engine", "kv_cache_dtype", "fp8")
_TRAINING_SETS = (
    *((one,) for one in (LAYER, OFFLOAD, MICROBATCH, _FP8_CACHE)),
    *((one, other) for one in (LAYER, OFFLOAD) for other in (MICROBATCH, _FP8_CACHE)),
    (OFFLOAD, MICROBATCH, _FP8_CACHE),
)
_CALIBRATED_SETS = (
    (_NOT_CALIBRATED,),
    *_TRAINING_SETS,
    *((_NOT_CALIBRATED, *options) for options in _TRAINING_SETS),
)


def as_options(options: Iterable[tuple[str, str, Any]]) -> str:
    return " ".join(f"--{part}.{name.replace('_', '-')} {value}" for part, name, value in options)


def _as_run(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> RunConfig:
    """Return the config with gradient_checkpointing and the KV cache that a run takes."""
    resolved = resolve_checkpointing(a, config, prompt_tokens, gpu_bytes)
    return with_free_cache(a, resolved, prompt_tokens, gpu_bytes)


def _rate(gpu: Gpu | None, a: Architecture, config: RunConfig, lengths: tuple[int, int]) -> str:
    """Return the samples that run at once and, for a known GPU, the hours of 100 steps."""
    prompt_tokens, mean_tokens = lengths
    text = f"{quantity(resident_samples(a, config, prompt_tokens), 'sample')} at once"
    if gpu is None:
        return text
    speed = estimate_speed(gpu, a, config, prompt_tokens=prompt_tokens, mean_tokens=mean_tokens)
    return f"{text}, {100 * speed.step_s / 3600:,.1f} h for 100 steps"


def _choices(
    a: Architecture,
    config: RunConfig,
    resolved: RunConfig,
    lengths: tuple[int, int],
    gpu_bytes: float,
    gpu: Gpu | None,
) -> list[str]:
    """Return a line for the run as it is, whose samples do not all fit at once, and for each option with
    which more of them do."""
    at_once = resident_samples(a, resolved, lengths[0])
    lines = [f"  {'as it is':48}{_rate(gpu, a, resolved, lengths)}"]
    for option in (_FP8_CACHE, OFFLOAD, ("model", "head_format", "nvfp4"), ("adapter", "rank", 16)):
        changed = _as_run(a, with_fields(config, option[0], **{option[1]: option[2]}), lengths[0], gpu_bytes)
        need = peak_bytes(memory_parts(a, changed, lengths[0]))
        if resident_samples(a, changed, lengths[0]) > at_once and need <= USABLE_SHARE * gpu_bytes:
            lines.append(f"  {as_options([option]):48}{_rate(gpu, a, changed, lengths)}")
    return lines


def format_plan(
    model: str,
    config: RunConfig,
    *,
    gpu_gb: float,
    prompt_tokens: int,
    gpu: Gpu | None = None,
    mean_tokens: int | None = None,
    num_adapters: int | None = None,
) -> tuple[str, bool]:
    """Return a table of the parts, the peak, and what fits or which options make it fit; and whether it fits.

    A share of the memory stays free, as in a run: 1 - USABLE_SHARE. gpu: also estimate the speed on it, for
    samples of mean_tokens tokens, by default the longest. num_adapters: of training clients beside one base;
    None: a run."""
    a = read_architecture(model, config.model.backend)
    if prompt_tokens + config.sample.max_tokens > a.max_positions:
        raise UserError(
            f"{model} has {a.max_positions} positions, prompt_tokens and sample.max_tokens ask for"
            f" {prompt_tokens + config.sample.max_tokens}"
        )
    lengths = prompt_tokens, mean_tokens or config.sample.max_tokens
    added = 0.0
    if num_adapters is not None:
        added = clients_bytes(memory_parts(a, config, prompt_tokens), a, config, num_adapters)
    gpu_bytes = gpu_gb * 1e9 - added / USABLE_SHARE  # what clients leave to the rest
    resolved = _as_run(a, config, prompt_tokens, gpu_bytes)
    as_run = with_microbatches(a, resolved, prompt_tokens, gpu_bytes)
    parts = memory_parts(a, resolved, prompt_tokens)
    parts = parts if num_adapters is None else with_clients(parts, a, config, num_adapters)
    before = _before_training(a, config, prompt_tokens, gpu_bytes)
    peak = max(peak_bytes(parts), *before.values())
    fits = peak <= USABLE_SHARE * gpu_gb * 1e9
    advice = _advice(a, config, resolved, lengths, gpu_bytes, gpu, fits=fits)
    lines = part_lines(parts, peak, gpu_gb, before)
    is_auto = resolved.learn.gradient_checkpointing != config.learn.gradient_checkpointing
    auto = " (auto)" if is_auto else ""
    trained = f"rank {config.adapter.rank}" if config.adapter.kind == "lora" else "full weights trained"
    if config.adapter.experts != "none":
        trained += f", experts of rank {config.adapter.expert_rank}"
    text = "\n".join(
        [
            f"{model} in {config.model.format}, {config.num_prompts * config.num_generations} samples of up"
            f" to {config.sample.max_tokens} tokens, prompts of {prompt_tokens}, {trained},"
            f" learn.gradient_checkpointing {resolved.learn.gradient_checkpointing}{auto}",
            *([layout] if (layout := read_layout(model, config.model.format)) else ()),
            "",
            *lines,
            "",
            *advice,
            *([f"GB of options are without the clients' {added / 1e9:.2f}"] if added and not fits else ()),
            *(_speed(gpu, a, as_run, prompt_tokens, mean_tokens) if gpu and fits else ()),
        ]
    )
    return text, fits


def part_lines(
    parts: Iterable[MemoryPart],
    peak: float,
    gpu_gb: float,
    before: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Return the lines of the parts, of what is done before training, and of the peak in bytes."""
    fits = "fits" if peak <= USABLE_SHARE * gpu_gb * 1e9 else "does not fit"
    limit = f"{gpu_gb:g} GB, {1 - USABLE_SHARE:.0%} of it kept free"
    return [
        *(f"{part.name:36}{part.num_bytes / 1e9:8.2f} GB   {part.when}" for part in parts if part.num_bytes),
        *(f"{name:36}{size / 1e9:8.2f} GB   before training" for name, size in before.items() if size),
        f"{'peak':36}{peak / 1e9:8.2f} GB   {fits} into {limit}",
    ]


def _advice(
    a: Architecture,
    config: RunConfig,
    resolved: RunConfig,
    lengths: tuple[int, int],
    gpu_bytes: float,
    gpu: Gpu | None,
    *,
    fits: bool,
) -> list[str]:
    """Return what fits, how many samples run at once, or the options that make the run fit. resolved: the
    config as it runs."""
    prompt_tokens, _ = lengths
    if not fits:
        if options := options_that_fit(a, config, lengths, gpu_bytes, gpu):
            return ["it fits with", *(f"  {line}" for line in options)]
        return ["does not fit even with offload, small micro-batches and an FP8 KV cache"]
    if resolved.engine.kv_cache_gb == config.engine.kv_cache_gb:
        as_run = with_microbatches(a, resolved, prompt_tokens, gpu_bytes)
        return _what_fits(a, config, as_run, prompt_tokens, gpu_bytes)
    return [
        f"the KV cache takes what is free, for {resident_samples(a, resolved, prompt_tokens)} of"
        f" {config.num_prompts * config.num_generations} samples of the maximum length at once;"
        " the others wait for their turn",
        *_choices(a, config, resolved, lengths, gpu_bytes, gpu),
    ]


def _what_fits(
    a: Architecture, config: RunConfig, as_run: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> list[str]:
    largest = largest_settings(a, config, prompt_tokens, gpu_bytes)
    rank = f" or rank {largest.rank}," if config.adapter.kind == "lora" else ""
    lines = [
        f"largest batch {largest.num_prompts * config.num_generations} samples at once, or samples of"
        f" {largest.max_tokens} tokens,{rank} all other settings unchanged"
    ]
    if as_run.learn.microbatch_tokens > config.learn.microbatch_tokens:
        tokens = f"{as_run.learn.microbatch_tokens:,}"
        lines.append(f"on a GPU, learning takes micro-batches of up to {tokens} tokens in free memory")
    if can_cache_operands(a, as_run, prompt_tokens, gpu_bytes, full_rows(as_run, prompt_tokens)):
        cache_gb = operand_cache_bytes(a, form_of(as_run), as_run.learn) / 1e9
        lines.append(f"learning also keeps unpacked operands in free memory, up to {cache_gb:.2f} GB")
    return lines


def _speed(
    gpu: Gpu, a: Architecture, config: RunConfig, prompt_tokens: int, mean_tokens: int | None
) -> list[str]:
    length = mean_tokens or config.sample.max_tokens
    speed = estimate_speed(gpu, a, config, prompt_tokens=prompt_tokens, mean_tokens=length)
    kernels = KERNEL_NAMES[planned_kernels(gpu, config.engine.kernels)]
    rates = f"{speed.sampled_tokens_per_s:,.0f} tokens/s, learning {speed.learned_tokens_per_s:,.0f} tokens/s"
    hours = config.num_steps * speed.step_s / 3600
    return [
        "",
        f"estimate from bandwidth and arithmetic ({kernels}), samples of {length} tokens:",
        f"  sampling {rates}",
        f"  {speed.step_s:,.0f} s a step, {hours:,.1f} h for {quantity(config.num_steps, 'step')}",
    ]


def _largest(limit: int, condition: Callable[[int], bool]) -> int:
    """Return the largest of 1..limit that meets the condition, 0 if none does. Every number below one that
    meets it must meet it too."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not condition(number))
