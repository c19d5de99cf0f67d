"""Commands, recipes and options that the pages tell a reader to type exist; so do the sections they quote."""

import ast
import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS as OWN_BENCHMARKS
from qerl import config
from qerl.algo import loss
from qerl.algo.segment import Segments
from qerl.aqn import schedule
from qerl.bench import options as bench_options
from qerl.cli.bench import BENCHMARKS
from qerl.cli.check import CheckOptions
from qerl.cli.data import DataOptions
from qerl.cli.dpo import DpoOptions
from qerl.cli.main import COMMANDS
from qerl.cli.plan import DpoPlanOptions, PlanOptions, SftPlanOptions
from qerl.cli.report import ReportOptions
from qerl.cli.sft import SftOptions
from qerl.cli.watch import WatchOptions
from qerl.config import AlgoConfig, RunConfig, options
from qerl.config.recipes import RECIPES
from qerl.eval import catalog

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TAKEN = {
    "train": RunConfig,
    "sft": SftOptions,
    "dpo": DpoOptions,
    "distil": RunConfig,
    "check": CheckOptions,
    "data": DataOptions,
    "plan": PlanOptions,
    "plan sft": SftPlanOptions,
    "plan dpo": DpoPlanOptions,
    "eval": options.EvalOptions,
    "generate": options.GenerateOptions,
    "serve": options.ServeOptions,
    "tinker": options.TinkerOptions,
    "quantize": options.QuantizeOptions,
    "export": options.ExportOptions,
    "report": ReportOptions,
    "watch": WatchOptions,
    "decode": bench_options.BenchDecodeOptions,
    "rollout": bench_options.BenchRolloutOptions,
    "step": bench_options.BenchStepOptions,
    "learn": bench_options.BenchLearnOptions,
    "tune": bench_options.BenchTuneOptions,
}
SHORT = {
    "teacher",
    "model",
    "loss",
    "task",
    "reward",
    "answer_column",
    "ray",
    "env",
    "init_adapter",
    "as",
    "help",
    "help_all",
    "debug",
}
MAX_WORDS = 36_000  # of all pages of the site
PLACEHOLDERS = {"my_recipe", "RECIPE"}


def names(kind, prefix=""):
    for name, field in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(field):
            yield from names(field, "" if name in ("run", "sft", "dpo") else f"{prefix}{name}.")


def commands(text):
    """(command, its arguments) of each line of code that begins with qerl, and of qerl in backticks."""
    for line in re.findall(r"^ {4}qerl (.*)", text, flags=re.MULTILINE) + re.findall(r"`qerl ([^`]*)`", text):
        name, *arguments = line.partition("  #")[0].split()
        yield name, arguments


def benchmarks(text):
    """(benchmark, its arguments) of each line of code that runs one of this repository's own."""
    for line in re.findall(r"^ {4}python -m benchmarks (.*)", text, flags=re.MULTILINE):
        name, *arguments = line.partition("  #")[0].split()
        yield name, arguments


def unknown(kind, arguments):
    """Return the options that the dataclass does not have."""
    known = {*names(kind), *SHORT} | {f"no_{name}" for name in names(kind)}
    given = [a.removeprefix("--").replace("-", "_") for a in arguments if a.startswith("--")]
    return [option for option in given if option not in known]


