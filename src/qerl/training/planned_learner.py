"""Make the learner as the memory plan says."""

from collections.abc import Callable

from torch import Tensor

from qerl.config import RunConfig
from qerl.cost.operands import operand_cache_bytes
from qerl.learner import Learner
from qerl.learner.distributed import Ranks
from qerl.learner.plan import memory as plan
from qerl.models.policy_model import PolicyModel
from qerl.types import Group


def planned_learner(
    decoder: PolicyModel,
    config: RunConfig,
    prompt_tokens: int,
    *,
    notice: Callable[[str], None],
    score: Callable[[list[Group]], Tensor] | None = None,
    ranks: Ranks,
) -> Learner:
    """Make a learner of the planned config. score: the learner's, in exact mode."""
    config, keeps_operands = planned_config(decoder, config, prompt_tokens, notice=notice, ranks=ranks)
    return Learner(decoder, config, notice=notice, score=score, ranks=ranks, holds_operands=keeps_operands)


def planned_config(
    decoder: PolicyModel,
    config: RunConfig,
    prompt_tokens: int,
    *,
    notice: Callable[[str], None],
    ranks: Ranks,
) -> tuple[RunConfig, bool]:
    """Resolve gradient_checkpointing auto and max_tokens_per_microbatch None by the memory plan, and report
    the plan. Return the config, and if unpacked operands fit too. prompt_tokens: of the longest prompt."""
    keeps_operands = False
    device, arch = decoder.device, decoder.architecture
    if arch is None and config.learn.gradient_checkpointing == "auto":  # there is no plan for this model
        kind = "none" if device.type == "cpu" else "layer"
        config = plan.with_fields(config, "learn", gradient_checkpointing=kind)
    if arch is not None and device.type != "cpu":
        gpu_bytes = min(ranks.gather(plan.usable_bytes(device)))  # all ranks choose the same
        config = plan.resolve_checkpointing(arch, config, prompt_tokens, gpu_bytes)
        config = plan.with_microbatches(arch, config, prompt_tokens, gpu_bytes)
        rows = plan.full_rows(config, prompt_tokens)
        needed_bytes = plan.learning_bytes(plan.memory_parts(arch, config, prompt_tokens, rows))
        keeps_operands = plan.can_cache_operands(arch, config, prompt_tokens, gpu_bytes, rows)
        held_gb = operand_cache_bytes(arch, plan.form_of(config), config.learn) / 1e9
        notice(
            f"learn.gradient_checkpointing is {config.learn.gradient_checkpointing}: learning needs"
            f" {needed_bytes / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB in micro-batches of"
            f" {config.learn.microbatch_tokens:,} tokens"
            + (f", and {held_gb:.1f} GB for operands that stay unpacked" if keeps_operands else "")
        )
    return config, keeps_operands
