"""Gradients of the losses against autograd in float64 on a second writing of the formulas."""

import pytest
import torch

from qerl.errors import UserError
from qerl.tinker.losses import LOSSES, loss_of

FORMULAS = {
    "cross_entropy": lambda p, q, a, c: -(a * p).sum(),
    "importance_sampling": lambda p, q, a, c: -(torch.exp(p) / torch.exp(q) * a).sum(),
    "ppo": lambda p, q, a, c: (
        -sum(
            min(r * x, min(max(r, c["low"]), c["high"]) * x) for r, x in zip(torch.exp(p - q), a, strict=True)
        )
    ),
    "cispo": lambda p, q, a, c: (
        -sum(
            min(max(r, c["low"]), c["high"]) * y * x
            for r, y, x in zip(torch.exp(p - q).tolist(), p, a, strict=True)
        )
    ),
    "dro": lambda p, q, a, c: -(p * a - 0.5 * c["beta"] * (p - q) * (p - q)).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_formula(name):
    generator = torch.Generator().manual_seed(3)
    p, q, a = (torch.randn(64, generator=generator) for _ in range(3))
    given = {"dro": {"beta": 0.3}, "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}}.get(
        name, {}
    )
    loss, config = loss_of(name, given)
    inputs = {"weights": a} if name == "cross_entropy" else {"logprobs": q, "advantages": a}
    mine = p.clone().requires_grad_()
    value = loss.objective(mine, inputs, config).sum()
    value.backward()
    exact = p.double().requires_grad_()
    bounds = {"low": config.get("clip_low_threshold"), "high": config.get("clip_high_threshold")}
    expected = FORMULAS[name](exact, q.double(), a.double(), {**bounds, **config})
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_defaults_are_those_that_the_page_names():
    assert loss_of("ppo", {})[1] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_of("cispo", {"clip_high_threshold": 2.0})[1] == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 2.0,
    }


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("crossentropy", {}, "did you mean cross_entropy"),
        ("ppo", {"beta": 1.0}, "ppo has no entry 'beta'; it has clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": "x"}, "beta must be a number from 0 on, got 'x'"),
        ("dro", {"beta": float("nan")}, "beta must be a number"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold 1.3 is above clip_high_threshold 1.2"),
    ],
)
def test_a_wrong_loss_or_entry_is_named(name, config, message):
    with pytest.raises(UserError, match=message):
        loss_of(name, config)
