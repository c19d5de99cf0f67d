"""What fits into a GPU, what would make a step fit, and the table that `qerl plan` prints."""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.config import RunConfig
from qerl.errors import UserError
from qerl.learner.plan.step import architecture, held, holds_operands, parts, resolve_checkpointing, total
from qerl.models.architecture import Architecture

_MOST_SAMPLES, _MOST_RANK = 4096, 1024


def _need(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> float:
    return total(parts(a, resolve_checkpointing(a, config, prompt_tokens, gpu_bytes), prompt_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest of each that fits while all else stays; 0 where not even the least does."""

    num_prompts: int
    max_tokens: int
    rank: int


def largest(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> Largest:
    def fits(changed: RunConfig) -> bool:
        return _need(a, changed, prompt_tokens, gpu_bytes) <= gpu_bytes

    def prompts(count: int) -> RunConfig:
        """All of their samples at once."""
        running = max(config.engine.max_num_seqs, count * config.num_generations)
        engine = dataclasses.replace(config.engine, max_num_seqs=running)
        return dataclasses.replace(config, num_prompts=count, engine=engine)

    def tokens(count: int) -> RunConfig:
        return dataclasses.replace(config, sample=dataclasses.replace(config.sample, max_tokens=count))

    def rank(count: int) -> RunConfig:
        return dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, rank=16 * count))

    most_tokens = max(a.max_positions - prompt_tokens, 1)
    return Largest(
        num_prompts=_last(max(_MOST_SAMPLES // config.num_generations, 1), lambda n: fits(prompts(n))),
        max_tokens=_last(most_tokens, lambda n: fits(tokens(n))),
        rank=16 * _last(_MOST_RANK // 16, lambda n: fits(rank(n))),
    )


def remedies(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> list[str]:
    """What makes it fit, the fewest options first, none more than it takes, and the memory then taken."""
    found: list[str] = []
    sufficient: list[tuple[Any, ...]] = []
    for options in _REMEDIES:
        if any(set(fewer) <= set(options) for fewer in sufficient):
            continue
        changed = config
        for part, name, value in options:
            changed = dataclasses.replace(
                changed, **{part: dataclasses.replace(getattr(changed, part), **{name: value})}
            )
        need = _need(a, changed, prompt_tokens, gpu_bytes)
        if changed != config and need <= gpu_bytes:
            set_to = " ".join(f"--{part}.{name.replace('_', '-')} {value}" for part, name, value in options)
            found.append(f"{set_to:64}{need / 1e9:8.2f} GB")
            sufficient.append(options)
    return found


_LAYER, _OFFLOAD = (
    ("learn", "gradient_checkpointing", "layer"),
    ("learn", "gradient_checkpointing", "offload"),
)
_SMALL, _BYTES = ("learn", "max_tokens_per_microbatch", 2048), ("engine", "kv_cache_dtype", "fp8")
_FEW = "engine", "max_num_seqs", 32
_REMEDIES = (
    *((one,) for one in (_LAYER, _OFFLOAD, _SMALL, _BYTES, _FEW)),
    *((one, other) for one in (_LAYER, _OFFLOAD) for other in (_SMALL, _BYTES, _FEW)),
    (_OFFLOAD, _SMALL, _BYTES, _FEW),
)


def plan(model: str, config: RunConfig, *, gpu_gb: float, prompt_tokens: int) -> str:
    """A table of the parts, the total, and what fits, or what would make it fit."""
    a = architecture(model)
    if prompt_tokens + config.sample.max_tokens > a.max_positions:
        raise UserError(
            f"{model} has {a.max_positions} positions, prompt_tokens and sample.max_tokens ask for"
            f" {prompt_tokens + config.sample.max_tokens}"
        )
    taken = resolve_checkpointing(a, config, prompt_tokens, gpu_gb * 1e9)
    found = parts(a, taken, prompt_tokens)
    need, fits = total(found), total(found) <= gpu_gb * 1e9
    advice = (
        _what_fits(a, config, taken, prompt_tokens, gpu_gb * 1e9)
        if fits
        else _what_would(a, config, prompt_tokens, gpu_gb * 1e9)
    )
    lines = [
        f"{part.name:36}{part.num_bytes / 1e9:8.2f} GB   {part.when}" for part in found if part.num_bytes
    ]
    return "\n".join(
        [
            f"{model} in {config.model.format}, {config.num_prompts * config.num_generations} samples of up to"
            f" {config.sample.max_tokens} tokens, prompts of {prompt_tokens}, {_learns(config)},"
            f" learn.gradient_checkpointing {taken.learn.gradient_checkpointing}{' (auto)' if taken != config else ''}",
            "",
            *lines,
            f"{'most at once':36}{need / 1e9:8.2f} GB"
            f"   {'fits' if fits else 'does not fit'} into {gpu_gb:g} GB",
            "",
            *advice,
        ]
    )


def _what_fits(
    a: Architecture, config: RunConfig, taken: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> list[str]:
    """taken: the config settled."""
    most = largest(a, config, prompt_tokens, gpu_bytes)
    rank = f" or rank {most.rank}," if config.adapter.kind == "lora" else ""
    lines = [
        f"largest batch {most.num_prompts * config.num_generations} samples at once, or samples of"
        f" {most.max_tokens} tokens,{rank} all else as it is"
    ]
    if holds_operands(a, taken, prompt_tokens, gpu_bytes):
        lines.append(f"learning takes up to {held(a, taken) / 1e9:.2f} GB besides, to hold unpacked operands")
    return lines


def _what_would(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> list[str]:
    found = remedies(a, config, prompt_tokens, gpu_bytes)
    if not found:
        return [
            "not even recomputation, small micro-batches, an FP8 cache and few samples at once make it fit"
        ]
    return ["it fits with", *(f"  {line}" for line in found)]


def _learns(config: RunConfig) -> str:
    return f"rank {config.adapter.rank}" if config.adapter.kind == "lora" else "weights that learn themselves"


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The largest of 1..most for which it holds, if it holds of all smaller ones; 0 if of none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
