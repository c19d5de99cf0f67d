"""The command line: a function for each `qerl COMMAND`.

A mistake of the user's is one line and exit code 2; a run that cannot go on is one line and exit code 1.
`--debug` anywhere shows the traceback.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from qerl.cli.bench_options import (
    BenchDecodeOptions,
    BenchLearnOptions,
    BenchLinearOptions,
    BenchParityOptions,
    BenchStepOptions,
    BenchTileOptions,
    memory_options,
)
from qerl.config import AdapterConfig, ModelConfig, RunConfig
from qerl.config.options import (
    EvalOptions,
    ExportOptions,
    GenerateOptions,
    PlanOptions,
    QuantizeOptions,
    ReportOptions,
    ServeOptions,
    WatchOptions,
    of_run,
    paper_sampling,
)
from qerl.config.recipes import METHODS, PAPER, RECIPES, own
from qerl.config.renamed import RECIPES as FORMER_RECIPES
from qerl.config.renamed import refuse_former_command, refuse_former_names
from qerl.config.stored import read_config_file, read_run_config
from qerl.errors import RunError, UserError, near, redact
from qerl.eval.catalog import BENCHMARKS, parse_benchmarks

USAGE = """\
usage: qerl COMMAND ...

  qerl train RECIPE [--FIELD VALUE ...]   teach a model; recipes: {recipes},
                                          and one for each method (qerl train --help)
  qerl train --task FILE --reward FILE.py:FUNCTION [--model MODEL] [...]
                                          the same with rows and a reward of your own
  qerl import ADAPTER RECIPE [...]        train, going on from a PEFT adapter of any rank, alpha and targets
  qerl eval MODEL_OR_RUN [SET ...] [...]  pass@1, pass@k, majority and greedy accuracy on a run's own task or
                                          on sets: {sets}; SET=FILE reads a file
  qerl generate MODEL_OR_RUN [PROMPT]     an answer to a prompt (or to stdin), or a chat in the terminal
  qerl serve MODEL_OR_RUN [...]           OpenAI's completions and chat, on this machine's own address
  qerl plan MODEL --gpu-gb GB [...]       the memory of each part of a step, and what fits
  qerl quantize MODEL OUT [...]           write a 4-bit checkpoint that others load too
  qerl export RUN OUT --as FORM           what a run learned, for others: peft, merged, nvfp4, gguf-ready
  qerl report RUN [RUN ...]               one HTML page with curves and samples
  qerl watch RUN [RUN ...]                the same in the browser, live while the run goes on
  qerl bench linear|decode|learn|step|memory|parity|tile [...]
                                          how fast this GPU does it, beside others and beside its limit

Each command takes --help, and --debug to see a traceback."""
TRAIN_USAGE = """\
usage: qerl train RECIPE [--FIELD VALUE ...]

{paper}

The demo's task with one method each (docs/methods.md):

{methods}

qerl train RECIPE --help lists the fields with the recipe's values."""


