"""Each mistake is one line that says what and where, and exit code 2."""

import importlib.metadata
import json
import re
import runpy
import struct
import sys

import pytest
import tyro

import tiny_run
from qerl import train
from qerl.bench.options import BenchStepOptions
from qerl.cli import main
from qerl.cli.arguments import check_options
from qerl.cli.plan import PlanOptions
from qerl.config import RunConfig
from qerl.config.options import EvalOptions, ServeOptions
from qerl.config.recipes import RECIPES
from qerl.errors import UserError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The tiny model with linears as wide as NF4's blocks."""
    folder = tiny_run.write_model(tmp_path_factory.mktemp("wide"), ff_width=128)
    tiny_run.write_task(folder)
    return folder


def qerl(monkeypatch, *arguments):
    """Runs the command in this process; the exit code, 0 if it returns."""
    monkeypatch.setattr(sys, "argv", ["qerl", *map(str, arguments)])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code
    return 0


def copied(files, folder, **changes):
    """The tiny model in another folder, with fields of its config.json changed."""
    for path in files.iterdir():
        if path.is_file():  # not __pycache__
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_one_line(capsys, code, *parts):
    *first, error = capsys.readouterr().err.splitlines()
    assert code == 2
    assert error.startswith("qerl: ") and "Traceback" not in error
    assert not first or (len(first) == 1 and first[0].startswith(("generate ", "plan ", "quantize ")))
    for part in parts:
        assert part in error


def test_help_has_a_line_for_each_command(monkeypatch, capsys):
    assert qerl(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    for name in main.COMMANDS:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line) <= 100 and line.split()[1][0].isupper()


def test_help_and_mistakes_do_not_wait_for_torch():
    code = "import sys, qerl.cli.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    process = tiny_run.launched("-c", code)
    assert process.communicate() == ("[]\n", "")


