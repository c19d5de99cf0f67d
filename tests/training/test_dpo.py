"""`qerl dpo`: losses of preferences on the packed learner, a reference without a second model, one run."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_session import metrics

import tiny_run
from qerl.algo.preference import Completions, preference_loss
from qerl.cli.dpo import DpoOptions, run_config
from qerl.cli.main import command
from qerl.config import AdapterConfig, DpoConfig, LearnConfig, ModelConfig, SftConfig
from qerl.errors import UserError
from qerl.learner.checkpoint import OPTIMIZER
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.training.dpo import REFERENCE, PreferenceTuning
from qerl.training.sft import fine_tune, held_out_figures, read_rows
from training.stored_rows import (
    adapter_after,
    assert_same_run,
    options_of,
    run_by_two_ranks,
    stop_and_go_on,
    write_rows,
)

STEPS = 4
BETAS = 0.9, 0.99


def pair(i):
    """Answers of different lengths."""
    prompt = [{"role": "user", "content": f"{i} ?"}]
    chosen, rejected = "yes" + "!" * (i % 3), "no" * (1 + i % 2)
    return {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def single(i):
    row = pair(i)
    name = "chosen" if i % 3 else "rejected"
    return {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.bfloat16().save_pretrained(folder)  # with format bf16 both sides have the same weights
    for name, make in (("pairs", pair), ("singles", single)):
        write_rows(folder / f"{name}.jsonl", map(make, range(24)))
    return folder


def options(files, out, *more):
    given = {
        "data": files / "pairs.jsonl",
        "batch-size": 6,
        "max-steps": STEPS,
        "eval-fraction": 0.25,
        "num-eval-samples": 1,
        "evaluate.every": 2,
    }
    return options_of(files, out, given, *more)


@pytest.fixture(scope="module")
def unbroken(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    command(["dpo", *options(files, out)])
    return out


def adapter(out):
    return adapter_after(out, STEPS)


def test_it_prefers_what_was_chosen_and_says_so(unbroken):
    evaluations = json.loads((unbroken / "evaluations.json").read_text())
    before, after = evaluations["before"], evaluations["after"]
    assert before["loss"] == pytest.approx(0.693147, abs=1e-5) and abs(before["rewards/margins"]) < 1e-5
    assert after["loss"] < 0.65 and after["rewards/accuracies"] > 0.9 and after["rewards/margins"] > 0.1
    steps = metrics(unbroken)
    assert steps[-1]["rewards/accuracies"] == 1.0 and steps[-1]["loss"] < steps[0]["loss"]
    assert steps[1]["eval_rewards/margins"] == pytest.approx(
        steps[1]["eval_rewards/chosen"] - steps[1]["eval_rewards/rejected"]
    )
    report = (unbroken / "report.html").read_text()
    assert "preferences, sigmoid loss, beta 0.1" in report and "Held-out accuracy of pairs" in report
    result = json.loads((unbroken / "result.json").read_text())
    assert result["eval_rewards/accuracies_after"] == after["rewards/accuracies"]


def test_pairs_are_evaluated_once_after_the_last_step(files, tmp_path, monkeypatch):
    """Before training and after 2 and 4 steps."""
    read, held_out = [], PreferenceTuning.held_out
    monkeypatch.setattr(PreferenceTuning, "held_out", lambda self: read.append(held_out(self)) or read[-1])
    command(["dpo", *options(files, tmp_path)])
    assert len(read) == 3
    assert json.loads((tmp_path / "evaluations.json").read_text()) == {"before": read[0], "after": read[-1]}


def test_a_stopped_run_ends_as_if_it_had_not_been(files, unbroken, tmp_path):
    stop_and_go_on("dpo", options(files, tmp_path), tmp_path)
    assert_same_run(tmp_path, unbroken, STEPS, REFERENCE)


def test_a_reference_that_is_lost_is_read_again_from_the_same_policy(files, unbroken, tmp_path):
    """The adapter is trained by then: it must be off."""
    constant = "--learn.lr-scheduler-type", "constant", "--learn.warmup-ratio", "0"
    command(["dpo", *options(files, tmp_path / "a", *constant)])
    command(["dpo", *options(files, tmp_path / "b", *constant, "--max-steps", "2")])
    (tmp_path / "b" / REFERENCE).unlink()
    command(["dpo", *options(files, tmp_path / "b", *constant)])
    assert (tmp_path / "b" / REFERENCE).read_text() == (tmp_path / "a" / REFERENCE).read_text()
    ours, theirs = adapter(tmp_path / "b"), adapter(tmp_path / "a")
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_after_sft_the_reference_is_its_policy(files, unbroken, tmp_path):
    more = "--init-adapter", str(unbroken), "--learn.lr-scheduler-type", "constant"
    more += "--learn.warmup-ratio", "0"
    command(["dpo", *options(files, tmp_path / "a", *more)])
    before = json.loads((tmp_path / "a" / "evaluations.json").read_text())["before"]
    assert before["loss"] == pytest.approx(0.693147, abs=1e-5)
    stored = (tmp_path / "a" / REFERENCE).read_text()
    assert stored != (unbroken / REFERENCE).read_text()
    command(["dpo", *options(files, tmp_path / "b", *more, "--max-steps", "2")])
    (tmp_path / "b" / REFERENCE).unlink()
    command(["dpo", *options(files, tmp_path / "b", *more)])
    assert (tmp_path / "b" / REFERENCE).read_text() == stored
    ours, theirs = adapter(tmp_path / "b"), adapter(tmp_path / "a")
    assert all(ours[name].equal(theirs[name]) for name in ours)


def other_adapter(files, folder, unbroken):
    shutil.copytree(unbroken / "checkpoints" / "step-000002", folder, dirs_exist_ok=True)


def other_model(files, folder, unbroken):
    path = files / "model.safetensors"
    save_file(
        {name: 1.1 * value for name, value in load_file(path).items()}, folder / path.name, {"format": "pt"}
    )


@pytest.mark.parametrize("change", [other_adapter, other_model])
def test_another_model_or_adapter_at_the_same_path_is_another_reference(files, unbroken, tmp_path, change):
    """A run whose checkpoints are gone begins again, and finds the reference that was read."""
    adapter, model, out = tmp_path / "adapter", tmp_path / "model", tmp_path / "run"
    shutil.copytree(unbroken / "checkpoints" / f"step-{STEPS:06d}", adapter)
    shutil.copytree(files, model)
    more = "--init-adapter", str(adapter), "--model.path", str(model)
    command(["dpo", *options(files, out, *more, "--max-steps", "1")])
    shutil.rmtree(out / "checkpoints")
    change(files, adapter if change is other_adapter else model, unbroken)
    command(["dpo", *options(files, out, *more, "--accept-changes")])
    assert metrics(out)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_two_ranks_learn_what_one_does(files, unbroken, tmp_path):
    run_by_two_ranks("dpo", options(files, tmp_path / "two"))
    for name, value in adapter(tmp_path / "two").items():
        # AdamW's first updates divide a gradient by its own size: rounding shows in the smallest
        torch.testing.assert_close(value, adapter(unbroken)[name], rtol=1e-3, atol=1e-4)
    ours, theirs = ([s["loss"] for s in metrics(each)] for each in (tmp_path / "two", unbroken))
    assert ours == pytest.approx(theirs, rel=1e-4)


def config(files, out, dpo, *, data="pairs.jsonl", steps=2, **learn):
    options = DpoOptions(
        sft=SftConfig(data=str(files / data), eval_fraction=0.0, num_eval_samples=0),
        dpo=dpo,
        out=str(out),
        batch_size=6,
        model=ModelConfig(path=str(files), format="bf16", dtype="fp32", device="cpu"),
        adapter=AdapterConfig(rank=4, alpha=8.0),
        learn=LearnConfig(learning_rate=0.02, betas=BETAS, max_grad_norm=1e9, **learn),
    )
    made = run_config(options)
    return dataclasses.replace(made, checkpoint=dataclasses.replace(made.checkpoint, every=1, keep=9))


def learned_gradient(out):
    """The second step's gradient, from AdamW's first moment before and after it."""
    before, after = (load_file(out / "checkpoints" / f"step-00000{n}" / OPTIMIZER) for n in (1, 2))
    names = [name for name in after if name.endswith(".exp_avg")]
    return {
        name.removesuffix(".exp_avg"): (after[name] - BETAS[0] * before[name]) / (1 - BETAS[0])
        for name in names
    }


def model_with_adapter(files, out):
    """transformers' model with the adapter after the first step, in float64, by PEFT."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(files, dtype=torch.float64)
    folder = out / "checkpoints" / "step-000001"
    return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True).double()


