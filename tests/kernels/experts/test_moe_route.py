import struct

import pytest
import torch

from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.experts import moe_route as op
from qerl.kernels.experts import routing
from qerl.kernels.experts.moe_route import MoERoute, Record


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


WRAPPED = r"""
static unsigned __shfl_up_sync(unsigned mask, unsigned x, int by) {
  const float low = __shfl_up_sync(mask, (float)(x & 0xFFFF), by);
  return low + (unsigned)__shfl_up_sync(mask, (float)(x >> 16), by) * 65536u;
}
template <class Pick> static unsigned reduced(unsigned x, Pick pick) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  lanes[warp][lane] = bits<float>(x);
  warps[warp].wait();
  for (int i = 0; i < 32; i++) x = pick(x, bits<unsigned>(lanes[warp][i]));
  warps[warp].wait();
  return x;
}
static unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned __reduce_max_sync(unsigned, unsigned x) { return reduced(x, larger); }
static unsigned __reduce_min_sync(unsigned, unsigned x) { return ~reduced(~x, larger); }
static void atomicOr(unsigned* to, unsigned x) { *to |= x; }
#define max larger
#define __restrict__
#include "moe_route.cu"
struct Operands {
  const float* logits;
  const int* positions;
  Record record;
  u32* plan;
  u16* rows;
  int* places;
  float* weights;
  const uint4* x;
  uint4* sorted_x;
  int num_rows, pieces;
};
static void wrapped(const Operands& o) {
  route(o.logits, o.positions, o.record, o.plan, o.rows, o.places, o.weights, o.x, o.sorted_x, o.num_rows,
        o.pieces);
}
"""


def launch_on_cpu(folder):
    """Return a function in the place of MoERoute._kernel, for `route`."""

    def kernel(name, experts, chosen, over, item_rows):
        defines = {"E": experts, "CHOSEN": chosen, "OVER_ALL": int(over == "all"), "MT": item_rows}
        built = CpuKernel("wrapped.cu", "wrapped", defines, folder)

        def launch(*, grid, block_threads, parameters):
            packed = [
                x
                if isinstance(x, bytes)
                else struct.pack("Q", x.data_ptr() if isinstance(x, torch.Tensor) else x or 0)
                for x in parameters[:-2]
            ]
            operands = b"".join(packed) + struct.pack("2i", *parameters[-2:])
            built.launch(grid=min(grid, 3), block_threads=block_threads, parameters=(operands,))

        return launch

    return kernel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def routes(request, tmp_path):
    """Return the kernels on a device, and as C++ on a CPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return MoERoute(torch.device("cuda"))
    if not has_compiler():
        pytest.skip("needs g++ with C++20")
    copy_sources(tmp_path)
    (tmp_path / "wrapped.cu").write_text(WRAPPED)
    kernels = MoERoute(torch.device("cpu"))
    kernels._kernel = launch_on_cpu(tmp_path)
    return kernels


def test_ids_fit_a_byte_and_rows_a_step():
    assert op.supports(256, 8) and not op.supports(257, 8) and not op.supports(256, 17)


@pytest.mark.parametrize(("B", "E", "K"), op.CASES)
@pytest.mark.parametrize("over", ["all", "chosen"])
def test_the_choice_and_its_weights_are_those_of_float64(B, E, K, over, routes):
    device = routes._device
    logits = torch.randn(B, E, device=device, generator=torch.Generator(device).manual_seed(B))
    routed = routes.route(logits, K, over, 16)
    ids, weights = (t.to(device) for t in routing.reference(logits, K, over))
    assert (routed.weights_BK - weights).abs().max() < 1e-6
    rows = routing.sort_rows(ids, E)
    assert torch.equal(routed.rows_S.long(), rows.tokens_S)
    assert torch.equal(routed.places_BK.flatten().long(), rows.inverse_S)
    items = routed.plan[1 : 1 + int(routed.plan[0])].tolist()
    offsets, found = rows.offsets.tolist(), []
    for e in range(E):
        for first in range(offsets[e], offsets[e + 1], 16):
            found.append((e, min(16, offsets[e + 1] - first), first))
    assert [(item & 255, item >> 8 & 255, item >> 16) for item in items] == found


def test_of_equal_logits_the_first_expert_is_chosen(routes):
    routed = routes.route(torch.zeros(3, 40, device=routes._device), 4, "chosen", 8)
    items = routed.plan[1 : 1 + int(routed.plan[0])].tolist()
    assert [item & 255 for item in items] == [0, 1, 2, 3] and (routed.weights_BK == 0.25).all()


def test_unused_rows_get_no_expert_and_ids_are_recorded_at_the_slots(routes, monkeypatch):
    monkeypatch.setattr(op.row_kernel, "are_vectors", lambda *_: True)
    B, E, K, page_tokens, device = 5, 32, 4, 16, routes._device
    logits = torch.randn(B, E, device=device, generator=torch.Generator(device).manual_seed(3))
    positions = torch.tensor([3, -1, 17, 40, -1], dtype=torch.int32, device=device)
    tables = torch.arange(1, 1 + 4 * B, dtype=torch.int32, device=device).view(B, 4)[:, :3]
    recorded = torch.full((30, page_tokens, K), 255, dtype=torch.uint8, device=device)
    x = torch.randn(B, 72, device=device).bfloat16()
    routed = routes.route(logits, K, "chosen", 8, positions, Record(recorded, tables), x)
    ids, expected = routing.choose(logits, K), torch.full_like(recorded, 255)
    for b, (page, offset) in {0: (1, 3), 2: (10, 1), 3: (15, 8)}.items():
        expected[page, offset] = ids[b].to(torch.uint8)
    assert torch.equal(recorded, expected)
    live = [0, 2, 3]
    rows = routing.sort_rows(ids[live], E)
    assert torch.equal(routed.places_BK[live].flatten().long(), rows.inverse_S)
    assert (routed.places_BK[[1, 4]] == -1).all()
    assert torch.equal(routed.x_SK[: 3 * K], x[live][rows.tokens_S])
    if device.type == "cpu":
        return
    h = torch.randn(B, 64, device=device)
    y = torch.full((B * K, 64), float("nan"), dtype=torch.bfloat16, device=device)
    y[: 3 * K] = 1
    got = routes.add(h.clone(), y, routed, E)
    assert torch.equal(got[[1, 4]], h[[1, 4]]) and torch.allclose(got[live], h[live] + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "E", "D"), [(1, 32, 2880), (8, 128, 2048), (67, 60, 64), (256, 128, 2880)])
def test_logits_are_no_less_exact_than_torch_in_fp32(B, E, D, device):
    rng = torch.Generator(device).manual_seed(E)
    x, w = (torch.randn(n, D, device=device, generator=rng).bfloat16() for n in (B, E))
    bias = torch.randn(E, device=device, generator=rng)
    kernels = MoERoute(device)
    got = kernels.logits(x, w, bias)
    truth = x.double() @ w.double().T + bias.double()
    assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()
    assert torch.equal(kernels.logits(x[:1].contiguous(), w, bias), got[:1])
