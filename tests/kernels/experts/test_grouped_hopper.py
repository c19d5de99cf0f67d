"""The products of experts for Hopper: their tiles, and the kernel as C++ on a CPU.

test_grouped_product.py runs it on a GPU.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from conftest import rms_error
from kernels import hopper_on_cpu
from kernels.cuda_on_cpu import CpuKernel, has_compiler
from kernels.experts.test_grouped_product import experts_of, tiled, torch_path
from qerl.kernels.experts import grouped_hopper as op
from qerl.kernels.experts import grouped_product
from qerl.kernels.experts.grouped_hopper import HopperGroupedProduct, deepest, hopper_tile
from qerl.kernels.experts.grouped_product import Activation, AdapterRows, ExpertAdapter, reference
from qerl.kernels.experts.moe_route import Routed
from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.architectures import ARCHITECTURES
from qerl.kernels.tiles import nvfp4_decode

CARD = ARCHITECTURES["sm_90a"]


@pytest.mark.parametrize("K", [2880, 2048, 768, 1024, 320, 64])
def test_every_tile_fits(K):
    for tokens in grouped_product.ITEM_ROWS:
        tile = hopper_tile(tokens, K)
        assert K % tile.k_block == 0 and tile.tokens == tokens and 3 <= tile.stages <= 8
        assert CARD.resident_ctas(tile.threads(False), 1, tile.shared_bytes) >= tile.ctas_per_sm


def routed_of(counts, item_rows):
    """Return what moe_route.py makes where each row has one expert, sorted already."""
    starts = [0, *itertools.accumulate(counts)]
    items = [
        expert | min(item_rows, start + count - first) << 8 | first << 16
        for expert, (start, count) in enumerate(zip(starts, counts, strict=False))
        for first in range(start, start + count, item_rows)
    ]
    plan = torch.full((1 + sum(counts),), -1, dtype=torch.int32)
    plan[: 1 + len(items)] = torch.tensor([len(items), *items])
    places = torch.arange(sum(counts), dtype=torch.int32)
    return Routed(plan, places.short(), places[:, None], torch.ones(sum(counts), 1), item_rows)


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Return the products on a device of three multiprocessors."""
    if not has_compiler():
        pytest.skip("needs g++ with C++20")
    hopper_on_cpu.copy_sources(tmp_path)
    compile_one = lambda file, name, _, defines, shared_bytes=0: CpuKernel(file, name, defines, tmp_path)  # noqa: E731
    monkeypatch.setattr(op, "compiled", compile_one)
    monkeypatch.setattr(op, "tensor_map", hopper_on_cpu.tensor_map)
    monkeypatch.setattr(grouped_product, "architecture_of", lambda device: CARD)
    properties = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return HopperGroupedProduct(torch.device("cpu"))


CASES = [
    (8, (5, 0, 8, 1), 192, 320, None),
    (16, (17, 3, 0, 16), 128, 192, Activation(None, 7.0)),
    (32, (33, 2, 30, 0), 320, 256, Activation(1.702, 7.0)),
    (64, (70, 17, 0, 33, 48), 256, 128, None),
    (64, (1, 64, 31), 128, 192, Activation(1.702, 7.0)),
]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("tokens", "counts", "N", "K", "activation"), CASES)
def test_no_less_exact_than_torch_on_a_cpu(tokens, counts, N, K, activation, rank, kernels, rng):
    E, S = len(counts), sum(counts)
    each, bias = experts_of(E, N, K, rng, biased=True)
    x = torch.randn(S, K, generator=rng).bfloat16()
    order = None if activation is None else nvfp4_decode.swiglu_order(N // 2, x.device)
    experts, adapter = tiled(each, bias, order), None
    if rank:
        a, b = (torch.randn(E, *shape, generator=rng).bfloat16() for shape in ((rank, K), (N, rank)))
        rows = AdapterRows.AS_TILES if activation is None else AdapterRows.GATE_UP
        experts, adapter = experts._replace(adapter=ExpertAdapter(a, b, 0.1, rows)), (a, b, 0.1)
        u = [0.1 * x[s].float() @ a[e].float().T for s, e in enumerate(sorted_experts(counts))]
        kernels._shrink = lambda *_: torch.stack(u)
    routed = routed_of(counts, tokens)
    if activation is None:
        got = kernels.linear(x, experts, routed)
    else:
        got = kernels.swiglu(x, experts, routed, activation)
    offsets = [0, *itertools.accumulate(counts)]
    truth = reference(x, offsets, torch.stack([w.decode() for w in each]), bias, activation, adapter)
    plain = torch_path(x, offsets, each, bias, activation, adapter)
    assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)


def sorted_experts(counts):
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("tokens", "warpgroups", "k_block", "ctas"), [(64, 3, 64, 1), (32, 2, 64, 1), (8, 1, 64, 2)]
)
def test_a_row_has_the_same_bits_in_every_tile_on_a_cpu(
    tokens, warpgroups, k_block, ctas, kernels, rng, monkeypatch
):
    """Emulated products add in one order, so this is about places, counts and what is left over."""
    counts = (9, 0, 70, 1)
    each, bias = experts_of(len(counts), 448, 320, rng, biased=True)
    x, experts = torch.randn(sum(counts), 320, generator=rng).bfloat16(), tiled(each, bias)
    want = kernels.linear(x, experts, routed_of(counts, 16))
    monkeypatch.setattr(op, "hopper_tile", lambda *_: deepest(tokens, warpgroups, k_block, ctas))
    assert torch.equal(kernels.linear(x, experts, routed_of(counts, tokens)), want)


@pytest.mark.parametrize(("tokens", "rank"), [(64, 0), (64, 4)])
def test_products_are_not_waited_for_one_by_one(tokens, rank):
    """ptxas serializes wgmma where registers are scarce: NVRTC's log says so, registers and spills do not."""
    binding = pytest.importorskip("cuda.bindings.nvrtc")
    defines, headers = op.defines_of(hopper_tile(tokens, 2880), 2, True, rank, 2), nvrtc._headers()
    texts, names = ([part.encode() for part in each] for each in (headers.values(), headers))
    source = nvrtc._source(op.FILE).encode(), op.FILE.encode()
    program = nvrtc.checked(binding.nvrtcCreateProgram(*source, len(headers), texts, names))
    options = [option.encode() for option in nvrtc._options(defines, "sm_90a")]
    nvrtc.checked(binding.nvrtcCompileProgram(program, len(options), options))
    assert "serialized" not in nvrtc.program_log(program)
    assert ord(b" ") == 32  # NVRTC's end of an empty log is not written into Python's one blank
