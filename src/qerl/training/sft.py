"""Training on stored rows: the learner of `qerl train` on demonstrations instead of samples (dpo.py: on
preferences).

A demonstration is a group of one sample with advantage 1, and the loss `nll` then is the cross entropy of its
learned tokens, averaged over the tokens of the step. Adapter, packing, optimizer, checkpoints, ranks and the
run's folder are those of reinforcement learning; `qerl train --init-adapter` starts from a checkpoint.

    nll          mean negative log-likelihood of the step's learned tokens, before its update
    eval_nll     the same of the evaluation rows, before, during and after training
    samples      greedy answers to the first evaluation rows, in samples.jsonl
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic

from transformers import PreTrainedTokenizerBase

from qerl.config import ModelConfig, RunConfig, SftConfig
from qerl.config.effects import RunFacts, effect_notices
from qerl.config.stored import with_start_day
from qerl.errors import quantity, require
from qerl.kernels.runtime.compile_tally import TALLY
from qerl.learner.distributed import join_ranks
from qerl.learner.metrics import Tally
from qerl.models.checkpoint.notices import checkpoint_notices, skipped_notices
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.device import resolve_device
from qerl.models.quantize.quantization_check import check_quantization
from qerl.models.transformers_backend.backend import max_positions_of
from qerl.tasks.rows.demonstrations import Demonstration
from qerl.tasks.rows.prompt import set_template_date
from qerl.tasks.rows.sft_rows import Item, SftRows, form_of_rows
from qerl.tasks.rows.table import check_file, file_sources
from qerl.tracking import NullJournal, StepLog
from qerl.training.calibrated import refuse_calibration
from qerl.training.observer import NullObserver, Observer
from qerl.training.planned_learner import planned_learner
from qerl.training.policy import check_backend, fewer_prompts, load_sampler
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.run_shell import EndStep, OpenRun, Session, Training, evaluates_after, open_run
from qerl.training.signals import StopSignal
from qerl.types import GenerateRequest, Sampling

_LOGGED = "entropy", "grad_norm", "learning_rate", "learn_tokens", "trained_samples", "micro_tokens"
_LOGGED += "lora_dropout", "skipped_updates", "nonfinite_updates"
_ADVICE = (
    "keep the adapter separate (--init-adapter), use --model.format fp8 or bf16, or quantize the model first:"
    " qerl quantize --calibrate gptq"
)


def fine_tune(
    config: RunConfig,
    *,
    max_steps: int | None = None,
    observer: Observer | None = None,
    rows: SftRows[Any] | None = None,
    kind: "type[StoredTraining[Any]] | None" = None,
) -> dict[str, Any]:
    """Learn from config.sft.data; config.num_prompts rows are a step, and num_steps follows from the epochs,
    or is max_steps. Return the losses before and after, and the run's folder. The observer follows the steps
    of a run that is not complete yet; rows: those of `read_rows`, if they are read already. kind: what is
    learned from the rows; None: they are imitated."""
    kind = kind or FineTuning
    refuse_calibration(config.model)
    config = dataclasses.replace(config, model=resolve_device(config.model))
    with join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks:
        tokenizer = load_tokenizer(config.model.path)
        rows = rows or read_rows(config, tokenizer)
        epochs = math.ceil(config.sft.num_train_epochs * rows.steps_per_epoch(config.num_prompts))
        config = dataclasses.replace(config, num_steps=max_steps or epochs)
        with open_run(config, ranks, observer) as opened:
            layout = checkpoint_notices(locate(config.model.path).open(), config.model.format)
            notices = [*rows.notices, *layout]
            require(not (config.strict and notices), f"strict: {'; '.join(notices)}")
            notices += [*rows.unused, *_evaluation_notices(rows, config.evaluate.num_prompts)]
            files = config.sft.data, config.sft.eval_data
            opened.journal.start(config, file_sources(*files) if ranks.is_first else {})
            opened.journal.check_sources(rows.sources, ("data set ",))
            return opened.complete(config, partial(kind, config, opened, tokenizer, rows, notices))


def read_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftRows[Any]:
    """Read the rows to learn from and those to evaluate, as tokens of the model."""
    check_backend(config)
    set_template_date(tokenizer, with_start_day(config, Path(config.out)).task.chat_template_date)
    check_file("data", config.sft.data)
    check_file("eval_data", config.sft.eval_data)
    return SftRows.read(
        _within_positions(config.sft, config.model),
        tokenizer,
        stop_token_ids(tokenizer, locate(config.model.path)),
        form_of_rows(config.dpo),
        max_evaluated=config.evaluate.num_prompts,
        seed=config.seed,
    )


def _evaluation_notices(rows: SftRows[Any], num_prompts: int) -> list[str]:
    """Return a line if the evaluation has fewer rows than are asked for, or than there are."""
    name, num = "evaluate.num_prompts", len(rows.evaluated)
    if num < rows.num_held_out:
        return [
            f"{name} is {num_prompts:,}: of {rows.num_held_out:,} rows to evaluate on, {num:,} are evaluated"
        ]
    return fewer_prompts(name, num_prompts, rows.evaluated) if rows.evaluated else []


def _within_positions(config: SftConfig, model: ModelConfig) -> SftConfig:
    limit = max_positions_of(model)
    max_length = limit if config.max_length is None else min(config.max_length, limit)
    return dataclasses.replace(config, max_length=max_length)


def held_out_figures(
    config: RunConfig, data: str, kind: "type[StoredTraining[Any]] | None" = None
) -> tuple[dict[str, float], int]:
    """Return the figures of the rows in a file and their number, with the newest checkpoint of the run in
    config.out or, without one, the model before training. kind: as in `fine_tune`."""
    config = dataclasses.replace(config, model=resolve_device(config.model))
    with join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks:
        tokenizer, journal = load_tokenizer(config.model.path), NullJournal()
        sft = dataclasses.replace(_within_positions(config.sft, config.model), data=data, eval_data=None)
        set_template_date(tokenizer, with_start_day(config, Path(config.out)).task.chat_template_date)
        stop_ids = stop_token_ids(tokenizer, locate(config.model.path))
        rows = SftRows.read_evaluated(sft, tokenizer, stop_ids, form_of_rows(config.dpo))
        opened = OpenRun(Path(config.out), ranks, journal, StopSignal(journal.notice), NullObserver())
        training = (kind or FineTuning)(config, opened, tokenizer, rows)
        Session(opened, training).load()
        return training.held_out(), len(rows.evaluated)


class StoredTraining(Training, Generic[Item]):
    """The steps over stored rows, which follow from their number, and the evaluation rows' figures. A
    subclass says what a step learns from a batch, and what the figures are."""

    def __init__(
        self,
        config: RunConfig,
        opened: OpenRun,
        tokenizer: PreTrainedTokenizerBase,
        rows: SftRows[Item],
        notices: Sequence[str] = (),
    ):
        self.config, self._rows = config, rows
        self._folder, self._ranks, self._journal = opened.folder, opened.ranks, opened.journal
        with self._journal.work(config.model.loading) as report:
            self.decoder, self.engine = load_sampler(config, tokenizer, report)
        arch = self.decoder.architecture
        facts = RunFacts(
            is_mixture=arch is not None and arch.mixture is not None,
            has_environment=False,
            has_chat_template=bool(tokenizer.chat_template),
            has_template=False,
            has_ranks=self._ranks.count > 1,
        )
        skipped = skipped_notices(locate(config.model.path).open())
        for text in [*notices, *skipped, *effect_notices(config, facts)]:
            self._journal.notice(text)
        self.sampler = self.engine
        self.learner = planned_learner(
            self.decoder, config, rows.longest, notice=self._journal.notice, ranks=self._ranks
        )
        self.evaluations_before = ("before",) if rows.evaluated else ()
        self._has_reported_compiling = False

    def quantization_lines(self) -> Iterator[str | None]:
        """Compare on the first rows."""
        if not self._rows.learned:
            return
        model, groups = self.config.model, self._rows.batch(0, self.config.num_prompts)
        tokens = [[*group.prompt.tokens_T, *group.samples_G[0].tokens_T] for group in groups]
        yield check_quantization(self.decoder, model.path, model.format, tokens, "the data's rows", _ADVICE)

    def run_steps(self, first_step: int, end_step: EndStep) -> None:
        for step in range(first_step, self.config.num_steps):
            with self._journal.step(step) as log:
                self.step(step, log)
            if end_step(step, log.metrics):
                return

    def step(self, step: int, log: StepLog) -> None:
        config, size = self.config, self.config.num_prompts
        with log.span("learn"):
            metrics, figures = self.learn(step)
        log.add(**{name: metrics[name] for name in _LOGGED if name in metrics}, **figures)
        log.add(epoch=(step + 1) / self._rows.steps_per_epoch(size))
        is_evaluated = bool(self._rows.evaluated) and evaluates_after(config.evaluate, step)
        if is_evaluated:
            with log.span("evaluate"):
                log.add(**{f"eval_{name}": value for name, value in self.held_out().items()})
        if is_evaluated or step + 1 == config.num_steps:
            self._sample(log)
        log.add(**self._ranks.take_traffic())

    def _sample(self, log: StepLog) -> None:
        """Record greedy answers to the first evaluation rows."""
        shown = self._rows.evaluated[: self.config.sft.num_eval_samples]
        prompts = [each.prompt(len(self._rows.learned) + i) for i, each in enumerate(shown)]
        limit = self.decoder.max_positions - self.config.sample.max_tokens
        prompts = [prompt for prompt in prompts if len(prompt.tokens_T) <= limit]
        if not prompts or not self._ranks.is_first:
            return
        self.engine.publish(self.learner.version)
        sampling = Sampling(max_tokens=self.config.sample.max_tokens, temperature=0.0)
        with log.span("rollout"):
            request = GenerateRequest(
                prompts, num_samples=1, sampling=sampling, seed=self.config.seed, step=EVALUATION_STEP
            )
            groups = self.engine.generate(request)
        log.samples(groups)
        if not self._has_reported_compiling and (report := TALLY.report()) is not None:
            self._journal.notice(str(report))
            self._has_reported_compiling = True

    def learn(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from the step's batch. Return the learner's metrics, and the loss's own."""
        raise NotImplementedError

    def held_out(self) -> dict[str, float]:
        """Return the figures of the evaluation rows."""
        raise NotImplementedError

    def described(self, figures: dict[str, float]) -> str:
        """Return the figures as the console shows them, the loss first."""
        raise NotImplementedError

    def evaluate(self, moment: str) -> dict[str, float]:
        rows = quantity(len(self._rows.evaluated), "row")
        with self._journal.span("evaluate"), self._journal.work(f"evaluating {rows}"):
            return self.held_out()

    def evaluation_text(self, moment: str, figures: dict[str, float]) -> str:
        rows = quantity(len(self._rows.evaluated), "row")
        return f"evaluation loss {moment} training: {self.described(figures)} ({rows})"

    def result(self, evaluations: dict[str, Any]) -> dict[str, float]:
        return {
            f"eval_{name}_{moment}": value
            for moment, figures in evaluations.items()
            for name, value in figures.items()
            if name in self.headlines
        }

    headlines: ClassVar[tuple[str, ...]]
    """Figures that the run's result has."""


