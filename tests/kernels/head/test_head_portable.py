"""head_portable.cu on a CPU, a fiber for each thread, and its tiles; test_head_sample.py runs it on a GPU."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from conftest import rms_error
from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.formats import BF16, FP8
from qerl.kernels.head import head_portable
from qerl.kernels.head import head_sample as op
from qerl.kernels.head.head_portable import PortableHeadTile, choose_head_tile
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED

CPU = torch.device("cpu")
TILES = (
    PortableHeadTile(0, 8, row_warps=1, token_warps=1, k_block=64, stages=2, ctas_per_sm=2),
    PortableHeadTile(0, 8, row_warps=2, token_warps=1, k_block=128, stages=3, ctas_per_sm=1),
    PortableHeadTile(0, 32, row_warps=2, token_warps=1, k_block=64, stages=2, ctas_per_sm=1),
    PortableHeadTile(0, 96, row_warps=2, token_warps=2, k_block=64, stages=3, ctas_per_sm=1),
    PortableHeadTile(0, 64, row_warps=2, token_warps=4, k_block=64, stages=4, ctas_per_sm=1),
    PortableHeadTile(1, 8, row_warps=2, token_warps=1, k_block=128, stages=2, ctas_per_sm=1),
    PortableHeadTile(1, 64, row_warps=2, token_warps=2, k_block=128, stages=3, ctas_per_sm=1),
)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("head_format", [0, 1])
def test_every_size_has_a_tile_that_fits(head_format, name):
    card = ARCHITECTURES[name]
    for M in (*range(1, 258), 1024):
        for D in (576, 3584, 5120)[head_format:]:
            tile = choose_head_tile(M, head_format, D, card)
            assert D % tile.k_block == 0 and tile.stages >= 2 and tile.sums <= 128
            assert tile.shared_bytes <= card.shared_bytes
            assert card.resident_ctas(tile.threads, 1, tile.shared_bytes) >= tile.ctas_per_sm
            assert tile.tokens // tile.token_warps in (8, 16, 32, 48, 64)


@pytest.fixture
def on_a_cpu(monkeypatch, tmp_path):
    if not has_compiler():
        pytest.skip("needs g++")
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with on_cpu(head_portable, tmp_path):
        yield


def case(head_format, M, V, D, rng):
    weight = torch.randn(V, D, generator=rng) * 3 / D**0.5
    head = FP8.encode(weight) if head_format else BF16(weight.bfloat16())
    truth = head.decode() if isinstance(head, FP8) else head.weight
    hidden = torch.randn(M, D, generator=rng).bfloat16()
    keys = torch.randint(0, 2**62, (M,), generator=rng)
    positions = torch.randint(0, 5000, (M,), generator=rng, dtype=torch.int32)
    return head, truth.double(), hidden, keys, positions


def partials_of(kernel, hidden, keys, positions, temperature, output=op.DRAWS):
    temperatures = torch.tensor(temperature, dtype=torch.float32).view(-1)
    kernel._multiply(hidden, keys, positions, temperatures, None, output=output)
    partials = kernel._partials[: len(hidden)]
    best_M1 = partials[:, :, 0].argmax(1, keepdim=True)
    tokens_M = partials[:, :, 2].contiguous().view(torch.int32).gather(1, best_M1)[:, 0].long()
    return tokens_M, partials[:, :, 1].gather(1, best_M1)[:, 0] - partials[:, :, 3].logsumexp(1)


@pytest.mark.parametrize("tile", TILES)
def test_it_draws_what_float64_draws(tile, on_a_cpu, rng):
    """The vocabulary ends within a chunk, tokens within a tile; CTAs have unequal numbers of chunks."""
    (M, V, D), scale, softcap = (tile.tokens + 5, 336, 256), 0.5, 9.0 if tile.tokens == 8 else None
    head, truth, hidden, keys, positions = case(tile.format, M, V, D, rng)
    kernel = head_portable.PortableHeadSample(
        head, M, CPU, scale=scale, softcap=softcap, choose=lambda *_: tile
    )
    logits = kernel.logits(hidden)
    assert rms_error(logits, op.reference_logits(hidden, truth, scale, softcap)) < 3e-7
    for temperature in (0.7, 0.0):
        tokens, logprobs = partials_of(kernel, hidden, keys, positions, temperature)
        expected, expected_logprobs, lead = op.reference(
            hidden, truth, keys, positions, temperature, scale, softcap
        )
        assert lead.min() > 1e-5 and torch.equal(tokens, expected)
        assert (logprobs - expected_logprobs).abs().max() < 1e-5
        scored, scores = partials_of(kernel, hidden, tokens, positions, temperature, op.SCORES)
        assert torch.equal(scored, tokens) and torch.equal(scores, logprobs)


@pytest.mark.parametrize("head_format", [0, 1])
def test_a_row_has_the_same_bits_with_every_tile_and_number_of_rows(head_format, on_a_cpu, rng):
    head, _, hidden, keys, positions = case(head_format, 70, 208, 256, rng)
    found = []
    for tile in (tile for tile in TILES if tile.format == head_format):
        for ctas, rows in ((tile.ctas_per_sm, 70), (3, 7)):
            chosen = dataclasses.replace(tile, ctas_per_sm=ctas)
            kernel = head_portable.PortableHeadSample(head, 70, CPU, choose=lambda *_, t=chosen: t)
            tokens, logprobs = partials_of(kernel, hidden[:rows], keys, positions, 0.7)
            found.append((kernel.logits(hidden[:rows])[:7], tokens[:7], logprobs[:7]))
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))


@pytest.mark.parametrize("tile", [TILES[0], TILES[3], TILES[6]])
def test_rows_have_temperatures_of_their_own_to_the_bit(tile, on_a_cpu, rng):
    head, truth, hidden, keys, positions = case(tile.format, M := tile.tokens + 3, 208, 256, rng)
    kernel = head_portable.PortableHeadSample(head, M, CPU, choose=lambda *_: tile)
    values = (0.0, 0.7, 1.0, 1.5)
    temperatures = [values[m % 4] for m in range(M)]
    tokens, logprobs = partials_of(kernel, hidden, keys, positions, temperatures)
    expected, _, lead = op.reference(hidden, truth, keys, positions, torch.tensor(temperatures))
    assert lead.min() > 1e-5 and torch.equal(tokens, expected)
    _, scores = partials_of(kernel, hidden, tokens, positions, temperatures, op.SCORES)
    assert torch.equal(scores, logprobs)
    for first, value in enumerate(values):
        alone = partials_of(kernel, hidden, keys, positions, value)
        assert torch.equal(alone[0][first::4], tokens[first::4])
        assert torch.equal(alone[1][first::4], logprobs[first::4])


def test_a_row_that_is_not_finite_leaves_the_others(on_a_cpu, rng):
    head, _, hidden, keys, positions = case(0, 12, 208, 128, rng)
    kernel = head_portable.PortableHeadSample(head, 12, CPU, choose=lambda *_: TILES[0])
    good = partials_of(kernel, hidden, keys, positions, 1.0)
    hidden[3, 17] = float("nan")
    tokens, logprobs = partials_of(kernel, hidden, keys, positions, 1.0)
    others = torch.arange(12) != 3
    assert logprobs[3].isnan() and 0 <= tokens[3] < 208
    assert torch.equal(tokens[others], good[0][others]) and torch.equal(logprobs[others], good[1][others])
