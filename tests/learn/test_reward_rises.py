"""The learner teaches: a tiny random model, sampled from without an engine, comes to be rewarded."""

import dataclasses
import functools

import pytest
import torch

from learner import plain
from learner.samples import prompt, sample
from learner.tiny import run_config, tiny_decoder
from qerl.algo.advantage import group_normalised
from qerl.learner import Learner
from qerl.types import Group

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [20, 21]]
LUCKY = [set(range(5, 13)), set(range(20, 28)), set(range(33, 41))]  # 8 of the 48 tokens, by prompt


def draw(next_logprobs, context_T, num_tokens, rng):
    """(tokens, logprobs) from the model's own distribution."""
    tokens_T, logprobs_T = [], []
    for _ in range(num_tokens):
        logprobs_V = next_logprobs((*context_T, *tokens_T))
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=rng))
        tokens_T.append(token)
        logprobs_T.append(logprobs_V[token].item())
    return tokens_T, logprobs_T


def group(decoder, index, rng):
    """Reward: the share of lucky tokens. One whole forward for each text that comes up."""

    @functools.cache
    @torch.no_grad()
    def next_logprobs(context_T):
        return plain.log_softmax(decoder, list(context_T), 1.0)[-1]

    drawn = [draw(next_logprobs, PROMPTS[index], 2, rng) for _ in range(8)]
    rewards_G = [sum(token in LUCKY[index] for token in tokens_T) / 2 for tokens_T, _ in drawn]
    advantages_G = group_normalised(rewards_G)
    samples_G = [
        sample(tokens_T, logprobs_T=logprobs_T, reward=reward, advantage=advantage)
        for (tokens_T, logprobs_T), reward, advantage in zip(drawn, rewards_G, advantages_G, strict=True)
    ]
    return Group(prompt=prompt(index, PROMPTS[index]), samples_G=samples_G)


@torch.no_grad()
def lucky_probability(decoder, index):
    return plain.log_softmax(decoder, PROMPTS[index], 1.0)[-1].exp()[sorted(LUCKY[index])].sum().item()


@pytest.mark.parametrize(
    ("compute", "loss", "importance", "updates"),
    [
        (torch.float32, "dapo", "truncated", 1),
        (torch.bfloat16, "dapo", "truncated", 1),
        (torch.float32, "gspo_token", "masked_sequence", 3),
        (torch.float32, "cispo", "icepop", 3),
    ],
)
def test_rewarded_tokens_come_to_be_drawn(compute, loss, importance, updates, rng):
    steps = 30
    algo = {"loss_type": loss, "importance": importance}
    learn = {"updates_per_step": updates, "lr_scheduler_type": "constant", "learning_rate": 1e-2}
    config = dataclasses.replace(run_config(algo, learn), num_steps=steps, num_prompts=3, num_generations=8)
    decoder = tiny_decoder(compute=compute, fresh=True)
    learner = Learner(decoder, config)

    before = [lucky_probability(decoder, index) for index in range(3)]
    mismatches = []
    for _ in range(steps):
        metrics = learner.step([group(decoder, index, rng) for index in range(3)])
        mismatches.append(metrics["mismatch_abs"])
    after = [lucky_probability(decoder, index) for index in range(3)]

    assert max(before) < 0.35 and min(after) > 0.8
    # The samples came from these very weights: what is left is the arithmetic of packing.
    assert max(mismatches) < (1e-5 if compute == torch.float32 else 0.05)
