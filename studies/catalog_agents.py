"""Valid tool calls of agents before and after training: three frameworks, Qwen2.5-Coder-0.5B-Instruct.

A task is a framework (calculator.py). The arm `before` only answers the held-out problems; the arm `after`
trains for 30 steps of 8 problems x 8 episodes and then answers the same ones. With `--files FOLDER` the model
is read from its folder or GGUF file in FOLDER.
"""

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl.config import (
    AgentConfig,
    EngineConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)
from qerl.errors import RunError
from qerl.models.device import resolve_device
from qerl.training.policy import load_task, load_trained_sampler
from qerl.training.rollouts.evaluation import EVALUATION_STEP, greedy, sample
from qerl.training.rollouts.rollout import agent_metrics, sampling_of
from qerl.types import GenerateRequest, Sample
from studies.calculator import evaluate
from studies.common import TRAINING_CURVES, TRAINING_METRICS, claim
from studies.real_models import local_model
from studies.study import Arm, Curve, Job, Metric, Study, StudyTask, with_fields
from studies.training import train_job

FRAMEWORKS = "openai_agents", "langgraph", "pydantic_ai"
_BEFORE, _AFTER = "before", "after"
MAX_FAILED_FRACTION = 0.05
"""Of an evaluation's episodes: with more, its means are no figures of the model."""
_ROWS = {"train": 2048, "test": 256}
_FORMS = "{a} * {b}", "{a} * {b} + {c}", "{a} * {b} - {c} * {d}", "({a} + {b}) * {c}"
_LOGGED = (
    *("agent_is_valid", "agent_is_right", "malformed_calls", "tool_failures", "turns", "num_failed_episodes"),
    *("mean_tokens", "waiting_share", "rollout_s", "step_s", "memory_gb"),
)
BASE = RunConfig(
    num_steps=30,
    num_prompts=8,
    num_generations=8,
    model=ModelConfig(path="Qwen/Qwen2.5-Coder-0.5B-Instruct", format="nvfp4"),
    task=TaskConfig(name="train.jsonl", held_out_split="test.jsonl"),
    agent=AgentConfig(context_tokens=1024),
    sample=SampleConfig(max_tokens=96, temperature=1.0),
    engine=EngineConfig(max_num_seqs=128, kv_cache_gb=2.0),
    evaluate=EvalConfig(num_prompts=0),
    learn=LearnConfig(
        learning_rate=1e-4, warmup_ratio=0.0, lr_scheduler_type="constant", max_tokens_per_microbatch=8192
    ),
)


def play(job: Job) -> dict[str, Any]:
    """Train the agent if the arm says so, and let it answer the held-out problems."""
    config = _with_files(job)
    line: dict[str, Any] = {"final": {}, "curve": []}
    if job.arm == _AFTER:
        line = train_job(job, config, _LOGGED)
        line["final"]["peak_gb"] = max(point["memory_gb"] for point in line["curve"])
    checkpoints = job.folder / "checkpoints" if job.arm == _AFTER else None
    figures, notes = _figures(config, checkpoints)
    return {**line, "final": line["final"] | figures, "notes": notes}


def _figures(config: RunConfig, checkpoints: Path | None) -> tuple[dict[str, float], list[str]]:
    """Return the means over the held-out problems, an episode each: sampled as in training, and greedy; and
    notes about episodes that have failed. Raise RunError if those were too many."""
    from qerl.serve.agents.rollout import make_agents  # imports packages that other studies do not need

    config = with_fields(config, {"noise.schedule": "none", "task.num_held_out": _ROWS["test"]})
    config = dataclasses.replace(config, model=resolve_device(config.model))
    figures, notes = dict[str, float](), list[str]()
    with make_agents(config) as agents:
        tokenizer, task = load_task(config)
        engine = agents.engine(load_trained_sampler(config, tokenizer, checkpoints, print))
        prompts, sampling = task.held_out(None), sampling_of(config)
        begin = time.perf_counter()
        for suffix, how in (("", sampling), ("_greedy", greedy(sampling))):
            request = GenerateRequest(
                prompts, num_samples=1, sampling=how, seed=config.seed, step=EVALUATION_STEP
            )
            episodes = [each for group in sample(engine, request) for each in group.samples_G]
            notes += failure_notes(episodes, f"evaluation{suffix}")
            metrics = agent_metrics(episodes)
            figures |= {
                f"valid{suffix}": _share(episodes, "is_valid"),
                f"right{suffix}": _share(episodes, "is_right"),
                f"malformed{suffix}": metrics["malformed_calls"] / len(episodes),
                f"failed_calls{suffix}": metrics["tool_failures"] / len(episodes),
                f"answers{suffix}": metrics["turns"],
                f"failed_episodes{suffix}": metrics["num_failed_episodes"],
                f"tokens{suffix}": fmean(len(episode.logprobs_T) for episode in episodes),
            }
    figures["test_s"] = time.perf_counter() - begin
    return {name: float(f"{value:.6g}") for name, value in figures.items()}, notes


