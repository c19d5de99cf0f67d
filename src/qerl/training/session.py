"""Build a run from its config, resume it where it stopped, evaluate before and after.

The run's folder:

    run.json           the resolved config, versions, commit
    metrics.jsonl      one line per step                samples.jsonl   one line per sample
    evaluations.json   held-out figures by moment       checkpoints/    adapter, optimizer, counters
    tensorboard/       the same metrics                 result.json, report.html   once the run is complete
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.kernels.runtime.compile_tally import TALLY
from qerl.learner.distributed import RankLost, Ranks, join_ranks
from qerl.models.decoder import Decoder
from qerl.models.device import resolve_device
from qerl.models.peft.adapter import load_adapter
from qerl.models.peft.peft_reader import read_adapter
from qerl.models.quantize.quantization_check import check_quantization
from qerl.tasks import RewardPool
from qerl.tasks.reward import format_failures, with_absolute_path
from qerl.tasks.rows import file_sources
from qerl.tracking import Journal, NullJournal, StepLog
from qerl.tracking.atomic_file import encode, read_object, write_atomic
from qerl.tracking.report import write_report
from qerl.tracking.trust import remember_started
from qerl.training.base_judge import let_base_judge
from qerl.training.calibrated import with_calibrated_base
from qerl.training.compile_plan import compile_while_loading
from qerl.training.engines.branchable import BranchingEngine
from qerl.training.engines.data_parallel import DataParallelEngine, DataParallelRewards
from qerl.training.engines.multi_turn import EnvironmentEpisodes, with_environment
from qerl.training.loop import Parts, run
from qerl.training.observer import NullObserver, Observer
from qerl.training.planned_learner import planned_learner
from qerl.training.policy import check_supported, check_task, load_sampler, load_task, longest_prompt
from qerl.training.ray_engine import Cluster, RemoteEngine, join_cluster
from qerl.training.ray_worker import Episodes, MakeEpisodes
from qerl.training.rollouts import evaluation
from qerl.training.rollouts.branching import BranchingRollouts
from qerl.training.rollouts.distil import DistilRollouts, read_given_rows
from qerl.training.rollouts.partial import PartialRollouts
from qerl.training.rollouts.rollout import GroupRollouts, Rewards, sampling_of
from qerl.training.rollouts.teacher import Teacher, check_teacher, load_teacher, teacher_sources
from qerl.training.run_checkpoints import RunCheckpoints, check_vanished, complete_result, kept_evaluations
from qerl.training.signals import StopSignal, echo_s
from qerl.types import GenerateRequest, RolloutEngine, Sampling


class Agents(Episodes, Protocol):
    """Runner of an agent's episodes (qerl.serve.agents)."""

    function: Callable[..., Any]
    make: MakeEpisodes | None
    """Makes the same in a Ray worker."""


def train(
    config: RunConfig,
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    observer: Observer | None = None,
    agents: Agents | None = None,
) -> dict[str, Any]:
    """See `qerl.train`. The observer follows the steps of a run that is not complete yet. agents: sample and
    score in place of the engine and the rewards."""
    config = dataclasses.replace(config, model=resolve_device(config.model))
    with (
        join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks,
        join_cluster(config, ranks) as cluster,
    ):
        return _train(config, ranks, cluster, rewards, observer or NullObserver(), agents)


def _train(
    config: RunConfig,
    ranks: Ranks,
    cluster: Cluster | None,
    rewards: Sequence[Callable[..., Any]],
    observer: Observer,
    agents: Agents | None,
) -> dict[str, Any]:
    """Only the first rank has a journal and writes the folder."""
    folder = Path(config.out)
    with Journal(folder, num_steps=config.num_steps) if ranks.is_first else NullJournal() as journal:
        stop = StopSignal(journal.notice, echo_s=echo_s(ranks.count))
        agent = None if agents is None else agents.function
        with stop.handling(), RewardPool(config.task, functions=rewards, agent=agent) as pool:
            rows = config.task.name, config.task.held_out_split, config.distil.data
            journal.start(config, {**pool.sources, **file_sources(*rows)} if ranks.is_first else {})
            if ranks.is_first:
                remember_started(folder, config.task.rewards)
            finished = complete_result(folder, journal, ranks)
            if finished is not None:
                return finished
            check_vanished(config, folder, journal)
            threshold = pool.success_threshold(config.evaluate.success_threshold)
            evaluate = dataclasses.replace(config.evaluate, success_threshold=threshold)
            config = dataclasses.replace(config, evaluate=evaluate)
            config = with_calibrated_base(config, ranks, journal.notice)
            if cluster is not None:
                cluster.start(_make_episodes(config, pool, agents))
            result = _Session(config, folder, journal, pool, stop, ranks, cluster, observer, agents).run()
            journal.finish(result)
            if ranks.is_first:
                write_report([folder], folder / "report.html")
            return result


