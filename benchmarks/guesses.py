"""Measure what guessing tokens from earlier text would bring a decode step: `python -m benchmarks guesses`.

    guess     the up to D tokens after the latest place where the longest suffix of 2 to 8 tokens has stood
    sources   the prompt, the sample itself, its siblings so far, and all samples of an earlier step
    accepted  guesses that are the sampled tokens: at any temperature the share that a verification accepts
    gain      tokens per verification * step_ms(rows) / step_ms(rows * (1 + D))

Samples are SmolLM2's. step_ms is that of the newest rows of `qerl bench decode` (7B shape, NVFP4, rank 32, on
an H200), interpolated between batches, and that of 8 rows below 8. A verification of D guesses computes 1 + D
rows of a sample. The earlier step has the same policy, which favours guessing: that of a run has moved.
"""

import bisect
import dataclasses
import json
from collections.abc import Iterator

import numpy as np

from benchmarks.rows import read_rows
from qerl.bench.record import RESULTS, ROOT
from qerl.config import SampleConfig, TaskConfig
from qerl.config.check import check_positive
from qerl.config.recipes import RECIPES
from qerl.models.device import resolve_device
from qerl.training.policy import load_sampler, load_task
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

_SUFFIX_TOKENS = range(8, 1, -1)
_ROWS = (1, 4, 8, 16)
TASKS = {
    "demo": None,
    "maths": TaskConfig(gym="gsm_symbolic", template="{question} Think step by step."),
    "code": TaskConfig(
        gym="gsm_symbolic", template="Write a Python program that prints the answer. {question}"
    ),
}
"""By name; None is that of demo_long."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GuessesOptions:
    tasks: tuple[str, ...] = ("demo", "maths", "code")
    """Which prompts are sampled: demo, maths, code."""

    num_prompts: int = 4
    """Prompts of each."""

    num_samples: int = 8
    """Samples of each prompt in a step."""

    max_tokens: int = 160
    """Longest sample."""

    num_guesses: tuple[int, ...] = (1, 2, 4)
    """Guessed tokens of a verification."""

    def __post_init__(self):
        check_positive(self, "num_prompts", "num_samples", "max_tokens", "num_guesses")


def bench_guesses(options: GuessesOptions) -> None:
    """Print a JSON row for each task and number of guesses: accepted share and gain by rows."""
    ms = step_ms_by_rows()
    for name in options.tasks:
        groups = sampled(options, name)
        for max_guesses in options.num_guesses:
            counts = [count for group in groups for count in verifications(*group, max_guesses)]
            guessed, accepted = (sum(each) for each in zip(*counts, strict=True))
            per_step = 1 + accepted / len(counts)
            gains = {rows: round(per_step * gain_of(ms, rows, max_guesses), 3) for rows in _ROWS}
            row = {"bench": "guesses", "task": name, "num_guesses": max_guesses, "guessed": guessed}
            row |= {"accepted": round(accepted / max(guessed, 1), 3), "tokens_per_step": round(per_step, 3)}
            print(json.dumps(row | {"tokens": len(counts) + accepted, "gain_by_rows": gains}), flush=True)


def sampled(options: GuessesOptions, name: str) -> list[tuple[list[int], list[list[int]], list[list[int]]]]:
    """Return (prompt, samples of an earlier step, samples) of each prompt."""
    recipe, task = RECIPES["demo_long"](), TASKS[name]
    config = dataclasses.replace(
        recipe,
        model=resolve_device(recipe.model),
        task=recipe.task if task is None else task,
        sample=SampleConfig(max_tokens=recipe.sample.max_tokens if task is None else options.max_tokens),
    )
    tokenizer, rows = load_task(config)
    engine = load_sampler(config, tokenizer)[1]
    prompts_P = rows.train_prompts(0, options.num_prompts)
    request = GenerateRequest(
        prompts_P, num_samples=options.num_samples, sampling=sampling_of(config), seed=config.seed, step=0
    )
    earlier, now = (engine.generate(dataclasses.replace(request, step=step)) for step in range(2))
    return [
        (a.prompt.tokens_T, [s.tokens_T for s in a.samples_G], [s.tokens_T for s in b.samples_G])
        for a, b in zip(earlier, now, strict=True)
    ]


class Text:
    """Tokens, and the places of each run of 2 to 8 of them: a guess then takes a look-up for each length."""

    def __init__(self, tokens_T: list[int]):
        self.tokens_T = tokens_T
        self._starts: dict[tuple[int, ...], list[int]] = {}
        for length in _SUFFIX_TOKENS:
            for start in range(len(tokens_T) - length + 1):
                self._starts.setdefault(tuple(tokens_T[start : start + length]), []).append(start)

    def after(self, run: tuple[int, ...], num_tokens: int, max_guesses: int) -> list[int]:
        """Return up to `most` tokens after the run's latest place among the first num_tokens; none if it is
        not followed by any."""
        starts = self._starts.get(run, ())
        known = bisect.bisect_right(starts, num_tokens - len(run) - 1)
        if not known:
            return []
        first = starts[known - 1] + len(run)
        return self.tokens_T[first : min(first + max_guesses, num_tokens)]


def verifications(
    prompt_T: list[int], earlier: list[list[int]], samples: list[list[int]], max_guesses: int
) -> Iterator[tuple[int, int]]:
    """Yield (guessed, accepted) of each verification of each sample; its siblings are as long as it is."""
    before, alone = [Text(tokens_T) for tokens_T in earlier], [Text(sample) for sample in samples]
    for index, sample in enumerate(samples):
        current, siblings = Text(prompt_T + sample), [s for other, s in enumerate(alone) if other != index]
        done = 0
        while done < len(sample):
            sources = [(text, len(text.tokens_T)) for text in before] + [(text, done) for text in siblings]
            guesses = guess(current, len(prompt_T) + done, sources, max_guesses)
            room = len(sample) - done - 1  # the last token is sampled in any case
            accepted = 0
            while accepted < min(len(guesses), room) and guesses[accepted] == sample[done + accepted]:
                accepted += 1
            yield len(guesses), accepted
            done += accepted + 1


def guess(sample: Text, num_tokens: int, sources: list[tuple[Text, int]], max_guesses: int) -> list[int]:
    """Return up to `most` tokens that followed the longest suffix of own's first num_tokens, in itself or in
    the first tokens of a source; later sources first."""
    for length in _SUFFIX_TOKENS:
        if num_tokens < length:
            continue
        suffix = tuple(sample.tokens_T[num_tokens - length : num_tokens])
        for text, known in ((sample, num_tokens), *reversed(sources)):
            if guesses := text.after(suffix, known, max_guesses):
                return guesses
    return []


def step_ms_by_rows() -> dict[int, float]:
    """Return the time of a decode step by its rows."""
    case = {"bench": "decode", "shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 32, "kv": "bf16"}
    case |= {"head": "bf16", "noise_sigma": 0.0, "group_size": 1}
    rows = read_rows(ROOT / RESULTS)
    matching = [row for row in rows if all(row.get(name) == value for name, value in case.items())]
    return {row["batch"]: row["step_ms"] for row in matching}  # the newest are last


def gain_of(ms_by_rows: dict[int, float], rows: int, num_guesses: int) -> float:
    """Return step_ms(rows) / step_ms(rows * (1 + num_guesses))."""
    known = sorted(ms_by_rows)
    plain, wide = np.interp([rows, rows * (1 + num_guesses)], known, [ms_by_rows[n] for n in known])
    return float(plain / wide)
