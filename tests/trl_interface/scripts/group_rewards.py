"""A reward of groups, for --reward_funcs of TRL's own script."""

from collections import defaultdict


def longest_of_group(prompts, completions, **kwargs):
    """1 for the longest samples of each prompt, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    lengths = defaultdict(list)
    for prompt, text in zip(prompts, texts, strict=True):
        lengths[str(prompt)].append(len(text))
    return [
        float(len(text) == max(lengths[str(prompt)])) for prompt, text in zip(prompts, texts, strict=True)
    ]
