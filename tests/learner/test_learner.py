import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from conftest import rms_error
from learner import plain
from learner.samples import prompt, random_groups, sample
from learner.tiny import ADAPTER, VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.learner import Learner
from qerl.learner.lr_schedule import learning_rate
from qerl.learner.minibatch import split
from qerl.models.peft.adapter import load_adapter
from qerl.types import Group


@pytest.fixture
def groups(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


def masters(learner):
    return {name: tensor.clone() for name, tensor in learner.adapter_state().items()}


def is_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def without_advantage(group):
    return replace(group, samples_G=[replace(s, advantage=0.0) for s in group.samples_G])


def forwards(learner):
    """Record for each forward of the decoder from here on whether it had a gradient to keep."""
    seen = []
    learner.decoder.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


def test_entropy_and_mismatch_are_of_the_learner_before_its_first_update(groups):
    """Over every sampled token, the groups without advantage included, however many updates follow."""
    groups = [*groups[:3], without_advantage(groups[3])]
    decoder = tiny_decoder()
    read = [plain.read(decoder, group, s, 1.0) for group, s in plain.pairs(groups)]
    learner_C = torch.cat([logprob_T.detach() for logprob_T, _ in read])
    sampler_C = torch.tensor([x for _, s in plain.pairs(groups) for x in s.logprobs_T])
    d_C = learner_C - sampler_C
    for learn in ({}, {"updates_per_step": 2, "num_iterations": 3}):
        got = tiny_learner(learn=learn).step(groups)
        assert got["entropy"] == pytest.approx(torch.cat([e for _, e in read]).mean().item(), rel=1e-5)
        assert got["sampler_entropy"] == pytest.approx(-sampler_C.mean().item(), rel=1e-5)
        assert got["mismatch_abs"] == pytest.approx(d_C.abs().mean().item(), rel=1e-5)
        assert got["mismatch_max"] == pytest.approx(d_C.abs().max().item(), rel=1e-5)
        assert got["mismatch_kl"] == pytest.approx((d_C.exp() - 1 - d_C).mean().item(), rel=1e-4)


def test_loss_and_gradient_norm_are_those_of_the_whole_update(groups):
    config, decoder = run_config(), tiny_decoder()
    before = plain.logprobs(config, decoder, groups)
    loss = plain.whole_loss(config, decoder, groups, before, {}).item()
    norm = math.sqrt(sum(g.square().sum().item() for g in plain.gradient(config, decoder, groups).values()))
    got = tiny_learner(learn={"max_tokens_per_microbatch": 13}).step(groups)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_loss_and_gradient_norm_are_means_over_the_updates(groups):
    halves = [tiny_learner().step(half) for half in (groups[:2], groups[2:])]
    both = tiny_learner(learn={"updates_per_step": 2, "learning_rate": 1e-30}).step(groups)
    for name in ("loss", "grad_norm"):
        assert both[name] == pytest.approx(fmean(half[name] for half in halves), rel=1e-5)


def test_more_updates_than_prompts_split_the_groups(groups):
    samples_G = [replace(s, sample_index=g) for g, s in enumerate(groups[0].samples_G)]
    groups, rate, size = [replace(groups[0], samples_G=samples_G)], {"learning_rate": 1e-30}, len(samples_G)
    samples = [[replace(groups[0], samples_G=[s], num_sampled=1)] for s in samples_G]
    alone = [tiny_learner().step(each) for each in samples]
    split = tiny_learner(learn={"updates_per_step": size} | rate, num_prompts=1).step(groups)
    for name in ("loss", "grad_norm"):
        assert split[name] == pytest.approx(fmean(each[name] for each in alone), rel=1e-5)


def test_importance_weights_and_the_share_that_was_capped_are_seen(groups):
    config = run_config({"importance_cap": 0.9})
    before = plain.logprobs(config, tiny_decoder(), groups)
    weights_C = torch.cat(
        [(before[id(s)] - torch.tensor(s.logprobs_T)).exp() for _, s in plain.pairs(groups)]
    )
    got = tiny_learner({"importance_cap": 0.9}).step(groups)
    assert 0 < got["capped_fraction"] < 1
    assert got["capped_fraction"] == pytest.approx((weights_C > 0.9).float().mean().item())
    assert got["importance_weight_mean"] == pytest.approx(weights_C.clamp(max=0.9).mean().item(), rel=1e-5)
    uncorrected = tiny_learner({"importance": "none", "importance_cap": 0.9}).step(groups)
    assert (uncorrected["capped_fraction"], uncorrected["importance_weight_mean"]) == (0.0, 1.0)


def test_what_the_correction_left_out_is_seen(groups):
    """Masked tokens, rejected samples, and how many tokens the weights are worth."""
    config = run_config()
    before = plain.logprobs(config, tiny_decoder(), groups)
    rho_S = [(before[id(s)] - torch.tensor(s.logprobs_T)).exp() for _, s in plain.pairs(groups)]
    cap = torch.cat(rho_S).median().item() * 1.001
    masked_C = torch.cat(rho_S) * (torch.cat(rho_S) <= cap)
    got = tiny_learner({"importance": "masked", "importance_cap": cap}).step(groups)
    assert got["masked_fraction"] == pytest.approx((masked_C == 0).float().mean().item())
    assert got["capped_fraction"] == got["rejected_fraction"] == 0.0
    effective = masked_C.sum() ** 2 / (len(masked_C) * masked_C.square().sum())
    assert got["effective_fraction"] == pytest.approx(effective.item(), rel=1e-5)
    lows = sorted(rho_T.min().item() for rho_T in rho_S)
    veto = (lows[4] + lows[5]) / 2
    got = tiny_learner({"importance": "none", "reject": ("veto",), "veto_ratio": veto}).step(groups)
    assert (got["rejected_fraction"], got["masked_fraction"]) == (pytest.approx(5 / 12), 0.0)
    kept = sum(len(rho_T) for rho_T in rho_S if rho_T.min() >= veto)
    assert got["effective_fraction"] == pytest.approx(kept / sum(map(len, rho_S)))
    got = tiny_learner({"reject": ("veto",), "veto_ratio": 1e9}).step(groups)
    assert got["rejected_fraction"] == 1.0 and "effective_fraction" not in got


def test_the_ratio_is_one_on_policy_and_leaves_the_clip_idle(groups):
    got = tiny_learner().step(groups)
    assert (got["ratio_mean"], got["clip_fraction"]) == (1.0, 0.0)
    assert tiny_learner(learn={"num_iterations": 2}).step(groups)["clip_fraction"] > 0


def test_the_reference_is_the_model_without_its_adapter(groups):
    decoder, config = tiny_decoder(), run_config({"beta": 0.5})
    policy = plain.logprobs(config, decoder, groups)
    reference = plain.reference_logprobs(config, decoder, groups)
    x_C = torch.cat([reference[id(s)] - policy[id(s)] for _, s in plain.pairs(groups)])
    got = tiny_learner({"beta": 0.5}).step(groups)
    assert got["kl_reference"] == pytest.approx((x_C.exp() - x_C - 1).mean().item(), rel=1e-4)
    assert "kl_reference" not in tiny_learner().step(groups)


def test_packed_tokens_and_samples_are_counted(groups):
    failed = replace(groups[0].samples_G[0], reward=None)
    groups = [replace(groups[0], samples_G=[failed, *groups[0].samples_G[1:]]), *groups[1:]]
    got = tiny_learner().step(groups)
    inputs = sum(len(s.tokens_T) - 1 for _, s in plain.pairs(groups))
    assert got["trained_samples"] == 11
    assert got["learn_tokens"] == inputs + sum(len(group.prompt.tokens_T) for group in groups)


def test_the_rate_follows_the_schedule_by_updates_and_not_by_steps(groups):
    learner = tiny_learner(learn={"updates_per_step": 2, "warmup_ratio": 0.2})
    got = [learner.step(groups)["learning_rate"] for _ in range(3)]
    learn, num_updates = learner.config.learn, 20
    assert got == [learning_rate(u, num_updates=num_updates, learn=learn) for u in (1, 3, 5)]


def test_one_update_a_step_takes_one_forward_a_batch(groups):
    learner = tiny_learner()
    seen = forwards(learner)
    learner.step(groups)
    assert seen == [True]


def test_a_group_without_advantage_is_read_and_never_differentiated(groups):
    learner = tiny_learner(learn={"num_iterations": 2})
    seen = forwards(learner)
    learner.step([groups[0], without_advantage(groups[1])])
    assert seen == [False, False, True, True]  # without a gradient, old logprobs, two passes


def test_the_reference_costs_one_forward_however_many_passes(groups):
    learner = tiny_learner({"beta": 0.1}, {"num_iterations": 3})
    seen = forwards(learner)
    learner.step(groups)
    assert seen == [False, False, True, True, True]


def test_groups_without_a_gradient_that_are_read_stand_for_the_others(groups):
    """Of four copies of one group a quarter is read: the metrics are those of all, and so is the update."""
    silent = [
        replace(without_advantage(groups[0]), prompt=replace(groups[0].prompt, index=i)) for i in range(4)
    ]
    steps = [silent[0], groups[1], *silent[1:], groups[2]]
    whole, part = (tiny_learner(learn={"read_share": share}) for share in (1.0, 0.25))
    counted, metrics = forwards(part), [learner.step(steps) for learner in (whole, part)]
    assert is_equal(masters(whole), masters(part))
    assert len(counted) == 2
    rows = sum(len(group.prompt.tokens_T) for group in silent[1:])
    rows += 3 * sum(len(s.tokens_T) - 1 for s in groups[0].samples_G)
    assert metrics[0].pop("learn_tokens") - metrics[1].pop("learn_tokens") == rows
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_the_share_that_is_read_is_spread_over_the_step(groups):
    groups = [
        without_advantage(replace(groups[0], prompt=replace(groups[0].prompt, index=i))) for i in range(6)
    ]
    groups.insert(0, replace(groups[0], samples_G=[]))  # has nothing to read
    for share, indices in ((0.5, [0, 2, 4]), (0.2, [0, 3]), (0.01, [0]), (1.0, [0, 1, 2, 3, 4, 5])):
        (minibatch,) = split(groups, run_config(learn={"read_share": share}), device=torch.device("cpu"))
        assert [group.prompt.index for group in minibatch.without_gradient.groups] == indices
        assert minibatch.read_weight == 6 / len(indices)


@pytest.mark.parametrize("kind", ["no groups", "no samples", "no rewards", "no advantages"])
def test_no_weight_changes_and_the_planned_updates_are_counted(kind, groups):
    learner = tiny_learner(learn={"updates_per_step": 2, "num_iterations": 2, "weight_decay": 0.1})
    learner.step(groups)  # so that AdamW has moments to move by
    before = masters(learner)
    nothing = {
        "no groups": [],
        "no samples": [replace(group, samples_G=[]) for group in groups],
        "no rewards": [
            replace(group, samples_G=[replace(s, reward=None) for s in group.samples_G]) for group in groups
        ],
        "no advantages": [without_advantage(group) for group in groups],
    }[kind]
    got = learner.step(nothing)
    assert is_equal(masters(learner), before)
    assert (learner.version, got["skipped_updates"], got["nonfinite_updates"]) == (8, 4, 0)
    assert all(math.isfinite(value) for value in got.values())
    assert ("mismatch_abs" in got) == (kind == "no advantages")


def test_an_update_whose_share_is_empty_is_skipped_alone(groups):
    learner = tiny_learner(learn={"updates_per_step": 2})
    got = learner.step([without_advantage(groups[0]), without_advantage(groups[1]), *groups[2:]])
    assert (got["skipped_updates"], learner.version) == (1, 2)
    assert got["loss"] != 0


def test_with_a_kl_term_equal_rewards_still_teach(groups):
    learner = tiny_learner({"beta": 0.5})
    before = masters(learner)
    got = learner.step([without_advantage(group) for group in groups])
    assert got["skipped_updates"] == 0 and not is_equal(masters(learner), before)


def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(groups):
    learner = tiny_learner()
    learner.step(groups)
    before, moments = masters(learner), {k: v.clone() for k, v in learner.optimizer_state().items()}
    bad = replace(groups[0].samples_G[0], advantage=math.inf)
    got = learner.step([replace(groups[0], samples_G=[bad, *groups[0].samples_G[1:]]), *groups[1:]])
    assert (got["nonfinite_updates"], got["skipped_updates"], learner.version) == (1, 0, 2)
    assert is_equal(masters(learner), before) and is_equal(learner.optimizer_state(), moments)
    assert "grad_norm" not in got and "loss" not in got


def test_the_next_update_starts_from_a_clean_gradient(groups):
    bad = replace(groups[0].samples_G[0], advantage=math.nan)
    broken = replace(groups[0], samples_G=[bad])
    disturbed, other = tiny_learner(), tiny_learner()
    disturbed.step([broken])
    other.step([])
    assert disturbed.step(groups)["nonfinite_updates"] == 0
    other.step(groups)
    assert is_equal(masters(disturbed), masters(other))


def test_the_gradient_is_clipped_to_the_norm(groups):
    learner = tiny_learner(learn={"max_grad_norm": 0.01})
    assert learner.step(groups)["grad_norm"] > 0.01
    first = [t for name, t in learner.optimizer_state().items() if name.endswith("exp_avg")]
    applied = torch.cat([t.flatten() for t in first]) / (1 - learner.config.learn.betas[0])
    assert applied.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_forward_multiplies_by_the_new_adapter_at_once(compute, groups):
    """As a decoder does that loads the new masters."""
    decoder = tiny_decoder(compute=compute)
    learner = Learner(decoder, run_config())
    tokens_T, positions_T = torch.arange(5), torch.arange(5)
    before_TD = decoder(tokens_T, positions_T, plain.causal)
    learner.step(groups)
    after_TD = decoder(tokens_T, positions_T, plain.causal)
    loaded = tiny_decoder(compute=compute)
    load_adapter(loaded, learner.adapter_state())
    assert not torch.equal(after_TD, before_TD)
    assert torch.equal(after_TD, loaded(tokens_T, positions_T, plain.causal))


def test_rewarded_tokens_become_likelier_and_punished_ones_less_likely():
    group = Group(
        prompt=prompt(0, [1, 2, 3]),
        samples_G=[sample([5, 6], advantage=1.0), sample([7, 8], advantage=-1.0)],
    )
    learner = tiny_learner({"importance": "none"})

    def probability():
        read = [plain.read(learner.decoder, group, s, 1.0)[0].detach() for s in group.samples_G]
        return [logprob_T.sum().exp().item() for logprob_T in read]

    before = probability()
    learner.step([group])
    after = probability()
    assert after[0] > before[0] and after[1] < before[1]


def test_bf16_learns_nearly_what_fp32_does(groups):
    wide = plain.gradient(run_config(), tiny_decoder(), groups)
    learner = Learner(tiny_decoder(compute=torch.bfloat16), run_config(learn={"max_grad_norm": 1e9}))
    learner.step(groups)
    moments = learner.optimizer_state()
    cosines = [
        torch.cosine_similarity(moments[f"{name}.exp_avg"].flatten(), wide[name].flatten(), dim=0).item()
        for name in wide
    ]
    assert fmean(cosines) > 0.98 and min(cosines) > 0.95


def test_an_adapter_of_another_shape_is_the_users_mistake(groups):
    small = Learner(tiny_decoder(adapter=AdapterConfig(rank=2)), run_config())
    with pytest.raises(UserError, match=r"lora_A.*\(2, 32\)|lora_A.*\(4, 32\)"):
        tiny_learner().load(small.adapter_state(), {}, version=1, micro_tokens=8192)
    some = Learner(tiny_decoder(adapter=AdapterConfig(rank=4, target_modules=("q_proj",))), run_config())
    with pytest.raises(UserError, match="lora_A"):
        tiny_learner().load(some.adapter_state(), {}, version=1, micro_tokens=8192)


def test_the_device_learns_what_the_cpu_does(device, groups):
    learner = Learner(tiny_decoder(device=device), run_config(learn={"max_grad_norm": 1e9}))
    truth = plain.gradient(run_config(), tiny_decoder(), groups)
    learner.step(groups)
    moments = learner.optimizer_state()
    for name, gradient in truth.items():
        got = moments[f"{name}.exp_avg"].cpu() / (1 - learner.config.learn.betas[0])
        assert rms_error(got, gradient) < 1e-4
    assert learner.step(groups)["grad_norm"] > 0


def test_dropout_acts_while_learning_and_never_while_reading_or_sampling(rng):
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng)

    def stepped(rate, **learn):
        adapter = replace(ADAPTER, dropout=rate)
        learner = Learner(tiny_decoder(adapter=adapter), run_config(learn=learn, adapter=adapter))
        return learner, learner.step(groups)

    plain, dropped, again = (stepped(rate) for rate in (0.0, 0.4, 0.4))
    assert dropped[1]["loss"] == again[1]["loss"]  # the masks have coordinates
    assert dropped[1]["grad_norm"] != plain[1]["grad_norm"] and dropped[1]["entropy"] != plain[1]["entropy"]
    read_plain, read_dropped = (stepped(rate, updates_per_step=2)[1] for rate in (0.0, 0.4))
    assert read_plain["entropy"] == read_dropped["entropy"]  # of the pass before the first update
    checkpointed = stepped(0.4, gradient_checkpointing="layer")[1]
    assert checkpointed["grad_norm"] == pytest.approx(dropped[1]["grad_norm"], rel=1e-5)
