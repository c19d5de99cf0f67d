"""Whole runs of models that transformers' code runs: train, resume, export, evaluate, fine-tune, generate."""

import json
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny_run
from models.any_family import oracle
from qerl.cli.main import main

FAMILIES = "GPTNeoX", "Exaone4", "Lfm2"
QUIET = "--noise.schedule", "none"
NOISE = {"GPTNeoX": QUIET, "Exaone4": (), "Lfm2": ()}


@pytest.fixture
def folder(tmp_path):
    return tiny_run.write_files(tmp_path)


def train(folder, out, family, *options):
    given = [*tiny_run.options(folder, out), "--num-steps", "3", "--model.format", "bf16", *NOISE[family]]
    call("train", "demo_long", *given, *options)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def call(*arguments):
    before = sys.argv
    sys.argv = ["qerl", *map(str, arguments)]
    try:
        main()
    finally:
        sys.argv = before


def steps_of(lines):
    return [line for line in lines if "reward" in line]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_learns_and_is_exported_as_adapter_and_merged(folder, family):
    oracle(family).save_pretrained(folder)
    steps = steps_of(train(folder, folder / "run", family))
    assert len(steps) == 3 and all(0 <= step["reward"] <= 1 and step["grad_norm"] > 0 for step in steps)
    assert steps[0]["mismatch_max"] < 1e-4
    call("export", folder / "run", folder / "adapter", "--as", "peft")
    call("export", folder / "run", folder / "merged", "--as", "merged", "--dtype", "fp32")
    tokens = torch.randint(3, 270, (2, 9), generator=torch.Generator().manual_seed(1))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)(tokens).logits
    assert (adapted - plain).abs().max() > 1e-3
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)


def test_a_stopped_run_goes_on_to_the_same_adapter(folder):
    oracle("Exaone4").save_pretrained(folder)
    constant = "--learn.lr-scheduler-type", "constant", "--learn.warmup-ratio", "0"
    constant += "--evaluate.num-prompts", "1", *QUIET
    train(folder, folder / "whole", "Exaone4", *constant, "--num-steps", "2")
    train(folder, folder / "parts", "Exaone4", *constant, "--num-steps", "1")
    train(folder, folder / "parts", "Exaone4", *constant, "--num-steps", "2")
    whole, parts = (
        load_file(folder / name / "checkpoints" / "step-000002" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_sft_eval_and_generate_take_the_model(folder, capsys):
    oracle("GPTNeoX").save_pretrained(folder)
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    model = "--model.path", folder, "--model.dtype", "fp32"
    call(
        "sft", "--data", folder / "chats.jsonl", "--out", folder / "sft", *model, "--max-steps", "12",
        "--batch-size", "4", "--adapter.rank", "4", "--learn.learning-rate", "0.05",
        "--learn.warmup-ratio", "0", "--eval-max-tokens", "4",
    )  # fmt: skip
    losses = [json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["nll"] for line in losses if "nll" in line]
    assert losses[-1] < losses[0] - 1
    capsys.readouterr()
    call("generate", folder / "sft", "a", "--max-tokens", "3", "--temperature", "0")
    assert capsys.readouterr().out.strip() == "b"
    call(
        "eval", folder, folder / "sums.jsonl", "--template", "{prompt}", "--num-samples", "2",
        "--reward", "exact", "--max-tokens", "4", "--model.dtype", "fp32", "--out", folder / "eval",
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_prompts"] == 40


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*QUIET, "--engine.exact"), "engine.exact needs the package's own decoder"),
        ((*QUIET, "--model.head-format", "fp8"), "model.head_format fp8 needs"),
        (("--noise.scope", "sample"), "noise.scope sample needs"),
        ((*QUIET, "--model.sampler-format", "fp8"), "model.sampler_format fp8 needs"),
        ((), "no RMSNorm that noise can be added to: set --noise.schedule none"),
    ],
    ids=["exact", "head", "scope", "sampler", "noise"],
)
def test_what_it_cannot_do_is_refused_in_one_line(folder, capsys, options, said):
    oracle("GPTNeoX").save_pretrained(folder)
    with pytest.raises(SystemExit):
        call("train", "demo_long", *tiny_run.options(folder, folder / "run"), *options)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl:")]
    assert said in line
