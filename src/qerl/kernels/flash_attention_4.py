"""Attention of sequences in a row on Hopper and Blackwell: FlashAttention 4, where its package is installed.

    pip install --pre flash-attn-4

It computes what flash_attention.py does, and soft caps. Each kind of attention is compiled when it is first
met, forward and backward for 10 to 30 s each, and kept beside the other compiled kernels.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qerl.config.cache import cache_folder
from qerl.kernels import untried
from qerl.kernels.attention_options import PLAIN, AttentionOptions
from qerl.kernels.flash_attention import SequenceEnds

_PACKAGE, _MODULE = "flash_attn", "flash_attn.cute.interface"
_MAX_HEAD_BY_MAJOR = {9: 256, 10: 128}


def is_for_flash_4(q_TNH: Tensor) -> bool:
    """True if FlashAttention 4 is installed and computes attention of such queries."""
    if not (untried.are_used() and q_TNH.is_cuda and q_TNH.dtype in (torch.bfloat16, torch.float16)):
        return False
    major, _ = torch.cuda.get_device_capability(q_TNH.device)
    head_size = q_TNH.shape[2]
    return head_size % 8 == 0 and head_size <= _MAX_HEAD_BY_MAJOR.get(major, 0) and _is_installed()


def flash_attention_4(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, ends: SequenceEnds, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH of sequences with these ends; differentiable in q, k and v, deterministic."""
    window = options.window
    o_TNH, _ = _function()(
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


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None and importlib.util.find_spec(_MODULE) is not None


@functools.cache
def _function() -> Callable[..., Any]:
    # its switches are read when it is imported
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attention-4"))
    return importlib.import_module(_MODULE).flash_attn_varlen_func
