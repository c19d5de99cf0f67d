"""Operands unpacked once for all micro-batches of an update."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_decoder
from qerl.formats import NVFP4
from qerl.learner import Learner
from qerl.models.linear_pass import PLAIN
from qerl.models.random_weights import random_decoder, shape

MODES = pytest.mark.parametrize("recompute", ["none", "layer", "offload"])
LINEARS = 14


@pytest.fixture
def groups(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


@pytest.fixture
def unpacked(monkeypatch):
    """References to all operands made."""
    made, operand = [], NVFP4.operand

    def watched(self, dtype):
        found = operand(self, dtype)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(NVFP4, "operand", watched)
    return made


def packed_decoder():
    decoder = tiny_decoder()
    for _, linear in decoder.linears():
        linear.load_weight(NVFP4.encode(linear.weight.decode()))
    return decoder


def learner_of(decoder, learn, *, holds, algo=None, **settings):
    return Learner(decoder, run_config(algo, learn), holds_operands=holds, **settings)


def state(learner):
    return learner.adapter_state() | learner.optimizer_state()


def is_equal(one, other):
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@MODES
@pytest.mark.parametrize("algo", [{}, {"beta": 0.3}])
def test_it_changes_no_bit_of_what_is_learned(recompute, algo, groups):
    """Two updates of two micro-batches."""
    learn = {"max_tokens_per_microbatch": 40, "updates_per_step": 2, "gradient_checkpointing": recompute}
    plain, ours = (learner_of(packed_decoder(), learn, holds=holds, algo=algo) for holds in (False, True))
    assert plain.step(groups) == ours.step(groups) and is_equal(plain, ours)
    assert plain.step(groups) == ours.step(groups) and is_equal(plain, ours)


@MODES
def test_each_is_unpacked_once_an_update_and_gone_after_it(recompute, groups, unpacked):
    learner = learner_of(
        packed_decoder(), {"max_tokens_per_microbatch": 40, "gradient_checkpointing": recompute}, holds=True
    )
    learner.step(groups)
    assert len(unpacked) == LINEARS
    gc.collect()
    assert all(reference() is None for reference in unpacked)


def test_a_single_micro_batch_holds_none(groups, unpacked):
    learner_of(packed_decoder(), {}, holds=True).step(groups)
    assert len(unpacked) == 2 * LINEARS - 3  # layer 0's q|k|v has no input gradient


def test_what_repeats_a_layer_leaves_held_operands_where_they_are():
    up = packed_decoder().layers[0].mlp.up_proj
    with PLAIN.holding() as plain:
        held = up.operand(plain.operands)
        with plain.repeating() as again, again.holding() as chunked:
            assert all(up.operand(each.operands) is held for each in (again, again, again, chunked))
        assert up.operand(plain.operands) is held
    assert up.operand(plain.operands) is not held


def test_out_of_memory_they_are_let_go_before_the_batches_are_halved(groups):
    """Short of memory while any is held: from then on as a learner that holds none."""
    decoder, lines = packed_decoder(), []
    ours = learner_of(decoder, {"max_tokens_per_microbatch": 40}, holds=True, notice=lines.append)

    def hook(_, arguments, hidden_TD):
        if arguments[-1].operands is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder.register_forward_hook(hook)
    plain = learner_of(packed_decoder(), {"max_tokens_per_microbatch": 40}, holds=False)
    for _ in range(2):
        assert ours.step(groups) == plain.step(groups) and is_equal(ours, plain)
    assert len(lines) == 1 and "operands are now unpacked" in lines[0] and ours.micro_tokens == 40
    assert not ours.holds_operands


def test_out_of_memory_without_any_held_halves_the_batch_at_once(groups):
    decoder, lines = packed_decoder(), []
    ours = learner_of(decoder, {}, holds=True, notice=lines.append)

    def hook(_, arguments, hidden_TD):
        if arguments[-1].operands is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder.register_forward_hook(hook)
    ours.step(groups)
    assert len(lines) == 1 and "learn.max_tokens_per_microbatch is" in lines[0] and ours.holds_operands


@pytest.mark.gpu
@MODES
@pytest.mark.parametrize("algo", [{}, {"beta": 0.3}])
def test_on_a_gpu_weights_in_tiles_give_the_same_bits_too(recompute, algo, groups, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    arch, learners = replace(shape("smollm2-135m"), num_layers=4, vocab_size=VOCAB), []
    for holds in (False, True):
        decoder = random_decoder(arch, format="nvfp4", rank=16, device=device, seed=0)
        learn = {"max_tokens_per_microbatch": 40, "gradient_checkpointing": recompute}
        learners.append(learner_of(decoder, learn, holds=holds, algo=algo))
        for _ in range(2):
            learners[-1].step(groups)
    assert is_equal(*learners)
