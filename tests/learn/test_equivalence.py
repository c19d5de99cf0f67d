"""The split, sharing and order of a batch do not change what is learned, which is what the formulas say."""

from dataclasses import replace

import pytest
import torch

from conftest import rms_error
from learner import plain
from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.algo.importance import IMPORTANCE
from qerl.algo.loss import LOSSES
from qerl.errors import UserError
from qerl.learner import Learner
from qerl.models.peft.adapter import adapter_tensors

MODES = pytest.mark.parametrize(
    "algo",
    [
        *({"loss_type": loss} for loss in LOSSES),
        *({"importance": importance} for importance in IMPORTANCE),
        *({"loss_type": loss, "beta": 0.3} for loss in ("grpo", "gspo", "cispo")),
        {"loss_type": "sapo", "importance": "truncated_sequence", "importance_cap": 1.1},
        {"loss_type": "gspo", "importance": "ratio"},
        {"loss_type": "maspo", "importance": "icepop", "importance_floor": 0.1, "importance_cap": 0.5},
        {"importance": "masked", "importance_cap": 0.3},
        {"importance": "masked_sequence", "importance_cap": 0.05},
        {"reject": ("geometric",), "geometric_low": 0.2, "geometric_high": 0.33},
        {"reject": ("veto", "geometric"), "veto_ratio": 0.06, "geometric_low": 0.2, "geometric_high": 4.0},
    ],
    ids=lambda algo: "-".join(map(str, algo.values())),
)
UNCLIPPED = {"max_grad_norm": 1e9}
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


@pytest.fixture
def groups(rng):
    """One of them teaches nothing but counts, and one sample has no reward."""
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng)
    silent = [replace(s, advantage=0.0) for s in groups[1].samples_G]
    failed = [replace(groups[2].samples_G[0], reward=None), *groups[2].samples_G[1:]]
    return [groups[0], replace(groups[1], samples_G=silent), replace(groups[2], samples_G=failed), groups[3]]


def gradient(groups, algo, **learn):
    """One update's gradient, read from AdamW's first moment: (1 - beta) times it."""
    learner = tiny_learner(algo, UNCLIPPED | learn)
    learner.step(groups)
    beta = learner.config.learn.betas[0]
    moments = learner.optimizer_state()
    return torch.cat(
        [moments[f"{name}.exp_avg"].flatten() / (1 - beta) for name in sorted(learner.adapter_state())]
    )


WHOLE = {}


def whole_gradient(groups, algo):
    """That of the fixture's groups in one batch, which several tests compare with: computed once."""
    key = tuple(algo.items())
    if key not in WHOLE:
        WHOLE[key] = gradient(groups, algo)
    return WHOLE[key]


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@MODES
def test_the_gradient_is_that_of_the_plain_formulas(algo, groups):
    truth = flat(plain.gradient(run_config(algo, UNCLIPPED), tiny_decoder(), groups))
    assert rms_error(whole_gradient(groups, algo), truth) < 1e-5


@MODES
def test_no_split_changes_the_gradient(algo, groups):
    """A budget of one token makes each sample a batch and a tree of its own."""
    whole = whole_gradient(groups, algo)
    for micro_tokens in (1, 21):
        assert rms_error(gradient(groups, algo, max_tokens_per_microbatch=micro_tokens), whole) < 1e-5
    assert rms_error(gradient(groups, algo, logprob_chunk_tokens=3), whole) < 1e-5


@MODES
def test_no_order_changes_the_gradient(algo, groups):
    turned = [replace(g, samples_G=g.samples_G[::-1]) for g in groups[2:] + groups[:2]]
    whole = whole_gradient(groups, algo)
    assert rms_error(gradient(turned, algo, max_tokens_per_microbatch=21), whole) < 1e-5