BENCH_USAGE = """\
usage: qerl bench BENCHMARK [...]

  decode   tokens/s of a rollout, wall clock with prefill
  linear   the four products of a layer, beside other libraries'
  learn    tokens/s of the learner, its MFU and peak memory
  step     a whole step: sampling, learning, publishing
  memory   the peaks of steps in a row
  parity   how far the engine's logprobs are from the learner's
  tile     no rows: the table of tiles that packed products are cut into

Each takes --help. A row is printed and appended to bench/results for each case."""


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        command(arguments)
    except (UserError, RunError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"qerl: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def command(arguments: list[str]) -> None:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE.format(recipes=", ".join(PAPER), sets=", ".join(BENCHMARKS)))
    else:
        refuse_former_command(name)
        COMMANDS[_near(name, COMMANDS, "command")](rest)


def train(arguments: list[str], adapter: AdapterConfig | None = None) -> None:
    """`adapter`, if given, takes the place of the recipe's."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(TRAIN_USAGE.format(paper=_listed(PAPER), methods=_listed(METHODS)))
        return
    arguments = [_long(argument) for argument in arguments]
    refuse_former_names(arguments)
    names_rows = any(argument.partition("=")[0] == "--task.name" for argument in arguments)
    if not arguments or (arguments[0].startswith("-") and not names_rows):
        raise UserError(
            f"train needs a recipe or rows of your own: qerl train RECIPE, one of {', '.join(RECIPES)}, or"
            " qerl train --task FILE --reward FILE.py:FUNCTION"
        )
    if arguments[0].startswith("-"):
        name, recipe, rest = "--task FILE", own, arguments
    else:
        if arguments[0] in FORMER_RECIPES:
            raise UserError(f"recipe {arguments[0]} is now {FORMER_RECIPES[arguments[0]]}")
        name = _near(arguments[0], RECIPES, "recipe")
        recipe, rest = RECIPES[name], arguments[1:]
    default = recipe() if adapter is None else dataclasses.replace(recipe(), adapter=adapter)
    config = tyro.cli(RunConfig, default=default, args=rest, prog=f"qerl train {name}")
    from qerl.training.session import (
        train as run,  # torch and transformers take seconds that --help need not wait
    )

    result = run(config)
    if os.environ.get("RANK", "0") == "0":  # of several that torchrun started
        print(json.dumps(result))


def import_adapter(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: qerl import ADAPTER RECIPE [...]\n\nADAPTER is a PEFT folder; the rest is qerl train's")
        return
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            "import needs a PEFT adapter's folder: qerl import ADAPTER RECIPE [--FIELD VALUE ...]"
        )
    from qerl.models.peft_reader import adapter_config

    train(arguments[1:], adapter_config(arguments[0]))


_LONG = {
    "--model": "--model.path",
    "--task": "--task.name",
    "--reward": "--task.rewards",
    "--ray": "--ray.address",
}
"""Short names of what a run of one's own is made of."""


def _long(argument: str) -> str:
    """--task=FILE is --task.name=FILE."""
    name, equals, value = argument.partition("=")
    return _LONG.get(name, name) + equals + value


def _show_help(arguments: list[str], options: type, usage: str) -> None:
    """Where it is asked for before what the command is about is named."""
    if arguments[:1] in (["-h"], ["--help"]):
        tyro.cli(options, args=["--help"], prog=f"qerl {usage}")


def evaluate(arguments: list[str]) -> None:
    _show_help(arguments, EvalOptions, "eval MODEL_OR_RUN [SET ...]")
    named = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not named:
        raise UserError("eval needs a model or a run's folder: qerl eval MODEL_OR_RUN [SET ...]")
    source, sets = named[0], parse_benchmarks(named[1:])
    config = read_run_config(source)
    default = EvalOptions(model=ModelConfig(path=source)) if config is None else of_run(config)
    if sets:
        default = paper_sampling(default)
    options = tyro.cli(EvalOptions, default=default, args=arguments[len(named) :], prog=f"qerl eval {source}")
    from rich.console import Console

    from qerl.eval.run import run_benchmarks

    for result in run_benchmarks(source, config, options, sets, Console(stderr=True)):
        print(json.dumps(result))


def generate(arguments: list[str]) -> None:
    _show_help(arguments, GenerateOptions, "generate MODEL_OR_RUN [PROMPT]")
    named = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not 1 <= len(named) <= 2:
        raise UserError(
            "generate needs a model or a run's folder, and at most one prompt, in quotes:"
            " qerl generate MODEL_OR_RUN [PROMPT]"
        )
    source, config = named[0], read_run_config(named[0])
    default = GenerateOptions(model=ModelConfig(path=source))
    if config is not None:
        sample = config.sample
        default = GenerateOptions(
            model=config.model,
            system_prompt=config.task.system_prompt,
            temperature=sample.temperature,
            top_p=sample.top_p,
            max_tokens=sample.max_tokens,
        )
    options = tyro.cli(
        GenerateOptions, default=default, args=arguments[len(named) :], prog=f"qerl generate {source}"
    )
    from qerl.serve.chat import generate as answer

    answer(source, config, named[1] if len(named) == 2 else None, options)


def serve(arguments: list[str]) -> None:
    _show_help(arguments, ServeOptions, "serve MODEL_OR_RUN")
    if not arguments or arguments[0].startswith("-"):
        raise UserError("serve needs a model or a run's folder: qerl serve MODEL_OR_RUN")
    source, config = arguments[0], read_run_config(arguments[0])
    default = ServeOptions(model=ModelConfig(path=source))
    if config is not None:
        default = ServeOptions(model=config.model, system_prompt=config.task.system_prompt)
    options = tyro.cli(ServeOptions, default=default, args=arguments[1:], prog=f"qerl serve {source}")
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from qerl.serve.server import serve as run

    run(source, config, options)


def plan(arguments: list[str]) -> None:
    _show_help(arguments, PlanOptions, "plan MODEL")
    if not arguments or arguments[0].startswith("-"):
        raise UserError("plan needs a model or the name of a shape: qerl plan MODEL --gpu-gb GB")
    model = arguments[0]
    options = tyro.cli(PlanOptions, args=arguments[1:], prog=f"qerl plan {model}")
    from qerl.learner.plan import plan as table

    print(table(model, options.run, gpu_gb=options.gpu_gb, prompt_tokens=options.prompt_tokens))


def quantize(arguments: list[str]) -> None:
    options = tyro.cli(QuantizeOptions, args=arguments, prog="qerl quantize")
    from qerl.models.quantize import quantize as write

    write(options)
    print(options.out)


def export(arguments: list[str]) -> None:
    options = tyro.cli(ExportOptions, args=arguments, prog="qerl export")
    run_json = options.run / "run.json"
    if not run_json.is_file():
        raise UserError(f"{options.run}: is no run's folder, it has no run.json")
    from qerl.export import export as write

    write(read_config_file(run_json), options)
    print(options.out)


def report(arguments: list[str]) -> None:
    options = tyro.cli(ReportOptions, args=arguments, prog="qerl report")
    if not options.runs:
        raise UserError("report needs a run's folder: qerl report RUN [RUN ...]")
    from qerl.tracking.report import write_report

    out = options.out or options.runs[0] / "report.html"
    write_report(list(options.runs), out)
    print(out)


def watch(arguments: list[str]) -> None:
    options = tyro.cli(WatchOptions, args=arguments, prog="qerl watch")
    if not options.runs:
        raise UserError("watch needs a run's folder: qerl watch RUN [RUN ...]")
    from qerl.tracking.dashboard.server import watch as run

    run(options.runs, port=options.port, opens_browser=options.open)


def bench(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print(BENCH_USAGE)
        return
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"bench needs to know what to measure: qerl bench {' | '.join(BENCHES)}")
    name = _near(arguments[0], BENCHES, "benchmark")
    BENCHES[name](arguments[1:], f"qerl bench {name}")


def _bench_linear(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchLinearOptions, args=arguments, prog=prog)
    from qerl.cli.bench.linear import bench_linear

    bench_linear(options)


def _bench_tile(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchTileOptions, args=arguments, prog=prog)
    from qerl.cli.bench.tile import bench_tile

    bench_tile(options)


def _bench_decode(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchDecodeOptions, args=arguments, prog=prog)
    from qerl.cli.bench.decode import bench_decode

    bench_decode(options)


def _bench_learn(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchLearnOptions, args=arguments, prog=prog)
    from qerl.cli.bench.learn import bench_learn

    bench_learn(options)


def _bench_step(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchStepOptions, args=arguments, prog=prog)
    from qerl.cli.bench.step import bench_step

    bench_step(options)


def _bench_memory(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchStepOptions, default=memory_options(), args=arguments, prog=prog)
    from qerl.cli.bench.step import bench_memory

    bench_memory(options)


def _bench_parity(arguments: list[str], prog: str) -> None:
    options = tyro.cli(BenchParityOptions, args=arguments, prog=prog)
    from qerl.cli.bench.parity import bench_parity

    bench_parity(options)


BENCHES = {
    "linear": _bench_linear,
    "decode": _bench_decode,
    "learn": _bench_learn,
    "step": _bench_step,
    "memory": _bench_memory,
    "parity": _bench_parity,
    "tile": _bench_tile,
}
COMMANDS = {
    "train": train,
    "import": import_adapter,
    "eval": evaluate,
    "generate": generate,
    "serve": serve,
    "plan": plan,
    "quantize": quantize,
    "export": export,
    "report": report,
    "watch": watch,
    "bench": bench,
}


def _near(name: str, known: dict[str, Any], kind: str) -> str:
    if name in known:
        return name
    raise UserError(f"no {kind} {name}" + (near(name, known) or f"; there are {', '.join(known)}"))


def _listed(recipes: dict[str, Callable[[], RunConfig]]) -> str:
    """A line for each: its name, and the first line that it says of itself."""
    width = max(map(len, recipes)) + 2
    return "\n".join(f"  {name:{width}}{inspect.cleandoc(f.__doc__ or '')}" for name, f in recipes.items())
