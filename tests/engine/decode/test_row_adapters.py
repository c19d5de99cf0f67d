"""Adapters by row in KernelForward, every kernel by its reference, beside the decoder's own pass."""

import pytest
import torch

from engine.decode.test_decode_steps import PAGES, ROWS, decoder_of, forward_of, state_of
from engine.decode.test_kernel_choice import architecture_of
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.forward import TorchForward
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.models.adapter_bank import AdapterBank
from qerl.models.random_weights import random_decoder

NUMBERS = (2, 0, 1, 1, 2)
LIVE = [0, 1, 2, 4]  # of state_of


def packed_decoder(**settings):
    """Whose weights are in tiles, without an adapter of its own."""
    decoder = decoder_of(rank=None, **settings)
    packed = random_decoder(
        decoder.architecture,
        format="nvfp4",
        rank=None,
        device=decoder.device,
        seed=3,
        compute=torch.float32,
    )
    for layer in packed.layers:
        layer.tile()
    return packed


def random_adapter(decoder, rank, seed, skips="o_proj"):
    rng = torch.Generator().manual_seed(seed)
    return {
        linear: (
            torch.randn(rank, linear.in_width, generator=rng) / 8,
            torch.randn(linear.out_width, rank, generator=rng) / 4,
        )
        for name, linear in decoder.linears()
        if not name.endswith(skips)
    }


def state_with(numbers):
    state = state_of()
    state.noise_rows_B[:] = torch.tensor(numbers, dtype=torch.int32)
    return state


@torch.no_grad()
def hidden_of(decoder, numbers, *, by_kernels, forward=None):
    cache = KVCache(decoder.architecture, ROWS * PAGES, 16, decoder.compute, decoder.device)
    with cache.present():
        make = forward or (
            forward_of(decoder, cache) if by_kernels else TorchForward(decoder, cache, ROWS, PAGES)
        )
        state = state_with(numbers)
        make.prepare(state, [1] * ROWS, ROWS)
        return make(state, ROWS)[LIVE].clone()


@pytest.fixture(scope="module")
def banked():
    decoder = packed_decoder()
    bank = AdapterBank(torch.float32, decoder.device, max_adapters=3, max_rank=20)
    for rank, scaling, seed in ((4, 0.5, 1), (20, 2.0, 2)):
        bank.add(random_adapter(decoder, rank, seed), scaling)
    decoder.adapter_bank = bank
    yield decoder, bank
    decoder.adapter_bank = None


def test_each_row_has_its_own_adapter(banked):
    decoder, bank = banked
    assert KernelForward.bank_obstacle(decoder, bank) is None
    got, want = (hidden_of(decoder, NUMBERS, by_kernels=kernels) for kernels in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    plain = hidden_of(decoder, (0,) * ROWS, by_kernels=True)
    assert torch.equal(got[1], plain[1]) and (got - plain)[[0, 2, 3]].abs().amax(1).min() > 0.01


@torch.no_grad()
def test_an_adapter_that_takes_the_place_of_another_is_read(banked):
    """In the same tensors, which recorded graphs point to."""
    decoder, bank = banked
    cache = KVCache(decoder.architecture, ROWS * PAGES, 16, decoder.compute, decoder.device)
    forward = forward_of(decoder, cache)
    with cache.present():
        state = state_with(NUMBERS)
        forward.prepare(state, [1] * ROWS, ROWS)
        before = forward(state, ROWS)[LIVE].clone()
        groups = [group for step in forward._steps for group in step.groups]
        tensors = [group.banked(bank).a_SRK for group in groups]
        bank.remove(1)
        assert bank.add(random_adapter(decoder, 2, 3), 1.0) == 1
        forward.prepare(state, [1] * ROWS, ROWS)
        after = forward(state, ROWS)[LIVE].clone()
        assert all(group.banked(bank).a_SRK is a for group, a in zip(groups, tensors, strict=True))
    torch.testing.assert_close(after, hidden_of(decoder, NUMBERS, by_kernels=False), rtol=1e-4, atol=1e-4)
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]]) and not torch.allclose(
        before[2], after[2], atol=0.01
    )


def test_what_the_kernels_cannot_read_by_row_is_said():
    bank = AdapterBank(torch.float32, torch.device("cpu"), max_adapters=2, max_rank=16)
    assert "tiles" in KernelForward.bank_obstacle(decoder_of(), bank)
    packed = packed_decoder()
    wide = AdapterBank(torch.float32, torch.device("cpu"), max_adapters=2, max_rank=129)
    many = AdapterBank(torch.float32, torch.device("cpu"), max_adapters=32, max_rank=16)
    assert "129" in KernelForward.bank_obstacle(packed, wide) and "32" in KernelForward.bank_obstacle(
        packed, many
    )
    mixture = decoder_of(architecture_of("Qwen3Moe"), rank=None)
    assert "attention" in KernelForward.bank_obstacle(mixture, bank)
