"""Reinforcement learning: build the parts of the loop from the config, and evaluate held-out prompts.

    pool       rewards, environments            forked first, before the model is loaded
    sampler    the engine                       wrapped for agents, environments, ranks or Ray
    rollouts   groups with advantages           at once, partial, with branches or with a teacher's logprobs

The loop over them is in loop.py; the folder, checkpoints and signals are in run_shell.py.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.config.effects import RunFacts, effect_notices
from qerl.config.stored import with_start_day
from qerl.engine.local_engine import LocalEngine
from qerl.errors import RunError, quantity, require
from qerl.kernels.runtime.compile_tally import TALLY
from qerl.learner.distributed import Ranks, join_ranks
from qerl.learner.plan.memory import with_fields
from qerl.models.decoder import Decoder
from qerl.models.device import resolve_device
from qerl.models.expert_writing import can_be_written
from qerl.models.quantize.quantization_check import CALIBRATE, check_quantization
from qerl.tasks import RewardPool
from qerl.tasks.reward import format_failures, with_absolute_path
from qerl.tasks.rows.demonstrations import Demonstration
from qerl.tasks.rows.sft_rows import SftRows
from qerl.tasks.rows.table import file_sources
from qerl.tracking import StepLog
from qerl.tracking.trust import remember_started
from qerl.training.base_judge import BaseJudge
from qerl.training.calibrated import with_calibrated_base
from qerl.training.compile_plan import compile_while_loading
from qerl.training.engines.data_parallel import DataParallelEngine, DataParallelRewards
from qerl.training.engines.multi_turn import EnvironmentEpisodes, with_environment
from qerl.training.engines.replayed_batch import BranchingEngine
from qerl.training.equal_rewards import EqualRewards
from qerl.training.float_evaluation import (
    FLOAT,
    MAX_PROBLEMS,
    FloatEvaluation,
    price_text,
    prices,
    sample_float_model,
    stored_figures,
)
from qerl.training.loop import Parts, run
from qerl.training.observer import Observer
from qerl.training.planned_learner import planned_learner
from qerl.training.policy import (
    check_supported,
    check_task,
    fewer_prompts,
    load_sampler,
    load_task,
    longest_prompt,
)
from qerl.training.ray_engine import Cluster, RemoteEngine, join_cluster
from qerl.training.ray_worker import Episodes, MakeEpisodes
from qerl.training.rollouts import evaluation
from qerl.training.rollouts.branching import BranchingRollouts
from qerl.training.rollouts.distil import DistilRollouts, read_off_policy_rows
from qerl.training.rollouts.partial import PartialRollouts
from qerl.training.rollouts.rollout import GroupRollouts, Rewards, Rollouts, sampling_of
from qerl.training.rollouts.teacher import Teacher, check_teacher, load_teacher, teacher_sources
from qerl.training.run_shell import EndStep, OpenRun, Training, evaluates_after, open_run
from qerl.types import GenerateRequest, Group, RolloutEngine


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
    agent = None if agents is None else agents.function
    with (
        join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks,
        join_cluster(dated := _with_start_day(config, ranks), ranks) as cluster,
        open_run(config, ranks, observer) as opened,
        RewardPool(config.task, functions=rewards, agent=agent) as pool,
    ):
        rows = config.task.name, config.task.held_out_split, config.distil.data
        opened.journal.start(config, {**pool.sources, **file_sources(*rows)} if ranks.is_first else {})
        if ranks.is_first:
            remember_started(opened.folder, config.task.rewards)
        return opened.complete(config, partial(_load, dated, opened, pool, cluster, agents))


def _with_start_day(config: RunConfig, ranks: Ranks) -> RunConfig:
    day = ranks.from_first(lambda: with_start_day(config, Path(config.out)).task.chat_template_date)
    return with_fields(config, "task", chat_template_date=day)


def _load(
    config: RunConfig, opened: OpenRun, pool: RewardPool, cluster: Cluster | None, agents: Agents | None
) -> "ReinforcementLearning":
    threshold = pool.success_threshold(config.evaluate.success_threshold)
    config = with_fields(config, "evaluate", success_threshold=threshold)
    path = config.model.path
    config = with_calibrated_base(config, opened.ranks, opened.journal.notice)
    if cluster is not None:
        cluster.start(_make_episodes(config, pool, agents))
    return ReinforcementLearning(config, opened, pool, cluster, agents, float_path=path)


class ReinforcementLearning(Training):
    """The parts of the loop, what is logged beside it, and the evaluation of held-out prompts."""

    def __init__(
        self,
        config: RunConfig,
        opened: OpenRun,
        pool: RewardPool,
        cluster: Cluster | None,
        agents: Agents | None,
        *,
        float_path: str,
    ):
        """float_path: the model before model.calibrate."""
        self.config, self._ranks, self._journal = config, opened.ranks, opened.journal
        ranks, journal = opened.ranks, opened.journal
        check_supported(config, pool, ranks)
        with journal.work(f"reading {config.task.name}"):
            tokenizer, self._task = load_task(config)
        rows = read_off_policy_rows(config, tokenizer)
        sources = self._task.sources | ({} if rows is None else rows.sources)
        journal.check_sources(sources, ("data set ",))
        journal.check_sources(teacher_sources(config.distil) if ranks.is_first else {}, ("teacher ",))
        num_asked = config.evaluate.num_prompts if pool.has_rewards else 0
        self._held_out_P = self._task.held_out(num_asked)
        fewer = fewer_prompts("evaluate.num_prompts", num_asked, self._held_out_P)
        notices = [*pool.notices, *pool.rank_notices(ranks.count)]
        for text in [*notices, *check_task(config, self._task, pool), *fewer]:
            journal.notice(text)
        first_P = self._task.train_prompts(0, config.num_prompts)
        longest = longest_prompt(config, [*first_P, *self._held_out_P]) + config.sample.max_tokens
        compile_while_loading(config, longest)
        self._float = self._sample_float_model(opened, float_path, tokenizer, pool)
        with journal.work(config.model.loading) as report:
            self.decoder, self.engine = load_sampler(config, tokenizer, report)
        for text in effect_notices(config, self._facts(tokenizer, pool)):
            journal.notice(text)
        judge = BaseJudge(self.decoder, self.engine, config.task.judge, config.engine)
        for each in pool.own_judges:
            each.answer_by(judge, f"{config.model.path} {config.model.format}")
        self._rewards: Rewards = pool if ranks.count == 1 else DataParallelRewards(pool, ranks)
        score = partial(self.engine.score, sampling=sampling_of(config), by_requests=agents is not None)
        self.learner = planned_learner(
            self.decoder,
            config,
            longest_prompt(config, first_P),
            notice=journal.notice,
            score=score if config.engine.exact else None,
            ranks=ranks,
        )
        self._aqn = AQN(self.decoder.noise_table, config, ranks.gather)
        self.sampler = self._make_sampler(pool, cluster, agents)
        self._teacher: Teacher | None = None
        self._rollouts = self._make_rollouts(tokenizer, rows)
        evaluates_teacher = self._teacher is not None and pool.environment is None
        moments = ("before", *(FLOAT,) * config.evaluate.float, *("teacher",) * evaluates_teacher)
        self.evaluations_before = moments if self._held_out_P else ()
        self._first_step, self._num_done, self._metrics = 0, 0, dict[str, float]()
        self._episodes, self._failed_episodes, self._example = 0, 0, ""
        self._equal_rewards = EqualRewards(config)
        self.engine.expect(longest)

    def _facts(self, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> RunFacts:
        arch = self.decoder.architecture
        return RunFacts(
            is_mixture=arch is not None and arch.mixture is not None,
            has_environment=pool.environment is not None,
            has_chat_template=bool(tokenizer.chat_template),
            has_template=not self._task.renderers[0].has_messages,
            has_ranks=self._ranks.count > 1,
        )

    def _make_rollouts(
        self, tokenizer: PreTrainedTokenizerBase, rows: SftRows[Demonstration] | None
    ) -> Rollouts:
        config, prompts = self.config, self._task.train_prompts
        if config.algo.branching == "deep":
            assert isinstance(self.sampler, BranchingEngine)  # check_supported
            return BranchingRollouts(config, self.sampler, self._rewards, prompts)
        if config.rollout.partial:
            return PartialRollouts(config, self.engine, self._rewards, prompts, self._ranks)
        if not config.distil.is_on:
            return GroupRollouts(config, self.sampler, self._rewards, prompts)
        assert isinstance(self.decoder, Decoder)  # check_backend
        self._teacher = load_teacher(config, self.decoder, tokenizer, self._journal.notice)
        for text in [] if rows is None else [*rows.notices, *rows.unused]:
            self._journal.notice(text)
        return DistilRollouts(
            config,
            self.sampler,
            self._rewards,
            prompts,
            teacher=self._teacher,
            rows=rows,
            ranks=self._ranks,
            notice=self._journal.notice,
        )

    def _make_sampler(
        self, pool: RewardPool, cluster: Cluster | None, agents: Agents | None
    ) -> RolloutEngine:
        """Return the engine, wrapped for agents, environments, ranks or Ray where the run has them."""
        if cluster is not None:
            return RemoteEngine(
                cluster,
                self.config,
                prompts=self._task.train_prompts,
                noise=self._aqn,
                adapter=self.learner.adapter_state,
                notice=self._journal.notice,
            )
        if agents is not None:
            return _over_ranks(agents.engine(self.engine), self._ranks)
        return self._with_environment(pool, self.engine)

    def _with_environment(self, pool: RewardPool, engine: LocalEngine) -> RolloutEngine:
        limit = engine.max_positions - self.config.sample.max_tokens
        return _over_ranks(with_environment(engine, pool, self.config.task.environment, limit), self._ranks)

    def _sample_float_model(
        self, opened: OpenRun, path: str, tokenizer: PreTrainedTokenizerBase, pool: RewardPool
    ) -> FloatEvaluation | None:
        """Return what evaluate.float asks for, sampled unless the run has done so; None without it."""
        if not self.config.evaluate.float:
            return None
        require(bool(self._held_out_P), "evaluate.float: the run has no rewards, or holds out no problems")
        stored = opened.ranks.from_first(lambda: stored_figures(opened.folder, opened.journal))
        if stored is not None:
            return FloatEvaluation(figures=stored)
        wrap = partial(self._with_environment, pool)
        prompts_P = self._held_out_P[:MAX_PROBLEMS]
        self._journal.notice(f"answering held-out problems with the float weights: {len(prompts_P)}")
        samples = sample_float_model(self.config, path, tokenizer, prompts_P, wrap, self._answered)
        return FloatEvaluation(samples=samples)

    def quantization_lines(self) -> Iterator[str | None]:
        config, model = self.config, self.config.model
        prompts = [prompt.tokens_T for prompt in self._task.train_prompts(0, config.num_prompts)]
        yield check_quantization(self.decoder, model.path, model.format, prompts, remedy=self._remedy())
        yield check_teacher(self._teacher, config, self.decoder, prompts)

    def _remedy(self) -> str:
        """Return what would make the rounding cost less, or nothing. On a CPU a calibration takes minutes."""
        model = self.config.model
        if model.format != "nvfp4" or not model.device.startswith("cuda") or self.config.ray.address:
            return ""
        architecture = self.decoder.architecture  # None: transformers' code runs the model
        return CALIBRATE if architecture is not None and can_be_written(architecture, "nvfp4") else ""

    def state(self) -> dict[str, Any]:
        episodes = [self._episodes, self._failed_episodes]
        return {"noise": self._aqn.state(), "rollouts": self._rollouts.state(), "episodes": episodes}

    def load(self, state: dict[str, Any]) -> None:
        self._episodes, self._failed_episodes = state.get("episodes", (0, 0))
        self._aqn.load(state["noise"])
        self._rollouts.load(state["rollouts"])

    def run_steps(self, first_step: int, end_step: EndStep) -> None:
        self._first_step = self._num_done = first_step
        parts = Parts(
            rollouts=self._rollouts,
            engine=self.sampler,
            learner=self.learner,
            aqn=self._aqn,
            journal=self._journal,
            after_update=self.after_update,
            save=lambda step: self._end_step(step, end_step),
        )
        run(self.config, parts, first_step=first_step)

    def _end_step(self, step: int, end_step: EndStep) -> bool:
        """Raise RunError if more than half of the run's episodes so far have failed."""
        self._episodes += int(self._metrics.get("num_episodes", 0))
        self._failed_episodes += int(self._metrics.get("num_failed_episodes", 0))
        failed, episodes = self._failed_episodes, self._episodes
        if 2 * failed > episodes:
            raise RunError(f"{failed} of {quantity(episodes, 'episode')} have failed: {self._example}")
        return end_step(step, self._metrics)

    def after_update(self, step: int, log: StepLog) -> None:
        """Log traffic and engine metrics, report failed rewards, evaluate where it is due."""
        self._num_done = step + 1
        log.add(**self._ranks.take_traffic(), **self.sampler.take_metrics(), **self._rewards.take_means())
        self._report_failures()
        if (text := self._equal_rewards.notice(log.metrics)) is not None:
            self._journal.notice(text)
        if step == self._first_step and (report := TALLY.report()) is not None:
            self._journal.notice(str(report))
        if self._held_out_P and evaluates_after(self.config.evaluate, step):
            with log.span("evaluate"):
                scores = self._measure(self.sampler, num_steps=self._num_done)
                figures = evaluation.held_out_figures(scores, self.config.evaluate.success_threshold)
            log.add(**{f"eval_{name}": value for name, value in figures.items()})
        if step == 0 and self._float is not None:
            log.add(**{f"eval_float_{name}": value for name, value in self._float.figures.items()})
        self._metrics = dict(log.metrics)

    def recorded_figures(self, line: Mapping[str, Any]) -> dict[str, float]:
        figures = super().recorded_figures(line)
        return {name: value for name, value in figures.items() if not name.startswith(f"{FLOAT}_")}

    def evaluate(self, moment: str) -> dict[str, float]:
        """Return held-out reward and accuracy before or after training, or those of the teacher or the float
        model."""
        prompts_P = self._held_out_P
        with contextlib.ExitStack() as stack:
            if moment == FLOAT:
                assert self._float is not None  # evaluations_before
                return self._evaluate_float(self._float)
            if moment == "teacher":
                assert self._teacher is not None  # evaluations_before
                engine = _over_ranks(stack.enter_context(self._teacher.engine()), self._ranks)
            else:
                engine = self.sampler
                self._journal.notice(f"answering held-out problems {moment} training: {len(prompts_P)}")
            num_steps = {"before": 0, "after": self._num_done}.get(moment)
            with self._journal.span("evaluate"):
                scores = self._measure(engine, num_steps=num_steps)
        if moment == "before" and self._float is not None:
            self._float.quantized = scores
        return evaluation.held_out_figures(scores, self.config.evaluate.success_threshold)

    def _evaluate_float(self, evaluated: FloatEvaluation) -> dict[str, float]:
        """Score what the float model has sampled, and return its figures beside those of the quantized model
        on the same problems."""
        assert evaluated.samples is not None  # the figures are not stored
        threshold = self.config.evaluate.success_threshold
        with self._journal.span("evaluate"):
            if evaluated.quantized is None:  # measured by a process that was stopped
                evaluated.quantized = self._measure(self.sampler)
            exact = [self._scored(groups) for groups in evaluated.samples]
        figures = evaluation.held_out_figures(exact, threshold) | prices(
            exact, evaluated.quantized, threshold
        )
        evaluated.figures = figures
        return figures

    def evaluation_text(self, moment: str, figures: dict[str, float]) -> str:
        subjects = {"teacher": "of the teacher", FLOAT: "of the float weights"}
        text = evaluation.held_out_text(
            figures,
            subjects.get(moment, f"{moment} training"),
            temperature=self.config.sample.temperature,
            num_prompts=int(figures["num_prompts"]),
        )
        return f"{text}; {price_text(figures, self.config.model.format)}" if moment == FLOAT else text

    def _measure(self, engine: RolloutEngine, *, num_steps: int | None = None) -> list[evaluation.Scores]:
        """Return the held-out samples without noise, scored: with the config's sampling, and greedy. Record
        them as those after num_steps steps; None: they are not the run's own."""
        requests = evaluation.held_out_requests(self._held_out_P, sampling_of(self.config), self.config.seed)
        answers, scores = {}, []
        for kind, request in zip(("sampled", "greedy"), requests, strict=True):
            groups = self._answered(engine, request)
            scores.append(self._scored(groups))
            answers[kind] = groups, scores[-1].rewards_P_G
        self._rewards.take_means()  # those of an evaluation are no step's
        if num_steps is not None:
            self._journal.held_out(num_steps, answers)
        self._report_failures()
        return scores

    def _answered(self, engine: RolloutEngine, request: GenerateRequest) -> list[Group]:
        with self._journal.work(evaluation.work_name(request.sampling), begins=False) as report:
            shown = report if self._ranks.count == 1 else None  # a rank knows its own share only
            return evaluation.sample(engine, request, shown)

    def _scored(self, groups: list[Group]) -> evaluation.Scores:
        return evaluation.Scores(self._rewards.score(groups), list(map(evaluation.sampled_tokens, groups)))

    def _report_failures(self) -> None:
        failures = list(format_failures(self._rewards.take_failures()))
        self._example = next(iter(failures), self._example)
        for text in [*self._task.take_faults(), *failures]:
            self._journal.notice(text)

    def result(self, evaluations: dict[str, Any]) -> dict[str, float]:
        return {
            f"{name}_{moment}": evaluations[moment][name]
            for name in ("accuracy", "greedy", "reward", "greedy_reward")
            for moment in ("before", "after", "teacher", FLOAT)
            if name in evaluations.get(moment, {})
        } | {name: value for name, value in evaluations.get(FLOAT, {}).items() if name.endswith("_price")}


def _over_ranks(engine: RolloutEngine, ranks: Ranks) -> RolloutEngine:
    return engine if ranks.count == 1 else DataParallelEngine(engine, ranks)


def _make_episodes(config: RunConfig, pool: RewardPool, agents: Agents | None) -> MakeEpisodes | None:
    """Return what a Ray worker needs beside an engine; None for samples of a single turn."""
    if agents is not None:
        return agents.make
    environment = pool.environment
    if environment is None:
        return None
    if isinstance(environment, str):
        environment = with_absolute_path(environment)
    return partial(EnvironmentEpisodes, config.task, config.sample, environment)
