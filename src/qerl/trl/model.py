"""Translate a trainer's model, its tokenizer and its quantization to ModelConfig."""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.config import AdapterConfig, ModelConfig
from qerl.errors import UserError, require
from qerl.trl.config import TrainFields
from qerl.trl.weights import with_tokenizer, write_model, write_start_adapter

_FORMATS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8"}
_FOUR_BITS = {"nf4": "nf4", "fp4": "nvfp4"}
_NO_EFFECT = (
    *("dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache", "trust_remote_code"),
    *("use_kernels", "low_cpu_mem_usage", "max_memory", "offload_folder"),
    *("token", "local_files_only", "cache_dir"),
)


def model_path(model: Any, tokenizer: Any, folder: Path) -> tuple[str, AdapterConfig | None]:
    """Return what model.path names, and the adapter that a PeftModel has. Objects are written to the folder;
    one that is quantized is read again from where it came."""
    require(
        tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase),
        f"processing_class must be a tokenizer, got a {type(tokenizer).__name__}:"
        " vision models are not supported",
    )
    if isinstance(model, str):
        return model if tokenizer is None else with_tokenizer(model, tokenizer, folder), None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    require(
        isinstance(base, PreTrainedModel),
        f"model must be a folder, a hub id, a PreTrainedModel or a PeftModel, got a {type(model).__name__}",
    )
    adapter = None if base is model else write_start_adapter(model, folder)
    if getattr(base.config, "quantization_config", None) is not None:
        return str(base.config.name_or_path), adapter
    return str(write_model(model, tokenizer, folder)), adapter


def model_config(model: str, quantization: Any, args: TrainFields, base: ModelConfig) -> ModelConfig:
    """quantization: the trainer's argument; args.model_init_kwargs may have one too."""
    assert not isinstance(args.model_init_kwargs, str)
    options = dict(args.model_init_kwargs or {})
    quantization_option = options.pop("quantization_config", None)
    require(
        quantization_option is None or quantization is None,
        "quantization_config is set both in the trainer and in model_init_kwargs: set it once",
    )
    require(
        options.pop("revision", None) in (None, "main"),
        "model_init_kwargs['revision'] is not supported: pass a folder from snapshot_download",
    )
    if unknown := [name for name, value in options.items() if name not in _NO_EFFECT and value is not None]:
        raise UserError(f"model_init_kwargs[{unknown[0]!r}] is not supported: remove it")
    quantization = quantization_option if quantization is None else quantization
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