@pytest.mark.parametrize(
    "algo",
    [
        *({"importance": importance, "importance_floor": 0.1} for importance in IMPORTANCE),
        {"importance": "ratio", "beta": 0.3},
        {"beta": 0.3, "kl_estimator": "k3_unbiased"},
        {"loss_type": "gspo"},
        {"loss_type": "gspo_token"},
        *({"loss_type": loss} for loss in ("cispo", "sapo", "maspo", "nll")),
    ],
    ids=lambda algo: "-".join(map(str, algo.values())),
)
def test_several_updates_and_passes_learn_what_the_plain_loop_learns(algo, rng):
    """Old logprobs from before the first update, the schedule, the clipping and AdamW, over two steps."""
    learn = {"updates_per_step": 2, "num_iterations": 2, "weight_decay": 0.1, "max_grad_norm": 0.4}
    config = replace(run_config(algo, learn), sample=replace(run_config().sample, temperature=0.8))
    steps = [random_groups(4, 3, vocab=VOCAB, rng=rng) for _ in range(2)]
    start = flat({name: m.detach() for name, m in adapter_tensors(tiny_decoder()).items()})

    plainly = tiny_decoder()
    plain.train(config, plainly, steps)
    learner = Learner(tiny_decoder(), config)
    for step in steps:
        metrics = learner.step(step)

    clips = algo.get("loss_type") != "nll"  # it has no ratio
    assert (metrics["clip_fraction"] > 0) == clips and metrics["grad_norm"] > 0.4  # both clips were at work
    want = flat({name: m.detach() for name, m in adapter_tensors(plainly).items()}) - start
    assert rms_error(flat(learner.adapter_state()) - start, want) < 1e-3


def test_two_updates_over_halves_are_not_one_over_both(groups):
    """The equivalences above could hold of a learner that ignored updates_per_step."""
    one, two = tiny_learner(), tiny_learner(learn={"updates_per_step": 2})
    one.step(groups)
    two.step(groups)
    assert (one.version, two.version) == (1, 2)
    assert rms_error(flat(two.adapter_state()), flat(one.adapter_state())) > 1e-3


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_weights_own_gradient_is_what_its_adapters_follows_from(loss, groups):
    """With B = 0 both have one policy, and dB = scaling * dW @ A^T."""
    algo, adapter = {"loss_type": loss}, replace(run_config().adapter, target_modules=TARGETS)
    moments, masters = [], []
    for kind in ("lora", "full"):
        config = run_config(algo, UNCLIPPED, adapter=replace(adapter, kind=kind))
        learner = Learner(tiny_decoder(adapter=config.adapter, fresh=True), config)
        masters.append({name: t.clone() for name, t in learner.adapter_state().items()})
        learner.step(groups)
        moments.append(learner.optimizer_state())
    scaling = adapter.alpha / adapter.rank
    assert len(masters[1]) == 2 * len(TARGETS)
    for name in masters[1]:
        peft = f"base_model.model.{name.removesuffix('.weight')}"
        dw_NK, db_NR = moments[1][f"{name}.exp_avg"], moments[0][f"{peft}.lora_B.weight.exp_avg"]
        assert rms_error(db_NR, scaling * dw_NK @ masters[0][f"{peft}.lora_A.weight"].T) < 1e-5


def test_full_fine_tuning_learns_the_same_however_it_is_computed(groups):
    states = []
    for learn in (
        {},
        {"max_tokens_per_microbatch": 21},
        {"gradient_checkpointing": "layer"},
        {"gradient_checkpointing": "offload"},
    ):
        config = run_config({}, learn, adapter=replace(run_config().adapter, kind="full"))
        learner = Learner(tiny_decoder(adapter=config.adapter), config)
        learner.step(groups)
        states.append(flat(learner.adapter_state()))
    assert rms_error(states[1], states[0]) < 1e-4
    assert torch.equal(states[2], states[0]) and torch.equal(states[3], states[0])


def test_full_fine_tuning_has_no_frozen_policy_to_stay_near():
    with pytest.raises(UserError, match=r"algo\.beta needs a frozen reference policy"):
        run_config({"beta": 0.1}, adapter=replace(run_config().adapter, kind="full"))
