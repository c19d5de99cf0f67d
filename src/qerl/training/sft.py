"""Supervised fine-tuning: the learner of `qerl train` on demonstrations instead of samples.

A demonstration is a group of one sample with advantage 1, and the loss `nll` then is the cross entropy of its
learned tokens, averaged over the tokens of the step. Adapter, packing, optimizer, checkpoints, ranks and the
run's folder are those of reinforcement learning; `qerl train --init-adapter` starts from a checkpoint.

    nll          mean negative log-likelihood of the step's learned tokens, before its update
    eval_nll     the same of the evaluation rows, before, during and after training
    samples      greedy answers to the first evaluation rows, in samples.jsonl
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.config import RunConfig, SftConfig
from qerl.errors import quantity, require
from qerl.kernels.runtime.compile_tally import TALLY
from qerl.learner.distributed import RankLost, Ranks, join_ranks
from qerl.learner.metrics import Tally
from qerl.models.checkpoint.notices import checkpoint_notices, skipped_notices
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.device import resolve_device
from qerl.models.peft.adapter import load_adapter
from qerl.models.peft.peft_reader import read_adapter
from qerl.models.quantize.quantization_check import check_quantization
from qerl.models.transformers_backend.backend import max_positions_of
from qerl.tasks.rows import check_file, file_sources
from qerl.tasks.sft_rows import SftRows
from qerl.tracking import Journal, NullJournal, StepLog
from qerl.tracking.atomic_file import encode, read_object, write_atomic
from qerl.tracking.report import write_report
from qerl.training.backend_limits import check_backend
from qerl.training.calibrated import refuse_calibration
from qerl.training.observer import NullObserver, Observer
from qerl.training.planned_learner import planned_learner
from qerl.training.policy import load_sampler
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.run_checkpoints import RunCheckpoints, check_vanished, complete_result, kept_evaluations
from qerl.training.signals import StopSignal, echo_s
from qerl.types import GenerateRequest, Sampling

_KEPT = "entropy", "grad_norm", "learning_rate", "learn_tokens", "trained_samples", "micro_tokens"
_ADVICE = (
    "keep the adapter separate (--init-adapter), use --model.format fp8 or bf16, or quantize the model first:"
    " qerl quantize --calibrate gptq"
)
_KEPT += "lora_dropout", "skipped_updates", "nonfinite_updates"


def fine_tune(
    config: RunConfig,
    *,
    max_steps: int | None = None,
    observer: Observer | None = None,
    rows: SftRows | None = None,
) -> dict[str, Any]:
    """Imitate config.sft.data; config.num_prompts rows are a step, and num_steps follows from the epochs, or
    is max_steps. Return the losses before and after, and the run's folder. The observer follows the steps of
    a run that is not complete yet; rows: those of `read_rows`, if they are read already."""
    refuse_calibration(config.model)
    config = dataclasses.replace(config, model=resolve_device(config.model))
    observer = observer or NullObserver()
    with join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks:
        tokenizer = load_tokenizer(config.model.path)
        rows = rows or read_rows(config, tokenizer)
        epochs = math.ceil(config.sft.num_train_epochs * rows.steps_per_epoch(config.num_prompts))
        config = dataclasses.replace(config, num_steps=max_steps or epochs)
        folder = Path(config.out)
        with Journal(folder, num_steps=config.num_steps) if ranks.is_first else NullJournal() as journal:
            stop = StopSignal(journal.notice, echo_s=echo_s(ranks.count))
            with stop.handling():
                layout = checkpoint_notices(locate(config.model.path).open(), config.model.format)
                notices = [*rows.notices, *layout]
                require(not (config.strict and notices), f"strict: {'; '.join(notices)}")
                files = config.sft.data, config.sft.eval_data
                journal.start(config, file_sources(*files) if ranks.is_first else {})
                journal.check_sources(rows.sources, ("data set ",))
                finished = complete_result(folder, journal, ranks)
                if finished is not None:
                    return finished
                check_vanished(config, folder, journal)
                result = _SftSession(config, folder, journal, stop, ranks, tokenizer, rows, observer).run()
                journal.finish(result)
                if ranks.is_first:
                    write_report([folder], folder / "report.html")
                return result


def read_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftRows:
    """Read the rows to imitate and those to evaluate, as tokens of the model."""
    check_backend(config)
    check_file("data", config.sft.data)
    check_file("eval_data", config.sft.eval_data)
    return SftRows.read(
        _within_positions(config),
        tokenizer,
        stop_token_ids(tokenizer, locate(config.model.path)),
        max_evaluated=config.evaluate.num_prompts,
        seed=config.seed,
    )


def _within_positions(config: RunConfig) -> SftConfig:
    most, given = max_positions_of(config.model), config.sft.max_length
    return dataclasses.replace(config.sft, max_length=most if given is None else min(given, most))


def held_out_loss(config: RunConfig, data: str) -> tuple[float, int]:
    """Return the mean loss of the rows in a file, in nats per token, and their number, with the newest
    checkpoint of the run in config.out or, without one, the model before training."""
    config = dataclasses.replace(config, model=resolve_device(config.model))
    with join_ranks(config.model.device, timeout_s=config.rank_timeout_s) as ranks:
        tokenizer, journal = load_tokenizer(config.model.path), NullJournal()
        given = dataclasses.replace(_within_positions(config), data=data, eval_data=None)
        stop_ids = stop_token_ids(tokenizer, locate(config.model.path))
        rows = SftRows.read_evaluated(given, tokenizer, stop_ids)
        stop, observer = StopSignal(journal.notice), NullObserver()
        session = _SftSession(config, Path(config.out), journal, stop, ranks, tokenizer, rows, observer)
        session.resume()
        return session.mean_loss(), len(rows.evaluated)


class _SftSession:
    """One process's part of a run, from loading the model to the last evaluation."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        journal: Journal | NullJournal,
        stop: StopSignal,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        rows: SftRows,
        observer: Observer,
    ):
        self.config, self.folder, self.journal, self.stop = config, folder, journal, stop
        self.ranks, self.rows, self.observer = ranks, rows, observer
        self.metrics: dict[str, float] = {}
        self.has_reported_compiling = False
        checkpoint = locate(config.model.path).open()
        layout = checkpoint_notices(checkpoint, config.model.format)
        for text in [*rows.notices, *layout, *skipped_notices(checkpoint)]:
            journal.notice(text)
        self.decoder, self.engine = load_sampler(config, tokenizer)
        self.learner = planned_learner(self.decoder, config, rows.longest, notice=journal.notice, ranks=ranks)
        self.checkpoints = RunCheckpoints(folder, config.checkpoint, self.learner, journal, ranks)
        path = folder / "evaluations.json"
        self.losses = ranks.from_first(lambda: read_object(path) if path.exists() else {})

    def run(self) -> dict[str, Any]:
        first_step = self.resume()
        self.observer.begin(first_step)
        if first_step == 0:
            self.evaluate("before")
        self.ranks.take_traffic()  # that of a step begins with it
        ends = self.checkpoints.end_step
        with self.stop.deferred(), self.checkpoints:
            try:
                for step in range(first_step, self.config.num_steps):
                    self.step(step)
                    if ends(step, self.config.num_steps, self.stop, self.observer, self.metrics):
                        break
            except RankLost:
                self.checkpoints.save_finished()
                raise
        if self.stop.requested is not None:
            self.checkpoints.tell_saved()
            raise SystemExit(self.stop.exit_code)
        self.evaluate("after")
        train_s = self.ranks.from_first(lambda: sum(step["step_s"] for step in self.journal.steps()))
        return {**self.result(), "train_s": round(train_s, 1), "run": str(self.folder)}

    def step(self, step: int) -> None:
        config, size = self.config, self.config.num_prompts
        with self.journal.step(step) as log:
            with log.span("learn"):
                metrics = self.learner.step(self.rows.batch(step, size))
            log.add(**{name: metrics[name] for name in _KEPT if name in metrics})
            if "loss" in metrics:  # a gradient that is not finite leaves none
                log.add(nll=metrics["loss"])
            log.add(epoch=(step + 1) / self.rows.steps_per_epoch(size))
            every = config.evaluate.every
            if every is not None and (step + 1) % every == 0 and self.rows.evaluated:
                with log.span("evaluate"):
                    log.add(eval_nll=self.mean_loss())
                self.sample(log)
            elif step + 1 == config.num_steps:
                self.sample(log)
            log.add(**self.ranks.take_traffic())
            self.metrics = dict(log.metrics)

    def sample(self, log: StepLog) -> None:
        """Record greedy answers to the first evaluation rows."""
        shown = self.rows.evaluated[: self.config.sft.num_eval_samples]
        prompts = [each.prompt(len(self.rows.learned) + i) for i, each in enumerate(shown)]
        limit = self.decoder.max_positions - self.config.sample.max_tokens
        prompts = [prompt for prompt in prompts if len(prompt.tokens_T) <= limit]
        if not prompts or not self.ranks.is_first:
            return
        self.engine.publish(self.learner.version)
        sampling = Sampling(max_tokens=self.config.sample.max_tokens, temperature=0.0)
        with log.span("rollout"):
            request = GenerateRequest(
                prompts, num_samples=1, sampling=sampling, seed=self.config.seed, step=EVALUATION_STEP
            )
            groups = self.engine.generate(request)
        log.samples(groups)
        if not self.has_reported_compiling and (report := TALLY.report()) is not None:
            self.journal.notice(str(report))
            self.has_reported_compiling = True

    def mean_loss(self) -> float:
        """Return the mean negative log-likelihood of the evaluation rows' learned tokens."""
        readings = self.learner.read(self.rows.evaluation())
        own = Tally.of([-reading.logprob_C for reading in readings]) if readings else None
        tallies = [tally for tally in self.ranks.gather(own) if tally is not None]
        return sum(tally.total for tally in tallies) / sum(tally.count for tally in tallies)

    def evaluate(self, moment: str) -> None:
        """Measure the loss before or after training, once even if the run is resumed."""
        if moment in self.losses or not self.rows.evaluated:
            return
        with self.journal.span("evaluate"):
            loss = self.mean_loss()
        self.losses[moment] = {"nll": loss, "perplexity": math.exp(min(loss, 700.0))}
        if self.ranks.is_first:
            write_atomic(self.folder / "evaluations.json", encode(self.losses, indent=2))
        self.journal.notice(
            f"evaluation loss {moment} training: {loss:.4f} nats per token"
            f" ({quantity(len(self.rows.evaluated), 'row')})"
        )

    def resume(self) -> int:
        """Load the newest intact checkpoint and return the step to continue with."""
        found = self.checkpoints.load_latest()
        if found is None and self.ranks.is_first and self.rows.learned:
            self.check_quantization()
        if found is None and self.config.adapter.init_from is not None:
            load_adapter(self.decoder, read_adapter(self.config.adapter.init_from, self.config.adapter))
        first_step, notices = (0, []) if found is None else (found.next_step, found.notices)
        self.losses = kept_evaluations(self.losses, first_step, self.config, self.journal)
        for notice in [*notices, *self.engine.notices]:
            self.journal.notice(notice)
        self.journal.resume(first_step)
        self.engine.publish(self.learner.version)
        return first_step

    def check_quantization(self) -> None:
        """Report what quantizing the weights at load changed, on the first rows."""
        model, groups = self.config.model, self.rows.batch(0, self.config.num_prompts)
        tokens = [[*group.prompt.tokens_T, *group.samples_G[0].tokens_T] for group in groups]
        line = check_quantization(self.decoder, model.path, model.format, tokens, "the data's rows", _ADVICE)
        if line is not None:
            self.journal.notice(line)

    def result(self) -> dict[str, float]:
        return {f"eval_nll_{moment}": figures["nll"] for moment, figures in self.losses.items()}
