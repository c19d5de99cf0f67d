"""examples/rl_loop.py runs, repeats, uses public names only, and makes the very steps of `qerl.train`."""

import ast
import dataclasses
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qerl
import tiny_run
from qerl.models.device import resolve_device
from qerl.training.policy import load_task

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "rl_loop.py"
PEFT = "adapter_config.json", "adapter_model.safetensors"
TINY = ["--rank", "4", "--max-tokens", "5", "--learning-rate", "0.01", "--prompts", "4", "--samples", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rl_loop(monkeypatch):
    """The example as a module, with a reward that a model without knowledge sometimes gets."""
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "reward", lambda prompt, sample: float(sample.tokens_T[0] % 2 == 0))
    return module


def even(prompts, completions, completion_ids, **columns):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def test_it_runs_saves_what_it_learned_and_repeats(rl_loop, model, tmp_path, monkeypatch, capsys):
    printed = []
    for name in ("first", "second"):
        given = ["--model", model, "--steps", "3", *TINY, "--out", tmp_path / name]
        monkeypatch.setattr(sys, "argv", ["rl_loop.py", *map(str, given)])
        rl_loop.main()
        *lines, _ = capsys.readouterr().out.splitlines()
        assert [line[:8] for line in lines] == ["step   0", "step   1", "step   2"]
        printed.append([re.sub(r"[\d,]+ tokens/s$", "", line) for line in lines])
    assert printed[0] == printed[1] and "nan" not in str(printed) and "inf" not in str(printed)
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert all(
        tensor.isfinite().all() and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )
    assert all(tensor.any() for name, tensor in first.items() if "lora_B" in name)  # zero at the start
    assert {"adapter_config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "first").iterdir()}


def test_a_mistake_is_one_line(model, tmp_path, monkeypatch):
    given = ["rl_loop.py", "--model", str(model), "--format", "nvfp5", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match=r"rl_loop: .* must be one of nvfp4, .*; did you mean") as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "\n" not in str(stopped.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("loss", "max_rounds"), [("grpo", 1), ("dapo", 3)])
def test_its_steps_are_those_of_train_bit_for_bit(rl_loop, model, tmp_path, loss, max_rounds):
    given = [
        "--model",
        model,
        "--loss",
        loss,
        "--max-rounds",
        max_rounds,
        "--steps",
        "4",
        "--seed",
        "3",
        *TINY,
    ]
    options = rl_loop.parser().parse_args(list(map(str, given)))
    policy, learner = rl_loop.load(options)
    task = dataclasses.replace(
        qerl.recipes.demo_long().task,
        name=str(tiny_run.write_task(tmp_path)),
        template="{prompt}",
        num_held_out=8,
    )
    train = dataclasses.replace(
        qerl.recipes.demo_long(),
        out=str(tmp_path / "run"),
        seed=3,
        num_steps=4,
        num_prompts=4,
        num_generations=4,
        model=qerl.config.ModelConfig(path=str(model)),
        adapter=qerl.config.AdapterConfig(rank=4, alpha=4.0),
        task=task,
        sample=qerl.config.SampleConfig(max_tokens=5),
        algo=qerl.config.AlgoConfig(
            loss_type=loss, advantage="group", dynamic_sampling=max_rounds > 1, max_rounds=max_rounds
        ),
        learn=qerl.config.LearnConfig(learning_rate=0.01, warmup_ratio=0.0),
        evaluate=qerl.config.EvalConfig(num_prompts=0),
    )
    _, rows = load_task(dataclasses.replace(train, model=resolve_device(train.model)))
    own = list(
        rl_loop.train(policy, learner, lambda step, round: rows.train_prompts(step, 4, round), options)
    )
    policy.save_adapter(tmp_path / "own")

    qerl.train(train, rewards=[even])
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(own) == len(logged) == 4
    for mine, theirs in zip(own, logged, strict=True):
        names = mine.keys() - {
            "tokens_per_s",
            *(("reward",) if max_rounds > 1 else ()),
        }  # of all rounds there
        assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
    assert any(metrics["sigma"] > 0 and metrics["mismatch_abs"] > 0 for metrics in own)
    assert any(metrics.get("grad_norm", 0.0) > 0 for metrics in own)
    saved, mine = tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "own"
    assert json.loads((mine / PEFT[0]).read_text()) == json.loads((saved / PEFT[0]).read_text())
    theirs = load_file(saved / PEFT[1])
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_file(mine / PEFT[1]).items())


def test_prompts_are_those_of_a_task(model, tmp_path):
    policy = qerl.load(str(model), sample=qerl.config.SampleConfig(max_tokens=5))
    task = qerl.config.TaskConfig(
        name=str(tiny_run.write_task(tmp_path)), template="{prompt}", num_held_out=8
    )
    _, rows = load_task(dataclasses.replace(policy.config, task=task))
    for prompt in rows.train_prompts(0, 4):
        assert policy.prompt(prompt.messages, index=prompt.index, **prompt.columns) == prompt


@pytest.mark.parametrize("name", ["rl_loop.py", "gsm8k.py"])
def test_examples_use_public_names_only(name):
    source = (ROOT / "examples" / name).read_text()
    assert source.count("\n") <= 300
    allowed = {*sys.stdlib_module_names, "qerl", "torch", "reasoning_gym"}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                assert {alias.name for alias in names} <= allowed
            case ast.ImportFrom(module="qerl", names=names):
                assert {alias.name for alias in names} <= set(qerl.__all__)
            case ast.ImportFrom(module=module):
                assert module.partition(".")[0] in allowed - {"qerl"}
            case ast.Attribute(value=ast.Name(id="qerl"), attr=name):
                assert name in qerl.__all__
            case ast.Attribute(value=ast.Name(id="config"), attr=name):
                assert not name.startswith("_") and hasattr(qerl.config, name)
            case ast.Attribute(attr=name):
                assert not name.startswith("_")
