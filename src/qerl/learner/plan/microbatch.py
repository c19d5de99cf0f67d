"""Larger micro-batches of a small model, so that its GPU does not wait for the host.

The host launches a pass of 28 layers in 0.2 to 0.4 s, however many tokens it has. Tokens/s of an update by
tokens of a micro-batch (H100, NVFP4, no recomputation / layers recomputed; dev/LOG.md, 2026-11-27):

                    8,192              16,384             32,768             65,536
    0.5B shape     33,600                                85,500             96,500
    1.5B shape     34,100 / 19,900    46,400 / 35,900    52,600 / 40,100         - / 40,900

Samples of many lengths fill 8,192 tokens unevenly. An H200 learned from 96 samples of 42 to 3,074 tokens in
groups of eight at the 7B shape (int8, FlashAttention 2) at 19,450 tokens/s with 8,192 and 20,080 with 16,384,
layers recomputed at 15,710 and 16,170; from samples of one length at 20,670 and 20,970.
"""

from qerl.config import RunConfig
from qerl.cost.operands import operand_cache_bytes
from qerl.cost.weights import num_weights
from qerl.learner.plan.memory import (
    USABLE_SHARE,
    form_of,
    full_rows,
    learning_bytes,
    memory_parts,
    with_fields,
)
from qerl.models.architecture import Architecture

MAX_TOKENS = 65_536
_ENOUGH_WORK = 5e13  # tokens * weights: 0.7 s of an H100
_EVEN_TOKENS = 16_384


def with_microbatches(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> RunConfig:
    """Return the config with learn.max_tokens_per_microbatch None replaced by 8,192, or by a larger number
    with which learning fits whatever the samples' lengths: what keeps the GPU busy, and at least 16,384 if
    unpacked operands, where a format has any, still fit beside it. Its gradient_checkpointing must be
    resolved. gpu_bytes includes the CUDA context."""
    if config.learn.max_tokens_per_microbatch is not None:
        return config
    tokens, weights = config.learn.microbatch_tokens, num_weights(a)
    while tokens < MAX_TOKENS:
        is_enough = tokens * weights >= _ENOUGH_WORK
        larger = with_fields(config, "learn", max_tokens_per_microbatch=2 * tokens)
        parts = memory_parts(a, larger, prompt_tokens, full_rows(larger, prompt_tokens))
        free_bytes = USABLE_SHARE * gpu_bytes - learning_bytes(parts)
        operands = operand_cache_bytes(a, form_of(larger), larger.learn)
        if free_bytes < 0 or (is_enough and (tokens >= _EVEN_TOKENS or operands > free_bytes)):
            break
        tokens *= 2
    return with_fields(config, "learn", max_tokens_per_microbatch=tokens)
