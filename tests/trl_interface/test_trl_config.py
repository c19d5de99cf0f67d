"""GRPOConfig has every field of TRL's, and each is mapped, without effect or refused by name."""

import dataclasses
import fnmatch
import json
import logging
import re
from pathlib import Path

import peft
import pytest
import transformers
from datasets import Dataset

import tiny_run
from qerl.config import AdapterConfig, ModelConfig, RunConfig
from qerl.errors import UserError
from qerl.trl import GRPOConfig, GRPOTrainer
from qerl.trl.ignored import GRPOIgnoredFields
from qerl.trl.refused import GRPORefusedFields

TRL = json.loads((Path(__file__).parent / "fields.json").read_text())
"""Names of the fields of trl.GRPOConfig, in order: [f.name for f in dataclasses.fields(trl.GRPOConfig)]."""
PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
ROWS = [{"prompt": f"{i} + {i} =", "ground_truth": str(2 * i)} for i in range(12)]


def reward_len(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def config(args, rows=ROWS, **more):
    return GRPOTrainer("model", reward_len, args, rows, **more).config


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def mapped():
    return names(GRPOConfig) - names(GRPOIgnoredFields) - names(GRPORefusedFields)


def test_every_field_of_trl_is_here_once():
    assert names(GRPOConfig) == {*TRL["fields"], "warmup_ratio"}
    assert not names(GRPOIgnoredFields) & names(GRPORefusedFields)


def test_the_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    if trl.__version__ != TRL["version"]:
        pytest.skip(f"fields.json is of {TRL['version']}")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    assert list(theirs) == TRL["fields"]
    for field in dataclasses.fields(GRPOConfig):
        if field.default is not dataclasses.MISSING and field.name != "warmup_ratio":
            assert field.default == theirs[field.name], field.name


def test_the_page_lists_every_field_under_what_happens_to_it():
    sections = re.split(r"^##+ ", PAGE.read_text(), flags=re.M)
    found = {text.split("\n")[0]: set(re.findall(r"`(\w+\*?)`", text)) for text in sections[1:]}
    others = names(GRPOConfig) - mapped() - names(GRPORefusedFields)
    listed = {each: set(fnmatch.filter(others, each)) for each in found["No effect"]}
    assert all(listed.values()) and set().union(*listed.values()) == names(GRPOIgnoredFields)
    assert names(GRPORefusedFields) <= found["Refused"]
    assert mapped() <= found["Mapped"] and not mapped() & found["Refused"]


VALUES = {
    "output_dir": "elsewhere",
    "learning_rate": 3e-5,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.3},
    "warmup_steps": 3,
    "warmup_ratio": 0.2,
    "optim": "paged_adamw_8bit",
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.3,
    "gradient_checkpointing": False,
    "bf16": True,
    "use_cpu": True,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 3,
    "num_generations": 4,
    "generation_batch_size": 32,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "num_train_epochs": 7,
    "max_steps": 5,
    "max_completion_length": 99,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "generation_kwargs": {"temperature": 0.3, "stop": "\n"},
    "chat_template_kwargs": {"enable_thinking": False},
    "use_vllm": True,
    "beta": 0.04,
    "use_bias_correction_kl": False,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "loss_type": "dr_grpo",
    "sapo_temperature_neg": 1.5,
    "sapo_temperature_pos": 1.2,
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "reward_weights": [0.5],
    "mask_truncated_completions": True,
    "model_init_kwargs": {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    "seed": 7,
    "report_to": ["wandb"],
    "run_name": "mine",
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "epoch",
    "save_steps": 100,
    "save_total_limit": 9,
}
NEEDS = {
    "generation_batch_size": {"num_generations": 4, "per_device_train_batch_size": 16},
    "steps_per_generation": {"num_generations": 2, "max_steps": 8},
    "gradient_accumulation_steps": {"num_generations": 4},
    "importance_sampling_level": {"loss_type": "grpo"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "eval_steps": {"eval_strategy": "steps"},
}
OF_VLLM = {
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 5.0,
    "vllm_importance_sampling_cap": 7.0,
}
OF_THE_TRAINER = {
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_revision"),
    *("logging_strategy", "logging_steps", "eval_on_start", "num_generations_eval"),
    *("vllm_importance_sampling_clip_min", "max_tool_calling_iterations"),
}
"""Mapped fields that have no place in RunConfig without vLLM or tools: tests of their own."""


def test_every_mapped_field_is_tried_below():
    assert mapped() == {*VALUES, *OF_VLLM, *OF_THE_TRAINER}


@pytest.mark.parametrize("field", [*VALUES, *OF_VLLM])
def test_a_mapped_field_changes_the_run(field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = (VALUES | OF_VLLM)[field]
    needs = {"output_dir": "out"} | NEEDS.get(field, {}) | ({"use_vllm": True} if field in OF_VLLM else {})
    before = {"lr_scheduler_kwargs": {"min_lr": 1e-8}} if field == "lr_scheduler_kwargs" else {}
    plain, changed = (
        config(GRPOConfig(**needs | more), eval_dataset=ROWS[:3]) for more in (before, {field: value})
    )
    assert plain != changed


@pytest.mark.parametrize("field", sorted(names(GRPORefusedFields)))
def test_a_refused_field_is_named_with_what_to_do(field, tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=1)
    setattr(args, field, "another value")
    with pytest.raises(UserError, match=f"^{field} = 'another value' is not supported: \\w+"):
        config(args)


def test_what_has_no_effect_is_said_in_one_line(tmp_path, caplog):
    args = GRPOConfig(str(tmp_path), max_steps=1, use_liger_kernel=True, vllm_mode="server", tf32=True)
    with caplog.at_level(logging.WARNING, "qerl.trl"):
        config(args)
    assert caplog.messages == ["GRPOConfig: no effect here: tf32, use_liger_kernel, vllm_mode"]
    caplog.clear()
    config(GRPOConfig(str(tmp_path), max_steps=1))
    assert not caplog.messages


def test_hf_argument_parser_reads_it():
    parser = transformers.HfArgumentParser(GRPOConfig)
    (plain,) = parser.parse_args_into_dataclasses([])
    assert plain == GRPOConfig() and plain.output_dir == "trainer_output"
    given = (
        "--output_dir x --learning_rate 1e-5 --report_to wandb --bf16 false --use_vllm --reward_weights 1 0.5"
    )
    (args,) = parser.parse_args_into_dataclasses(
        [*given.split(), "--chat_template_kwargs", '{"enable_thinking": false}', "--push_to_hub", "True"]
    )
    assert (args.output_dir, args.learning_rate, args.report_to, args.bf16) == ("x", 1e-5, "wandb", False)
    assert args.use_vllm and args.push_to_hub and args.reward_weights == [1.0, 0.5]
    assert args.chat_template_kwargs == {"enable_thinking": False}
    args.learning_rate = 2e-5
    assert args.learning_rate == 2e-5
    with pytest.raises(UserError, match="generation_kwargs: not JSON"):
        GRPOConfig(generation_kwargs="{")


def test_trl_parser_reads_it_beside_trls_own(tmp_path):
    trl = pytest.importorskip("trl")
    (tmp_path / "run.yaml").write_text("learning_rate: 2.0e-5\nmodel_name_or_path: tiny\n")
    parser = trl.TrlParser((trl.ScriptArguments, GRPOConfig, trl.ModelConfig))
    _, args, model = parser.parse_args_and_config(
        ["--config", str(tmp_path / "run.yaml"), "--num_generations", "4"]
    )
    assert (args.learning_rate, args.num_generations, model.model_name_or_path) == (2e-5, 4, "tiny")


def test_the_config_says_here_what_it_says_there(tmp_path):
    made = config(
        GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=6,
            num_generations=8,
            num_train_epochs=2,
            warmup_steps=2,
            lr_scheduler_type="constant_with_warmup",
            beta=0.04,
            epsilon=0.1,
            scale_rewards=False,
            loss_type="dr_grpo",
            mask_truncated_completions=True,
            top_p=0.9,
            top_k=0,
            report_to=["wandb", "trackio"],
            gradient_checkpointing=False,
        )
    )
    assert (made.num_prompts, made.num_generations, made.num_steps) == (3, 8, 8)
    learn = made.learn
    assert (learn.warmup_ratio, learn.lr_scheduler_type, learn.gradient_checkpointing) == (
        0.25,
        "constant",
        "none",
    )
    assert (learn.learning_rate, learn.betas, made.seed) == (1e-6, (0.9, 0.999), 42)
    algo = made.algo
    assert (algo.beta, algo.epsilon, algo.epsilon_high, algo.advantage) == (0.04, 0.1, 0.1, "mean")
    assert (algo.loss_type, algo.overlong, algo.kl_estimator) == ("dr_grpo", "mask", "k3_unbiased")
    assert (made.sample.top_p, made.sample.top_k, made.sample.max_tokens) == (0.9, None, 512)
    assert made.loggers == ("wandb", "trackio") and made.noise.schedule == "none"


def test_one_generation_for_several_updates(tmp_path):
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_generations=4,
        num_iterations=3,
        max_steps=13,
        save_steps=12,
        warmup_steps=9,
    )
    made = config(args)
    assert (made.num_prompts, made.learn.updates_per_step, made.learn.num_iterations) == (8, 2, 3)
    assert (made.num_steps, made.num_updates, made.checkpoint.every) == (3, 18, 2)
    assert made.learn.warmup_ratio == 0.5
    several = dataclasses.replace(args, gradient_accumulation_steps=8, num_iterations=1)
    assert config(several).num_prompts == 16 and config(several).learn.updates_per_step == 1
    for change, message in (
        ({"generation_batch_size": 8}, "set only one of them"),
        ({"gradient_accumulation_steps": 8}, "num_iterations above 1 needs"),
        (
            {"gradient_accumulation_steps": 3},
            "must be a multiple of gradient_accumulation_steps \\(3\\), got 4",
        ),
        ({"num_generations": 3}, "must be a multiple of num_generations \\(3\\), got 32"),
    ):
        with pytest.raises(UserError, match=message):
            config(dataclasses.replace(args, **change))


def test_an_update_may_have_a_part_of_a_group(tmp_path):
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=1, generation_batch_size=4, num_generations=4, max_steps=8
    )
    made = config(args)
    assert (made.num_prompts, made.learn.updates_per_step, made.num_steps) == (1, 4, 2)


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, ("cosine", 0.1)),
        ("cosine_with_min_lr", {"min_lr": 5e-6, "num_cycles": 0.5}, ("cosine", 0.5)),
        ("polynomial", {"lr_end": 1e-6, "power": 1.0}, ("linear", 0.1)),
        ("polynomial", None, ("linear", 0.01)),
        ("linear", {}, ("linear", 0.0)),
        ("constant_with_warmup", None, ("constant", 0.0)),
    ],
)
def test_arguments_of_the_schedule_are_its_lowest_rate(schedule, options, expected, tmp_path):
    more = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options, "learning_rate": 1e-5}
    learn = config(GRPOConfig(str(tmp_path), max_steps=1, **more)).learn
    assert (learn.lr_scheduler_type, learn.min_lr_ratio) == (expected[0], pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (
            "cosine",
            {"num_cycles": 2},
            r"lr_scheduler_kwargs\['num_cycles'\] = 2 is not supported: cosine has 0.5",
        ),
        ("polynomial", {"power": 2.0}, r"lr_scheduler_kwargs\['power'\] = 2.0 is not supported"),
        ("linear", {"min_lr": 1e-7}, r"lr_scheduler_kwargs\['min_lr'\] = 1e-07 is not supported; remove it"),
        ("cosine_with_min_lr", None, "cosine_with_min_lr needs either min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1.0}, "the lowest rate must be between 0 and learning_rate"),
    ],
)
def test_other_arguments_of_the_schedule_are_refused_by_name(schedule, options, message, tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=1, lr_scheduler_type=schedule, lr_scheduler_kwargs=options)
    with pytest.raises(UserError, match=message):
        config(args)


