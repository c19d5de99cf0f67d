"""`qerl sft`: its loss is the cross entropy, its run is like any other, reinforcement learning follows."""

import json
import math
import shutil

import pytest
import torch
from test_session import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_run
from qerl.cli.main import command
from qerl.errors import UserError
from qerl.kernels.runtime.compile_tally import CompileTally
from qerl.training.sft import FineTuning
from training.stored_rows import (
    adapter_after,
    assert_same_run,
    options_of,
    run_by_two_ranks,
    stop_and_go_on,
    write_rows,
)

STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i} ?"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(40)
    ]
    write_rows(folder / "chats.jsonl", rows)
    return folder


def options(files, out, *more):
    given = {
        "data": files / "chats.jsonl",
        "batch-size": 8,
        "max-steps": STEPS,
        "eval-fraction": 0.2,
        "num-eval-samples": 2,
        "evaluate.every": 3,
    }
    return options_of(files, out, given, *more)


def adapter(out):
    return adapter_after(out, STEPS)


@pytest.fixture(scope="module")
def unbroken(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    command(["sft", *options(files, out)])
    return out


def test_what_quantizing_the_model_changed_is_said_once(files, tmp_path):
    for num_steps in "1", "2":  # the second goes on
        command(["sft", *options(files, tmp_path, "--max-steps", num_steps)])
    texts = [
        json.loads(line).get("text", "") for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ]
    (line,) = [text for text in texts if "KL to the float weights" in text]
    assert line.startswith("nvfp4: KL") and line.endswith("tokens of the data's rows")


def test_calibration_is_refused_with_the_command_that_does_it(files, tmp_path):
    with pytest.raises(UserError, match=r"qerl quantize .* OUT --calibrate gptq --data FILE"):
        command(["sft", *options(files, tmp_path, "--model.calibrate", "gptq")])


def cross_entropy(files, rows):
    """The mean loss of the assistant's tokens by transformers, without an adapter."""
    tokenizer, model = AutoTokenizer.from_pretrained(files), AutoModelForCausalLM.from_pretrained(files)
    total, count = 0.0, 0
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        text = tokenizer.convert_ids_to_tokens(ids)
        turn, labels = -1, []
        for token, index in zip(text, ids, strict=True):
            turn += token == "<|im_start|>"
            labels.append(index if turn % 2 and token != "<|im_start|>" else -100)
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        count += (known := sum(label != -100 for label in labels))
        total += loss.item() * known
    return total / count


def test_the_loss_before_training_is_that_of_transformers(files, tmp_path, capsys):
    command(
        ["sft", *options(files, tmp_path / "run", "--model.format", "bf16", "--max-steps", "1"), "--json"]
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (files / "chats.jsonl").read_text().splitlines()]
    assert result["eval_nll_before"] == pytest.approx(cross_entropy(files, rows[-8:]), rel=1e-4)


def test_it_learns_what_it_is_shown(unbroken):
    evaluations = json.loads((unbroken / "evaluations.json").read_text())
    before, after = evaluations["before"], evaluations["after"]
    assert after["nll"] < before["nll"] - 0.3 and after["perplexity"] == math.exp(after["nll"])
    losses = [step["nll"] for step in metrics(unbroken)]
    assert losses[-1] < losses[0] - 0.3
    shown = [json.loads(line) for line in (unbroken / "samples.jsonl").read_text().splitlines()]
    assert {each["step"] for each in shown} == {2, 5} and {each["answer"] for each in shown} == {"yes"}
    report = (unbroken / "report.html").read_text()
    assert "supervised fine-tuning" in report and "Held-out loss" in report and "nats per token" in report


def test_rows_are_evaluated_once_after_the_last_step(files, unbroken, tmp_path, monkeypatch):
    """Before training and after 3 and 6 steps."""
    read, held_out = [], FineTuning.held_out
    monkeypatch.setattr(FineTuning, "held_out", lambda self: read.append(held_out(self)) or read[-1])
    command(["sft", *options(files, tmp_path)])
    assert len(read) == 3
    assert (tmp_path / "evaluations.json").read_text() == (unbroken / "evaluations.json").read_text()
    after = json.loads((tmp_path / "evaluations.json").read_text())["after"]
    assert after == read[-1] | {"perplexity": math.exp(read[-1]["nll"])}
    assert json.loads((tmp_path / "result.json").read_text())["eval_nll_after"] == read[-1]["nll"]


def test_the_split_into_micro_batches_changes_nothing_but_rounding(files, unbroken, tmp_path):
    command(["sft", *options(files, tmp_path, "--learn.max-tokens-per-microbatch", "40")])
    ours, theirs = adapter(tmp_path), adapter(unbroken)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)


def test_a_stopped_run_ends_as_if_it_had_not_been(files, unbroken, tmp_path):
    stop_and_go_on("sft", options(files, tmp_path), tmp_path)
    assert_same_run(tmp_path, unbroken, STEPS)


