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

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.errors import require
from qerl.learner import Learner, checkpoint, plan
from qerl.learner.distributed import Ranks, join_ranks
from qerl.models.adapter import load_adapter
from qerl.models.device import resolve_device
from qerl.models.peft_reader import read_adapter
from qerl.tasks import RewardPool
from qerl.tasks.reward import format_failures
from qerl.tracking import Journal, NullJournal, StepLog
from qerl.tracking.atomic_file import encode, read_object, write_atomic
from qerl.tracking.report import write_report
from qerl.training.branching import Branching
from qerl.training.data_parallel import DataParallelEngine, DataParallelRewards
from qerl.training.evaluation import evaluate, greedy
from qerl.training.loop import Parts, draw, run, sampling_of
from qerl.training.multi_turn import with_environment
from qerl.training.policy import load_policy
from qerl.training.ray_engine import Cluster, RemoteEngine, start_workers
from qerl.training.signals import StopSignal
from qerl.types import Sampling

_ECHO_S = 2.0  # torchrun sends its workers the signal that a terminal has sent them already


def train(config: RunConfig, *, rewards: Sequence[Callable[..., Any]] = ()) -> dict[str, Any]:
    """See `qerl.train`."""
    config = dataclasses.replace(config, model=resolve_device(config.model))
    with join_ranks(config.model.device) as ranks, start_workers(config, ranks) as cluster:
        return _train(config, ranks, cluster, rewards)


def _train(
    config: RunConfig, ranks: Ranks, cluster: Cluster | None, rewards: Sequence[Callable[..., Any]]
) -> dict[str, Any]:
    """Only the first rank has a journal, and with it the folder."""
    folder = Path(config.out)
    with Journal(folder, num_steps=config.num_steps) if ranks.is_first else NullJournal() as journal:
        stop = StopSignal(journal.notice, echo_s=0.0 if ranks.count == 1 else _ECHO_S)
        with stop.handling():
            journal.start(config)
            finished = ranks.from_first(lambda: journal.result)
            if finished is not None:
                journal.notice(f"{folder} holds this run, finished; nothing is left to do")
                journal.catch_up()
                if ranks.is_first and not (folder / "report.html").exists():  # the disk was full
                    write_report([folder], folder / "report.html")
                return finished
            with RewardPool(config.task, functions=rewards) as pool:
                result = _Session(config, folder, journal, pool, stop, ranks, cluster).run()
            journal.finish(result)
            if ranks.is_first:
                write_report([folder], folder / "report.html")
            return result


