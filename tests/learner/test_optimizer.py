import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.samples import random_groups
from learner.saver import save as save_checkpoint
from learner.tiny import VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.learner import Learner, checkpoint
from qerl.learner.optimizer import FusedAdamW

EIGHT_BIT = {"optim": "adamw_8bit", "weight_decay": 0.1, "warmup_ratio": 0.2}


@pytest.fixture
def steps(rng):
    return [random_groups(4, 3, vocab=VOCAB, rng=rng) for _ in range(4)]


def eight_bit_learner():
    """Return a learner of rank 128: A of 128 x 32 has the 4,096 elements from which moments take 8 bits."""
    pytest.importorskip("bitsandbytes")
    decoder = tiny_decoder(adapter=AdapterConfig(rank=128))
    return Learner(decoder, run_config(learn=EIGHT_BIT))


def test_moments_take_8_bits(steps):
    learner = eight_bit_learner()
    learner.step(steps[0])
    moments = learner.optimizer_state()
    a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    k = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    assert moments[f"{a}.state1"].dtype == moments[f"{a}.state2"].dtype == torch.uint8
    assert moments[f"{a}.state1"].shape == (128, 32)
    assert moments[f"{k}.state1"].dtype == torch.float32  # 16 x 128 elements


def test_it_moves_the_weights_as_adamw_does(steps):
    exact = Learner(
        tiny_decoder(adapter=AdapterConfig(rank=128)), run_config(learn=EIGHT_BIT | {"optim": "adamw"})
    )
    rough = eight_bit_learner()
    start = torch.cat([m.flatten().clone() for m in exact.adapter_state().values()])
    for groups in steps[:2]:
        exact.step(groups)
        rough.step(groups)
    moved = [torch.cat([m.flatten() for m in x.adapter_state().values()]) - start for x in (exact, rough)]
    assert torch.cosine_similarity(*moved, dim=0) > 0.98
    assert (moved[1].norm() / moved[0].norm()).item() == pytest.approx(1, abs=0.03)


def test_8_bit_moments_are_resumed_bit_for_bit(steps, tmp_path):
    through, before, after = (eight_bit_learner() for _ in range(3))
    want = [through.step(groups) for groups in steps]
    for groups in steps[:2]:
        before.step(groups)
    save_checkpoint(tmp_path, before, next_step=2, keep=1)
    checkpoint.load_latest(tmp_path, after)
    assert [after.step(groups) for groups in steps[2:]] == want[2:]
    for a, b in (
        (after.adapter_state(), through.adapter_state()),
        (after.optimizer_state(), through.optimizer_state()),
    ):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_bitsandbytes_a_line_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(UserError, match="needs bitsandbytes"):
        tiny_learner(learn={"optim": "adamw_8bit"})


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_a_large_epsilon_holds_the_weights_still(optim, steps):
    pytest.importorskip("bitsandbytes")
    learner = tiny_learner(learn={"optim": optim, "adam_epsilon": 1e9})
    start = {name: master.clone() for name, master in learner.adapter_state().items()}
    learner.step(steps[0])
    assert all((master - start[name]).abs().max() < 1e-9 for name, master in learner.adapter_state().items())


def test_adamw_is_torch_s_bit_for_bit(rng):
    """One parameter has no gradient in the first step; the rate changes as a schedule's does."""
    start = [torch.randn(shape, generator=rng) for shape in ((7, 5), (300,), (3,))]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = FusedAdamW(ours, **settings), torch.optim.AdamW(theirs, **settings, fused=True)
    for step in range(4):
        gradients = [torch.randn(x.shape, generator=rng) for x in start]
        for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            parameters[2].grad = None if step == 0 else parameters[2].grad
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert all(x.grad is None for x in parameters)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        mine, its = (x.state[p] for x, p in zip(optimizers, (a, b), strict=True))
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert not torch.equal(ours[0], start[0])


class Waits(TorchDispatchMode):
    """Counts the operations for which a host would wait for its GPU."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "index"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_finite", [True, False])
def test_an_update_is_launched_without_waiting_and_skips_a_gradient_that_is_not_finite(is_finite, steps):
    learner = tiny_learner()
    learner.step(steps[0])
    before = {name: x.clone() for name, x in (learner.adapter_state() | learner.optimizer_state()).items()}
    for master in learner._masters.values():
        master.grad = torch.ones_like(master)
    if not is_finite:
        next(iter(learner._masters.values())).grad[0, 0] = torch.inf
    with Waits() as waits:
        learner._apply(0.1)
    assert waits.names == []
    after = learner.adapter_state() | learner.optimizer_state()
    assert all(torch.equal(x, before[name]) != is_finite for name, x in after.items())
