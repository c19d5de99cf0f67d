"""Resolve `auto` in a ModelConfig for this machine; the result is stored in the run's config."""

import dataclasses
from typing import Literal

import torch

from qerl.config import ModelConfig
from qerl.errors import UserError, require

Kernels = Literal["hopper", "portable", "torch"]
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve_device(config: ModelConfig) -> ModelConfig:
    """Return the config with every `auto` replaced."""
    has_cuda = torch.cuda.is_available()
    device = config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")
    if device == "cuda" and not has_cuda:
        raise UserError("model.device is cuda, but torch finds no CUDA device")
    fast_bf16 = multiplies_bf16(device)
    compute = config.dtype if config.dtype != "auto" else ("bf16" if fast_bf16 else "fp32")
    operand = config.operand if config.operand != "auto" else ("resident" if device == "cpu" else "packed")
    resolved = {"device": device, "dtype": compute, "operand": operand, "scales": config.block_scales}
    return dataclasses.replace(config, **resolved)


def best_kernels(device: torch.device) -> Kernels:
    """Return the decode kernels that this device runs fastest; `portable` are for any GPU from Ampere on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "torch"
    capability = torch.cuda.get_device_capability(device)
    return "hopper" if capability == (9, 0) else "portable" if capability >= (8, 0) else "torch"


def choose_kernels(wanted: Kernels | Literal["auto"], device: torch.device) -> Kernels:
    """Resolve `engine.kernels`. Raise UserError if the device cannot run the kernels that are wanted."""
    best = best_kernels(device)
    if wanted == "auto":
        return best
    if wanted == "hopper":
        require(best == "hopper", "engine.kernels is hopper, which needs a Hopper GPU; use auto")
    if wanted == "portable":
        needs = "an NVIDIA GPU from Ampere on"
        require(best != "torch", f"engine.kernels is portable, which needs {needs}; use auto")
    return wanted


def has_tile_kernels(device: torch.device) -> bool:
    """True where the decode kernels for NVFP4 tiles run: NVIDIA GPUs from Ampere on."""
    return best_kernels(device) != "torch"


def keeps_tiles(compute: torch.dtype, device: torch.device) -> bool:
    """True where weights are kept in the decode kernels' tiles, unless they are resident."""
    return compute == torch.bfloat16 and has_tile_kernels(device)


def multiplies_bf16(device: str) -> bool:
    """True if bf16 products run in hardware; otherwise torch emulates them, slower than fp32."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 may not have it
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
