"""Run a study: choose learning rates, run what is missing in parallel processes, write the page.

    studies/NAME/results.jsonl   a line for each task, arm and seed
                 choice.jsonl    a line for each run that chooses a learning rate
                 index.html      the page                                 summary.md     its verdicts
                 runs/           each run's own folder; its checkpoints are deleted once its line is written

A killed study can be resumed: runs that have a line are not repeated, and a run that was interrupted
continues from its checkpoint (training/session.py). Workers end when the process that started them ends.
"""

import itertools
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from qerl.errors import RunError, UserError
from qerl.tracking.atomic_file import Lock
from qerl.tracking.provenance import environment
from studies.page import write_pages
from studies.results import Line, Results
from studies.study import Job, Study

_WATCH_S = 0.3
_MAX_FAILED = 3
Outcomes = Callable[[list[Job]], Iterator[tuple[Job, Line]]]
"""Runs jobs and yields each with its line as it ends."""


def run_study(study: Study, folder: Path, *, workers: int = 1) -> Path:
    """Run what is missing and write the page; return the page's path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be used as the folder of a study ({error.strerror})") from None
    try:
        choice, results = (Results(folder / f"{name}.jsonl") for name in ("choice", "results"))
        trials = choice_jobs(study, folder)
        if study.run_only:
            _check_named(study, [*trials, *final_jobs(study, folder, best_rates(study, trials, choice))])
        with _pool(workers) as pool:
            execute(study, trials, choice, partial(_outcomes, pool, study, workers))
            jobs = final_jobs(study, folder, best_rates(study, trials, choice))
            if study.takes_from:
                results.take(Results(folder.parent / study.takes_from / results.path.name), jobs)
            execute(study, jobs, results, partial(_outcomes, pool, study, workers))
        return write_pages(study, folder, results.lines_of(jobs), choice.lines_of(trials))
    finally:
        lock.close()


def _check_named(study: Study, jobs: list[Job]) -> None:
    """Raise UserError if a run was named that is none of these jobs."""
    known = {(job.arm, job.seed) for job in jobs}
    for arm, seed in study.run_only:
        if (arm, seed) not in known:
            seeds = sorted(number for name, number in known if name == arm)
            raise UserError(f"study {study.name} cannot run {arm}:{seed} now, of {arm} only seeds {seeds}")


def rewrite_pages(study: Study, folder: Path) -> Path:
    """Write index.html and summary.md from the stored lines; return the page's path."""
    choice, results = (Results(folder / f"{name}.jsonl") for name in ("choice", "results"))
    trials = choice_jobs(study, folder)
    jobs = final_jobs(study, folder, best_rates(study, trials, choice))
    return write_pages(study, folder, results.lines_of(jobs), choice.lines_of(trials))


