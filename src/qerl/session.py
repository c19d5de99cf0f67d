"""Assembles a run from its config, continues it where it stopped, and evaluates before and after.

The run's folder:

    run.json           the resolved config, versions, commit
    metrics.jsonl      a line for each step             samples.jsonl   a line for each sample
    evaluations.json   held-out accuracy by moment      checkpoints/    adapter, optimizer, counters
    tensorboard/       the same metrics                 result.json, report.html   when the run has ended
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qerl import plan
from qerl.branching import Branching
from qerl.config import RunConfig
from qerl.engine.budget import free_bytes
from qerl.episode import Episodes, conversing
from qerl.errors import require
from qerl.evaluate import evaluate, greedy
from qerl.exploration import Exploration
from qerl.journal import Journal, StepLog
from qerl.journal.record import encode, read_object, replace
from qerl.learner import Learner, checkpoint
from qerl.loop import Parts, draw, run, sampling_of
from qerl.model.adapter import load_adapter
from qerl.model.device import resolved
from qerl.model.peft_folder import read_adapter
from qerl.policy import policy_of
from qerl.report import write_report
from qerl.stop import Stop
from qerl.tasks import RewardPool
from qerl.types import Sampling


def train(config: RunConfig, *, rewards: Sequence[Callable[..., Any]] = ()) -> dict[str, Any]:
    """See `qerl.train`."""
    config = dataclasses.replace(config, model=resolved(config.model))
    folder = Path(config.out)
    with Journal(folder, num_steps=config.num_steps) as journal:
        stop = Stop(journal.notice)
        with stop.handling():
            journal.start(config)
            if journal.result is not None:
                journal.notice(f"{folder} holds this run, finished; nothing is left to do")
                journal.catch_up()
                return journal.result
            with RewardPool(config.task, functions=rewards) as pool:
                result = _Session(config, folder, journal, pool, stop).run()
            journal.finish(result)
            write_report([folder], folder / "report.html")
            return result


class _Session:
    """One process's share of a run, from loading the model to the last evaluation."""

    def __init__(self, config: RunConfig, folder: Path, journal: Journal, pool: RewardPool, stop: Stop):
        self.config, self.folder, self.journal, self.pool, self.stop = config, folder, journal, pool, stop
        self.decoder, self.engine, self.task = policy_of(config)
        room = self.decoder.architecture.max_positions - config.sample.max_tokens
        self.sampler = conversing(self.engine, pool, config.task.environment, room)
        score = partial(self.engine.score, sampling=sampling_of(config)) if config.engine.exact else None
        learned = self.settled()
        self.learner = Learner(self.decoder, learned, notice=journal.notice, score=score)
        self.noise = Exploration(self.decoder, config)
        is_deep = config.algo.branching == "deep"
        require(
            not (is_deep and pool.has_environment), "algo.branching deep is not for environments: set none"
        )
        self.branching = Branching(self.engine, config) if is_deep else None
        self.prompts = self.task.held_out(config.evaluate.num_prompts)
        path = folder / "evaluations.json"
        self.evaluations = read_object(path) if path.exists() else {}

    def settled(self) -> RunConfig:
        """The config with learn.recompute auto replaced on a GPU, which the journal is told."""
        config, device = self.config, self.decoder.device
        if config.learn.recompute != "auto" or device.type == "cpu":
            return config
        prompt_tokens = max(len(p.tokens_T) for p in self.task.train_prompts(0, config.num_prompts))
        gpu_bytes = free_bytes(device) + torch.cuda.memory_allocated(device) + plan.CONTEXT_BYTES
        found = plan.settled(self.decoder.architecture, config, prompt_tokens, gpu_bytes)
        need = plan.learning_bytes(plan.parts(self.decoder.architecture, found, prompt_tokens))
        self.journal.notice(
            f"learn.recompute is {found.learn.recompute}: learning is planned to take {need / 1e9:.1f} of"
            f" {gpu_bytes / 1e9:.1f} GB"
        )
        return found

    def run(self) -> dict[str, Any]:
        config = self.config
        parts = Parts(
            task=self.task,
            rewards=self.pool,
            engine=self.sampler,
            learner=self.learner,
            noise=self.noise,
            draw=draw if self.branching is None else self.branching.draw,
            journal=self.journal,
            observe=self.observe,
            save=self.save,
        )
        first_step = self.resume()
        if first_step == 0:
            self.evaluate("before")
        with self.stop.deferred():
            run(config, parts, first_step=first_step)
        if self.stop.requested is not None:
            raise SystemExit(self.stop.exit_code)
        self.evaluate("after")
        return self.result()

    def resume(self) -> int:
        """The step to go on with, after taking back the newest checkpoint that is whole."""
        found = checkpoint.load_latest(self.folder / "checkpoints", self.learner)
        if found is None and self.config.adapter.start is not None:
            load_adapter(self.decoder, read_adapter(self.config.adapter.start, self.config.adapter))
        first_step, notices = (0, []) if found is None else (found.next_step, found.notices)
        if found is not None and "noise" in found.extra:
            self.noise.load(found.extra["noise"])
        if found is not None and self.branching is not None:
            self.branching.load(found.extra["tries"])
        for notice in [*notices, *self.engine.notices]:
            self.journal.notice(notice)
        self.journal.resume(first_step)
        self.engine.publish(self.learner.version)
        if first_step and self.prompts and "before" not in self.evaluations:
            self.journal.notice("evaluations.json lacks the accuracy before the first step")
        if first_step == 0:
            self.evaluations = {}  # those there may be of another config that was given up
        return first_step

    def save(self, step: int) -> bool:
        next_step, is_stopping = step + 1, self.stop.requested is not None
        if is_stopping or next_step % self.config.checkpoint.every == 0 or next_step == self.config.num_steps:
            with self.journal.span("checkpoint"):
                checkpoint.save(
                    self.folder / "checkpoints",
                    self.learner,
                    next_step=next_step,
                    keep=self.config.checkpoint.keep,
                    extra={"noise": self.noise.state(), **self.tries()},
                )
        return is_stopping

    def tries(self) -> dict[str, Any]:
        return {} if self.branching is None else {"tries": self.branching.state()}

    def observe(self, step: int, log: StepLog) -> None:
        """Says why rewards failed, and measures held-out accuracy where it is due."""
        for cause, (count, example) in self.pool.take_failures().items():
            self.journal.notice(f"no reward for {count} samples: {cause}: {example}")
        if isinstance(self.sampler, Episodes):
            log.add(environment_s=self.sampler.waited_s)
        every = self.config.evaluate.every
        if every is not None and (step + 1) % every == 0 and self.prompts:
            with log.span("evaluate"):
                accuracy, best = self.accuracies()
            log.add(eval_accuracy=accuracy, eval_greedy=best)

    def evaluate(self, moment: str) -> None:
        """Held-out accuracy before or after, measured once in a run however often it is continued."""
        if moment in self.evaluations or not self.prompts:
            return
        with self.journal.span("evaluate"):
            accuracy, best = self.accuracies()
        self.evaluations[moment] = {"accuracy": accuracy, "greedy": best}
        replace(self.folder / "evaluations.json", encode(self.evaluations, indent=2))
        self.journal.notice(
            f"held out, {moment}: {accuracy:.3f} right at temperature {self.config.sample.temperature:g},"
            f" {best:.3f} greedy ({len(self.prompts)} problems)"
        )

    def accuracies(self) -> tuple[float, float]:
        """Of the policy without noise: at the config's sampling, and greedy."""
        drawn = sampling_of(self.config)
        return self.accuracy(drawn), self.accuracy(greedy(drawn))

    def accuracy(self, sampling: Sampling) -> float:
        return evaluate(
            self.sampler,
            self.pool,
            self.prompts,
            num_samples=1,
            sampling=sampling,
            seed=self.config.seed,
            threshold=self.config.evaluate.right_from,
        ).accuracy

    def result(self) -> dict[str, Any]:
        moments = [(moment, self.evaluations.get(moment)) for moment in ("before", "after")]
        accuracies = {
            f"{name}_{moment}": value[name]
            for name in ("accuracy", "greedy")
            for moment, value in moments
            if value is not None
        }
        train_s = sum(step["step_s"] for step in self.journal.steps())
        return {**accuracies, "train_s": round(train_s, 1), "run": str(self.folder)}
