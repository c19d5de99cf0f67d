"""Run a benchmark: sample and grade its problems, take a majority vote, and keep each result in a file.

    {"settings": {"set": "aime24", "num_samples": 16, "temperature": 0.6, "top_p": 0.95, "seed": 0, ...},
     "problems": [{"index": 0, "answer": "204", "rewards": [1.0, 0.0], "votes": ["204", "12"],
                   "num_tokens": [812, 4096], "is_cut": [false, true], "majority": 1.0,
                   "greedy": {"reward": 1.0, "vote": "204", "num_tokens": 790, "is_cut": false}}],
     "summary": {"pass@1": 0.5, "pass@1_error": 0.08, ..., "majority": 0.7, "greedy": 0.6}}

The file's name holds a digest of the settings, which include the prompts, the answers, the weights and the
commit: results of other settings go to another file, and an existing file is continued. Random numbers follow
from (seed, problem, sample), so an interrupted evaluation ends with the results of an uninterrupted one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl.algo.estimate import majority_vote
from qerl.tracking.atomic_file import encode, parse_object, write_atomic
from qerl.tracking.progress import Work
from qerl.training.rollouts import evaluation
from qerl.training.rollouts.evaluation import Evaluation
from qerl.types import GenerateRequest, RolloutEngine

_SAMPLES_PER_BATCH = 1024
"""Samples between two writes of the file: a few times what a GPU samples in parallel, so that it is seldom
idle while the last samples end."""
_GREEDY_FIELDS = {"reward": "rewards", "vote": "votes", "num_tokens": "num_tokens", "is_cut": "is_cut"}
CountVotes = Callable[[list[list[str]]], list[list[str | None]]]
"""Return the answer that each text of each group gives; None for a text without an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    name: str
    request: GenerateRequest
    """For all problems."""
    answer_column: str
    score: evaluation.Score
    count_votes: CountVotes | None
    """None if the rewards do not read an answer, so that there is no majority."""
    success_threshold: float | None
    """None: there is no accuracy, only the mean reward."""