def completion_logp(model, group, sample):
    tokens = torch.tensor([group.prompt.tokens_T + sample.tokens_T])
    logits = model(tokens).logits[0].log_softmax(-1)
    start = len(group.prompt.tokens_T)
    targets = tokens[0, start:]
    return logits[start - 1 : -1].gather(1, targets[:, None]).sum()


def autograd_gradient(files, out, run, *, micro=None):
    """The gradient of the batch's loss by transformers, PEFT and autograd, a completion at a time."""
    rows = read_rows(run, load_tokenizer(run.model.path))
    model = model_with_adapter(files, out)
    batch = rows.items(1, run.num_prompts)
    groups = [item.group(index) for index, item in batch.items()]
    items = [(group, sample) for group in groups for sample in group.samples_G]
    others = []
    if run.dpo.has_kl:  # each prompt with the completion of the row before
        others = [(groups[i], groups[i - 1].samples_G[0]) for i in range(len(groups))]
    with model.disable_adapter(), torch.no_grad():
        reference = torch.stack([completion_logp(model, *each) for each in items])
        kl_reference = [completion_logp(model, *each) for each in others]
    with torch.no_grad():
        kl = [completion_logp(model, *each) - r for each, r in zip(others, kl_reference, strict=True)]
    completions = Completions(
        policy_S=torch.stack([completion_logp(model, *each) for each in items]),
        reference_S=reference,
        tokens_S=torch.tensor([len(sample.tokens_T) for _, sample in items]).double(),
        is_chosen_S=torch.tensor([flag for item in batch.values() for flag in item.is_chosen]),
        kl=max(0.0, float(sum(kl)) / len(kl)) if run.dpo.has_kl else None,
    )
    loss = preference_loss(completions, run.dpo)
    loss.backward()
    named = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), named


