"""The memory of the adapters of `qerl tinker`'s training clients beside one base, of n weights each.

    masters    4 n, moments 8 n, gradients 4 n: of each client on the device (--device-adapters)
    by row     what samples in one decode step, up to --shared-adapters (cost/weights.py), as the KV cache
               leaves it (engine/cache/budget.py)

The place in the decoder that clients take in turn has masters, copies and gradients too, as a run's adapter
has, but no moments. tests/learner/test_plan_clients.py compares each part with what the server holds.
"""

import dataclasses

from qerl.config import RunConfig
from qerl.config.options import SHARED_ADAPTERS
from qerl.cost.weights import num_trained_weights, row_adapter_bytes
from qerl.errors import require
from qerl.learner.plan.memory import MemoryPart, form_of
from qerl.models.architecture import Architecture

_MOMENTS = "optimizer's moments"


def with_clients(
    parts: list[MemoryPart], a: Architecture, config: RunConfig, num_adapters: int
) -> list[MemoryPart]:
    """Return the parts of a run with those of this many clients' adapters, all on the device and sampling."""
    require(config.adapter.kind == "lora", "adapters: clients of one base have LoRA adapters")
    n, size = num_trained_weights(a, config.adapter), form_of(config).element_bytes
    limits = {"max_rank": config.adapter.rank, "max_adapters": SHARED_ADAPTERS}
    alone = {"experts": "none", "train_norms": False, "modules_to_save": ()}  # linears
    widths = num_trained_weights(a, dataclasses.replace(config.adapter, rank=1, rank_pattern=(), **alone))
    by_row = row_adapter_bytes(widths, size, num_adapters=min(num_adapters, SHARED_ADAPTERS), **limits)
    return [
        *(part for part in parts if part.name != _MOMENTS),
        MemoryPart("clients' masters", 4 * n * num_adapters, "always"),
        MemoryPart("clients' moments", 8 * n * num_adapters, "always"),
        MemoryPart("clients' gradients", 4 * n * num_adapters, "always"),
        MemoryPart("adapters by row", by_row, "always"),
    ]


def clients_bytes(parts: list[MemoryPart], a: Architecture, config: RunConfig, num_adapters: int) -> float:
    """Return by how much the clients' parts raise the sum."""
    with_all = with_clients(parts, a, config, num_adapters)
    return sum(part.num_bytes for part in with_all) - sum(part.num_bytes for part in parts)
