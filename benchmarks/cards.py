"""List which shapes train on a GPU of each memory size, as `qerl plan` predicts it (dev/cards.md).

Nothing here is measured: memory comes from learner/plan/memory.py, speed from learner/plan/speed.py.
"""

from benchmarks.rows import markdown
from qerl.config import AdapterConfig, EngineConfig, LearnConfig, RunConfig, SampleConfig
from qerl.learner.plan.memory import (
    USABLE_SHARE,
    memory_parts,
    peak_bytes,
    resolve_checkpointing,
)
from qerl.learner.plan.report import KERNEL_NAMES, largest_settings
from qerl.learner.plan.speed import GPUS, Gpu, estimate_speed, planned_kernels
from qerl.models.architecture import Architecture
from qerl.models.random_weights import SHAPES

PROMPT_TOKENS, SAMPLE_TOKENS, GROUP = 256, 1024, 8
MAX_BATCH = 512
CARDS = {  # the GPU of each memory size whose speed the table shows, in units of 2 ** 30 as cards are sold
    8: "rtx-4060",
    12: "rtx-3060",
    16: "rtx-4080",
    24: "rtx-4090",
    32: "rtx-5090",
    40: "a100-40",
    48: "l40s",
    80: "h100",
    141: "h200",
}
_SMALL_MICROBATCH = 2048
_HEADER = ["shape", "samples at once", "longest", "checkpointing", "micro-batch", "sampled/s", "learned/s"]


def card_tables(_rows: object = None) -> str:
    """Return a table for each memory size: a line for each shape that trains. Mixtures have no estimate of
    speed, and the kernels of hybrids have not run on a GPU."""
    return "\n\n".join(_card_table(size, name) for size, name in CARDS.items())


def _card_table(size: int, name: str) -> str:
    plain = {shape: a for shape, a in SHAPES.items() if a.mixture is None and a.delta is None}
    lines = {shape: _line(shape, a, GPUS[name]) for shape, a in plain.items()}
    kernels = KERNEL_NAMES[planned_kernels(GPUS[name], "auto")]
    table = markdown(
        f"**{size} GB**, tokens per second of {name}, {kernels}.",
        _HEADER,
        [*filter(None, lines.values())],
        [],
    )
    too_large = ", ".join(shape for shape, line in lines.items() if not line)
    return f"{table}\n\nToo large: {too_large}." if too_large else table


def _line(shape: str, a: Architecture, gpu: Gpu) -> list[str] | None:
    """Return the shape's line, None if not even one group of samples fits."""
    config = _fitting(a, gpu)
    if config is None:
        return None
    largest = largest_settings(a, config, PROMPT_TOKENS, gpu.memory_gb * 1e9)
    num_prompts = min(largest.num_prompts, MAX_BATCH // GROUP)
    full = _config(num_prompts, config.learn.microbatch_tokens)
    full = resolve_checkpointing(a, full, PROMPT_TOKENS, gpu.memory_gb * 1e9)
    speed = estimate_speed(gpu, a, full, prompt_tokens=PROMPT_TOKENS, mean_tokens=SAMPLE_TOKENS)
    return [
        shape,
        f"{GROUP * num_prompts}",
        f"{largest.max_tokens:,}",
        full.learn.gradient_checkpointing,
        f"{full.learn.microbatch_tokens:,}",
        f"{speed.sampled_tokens_per_s:,.0f}",
        f"{speed.learned_tokens_per_s:,.0f}",
    ]


def _fitting(a: Architecture, gpu: Gpu) -> RunConfig | None:
    """Return a run of one group with the largest micro-batch that fits, None if none does."""
    for micro_tokens in (LearnConfig().microbatch_tokens, _SMALL_MICROBATCH):
        config = _config(1, micro_tokens)
        resolved = resolve_checkpointing(a, config, PROMPT_TOKENS, gpu.memory_gb * 1e9)
        if peak_bytes(memory_parts(a, resolved, PROMPT_TOKENS)) <= USABLE_SHARE * gpu.memory_gb * 1e9:
            return config
    return None


def _config(num_prompts: int, micro_tokens: int) -> RunConfig:
    return RunConfig(
        num_prompts=num_prompts,
        num_generations=GROUP,
        adapter=AdapterConfig(rank=32),
        sample=SampleConfig(max_tokens=SAMPLE_TOKENS),
        engine=EngineConfig(max_num_seqs=GROUP * num_prompts),
        learn=LearnConfig(max_tokens_per_microbatch=micro_tokens),
    )
