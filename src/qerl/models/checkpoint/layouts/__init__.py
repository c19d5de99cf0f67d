"""Read weights as quantized checkpoints of other tools store them. layout.py says how to add one."""

from collections.abc import Callable
from typing import Any

from qerl.errors import UserError, naming
from qerl.models.checkpoint.layouts import (
    awq_int4,
    bnb_nf4,
    compressed_tensors,
    fp8_blocks,
    gptq_int4,
    modelopt,
    mxfp4_blocks,
)
from qerl.models.checkpoint.layouts.folder import QuantizedFolder
from qerl.models.checkpoint.layouts.layout import Layout, LayoutError, TensorFolder
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder

READERS: dict[str, Callable[[TensorFolder, dict[str, Any]], Layout]] = {
    compressed_tensors.NAME: compressed_tensors.read_layout,
    **dict.fromkeys(fp8_blocks.METHODS, fp8_blocks.read_layout),
    **dict.fromkeys(modelopt.METHODS, modelopt.read_layout),
    mxfp4_blocks.NAME: mxfp4_blocks.read_layout,
    "awq": awq_int4.read_layout,
    "gptq": gptq_int4.read_layout,
    "bitsandbytes": bnb_nf4.read_layout,
}
"""By quant_method."""
QUANTIZATION_KEYS = "quantization_config", "compression_config"


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization entries."""
    return {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}


def quantization_config(folder: TensorFolder) -> dict[str, Any] | None:
    """Return the checkpoint's quantization_config, of a multimodal class that of its language model."""
    text = folder.config.get("text_config")
    for config in (folder.config, text if isinstance(text, dict) else {}):
        for key in QUANTIZATION_KEYS:
            if (quantization := config.get(key)) is not None:
                if not isinstance(quantization, dict):
                    raise UserError(f"{folder.path}: {key} must be an object, is {quantization!r}")
                return quantization
    if (folder.path / modelopt.CONFIG_FILE).is_file():
        return read_json(folder.path / modelopt.CONFIG_FILE) | {"quant_method": modelopt.METHODS[0]}
    return None


def with_layout(folder: SafetensorsFolder) -> SafetensorsFolder | QuantizedFolder:
    """Return the folder with its quantized weights shown as float tensors; itself, if there are none.
    Raise UserError for a quantization that is not supported."""
    config = quantization_config(folder)
    if config is None:
        return folder
    producer = config.get("producer")  # ModelOpt names itself there if there is no quant_method
    method = config.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    if not isinstance(method, str) or method not in READERS:
        raise UserError(
            f"{folder.path}: is quantized with {method}, which is not supported; supported are float weights"
            f" and {', '.join(READERS)}"
        )
    with naming(folder.path, LayoutError):
        return QuantizedFolder(folder, READERS[method](folder, config))