class FineTuning(StoredTraining[Demonstration]):
    """Imitation of the rows: the cross entropy."""

    headlines = ("nll",)

    def learn(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        metrics = self.learner.step(self._rows.batch(step, self.config.num_prompts))
        # a gradient that is not finite leaves no loss
        return metrics, {"nll": metrics["loss"]} if "loss" in metrics else {}

    def held_out(self) -> dict[str, float]:
        """Return the mean negative log-likelihood of the evaluation rows' learned tokens."""
        readings = self.learner.read(self._rows.evaluation())
        tally = Tally.of([-reading.logprob_C for reading in readings]) if readings else None
        tallies = [tally for tally in self._ranks.gather(tally) if tally is not None]
        return {"nll": sum(tally.total for tally in tallies) / sum(tally.count for tally in tallies)}

    def described(self, figures: dict[str, float]) -> str:
        return f"{figures['nll']:.4f} nats per token"

    def evaluate(self, moment: str) -> dict[str, float]:
        return _with_perplexity(super().evaluate(moment))

    def recorded_figures(self, line: Mapping[str, Any]) -> dict[str, float]:
        return _with_perplexity(super().recorded_figures(line))


def _with_perplexity(figures: dict[str, float]) -> dict[str, float]:
    nll = figures.get("nll")
    return figures if nll is None else figures | {"perplexity": math.exp(min(nll, 700.0))}
