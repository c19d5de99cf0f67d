"""The kernels that are compiled while weights are read are those that the loaded model launches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from benchmarks import matrix
from qerl.config import AdapterConfig, EngineConfig, ModelConfig, RunConfig, SampleConfig
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.planned_kernels import planned_kernels
from qerl.engine.decode.runner import BUCKETS, DecodeRunner
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.engine.schedule.page_pool import num_pages
from qerl.formats import BF16
from qerl.kernels.runtime.architectures import ARCHITECTURES
from qerl.kernels.runtime.compile_tally import CompileReport
from qerl.learner.planned_pass import pass_kernels
from qerl.models import decoder as decoders
from qerl.models.meta_decoder import meta_decoder
from qerl.models.random_weights import random_decoder, shape
from qerl.training.compile_plan import compile_while_loading, kernels_of_run
from qerl.types import Sampling

HALF, SAMPLING = torch.bfloat16, Sampling(max_tokens=64, temperature=1.0)
SIZES = {"num_layers": 2, "width": 128, "num_heads": 2, "num_kv_heads": 1, "ff_width": 192}
DENSE = dataclasses.replace(shape("qwen2.5-7b"), **SIZES, head_size=64, vocab_size=1024)

HYBRID = shape("qwen3.5-9b")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    card = ARCHITECTURES["sm_90a"]
    gpu = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_multiprocessor=card.sm_shared_bytes, name=""
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def mixture():
    a = dataclasses.replace(shape("qwen3-30b-a3b"), **SIZES, head_size=64, vocab_size=1024)
    assert a.mixture is not None
    experts = dataclasses.replace(a.mixture, num_experts=8, num_chosen=2, width=64)
    return dataclasses.replace(a, layer_kinds=a.layer_kinds[:2], mixture=experts)


def loaded(a, format, head, kernels, monkeypatch):
    """Return the runners and the cache of a decoder with weights, on a CPU that pretends to be a GPU."""
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: True)
    monkeypatch.setattr(DecodeRunner, "_uses_graphs", True)
    monkeypatch.setattr("qerl.kernels.runtime.row_kernel.on_gpu", lambda x: True)
    cpu, config = torch.device("cpu"), EngineConfig(max_num_seqs=40)
    decoder = random_decoder(a, format=format, rank=32, device=cpu, seed=0, head=head)
    runners = RunnerCache(decoder, config, frozenset((0,)), kernels)
    assert runners.obstacle is None
    return runners, KVCache(a, 1, config.block_size, HALF, cpu)


def loaded_kernels(*case):
    """Return what such an engine would compile."""
    runners, cache = loaded(*case)
    return runners.variants(cache, SAMPLING, num_pages(300, cache.page_tokens))


def test_the_first_call_tells_how_many_samples_come_first_and_a_caller_may_wait_for_the_others(monkeypatch):
    calls, compiler = [], SimpleNamespace(is_waited=False)
    compiler.wait = lambda: setattr(compiler, "is_waited", True)

    def compile_ahead(self, *counts):
        calls.append(counts)
        return CompileReport(3, 0, 0.0), compiler

    monkeypatch.setattr(DecodeRunner, "compile_ahead", compile_ahead)
    runners, cache = loaded(DENSE, "nvfp4", "bf16", "hopper", monkeypatch)
    runners.wait_compiled()
    for num_samples in (5, 7):
        runners.of(cache, SAMPLING, 4, num_samples)
    assert calls == [(5, 40)] and runners.compiled == CompileReport(3, 0, 0.0) and not compiler.is_waited
    runners.wait_compiled()
    assert compiler.is_waited


@pytest.mark.parametrize(
    ("a", "format", "head", "kernels"),
    [
        *((DENSE, format, "bf16", "hopper") for format in ("nvfp4", "mxfp4", "nf4", "fp8", "int8", "bf16")),
        *((DENSE, "nvfp4", head, "hopper") for head in ("fp8", "nvfp4")),
        (mixture(), "nvfp4", "bf16", "hopper"),
        (mixture(), "mxfp4", "fp8", "hopper"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_a_meta_decoder_launches_what_the_loaded_decoder_does(a, format, head, kernels, monkeypatch):
    decoder = meta_decoder(a, format=format, head=head, compute=HALF, adapter=AdapterConfig(rank=32))
    config = EngineConfig(max_num_seqs=40)
    planned = planned_kernels(decoder, config, SAMPLING, kernels, num_positions=300)
    assert len(planned) > 5 and planned == loaded_kernels(a, format, head, kernels, monkeypatch)


def test_a_run_plans_the_kernels_of_each_graph_then_those_of_prefill_and_update():
    a, positions = shape("qwen2.5-7b"), 2048  # as benchmarks.matrix has it
    config = RunConfig(
        model=ModelConfig(path="none", device="cuda", dtype="bf16", operand="packed"),
        adapter=AdapterConfig(rank=32),
        engine=EngineConfig(max_num_seqs=64, block_size=16),
        sample=SampleConfig(max_tokens=1024),
    )
    planned = kernels_of_run(a, config, "hopper", positions)
    planned = [each for each in planned if each.file != "decode_attention.cu"]
    rows = [bucket for bucket in BUCKETS if 8 <= bucket <= 64]
    card, options = ARCHITECTURES["sm_90a"], {"rank": 32, "heads": (BF16,)}
    steps = {each for count in rows for each in matrix.decode_variants(a, card, count, **options)}
    # the matrix makes attention for so many rows at most, its kernel of exact mode too, and the portable head
    steps = {each for each in steps if not each.file.startswith(("decode_attention", "head_portable"))}
    steps = {each for each in steps if not dict(each.defines).get("BY_ROW")}  # temperatures of requests
    first = {each for each in planned if each.name == "head_finish"} - steps
    assert [dict(each.defines) for each in first] == [{"STEP": 0}]  # of the first tokens
    passes = [each for each in planned if each not in steps | first]
    assert steps <= set(planned) and set(planned[-len(passes) :]) == set(passes)
    learner = set(matrix.learner_variants(card))
    assert {each.name for each in passes} == {
        *("rms_norm", "rms_norm_backward", "head_norm", "head_norm_backward"),
        *("swiglu_wide", "swiglu_wide_backward"),
        *("logprob", "tile_unpack", "place_adapters", "copy_rows", "sum_copies"),
    }
    odd = {each.name for each in set(passes) - learner}
    assert odd <= {"place_adapters"}  # of one linear, where the matrix compiles three


def test_the_passes_of_a_hybrid_are_planned():
    """Those of its recurrence, and the backward pass of its norms, which are not the first layer's."""
    a = HYBRID
    decoder = meta_decoder(a, format="nvfp4", head="bf16", compute=HALF, adapter=AdapterConfig(rank=32))
    planned = pass_kernels(decoder, chunk_tokens=64)
    assert a.delta is not None and len(set(planned)) == len(planned)
    assert {"short_conv", "gated_delta_chunks", "logprob", "sum_copies", "swiglu_wide_backward"} <= {
        v.name for v in planned
    }
    assert {128, 256, 4096} == {dict(v.defines)["WIDTH"] for v in planned if v.name == "rms_norm_backward"}


