"""Tokens that an environment put between turns: seen by what follows, and learned from by nobody."""

from dataclasses import replace

import pytest
import torch

from conftest import rms_error
from learner import plain
from learner.samples import prompt, random_groups, sample
from learner.tiny import VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.algo.loss import LOSSES
from qerl.learner import Learner
from qerl.learner.packing import pack
from qerl.models.peft.adapter import adapter_tensors
from qerl.types import Group

CPU = torch.device("cpu")
UNCLIPPED = {"max_grad_norm": 1e9}


def with_given(one, *, at, tokens_T):
    """The sample with these tokens put in before its token number `at`."""
    together_T = one.tokens_T[:at] + tokens_T + one.tokens_T[at:]
    return replace(one, tokens_T=together_T, environment_spans=(range(at, at + len(tokens_T)),))


@pytest.fixture
def groups(rng):
    """Return groups of some samples with two turns or more, and some with one."""
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng)
    for group in groups:
        for g, one in enumerate(group.samples_G[:2]):
            if len(one.tokens_T) > 1:
                at = 1 + g * (len(one.tokens_T) - 2)
                given_T = torch.randint(VOCAB, (2 + g,), generator=rng).tolist()
                group.samples_G[g] = with_given(one, at=at, tokens_T=given_T)
    assert sum(bool(s.environment_spans) for group in groups for s in group.samples_G) >= 5
    return groups


def test_a_sample_of_two_turns_is_packed_as_worked_out_by_hand():
    """Prompt 7 8; turns 1 2 and 3 4 with 30 31 between them; beside it a sample of one turn, 5."""
    two = sample([1, 2, 30, 31, 3, 4], logprobs_T=[-0.1, -0.2, -0.3, -0.4], advantage=2.0)
    two = replace(two, environment_spans=(range(2, 4),))
    group = Group(prompt=prompt(0, [7, 8]), samples_G=[two, sample([5], logprobs_T=[-0.5], advantage=-1.0)])
    (batch,) = pack([(group, [0.25, 0.5])], max_tokens=100, device=CPU)
    assert batch.tokens_T.tolist() == [7, 8, 1, 2, 30, 31, 3]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.source_rows_C.tolist() == [
        1,
        2,
        5,
        6,
        1,
    ]  # neither row 3 nor row 4, which saw 30 and 31 come
    assert batch.targets_C.tolist() == [1, 2, 3, 4, 5]
    assert batch.sampler_logprobs_C.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert batch.advantages_C.tolist() == [2.0, 2.0, 2.0, 2.0, -1.0]
    assert batch.weights_C.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert batch.spans.lengths_S.tolist() == [4, 1]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
def test_the_gradient_is_that_of_the_plain_formulas_over_sampled_tokens(groups, loss, kl_coefficient):
    algo = {"loss_type": loss, "beta": kl_coefficient}
    truth = plain.gradient(run_config(algo, UNCLIPPED), tiny_decoder(), groups)
    learner = tiny_learner(algo, UNCLIPPED)
    learner.step(groups)
    moments, beta = learner.optimizer_state(), learner.config.learn.betas[0]
    for name in learner.adapter_state():
        assert rms_error(moments[f"{name}.exp_avg"] / (1 - beta), truth[name]) < 1e-4


def test_no_gradient_comes_by_way_of_what_an_environment_said(groups):
    """The loss's slope at the hidden state that a given token would be predicted from is zero, and at every
    other's it is not; packed sample by sample, so that no two share a row."""
    decoder, seen = tiny_decoder(), []

    def keep(module, inputs, hidden_TD):
        hidden_TD.retain_grad()
        seen.append(hidden_TD)

    learner = Learner(decoder, run_config({"beta": 0.0}, UNCLIPPED | {"max_tokens_per_microbatch": 1}))
    decoder.norm.register_forward_hook(keep)
    learner.step(groups)
    samples = [(group, one) for group in groups for one in group.samples_G if one.advantage != 0]
    assert len(seen) == len(samples)
    for hidden_TD, (group, one) in zip(seen, samples, strict=True):
        before = len(group.prompt.tokens_T) - 1
        slopes_T = hidden_TD.grad.abs().sum(-1)
        predicting = {before + place for place in one.sampled_indices}
        assert [row for row, slope in enumerate(slopes_T.tolist()) if slope] == sorted(predicting)


def test_entropy_and_mismatch_are_of_sampled_tokens_alone(groups):
    """Other given tokens of equal number change what follows them; none of them is in a mean itself."""
    config = run_config({"beta": 0.0})
    decoder = tiny_decoder()
    with torch.no_grad():
        read = [plain.read(decoder, group, s, 1.0) for group, s in plain.pairs(groups)]
    metrics = Learner(decoder, config).step(groups)
    sampler = torch.cat([torch.tensor(s.logprobs_T) for _, s in plain.pairs(groups)])
    own = torch.cat([logprobs_T for logprobs_T, _ in read])
    assert metrics["entropy"] == pytest.approx(torch.cat([e for _, e in read]).mean().item(), rel=1e-4)
    assert metrics["sampler_entropy"] == pytest.approx(-sampler.mean().item(), rel=1e-5)
    assert metrics["mismatch_abs"] == pytest.approx((own - sampler).abs().mean().item(), rel=1e-4)
    assert all(m.isfinite().all() for m in adapter_tensors(decoder).values())
