"""Write what an exported adapter's README.md says: on which base it was trained, and how to load that base.

adapter_config.json names the model that the run read. Unless its weights are in the run's format already, the
adapter was trained on others.
"""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.config import AdapterConfig, ModelConfig
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
NOT_IN_VLLM = (
    "vLLM computes something else with this adapter: it scales every linear by lora_alpha / r, and does not"
    " read rank_pattern and alpha_pattern; export the run with --as merged"
)
WHOLE_NOT_IN_VLLM = "vLLM has no modules_to_save: export the run with --as merged"


def vllm_obstacle(adapter: Mapping[str, Any]) -> str | None:
    """Return why vLLM cannot serve an adapter with these entries of adapter_config.json: it has no
    modules_to_save, and its PEFTHelper reads r, lora_alpha and use_rslora alone (vllm/lora/peft_helper.py,
    lora_weights.py)."""
    if adapter.get("modules_to_save"):
        return WHOLE_NOT_IN_VLLM
    exponent = 0.5 if adapter.get("use_rslora") else 1.0
    factors = [alpha / rank**exponent for rank, alpha in _ranks_and_alphas(adapter)]
    return None if math.isclose(min(factors), max(factors)) else NOT_IN_VLLM


def vllm_options(adapter: Mapping[str, Any]) -> str:
    """Return vLLM's options for an adapter with these entries, with the least value of --max-lora-rank that
    fits."""
    rank = max(rank for rank, _ in _ranks_and_alphas(adapter))
    return f"--enable-lora --max-lora-rank {next((each for each in _VLLM_RANKS if each >= rank), rank)}"


def _ranks_and_alphas(adapter: Mapping[str, Any]) -> set[tuple[int, float]]:
    ranks, alphas = (adapter.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    usual = adapter["r"], adapter["lora_alpha"]
    return {(ranks.get(key, usual[0]), alphas.get(key, usual[1])) for key in {*ranks, *alphas}} | {usual}


def entries_of(adapter: AdapterConfig) -> dict[str, Any]:
    """Return the entries of an adapter's adapter_config.json that say what is trained."""
    of_experts = {} if adapter.experts == "none" else {"experts": adapter.expert_rank}
    ranks = dict(adapter.rank_pattern) | of_experts
    numbers = {"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.use_rslora}
    patterns = {"rank_pattern": ranks, "alpha_pattern": dict(adapter.alpha_pattern)}
    whole = [*adapter.modules_to_save, *(["norms"] if adapter.train_norms else [])]
    return numbers | patterns | {"modules_to_save": whole}


def adapter_card(name: str, model: ModelConfig, run: Path | None, adapter: Mapping[str, Any]) -> str:
    """Return a README.md. run: the folder of the run, None for an adapter without one. adapter: its entries
    of adapter_config.json."""
    base = base_name(model.path)
    facts = {"library_name": "peft", "tags": ["qerl"]}
    if not Path(base).exists():
        facts = {"base_model": base} | facts
    opening = f"A LoRA adapter for {base}, trained by qerl.\n"
    return card_text(name, facts, opening + base_section(model, run, adapter))


def card_text(name: str, facts: Mapping[str, Any], text: str) -> str:
    """Return a README.md whose YAML head has these facts."""
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in facts.items())
    return f"---\n{head}\n---\n\n# {name}\n\n{text}"


def base_section(model: ModelConfig, run: Path | None, adapter: Mapping[str, Any]) -> str:
    """Return the section about the base. adapter: its entries of adapter_config.json."""
    base, trained, obstacle = base_name(model.path), trained_on(model), vllm_obstacle(adapter)
    warning = f"\n{obstacle}.\n" if obstacle else ""
    if trained is None:
        return f"\n## Base\n\nIt was trained on the weights of {base} as they are.\n{warning}"
    text = f"\n## Base\n\nIt was trained on {trained}. On other weights it computes something else.\n"
    if not (commands := base_commands(model, run)):
        return text + warning
    one = "Each line" if len(commands) > 1 else "This line"
    shown = "\n".join(f"    {command}" for command in commands)
    load = _PACKED if _is_packed(model) else _PLAIN
    serve = warning or f"\nor `vllm serve base {vllm_options(adapter)} --lora-modules adapter=ADAPTER`.\n"
    return f"{text}{one} writes the base that it was trained on:\n\n{shown}\n{load}{serve}"


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