def test_shares_of_the_steps(tmp_path):
    for field in ("warmup_steps", "warmup_ratio"):
        made = config(GRPOConfig(str(tmp_path), max_steps=20, **{field: 0.25}))
        assert made.learn.warmup_ratio == 0.25
    assert config(GRPOConfig(str(tmp_path), max_steps=20, save_steps=0.25)).checkpoint.every == 5
    assert config(GRPOConfig(str(tmp_path), num_train_epochs=2, save_strategy="epoch")).checkpoint.every == 12
    assert config(GRPOConfig(str(tmp_path), max_steps=20, save_strategy="no")).checkpoint.every == 20


def test_the_ratio_of_cispo_is_bounded_as_trl_bounds_it(tmp_path):
    made = config(GRPOConfig(str(tmp_path), max_steps=1, loss_type="cispo", epsilon_high=5.0))
    assert (1 - made.algo.epsilon, 1 + made.algo.epsilon_high) == (0.0, 5.0)
    with pytest.raises(UserError, match="epsilon_high bounds the ratio of loss_type cispo"):
        config(GRPOConfig(str(tmp_path), max_steps=1, loss_type="cispo"))


def test_vllms_correction(tmp_path):
    def algo(**more):
        return config(GRPOConfig(str(tmp_path), max_steps=1, use_vllm=True, **more)).algo

    assert (algo().importance, algo().importance_cap) == ("masked_sequence", 3.0)
    low = algo(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.4)
    assert (low.importance, low.importance_floor) == ("icepop", 0.4)
    with pytest.raises(UserError, match="vllm_importance_sampling_clip_min needs"):
        algo(vllm_importance_sampling_clip_min=0.4)


