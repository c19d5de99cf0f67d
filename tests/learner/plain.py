"""The learner's step written out plainly: one sample at a time; nothing shared, packed or split.

Formulas are those of the papers, typed again here; only the decoder and its adapter are the package's.
"""

import math

import torch
import torch.nn.functional as F

from qerl.learner.lr_schedule import learning_rate
from qerl.models.peft.adapter import adapter_off, adapter_tensors, publish


def causal(layer, q_TNH, k_TKH, v_TKH, options):
    group = q_TNH.shape[1] // k_TKH.shape[1]
    k_NTH, v_NTH = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k_TKH, v_TKH))
    o_NTH = F.scaled_dot_product_attention(
        q_TNH.transpose(0, 1)[None], k_NTH[None], v_NTH[None], is_causal=True
    )
    return o_NTH[0].transpose(0, 1)


def log_softmax(decoder, tokens_T, temperature):
    hidden_TD = decoder(torch.tensor(tokens_T), torch.arange(len(tokens_T)), causal)
    return (hidden_TD.float() @ decoder.lm_head.weight.float().T / temperature).log_softmax(-1)


def read(decoder, group, sample, temperature):
    """(logprobs, entropies) of the sample's tokens."""
    prompt_T = group.prompt.tokens_T
    logprobs_TV = log_softmax(decoder, prompt_T + sample.tokens_T, temperature)[len(prompt_T) - 1 : -1]
    logprobs_TV, targets_T = (
        logprobs_TV[sample.sampled_indices],
        torch.tensor(sample.tokens_T)[sample.sampled_indices],
    )
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV[torch.arange(len(targets_T)), targets_T], entropy_T


def pairs(groups):
    return [(group, s) for group in groups for s in group.samples_G if s.reward is not None]


def policy_loss(algo, logprob_T, old_T, a):
    ratio_T = (logprob_T - old_T).exp()
    if algo.loss_type == "gspo":
        ratio_T = (logprob_T - old_T).mean().exp().expand_as(ratio_T)
    if algo.loss_type == "gspo_token":
        ratio_T = (logprob_T - old_T).mean().exp().detach() * logprob_T.exp() / logprob_T.exp().detach()
    bounded_T = ratio_T.clamp(1 - algo.epsilon, 1 + algo.epsilon_high)
    if algo.loss_type == "nll":
        return -a * logprob_T
    if algo.loss_type == "cispo":
        return -bounded_T.detach() * a * logprob_T
    if algo.loss_type == "sapo":
        tau = algo.sapo.temperature_positive if a > 0 else algo.sapo.temperature_negative
        return -a * torch.sigmoid(tau * (ratio_T - 1)) * 4 / tau
    if algo.loss_type == "maspo":
        return -a * maspo_weight(algo.maspo, ratio_T.detach(), old_T, a) * ratio_T
    return -torch.minimum(ratio_T * a, bounded_T * a)


def maspo_weight(maspo, ratio_T, old_T, a):
    base_T = (maspo.width / old_T.exp() ** maspo.alpha).clamp(maspo.width, 10)
    factor = 1 + maspo.beta_high * a if a > 0 else 1 / (1 - maspo.beta_low * a)
    gauss_T = torch.exp(-((ratio_T - 1) ** 2) / (2 * (base_T * min(max(factor, 0.1), 10)) ** 2))
    is_leaving_T = ratio_T > 1 if a > 0 else ratio_T < 1
    return torch.where(is_leaving_T, gauss_T, torch.ones_like(gauss_T))


def importance_weight(algo, rho_T):
    """One value for each token of one sample."""
    low, cap, product = algo.importance_floor, algo.importance_cap, rho_T.prod()
    weight_T = {
        "truncated": rho_T.clamp(max=cap),
        "truncated_sequence": product.clamp(max=cap).expand_as(rho_T),
        "masked": torch.where(rho_T > cap, 0.0, rho_T),
        "masked_sequence": torch.where(product > cap, 0.0, product).expand_as(rho_T),
        "icepop": torch.where((rho_T > cap) | (rho_T < low), 0.0, rho_T),
        "ratio": torch.ones_like(rho_T),
        "none": torch.ones_like(rho_T),
    }[algo.importance]
    mean = product ** (1 / len(rho_T))
    if "geometric" in algo.reject and not algo.geometric_low <= mean <= algo.geometric_high:
        return torch.zeros_like(rho_T)
    if "veto" in algo.reject and rho_T.min() < algo.veto_ratio:
        return torch.zeros_like(rho_T)
    return weight_T


