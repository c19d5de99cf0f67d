"""The steps of layers in KernelForward, every kernel by its reference, beside the decoder's own pass."""

import functools
from dataclasses import replace

import pytest
import torch

from engine.decode.reference_kernels import ReferenceAttention, ReferenceLinears, ReferenceShrink
from engine.decode.test_kernel_choice import HEADS, MIXTURES, OBSTACLES, architecture_of
from models.family_rows import ROWS as FAMILIES
from qerl.aqn.norm_noise import noised
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.forward import TorchForward
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.kernels.attention.decode_state import DecodeState
from qerl.models.random_weights import SHAPES, random_decoder

SMALL = replace(
    SHAPES["qwen2.5-0.5b"], num_layers=4, width=128, num_heads=4, num_kv_heads=2, ff_width=192, vocab_size=256
)
DENSE = [f for f in FAMILIES if f not in (*OBSTACLES, *MIXTURES)]
ROWS, PAGES = 5, 4
A_LAYER = ["norm_shrink", "linear", "attend", "shrink", "linear onto", "norm_shrink", "swiglu", "shrink"]


def decoder_of(architecture=SMALL, rank=16, **settings):
    decoder = random_decoder(
        architecture,
        format="bf16",
        rank=rank,
        device=torch.device("cpu"),
        seed=3,
        compute=torch.float32,
        **settings,
    )
    generator = torch.Generator().manual_seed(4)
    for name, buffer in decoder.named_buffers():  # norms and sinks that are not all the same
        if name.endswith(("norm.weight", "sinks")):
            buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return decoder


def forward_of(decoder, cache, calls=None):
    calls = [] if calls is None else calls
    return KernelForward(
        decoder,
        cache,
        ROWS,
        PAGES,
        products=lambda device: ReferenceLinears(calls),
        shrink=lambda device: ReferenceShrink(decoder.compute, calls),  # type: ignore[arg-type]
        attention=functools.partial(ReferenceAttention, calls),
    )


def state_of():
    state = DecodeState.empty(ROWS, PAGES, 1, "cpu")
    state.tokens_B[:] = torch.tensor([3, 50, 7, 255, 90])
    state.positions_B[:] = torch.tensor([0, 17, 40, -1, 33])
    state.tables_BX[:] = torch.arange(ROWS * PAGES).view(ROWS, PAGES)
    state.noise_rows_B[:] = torch.tensor([0, 1, 0, 1, 0])
    return state


def both(decoder):
    """The hidden states of two steps' live rows, by the steps and by the decoder's modules."""
    found = []
    for uses_kernels in (True, False):
        cache = KVCache(decoder.architecture, ROWS * PAGES, 16, decoder.compute, decoder.device)
        forward = forward_of(decoder, cache) if uses_kernels else TorchForward(decoder, cache, ROWS, PAGES)
        with cache.present(), torch.no_grad():
            torch.manual_seed(0)
            cache.pages.k.normal_()
            cache.pages.v.normal_()
            state = state_of()
            hidden_BD = forward(state, ROWS)
            state.positions_B.add_(state.positions_B >= 0)
            found.append((hidden_BD, forward(state, ROWS)))
    live = state.positions_B >= 0
    ours, theirs = (torch.stack(pair)[:, live] for pair in found)
    return ours, theirs


def check(decoder):
    ours, theirs = both(decoder)
    assert theirs.std() > 0.1 and (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("rank", [None, 1, 8, 16, 20, 128])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_plain_layers_are_the_decoders(rank, qk_norm):
    check(decoder_of(replace(SMALL, qk_norm=qk_norm), rank))


@pytest.mark.parametrize("family", DENSE)
def test_the_layers_of_every_family_are_the_decoders(family):
    """Windows of 7 and 9, caps, other places of norms, factors, ropes: as family_rows.py has them."""
    architecture = architecture_of(family, vocab_size=256, **HEADS.get(family, {}))
    for rank in (None, 16):
        decoder = decoder_of(architecture, rank)
        check(decoder)
        with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
            check(decoder)


CHANGES = {
    "biases": {"mlp_bias": True},
    "gelu": {"activation": "gelu"},
    "gate": {"attention_gate": True},
    "sinks": {"attention_sinks": True},
    "partial rotation": {"rotary_size": 32},
    "norms over projections": {"qk_norm": True, "qk_norm_over": "projection"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_a_layer_is_the_decoders(name):
    architecture = replace(SMALL, head_size=64, **CHANGES[name])
    decoder = decoder_of(architecture)
    check(decoder)


def test_each_rows_noise_acts():
    decoder = decoder_of()
    quiet, _ = both(decoder)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        check(decoder)
        assert (both(decoder)[0] - quiet).abs().max() > 0.01


def test_the_launches_of_a_plain_layer_have_their_order(monkeypatch):
    """bf16 weights: the norms make u, and o's and down's u are launches of their own."""
    decoder, calls = decoder_of(), []
    monkeypatch.setattr("qerl.engine.decode.layer.TorchLinears", lambda room: ReferenceLinears(calls, room))
    cache = KVCache(decoder.architecture, ROWS * PAGES, 16, decoder.compute, decoder.device)
    with cache.present(), torch.no_grad():
        forward_of(decoder, cache, calls)(state_of(), ROWS)
    assert calls == ["embed", *(4 * [*A_LAYER, "linear onto"]), "norm"]
