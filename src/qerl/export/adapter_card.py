"""Write what an exported adapter's README.md says: on which base it was trained, and how to load that base.

adapter_config.json names the model that the run read. Unless its weights are in the run's format already, the
adapter was trained on others.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.config import ModelConfig
from qerl.errors import UserError
from qerl.models.checkpoint.layouts.compressed_tensors import WRITTEN
from qerl.models.checkpoint.source import ModelSource, base_name, fitting_weight, locate
from qerl.models.checkpoint.state_dict import architecture_of, linear_groups
from qerl.models.transformers_backend.backend import backend_of

_PACKED = """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    unpacked = CompressedTensorsConfig(dequantize=True)
    base = AutoModelForCausalLM.from_pretrained("base", quantization_config=unpacked)
    model = PeftModel.from_pretrained(base, "ADAPTER")
"""
_PLAIN = """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "ADAPTER")
"""


_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def vllm_rank(rank: int) -> int:
    """Return the least of the values that vLLM's --max-lora-rank has, for an adapter of this rank."""
    return next((each for each in _VLLM_RANKS if each >= rank), rank)


def adapter_card(name: str, model: ModelConfig, run: Path | None, rank: int | None) -> str:
    """Return a README.md. run: the run's folder, None for an adapter without one. rank: of base_section."""
    base = base_name(model.path)
    facts = {"library_name": "peft", "tags": ["qerl"]}
    if not Path(base).exists():
        facts = {"base_model": base} | facts
    opening = f"A LoRA adapter for {base}, trained by qerl.\n"
    return card_text(name, facts, opening + base_section(model, run, rank))


def card_text(name: str, facts: Mapping[str, Any], text: str) -> str:
    """Return a README.md whose YAML head has these facts."""
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in facts.items())
    return f"---\n{head}\n---\n\n# {name}\n\n{text}"


def base_section(model: ModelConfig, run: Path | None, rank: int | None) -> str:
    """Return the section about the base. rank: the largest of the adapter; None: vLLM cannot load it."""
    base, trained = base_name(model.path), trained_on(model)
    if trained is None:
        return f"\n## Base\n\nIt was trained on the weights of {base} as they are.\n"
    text = f"\n## Base\n\nIt was trained on {trained}. On other weights it computes something else.\n"
    if not (commands := base_commands(model, run)):
        return text
    one = "Each line" if len(commands) > 1 else "This line"
    shown = "\n".join(f"    {command}" for command in commands)
    load = _PACKED if _is_packed(model) else _PLAIN
    text = f"{text}{one} writes the base that it was trained on:\n\n{shown}\n{load}\n"
    if rank is None:
        return f"{text}vLLM has no modules_to_save: export the run `--as merged` for it.\n"
    serve = f"vllm serve base --enable-lora --max-lora-rank {vllm_rank(rank)} --lora-modules adapter=ADAPTER"
    return f"{text}or `{serve}`.\n"


def trained_on(model: ModelConfig) -> str | None:
    """Return on what a run of this model trains its adapter; None if on the weights as they are stored."""
    base = base_name(model.path)
    try:
        source = locate(model.path)
        if source.is_gguf:
            base = f"the weights of {source.path.name}"
        elif model.format == "bf16" or _is_stored(source, model):
            return None
    except UserError:  # the base is gone
        pass
    return base if model.format == "bf16" else f"{base} quantized to {model.format}"


def _is_stored(source: ModelSource, model: ModelConfig) -> bool:
    """True if the checkpoint has the run's codes."""
    if backend_of(model) == "transformers":
        return False
    checkpoint = source.open()
    a = architecture_of(checkpoint)
    if a.mixture is not None and a.mixture.stored == "blocks":
        return model.format == "mxfp4"
    return fitting_weight(checkpoint, linear_groups(a)[0][0], model.format) is not None


def _is_packed(model: ModelConfig) -> bool:
    """True if its base is written in 4 bits."""
    try:
        return model.format in WRITTEN and backend_of(model) == "qerl"
    except UserError:  # the base is gone
        return False


def base_commands(model: ModelConfig, run: Path | None) -> list[str]:
    """Return command lines that write the base."""
    commands = [] if run is None else [f"qerl export {shlex.quote(str(run))} base --as base"]
    if _is_packed(model):
        commands.append(f"qerl quantize {shlex.quote(model.path)} base --format {model.format}")
    return commands
