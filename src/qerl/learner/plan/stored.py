"""The plan of `qerl sft` and `qerl dpo`: memory by the parts of memory.py, time by the rates of speed.py.

    a group     a prompt with one completion; with two, which share the prompt's rows, in losses of pairs
    a step      sft: an update        dpo: a forward pass for the policy's logprobs before it; kto: a second
                one for completions of other rows
    reference   dpo: a forward pass over every row, once
    sampling    greedy answers to sft.num_eval_samples evaluation rows

tests/learner/test_plan_stored.py holds it against the learner and the batches of runs.
"""

import dataclasses
import math

from qerl.config import RunConfig
from qerl.cost.weights import PASSES
from qerl.errors import UserError, quantity
from qerl.learner.plan.memory import (
    USABLE_SHARE,
    MemoryPart,
    memory_parts,
    peak_bytes,
    resolve_checkpointing,
    with_fields,
    with_microbatches,
)
from qerl.learner.plan.report import LAYER, MICROBATCH, OFFLOAD, as_options, part_lines
from qerl.learner.plan.shapes import read_architecture
from qerl.learner.plan.speed import Gpu, estimate_speed
from qerl.models.architecture import Architecture

_OPTION_SETS = (LAYER,), (OFFLOAD,), (MICROBATCH,), (LAYER, MICROBATCH), (OFFLOAD, MICROBATCH)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """RowLengths(prompt_tokens=256, completion_tokens=300), the means of the rows."""

    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredSpeed:
    step_s: float
    reference_s: float
    """Seconds of the reference's pass over all rows; 0 without one."""
    num_steps: int


def as_groups(config: RunConfig, lengths: RowLengths) -> RunConfig:
    """Return the config of a run with rewards whose steps have the same groups."""
    is_pair = bool(config.dpo.loss_type) and config.dpo.is_paired
    grouped = dataclasses.replace(config, num_generations=2 if is_pair else 1)
    return with_fields(grouped, "sample", max_tokens=lengths.completion_tokens)


def longest_rows(config: RunConfig, lengths: RowLengths, max_length: int) -> RowLengths:
    """Return the lengths of rows that are cut to max_length."""
    prompt_tokens = min(lengths.prompt_tokens, max_length - 1)
    return RowLengths(prompt_tokens=prompt_tokens, completion_tokens=max_length - prompt_tokens)


def stored_parts(a: Architecture, config: RunConfig, longest: RowLengths) -> list[MemoryPart]:
    """Return what learning takes from rows of these lengths, and sampling for answers."""
    learning = memory_parts(a, as_groups(config, longest), longest.prompt_tokens)
    answers = dataclasses.replace(config, num_prompts=max(config.sft.num_eval_samples, 1), num_generations=1)
    sampling = memory_parts(a, answers, longest.prompt_tokens)
    return [part for part in learning if part.when != "sampling"] + [
        part for part in sampling if part.when == "sampling" and config.sft.num_eval_samples > 0
    ]


def estimate_stored_speed(
    gpu: Gpu, a: Architecture, config: RunConfig, lengths: RowLengths, *, num_rows: int
) -> StoredSpeed:
    """Return the time of a step, and of the reference. config: as_groups of the rows, with its
    gradient_checkpointing resolved; num_rows: those of the data, for epochs."""
    prompt_tokens, mean_tokens = dataclasses.astuple(lengths)
    speed = estimate_speed(gpu, a, config, prompt_tokens=prompt_tokens, mean_tokens=mean_tokens)
    row_tokens = prompt_tokens + config.num_generations * mean_tokens
    update_s = row_tokens / speed.learned_tokens_per_s
    read_s = update_s / PASSES[config.learn.gradient_checkpointing]
    has_reference = bool(config.dpo.loss_type)
    num_reads = has_reference + config.dpo.has_kl
    num_steps = math.ceil(config.sft.num_train_epochs * math.ceil(num_rows / config.num_prompts))
    return StoredSpeed(
        step_s=config.num_prompts * (update_s + num_reads * read_s),
        reference_s=num_reads * num_rows * read_s,
        num_steps=num_steps,
    )


def format_stored_plan(
    model: str,
    config: RunConfig,
    *,
    gpu_gb: float,
    lengths: RowLengths,
    num_rows: int,
    max_steps: int | None = None,
    gpu: Gpu | None = None,
) -> tuple[str, bool]:
    """Return the table of the parts with the peak and the time, and whether it fits. lengths: the rows'
    means; memory is that of rows of sft.max_length tokens."""
    a = read_architecture(model, config.model.backend)
    max_length = min(config.sft.max_length or a.max_positions, a.max_positions)
    if lengths.prompt_tokens + lengths.completion_tokens > max_length:
        total = lengths.prompt_tokens + lengths.completion_tokens
        raise UserError(f"rows of {total} tokens are longer than max_length, {max_length}")
    longest, limit = longest_rows(config, lengths, max_length), USABLE_SHARE * gpu_gb * 1e9
    lengths = longest if config.sft.packing else lengths
    resolved = _resolved(a, config, longest, gpu_gb * 1e9)
    parts = stored_parts(a, resolved, longest)
    peak, mode = peak_bytes(parts), resolved.learn.gradient_checkpointing
    lines = [
        f"{model} in {config.model.format}, {quantity(config.num_prompts, 'row')} a step of up to"
        f" {max_length} tokens, rank {config.adapter.rank}, learn.gradient_checkpointing {mode}",
        "",
        *part_lines(parts, peak, gpu_gb),
    ]
    if peak > limit:
        return "\n".join([*lines, "", *_options_that_fit(a, config, longest, gpu_gb * 1e9)]), False
    if gpu is not None:
        grouped = as_groups(resolved, longest)
        grouped = with_microbatches(a, grouped, longest.prompt_tokens, gpu_gb * 1e9)
        speed = estimate_stored_speed(gpu, a, grouped, lengths, num_rows=num_rows)
        lines += _speed_lines(speed, lengths, num_rows, max_steps)
    return "\n".join(lines), True


def _resolved(a: Architecture, config: RunConfig, longest: RowLengths, gpu_bytes: float) -> RunConfig:
    grouped = resolve_checkpointing(a, as_groups(config, longest), longest.prompt_tokens, gpu_bytes)
    return dataclasses.replace(config, learn=grouped.learn)


def _options_that_fit(a: Architecture, config: RunConfig, longest: RowLengths, gpu_bytes: float) -> list[str]:
    for options in _OPTION_SETS:
        changed = config
        for part, name, value in options:
            changed = with_fields(changed, part, **{name: value})
        need = peak_bytes(stored_parts(a, _resolved(a, changed, longest, gpu_bytes), longest))
        if need <= USABLE_SHARE * gpu_bytes:
            return ["it fits with", f"  {as_options(options):64}{need / 1e9:8.2f} GB"]
    return ["does not fit even with offload and small micro-batches: try a shorter --max-length"]


def _speed_lines(speed: StoredSpeed, lengths: RowLengths, num_rows: int, max_steps: int | None) -> list[str]:
    num_steps = max_steps or speed.num_steps
    hours = (num_steps * speed.step_s + speed.reference_s) / 3600
    tokens = f"prompts of {lengths.prompt_tokens} and completions of {lengths.completion_tokens} tokens"
    reference = f", the reference once {speed.reference_s:,.0f} s" if speed.reference_s else ""
    return [
        "",
        f"estimate from arithmetic, {tokens}:",
        f"  {speed.step_s:,.1f} s a step{reference}, {hours:,.1f} h for {quantity(num_steps, 'step')}"
        f" over {quantity(num_rows, 'row')}",
    ]
