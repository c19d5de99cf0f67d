"""The steps of layers with Gated DeltaNet, every kernel by its reference, beside the decoder's own pass."""

from dataclasses import replace

import pytest
import torch

from engine.decode.test_decode_steps import PAGES, ROWS, decoder_of, forward_of, state_of
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.state_cache import StateCache
from qerl.engine.decode.forward import TorchForward
from qerl.engine.decode.kernel_forward import kernel_obstacle
from qerl.kernels.delta_net import delta_net_step
from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.kernels.runtime import row_kernel
from qerl.models.mixture import copy_masters
from qerl.models.peft.adapter import add_adapter
from qerl.models.random_weights import SHAPES, random_decoder

DELTA = DeltaShape(num_key_heads=1, num_value_heads=2, key_size=128, value_size=128, num_taps=4)
SMALL = replace(
    SHAPES["qwen3.5-9b"],
    num_layers=4,
    layer_kinds=SHAPES["qwen3.5-9b"].layer_kinds[:4],
    width=128,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    rotary_size=None,
    attention_gate=False,
    ff_width=192,
    vocab_size=256,
    delta=DELTA,
)
BY_HEAD = replace(
    SMALL, delta_projections="by_head", delta=replace(DELTA, num_key_heads=2, num_value_heads=4)
)
GATES = "in_proj_b", "in_proj_a", "in_proj_ba"


class ReferenceDelta:
    """DeltaNetStep by its reference."""

    def __init__(self, shape, max_rows, device, *, is_by_head):
        self.shape, self.is_by_head = shape, is_by_head

    def step(self, y_BX, gates, weights, conv_SWC, state_SNHV, state, *, room=0):
        operands = y_BX, gates, weights, conv_SWC, state_SNHV, state
        out_BX = row_kernel.rows(len(y_BX), self.shape.value_width, room, y_BX)
        return out_BX.copy_(delta_net_step.reference(*operands, self.shape, self.is_by_head))


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    monkeypatch.setattr("qerl.engine.decode.delta.DeltaNetStep", ReferenceDelta)


def both(decoder):
    """(hidden states of two steps' live rows, the states of all slots) by the steps and by the modules."""
    a, found = decoder.architecture, []
    for uses_kernels in (True, False):
        states = StateCache(a, ROWS + 1, decoder.compute, decoder.device)
        cache = KVCache(a, ROWS * PAGES, 16, decoder.compute, decoder.device, states)
        forward = forward_of(decoder, cache) if uses_kernels else TorchForward(decoder, cache, ROWS, PAGES)
        with cache.present(), torch.no_grad():
            torch.manual_seed(0)
            for tensor in (cache.pages.k, cache.pages.v, states.conv, states.state):
                tensor.normal_()
            state = state_of()
            state.states_B[:] = torch.tensor([4, 0, 3, 2, 5])
            hidden_BD = forward(state, ROWS)
            state.positions_B.add_(state.positions_B >= 0)
            live = state.positions_B >= 0
            hidden = torch.stack((hidden_BD, forward(state, ROWS)))[:, live]
            slots = state.states_B[live].long()
            found.append((hidden, states.conv[:, slots], states.state[:, slots]))
    return found


def check(decoder):
    ours, theirs = both(decoder)
    assert theirs[0].std() > 0.1
    for got, truth in zip(ours, theirs, strict=True):
        assert (got - truth).abs().max() < 3e-5 * truth.abs().max()


@pytest.mark.parametrize("architecture", [SMALL, BY_HEAD], ids=["by part", "by head"])
@pytest.mark.parametrize("rank", [None, 8, 16])
def test_the_layers_are_the_decoders(architecture, rank):
    check(decoder_of(architecture, rank))


def test_gated_attention_with_partial_rotation_is_the_decoders():
    check(decoder_of(replace(SMALL, head_size=256, rotary_size=64, attention_gate=True)))


def test_each_rows_noise_acts():
    decoder = decoder_of(SMALL)
    quiet = both(decoder)[0][0]
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        check(decoder)
        assert (both(decoder)[0][0] - quiet).abs().max() > 0.01


@pytest.mark.parametrize("targets", [(), GATES[:2], GATES[1:2]], ids=str)
def test_packed_layers_make_the_gates_beside_the_norm(targets):
    decoder = random_decoder(
        SMALL, format="nvfp4", rank=None, device=torch.device("cpu"), seed=3, compute=torch.float32
    )
    for layer in decoder.layers:
        layer.tile()
    if targets:
        add_adapter(decoder, AdapterConfig(rank=16, target_modules=targets), 0)
        for _, linear in decoder.linears():
            if linear.rank:
                linear.lora_B.data.normal_(0, 0.3)
                copy_masters([linear])
    cache = KVCache(
        SMALL, 1, 16, torch.float32, decoder.device, StateCache(SMALL, 1, torch.float32, decoder.device)
    )
    with cache.present():
        assert len(forward_of(decoder, cache)._steps[0].groups) == 3, "the gates are not apart"
    check(decoder)


def test_a_9b_hybrid_is_computed_and_other_heads_are_not():
    whole = SHAPES["qwen3.5-9b"]
    odd = replace(whole, delta=replace(DELTA, key_size=64))
    said = (
        "they do not compute Gated DeltaNet with heads of 64 and 128 and 4 taps, only with heads of 128 and"
    )
    for a, wrong in ((whole, None), (odd, f"{said} 4 taps")):
        assert kernel_obstacle(a, "portable", torch.bfloat16, ranks={16}, page_tokens=16) == wrong