def test_a_run_imports_neither_modelling_code_of_transformers_nor_torch_s_compiler(files, tmp_path):
    """Each takes seconds of every start."""
    costly = {"transformers.activations", "transformers.modeling_utils", "torch._dynamo", "sympy"}
    code = f"import sys; from qerl.cli.main import main; main(); print({costly} & sys.modules.keys())"
    given = [*tiny_run.options(files, tmp_path / "run"), "--num-steps", "1"]
    process = tiny_run.launched("-c", code, "train", "demo_long", *given)
    assert process.communicate(timeout=120)[0].splitlines()[-1] == "set()"


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qerl", "--help"])
    runpy.run_module("qerl", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: qerl COMMAND")


def test_train_lists_each_recipe_with_what_it_is_in_a_line(monkeypatch, capsys):
    assert qerl(monkeypatch, "train", "--help-all") == 0
    shown = capsys.readouterr().out.splitlines()
    for name, recipe in RECIPES.items():
        (line,) = [line for line in shown if line.startswith(f"  {name} ")]
        assert line.split(maxsplit=1)[1] == recipe.__doc__ and len(line) <= 110


def test_native_windows_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    for attempt in (lambda: main.command(["train", "demo"]), lambda: train(RunConfig())):
        with pytest.raises(UserError, match="on Windows install it in WSL 2"):
            attempt()


@pytest.mark.parametrize(("command", "usage"), [(name, f"usage: qerl {name}") for name in main.COMMANDS])
def test_every_command_has_help_without_arguments(monkeypatch, capsys, command, usage):
    assert qerl(monkeypatch, command, "--help") == 0
    assert usage in capsys.readouterr().out


def test_eval_lists_its_options_without_a_model(monkeypatch, capsys):
    assert qerl(monkeypatch, "eval", "--help") == 0
    shown = capsys.readouterr().out
    assert "MODEL_OR_RUN [BENCHMARK | FILE ...]" in shown and "--num-samples" in shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trane", "demo"], ["unknown command trane", "did you mean train"]),
        (["train"], ["train needs a recipe", "demo"]),
        (["train", "--model", "m"], ["train needs a recipe", "--task FILE"]),
        (["train", "--task", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["train", "--task=none.jsonl", "--model=smollm2-135m-instruct"], ["none.jsonl", "no such file"]),
        (["train", "--task", "no.jsonl", "--reward", "no.py:f"], ["task.name no.jsonl: no such file"]),
        (["train", "--task", "no.jsonl", "--agent", "no.py:f"], ["task.name no.jsonl: no such file"]),
        (["train", "demo", "--model=/no/such/model"], ["/no/such/model", "no such folder or file"]),
        (
            ["train", "my.jsonl"],
            ["my.jsonl is a file, not a recipe; to use its rows: qerl train --task my.jsonl"],
        ),
        (["check", "my.csv"], ["my.csv is a file, not a recipe; to use its rows: qerl check --task my.csv"]),
        (["train", "demo", "--num-steps", "ten"], ["--num-steps must be an integer, got 'ten'; --help"]),
        (["train", "demo", "--seed=0", "--learn.adam-epsilon=x"], ["adam-epsilon must be a number, got 'x'"]),
        (["sft", "--data", "no.jsonl"], ["data no.jsonl: no such file"]),
        (["data", "no.jsonl"], ["qerl: no.jsonl: no such file"]),
        (["train", "dmo"], ["unknown recipe dmo", "did you mean demo"]),
        (["train", "demo", "gsm8k"], ["takes one recipe", "got demo gsm8k"]),
        (["train", "demo", "--learn.learning-rate", "fast"], ["--learn.learning-rate", "'fast'", "--help"]),
        (["train", "demo", "--model.format", "int3"], ["'int3'", "--model.format", "'nvfp4', 'mxfp4'"]),
        (["train", "demo", "--num-steps"], ["qerl: --num-steps needs a value; --help"]),
        (["train", "demo", "--num-steps", "4", "5"], ["Unrecognized options: 5"]),
        (["export", "runs/demo"], ["qerl: export needs OUT (folder to write); --help"]),
        (["quantize"], ["quantize needs MODEL (a folder with ", ") and OUT (folder to write); --help"]),
        (["train", "demo", "--num-generations", "1"], ["num_generations must be at least 2", "got 1"]),
        (["train", "demo", "--model.path", "/no/such/model"], ["/no/such/model", "no such folder or file"]),
        (["train", "demo", "--task.rewards", "nowhere.py:f"], ["task.rewards nowhere.py:f: no such file"]),
        (["train", "demo", "--task.rewards", "json:nothing"], ["json", "nothing"]),
        (["train", "demo", "--task.gym", "basic_arithmetc"], ["basic_arithmetc", "basic_arithmetic"]),
        (["train", "demo", "--init-adapter", "/no/adapter"], ["/no/adapter: no such folder"]),
        (["train", "demo", "--init-adapter"], ["--init-adapter needs a value"]),
        (["import", "/no/adapter", "demo"], ["unknown command import", "did you mean report or export?"]),
        (["train", "hints"], ["unknown recipe hints"]),
        (["train", "demo", "--learn.recompute", "layer"], ["unknown option --learn.recompute"]),
        (["plan", "m", "--gpu-gb", "24", "--num-samples=8"], ["unknown option --num-samples"]),
        (["plan", "m", "--gpu-gb", "24", "--engine.kv-gb", "8"], ["did you mean --engine.kv-cache-gb"]),
        (["eval", "m", "--right-from", "0.5"], ["unknown option --right-from; --help lists them"]),
        (["eval", "m", "--task.system=x"], ["did you mean --task.system-prompt?"]),
        (["generate", "m", "--system", "x"], ["did you mean --system-prompt?"]),
        (["serve", "m", "--system=x"], ["did you mean --system-prompt?"]),
        (["serve", "m", "--model.head", "fp8"], ["did you mean --model.head-format?"]),
        (["sft", "--look-tokens", "5"], ["did you mean --eval-max-tokens"]),
        (["sft", "--learn.optimizer=adamw"], ["did you mean --learn.optim"]),
        (["data", "x.jsonl", "--task.system=x"], ["did you mean --task.system-prompt?"]),
        (["eval"], ["eval needs a model"]),
        (["generate"], ["generate needs a model", "at most one prompt"]),
        (["generate", "m", "what", "now"], ["generate needs a model", "in quotes"]),
        (["generate", "/no/model", "hello"], ["/no/model", "no such folder or file"]),
        (["generate", "owner/m", " "], ["the prompt is empty"]),
        (["generate", "m", "hello", "--top-p", "0"], ["top_p", "got 0"]),
        (["generate", "m", "hello", "--max-tokens", "0"], ["max_tokens", "got 0"]),
        (["serve"], ["serve needs one model"]),
        (["serve", "/no/model", "--port", "0"], ["/no/model", "no such folder or file"]),
        (["serve", "m", "--port", "70000"], ["port", "70000"]),
        (["serve", "owner/m", "--host", "0.0.0.0"], ["0.0.0.0", "--api-key-file"]),
        (["serve", "owner/m", "--api-key-file", "none"], ["api_key_file none", "No such file"]),
        (["report"], ["report needs the folder of a run"]),
        (["report", "/no/run"], ["/no/run"]),
        (["watch"], ["watch needs the folder of a run"]),
        (["watch", "/no/run", "--port", "70000"], ["port must lie in 0 to 65535", "70000"]),
        (["quantize", "/no/model", "out"], ["/no/model"]),
        (
            ["quantize", "m", "out", "--calibrate", "awq"],
            ["--calibrate awq or gptq and --data FILE must be given together"],
        ),
        (
            ["quantize", "m", "out", "--data", "t"],
            ["--calibrate awq or gptq and --data FILE must be given together"],
        ),
        (["plan", "qwen2.5-7b", "--gpu-gb", "nan"], ["gpu_gb must be finite, got nan"]),
        (["study", "growth"], ["unknown command study"]),
        (["plan", "qwen2.5-8b", "--gpu-gb", "24"], ["qwen2.5-8b", "did you mean qwen2.5-7b"]),
        (["plan", "qwen2.5-8b"], ["qwen2.5-8b", "did you mean qwen2.5-7b"]),
        (["plan", "dmeo"], ["dmeo", "did you mean demo"]),
        (["plan", "qwen2.5-7b", "--gpu-gb", "a"], ["--gpu-gb must be a number or None, got 'a'"]),
        (
            ["train", "--task", "rows.txt", "--reward", "numeric"],
            ["rows.txt: no such file; a file of rows ends in"],
        ),
        (
            ["bench", "decode", "--shape", "qwen2.5-8b"],
            ["unknown shape qwen2.5-8b", "did you mean qwen2.5-7b"],
        ),
        (["train", "demo", "--reward", "a.py:f", "--reward=b.py:f"], ["given twice", "--reward A B"]),
        (
            ["train", "demo", "--task.rewards", "exact", "--reward=a.py:f"],
            ["--task.rewards are the same option"],
        ),
        (
            ["check", "demo", "--model=a", "--model.path", "b"],
            ["--model and --model.path are the same option"],
        ),
        (["sft", "--model=a", "--model.path", "b"], ["--model and --model.path are the same option"]),
        (["eval", "m", "r.jsonl", "--reward", "exact", "--reward", "numeric"], ["given twice"]),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    assert_one_line(capsys, qerl(monkeypatch, *arguments), *parts)


def test_serve_says_what_is_not_installed(monkeypatch, capsys, files):
    from importlib import util

    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert_one_line(capsys, qerl(monkeypatch, "serve", files), "serve needs uvicorn", "pip install uvicorn")


def test_an_unknown_option_suggests_the_near_one(monkeypatch, capsys):
    assert qerl(monkeypatch, "train", "demo", "--learn.learning-rat", "1e-4") == 2
    assert "--learn.learning-rate" in capsys.readouterr().err


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(monkeypatch, capsys, files, tmp_path):
    folder = copied(files, tmp_path, architectures=["UnknownForCausalLM"])
    code = qerl(monkeypatch, "train", "demo_long", *tiny_run.options(folder, tmp_path / "run"))
    assert_one_line(capsys, code, "UnknownForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("kept_bytes", [4, 200, 20_000])
def test_a_truncated_checkpoint_is_named(monkeypatch, capsys, files, tmp_path, kept_bytes):
    folder = copied(files, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    code = qerl(monkeypatch, "train", "demo_long", *tiny_run.options(folder, tmp_path / "run"))
    assert_one_line(capsys, code, "model.safetensors")


def test_a_header_that_lies_about_its_length_is_named(monkeypatch, capsys, files, tmp_path):
    folder = copied(files, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 1 << 60) + weights.read_bytes()[8:])
    code = qerl(monkeypatch, "train", "demo_long", *tiny_run.options(folder, tmp_path / "run"))
    assert_one_line(capsys, code, "model.safetensors")


def test_an_empty_data_set_is_named(monkeypatch, capsys, files, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    given = [*tiny_run.options(files, tmp_path / "run"), "--task.name", tmp_path / "empty.jsonl"]
    assert_one_line(capsys, qerl(monkeypatch, "train", "demo_long", *given), "empty.jsonl")


def test_a_file_without_a_readable_row_is_named_with_its_first_fault(monkeypatch, capsys, files, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\nprompt\nanswer\n")
    given = [*tiny_run.options(files, tmp_path / "run"), "--task.name", tmp_path / "rows.jsonl"]
    code = qerl(monkeypatch, "train", "demo_long", *given)
    assert_one_line(capsys, code, "rows.jsonl: none of its 2 rows can be read (line 2: invalid JSON")


def test_a_rank_beyond_that_of_every_weight_is_refused_and_leaves_no_folder(
    monkeypatch, capsys, files, tmp_path
):
    given = [*tiny_run.options(files, tmp_path / "run"), "--adapter.rank", "100000"]
    (tmp_path / "run").mkdir()  # what was there stays
    for out in "run", "new/run":
        code = qerl(monkeypatch, "train", "demo_long", *given, "--out", tmp_path / out)
        assert_one_line(capsys, code, "adapter.rank must be at most", "100000")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_a_missing_column_is_named_with_those_there(monkeypatch, capsys, files, tmp_path):
    given = [*tiny_run.options(files, tmp_path / "run"), "--task.prompt-column", "question"]
    given += ["--task.template", "{question}"]
    assert_one_line(capsys, qerl(monkeypatch, "train", "demo_long", *given), "question", "prompt")


def test_training_on_rows_and_a_reward_of_ones_own_needs_no_recipe(monkeypatch, capsys, files, tmp_path):
    given = ["--task", files / "sums.jsonl", "--reward", f"{files / 'even.py'}:even", "--model", files]
    given += ["--out", tmp_path / "run", "--model.dtype", "fp32", "--num-steps", 2, "--noise.num-stages", 2]
    given += [
        "--num-prompts",
        4,
        "--num-generations",
        4,
        "--sample.max-tokens",
        4,
        "--evaluate.num-prompts",
        4,
    ]
    assert qerl(monkeypatch, "train", *given) == 0
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert config["task"]["rewards"] == [f"{files / 'even.py'}:even"] and config["model"]["path"] == str(
        files
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["num_failed_rewards"] == 0 for row in rows)


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(UserError, match="unknown recipe dmo"):
        qerl(monkeypatch, "train", "dmo", "--debug")


def test_eval_of_a_model_prints_one_line_of_json(monkeypatch, capsys, files, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = ["--task.name", files / "sums.jsonl", "--task.template", "{prompt}", "--task.num-held-out", 8]
    given += ["--task.rewards", f"{files / 'even.py'}:even", "--max-tokens", 4, "--num-prompts", 6]
    given += ["--success-threshold", 1]
    assert qerl(monkeypatch, "eval", files, "--model.dtype", "fp32", *given) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_prompts"] == 6 and set(result) >= {
        "pass@1",
        "pass@1_error",
        "pass@2",
        "pass@4",
        "greedy",
    }
    assert 0 < result["pass@1"] < 1 and result["pass@4"] >= result["pass@2"] >= result["pass@1"]


def test_a_run_with_a_packed_head_samples_from_what_it_learns(monkeypatch, capsys, tmp_path):
    folder = tiny_run.write_model(tmp_path / "model", width=128, vocab_size=320)
    tiny_run.write_task(folder)
    mismatches, heads = {}, ("bf16", "fp8", "nvfp4")
    for name in heads:
        given = [*tiny_run.options(folder, tmp_path / name), "--num-steps", "3", "--model.head-format", name]
        given += ["--noise.schedule", "none", "--evaluate.num-prompts", "0"]
        assert qerl(monkeypatch, "train", "demo_long", *given) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        mismatches[name] = [json.loads(line)["mismatch_max"] for line in lines]
        config = json.loads((tmp_path / name / "run.json").read_text())["config"]
        assert config["model"]["head_format"] == name
    assert all(len(found) == 3 and max(found) < 1e-5 for found in mismatches.values())
    assert len({(tmp_path / name / "samples.jsonl").read_text() for name in heads}) == 3


@pytest.mark.parametrize(
    ("format", "kind"),
    [(format, "lora") for format in ("nvfp4", "mxfp4", "nf4", "fp8", "fp8-flow", "int8", "bf16")]
    + [("bf16", "full")],
)
def test_every_base_runs_the_same_loop(monkeypatch, capsys, wide, tmp_path, format, kind):
    out, chosen = tmp_path / "run", ["--model.format", format, "--adapter.kind", kind]
    given = [*tiny_run.options(wide, out), "--num-steps", "3", "--evaluate.num-prompts", "0", *chosen]
    assert qerl(monkeypatch, "train", "demo_long", *given) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(row["mismatch_abs"] < 1e-5 for row in rows if row["sigma"] == 0)
    capsys.readouterr()
    if (format, kind) in (("nvfp4", "lora"), ("bf16", "full")):
        assert qerl(monkeypatch, "eval", out, "--num-prompts", "2", "--num-samples", "2") == 0
        assert 0 <= json.loads(capsys.readouterr().out.splitlines()[-1])["pass@1"] <= 1


def test_full_fine_tuning_of_a_packed_model_is_one_line(monkeypatch, capsys, files, tmp_path):
    given = [*tiny_run.options(files, tmp_path / "run"), "--adapter.kind", "full"]
    assert_one_line(
        capsys, qerl(monkeypatch, "train", "demo_long", *given), "adapter.kind", "model.format", "bf16"
    )


def test_a_head_that_the_model_cannot_have_is_one_line(monkeypatch, capsys, files, tmp_path):
    given = [*tiny_run.options(files, tmp_path / "run"), "--model.head-format", "nvfp4"]
    code = qerl(monkeypatch, "train", "demo_long", *given)
    assert_one_line(capsys, code, "model.head_format", "nvfp4", "multiple of 64", "272 tokens")


def test_report_and_eval_take_a_run(monkeypatch, capsys, files, tmp_path):
    out = tmp_path / "run"
    assert qerl(monkeypatch, "train", "demo_long", *tiny_run.options(files, out), "--num-steps", "3") == 0
    trained = json.loads((out / "result.json").read_text())
    assert qerl(monkeypatch, "report", out, "--out", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    for flag, key in (("--with-adapter", "greedy_after"), ("--no-with-adapter", "greedy_before")):
        assert qerl(monkeypatch, "eval", out, "--num-prompts", 4, flag) == 0
        assert json.loads(capsys.readouterr().out)["greedy"] == trained[key]


def test_quantize_writes_a_checkpoint_that_trains_as_it_is(monkeypatch, capsys, files, tmp_path):
    assert qerl(monkeypatch, "quantize", files, tmp_path / "packed") == 0
    first, change = capsys.readouterr().err.splitlines()
    assert first.startswith("quantize ") and change.startswith("nvfp4: KL to the float weights 0.00")
    tiny_run.write_task(tmp_path / "packed")
    for folder, out in ((files, tmp_path / "a"), (tmp_path / "packed", tmp_path / "b")):
        given = [*tiny_run.options(folder, out), "--num-steps", "2", "--evaluate.num-prompts", "0"]
        assert qerl(monkeypatch, "train", "demo_long", *given) == 0
    a, b = ((tmp_path / run / "samples.jsonl").read_text() for run in "ab")
    assert a == b
    said = [(tmp_path / run / "events.jsonl").read_text().count("KL to the float weights") for run in "ab"]
    assert said == [1, 0]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--learn.lr", "did you mean --learn.learning-rate"),
        ("--lr=1e-4", "did you mean --learn.learning-rate"),
        ("--steps", "did you mean --num-steps"),
        ("--sample.temp", "did you mean --sample.temperature?"),
        ("--learn.learning_rat", "did you mean --learn.learning-rate"),
        ("--xyzzy", "--help lists them"),
    ],
)
def test_a_shortened_option_suggests_the_whole_one(monkeypatch, capsys, option, meant):
    assert_one_line(capsys, qerl(monkeypatch, "train", "demo", option, "1"), "unknown option", meant)


@pytest.mark.parametrize("kind", [RunConfig, EvalOptions, PlanOptions, ServeOptions, BenchStepOptions])
def test_each_option_of_the_help_is_known_to_the_check(capsys, kind):
    with pytest.raises(SystemExit):
        tyro.cli(kind, args=["--help"])
    shown = set(re.findall(r"--[a-z][a-z0-9.-]*", capsys.readouterr().out.partition("options")[2]))
    listed = {option for option in shown if not option.startswith("--help")}
    check_options(kind, listed | {"--help"})
    assert len(listed) > 10


def test_the_version_is_printed(monkeypatch, capsys):
    assert qerl(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"qerl {importlib.metadata.version('qerl')}\n"


def test_a_line_is_printed_before_torch_is_imported(files, tmp_path):
    """Whoever reads a pipe sees that something happens: torch and transformers take seconds."""
    stops = "class Stops:\n def find_spec(self, name, *more):\n  if name == 'torch': sys.exit(7)\n"
    code = f"import sys\n{stops}sys.meta_path.insert(0, Stops())\nfrom qerl.cli.main import main\nmain()"
    commands = [
        ["train", "demo_long", *tiny_run.options(files, tmp_path / "run")],
        *(["eval", "o/m", "gsm8k"], ["generate", "o/m", "hello"], ["quantize", "o/m", "out"]),
        ["plan", "gsm8k", "--gpu", "rtx-4090"],
    ]
    for command in commands:
        process = tiny_run.launched("-c", code, *command)
        out, error = process.communicate(timeout=60)
        assert process.returncode == 7 and (out or error).startswith(f"{command[0]} {command[1]}: ")


def test_the_first_line_of_a_run_names_its_rewards(monkeypatch, capsys, tmp_path):
    rows = tiny_run.write_task(tmp_path)
    given = ["train", "--task", str(rows), "--num-steps", "1", "--model", "./none"]
    for more, named in ((["--reward", "exact"], "exact"), (["--reward", "math", "tags"], "math + tags")):
        assert qerl(monkeypatch, *given, *more) == 2
        assert f" in nvfp4, reward {named}, 1 step, runs/own\n" in capsys.readouterr().out
    assert qerl(monkeypatch, *given, "--agent", "none.py:agent") == 2
    assert "reward" not in capsys.readouterr().out


def test_ctrl_c_while_modules_are_imported_shows_no_traceback():
    stops = "class Stops:\n def find_spec(self, name, *more):\n  if name == 'tyro': raise KeyboardInterrupt\n"
    code = f"import sys\n{stops}sys.meta_path.insert(0, Stops())\nfrom qerl.__main__ import main\nmain()"
    process = tiny_run.launched("-c", code, "train", "demo")
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 130)


def test_the_first_line_hides_a_password(monkeypatch, capsys):
    assert qerl(monkeypatch, "eval", "https://me:hunter22@host/model", "gsm8k") == 2
    shown = capsys.readouterr().err
    assert "https://***@host/model: " in shown and "hunter22" not in shown
