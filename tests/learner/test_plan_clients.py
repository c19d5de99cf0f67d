"""What the plan says of clients' adapters beside what the server holds."""

import dataclasses

import pytest
import torch

from engine.decode.test_decode_steps import PAGES, ROWS, forward_of, state_of
from engine.decode.test_row_adapters import packed_decoder
from qerl.config import AdapterConfig, EngineConfig, ModelConfig, RunConfig, SampleConfig
from qerl.engine.cache.kv_cache import KVCache
from qerl.learner.plan import report
from qerl.learner.plan.clients import with_clients
from qerl.learner.plan.memory import memory_parts, peak_bytes
from qerl.models.peft.adapter import add_adapter
from qerl.tinker.adapter import AdamSettings, AdapterSlot, AdapterSpec, TrainedAdapter

RANK, CLIENTS = 20, 3
CONFIG = RunConfig(
    model=ModelConfig(dtype="fp32"),
    num_prompts=2,
    num_generations=2,
    adapter=AdapterConfig(rank=RANK),
    sample=SampleConfig(max_tokens=8),
    engine=EngineConfig(block_size=16, max_num_batched_tokens=64),
)


class Engine:
    def publish(self, version):
        pass


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.fixture(scope="module")
def decoder():
    decoder = packed_decoder()
    add_adapter(decoder, AdapterConfig(rank=RANK), seed=0)
    return decoder


def planned(decoder, num=CLIENTS):
    parts = memory_parts(decoder.architecture, CONFIG, 8)
    return {part.name: part.num_bytes for part in with_clients(parts, decoder.architecture, CONFIG, num)}


def test_masters_moments_and_gradients_are_those_of_the_clients(decoder):
    plan, found = planned(decoder), {"masters": 0, "moments": 0, "gradients": 0}
    for seed in range(CLIENTS):
        adapter = TrainedAdapter(decoder, AdapterSpec(rank=RANK, seed=seed))
        adapter.add_gradients({name: torch.ones_like(p) for name, p in adapter.parameters.items()})
        adapter.update(AdamSettings())
        adapter.add_gradients({name: torch.ones_like(p) for name, p in adapter.parameters.items()})
        found["masters"] += nbytes(adapter.parameters.values())
        found["moments"] += nbytes(t for t in adapter.moments().values() if t.dim())
        found["gradients"] += nbytes(p.grad for p in adapter.parameters.values())
    assert {f"clients' {name}": size for name, size in found.items()}.items() <= plan.items()
    assert "optimizer's moments" not in plan


@torch.no_grad()
def test_adapters_by_row_are_those_of_the_bank_and_of_the_decode_step(decoder):
    slot = AdapterSlot(decoder, Engine(), RANK)
    with slot.banked() as bank:
        for seed in range(CLIENTS):
            adapter = TrainedAdapter(decoder, AdapterSpec(rank=RANK, seed=seed))
            slot.add_to(bank, adapter.parameters, RANK)
        tables = bank.at(torch.zeros(1, dtype=torch.int32)).tables.values()
        found = 2 * nbytes(tensor for a, b, *_ in tables for tensor in (a, b))  # as added, and side by side
        cache = KVCache(decoder.architecture, ROWS * PAGES, 16, decoder.compute, decoder.device)
        forward = forward_of(decoder, cache)
        with cache.present():
            forward.prepare(state_of(), [1] * ROWS, ROWS)
        groups = [group.banked(bank) for step in forward._steps for group in step.groups]
        found += nbytes(tensor for group in groups for tensor in (group.a_SRK, group.b_SNR))
    assert planned(decoder)["adapters by row"] == found


@pytest.mark.parametrize(
    "others",
    [{"train_norms": True}, {"modules_to_save": ("embed_tokens",)}, {"rank_pattern": (("q_proj", 8),)}],
)
def test_adapters_by_row_have_linears_alone(others):
    a, sizes = report.read_architecture("qwen2.5-7b", "auto"), []
    for adapter in (AdapterConfig(), AdapterConfig(**others)):
        parts = with_clients([], a, dataclasses.replace(CONFIG, adapter=adapter), CLIENTS)
        sizes += [part.num_bytes for part in parts if part.name == "adapters by row"]
    assert sizes[0] == sizes[1] > 0


def test_clients_raise_the_peak_and_their_number_decides_what_fits():
    few, many = (
        report.format_plan("qwen2.5-7b", RunConfig(), gpu_gb=24, prompt_tokens=256, num_adapters=n)
        for n in (1, 8)
    )
    assert few[1] and not many[1]
    assert (
        "clients' moments                        5.17 GB" in many[0]
        and "without the clients' 13.73" in many[0]
    )
    a = report.read_architecture("qwen2.5-7b", "auto")
    parts = memory_parts(a, RunConfig(), 256)
    sums = [peak_bytes(with_clients(parts, a, RunConfig(), n)) for n in (1, 2, 3)]
    assert sums[2] - sums[1] == pytest.approx(sums[1] - sums[0]) and sums[0] > peak_bytes(parts)
    with pytest.raises(Exception, match="LoRA"):
        full = dataclasses.replace(
            RunConfig(), adapter=AdapterConfig(kind="full"), model=ModelConfig(format="bf16")
        )
        with_clients(parts, a, full, 1)