def token_loss(config, logprob_T, before_T, reference_T, sample):
    algo, sampler_T, a = config.algo, torch.tensor(sample.logprobs_T), sample.advantage
    old_T = sampler_T if algo.importance == "ratio" else before_T
    loss_T = importance_weight(algo, (before_T - sampler_T).exp()) * policy_loss(algo, logprob_T, old_T, a)
    if reference_T is not None:
        x_T = reference_T - logprob_T
        ratio_T = (logprob_T - old_T).exp() if algo.kl_estimator == "k3_unbiased" else 1.0
        loss_T = loss_T + algo.beta * ratio_T * (x_T.exp() - x_T - 1)
    return loss_T


def whole_loss(config, decoder, groups, before, reference):
    """Return the loss of one update; before and reference hold each sample's logprobs by id."""
    tokens = sum(len(s.sampled_indices) for _, s in pairs(groups))
    samples = len(groups) * config.num_generations
    total = torch.zeros(())
    for group, s in pairs(groups):
        logprob_T, _ = read(decoder, group, s, config.sample.temperature)
        loss_T = token_loss(config, logprob_T, before[id(s)], reference.get(id(s)), s)
        if config.algo.loss_type in ("grpo", "gspo", "gspo_token", "sapo"):
            total = total + loss_T.mean() / samples
        elif config.algo.loss_type in ("dapo", "cispo", "maspo", "nll"):
            total = total + loss_T.sum() / tokens
        elif config.algo.loss_type == "dr_grpo":
            total = total + loss_T.sum() / (samples * config.sample.max_tokens)
        elif config.algo.loss_type == "bnpo":
            siblings = sum(len(x.sampled_indices) for x in group.samples_G if x.reward is not None)
            total = total + loss_T.sum() / siblings / len(groups)
    return total


@torch.no_grad()
def logprobs(config, decoder, groups):
    return {id(s): read(decoder, group, s, config.sample.temperature)[0] for group, s in pairs(groups)}


def reference_logprobs(config, decoder, groups):
    if config.algo.beta == 0:
        return {}
    with adapter_off(decoder):
        return logprobs(config, decoder, groups)


def gradient(config, decoder, groups):
    """By the masters' names, of one update over all groups."""
    before = logprobs(config, decoder, groups)
    loss = whole_loss(config, decoder, groups, before, reference_logprobs(config, decoder, groups))
    masters = adapter_tensors(decoder)
    return dict(zip(masters, torch.autograd.grad(loss, list(masters.values())), strict=True))


def train(config, decoder, steps):
    """AdamW written out, over a list of steps' groups; updates the decoder's masters."""
    masters = adapter_tensors(decoder)
    first = {name: torch.zeros_like(m) for name, m in masters.items()}
    second = {name: torch.zeros_like(m) for name, m in masters.items()}
    learn, update = config.learn, 0
    for groups in steps:
        before, reference = logprobs(config, decoder, groups), reference_logprobs(config, decoder, groups)
        size = len(groups) // learn.updates_per_step
        shares = [groups[i : i + size] for i in range(0, len(groups), size)]
        for share in shares * learn.num_iterations:
            loss = whole_loss(config, decoder, share, before, reference)
            grads = torch.autograd.grad(loss, list(masters.values()))
            norm = math.sqrt(sum(g.square().sum().item() for g in grads))
            rate = learning_rate(update, num_updates=config.num_updates, learn=learn)
            update += 1
            for (name, master), g in zip(masters.items(), grads, strict=True):
                g = g * min(1.0, learn.max_grad_norm / norm)
                first[name].lerp_(g, 1 - learn.betas[0])
                second[name].lerp_(g.square(), 1 - learn.betas[1])
                root = (second[name] / (1 - learn.betas[1] ** update)).sqrt() + 1e-8
                with torch.no_grad():
                    master.mul_(1 - rate * learn.weight_decay)
                    master.sub_(rate * first[name] / (1 - learn.betas[0] ** update) / root)
            publish(decoder)
