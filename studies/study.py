"""A study as a value: a question, arms that differ in named fields of a RunConfig, seeds, and claims to test.

    run = (task, arm, seed, learning rate)          config = base, then the task's fields, then the arm's

If an arm has several learning rates, each is tried with `choice_seeds`, and the one with the best mean of
`choice_metric` is run with `seeds`. The two sets of seeds are disjoint: the luck of a rate when it was chosen
does not count.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qerl.config import RunConfig
from qerl.errors import UserError
from qerl.tracking.provenance import flatten
from studies.statistics import MAX_EXACT_PAIRS

Fields = Mapping[str, Any]
"""{"model.format": "bf16", "noise.schedule": "none"}: values by the dotted names of RunConfig's fields."""
DRAWN_BY_SEED = frozenset({"gaussian"})
"""Kinds of frozen weights that are drawn at random from the seed alone, so that all tasks share a draw."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    about: str = ""
    fields: Fields = dataclasses.field(default_factory=dict)
    weights: str = "plain"
    """The treatment of the checkpoint's weights: a name in `untrained.WEIGHTS`; training takes plain."""
    rates: tuple[float, ...] | None = None
    """Learning rates to choose from; None: the study's."""
    rate_of: str | None = None
    """Arm whose chosen rate this one takes; it then tries none of its own."""

    @property
    def title(self) -> str:
        """Return "NVFP4 + AQN" of the arm about "NVFP4 + AQN: QeRL"."""
        return self.about.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudyTask:
    name: str
    fields: Fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A key of a line's `final`, or of `analysis.DERIVED`."""

    key: str
    title: str
    about: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    x: str
    y: str
    title: str
    about: str = ""
    before: str | None = None
    """Key of `final` with the value before training: a point at 0. Steps then count those that are done."""
    x_label: str = ""
    """Empty: x itself."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """The picture of a study that docs/images/STUDY.svg has."""

    curve: Curve
    arms: tuple[str, ...]
    tabled: tuple[str, ...]
    """Arms of the table of its points, curve.md."""
    title: str
    x_title: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Claim(says="NVFP4 has a higher entropy than BF16", reverse="NVFP4 has a lower entropy than BF16",
    arm="nvfp4", against="bf16", metric="entropy", sign=1)"""

    says: str
    reverse: str
    """The true sentence if the claim is refuted."""
    arm: str
    against: str
    metric: str
    sign: int
    """1: arm is above; -1: arm is below."""
    family: str = ""
    """p is corrected over the claims of one family: those that answer one question."""
    side_results: tuple[tuple[str, str], ...] = ()
    """(task, metric) of results that a reader of this claim has to know too."""
    note: str = ""
    """Qualification to state with a verdict."""
    is_own: bool = False
    """True if the claim is ours in a study that `reproduces` another work."""
    is_headline: bool = False
    """True if the README names the claim even where it was not shown."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a study. `folder` is its own."""

    study: str
    task: str
    arm: str
    seed: int
    config: RunConfig
    weights: str
    folder: Path
    files: Path | None = None
    """Folder to read the model and the data set from, which the config names as the hub does."""

    @property
    def rate(self) -> float:
        return self.config.learn.learning_rate

    @property
    def digest(self) -> str:
        """Hash of what decides the numbers: a line with another digest is another run's. Fields at their
        default are left out, so that a field added to RunConfig later changes no digest."""
        default, resolved = (flatten(dataclasses.asdict(c)) for c in (RunConfig(), self.config))
        changed = {
            name: value for name, value in resolved.items() if name != "out" and value != default[name]
        }
        text = json.dumps([changed, self.weights], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    name: str
    question: str
    base: RunConfig
    tasks: tuple[StudyTask, ...]
    arms: tuple[Arm, ...]
    baseline: str
    """The arm that the tables compare the others with."""
    measure: Callable[[Job], dict[str, Any]]
    """Return one run's `final` and `curve`. Called in a process of its own, so a function of a module."""
    metrics: tuple[Metric, ...]
    """The page leads with the first."""
    curves: tuple[Curve, ...]
    claims: tuple[Claim, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rates: tuple[float, ...] = ()
    """Learning rates to choose from; empty: the config's."""
    choice_seeds: tuple[int, ...] = (1000, 1001)
    choice_metric: str = "accuracy_after"
    remarks: tuple[str, ...] = ()
    """Limits of the study, for its page."""
    caveat: str = ""
    """Limit of the verdicts, to state above them."""
    picture: Picture | None = None
    takes_from: str = ""
    """Study beside this one, with the same `measure`: its runs of an equal config are taken, not repeated."""
    reproduces: str = ""
    """Work whose claims are tested, but for those that are `is_own`; empty if all are ours. One of its claims
    that is supported is "reproduced"."""
    has_constant_weights: bool = False
    """True if seeds vary the problems and samples, but not the weights (except those `DRAWN_BY_SEED`)."""
    first_look_seeds: int | None = None
    """Number of seeds that were run and read before the others were added; None if none were added."""
    run_arms: tuple[str, ...] = ()
    """Arms to run now, empty for all. The page shows everything that has been run."""
    run_tasks: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)
    """Run the i-th, (i + n)-th, ... of these runs, i from 1: (i, n)."""
    run_only: tuple[tuple[str, int], ...] = ()
    """Arms and seeds to run now, in this order; empty: those above."""
    files: Path | None = None
    """Folder of local copies of the model and the data set; None: from the hub."""

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        used = {self.baseline, *(name for claim in self.claims for name in (claim.arm, claim.against))}
        metrics = {metric.key for metric in self.metrics}
        assert len(set(names)) == len(names), f"two arms of {self.name} have the same name"
        assert used <= set(names), f"{self.name} has no arms {used - set(names)}, but compares them"
        assert self.picture is None or {*self.picture.arms, *self.picture.tabled} <= set(names), self.picture
        assert {claim.metric for claim in self.claims} <= metrics, (
            f"{self.name}: the page does not show the metric of a claim"
        )
        if set(self.seeds) & set(self.choice_seeds):
            raise UserError(
                f"study {self.name}: seeds {self.choice_seeds} are reserved for choosing the learning rate"
            )
        if (num_pairs := len(self.tasks) * len(self.seeds)) > MAX_EXACT_PAIRS:
            raise UserError(
                f"study {self.name}: {len(self.seeds)} seeds of {len(self.tasks)} tasks make {num_pairs}"
                f" pairs, and the exact test takes at most {MAX_EXACT_PAIRS}"
            )

    def shares_weights_over_tasks(self, claim: Claim) -> bool:
        """True if an arm's weights are drawn by seed, so that the tasks of a seed are not independent."""
        weights = {arm.name: arm.weights for arm in self.arms}
        return bool({weights[claim.arm], weights[claim.against]} & DRAWN_BY_SEED)

    def runs_now(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs of the selected arms, tasks and part, those of a seed before any of the next; or
        the named jobs in their order."""
        arms, tasks, only = self.run_arms, self.run_tasks, self.run_only
        chosen = [job for job in jobs if not tasks or job.task in tasks]
        if only:
            named = (job for job in chosen if (job.arm, job.seed) in only)
            return sorted(named, key=lambda job: only.index((job.arm, job.seed)))
        first, step = self.part
        chosen = [job for job in chosen if not arms or job.arm in arms]
        return sorted(chosen, key=lambda job: job.seed)[first - 1 :: step]

    def rates_of(self, arm: Arm) -> tuple[float, ...]:
        return () if arm.rate_of else self.rates if arm.rates is None else arm.rates

    def job(self, task: StudyTask, arm: Arm, seed: int, rate: float | None, folder: Path) -> Job:
        """Return one run; rate None is the config's own."""
        config = with_fields(with_fields(self.base, task.fields), arm.fields)
        if rate is not None:
            config = with_fields(config, {"learn.learning_rate": rate})
        place = folder / task.name / arm.name / f"rate-{config.learn.learning_rate:g}" / f"seed-{seed}"
        return Job(
            study=self.name,
            task=task.name,
            arm=arm.name,
            seed=seed,
            config=with_fields(config, {"seed": seed, "out": str(place)}),
            weights=arm.weights,
            folder=place,
            files=self.files,
        )


def select(
    study: Study,
    *,
    seeds: int | None,
    arms: tuple[str, ...],
    tasks: tuple[str, ...],
    part: tuple[int, int] = (1, 1),
    only: tuple[tuple[str, int], ...] = (),
    files: Path | None = None,
) -> Study:
    """Return the study restricted to these arms and tasks (empty: all), to seeds 0 to `seeds` - 1 and to a
    part of these runs, or to `only`, arms and seeds; `files` has the model and the data set."""
    known_tasks, known_arms = [task.name for task in study.tasks], [arm.name for arm in study.arms]
    for kind, known, names in (
        ("task", known_tasks, tasks),
        ("arm", known_arms, (*arms, *(arm for arm, _ in only))),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"study {study.name} has no {kind} {name}; there are {', '.join(known)}")
    return dataclasses.replace(
        study,
        seeds=study.seeds if seeds is None else tuple(range(seeds)),
        run_arms=(study.baseline, *arms) if arms else (),
        run_tasks=tasks,
        part=part,
        run_only=only,
        files=files,
    )


def with_fields(config: RunConfig, fields: Fields) -> RunConfig:
    """Return the config with these fields changed; each part is checked once, with all its changes."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        part, _, field = name.rpartition(".")
        parts.setdefault(part, {})[field] = value
    changes = parts.pop("", {})
    for part, values in parts.items():
        changes[part] = _replace(getattr(config, part, None), values, f"{part}.")
    return _replace(config, changes, "")


def _replace(value: Any, changes: dict[str, Any], where: str) -> Any:
    known = getattr(value, "__dataclass_fields__", {})
    for name in changes:
        if name not in known:
            raise UserError(f"a config has no field {where}{name}")
    return dataclasses.replace(value, **changes)
