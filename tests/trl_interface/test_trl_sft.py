"""SFTTrainer and SFTConfig of qerl.trl: TRL's rows, names and trainer, over the run of `qerl sft`."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from test_trl_config import NEEDS, OF_THE_TRAINER, VALUES
from test_trl_trainer import Recorder
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_run
from qerl.cli.main import command
from qerl.config import ModelConfig, NoiseConfig, RunConfig, SampleConfig
from qerl.errors import UserError
from qerl.trl import GRPOConfig, SFTConfig, SFTTrainer
from qerl.trl.config import TrainFields
from qerl.trl.ignored import IgnoredFields, SFTIgnoredFields
from qerl.trl.refused import RefusedFields, SFTRefusedFields

HERE = Path(__file__).parent
TRL = json.loads((HERE / "sft_fields.json").read_text())
"""Names of the fields of trl.SFTConfig, in order."""
PAGE = HERE.parents[1] / "docs" / "trl.md"
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{i} ?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": f"yes {i}"},
        ]
    }
    for i in range(12)
]
PAIRS = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(12)]
TEXTS = [{"text": f"{i} + {i} = {2 * i}"} for i in range(12)]
CHAT_PAIRS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in CHATS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_run.write_model(tmp_path_factory.mktemp("model")))


def arguments(out, **more):
    given = {"per_device_train_batch_size": 4, "max_steps": 3, "max_length": 64, "bf16": False}
    return SFTConfig(str(out), **given | {"learning_rate": 0.02, "logging_steps": 1} | more)


def steps(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_of_trl_is_here_once():
    assert names(SFTConfig) == {*TRL["fields"], "warmup_ratio"}
    assert not names(SFTIgnoredFields) & names(SFTRefusedFields)


def test_the_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    if trl.__version__ != TRL["version"]:
        pytest.skip(f"sft_fields.json is of {TRL['version']}")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.SFTConfig)}
    assert list(theirs) == TRL["fields"]
    for field in dataclasses.fields(SFTConfig):
        if field.default is not dataclasses.MISSING and field.name != "warmup_ratio":
            assert field.default == theirs[field.name], field.name


def test_the_page_lists_every_field_of_its_own_under_what_happens_to_it():
    section = re.split(r"^### ", PAGE.read_text(), flags=re.M)
    (text,) = [part for part in section if part.startswith("SFTConfig\n")]
    found = {part.split(":")[0]: set(re.findall(r"`(\w+)`", part)) for part in text.split("\n\n")}
    shared = names(IgnoredFields) | names(RefusedFields)
    assert names(SFTIgnoredFields) - shared == found["No effect"]
    assert names(SFTRefusedFields) - shared == found["Refused"]
    own = names(SFTConfig) - names(TrainFields) - names(SFTIgnoredFields) - names(SFTRefusedFields)
    rows = set(re.findall(r"^\| `(\w+)`", text, flags=re.M))
    assert own <= rows and rows <= own | names(TrainFields)


def test_hf_argument_parser_reads_it():
    parser = transformers.HfArgumentParser(SFTConfig)
    (plain,) = parser.parse_args_into_dataclasses([])
    assert plain == SFTConfig() and plain.learning_rate == 2e-5
    given = "--output_dir x --packing --max_length 99 --assistant_only_loss True --num_train_epochs 0.5"
    (args,) = parser.parse_args_into_dataclasses(given.split())
    assert (args.output_dir, args.packing, args.max_length, args.num_train_epochs) == ("x", True, 99, 0.5)
    assert args.assistant_only_loss and args.completion_only_loss is None


def config(model, out, rows=CHATS, **more):
    return SFTTrainer(model, arguments(out, **more), train_dataset=rows).config


def test_the_config_says_here_what_it_says_there(model, tmp_path):
    made = config(
        model,
        tmp_path,
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=2.5,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        save_strategy="epoch",
        seed=7,
    )
    assert (made.num_prompts, made.num_steps, made.checkpoint.every) == (8, 5, 2)  # 2 steps an epoch
    learn = made.learn
    assert (learn.learning_rate, learn.warmup_ratio, learn.lr_scheduler_type) == (0.02, 0.4, "cosine")
    assert (learn.updates_per_step, learn.num_iterations, made.seed) == (1, 1, 7)
    assert (made.algo.loss_type, made.noise.schedule, made.sft.max_length) == ("nll", "none", 64)
    assert config(model, tmp_path, max_length=None).sft.max_length is None
    base = RunConfig(model=ModelConfig(format="fp8"), max_mismatch=0.5, noise=NoiseConfig())
    trainer = SFTTrainer(model, arguments(tmp_path), train_dataset=CHATS, base=base)
    assert (trainer.config.model.format, trainer.config.max_mismatch) == ("fp8", 0.5)
    assert trainer.config.noise.schedule == "none"


OWN_VALUES = {
    "max_length": 32,
    "packing": True,
    "assistant_only_loss": True,
    "completion_only_loss": False,
    "dataset_text_field": "question",
    "chat_template_path": "mine.jinja",
    "eos_token": "<|im_start|>",
}
SHARED_VALUES = {name: VALUES[name] for name in names(TrainFields) & {*VALUES}}
OWN_ROWS = {
    "completion_only_loss": [{"prompt": f"{i}", "completion": "a"} for i in range(4)],
    "dataset_text_field": [{"text": f"{i} a", "question": f"{i} b"} for i in range(4)],
}


def test_every_mapped_field_is_tried_below():
    mapped = names(SFTConfig) - names(SFTIgnoredFields) - names(SFTRefusedFields)
    assert mapped == {*OWN_VALUES, *SHARED_VALUES} | (OF_THE_TRAINER & names(TrainFields))


@pytest.mark.parametrize("field", sorted({*OWN_VALUES, *SHARED_VALUES}))
def test_a_mapped_field_changes_the_run(field, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    value, rows = (OWN_VALUES | SHARED_VALUES)[field], OWN_ROWS.get(field, CHATS)
    needs = {"output_dir": "out"} | ({} if field not in SHARED_VALUES else NEEDS.get(field, {}))
    needs |= {"lr_scheduler_kwargs": {"min_lr": 1e-8}} if field == "lr_scheduler_kwargs" else {}
    needs.pop("num_generations", None)
    before, after = (
        SFTTrainer(model, SFTConfig(**needs | more), train_dataset=rows, eval_dataset=rows[:1]).config
        for more in ({}, {field: value})
    )
    assert before != after


def test_a_template_and_an_end_of_sequence_are_those_of_the_config(model, tmp_path):
    own = AutoTokenizer.from_pretrained(model)
    assert config(model, tmp_path, eos_token=own.eos_token).model.path == model
    other = AutoTokenizer.from_pretrained(config(model, tmp_path, eos_token="<|im_start|>").model.path)
    assert other.eos_token == "<|im_start|>" and other.chat_template == own.chat_template
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    made = AutoTokenizer.from_pretrained(config(model, tmp_path, chat_template_path=str(path)).model.path)
    assert (made.chat_template, made.eos_token) == (template, own.eos_token)
    made.chat_template = template.replace("[", "<")
    made.save_pretrained(tmp_path / "source")
    of_other = config(model, tmp_path, chat_template_path=str(tmp_path / "source")).model.path
    assert AutoTokenizer.from_pretrained(of_other).chat_template == made.chat_template
    made.add_special_tokens({"additional_special_tokens": ["<|mine|>"]})
    made.chat_template = "<|mine|>" + template
    made.save_pretrained(tmp_path / "source")
    for more, message in (
        ({"eos_token": "<eos>"}, "^eos_token: '<eos>' is not in the vocabulary"),
        ({"chat_template_path": "no.jinja"}, "^chat_template_path: there is no file no.jinja"),
        ({"chat_template_path": str(tmp_path / "none")}, "^chat_template_path: .* has no tokenizer"),
        ({"chat_template_path": str(tmp_path / "source")}, r"the model has no token <\|mine\|>"),
    ):
        with pytest.raises(UserError, match=message):
            config(model, tmp_path, **more)


@pytest.mark.parametrize("field", sorted(names(SFTRefusedFields)))
def test_a_refused_field_is_named_with_what_to_do(field, model, tmp_path):
    args = arguments(tmp_path)
    setattr(args, field, "another value")
    with pytest.raises(UserError, match=f"^{field} = 'another value' is not supported: \\w+"):
        SFTTrainer(model, args, train_dataset=CHATS)


def test_what_has_no_effect_is_said_in_one_line(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "qerl.trl"):
        config(model, tmp_path, padding_free=True, dataset_num_proc=8, tf32=True)
    assert caplog.messages == ["SFTConfig: no effect here: tf32, dataset_num_proc, padding_free"]


def test_what_cannot_be_done_is_refused_by_name(model, tmp_path):
    for field, rows, needs in (
        ("completion_only_loss", CHATS, "prompt and completion"),
        ("assistant_only_loss", TEXTS, "messages"),
    ):
        with pytest.raises(UserError, match=f"^{field} = True needs rows with {needs}: remove it"):
            config(model, tmp_path, rows, **{field: True})
    for name in ("data_collator", "compute_metrics", "compute_loss_func", "optimizer_cls_and_kwargs"):
        with pytest.raises(UserError, match=f"^{name} is not supported: \\w+"):
            SFTTrainer(model, arguments(tmp_path), train_dataset=CHATS, **{name: print})
    with pytest.raises(UserError, match=r"args must be a .*SFTConfig, got a GRPOConfig"):
        SFTTrainer(model, GRPOConfig(str(tmp_path)), train_dataset=CHATS)
    with pytest.raises(UserError, match=r"columns are input_ids. To convert them: jq "):
        config(model, tmp_path, [{"input_ids": [1, 2]}])
    with pytest.raises(UserError, match="train_dataset has no rows"):
        SFTTrainer(model, arguments(tmp_path))
    stream = Dataset.from_list(CHATS).to_iterable_dataset()
    with pytest.raises(UserError, match="max_steps must be set: train_dataset has no length"):
        config(model, tmp_path, stream, max_steps=-1)
    with pytest.raises(UserError, match="packing needs a train_dataset with a length"):
        config(model, tmp_path, stream, packing=True)


ASSISTANT, ALL = "assistant_only_loss", "completion_only_loss"
MASKS = {
    "chat": (CHATS, {}, r".*"),
    "chat, assistant": (CHATS, {ASSISTANT: True}, r"yes[ \d]*<\|im_end\|>"),
    "pair": (PAIRS, {}, r"(?<== )\d+<\|im_end\|>"),
    "pair, all": (PAIRS, {ALL: False}, r".*"),
    "chat pair": (CHAT_PAIRS, {}, r"yes<\|im_end\|>"),
    "text": (TEXTS, {}, r".*"),
    "text with its end": ([{"text": row["text"] + "<|im_end|>"} for row in TEXTS], {}, r".*"),
}


def text_of(row):
    """The row as the tiny model's template, or none, has it."""
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), list):
        messages = row["prompt"] + row["completion"]
    if messages is not None:
        return "".join(f"<|im_start|>{message['content']}<|im_end|>" for message in messages)
    text = row.get("text") or row["prompt"] + row["completion"]
    return text.removesuffix("<|im_end|>") + "<|im_end|>"