@pytest.mark.parametrize(
    ("quantization", "format"),
    [
        (transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "nf4"),
        (transformers.BitsAndBytesConfig(load_in_4bit=True), "nvfp4"),
        (transformers.BitsAndBytesConfig(load_in_8bit=True), "int8"),
        (transformers.Mxfp4Config(), "mxfp4"),
        (transformers.FineGrainedFP8Config(), "fp8"),
    ],
)
def test_a_quantization_config_is_the_format(quantization, format, tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=1)
    assert config(args, quantization_config=quantization).model.format == format
    args.model_init_kwargs = {"quantization_config": quantization, "dtype": "bfloat16", "device_map": None}
    assert config(args).model.format == format
    with pytest.raises(UserError, match="set it once"):
        config(args, quantization_config=quantization)


def test_base_says_what_trl_has_no_word_for(tmp_path):
    base = RunConfig(adapter=AdapterConfig(rank=7), max_mismatch=0.5, model=ModelConfig(format="fp8"))
    made = config(GRPOConfig(str(tmp_path), max_steps=20), base=base)
    assert (made.adapter.rank, made.max_mismatch, made.noise.schedule) == (7, 0.5, "exponential")
    assert made.model.format == "fp8"


def test_other_rows_are_another_run(tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=1)
    assert config(args).task.name == config(args, Dataset.from_list(ROWS)).task.name
    assert config(args).task.name != config(args, ROWS[1:]).task.name


