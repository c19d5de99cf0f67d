"""The table of docs/models.md: for each family what computes its decode steps, exact mode and the learner.

A family is a small model of it, with sizes that the kernels take, from a config.json as published ones are.
Families with the same answers share a row.
Every entry is an answer of the code that decides it at run time, so that the table cannot promise more.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from qerl.engine.decode.kernel_forward import kernel_obstacle
from qerl.engine.decode.runner_cache import exact_mode_obstacle, kernel_head
from qerl.kernels.attention.flash_attention import is_for_flash
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.device import Kernels
from qerl.models.families import FAMILIES, from_hf_config

_PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_START, _END = "<!-- families -->", "<!-- end of families -->"
_PAGE_TOKENS, _RANK = 16, 32
_KERNELS: tuple[Kernels, ...] = ("hopper", "portable")
_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
_ENTRIES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {**_WINDOWS, "head_dim": 256},
    "Gemma3ForCausalLM": {**_WINDOWS, "head_dim": 256},
    "Gemma4ForCausalLM": {
        **_WINDOWS,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "GptOssForCausalLM": {
        **_WINDOWS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": _YARN,
    },
    "GraniteForCausalLM": _FACTORS,
    "GraniteMoeForCausalLM": {**_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": {
        **_FACTORS,
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
    },
    "MinistralForCausalLM": _WINDOWS,
    "Ministral3ForCausalLM": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "Olmo3ForCausalLM": _WINDOWS,
    "OlmoeForCausalLM": _EXPERTS,
    "Phi3ForCausalLM": {"sliding_window": 2047},
    "Qwen3MoeForCausalLM": _EXPERTS,
    "Qwen3NextForCausalLM": _DELTA | {"num_experts": 0},
    "Qwen3_5ForCausalLM": _DELTA,
}
_COLUMNS = (
    "families",
    "decode kernels, Hopper",
    "portable",
    "token drawn by",
    "exact mode",
    "learner's attention",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FamiliesOptions:
    write: bool = False
    """Write the table into docs/models.md instead of printing it."""


def print_families(options: FamiliesOptions) -> None:
    """Print a table of what computes each family: the decode kernels, exact mode, the learner."""
    if options.write:
        _PAGE.write_text(filled(_PAGE.read_text()))
    else:
        print("\n".join(table()))


def filled(page: str) -> str:
    """Return the page with the present table."""
    start, end = page.index(_START) + len(_START), page.index(_END)
    return "\n".join((page[:start], "", *table(), "", page[end:]))


def table() -> Iterator[str]:
    """Yield the lines of the table, of what is used without asking for more."""
    with mock.patch.dict(os.environ):
        os.environ.pop("QERL_UNTRIED", None)
        yield from list(_lines())


def _lines() -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{' --- |' * len(_COLUMNS)}"
    families: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        families.setdefault(tuple(_answers(small(family))), []).append(f"`{family}`")
    for answers, names in families.items():
        yield f"| {' | '.join((', '.join(names), *answers))} |"


def small(family: str) -> Architecture:
    """Return the architecture of a small model of this family."""
    return from_hf_config(_SIZES | _ENTRIES.get(family, {}) | {"architectures": [family]})


def _answers(a: Architecture) -> Iterator[str]:
    decoder = Decoder(a, compute=torch.bfloat16, device=torch.device("meta"))
    obstacles = [
        kernel_obstacle(a, kernels, decoder.compute, ranks={_RANK}, page_tokens=_PAGE_TOKENS)
        for kernels in _KERNELS
    ]
    yield from map(_answer, obstacles)
    yield "PyTorch operations" if kernel_head(decoder, "hopper") is None else "kernel"
    yield "PyTorch operations" if exact_mode_obstacle(a) or all(obstacles) else "kernels"
    yield _learners_attention(decoder)


def _answer(obstacle: str | None) -> str:
    """Return yes, or the obstacle without what it explains."""
    if obstacle is None:
        return "yes"
    return f"no: {obstacle.partition(':')[0].partition(' (')[0].removeprefix('they do not compute ')}"


def _learners_attention(decoder: Decoder) -> str:
    """Return what computes it: FlashAttention where nothing but plain attention is asked for."""
    attentions = [x.self_attn for x in decoder.layers if isinstance(x, Layer) and hasattr(x, "self_attn")]
    kinds = {is_for_flash(attention.head_size, attention.options) for attention in attentions}
    names = {True: "FlashAttention", False: "PyTorch operations"}
    return ", ".join(names[kind] for kind in (True, False) if kind in kinds)
