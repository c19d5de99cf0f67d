"""Losses of preferences, their gradients and metrics are those of TRL's own code on the same logprobs."""

import collections
import types
import typing

import pytest
import torch

from qerl.algo.preference import (
    DIVERGENCES,
    PAIR_LOSSES,
    Completions,
    advantages,
    preference_loss,
    preference_metrics,
)
from qerl.config import DpoConfig
from qerl.config.dpo import UNPAIRED

NUM, LENGTH, PROMPT = 5, 7, 3  # pairs, longest completion, tokens of a prompt


def test_every_loss_has_a_formula():
    (names,) = [typing.get_args(arg) for arg in typing.get_args(DpoConfig.__annotations__["loss_type"])[:1]]
    assert set(names) == {*PAIR_LOSSES, *UNPAIRED}
    assert {*typing.get_args(DpoConfig.__annotations__["f_divergence_type"])} == {*DIVERGENCES}


class Accelerator:
    device = torch.device("cpu")

    def gather(self, value):
        return value

    gather_for_metrics = gather


def made(num, seed=0):
    """Logprobs of completions of several lengths, policy and reference, and TRL's mask of the tokens."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (num,), generator=rng)
    mask = torch.zeros(num, PROMPT + LENGTH, dtype=torch.long)
    for row, length in zip(mask, lengths.tolist(), strict=True):
        row[PROMPT : PROMPT + length] = 1
    policy = -2 * torch.rand(num, PROMPT + LENGTH - 1, generator=rng, dtype=torch.float64) * mask[:, 1:]
    reference = policy + torch.randn(policy.shape, generator=rng, dtype=torch.float64) * mask[:, 1:]
    return policy.requires_grad_(), reference.sum(1), lengths, mask


def outputs_of(log_probs):
    shape = log_probs.shape
    zeros = torch.zeros(shape)
    return types.SimpleNamespace(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=torch.zeros(shape, dtype=torch.bool)
    )


def trainer(config, **more):
    return types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        beta=config.beta,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )


def trl_pairs(config):
    """TRL's loss, its gradient by token, its metrics, and the same completions in our form."""
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    policy, reference, lengths, mask = made(2 * NUM)  # TRL: all chosen, then all rejected
    stub = trainer(
        config,
        ld_alpha=None,
        loss_types=config.loss_type,
        loss_weights=config.loss_weights or (1.0,) * len(config.loss_type),
        label_smoothing=config.label_smoothing,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        use_weighting=False,
        args=types.SimpleNamespace(discopop_tau=config.discopop_tau),
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[:NUM].float(),
        "ref_rejected_logps": reference[NUM:].float(),
    }
    loss = dpo_trainer.DPOTrainer._compute_loss(stub, lambda **_: outputs_of(policy.float()), inputs, False)
    (gradient,) = torch.autograd.grad(loss, policy)
    order = [i for pair in zip(range(NUM), range(NUM, 2 * NUM), strict=True) for i in pair]
    ours = Completions(
        policy_S=policy.detach().sum(1)[order],
        reference_S=reference.detach()[order],
        tokens_S=lengths[order].double(),
        is_chosen_S=torch.tensor([True, False] * NUM),
    )
    return loss, gradient[order], mask[order, 1:].bool(), stub._metrics["train"], ours


def assert_same(config, loss, gradient, mask, metrics, ours):
    value, advantage_S = advantages(ours, config)
    assert value == pytest.approx(loss.item(), rel=1e-5)
    truth = torch.tensor(advantage_S)[:, None].expand_as(
        mask
    )  # every token of a completion has its advantage
    torch.testing.assert_close(-gradient[mask].float(), truth[mask].float(), rtol=1e-4, atol=1e-7)
    found = preference_metrics(ours, config)
    named = {name for name in metrics if name.startswith(("rewards/", "logps/"))}
    assert {name for name in found if name != "kl"} == named
    for name in named:
        assert found[name] == pytest.approx(metrics[name][0], rel=1e-5), name


SMOOTHED = {"label_smoothing": 0.2}
CASES = {
    **{name: DpoConfig(loss_type=(name,), beta=0.3, **SMOOTHED) for name in PAIR_LOSSES},
    "robust without": DpoConfig(loss_type=("robust",)),
    "several": DpoConfig(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0)),
    "several alike": DpoConfig(loss_type=("hinge", "ipo")),
    **{
        f"{name} of {kind}": DpoConfig(loss_type=(name,), beta=0.3, f_divergence_type=kind)
        for kind in DIVERGENCES
        for name in ("sigmoid", "ipo")
    },
    "alpha": DpoConfig(
        loss_type=("hinge",), f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_of_pairs_and_its_gradient_are_those_of_trl(name):
    assert_same(CASES[name], *trl_pairs(CASES[name]))


@pytest.mark.parametrize("loss", UNPAIRED)
@pytest.mark.parametrize("kl_shift", [0.4, -0.4])
def test_a_loss_of_labels_and_its_gradient_are_those_of_trl(loss, kl_shift):
    kto_trainer = pytest.importorskip("trl.trainer.kto_trainer")
    config = DpoConfig(loss_type=(loss,), beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    policy, reference, lengths, mask = made(NUM)
    labels = torch.tensor([True, False, True, True, False])
    stub = trainer(
        config,
        loss_type=loss,
        calculate_KL=config.has_kl,
        desirable_weight=1.5,
        undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: torch.full((NUM,), 1.0 + kl_shift),
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": labels,
        "ref_logps": reference.float(),
        "ref_KL_logps": torch.ones(NUM),
    }
    loss = kto_trainer.KTOTrainer._compute_loss(stub, lambda **_: outputs_of(policy.float()), inputs, False)
    (gradient,) = torch.autograd.grad(loss, policy)
    ours = Completions(
        policy_S=policy.detach().sum(1),
        reference_S=reference.detach(),
        tokens_S=lengths.double(),
        is_chosen_S=labels,
        kl=max(0.0, kl_shift) if config.has_kl else None,
    )
    assert_same(config, loss, gradient, mask[:, 1:].bool(), stub._metrics["train"], ours)


def test_a_completion_alone_has_no_margin():
    one = torch.tensor([-1.0], dtype=torch.float64)
    ours = Completions(
        policy_S=one, reference_S=one, tokens_S=one.abs(), is_chosen_S=torch.tensor([False]), kl=0.25
    )
    config = DpoConfig(loss_type=("kto",))
    found = preference_metrics(ours, config)
    assert found == {"rewards/rejected": 0.0, "logps/rejected": -1.0, "kl": 0.25}
    assert preference_loss(ours, config).item() == pytest.approx(1 - 1 / (1 + 2.718281828**-0.025))