def test_a_stream_gives_the_rows_of_the_steps(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    made = config(GRPOConfig(str(tmp_path), max_steps=3), stream)
    assert len(Path(made.task.name).read_text().splitlines()) == 3
    with pytest.raises(UserError, match="max_steps must be set"):
        config(GRPOConfig(str(tmp_path)), stream)


def test_peft_lora_without_targets_has_those_of_peft(tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=1)
    model = str(tiny_run.write_model(tmp_path / "model"))
    adapter = GRPOTrainer(model, reward_len, args, ROWS, peft_config=peft.LoraConfig()).config.adapter
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 8.0, ("q_proj", "v_proj"))
    all_linear = peft.LoraConfig(r=16, use_rslora=True, target_modules="all-linear")
    stable = GRPOTrainer(model, reward_len, args, ROWS, peft_config=all_linear).config.adapter
    assert stable.alpha / stable.rank == 8 / 16**0.5 and stable.target_modules == tuple(
        sorted(AdapterConfig().target_modules)
    )


def test_what_cannot_be_done_is_refused_by_name(tmp_path):
    plain = GRPOConfig(str(tmp_path), max_steps=1)
    for field, value in (("lr_scheduler_type", "inverse_sqrt"), ("loss_type", "vespo"), ("optim", "sgd")):
        with pytest.raises(UserError, match=f"^{field} must be one of .*, got {value}$"):
            config(dataclasses.replace(plain, **{field: value}))
    with pytest.raises(UserError, match=r"generation_kwargs\['num_beams'\] is not supported"):
        config(dataclasses.replace(plain, generation_kwargs={"num_beams": 4}))
    with pytest.raises(UserError, match=r"model_init_kwargs\['revision'\] is not supported"):
        config(dataclasses.replace(plain, model_init_kwargs={"revision": "v2"}))
    with pytest.raises(UserError, match="importance_sampling_level sequence needs loss_type grpo"):
        config(dataclasses.replace(plain, importance_sampling_level="sequence"))
    for name, lora in (
        ("use_dora", peft.LoraConfig(use_dora=True)),
        ("init_lora_weights", peft.LoraConfig(init_lora_weights="pissa")),
    ):
        with pytest.raises(UserError, match=f"^peft_config.{name} is "):
            config(plain, peft_config=lora)
    with pytest.raises(UserError, match="reward_funcs must be functions, got 'org/reward-model'"):
        GRPOTrainer("model", "org/reward-model", plain, ROWS)
    with pytest.raises(UserError, match="JSON"):
        config(plain, [{"prompt": "a", "data": b"x"}])
    with pytest.raises(UserError, match="vision models are not supported"):
        config(plain, [{"prompt": "a", "image": "x"}])
    for kind in ("image", "video", "audio"):
        prompt = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "a"}]}]
        with pytest.raises(UserError, match=f"^train_dataset: a block of type {kind}: only texts"):
            config(plain, [{"prompt": prompt}])


def test_blocks_of_texts_are_texts(tmp_path):
    blocks = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    rows = [{"prompt": [{"role": "user", "content": blocks}], "blocks": blocks, "numbers": [1, 2]}] * 4
    made = config(GRPOConfig(str(tmp_path), max_steps=1), rows)
    (first, *_) = map(json.loads, Path(made.task.name).read_text().splitlines())
    assert first == {"prompt": [{"role": "user", "content": "a b"}], "blocks": blocks, "numbers": [1, 2]}