def failure_notes(episodes: list[Sample], name: str) -> list[str]:
    """Return a line about the episodes that have failed, if any has; raise RunError if too many have."""
    failures = [episode.failure for episode in episodes if episode.failure is not None]
    if not failures:
        return []
    first = ": ".join(failures[0])
    note = f"{name}: {len(failures)} of {len(episodes)} episodes have failed, the first: {first}"
    if len(failures) > MAX_FAILED_FRACTION * len(episodes):
        raise RunError(f"{note}; with more than {MAX_FAILED_FRACTION:.0%} failed the means are no figures")
    return [note]


def _share(episodes: list[Sample], name: str) -> float:
    """Return the mean of a metric that agents return, 0 for an episode that returned none."""
    return fmean(0.0 if each.episode is None else each.episode.metrics.get(name, 0.0) for each in episodes)


def _with_files(job: Job) -> RunConfig:
    """Return the job's config with the places of its files; write the problems."""
    fields = {"task.name": "train", "task.held_out_split": "test"}
    for seed, (name, num) in enumerate(_ROWS.items()):
        path = job.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in problems(num, seed)))
        fields |= {field: str(path) for field, split in fields.items() if split == name}
    if job.files is not None:
        fields["model.path"] = str(local_model(job.config.model.path, job.files))
    return with_fields(job.config, fields)


def problems(num: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows of sums of numbers with three digits, which the model cannot solve in its head."""
    random_numbers = random.Random(seed)
    for index in range(num):
        numbers = {letter: random_numbers.randint(100, 999) for letter in "abcd"}
        text = _FORMS[index % len(_FORMS)].format_map(numbers)
        yield {"prompt": f"What is {text}?", "answer": str(evaluate(text))}


def _in_each(metric: str) -> tuple[tuple[str, str], ...]:
    """Return the metric of every framework: at temperature 0 an untrained model makes most calls already."""
    return tuple((name, metric) for name in FRAMEWORKS)


def agents() -> Study:
    return Study(
        name="agents",
        question="Do agents of three frameworks learn to call a tool from rewards alone?",
        base=BASE,
        tasks=tuple(
            StudyTask(name=name, fields={"agent.function": f"studies.calculator:with_{name}"})
            for name in FRAMEWORKS
        ),
        arms=(
            Arm(name=_BEFORE, about="the model as it is, in NVFP4", fields={"num_steps": 1}),  # none is made
            Arm(name=_AFTER, about="after 30 steps of 64 episodes"),
        ),
        baseline=_BEFORE,
        measure=play,
        metrics=(
            Metric(
                key="valid",
                title="Valid calls",
                about="share of 256 held-out problems with a call that gave a result, temperature 1",
            ),
            Metric(key="right", title="Accuracy", about="share of the same with a right final answer"),
            Metric(key="valid_greedy", title="Valid calls, greedy"),
            Metric(key="right_greedy", title="Accuracy, greedy"),
            Metric(key="malformed", title="Malformed calls", about="of an episode: begun, but no calls"),
            Metric(key="failed_calls", title="Failed calls", about="of an episode: the tool says an error"),
            Metric(key="answers", title="Answers", about="of the model in an episode, at most 3"),
            Metric(key="tokens", title="Length", about="tokens of an episode's last conversation"),
            *(m for m in TRAINING_METRICS if m.key in ("reward_first", "reward_last")),
            Metric(key="train_s", title="Seconds", about="of all steps"),
            Metric(key="peak_gb", title="Memory", about="largest of a step, 1e9 bytes"),
        ),
        curves=(
            *TRAINING_CURVES,
            Curve(x="step", y="agent_is_valid", title="Valid calls", about="share of the step's episodes"),
        ),
        seeds=(0, 1, 2),
        claims=(
            claim(
                "Training [raises|lowers] the share of valid calls",
                *(_AFTER, _BEFORE, "valid"),
                side_results=_in_each("valid_greedy"),
            ),
            claim(
                "Training [raises|lowers] the agents' accuracy",
                *(_AFTER, _BEFORE, "right"),
                side_results=_in_each("right_greedy"),
            ),
        ),
        remarks=("The checkpoint was a GGUF file in Q4_K_M; its weights, decoded, are rounded to NVFP4.",),
        has_constant_weights=True,
    )
