"""Attention of sequences in a row on Hopper and Blackwell: FlashAttention 4, where its package is installed.

    pip install --pre "flash-attn-4[cu13]" einops

It computes what flash_attention.py does, and soft caps. Its backward pass adds the parts of dq, dk and dv in
a fixed order, by counters that each block waits for. Each kind of attention (head size, heads a key head,
window, cap, sinks, few or more than 256 sequences, up to or more than 64 queries) is compiled when it is
first met, forward and backward for about 10 s, and kept beside the other compiled kernels.

With sinks and a key head for each query head, 4.0.0b36 returned zeros for short sequences
on an H100, so FlashAttention 2 computes these. Blackwell is asked for by QERL_UNTRIED=1: none has run it.

It also imports Triton and einops. Where one of its packages is missing, FlashAttention 2 takes its place and
a line is logged.
"""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.cache import cache_folder
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.flash_attention import SequenceEnds
from qerl.kernels.runtime import untried

_PACKAGE, _MODULE = "flash_attn", "flash_attn.cute.interface"
_FILE = "cute/interface.py"
_MAX_HEAD_BY_MAJOR = {9: 256, 10: 128}
_logger = logging.getLogger(__name__)


def is_for_flash_4(q_TNH: Tensor, num_key_heads: int, options: AttentionOptions = PLAIN) -> bool:
    """True if FlashAttention 4 is installed and computes such attention."""
    if not (q_TNH.is_cuda and q_TNH.dtype in (torch.bfloat16, torch.float16)):
        return False
    major, _ = torch.cuda.get_device_capability(q_TNH.device)
    _, num_heads, head_size = q_TNH.shape
    if (options.sinks_N is not None and num_heads == num_key_heads) or not (major == 9 or untried.are_used()):
        return False
    is_size = head_size % 8 == 0 and head_size <= _MAX_HEAD_BY_MAJOR.get(major, 0)
    return is_size and _is_installed() and _function() is not None


def flash_attention_4(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, ends: SequenceEnds, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH of sequences with these ends; differentiable in q, k and v, deterministic."""
    window, compute = options.window, _function()
    assert compute is not None
    o_TNH, _ = compute(
        q_TNH,
        k_RKH,
        v_RKH,
        cu_seqlens_q=ends.queries,
        cu_seqlens_k=ends.keys,
        max_seqlen_q=ends.max_queries,
        max_seqlen_k=ends.max_keys,
        softmax_scale=options.scale_of(q_TNH.shape[2]),
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        learnable_sink=options.sinks_N,
        softcap=options.softcap or 0.0,
        deterministic=True,
    )
    return o_TNH


def version_used() -> int:
    """Return 4 if this process has imported FlashAttention 4 to compute attention, else 2."""
    return 4 if _function.cache_info().currsize and _function() else 2


@functools.cache
def _is_installed() -> bool:
    """True if the files are there. The package reads its switches when it is imported, so this must not."""
    package = importlib.util.find_spec(_PACKAGE)
    folders = [] if package is None else package.submodule_search_locations or []
    return any((Path(folder) / _FILE).is_file() for folder in folders)


@functools.cache
def _function() -> Callable[..., Any] | None:
    """Import the package; None if it cannot be imported."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attention-4"))
    try:
        function = importlib.import_module(_MODULE).flash_attn_varlen_func
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        _logger.warning("FlashAttention 4 is installed but not used (%s: %s)", type(error).__name__, error)
        return None
    _logger.info("attention of packed rows by FlashAttention 4")
    return function
