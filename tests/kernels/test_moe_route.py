import pytest
import torch

from qerl.kernels import moe_route as op
from qerl.kernels import routing
from qerl.kernels.moe_route import MoERoute, Record


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def test_ids_fit_a_byte_and_rows_a_step():
    assert op.supports(256, 8) and not op.supports(257, 8) and not op.supports(256, 17)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "E", "K"), op.CASES)
@pytest.mark.parametrize("over", ["all", "chosen"])
def test_the_choice_and_its_weights_are_those_of_float64(B, E, K, over, device):
    logits = torch.randn(B, E, device=device, generator=torch.Generator(device).manual_seed(B))
    routed = MoERoute(device).route(logits, K, over, 16)
    ids, weights = (t.to(device) for t in routing.reference(logits, K, over))
    assert (routed.weights_BK - weights).abs().max() < 1e-6
    rows = routing.sort_rows(ids, E)
    assert torch.equal(routed.rows_S.long(), rows.order_S // K)
    assert torch.equal(routed.places_BK.flatten().long(), rows.inverse_S)
    items = routed.plan[1 : 1 + int(routed.plan[0])].tolist()
    offsets, found = rows.offsets.tolist(), []
    for e in range(E):
        for first in range(offsets[e], offsets[e + 1], 16):
            found.append((e, min(16, offsets[e + 1] - first), first))
    assert [(item & 255, item >> 8 & 255, item >> 16) for item in items] == found


@pytest.mark.gpu
def test_of_equal_logits_the_first_expert_is_chosen(device):
    routed = MoERoute(device).route(torch.zeros(3, 40, device=device), 4, "chosen", 8)
    items = routed.plan[1 : 1 + int(routed.plan[0])].tolist()
    assert [item & 255 for item in items] == [0, 1, 2, 3] and (routed.weights_BK == 0.25).all()


@pytest.mark.gpu
def test_unused_rows_get_no_expert_and_ids_are_recorded_at_the_slots(device):
    B, E, K, page_tokens = 5, 32, 4, 16
    logits = torch.randn(B, E, device=device, generator=torch.Generator(device).manual_seed(3))
    positions = torch.tensor([3, -1, 17, 40, -1], dtype=torch.int32, device=device)
    tables = torch.arange(1, 1 + 4 * B, dtype=torch.int32, device=device).view(B, 4)[:, :3]
    routes = torch.full((30, page_tokens, K), 255, dtype=torch.uint8, device=device)
    kernels = MoERoute(device)
    routed = kernels.route(logits, K, "chosen", 8, positions, Record(routes, tables))
    ids, expected = routing.choose(logits, K), torch.full_like(routes, 255)
    for b, (page, offset) in {0: (1, 3), 2: (10, 1), 3: (15, 8)}.items():
        expected[page, offset] = ids[b].to(torch.uint8)
    assert torch.equal(routes, expected)
    live = [0, 2, 3]
    rows = routing.sort_rows(ids[live], E)
    assert torch.equal(routed.places_BK[live].flatten().long(), rows.inverse_S)
    assert (routed.places_BK[[1, 4]] == -1).all()
    h = torch.randn(B, 64, device=device)
    y = torch.full((B * K, 64), float("nan"), dtype=torch.bfloat16, device=device)
    y[: 3 * K] = 1
    got = kernels.add(h.clone(), y, routed, E)
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