class _Session:
    """One process's share of a run, from loading the model to the last evaluation."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        journal: Journal | NullJournal,
        pool: RewardPool,
        stop: StopSignal,
        ranks: Ranks,
        cluster: Cluster | None,
    ):
        self.config, self.folder, self.journal, self.stop, self.ranks = config, folder, journal, stop, ranks
        is_deep, talks = config.algo.branching == "deep", pool.has_environment
        require(
            not is_deep or ranks.count == 1, "algo.branching deep is for one process: branches need its pages"
        )
        require(not (is_deep and talks), "algo.branching deep is not for environments: set none")
        require(cluster is None or not talks, "environments do not go with --ray: use torchrun")
        self.decoder, self.engine, self.task = load_policy(config)
        self.rewards = DataParallelRewards(pool, ranks)
        room = self.decoder.architecture.max_positions - config.sample.max_tokens
        speaker = with_environment(self.engine, pool, config.task.environment, room)
        score = partial(self.engine.score, sampling=sampling_of(config)) if config.engine.exact else None
        # Too few rows to learn from are told here, before any is tried.
        first_P = self.task.train_prompts(0, config.num_prompts)
        settled, holds = self.settled(max(len(prompt.tokens_T) for prompt in first_P))
        self.learner = Learner(
            self.decoder, settled, notice=journal.notice, score=score, ranks=ranks, holds_operands=holds
        )
        self.noise = AQN(self.decoder.noise_table, config, ranks.gather)
        self.sampler = DataParallelEngine(speaker, ranks) if cluster is None else self._remote(cluster)
        self.branching = Branching(self.engine, config) if is_deep else None
        self.prompts = self.task.held_out(config.evaluate.num_prompts)
        path = folder / "evaluations.json"
        self.evaluations = ranks.from_first(lambda: read_object(path) if path.exists() else {})

    def _remote(self, cluster: Cluster) -> RemoteEngine:
        return RemoteEngine(
            cluster,
            self.config,
            prompts=self.task.train_prompts,
            noise=self.noise,
            adapter=self.learner.adapter_state,
            notice=self.journal.notice,
        )

    def settled(self, prompt_tokens: int) -> tuple[RunConfig, bool]:
        """The config with learn.gradient_checkpointing auto replaced on a GPU, and whether the learner holds operands; the
        journal is told."""
        config, device, a = self.config, self.decoder.device, self.decoder.architecture
        if device.type == "cpu":
            return config, False
        gpu_bytes = plan.usable_bytes(device)
        found = plan.resolve_checkpointing(a, config, prompt_tokens, gpu_bytes)
        need = plan.learning_bytes(plan.parts(a, found, prompt_tokens))
        holds = plan.holds_operands(a, found, prompt_tokens, gpu_bytes)
        besides = f", and {plan.held(a, found) / 1e9:.1f} for operands held unpacked" if holds else ""
        self.journal.notice(
            f"learn.gradient_checkpointing is {found.learn.gradient_checkpointing}: learning is planned to take {need / 1e9:.1f} of"
            f" {gpu_bytes / 1e9:.1f} GB{besides}"
        )
        return found, holds

    def run(self) -> dict[str, Any]:
        config = self.config
        parts = Parts(
            task=self.task,
            rewards=self.rewards,
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
        found = self.ranks.from_first(
            lambda: checkpoint.load_latest(self.folder / "checkpoints", self.learner)
        )
        if found is not None:
            self._copy_first()
        if found is None and self.config.adapter.init_from is not None:
            load_adapter(self.decoder, read_adapter(self.config.adapter.init_from, self.config.adapter))
        first_step, notices = (0, []) if found is None else (found.next_step, found.notices)
        if found is not None and "noise" in found.extra:
            self.noise.load(found.extra["noise"])
        if found is not None and self.branching is not None:
            self.branching.load(found.extra["tries"])
        for notice in [*notices, *self.engine.notices]:
            self.journal.notice(notice)
        self.journal.resume(first_step)
        self.sampler.publish(self.learner.version)
        if first_step and self.prompts and "before" not in self.evaluations:
            self.journal.notice("evaluations.json lacks the accuracy before the first step")
        if first_step == 0:
            self.evaluations = {}  # those there may be of another config that was given up
        return first_step

    def _copy_first(self) -> None:
        """The first rank's learner to the others, which need not see its folder."""
        state = self.ranks.from_first(self.learner.state) if self.ranks.count > 1 else None
        if state is not None and not self.ranks.is_first:
            self.learner.load(*state)

    def save(self, step: int) -> bool:
        """A signal that any rank got stops all of them, and none before the first has saved."""
        requested = max(self.ranks.gather(self.stop.requested or 0))  # what comes later is for the next
        next_step, is_stopping = step + 1, requested > 0
        is_due = next_step % self.config.checkpoint.every == 0 or next_step == self.config.num_steps
        if self.ranks.is_first and (is_stopping or is_due):
            with self.journal.span("checkpoint"):
                checkpoint.save(
                    self.folder / "checkpoints",
                    self.learner,
                    next_step=next_step,
                    keep=self.config.checkpoint.keep,
                    extra={"noise": self.noise.state(), **self.tries()},
                )
        if is_stopping:
            self.ranks.gather(None)
            self.stop.request(requested)  # the first to end makes torchrun send the others a signal
        return is_stopping

    def tries(self) -> dict[str, Any]:
        return {} if self.branching is None else {"tries": self.branching.state()}

    def observe(self, step: int, log: StepLog) -> None:
        """Says why rewards failed, and measures held-out accuracy where it is due."""
        log.add(**self.ranks.take_traffic(), **self.sampler.take_metrics())
        self.tell_failures()
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
        if self.ranks.is_first:
            write_atomic(self.folder / "evaluations.json", encode(self.evaluations, indent=2))
        self.journal.notice(
            f"held out, {moment}: {accuracy:.3f} right at temperature {self.config.sample.temperature:g},"
            f" {best:.3f} greedy ({len(self.prompts)} problems)"
        )

    def accuracies(self) -> tuple[float, float]:
        """Of the policy without noise: at the config's sampling, and greedy."""
        drawn = sampling_of(self.config)
        found = self.accuracy(drawn), self.accuracy(greedy(drawn))
        self.tell_failures()
        return found

    def tell_failures(self) -> None:
        for text in format_failures(self.rewards.take_failures()):
            self.journal.notice(text)

    def accuracy(self, sampling: Sampling) -> float:
        return evaluate(
            self.sampler,
            self.rewards,
            self.prompts,
            num_samples=1,
            sampling=sampling,
            seed=self.config.seed,
            threshold=self.config.evaluate.success_threshold,
        ).accuracy

    def result(self) -> dict[str, Any]:
        moments = [(moment, self.evaluations.get(moment)) for moment in ("before", "after")]
        accuracies = {
            f"{name}_{moment}": value[name]
            for name in ("accuracy", "greedy")
            for moment, value in moments
            if value is not None
        }
        train_s = self.ranks.from_first(lambda: sum(step["step_s"] for step in self.journal.steps()))
        return {**accuracies, "train_s": round(train_s, 1), "run": str(self.folder)}
