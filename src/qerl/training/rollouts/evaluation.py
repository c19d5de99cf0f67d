"""Evaluate a policy by sampling: sample prompts, score the samples, estimate reward, accuracy and pass@k.

    reward   = mean over prompts of the mean reward of the samples that have one
    accuracy = mean over prompts of the fraction of samples whose reward reaches the threshold

A failed reward counts as wrong, and failures are counted. The samples' random numbers are those of step -1,
which no training step uses: an evaluation does not change a run, and two evaluations of one run share their
random numbers, so that their difference is due to the model.

Used by training (held-out accuracy), by qerl.eval (benchmarks) and by the studies.
"""

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean

from qerl.algo.estimate import clustered_mean, pass_at_powers
from qerl.engine.local_engine import LocalEngine
from qerl.errors import quantity
from qerl.types import GenerateRequest, Group, OnBurst, Prompt, Report, RolloutEngine, Sampling

EVALUATION_STEP = -1
Score = Callable[[list[Group]], list[list[float | None]]]
"""Return the rewards of each group's samples; None for a reward that failed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Evaluation(reward=0.7, reward_error=0.02, accuracy=0.62, accuracy_error=0.02,
    pass_at_k={1: 0.62, 2: 0.7, 4: 0.75}, mean_tokens=8.1, num_prompts=256, num_failed=0)"""

    reward: float | None
    """None if every reward failed."""
    reward_error: float | None
    """Standard error over prompts, as that of the accuracy; None for a single prompt."""
    accuracy: float | None
    """None without a threshold."""
    accuracy_error: float | None
    pass_at_k: dict[int, float]
    """For k = 1, 2, 4 and so on up to the number of samples per prompt; empty without a threshold."""
    mean_tokens: float
    """Mean sampled tokens of a sample."""
    num_prompts: int
    num_failed: int
    """Number of samples whose reward failed."""


def sample_and_score(
    engine: RolloutEngine, score: Score, request: GenerateRequest, report: Report | None = None
) -> tuple[list[Group], list[list[float | None]]]:
    """Return the samples of every prompt and their rewards. report: gets the progress."""
    groups = sample(engine, request, report)
    rewards_P_G = score(groups)
    assert [len(rewards_G) for rewards_G in rewards_P_G] == [request.num_samples] * len(request.prompts_P)
    return groups, rewards_P_G


def sample(engine: RolloutEngine, request: GenerateRequest, report: Report | None = None) -> list[Group]:
    """Return the samples of every prompt; report as in sample_and_score."""
    assert request.step == EVALUATION_STEP
    num_prompts, num_samples = len(request.prompts_P), request.num_samples
    on_burst = None if report is None else _progress(engine, num_prompts, num_samples, report)
    return engine.generate(request, on_burst=on_burst)


def work_name(sampling: Sampling) -> str:
    return f"answering at temperature {sampling.temperature:g}"


def _progress(engine: RolloutEngine, num_prompts: int, num_samples: int, report: Report) -> OnBurst:
    """Return an on_burst that reports how many samples have ended, and the tokens so far where the engine
    knows them."""
    num_done = 0

    def report_progress(ended: list[tuple[int, Group]]) -> None:
        nonlocal num_done
        num_done += num_samples * len(ended)
        if isinstance(engine, LocalEngine):
            stats = engine.stats
            report(len(stats.finish_s), num_prompts * num_samples, f"samples, {stats.num_tokens:,} tokens")
        else:
            report(num_done, num_prompts * num_samples, "samples")

    return report_progress


def summarize(
    rewards_P_G: Sequence[Sequence[float | None]],
    tokens_P_G: Sequence[Sequence[int]],
    threshold: float | None,
) -> Evaluation:
    """Estimate reward, accuracy and pass@k from rewards and sampled tokens, both by prompt and sample."""
    known_P_G = [[reward for reward in rewards_G if reward is not None] for rewards_G in rewards_P_G]
    num_failed = sum(map(len, rewards_P_G)) - sum(map(len, known_P_G))
    known_P_G = list(filter(None, known_P_G))
    reward, reward_error = clustered_mean(known_P_G) if known_P_G else (None, None)
    accuracy, accuracy_error, powers = None, None, {}
    if threshold is not None:
        correct_P_G = [[is_correct(reward, threshold) for reward in rewards_G] for rewards_G in rewards_P_G]
        accuracy, accuracy_error = clustered_mean(correct_P_G)
        powers = pass_at_powers(correct_P_G)
    return Evaluation(
        reward=reward,
        reward_error=reward_error,
        accuracy=accuracy,
        accuracy_error=accuracy_error,
        pass_at_k=powers,
        mean_tokens=fmean(tokens for tokens_G in tokens_P_G for tokens in tokens_G),
        num_prompts=len(rewards_P_G),
        num_failed=num_failed,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Rewards and sampled tokens of each prompt's samples."""

    rewards_P_G: list[list[float | None]]
    tokens_P_G: list[list[int]]

    def summary(self, threshold: float | None) -> Evaluation:
        return summarize(self.rewards_P_G, self.tokens_P_G, threshold)


def held_out_requests(prompts_P: list[Prompt], sampling: Sampling, seed: int) -> list[GenerateRequest]:
    """Return the requests of a held-out evaluation: one sample a prompt, and greedy."""
    return [
        GenerateRequest(prompts_P, num_samples=1, sampling=each, seed=seed, step=EVALUATION_STEP)
        for each in (sampling, greedy(sampling))
    ]


def held_out_figures(scores: Sequence[Scores], threshold: float | None) -> dict[str, float]:
    """Return accuracy, if there is one, and mean reward: with the config's sampling, and greedy.
    num_prompts: of how many problems."""
    first, second = (each.summary(threshold) for each in scores)
    figures = {"accuracy": first.accuracy, "greedy": second.accuracy}
    figures |= {"reward": first.reward, "greedy_reward": second.reward}
    figures |= {"reward_error": first.reward_error, "greedy_reward_error": second.reward_error}
    figures["num_prompts"] = float(first.num_prompts)
    return {name: value for name, value in figures.items() if value is not None}


def is_correct(reward: float | None, threshold: float) -> bool:
    return reward is not None and reward >= threshold


def sampled_tokens(group: Group) -> list[int]:
    """Return the number of sampled tokens of each sample, without tokens of an environment."""
    return [len(sample.logprobs_T) for sample in group.samples_G]


def greedy(sampling: Sampling) -> Sampling:
    """Return the sampling that picks the most likely token."""
    return dataclasses.replace(sampling, temperature=0.0, top_k=None, top_p=None, min_p=None)


def held_out_text(figures: dict[str, float], moment: str, *, temperature: float, num_prompts: int) -> str:
    """Return the console's line; a reward that equals the accuracy is left out."""
    pairs = [("accuracy", "greedy"), ("reward", "greedy_reward")]
    values = {name: (figures.get(name), figures.get(best)) for name, best in pairs if name in figures}
    if values.get("accuracy") == values.get("reward"):
        values.pop("reward", None)
    parts = [
        f"held-out {name} {moment}: {sampled:.3f} at temperature {temperature:g}"
        + ("" if best is None else f", {best:.3f} greedy")
        for name, (sampled, best) in values.items()
    ]
    return f"{'; '.join(parts)} ({quantity(num_prompts, 'problem')})"
