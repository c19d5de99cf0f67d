"""Learning rates by the size of a model, for runs whose user gives none.

The size is read from a folder's config.json, or from a hub id such as Qwen/Qwen2.5-1.5B-Instruct.
"""

import json
import math
import re
from pathlib import Path

from qerl.config.run import RunConfig

LORA_RATES = ((0.3, 5e-4), (3.0, 5e-5), (math.inf, 1e-5))
"""(billions of weights under which, learning rate) of LoRA. SmolLM2-135M learns the demo's sums at 5e-4. The
studies of 0.5B and 1.5B models learn at 5e-5 in steps in which they hardly move at 1e-5; 1e-5 is QeRL's rate
at 3B and 7B (arXiv 2510.11696, table 4)."""
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)


def rate_for(config: RunConfig) -> tuple[float, str] | None:
    """Return the learning rate for the size of the config's model, and the size in words; None with full
    weights, or for a model whose size is not known."""
    size = None if config.adapter.kind != "lora" else billions_of(config.model.path)
    if size is None:
        return None
    rate = next(rate for limit, rate in LORA_RATES if size < limit)
    return rate, f"{size:.2g} billion weights" if size < 10 else f"{size:.0f} billion weights"


def billions_of(path: str) -> float | None:
    """Return how many billions of weights a model has, from its config.json or its name; None if neither
    says."""
    try:
        stored = json.loads((Path(path).expanduser() / "config.json").read_text())
        size = _of_shape(stored.get("text_config", stored))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        size = None
    named = _BILLIONS.findall(re.sub(r"[-_/]", " ", path))
    return size if size is not None or not named else float(named[0][0]) / (1e3 if named[0][1] in "mM" else 1)


def _of_shape(config: dict[str, int]) -> float:
    """Count the weights of a dense decoder, and all experts of a mixture."""
    width, layers, vocab = (config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_share = (config.get("num_key_value_heads") or heads) / heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    ff_width = (config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"]
    per_layer = width * width * (2 + 2 * kv_share) + 3 * width * ff_width * experts
    return (layers * per_layer + vocab * width) / 1e9
