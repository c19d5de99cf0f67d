"""Translate the model of a GRPOTrainer and its quantization to ModelConfig."""

import dataclasses
from typing import Any

from qerl.config import ModelConfig
from qerl.errors import UserError, require
from qerl.trl.config import GRPOConfig

_FORMATS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8"}
_FOUR_BITS = {"nf4": "nf4", "fp4": "nvfp4"}
_NO_EFFECT = (
    *("dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache", "trust_remote_code"),
    *(
        "use_kernels",
        "low_cpu_mem_usage",
        "max_memory",
        "offload_folder",
        "token",
        "local_files_only",
        "cache_dir",
    ),
)


def model_config(model: Any, quantization: Any, args: GRPOConfig, base: ModelConfig) -> ModelConfig:
    """quantization: the trainer's argument; args.model_init_kwargs may have one too."""
    require(isinstance(model, str), f"model must be a folder or a hub id, got a {type(model).__name__}")
    assert not isinstance(args.model_init_kwargs, str)
    options = dict(args.model_init_kwargs or {})
    given = options.pop("quantization_config", None)
    require(
        given is None or quantization is None,
        "quantization_config is set both in the trainer and in model_init_kwargs: set it once",
    )
    require(
        options.pop("revision", None) in (None, "main"),
        "model_init_kwargs['revision'] is not supported: pass a folder from snapshot_download",
    )
    if unknown := [name for name, value in options.items() if name not in _NO_EFFECT and value is not None]:
        raise UserError(f"model_init_kwargs[{unknown[0]!r}] is not supported: remove it")
    quantization = given if quantization is None else quantization
    return dataclasses.replace(
        base, path=model, format=base.format if quantization is None else format_of(quantization)
    )


def format_of(quantization: Any) -> Any:
    """Return the model.format of transformers' quantization config, an object or a dict."""
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method", "bitsandbytes")))
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        return _FOUR_BITS[settings.get("bnb_4bit_quant_type", "fp4")]
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "int8"
    if method == "bitsandbytes":
        return "bf16"
    require(
        method in _FORMATS,
        f"quantization_config: {method} is not supported; use BitsAndBytesConfig, Mxfp4Config,"
        " FineGrainedFP8Config or base=RunConfig(model=ModelConfig(format=...))",
    )
    return _FORMATS[method]