def _pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool whose processes are reused for all runs, so that each compiles its kernels once. They
    take the GPUs in turn."""
    context = get_context("spawn")
    begun = context.Value("i", 0)
    return ProcessPoolExecutor(
        workers, context, initializer=_begin_worker, initargs=(os.getpid(), begun, visible_gpus())
    )


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    return [name for name in named.split(",") if name.strip()]


def runs_on_a_device(workers: int) -> int:
    """Return how many of the workers share a device, the most if not all share alike."""
    return math.ceil(workers / max(1, len(visible_gpus())))


def choice_jobs(study: Study, folder: Path) -> list[Job]:
    """Return the runs of the arms that have several learning rates."""
    return [
        study.job(task, arm, seed, rate, folder / "runs")
        for task in study.tasks
        for arm in study.arms
        if len(study.rates_of(arm)) > 1
        for rate in study.rates_of(arm)
        for seed in study.choice_seeds
    ]


def best_rates(study: Study, trials: list[Job], choice: Results) -> dict[tuple[str, str], float | None]:
    """Return by task and arm the rate with the best mean, the smaller of equals; None is the config's own.
    Arms with missing trials are left out."""
    rates_by_arm: dict[tuple[str, str], float | None] = {}
    for task in study.tasks:
        for arm in (arm for arm in study.arms if not arm.rate_of):
            of_arm = [job for job in trials if (job.task, job.arm) == (task.name, arm.name)]
            lines = choice.lines_of(of_arm)
            if len(lines) == len(of_arm):
                rates = study.rates_of(arm)
                rates_by_arm[task.name, arm.name] = _best(study, lines) if of_arm else next(iter(rates), None)
        for arm in study.arms:
            if arm.rate_of and (task.name, arm.rate_of) in rates_by_arm:
                rates_by_arm[task.name, arm.name] = rates_by_arm[task.name, arm.rate_of]
    return rates_by_arm


def _best(study: Study, lines: list[Line]) -> float:
    scores: dict[float, list[float]] = {}
    for line in lines:
        scores.setdefault(line["learning_rate"], []).append(line["final"][study.choice_metric])
    return max(sorted(scores), key=lambda rate: fmean(scores[rate]))


def final_jobs(study: Study, folder: Path, rates: dict[tuple[str, str], float | None]) -> list[Job]:
    """Return the runs of the arms whose rate is known."""
    return [
        study.job(task, arm, seed, rates[task.name, arm.name], folder / "runs")
        for task in study.tasks
        for arm in study.arms
        if (task.name, arm.name) in rates
        for seed in study.seeds
    ]


def execute(study: Study, jobs: list[Job], results: Results, outcomes: Outcomes) -> None:
    """Run the selected jobs that have no line yet, and write each line to disk as its job ends.

    All arms run a seed before any runs the next: a study cut short compares equal numbers of seeds."""
    missing = [job for job in study.runs_now(jobs) if results.of(job) is None]
    for count, (job, line) in enumerate(outcomes(missing), start=1):
        results.add(job, line, jobs)
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
        name = study.metrics[0].key
        shown = f"{name} {line['final'][name]:.4g}" if name in line["final"] else "done"
        where = f"{job.task}, {job.arm}, rate {job.rate:g}, seed {job.seed}"
        shown = "; ".join([f"{shown} ({line['seconds']:.0f} s)", *line.get("notes", ())])
        print(f"{count}/{len(missing)} {where}: {shown}", file=sys.stderr, flush=True)


def _outcomes(pool: Executor, study: Study, workers: int, jobs: list[Job]) -> Iterator[tuple[Job, Line]]:
    """Yield jobs as they end. Errors of jobs are raised, the first of them, once the others have ended; after
    _MAX_FAILED of them no further job begins. No job waits inside the pool: after Ctrl-C, which ends every
    running job, a worker would start it."""
    waiting, running, failed = iter(jobs), dict[Future[Line], Job](), list[RunError]()
    sharing = runs_on_a_device(workers)

    def begin(count: int) -> None:
        for job in itertools.islice(waiting, count):
            running[pool.submit(_work, study.measure, sharing, job)] = job

    begin(workers)
    try:
        while running:
            done, _ = wait(running, return_when="FIRST_COMPLETED")
            lines = [(job := running.pop(future), _line_of(job, future)) for future in done]
            failed += [line for _, line in lines if isinstance(line, RunError)]
            begin(len(lines) if len(failed) < _MAX_FAILED else 0)
            yield from ((job, line) for job, line in lines if not isinstance(line, RunError))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for pid in filter(None, (worker.pid for worker in active_children())):
            os.kill(pid, signal.SIGINT)  # its run saves the step and ends
        raise
    if failed:
        raise failed[0]


def _line_of(job: Job, future: Future[Line]) -> Line | RunError:
    """Return the job's line, or its error once that is printed."""
    try:
        return future.result()
    except (Exception, SystemExit) as error:  # a run can fail with anything
        where = f"{job.task}, {job.arm}, seed {job.seed}"
        failure = RunError(f"{where}: {type(error).__name__}: {error}; see {job.folder / 'log.txt'}")
        failure.__cause__ = error
        print(f"studies: {failure}", file=sys.stderr, flush=True)
        return failure


def _begin_worker(parent: int, begun: Any, gpus: list[str]) -> None:
    """begun: number of workers before this one, shared by all."""
    with begun.get_lock():
        turn, begun.value = begun.value, begun.value + 1
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[turn % len(gpus)]
    _end_with_parent(parent)


def _end_with_parent(parent: int) -> None:
    """End this worker when its parent is gone, so that no run of a killed study keeps its folder's lock. A
    terminal's Ctrl-C reaches the parent alone, which passes it on."""
    os.setpgid(0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(measure: Any, sharing: int, job: Job) -> Line:
    """sharing: number of runs at the same time on the job's device, of which its seconds depend."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "log.txt", "a") as log, redirect_stdout(log), redirect_stderr(log):
        begin = time.perf_counter()
        results = measure(job)
        seconds = round(time.perf_counter() - begin, 2)
    facts = environment(job.config.model.device)
    return {
        "study": job.study,
        "task": job.task,
        "arm": job.arm,
        "seed": job.seed,
        "learning_rate": job.rate,
        **results,
        "digest": job.digest,
        **{name: facts[name] for name in ("commit", "is_dirty", "device")},
        "seconds": seconds,
        "workers": sharing,
    }
