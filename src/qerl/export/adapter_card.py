"""Write what an exported adapter's README.md says: on which base it was trained, and how to load that base.

adapter_config.json names the model that the run read. Unless its weights are in the run's format already, the
adapter was trained on others.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qerl.config import ModelConfig
from qerl.errors import UserError
from qerl.models.checkpoint.layouts.compressed_tensors import WRITTEN
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.source import ModelSource, base_name, fitting_weight, locate
from qerl.models.checkpoint.state_dict import architecture_of, linear_groups
from qerl.models.peft.peft_names import PEFT_PREFIX
from qerl.models.peft.peft_reader import ADAPTER, ADAPTER_CONFIG, linears_of, tensor_names
from qerl.models.peft.peft_selection import pattern_value
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


class WrittenAdapter(NamedTuple):
    """WrittenAdapter({"r": 8, "lora_alpha": 16.0, "rank_pattern": {}}, ["model.layers.0.mlp.up_proj"])"""

    entries: Mapping[str, Any]
    """Entries of adapter_config.json."""
    modules: Sequence[str]
    """Full names of the linears, and names of the parameters of experts, that have an adapter."""


def written_adapter(entries: Mapping[str, Any], tensors: Iterable[str]) -> WrittenAdapter:
    """Return what adapter_config.json says of these tensors, which have PEFT's names or transformers'."""
    linears = linears_of(name.removeprefix(PEFT_PREFIX) for name in tensors)
    experts = entries.get("target_parameters") or ()
    return WrittenAdapter(entries, [*(linear.names[0] for linear in linears), *experts])


def read_written_adapter(folder: Path) -> WrittenAdapter:
    """Return the adapter that `write_adapter` wrote into the folder."""
    return written_adapter(read_json(folder / ADAPTER_CONFIG), tensor_names(folder / ADAPTER))


def vllm_obstacle(adapter: WrittenAdapter) -> str | None:
    """Return why vLLM cannot serve this adapter: it has no modules_to_save, and its PEFTHelper scales every
    module by r, lora_alpha and use_rslora alone (vllm/lora/peft_helper.py, lora_weights.py)."""
    if adapter.entries.get("modules_to_save"):
        return WHOLE_NOT_IN_VLLM
    exponent = 0.5 if adapter.entries.get("use_rslora") else 1.0
    factors = [alpha / rank**exponent for rank, alpha in _ranks_and_alphas(adapter)]
    return None if math.isclose(min(factors), max(factors)) else NOT_IN_VLLM


def vllm_options(adapter: WrittenAdapter) -> str:
    """Return vLLM's options for the adapter, with the least value of --max-lora-rank that fits."""
    rank = max(rank for rank, _ in _ranks_and_alphas(adapter))
    return f"--enable-lora --max-lora-rank {next((each for each in _VLLM_RANKS if each >= rank), rank)}"


def _ranks_and_alphas(adapter: WrittenAdapter) -> set[tuple[int, float]]:
    """Return r and lora_alpha, which vLLM takes for every module, and what the patterns give each module."""
    ranks, alphas = (adapter.entries.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    rank, alpha = adapter.entries["r"], adapter.entries["lora_alpha"]
    of_modules = {(pattern_value(ranks, n, rank), pattern_value(alphas, n, alpha)) for n in adapter.modules}
    return of_modules | {(rank, alpha)}


def adapter_card(name: str, model: ModelConfig, run: Path | None, adapter: WrittenAdapter) -> str:
    """Return a README.md. run: the folder of the run, None for an adapter without one."""
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


def base_section(model: ModelConfig, run: Path | None, adapter: WrittenAdapter) -> str:
    """Return the section about the base."""
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
