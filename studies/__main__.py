"""Run a study or write its page again: `python -m studies run NAME` or `python -m studies pages [NAME ...]`.
`python -m studies mixture` trains a small mixture of experts, `select` chooses the rows of math_exploration.

Run it from a checkout of the repository. `run` executes the runs that have no line in OUT/NAME/results.jsonl
yet and then writes the page; `pages` writes the pages, studies/findings.md and studies/real.md from the
stored lines, the pictures in docs/images, and the paragraphs of README.md and docs/ that quote them
(benchmarks/pages.py). It runs nothing.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import tyro

from qerl.config.check import check_positive
from qerl.errors import RunError, UserError, did_you_mean
from studies.catalog import STUDIES
from studies.findings import with_results, write_findings, write_pictures
from studies.real_findings import write_real_findings
from studies.run import rewrite_pages, run_study
from studies.select_problems import SelectOptions, select_problems
from studies.small_mixture import MixtureOptions, train_mixture
from studies.study import select

USAGE = f"""\
usage: python -m studies run NAME [--workers N] [--seeds N] [--arms A B] [--tasks T]
                                  [--part I/N] [--runs ARM:SEED ...] [--files DIR] [--out DIR]
       python -m studies pages [NAME ...]
       python -m studies mixture [--num-steps N] [--seed N] [--out DIR]
       python -m studies select --files DIR [--num-train N] [--num-test N]

Train the arms of a study with several seeds, and test its claims (docs/studies.md).

  run      Run what OUT/NAME/results.jsonl does not have yet, then write the study's page
  pages    Write the pages, pictures, studies/findings.md, real.md and what README.md quotes of them again
           from the stored results
  mixture  Train a small mixture of experts from scratch, then with rewards
  select   Sample from the untrained model to choose the problems of math_exploration

studies: {", ".join(STUDIES)}

Run 'python -m studies run NAME --help' for the options."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    out: Path = Path("studies")
    """Folder of all studies: results and page go to OUT/NAME. Runs with a line there are not repeated."""

    seeds: int | None = None
    """Number of seeds of each arm, from 0 on. Default: the study's own number."""

    workers: int = 1
    """Number of runs at the same time, each in its own process. On a GPU they share the memory."""

    arms: tuple[str, ...] = ()
    """Run only these arms and the baseline. Default: all. A later call runs the rest."""

    tasks: tuple[str, ...] = ()
    """Run only these tasks. Default: all."""

    part: str = "1/1"
    """I/N: run the I-th of every N of these runs, from 1. N machines share a study so; the lines of their
    choice.jsonl belong in one file, as do those of their results.jsonl. Arms whose rate is chosen are left
    out until choice.jsonl has all trials: run the study once more."""

    runs: tuple[str, ...] = ()
    """ARM:SEED ...: run these alone, in this order, without --seeds, --arms and --part."""

    files: Path | None = None
    """Folder with copies of the model and the data set of a study of real models. Default: the hub."""

    def __post_init__(self):
        check_positive(self, "seeds", "workers")
        parse_part(self.part)
        parse_runs(self.runs)
        if self.runs and (self.arms or self.seeds is not None or self.part != "1/1"):
            raise UserError("runs names all that is run: leave out --seeds, --arms and --part")


def parse_runs(texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """parse_runs(("bf16:3",)) is (("bf16", 3),)."""
    pairs = [text.rpartition(":") for text in texts]
    for text, (arm, _, seed) in zip(texts, pairs, strict=True):
        if not (arm and seed.isdecimal()):
            raise UserError(f"runs must be ARM:SEED, such as bf16:0, got {text}")
    return tuple((arm, int(seed)) for arm, _, seed in pairs)


def parse_part(text: str) -> tuple[int, int]:
    """parse_part("2/3") is (2, 3)."""
    first, slash, last = text.partition("/")
    if slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise UserError(f"part: {text} must be I/N, such as 1/2, with I from 1 to N")


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    command, *rest = arguments
    if command == "run":
        _run(rest)
    elif command == "pages":
        _write_pages(Path("studies"), [_known(name) for name in rest])
    elif command == "mixture":
        options = tyro.cli(MixtureOptions, args=rest, prog="python -m studies mixture")
        print(json.dumps(train_mixture(options)))
    elif command == "select":
        select_problems(tyro.cli(SelectOptions, args=rest, prog="python -m studies select"))
    else:
        raise UserError(f"no command {command}; use run, pages, mixture or select")


def _write_pages(folder: Path, names: list[str]) -> None:
    # Here, so that studies run where a machine has src/ and studies/ alone.
    from benchmarks.pages import TableOptions, write_tables
    from benchmarks.pictures import IMAGES

    for name in names or with_results(folder):
        print(rewrite_pages(STUDIES[name](), folder / name))
    for path in write_pictures(folder, IMAGES):
        print(path)
    print(write_findings(folder))
    print(write_real_findings(folder))
    write_tables(TableOptions(write=True))


def _run(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        tyro.cli(RunOptions, args=["--help"], prog="python -m studies run NAME")
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"run needs the name of a study, one of {', '.join(STUDIES)}")
    name = _known(arguments[0])
    options = tyro.cli(RunOptions, args=arguments[1:], prog=f"python -m studies run {name}")
    study = select(
        STUDIES[name](),
        seeds=options.seeds,
        arms=options.arms,
        tasks=options.tasks,
        part=parse_part(options.part),
        only=parse_runs(options.runs),
        files=options.files,
    )
    print(run_study(study, options.out / name, workers=options.workers))


def _known(name: str) -> str:
    if name not in STUDIES:
        raise UserError(
            f"no study {name}" + (did_you_mean(name, STUDIES) or f"; there are {', '.join(STUDIES)}")
        )
    return name


def _exit_code(arguments: list[str]) -> int:
    try:
        main(arguments)
    except (UserError, RunError) as error:
        print(f"studies: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(_exit_code(sys.argv[1:]))