def settings_of(benchmark: Benchmark, settings: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the results depend on; `settings` are those of the model and the data."""
    request, answer_column = benchmark.request, benchmark.answer_column
    problems = [[prompt.text, prompt.columns.get(answer_column)] for prompt in request.prompts_P]
    return {
        "set": benchmark.name,
        **settings,
        "num_samples": request.num_samples,
        **dataclasses.asdict(request.sampling),
        "seed": request.seed,
        "success_threshold": benchmark.success_threshold,
        "num_prompts": len(problems),
        "problems_digest": hashlib.sha256(encode(problems)).hexdigest()[:16],
    }


def result_path(folder: Path, settings: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return folder / f"{settings['set']}-{digest}.json"


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of the problems so far; none if the file is missing or damaged."""
    problems = (parse_object(path.read_bytes()) or {}).get("problems") if path.exists() else None
    return problems if isinstance(problems, list) else []


def run_benchmark(
    benchmark: Benchmark,
    engine: Callable[[], RolloutEngine],
    path: Path,
    settings: dict[str, Any],
    work: Work,
    *,
    continues: bool = True,
) -> dict[str, Any]:
    """Evaluate the problems that the file lacks, or all unless it continues, and return the summary; the
    engine is made only if needed."""
    problems, prompts_P = read_results(path) if continues else [], benchmark.request.prompts_P
    batch = max(1, _SAMPLES_PER_BATCH // benchmark.request.num_samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    for start in range(len(problems), len(prompts_P), batch):
        request = benchmark.request.with_prompts(prompts_P[start : start + batch])
        last = min(start + batch, len(prompts_P))
        name = f"{benchmark.name}: problems {start + 1:,} to {last:,} of {len(prompts_P):,}"
        problems += _evaluate(benchmark, engine(), request, lambda what, name=name: work(f"{name}, {what}"))
        _write(path, settings, problems, None)
    summary = summarize_problems(problems, benchmark.success_threshold)
    _write(path, settings, problems, summary)
    return summary


def _write(path: Path, settings: dict[str, Any], problems: list[dict[str, Any]], summary: Any) -> None:
    write_atomic(path, encode({"settings": settings, "summary": summary, "problems": problems}))


def _evaluate(
    benchmark: Benchmark, engine: RolloutEngine, request: GenerateRequest, work: Work
) -> list[dict[str, Any]]:
    sampled = _graded(benchmark, engine, request, work)
    greedy = evaluation.greedy(request.sampling)
    best = _graded(benchmark, engine, dataclasses.replace(request, num_samples=1, sampling=greedy), work)
    return [
        {"index": prompt.index, "answer": prompt.columns.get(benchmark.answer_column), **samples}
        | {"majority": majority_reward(samples["votes"], samples["rewards"])}
        | {"greedy": {field: one[fields][0] for field, fields in _GREEDY_FIELDS.items()}}
        for prompt, samples, one in zip(request.prompts_P, sampled, best, strict=True)
    ]


def _graded(
    benchmark: Benchmark, engine: RolloutEngine, request: GenerateRequest, work: Work
) -> list[dict[str, list[Any]]]:
    """Return rewards, votes and lengths of the samples of each prompt."""
    with work(evaluation.work_name(request.sampling)) as report:
        groups, rewards_P_G = evaluation.sample_and_score(engine, benchmark.score, request, report)
    votes_P_G: list[list[str | None]] = [[None] * request.num_samples] * len(groups)
    if benchmark.count_votes is not None:
        votes_P_G = benchmark.count_votes([[sample.text for sample in group.samples_G] for group in groups])
    return [
        {
            "rewards": rewards_G,
            "votes": votes_G,
            "num_tokens": evaluation.sampled_tokens(group),
            "is_cut": [sample.finish == "length" for sample in group.samples_G],
        }
        for group, rewards_G, votes_G in zip(groups, rewards_P_G, votes_P_G, strict=True)
    ]


def majority_reward(votes_G: list[str | None], rewards_G: list[float | None]) -> float | None:
    """Return the reward of the most frequent answer; None if no sample has an answer."""
    winner = majority_vote(votes_G)
    return None if winner is None else rewards_G[votes_G.index(winner)]


def summarize_problems(problems: list[dict[str, Any]], success_threshold: float | None) -> dict[str, Any]:
    """Return mean reward; with a threshold also pass@1, unbiased pass@k, majority and greedy accuracy. Errors
    are standard errors over problems."""
    rewards, lengths = ([problem[name] for problem in problems] for name in ("rewards", "num_tokens"))
    sampled = evaluation.summarize(rewards, lengths, success_threshold)
    rewards, lengths = ([[p["greedy"][name]] for p in problems] for name in ("reward", "num_tokens"))
    best = evaluation.summarize(rewards, lengths, success_threshold)
    return {
        **({} if success_threshold is None else _accuracies(problems, sampled, best, success_threshold)),
        "reward": sampled.reward,
        "reward_error": sampled.reward_error,
        "greedy_reward": best.reward,
        "num_prompts": sampled.num_prompts,
        "num_samples": len(problems[0]["rewards"]),
        "mean_tokens": sampled.mean_tokens,
        "cut_fraction": fmean(is_cut for problem in problems for is_cut in problem["is_cut"]),
        "num_failed_rewards": sampled.num_failed + best.num_failed,
    }


def _accuracies(
    problems: list[dict[str, Any]], sampled: Evaluation, best: Evaluation, success_threshold: float
) -> dict[str, Any]:
    has_votes = any(vote is not None for problem in problems for vote in problem["votes"])
    majority = [evaluation.is_correct(problem["majority"], success_threshold) for problem in problems]
    return {
        "pass@1": sampled.accuracy,
        "pass@1_error": sampled.accuracy_error,
        **{f"pass@{k}": value for k, value in sampled.pass_at_k.items() if k > 1},
        "majority": fmean(majority) if has_votes else None,
        "greedy": best.accuracy,
        "greedy_error": best.accuracy_error,
    }
