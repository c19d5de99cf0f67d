"""Prompts, samples and groups made by hand, for every test of the learner."""

import torch

from qerl.types import Group, Prompt, Sample


def prompt(index: int, tokens_T: list[int]) -> Prompt:
    return Prompt(index=index, text="", tokens_T=tokens_T, messages=None, columns={})


def sample(
    tokens_T: list[int], *, logprobs_T=None, reward: float | None = 1.0, advantage: float = 1.0
) -> Sample:
    logprobs_T = logprobs_T or [-1.0 - 0.125 * i for i in range(len(tokens_T))]
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=logprobs_T,
        text="",
        finish="stop",
        version=0,
        reward=reward,
        advantage=advantage,
    )


def random_groups(num_prompts: int, num_samples: int, *, vocab: int, rng: torch.Generator) -> list[Group]:
    """Prompts of 3 to 8 tokens, samples of 1 to 6; normally distributed advantages and logprobs."""

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=rng))
        return torch.randint(vocab, (length,), generator=rng).tolist()

    def one() -> Sample:
        tokens_T = tokens(1, 6)
        logprobs_T = (torch.randn(len(tokens_T), generator=rng) * 0.5 - 3.5).tolist()
        return sample(tokens_T, logprobs_T=logprobs_T, advantage=float(torch.randn((), generator=rng)))

    return [
        Group(prompt=prompt(i, tokens(3, 8)), samples_G=[one() for _ in range(num_samples)])
        for i in range(num_prompts)
    ]
