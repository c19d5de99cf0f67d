"""DPOTrainer and KTOTrainer of qerl.trl: TRL's rows, names and trainers, over the run of `qerl dpo`."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from test_trl_config import NEEDS, VALUES
from test_trl_sft import steps

import tiny_run
from qerl.cli.main import command
from qerl.config import AdapterConfig, RunConfig
from qerl.errors import UserError
from qerl.trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig
from qerl.trl.config import PreferenceFields, TrainFields
from qerl.trl.ignored import DPOIgnoredFields, IgnoredFields, KTOIgnoredFields
from qerl.trl.refused import DPORefusedFields, KTORefusedFields, RefusedFields

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "trl.md"
KINDS = {
    "DPO": (DPOTrainer, DPOConfig, DPOIgnoredFields, DPORefusedFields),
    "KTO": (KTOTrainer, KTOConfig, KTOIgnoredFields, KTORefusedFields),
}
PAIRS = [{"prompt": f"{i} + {i} = ", "chosen": "ok", "rejected": "no idea"} for i in range(12)]
RATED = [
    {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"], "label": i % 3 == 0}
    for i, row in enumerate(PAIRS)
]
ROWS = {"DPO": PAIRS, "KTO": RATED}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_run.write_model(tmp_path_factory.mktemp("model")))


def arguments(out, kind="DPO", **more):
    given = {"per_device_train_batch_size": 4, "max_steps": 3, "max_length": 64, "bf16": False}
    return KINDS[kind][1](str(out), **given | {"learning_rate": 0.02, "logging_steps": 1} | more)


def made(model, out, kind="DPO", *, rows=None, **more):
    return KINDS[kind][0](model, args=arguments(out, kind, **more), train_dataset=rows or ROWS[kind])


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_trl_is_here_once_with_its_default(kind):
    stored = json.loads((HERE / f"{kind.lower()}_fields.json").read_text())
    _, config, no_effect, refused = KINDS[kind]
    assert names(config) == {*stored["fields"], "warmup_ratio"}
    assert not names(no_effect) & names(refused)
    trl = pytest.importorskip("trl")
    if trl.__version__ == stored["version"]:
        theirs = {f.name: f for f in dataclasses.fields(getattr(trl, f"{kind}Config"))}
        assert list(theirs) == stored["fields"]
        for field in dataclasses.fields(config):
            if field.name == "loss_type" and kind == "DPO":
                assert field.default_factory() == theirs["loss_type"].default_factory()
            elif field.default is not dataclasses.MISSING and field.name != "warmup_ratio":
                assert field.default == theirs[field.name].default, field.name


def test_the_page_lists_every_field_under_what_happens_to_it():
    section = re.split(r"^### ", PAGE.read_text(), flags=re.M)
    (text,) = [part for part in section if part.startswith("DPOConfig and KTOConfig\n")]
    found = {part.split(":")[0]: set(re.findall(r"`(\w+)`", part)) for part in text.split("\n\n")}
    shared = names(IgnoredFields) | names(RefusedFields)
    assert (names(DPOIgnoredFields) | names(KTOIgnoredFields)) - shared == found["No effect"]
    assert (names(DPORefusedFields) | names(KTORefusedFields)) - shared == found["Refused"]
    own = {*names(DPOConfig), *names(KTOConfig)} - names(TrainFields) - shared
    own -= found["No effect"] | found["Refused"]
    assert own <= set(re.findall(r"`(\w+)`", text.split("\n\n")[2]))


OWN_VALUES = {
    "DPO": {
        "beta": 0.3,
        "max_length": 32,
        "loss_type": ["ipo"],
        "loss_weights": [0.5],
        "label_smoothing": 0.1,
        "f_divergence_type": "js_divergence",
        "f_alpha_divergence_coef": 0.7,
        "discopop_tau": 0.1,
        "train_sampling_strategy": "sequential",
        "disable_dropout": False,
    },
    "KTO": {
        "beta": 0.3,
        "max_length": 32,
        "loss_type": "apo_zero_unpaired",
        "desirable_weight": 1.3,
        "undesirable_weight": 0.7,
        "train_sampling_strategy": "random",
        "disable_dropout": False,
    },
}
CASES = [(kind, field) for kind, values in OWN_VALUES.items() for field in values]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_its_own_is_tried_below(kind):
    _, config, no_effect, refused = KINDS[kind]
    assert names(config) - names(no_effect) - names(refused) - names(TrainFields) == {*OWN_VALUES[kind]}
    assert names(PreferenceFields) - names(TrainFields) <= {*OWN_VALUES[kind]}


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_field_of_its_own_changes_the_run(kind, field, model, tmp_path):
    if field == "disable_dropout":
        base = RunConfig(adapter=AdapterConfig(dropout=0.1))
        args = arguments(tmp_path, kind)
        assert (
            KINDS[kind][0](model, args=args, train_dataset=ROWS[kind], base=base).config.adapter.dropout == 0
        )
        args.disable_dropout = False
        with pytest.raises(UserError, match=r"needs adapter.dropout 0, got 0.1"):
            KINDS[kind][0](model, args=args, train_dataset=ROWS[kind], base=base)
        return
    before = made(model, tmp_path, kind).config
    after = made(model, tmp_path, kind, **{field: OWN_VALUES[kind][field]}).config
    assert before != after


@pytest.mark.parametrize("field", sorted({*VALUES} & names(TrainFields)))
def test_a_shared_field_changes_the_run_as_in_the_other_trainers(field, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needs = {"output_dir": "out"} | NEEDS.get(field, {})
    needs |= {"lr_scheduler_kwargs": {"min_lr": 1e-8}} if field == "lr_scheduler_kwargs" else {}
    needs.pop("num_generations", None)
    before, after = (
        DPOTrainer(model, args=DPOConfig(**needs | more), train_dataset=PAIRS, eval_dataset=PAIRS[:1]).config
        for more in ({}, {field: VALUES[field]})
    )
    assert before != after


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in KINDS for field in sorted(names(KINDS[kind][3]))]
)
def test_a_refused_field_is_named_with_what_to_do(kind, field, model, tmp_path):
    args = arguments(tmp_path, kind)
    setattr(args, field, "another value")
    with pytest.raises(UserError, match=f"^{field} = 'another value' is not supported: \\w+"):
        KINDS[kind][0](model, args=args, train_dataset=ROWS[kind])


def test_what_cannot_be_done_is_refused_by_name(model, tmp_path, caplog):
    for name in ("ref_model", "data_collator", "compute_metrics"):
        with pytest.raises(UserError, match=f"^{name} is not supported: \\w+"):
            DPOTrainer(model, args=arguments(tmp_path), train_dataset=PAIRS, **{name: print})
    with pytest.raises(UserError, match=r"args must be a .*DPOConfig, got a SFTConfig"):
        DPOTrainer(model, args=SFTConfig(str(tmp_path)), train_dataset=PAIRS)
    with pytest.raises(UserError, match=r"columns are prompt, completion, label"):
        made(model, tmp_path, rows=RATED)
    with pytest.raises(UserError, match="loss_type kto needs batches of at least 2 rows, got 1"):
        made(model, tmp_path, "KTO", per_device_train_batch_size=1)
    with pytest.raises(UserError, match=r"^loss_type must be one of sigmoid, .*, got kto"):
        made(model, tmp_path, loss_type=["kto"])
    with pytest.raises(UserError, match=r"^train_sampling_strategy must be one of random, sequential"):
        made(model, tmp_path, train_sampling_strategy="group_by_length")
    with caplog.at_level(logging.WARNING, "qerl.trl"):
        made(model, tmp_path, precompute_ref_log_probs=True, padding_free=True)
    assert caplog.messages == ["DPOConfig: no effect here: precompute_ref_log_probs, padding_free"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_logs_and_evaluates_with_trls_names(kind, model, tmp_path):
    trainer_class = KINDS[kind][0]
    args = arguments(
        tmp_path, kind, max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, beta=0.5
    )
    trainer = trainer_class(
        model, args=args, train_dataset=Dataset.from_list(ROWS[kind][4:]), eval_dataset=ROWS[kind][:4]
    )
    output = trainer.train()
    history, recorded = trainer.state.log_history, steps(tmp_path)
    assert history[0]["loss"] == pytest.approx((recorded[0]["loss"] + recorded[1]["loss"]) / 2)
    shared = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"}
    wanted = shared | {"loss", "entropy", "grad_norm", "learning_rate"}
    wanted |= {"rewards/accuracies"} if kind == "DPO" else {"kl"}
    assert wanted <= history[0].keys()
    assert {f"eval_{name}" for name in shared | {"loss"}} <= history[1].keys()
    assert output.metrics["eval_loss_after"] < output.metrics["eval_loss_before"]
    again = trainer.evaluate()
    assert again["eval_loss"] == pytest.approx(output.metrics["eval_loss_after"], rel=1e-6)
    assert again["eval_num_rows"] == 4
    trainer.save_model(str(tmp_path / "saved"))
    assert load_file(tmp_path / "saved" / "adapter_model.safetensors")


def test_it_learns_what_qerl_dpo_learns(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    made(model, tmp_path / "trl", seed=3, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]).train()
    options = "--learn.learning-rate 0.02 --learn.warmup-ratio 0 --learn.lr-scheduler-type linear --seed 3"
    options += " --batch-size 4 --max-steps 3 --max-length 64 --eval-fraction 0 --model.dtype fp32"
    options += " --learn.betas 0.9 0.999 --learn.weight-decay 0 --learn.max-grad-norm 1"
    options += " --loss-type sigmoid sft --loss-weights 1 0.5"
    given = ["--data", str(rows), "--model", model, "--out", str(tmp_path / "dpo"), *options.split()]
    command(["dpo", *given])
    ours, theirs = (
        load_file(tmp_path / run / "checkpoints" / "step-000003" / "adapter_model.safetensors")
        for run in ("trl", "dpo")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_dropout_of_a_lora_config_is_off_as_in_trl(model, tmp_path):
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = DPOTrainer(model, args=arguments(tmp_path), train_dataset=PAIRS, peft_config=lora)
    assert (trainer.config.adapter.dropout, trainer.config.adapter.rank) == (0.0, 4)