class _Session:
    """One process's part of a run, from loading the model to the last evaluation."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        journal: Journal | NullJournal,
        pool: RewardPool,
        stop: StopSignal,
        ranks: Ranks,
        cluster: Cluster | None,
        observer: Observer,
        agents: Agents | None,
    ):
        self.config, self.folder, self.journal, self.stop, self.ranks = config, folder, journal, stop, ranks
        self.observer, self.metrics = observer, {}
        check_supported(config, pool, ranks)
        tokenizer, self.task = load_task(config)
        self.given = read_given_rows(config, tokenizer)
        sources = self.task.sources | ({} if self.given is None else self.given.sources)
        journal.check_sources(sources, ("data set ",))
        journal.check_sources(teacher_sources(config) if ranks.is_first else {}, ("teacher ",))
        for text in [*pool.notices, *check_task(config, self.task, pool)]:
            journal.notice(text)
        self.prompts = self.task.held_out(config.evaluate.num_prompts if pool.has_rewards else 0)
        first_P = self.task.train_prompts(0, config.num_prompts)
        self.longest = longest_prompt(config, [*first_P, *self.prompts]) + config.sample.max_tokens
        compile_while_loading(config, self.longest)
        self.decoder, self.engine = load_sampler(config, tokenizer)
        let_base_judge(pool, self.decoder, self.engine, tokenizer, config)
        self.rewards: Rewards = pool if ranks.count == 1 else DataParallelRewards(pool, ranks)
        self.learner = planned_learner(
            self.decoder,
            config,
            longest_prompt(config, first_P),
            notice=journal.notice,
            score=partial(self.engine.score, sampling=sampling_of(config), by_requests=agents is not None)
            if config.engine.exact
            else None,
            ranks=ranks,
        )
        self.checkpoints = RunCheckpoints(folder, config.checkpoint, self.learner, journal, ranks)
        self.aqn = AQN(self.decoder.noise_table, config, ranks.gather)
        self.sampler = self._make_sampler(pool, cluster, agents)
        self.teacher: Teacher | None = None
        self.rollouts = self._make_rollouts(tokenizer)
        self.has_environment = pool.has_environment
        path = folder / "evaluations.json"
        self.evaluations = ranks.from_first(lambda: read_object(path) if path.exists() else {})

    def _make_rollouts(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> GroupRollouts | PartialRollouts | BranchingRollouts | DistilRollouts:
        config, prompts = self.config, self.task.train_prompts
        if config.algo.branching == "deep":
            assert isinstance(self.sampler, BranchingEngine)  # check_supported
            return BranchingRollouts(config, self.sampler, self.rewards, prompts)
        if config.rollout.partial:
            return PartialRollouts(config, self.engine, self.rewards, prompts, self.ranks)
        if not config.distil.is_on:
            return GroupRollouts(config, self.sampler, self.rewards, prompts)
        assert isinstance(self.decoder, Decoder)  # check_backend
        self.teacher = load_teacher(config, self.decoder, tokenizer, self.journal.notice)
        for text in [] if self.given is None else self.given.notices:
            self.journal.notice(text)
        return DistilRollouts(
            config,
            self.sampler,
            self.rewards,
            prompts,
            teacher=self.teacher,
            rows=self.given,
            ranks=self.ranks,
            notice=self.journal.notice,
        )

    def _make_sampler(
        self, pool: RewardPool, cluster: Cluster | None, agents: Agents | None
    ) -> RolloutEngine:
        """Return the engine, wrapped for agents, environments, ranks or Ray where the run has them."""
        if cluster is not None:
            return RemoteEngine(
                cluster,
                self.config,
                prompts=self.task.train_prompts,
                noise=self.aqn,
                adapter=self.learner.adapter_state,
                notice=self.journal.notice,
            )
        if agents is not None:
            engine = agents.engine(self.engine)
        else:
            limit = self.engine.max_positions - self.config.sample.max_tokens
            engine = with_environment(self.engine, pool, self.config.task.environment, limit)
        return engine if self.ranks.count == 1 else DataParallelEngine(engine, self.ranks)

    def run(self) -> dict[str, Any]:
        first_step = self.resume()
        self.observer.begin(first_step)
        if first_step == 0:
            self.evaluate("before")
            self.evaluate_teacher()
        parts = Parts(
            rollouts=self.rollouts,
            engine=self.sampler,
            learner=self.learner,
            aqn=self.aqn,
            journal=self.journal,
            after_update=self.after_update,
            save=self.save,
        )
        self.ranks.take_traffic()  # that of a step begins with it
        with self.stop.deferred():
            with self.checkpoints:
                try:
                    run(self.config, parts, first_step=first_step)
                except RankLost:
                    self.checkpoints.save_finished()
                    raise
            if self.stop.requested is not None:
                self.checkpoints.tell_saved()
        if self.stop.requested is not None:  # also by a signal that came after the look above
            raise SystemExit(self.stop.exit_code)
        self.evaluate("after")
        return self.result()

    def resume(self) -> int:
        """Load the newest intact checkpoint and return the step to continue with."""
        self.engine.expect(self.longest)
        found = self.checkpoints.load_latest()
        if found is None and self.ranks.is_first:
            self.check_quantization()
        if found is None and self.config.adapter.init_from is not None:
            load_adapter(self.decoder, read_adapter(self.config.adapter.init_from, self.config.adapter))
        first_step, notices = (0, []) if found is None else (found.next_step, found.notices)
        if found is not None and "noise" in found.extra:
            self.aqn.load(found.extra["noise"])
        if found is not None and isinstance(self.rollouts, BranchingRollouts):
            self.rollouts.load(found.extra["tries"])
        if found is not None and isinstance(self.rollouts, GroupRollouts):
            self.rollouts.lengths.load(found.extra.get("lengths"))
        if found is not None and isinstance(self.rollouts, PartialRollouts):
            self.rollouts.load(found.extra.get("begun"))
        for notice in [*notices, *self.engine.notices]:
            self.journal.notice(notice)
        kept = kept_evaluations(self.evaluations, first_step, self.config, self.journal)
        self.journal.resume(first_step)
        self._first_step = first_step
        self.sampler.publish(self.learner.version)
        if first_step and self.prompts and "before" not in self.evaluations:
            self.journal.notice("evaluations.json has no evaluation from before the first step")
        if self.evaluations != kept:
            self.evaluations = kept
            self.write_evaluations()
        return first_step

    def check_quantization(self) -> None:
        """Report what quantizing the weights at load changed."""
        config, model = self.config, self.config.model
        prompts = [prompt.tokens_T for prompt in self.task.train_prompts(0, config.num_prompts)]
        own = check_quantization(self.decoder, model.path, model.format, prompts)
        for line in filter(None, (own, check_teacher(self.teacher, config, self.decoder, prompts))):
            self.journal.notice(line)

    def save(self, step: int) -> bool:
        """See RunCheckpoints.end_step."""
        ends = self.checkpoints.end_step
        return ends(step, self.config.num_steps, self.stop, self.observer, self.metrics, self.extra_state())

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides the learner, as JSON values."""
        state: dict[str, Any] = {"noise": self.aqn.state()}
        if isinstance(self.rollouts, BranchingRollouts):
            state["tries"] = self.rollouts.state()
        if isinstance(self.rollouts, GroupRollouts) and self.config.rollout.prompt_order != "fifo":
            state["lengths"] = self.rollouts.lengths.state()
        if isinstance(self.rollouts, PartialRollouts):
            state["begun"] = self.rollouts.state()
        return state

    def after_update(self, step: int, log: StepLog) -> None:
        """Log traffic and engine metrics, report failed rewards, evaluate where it is due."""
        log.add(**self.ranks.take_traffic(), **self.sampler.take_metrics())
        self.report_failures()
        if step == self._first_step and (report := TALLY.report()) is not None:
            self.journal.notice(str(report))
        every = self.config.evaluate.every
        if every is not None and (step + 1) % every == 0 and self.prompts:
            with log.span("evaluate"):
                figures = self.held_out_figures()
            log.add(**{f"eval_{name}": value for name, value in figures.items()})
        self.metrics = dict(log.metrics)

    def evaluate(self, moment: str) -> None:
        """Measure held-out reward and accuracy before or after training, once even if the run is resumed."""
        if moment in self.evaluations or not self.prompts:
            return
        self.journal.notice(f"answering held-out problems {moment} training: {len(self.prompts)}")
        with self.journal.span("evaluate"):
            self.evaluations[moment] = figures = self.held_out_figures()
        self.write_evaluations()
        settings = {"temperature": self.config.sample.temperature, "num_prompts": len(self.prompts)}
        self.journal.notice(evaluation.held_out_text(figures, f"{moment} training", **settings))

    def evaluate_teacher(self) -> None:
        """Measure the teacher as the student is measured, once; not where an environment answers it."""
        if self.teacher is None or self.has_environment or "teacher" in self.evaluations or not self.prompts:
            return
        student = self.sampler
        with self.journal.span("evaluate"), self.teacher.engine() as engine:
            self.sampler = engine if self.ranks.count == 1 else DataParallelEngine(engine, self.ranks)
            try:
                self.evaluations["teacher"] = figures = self.held_out_figures()
            finally:
                self.sampler = student
        self.write_evaluations()
        settings = {"temperature": self.config.sample.temperature, "num_prompts": len(self.prompts)}
        self.journal.notice(evaluation.held_out_text(figures, "of the teacher", **settings))

    def write_evaluations(self) -> None:
        if self.ranks.is_first:
            write_atomic(self.folder / "evaluations.json", encode(self.evaluations, indent=2))

    def held_out_figures(self) -> dict[str, float]:
        """Return accuracy, if there is one, and mean reward without noise: with the config's sampling, and
        greedy."""
        sampling = sampling_of(self.config)
        sampled, best = self.measure(sampling), self.measure(evaluation.greedy(sampling))
        self.report_failures()
        figures = {"accuracy": sampled.accuracy, "greedy": best.accuracy}
        figures |= {"reward": sampled.reward, "greedy_reward": best.reward}
        figures |= {"reward_error": sampled.reward_error, "greedy_reward_error": best.reward_error}
        return {name: value for name, value in figures.items() if value is not None}

    def report_failures(self) -> None:
        for text in [*self.task.take_faults(), *format_failures(self.rewards.take_failures())]:
            self.journal.notice(text)

    def measure(self, sampling: Sampling) -> evaluation.Evaluation:
        seed, step = self.config.seed, evaluation.EVALUATION_STEP
        request = GenerateRequest(self.prompts, num_samples=1, sampling=sampling, seed=seed, step=step)
        notice = self.journal.notice if self.ranks.count == 1 else None  # a rank knows of its own share only
        groups, rewards_P_G = evaluation.sample_and_score(self.sampler, self.rewards.score, request, notice)
        threshold = self.config.evaluate.success_threshold
        return evaluation.summarize(rewards_P_G, list(map(evaluation.sampled_tokens, groups)), threshold)

    def result(self) -> dict[str, Any]:
        moments = [(moment, self.evaluations.get(moment)) for moment in ("before", "after", "teacher")]
        figures = {
            f"{name}_{moment}": value[name]
            for name in ("accuracy", "greedy", "reward", "greedy_reward")
            for moment, value in moments
            if value is not None and name in value
        }
        train_s = self.ranks.from_first(lambda: sum(step["step_s"] for step in self.journal.steps()))
        return {**figures, "train_s": round(train_s, 1), "run": str(self.folder)}


def _make_episodes(config: RunConfig, pool: RewardPool, agents: Agents | None) -> MakeEpisodes | None:
    """Return what a Ray worker needs beside an engine; None for samples of a single turn."""
    if agents is not None:
        return agents.make
    given = pool.environment
    environment = with_absolute_path(given) if isinstance(given, str) else given
    return None if environment is None else partial(EnvironmentEpisodes, config, environment)