LOSSES = {
    "sigmoid": DpoConfig(loss_type=("sigmoid",), beta=0.5),
    "ipo": DpoConfig(loss_type=("ipo",)),
    "aot": DpoConfig(loss_type=("aot",), beta=0.5, label_smoothing=0.1),
    "MPO": DpoConfig(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0)),
    "kto": DpoConfig(loss_type=("kto",), beta=0.5, desirable_weight=1.5),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_step_is_that_of_autograd_whatever_the_packing(files, tmp_path, name):
    dpo = LOSSES[name]
    run = config(files, tmp_path, dpo, data="pairs.jsonl" if dpo.is_paired else "singles.jsonl")
    tight = dataclasses.replace(run.learn, max_tokens_per_microbatch=20)  # a pair has 24 rows
    for out, learn in ((tmp_path / "a", run.learn), (tmp_path / "b", tight)):
        made = dataclasses.replace(run, out=str(out), learn=learn)
        fine_tune(made, max_steps=2, kind=PreferenceTuning)
        loss, truth = autograd_gradient(files, out, made)
        found = learned_gradient(out)
        assert metrics(out)[1]["loss"] == pytest.approx(loss, rel=1e-4)  # of sums of fp32 logprobs
        assert found.keys() == truth.keys()
        scale = max(float(value.abs().max()) for value in truth.values())
        assert scale > 1e-3
        for each, value in found.items():
            torch.testing.assert_close(value.double(), truth[each], rtol=1e-3, atol=1e-4 * scale)


def test_kto_learns_from_pairs_too_and_reads_its_kl_from_other_prompts(files, tmp_path):
    command(["dpo", *options(files, tmp_path, "--loss", "kto", "--learn.learning-rate", "0.05")])
    steps = metrics(tmp_path)
    assert steps[0]["trained_samples"] == 6 and all(step["kl"] >= 0 for step in steps)
    assert steps[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["rewards/margins"] > 0.02 and "rewards/accuracies" not in steps[0]


def test_the_evaluation_of_rated_completions_does_not_depend_on_batches(files, tmp_path):
    run = config(files, tmp_path, LOSSES["kto"], data="singles.jsonl")
    fine_tune(run, max_steps=2, kind=PreferenceTuning)
    figures = []
    for size in (4, 24):  # a third of the rows is rejected, of a batch of 4 one row or two
        sized = dataclasses.replace(run, num_prompts=size)
        found, _ = held_out_figures(sized, str(files / "singles.jsonl"), PreferenceTuning)
        figures.append({name: value for name, value in found.items() if name not in ("loss", "kl")})
    assert len(figures[0]) == 5 and figures[0] == pytest.approx(figures[1], rel=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loss", "kto", "--batch-size", "1"], "kto needs --batch-size of at least 2"),
        (["--loss", "kto", "sft"], "dpo.loss_type kto cannot be added to another loss"),
        (["--loss-weights", "1", "2"], "must have a weight for each of 1 losses, got 2"),
        (["--packing"], "dpo.loss_type does not work with packing"),
        (["--no-assistant-only-loss"], "leave assistant_only_loss on"),
        (["--adapter.dropout", "0.1"], "needs adapter.dropout 0, got 0.1"),
        (["--adapter.kind", "full", "--model.format", "bf16"], "needs adapter.kind lora"),
        (["--loss", "exo_pair"], "exo_pair needs dpo.label_smoothing above 0"),
        (["--loss", "robust", "--label-smoothing", "0.5"], r"must be in \[0, 0.5\) with robust"),
        (["--loss", "apo_zero", "--f-divergence-type", "forward_kl"], "needs a loss of the difference"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(files, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        command(["dpo", *options(files, tmp_path, *more)])


def test_rows_without_the_columns_are_refused_before_the_model_is_loaded(files, tmp_path):
    with pytest.raises(UserError, match="dpo needs --data"):
        command(["dpo"])
    arguments = options(files, tmp_path, "--data", str(files / "singles.jsonl"))
    with pytest.raises(UserError, match=r"columns are prompt, completion, label; .* set --loss kto"):
        command(["dpo", *arguments])