@pytest.mark.parametrize(
    ("a", "kv", "sizes"), [(DENSE, "bf16", []), (DENSE, "fp8", [64]), (HYBRID, "fp8", [256])]
)
def test_what_writes_a_prefills_fp8_pages_is_planned(a, kv, sizes):
    decoder = meta_decoder(a, format="nvfp4", head="bf16", compute=HALF, adapter=AdapterConfig(rank=32))
    config = EngineConfig(max_num_seqs=8, kv_cache_dtype=kv)
    planned = planned_kernels(decoder, config, SAMPLING, "hopper", num_positions=300)
    assert [dict(each.defines)["H"] for each in planned if each.name == "write_fp8"] == sizes


def test_without_a_gpu_nothing_is_compiled_while_loading(monkeypatch):
    monkeypatch.setattr("qerl.training.compile_plan.BackgroundCompiler", None)
    model = ModelConfig(path="none", device="cpu", dtype="bf16", operand="resident")
    assert compile_while_loading(RunConfig(model=model), 100) is None


def test_a_meta_decoder_takes_no_memory():
    decoder = meta_decoder(
        shape("qwen2.5-72b"), format="nvfp4", head="bf16", compute=HALF, adapter=AdapterConfig()
    )
    assert isinstance(decoder, decoders.Decoder) and len(decoder.layers) == 1
    assert {tensor.device.type for tensor in decoder.state_dict().values()} == {"meta"}
