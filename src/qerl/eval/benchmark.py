"""A set's problems sampled, graded and voted on, with a result for each in a file that can be continued.

    {"settings": {"set": "aime24", "num_samples": 16, "temperature": 0.6, "top_p": 0.95, "seed": 0, ...},
     "problems": [{"index": 0, "answer": "204", "rewards": [1.0, 0.0], "votes": ["204", "12"],
                   "num_tokens": [812, 4096], "is_cut": [false, true], "majority": 1.0,
                   "greedy": {"reward": 1.0, "vote": "204", "num_tokens": 790, "is_cut": false}}],
     "summary": {"pass@1": 0.5, "pass@1_error": 0.08, ..., "majority": 0.7, "greedy": 0.6}}

The file's name holds a digest of the settings, and among those are the prompts, the answers, the weights and
the commit: what was computed under other settings is another file, and a file found is continued. Random
numbers follow from (seed, problem, sample), so the parts of a broken evaluation are those of an unbroken one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from qerl.algo.estimate import clustered_mean, majority_vote, pass_at_powers
from qerl.tracking.atomic_file import decode, encode, write_atomic
from qerl.training.evaluation import EVALUATION_STEP, Rewards, greedy
from qerl.types import Group, Prompt, RolloutEngine, Sampling

_SAMPLES_AT_ONCE = 1024
"""Between two writes of the file: a few batches of a GPU's 256, so that little of it waits for the last."""
_OF_ONE = {"reward": "rewards", "vote": "votes", "num_tokens": "num_tokens", "is_cut": "is_cut"}


class VoteCounter(Protocol):
    def __call__(self, texts_P_G: list[list[str]], /) -> list[list[str | None]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    name: str
    prompts: list[Prompt]
    answer_column: str
    rewards: Rewards
    ballot: VoteCounter | None
    """None where the rewards read no answer, and a majority means nothing."""
    num_samples: int
    sampling: Sampling
    seed: int
    success_threshold: float


def settings_of(exam: Benchmark, facts: dict[str, Any]) -> dict[str, Any]:
    """All that the result depends on; `facts` are those of the model and of the set's source."""
    problems = [[prompt.text, prompt.columns.get(exam.answer_column)] for prompt in exam.prompts]
    return {
        "set": exam.name,
        **facts,
        "num_samples": exam.num_samples,
        **dataclasses.asdict(exam.sampling),
        "seed": exam.seed,
        "success_threshold": exam.success_threshold,
        "num_prompts": len(problems),
        "problems_digest": hashlib.sha256(encode(problems)).hexdigest()[:16],
    }


def result_path(folder: Path, settings: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return folder / f"{settings['set']}-{digest}.json"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of an evaluation that was broken off, or has ended; none where the file is damaged."""
    problems = (decode(path.read_bytes()) or {}).get("problems") if path.exists() else None
    return problems if isinstance(problems, list) else []


def run_benchmark(
    exam: Benchmark,
    engine: Callable[[], RolloutEngine],
    path: Path,
    settings: dict[str, Any],
    notice: Callable[[str], None],
) -> dict[str, Any]:
    """Does what the file lacks and gives its summary; where it lacks nothing, the engine is not asked for."""
    problems = read_results(path)
    left = exam.prompts[len(problems) :]
    at_once = max(1, _SAMPLES_AT_ONCE // exam.num_samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(left), at_once):
        problems += _results(exam, engine(), left[start : start + at_once])
        _write(path, settings, problems, None)
        notice(f"{exam.name}: {len(problems)} of {len(exam.prompts)} problems")
    summary = summarise(problems, exam.success_threshold)
    _write(path, settings, problems, summary)
    return summary


def _write(path: Path, settings: dict[str, Any], problems: list[dict[str, Any]], summary: Any) -> None:
    write_atomic(path, encode({"settings": settings, "summary": summary, "problems": problems}))


def _results(exam: Benchmark, engine: RolloutEngine, prompts_P: list[Prompt]) -> list[dict[str, Any]]:
    sampled, best = (
        _marked(exam, engine, prompts_P, num_samples, sampling)
        for num_samples, sampling in ((exam.num_samples, exam.sampling), (1, greedy(exam.sampling)))
    )
    return [
        {"index": prompt.index, "answer": prompt.columns.get(exam.answer_column), **drawn}
        | {"majority": _majority(drawn), "greedy": {name: one[names][0] for name, names in _OF_ONE.items()}}
        for prompt, drawn, one in zip(prompts_P, sampled, best, strict=True)
    ]


def _marked(
    exam: Benchmark, engine: RolloutEngine, prompts_P: list[Prompt], num_samples: int, sampling: Sampling
) -> list[dict[str, list[Any]]]:
    groups = engine.generate(
        prompts_P, num_samples=num_samples, sampling=sampling, seed=exam.seed, step=EVALUATION_STEP
    )
    rewards_P_G = exam.rewards.score(groups)
    votes_P_G = exam.ballot([[s.text for s in group.samples_G] for group in groups]) if exam.ballot else None
    return [
        {
            "rewards": rewards_G,
            "votes": votes_P_G[place] if votes_P_G else [None] * num_samples,
            "num_tokens": [len(sample.logprobs_T) for sample in group.samples_G],
            "is_cut": _is_cut(group),
        }
        for place, (group, rewards_G) in enumerate(zip(groups, rewards_P_G, strict=True))
    ]


def _is_cut(group: Group) -> list[bool]:
    return [sample.finish == "length" for sample in group.samples_G]


def _majority(drawn: dict[str, list[Any]]) -> float | None:
    """The reward of the answer that most samples give; None where none gives one."""
    winner = majority_vote(drawn["votes"])
    return None if winner is None else drawn["rewards"][drawn["votes"].index(winner)]


def summarise(problems: list[dict[str, Any]], success_threshold: float) -> dict[str, Any]:
    """pass@1 with its standard error over problems, pass@k without bias, majority, greedy."""

    def is_right(reward: float | None) -> bool:
        return reward is not None and reward >= success_threshold

    correct_P_G = [[is_right(reward) for reward in problem["rewards"]] for problem in problems]
    num_samples = len(correct_P_G[0])
    accuracy, error = clustered_mean(correct_P_G)
    best, best_error = clustered_mean([[is_right(problem["greedy"]["reward"])] for problem in problems])
    has_votes = any(vote is not None for problem in problems for vote in problem["votes"])
    return {
        "pass@1": accuracy,
        "pass@1_error": error,
        **{f"pass@{k}": value for k, value in pass_at_powers(correct_P_G).items() if k > 1},
        "majority": fmean(is_right(problem["majority"]) for problem in problems) if has_votes else None,
        "greedy": best,
        "greedy_error": best_error,
        "num_prompts": len(problems),
        "num_samples": num_samples,
        "mean_tokens": fmean(length for problem in problems for length in problem["num_tokens"]),
        "cut_fraction": fmean(cut for problem in problems for cut in problem["is_cut"]),
        "num_failed_rewards": sum(
            [*problem["rewards"], problem["greedy"]["reward"]].count(None) for problem in problems
        ),
    }