def options_of(name, arguments):
    key = arguments[0] if name == "bench" else " ".join((name, *arguments[:1]))
    return unknown(TAKEN[key if key in TAKEN else name], arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_exists(page):
    for name, arguments in commands(page.read_text()):
        said = f"qerl {name} {' '.join(arguments)}"
        if name.isupper():
            continue
        assert name in COMMANDS, said
        if name == "train" and arguments and not arguments[0].startswith("-"):
            assert arguments[0] in RECIPES or arguments[0] in PLACEHOLDERS, said
        if name == "bench" and (not arguments or arguments[0] not in BENCHMARKS):
            continue
        assert not options_of(name, arguments), said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_benchmarks_of_a_page_exist(page):
    for name, arguments in benchmarks(page.read_text()):
        assert name in OWN_BENCHMARKS and not unknown(OWN_BENCHMARKS[name][0], arguments), (name, arguments)


def lines_that_are_not_code(text: str) -> list[str]:
    """Return the lines that are meant as code but are rendered as text, as they are not indented."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    above_code = re.findall(r"^(?![-|] |\d\. |::: )(\S.*)\n {4}\S", text, flags=re.MULTILINE)
    starts = rf"qerl (?:{'|'.join(COMMANDS)})|make [a-z]+(?:  |$)|python -m \w+|pip install|torchrun -"
    return above_code + re.findall(rf"^(?:{starts}).*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_is_a_line_of_code(page):
    assert not lines_that_are_not_code(page.read_text())


@pytest.mark.parametrize(
    "text", ["Run\n    qerl watch x", "\nqerl train demo  # the demo\n", "\nmake demo\n    make test\n"]
)
def test_a_command_that_is_not_indented_is_found(text):
    assert lines_that_are_not_code(text)


def test_every_part_of_a_config_is_on_its_page():
    listed = re.findall(
        r"^::: qerl\.config\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(name for name in vars(config) if name.endswith("Config"))


def test_only_the_api_page_has_directives_that_a_code_host_does_not_render():
    assert not [page.name for page in PAGES if "--8<--" in page.read_text()]
    assert [p.name for p in PAGES if re.search(r"^::: ", p.read_text(), re.M)] == ["api.md"]


def test_the_page_of_agents_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "agent_openai.py").read_text().strip()
    assert f"```python\n{example}\n```" in (ROOT / "docs" / "agent.md").read_text()


def test_the_site_has_a_size_that_a_person_can_read():
    assert len(PAGES[1:]) <= 33
    assert sum(len(page.read_text().split()) for page in PAGES[1:]) <= MAX_WORDS


def test_each_page_is_once_in_the_navigation_and_once_in_llms_txt():
    pages = sorted(page.stem for page in PAGES[1:])
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    assert sorted(re.findall(r": ([\w-]+)\.md$", nav, flags=re.MULTILINE)) == pages
    text = (ROOT / "docs" / "llms.txt").read_text()
    in_text = re.findall(r"^- \[[^]]+\]\(([\w-]+)\.html\)", text, flags=re.MULTILINE)
    assert sorted([*in_text, "index"]) == pages


def test_the_page_of_the_config_has_every_part_of_it():
    import qerl.config

    parts = {name for name in dir(qerl.config) if name.endswith("Config")}
    assert parts == set(
        re.findall(r"^::: qerl\.config\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    )


def logged_metrics() -> set[str]:
    """Return the names of all metrics that the source logs; pass_at_K stands for every power of two."""
    metrics, rollout, branching = (
        "learner/metrics.py",
        "training/rollouts/rollout.py",
        "training/rollouts/branching.py",
    )
    held_out = keys_of("training/rollouts/evaluation.py", "held_out_figures")
    imitated = keys_of("training/sft.py", "held_out")
    preferred = keys_of("algo/preference.py", "preference_metrics", "with_margin")
    preferred |= keys_of("training/dpo.py", "learn")
    names = {
        *keys_of(metrics, "sampling_metrics", "update_metrics"),
        *keys_of(rollout, "sample", "rollout_metrics", "accuracy_metrics"),
        *keys_of(rollout, "multi_turn_metrics", "agent_metrics"),
        *keys_of(branching, "sample", "_branch_metrics"),
        *keys_of("aqn/aqn.py", "observe"),
        *keys_of("learner/learner.py", "step"),
        *keys_of("models/trained_weight.py", "weight_shifts"),
        *keys_of("learner/distributed.py", "take_traffic"),
        *keys_of("training/engines/multi_turn.py", "take_metrics"),
        *keys_of("serve/agents/rollout.py", "take_metrics"),
        *keys_of("training/loop.py", "run"),
        *keys_of("training/session.py", "after_update"),
        *(f"eval_{name}" for name in held_out),
        *(f"eval_float_{name}" for name in held_out | keys_of("training/float_evaluation.py", "prices")),
        *keys_of("training/sft.py", "step"),
        *(each for name in imitated | preferred for each in (name, f"eval_{name}")),
        *keys_of("training/rollouts/distil.py", "sample"),
        *keys_of("training/rollouts/partial.py", "_metrics", "_cache_metrics"),
        *keys_of("training/rollouts/overlap.py", "metrics"),
        *keys_of("tasks/reward_calls.py", "_split", "_of_group"),
        *keys_of("tracking/journal.py", "_record", "step"),
        *keys_of("training/run_checkpoints.py", "_take"),
        *ray_metrics(),
        *(f"{phase}_s" for phase in phases()),
    }
    return names - {"step"}


def keys_of(file: str, *functions: str) -> set[str]:
    """Return the keys of dict literals, metrics["key"] = ..., add(key=...) and carry(key=...) in functions.

    A key made of a loop's variable stands for one key per constant that the loop is over.
    """
    tree = ast.parse((ROOT / "src" / "qerl" / file).read_text())
    defined = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    assert {node.name for node in defined} == set(functions), f"{file}: {functions}"
    return {key for node in defined for key in keys_in(node, {})}


def keys_in(node: ast.AST, values: dict[str, list[str]]) -> Iterator[str]:
    """values: the constants of each variable of the loops around the node."""
    match node:
        case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=elements)):
            values = values | {name: [e.value for e in elements if isinstance(e, ast.Constant)]}
        case ast.Dict(keys=keys):
            yield from (key for each in keys for key in expanded(each, values))
        case ast.DictComp(key=key):
            yield from expanded(key, values)
        case ast.Subscript(slice=key, ctx=ast.Store()):
            yield from expanded(key, values)
        case ast.Call(func=ast.Attribute(attr="add" | "carry"), keywords=keywords):
            yield from (keyword.arg for keyword in keywords if keyword.arg)
        case ast.Call(func=ast.Attribute(attr="setdefault"), args=[key, *_]):
            yield from expanded(key, values)
    for child in ast.iter_child_nodes(node):
        yield from keys_in(child, values)


def expanded(key: ast.expr | None, values: dict[str, list[str]]) -> list[str]:
    """Return the keys that a constant, a loop's variable or an f-string of one stands for."""
    match key:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Name(id=name):
            return values.get(name, [])
        case ast.JoinedStr(values=parts):
            (name,) = [part.value.id for part in parts if isinstance(part, ast.FormattedValue)]
            if name == "k":
                return ["pass_at_K"]
            return [
                "".join(part.value if isinstance(part, ast.Constant) else value for part in parts)
                for value in values.get(name, [])
            ]
    return []


def ray_metrics() -> list[str]:
    source = (ROOT / "src" / "qerl" / "training" / "ray_engine.py").read_text()
    (names,) = re.findall(r"named = (\(.*?\))", source)
    return list(ast.literal_eval(names))


def phases() -> set[str]:
    """Return the names of all timed phases of a step."""
    files = (ROOT / "src" / "qerl" / "training").rglob("*.py")
    return {name for file in files for name in re.findall(r'\.span\("(\w+)"\)', file.read_text())}


def documented_metrics() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    return {named(key) for row in rows for key in re.findall(r"`([\w/]+)`", row) if "/NAME" not in key}


def named(key: str) -> str:
    return re.sub(r"^pass_at_\d+$", "pass_at_K", key)


def test_every_logged_metric_has_a_row_and_every_row_is_logged():
    assert logged_metrics() == documented_metrics()


def test_a_stored_run_logs_only_documented_metrics():
    lines = (ROOT / "tests" / "data" / "stored_run" / "metrics.jsonl").read_text().splitlines()
    names = {named(key) for line in lines for key in json.loads(line)}
    assert names - {"step", "crc32"} <= documented_metrics()


def test_the_examples_of_extend_work(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "extend.md").read_text()
    monkeypatch.setattr(loss, "LOSSES", dict(loss.LOSSES))
    monkeypatch.setattr(schedule, "SCHEDULES", dict(schedule.SCHEDULES))
    monkeypatch.setattr(catalog, "BENCHMARKS", dict(catalog.BENCHMARKS))
    found = {}
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(example, "extend.md", "exec"), found)

    logprob_T, advantage_T = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])
    spans = Segments.of([1, 1])
    objective = loss.LOSSES["reinforce"].objective
    assert objective(logprob_T, logprob_T, advantage_T, spans, AlgoConfig())[0].tolist() == [1.0, -2.0]

    middle = {"num_steps": 4, "num_stages": 4, "sigma_start": 0.8, "sigma_end": 0.4}
    assert schedule.sigma(2, schedule="square", **middle) == pytest.approx(0.7)  # half way, squared

    weight_NK = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    decoded_NK = found["E5M2"].encode(weight_NK).decode()
    assert (decoded_NK - weight_NK).norm() / weight_NK.norm() < 0.06  # 2 bits of mantissa: 0.051 here
    assert found["E5M2"].encode(torch.zeros(2, 4)).decode().tolist() == [[0.0] * 4] * 2

    gate_TF, up_TF = weight_NK[:32], weight_NK[32:]
    torch.testing.assert_close(found["swiglu"](gate_TF, up_TF).double(), found["reference"](gate_TF, up_TF))

    logger = found["CsvLogger"](tmp_path, {}, run_id=None, first_step=0)
    logger.log(0, {"metric/reward": 0.5}, 0.0)
    logger.finish(None)
    assert (tmp_path / "metrics.csv").read_text().split() == ["0,metric/reward,0.5"]
    assert "aime26" in catalog.BENCHMARKS
