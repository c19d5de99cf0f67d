import pytest
import torch

from formats.layers import LAYERS, gaussian
from qerl.formats import BF16, FP8, INT8, MXFP4, NF4, NVFP4
from qerl.formats.block_scale import least_squares, reference

BLOCKS = {NVFP4: 16, MXFP4: 32}


def block_errors(packed, weight_NK):
    size = BLOCKS[type(packed)]
    return (packed.decode().double() - weight_NK.double()).square().unflatten(1, (-1, size)).sum(-1)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
@pytest.mark.parametrize("name", LAYERS)
def test_no_block_errs_more_than_with_plain_scales(kind, name):
    weight_NK = LAYERS[name]
    plain = kind.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    size_NB = weight_NK.double().square().unflatten(1, (-1, BLOCKS[kind])).sum(-1)
    # errors are compared in float32: equal ones may differ in their last bit
    assert (block_errors(ours, weight_NK) <= block_errors(plain, weight_NK) + 1e-6 * size_NB).all()


@pytest.mark.parametrize(("kind", "gain"), [(NVFP4, 0.90), (MXFP4, 0.999)])
def test_a_normal_weight_s_error_falls(kind, gain):
    weight_NK = gaussian(256, 1024)
    plain = kind.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    assert block_errors(ours, weight_NK).sum() < gain**2 * block_errors(plain, weight_NK).sum()


def test_a_block_is_searched_by_hand():
    # g = 2688 / 10.5 = 256. Plain: 5 / 6 * 256 = 213 -> 208, steps of 0.8125. Five E4M3 numbers above it is
    # 320, steps of 1.25: then the block is 4 3 2 1 without any error.
    weight_NK = torch.tensor([[5.0, 3.75, 2.5, 1.25] * 4 + [10.5] + [0.0] * 15])
    plain = NVFP4.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    assert plain.scales.tolist() == [[208.0, 448.0]] and ours.scales.tolist() == [[320.0, 448.0]]
    assert ours.codes[0, :2].tolist() == [0x56, 0x24]
    assert torch.equal(ours.decode(), weight_NK)
    assert torch.equal(ours.global_scale, plain.global_scale)


def candidate_steps(plain):
    """Values of a code of 1 that the search is to compare, [C, N, B]."""
    if isinstance(plain, MXFP4):
        bits = [(plain.scales.int() + i).clamp(0, 252).to(torch.uint8) for i in (-2, -1, 0, 1)]
        return torch.stack([b.view(torch.float8_e8m0fnu).double() for b in bits])
    bits = [(plain.scales.view(torch.uint8).int() + i).clamp(1, 126).to(torch.uint8) for i in range(-3, 6)]
    return torch.stack([b.view(torch.float8_e4m3fn).double() for b in bits]) / plain.global_scale.double()


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
@pytest.mark.parametrize("name", LAYERS)
def test_every_block_has_the_least_error_of_all_candidates(kind, name, is_weighted):
    weight_NK = LAYERS[name]
    K = weight_NK.shape[1]
    m_K = torch.arange(K).remainder(7).square().add(0.1) if is_weighted else torch.ones(K)
    plain = kind.encode(weight_NK)
    ours = least_squares(plain, weight_NK, m_K if is_weighted else None)
    least_NB = reference(weight_NK, candidate_steps(plain), m_K)
    blocks = (BLOCKS[kind],)
    error_NB = (
        ((ours.decode().double() - weight_NK.double()).square() * m_K).unflatten(1, (-1, *blocks)).sum(-1)
    )
    size_NB = (weight_NK.double().square() * m_K).unflatten(1, (-1, *blocks)).sum(-1)
    assert ((error_NB - least_NB).abs() <= 1e-6 * size_NB + 1e-300).all()


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
def test_every_candidate_is_the_best_of_some_block(kind):
    weight_NK = gaussian(256, 1024)
    plain = kind.encode(weight_NK)
    steps: set[int] = set()
    for m_K in (None, gaussian(1, 1024)[0].pow(4)):
        bits = [p.scales.view(torch.uint8).int() for p in (least_squares(plain, weight_NK, m_K), plain)]
        steps |= set((bits[0] - bits[1]).flatten().tolist())
    assert steps == ({-2, -1, 0} if kind is MXFP4 else set(range(-3, 6)))


def test_important_inputs_decide_a_block_s_scale():
    weight_NK = torch.tensor([[6.0, 5.0] + [0.0] * 14, [100.0] + [0.0] * 15])
    plain = NVFP4.encode(weight_NK)
    first_K, second_K = torch.full((16,), 1e-3), torch.full((16,), 1e-3)
    first_K[0] = second_K[1] = 1
    first, second = (
        (least_squares(plain, weight_NK, m_K).decode() - weight_NK)[0].abs() for m_K in (first_K, second_K)
    )
    assert first[0] < second[0] and second[1] < first[1]


def test_the_same_weight_gets_the_same_bits_row_by_row():
    weight_NK = gaussian(300, 512)
    whole = least_squares(NVFP4.encode(weight_NK), weight_NK)
    largest = weight_NK.abs().max().item()
    rows = [least_squares(NVFP4.encode(w, largest), w) for w in weight_NK.split(7)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in rows]))
    assert torch.equal(whole.scales.float(), torch.cat([part.scales.float() for part in rows]))


@pytest.mark.parametrize("kind", [NF4, FP8, INT8, BF16])
def test_a_format_without_such_scales_stays_as_it_is(kind):
    weight_NK = gaussian(16, 256)
    packed = kind.encode(weight_NK)
    assert least_squares(packed, weight_NK) is packed