@pytest.mark.parametrize(
    ("num_prompts", "more", "line"),
    [
        (5, ["--eval-data"], "evaluate.num_prompts is 5: of 40 rows to evaluate on, 5 are evaluated"),
        (3, [], "evaluate.num_prompts is 3: of 8 rows to evaluate on, 3 are evaluated"),
        (300, [], "evaluate.num_prompts is 300, but there are only 8 rows to evaluate on"),
        (8, [], None),
        (256, [], None),  # the default
    ],
)
def test_an_evaluation_of_fewer_rows_than_asked_or_held_out_is_said(files, tmp_path, num_prompts, more, line):
    more = [*more, *[str(files / "more.jsonl") for _ in more]]
    other = (files / "chats.jsonl").read_text().replace("yes", "no")
    (files / "more.jsonl").write_text(other)
    arguments = ["--evaluate.num-prompts", str(num_prompts), "--max-steps", "1", *more]
    command(["sft", *options(files, tmp_path / "run", *arguments)])
    texts = [
        json.loads(each)["text"] for each in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [text for text in texts if text.startswith("evaluate.num_prompts")] == [line] * (line is not None)


@pytest.mark.parametrize(("more", "is_kept"), [((), True), (("--seed", "1"), False)])
def test_an_evaluation_before_the_first_checkpoint_is_kept_for_the_same_run(
    files, unbroken, tmp_path, more, is_kept
):
    """A run that was killed before its first checkpoint begins again, and had measured this already."""
    recorded = {"before": {"nll": 1.25, "perplexity": 3.5}, "after": {"nll": 9.0}}
    (tmp_path / "run.json").write_text(
        (unbroken / "run.json").read_text().replace(str(unbroken), str(tmp_path))
    )
    (tmp_path / "evaluations.json").write_text(json.dumps(recorded))
    command(["sft", *options(files, tmp_path, *more)])
    evaluations = json.loads((tmp_path / "evaluations.json").read_text())
    assert (evaluations["before"] == recorded["before"]) == is_kept
    assert evaluations["after"] != recorded["after"]


def test_a_run_that_is_killed_before_its_first_checkpoint_keeps_its_evaluation(files, tmp_path):
    arguments = ["sft", *options(files, tmp_path, "--checkpoint.every", "1000")]
    tiny_run.kill_in_step(1, *arguments)
    path = tmp_path / "evaluations.json"
    before, written = json.loads(path.read_text()), path.stat().st_ino
    tiny_run.kill_in_step(1, *arguments)
    assert path.stat().st_ino == written
    command(arguments)
    assert json.loads(path.read_text())["before"] == before["before"]


def test_a_complete_run_goes_on_with_more_steps(files, unbroken, tmp_path, capsys):
    constant = "--learn.lr-scheduler-type", "constant"
    command(["sft", *options(files, tmp_path / "long", *constant)])
    command(["sft", *options(files, tmp_path / "short", *constant, "--max-steps", "4")])
    command(["sft", *options(files, tmp_path / "short", *constant, "--accept-changes")])
    assert "num_steps was 4 and is 6" in capsys.readouterr().out
    evaluations = json.loads((tmp_path / "short" / "evaluations.json").read_text())
    assert {"before", "after_4_steps", "after"} == set(evaluations)
    ours, theirs = adapter(tmp_path / "short"), adapter(tmp_path / "long")
    assert all(
        torch.isfinite(value).all() and value.shape == theirs[name].shape for name, value in ours.items()
    )


def test_two_ranks_learn_what_one_does(files, unbroken, tmp_path):
    out = tmp_path / "two"
    run_by_two_ranks("sft", options(files, out))
    for name, value in adapter(out).items():
        torch.testing.assert_close(value, adapter(unbroken)[name], rtol=1e-3, atol=1e-5)
    ours, theirs = ([step["nll"] for step in metrics(each)] for each in (out, unbroken))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_what_was_compiled_to_sample_is_said_once(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CompileTally, "report", lambda self: "kernels: 3 compiled in 2 s")
    command(["sft", *options(files, tmp_path)])  # two evaluations
    assert capsys.readouterr().out.count("kernels: 3 compiled in 2 s") == 1


def test_reinforcement_learning_goes_on_from_it(files, unbroken, tmp_path, capsys):
    start = unbroken / "checkpoints" / f"step-{STEPS:06d}"
    more = "--init-adapter", str(unbroken), "--num-steps", "1", "--evaluate.num-prompts", "0"
    command(["train", "demo_long", *tiny_run.options(files, tmp_path), *more, "--noise.schedule", "none"])
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert config["adapter"]["init_from"] == str(start) and config["sft"]["data"] == ""


def test_checkpoints_that_vanish_are_noticed(files, tmp_path):
    command(["sft", *options(files, tmp_path, "--max-steps", "2")])
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="the checkpoint after step 2 is gone"):
        command(["sft", *options(files, tmp_path, "--max-steps", "2")])


def test_edited_rows_are_refused(files, unbroken, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text((files / "chats.jsonl").read_text())
    arguments = [
        str(data) if part == str(files / "chats.jsonl") else part for part in options(files, tmp_path)
    ]
    command(["sft", *arguments])
    data.write_text(data.read_text().replace("yes", "no"))
    with pytest.raises(UserError, match=r"other rows of chats.jsonl"):
        command(["sft", *arguments])


def test_without_data_the_line_says_what_is_missing():
    with pytest.raises(UserError, match="sft needs --data"):
        command(["sft"])


def test_strict_makes_an_error_of_activations_that_are_not_quantized(files, tmp_path):
    command(["quantize", str(files), str(tmp_path / "packed")])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = group["weights"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    more = "--strict", "--model.path", str(tmp_path / "packed")
    with pytest.raises(UserError, match=r"strict: .*packed: .*activations"):
        command(["sft", *options(files, tmp_path / "run", *more)])


def test_strict_makes_an_error_of_a_bad_row(files, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text(
        (files / "chats.jsonl").read_text() + '{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    arguments = [
        str(data) if part == str(files / "chats.jsonl") else part for part in options(files, tmp_path)
    ]
    with pytest.raises(UserError, match=r"strict: .*1 left out \(first: line 41 has no assistant's turn"):
        command(["sft", *arguments, "--strict"])