def loss_of(model, rows, pattern):
    """The mean loss by transformers of the tokens that the pattern matches, without an adapter."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for row in rows:
        text = text_of(row)
        found = tokenizer(text, return_offsets_mapping=True)
        spans = [match.span() for match in re.finditer(pattern, text)]
        is_learned = [any(a <= begin < b for a, b in spans) for begin, _ in found["offset_mapping"]]
        pairs = zip(found["input_ids"], is_learned, strict=True)
        labels = [token if learned else -100 for token, learned in pairs]
        with torch.no_grad():
            loss = network(torch.tensor([found["input_ids"]]), labels=torch.tensor([labels])).loss
        known = sum(label != -100 for label in labels[1:])
        total, count = total + loss.item() * known, count + known
    return total / count


@pytest.mark.parametrize("name", MASKS)
def test_the_loss_is_that_of_transformers_on_the_tokens_that_trl_learns(name, model, tmp_path):
    rows, fields, pattern = MASKS[name]
    base = RunConfig(model=ModelConfig(format="bf16"))
    trainer = SFTTrainer(model, arguments(tmp_path, **fields), train_dataset=rows, base=base)
    found = trainer.evaluate(rows[:5])
    assert found["eval_loss"] == pytest.approx(loss_of(model, rows[:5], pattern), rel=1e-4)
    assert found["eval_num_rows"] == 5 and trainer.state.log_history[-1]["eval_loss"] == found["eval_loss"]


def test_it_trains_logs_evaluates_and_calls_callbacks_as_a_trainer_does(model, tmp_path):
    args = arguments(tmp_path, max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2)
    recorder = Recorder(save_at=1)
    trainer = SFTTrainer(
        model, args, train_dataset=Dataset.from_list(CHATS[2:]), eval_dataset=CHATS[:2], callbacks=[recorder]
    )
    output = trainer.train()
    step_events = [("step_begin", 0), ("step_end", 1), ("save", 1), ("step_begin", 1), ("step_end", 2)]
    assert recorder.events[:3] == [("init_end", 0), ("train_begin", 0), ("epoch_begin", 0)]
    assert recorder.events[3:8] == step_events
    assert recorder.events[8:11] == [("log", 2), ("log", 2), ("evaluate", 2)]
    assert [event for event in recorder.events if event[0] == "epoch_end"] == [
        ("epoch_end", 3),
        ("epoch_end", 4),
    ]
    assert recorder.events[-2:] == [("save", 4), ("train_end", 4)]
    history, recorded = trainer.state.log_history, steps(tmp_path)
    assert [(entry["step"], "eval_loss" in entry) for entry in history] == [
        *((2, False), (2, True), (4, False), (4, True))
    ]
    assert history[0]["loss"] == (recorded[0]["nll"] + recorded[1]["nll"]) / 2
    assert history[1]["eval_loss"] == recorded[1]["eval_nll"] and history[0]["learning_rate"] > 0
    assert output.metrics["eval_nll_after"] < output.metrics["eval_nll_before"] - 0.3
    assert output.global_step == 4 and output.training_loss == pytest.approx(
        sum(step["nll"] for step in recorded) / 4
    )
    assert trainer.state.epoch == 4 / 3 and trainer.state.max_steps == 4
    assert trainer.evaluate()["eval_loss"] == pytest.approx(output.metrics["eval_nll_after"], rel=1e-6)


def test_a_callback_stops_the_run_which_is_saved_and_complete(model, tmp_path):
    args = arguments(tmp_path, max_steps=6)
    trainer = SFTTrainer(model, args, train_dataset=CHATS, callbacks=[Recorder(stop_at=2)])
    assert trainer.train().global_step == 2 and len(steps(tmp_path)) == 2
    trainer.save_model()
    assert load_file(tmp_path / "adapter_model.safetensors") and (tmp_path / "result.json").exists()


def test_a_run_is_resumed_with_its_history(model, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    SFTTrainer(model, arguments(whole, max_steps=4), train_dataset=CHATS).train()

    class Crash(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    args = arguments(parts, max_steps=4, save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        SFTTrainer(model, args, train_dataset=CHATS, callbacks=[Crash]).train()
    trainer = SFTTrainer(model, args, train_dataset=CHATS)
    trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4]
    assert [step["nll"] for step in steps(parts)] == [step["nll"] for step in steps(whole)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_lora_config_a_model_object_and_a_saved_adapter_that_peft_loads(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "<other>" + tokenizer.chat_template
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        arguments(tmp_path / "run", eval_strategy="epoch"),
        train_dataset=CHATS,
        eval_dataset=CHATS[:2],
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        base=RunConfig(sample=SampleConfig(max_tokens=5)),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    state = peft.get_peft_model_state_dict(loaded)
    masters = load_file(next((tmp_path / "run" / "checkpoints").glob("step-000003/adapter_model*")))
    assert state.keys() == masters.keys() and all(torch.equal(state[name], masters[name]) for name in masters)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert samples and all(json.loads(line)["prompt"].startswith("<other>") for line in samples)


def test_it_learns_what_qerl_sft_learns(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    SFTTrainer(
        model, arguments(tmp_path / "trl", seed=3, assistant_only_loss=True), train_dataset=CHATS
    ).train()
    options = "--learn.learning-rate 0.02 --learn.warmup-ratio 0 --learn.lr-scheduler-type linear --seed 3"
    options += " --batch-size 4 --max-steps 3 --max-length 64 --eval-fraction 0 --model.dtype fp32"
    options += " --learn.betas 0.9 0.999 --learn.weight-decay 0 --learn.max-grad-norm 1"
    given = ["--data", str(rows), "--model", model, "--out", str(tmp_path / "sft"), *options.split()]
    command(["sft", *given])
    ours, theirs = (
        load_file(tmp_path / run / "checkpoints" / "step-000003" / "adapter_model.safetensors")
        for run in ("trl", "sft")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_packing_counts_blocks_of_whole_rows(model, tmp_path):
    rows = [{"text": "a" * length} for length in (40, 30, 20, 10, 33, 7, 50, 63)]  # and a stop token each
    trainer = SFTTrainer(
        model,
        arguments(tmp_path, packing=True, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=2),
        train_dataset=rows,
    )
    assert trainer.config.num_steps == 3  # 261 tokens in 5 blocks of 64, 2 blocks an update
    trainer.train()
    recorded = steps(tmp_path)
    assert sum(step["trained_samples"] for step in recorded) == len(rows)
    assert sum(step["learn_tokens"] for step in recorded) == 253  # 261 less the first token of each row


def test_a_formatting_function_and_tools_as_json(model, tmp_path):
    def formatting_func(row):
        return f"Q: {row['question']} A: {row['answer']}"

    questions = [{"question": str(i), "answer": "yes"} for i in range(8)]
    trainer = SFTTrainer(
        model, arguments(tmp_path / "a"), train_dataset=questions, formatting_func=formatting_func
    )
    written = Path(trainer.config.sft.data).read_text().splitlines()
    assert json.loads(written[3]) == {"text": "Q: 3 A: yes"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [row | {"tools": json.dumps(tools)} for row in CHATS]
    trainer = SFTTrainer(model, arguments(tmp_path / "b"), train_dataset=rows)
    (line,) = trainer._rows.notices
    assert line.endswith(f"of {len(rows)} rows the chat template does not render tools")
