"""Reward functions of TRL's documentation, and TRL's config, through qerl's GRPOTrainer."""

import asyncio
import functools
import json
import re
import shutil
import types
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_run
from qerl.config import ModelConfig, RunConfig
from qerl.errors import UserError
from qerl.trl import GRPOConfig, GRPOTrainer
from qerl.trl.hub import model_card

OF_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


# The reward functions of TRL's page on GRPO (huggingface.co/docs/trl/grpo_trainer, "Using a custom reward
# function"), with the name completion_ids that its trainer passes.
def reward_ids(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def reward_len(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]


def reward_codes(completions, **kwargs):
    return [sum(map(ord, completion)) / 1000 for completion in completions]


def reward_len_of_turns(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def ground_truth_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task, strict=True):
        if t == "math":
            assert prompt[-1]["role"] == "user"
            rewards.append(1.0 if len(completion[0]["content"]) % 2 else -1.0)
        else:
            rewards.append(None)
    return rewards


async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


PLAIN = [{"prompt": f"{i} + {i} =", "ground_truth": str(2 * i)} for i in range(12)]
MESSAGES = [
    {"prompt": [{"role": "user", "content": f"{i}?"}], "task": "math" if i % 2 else "code"} for i in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_run.write_model(tmp_path_factory.mktemp("model")))


def arguments(out, **more):
    given = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 2,
    }
    return GRPOConfig(output_dir=str(out), **given | {"bf16": False, "learning_rate": 1e-2} | more)


def lines(out, name="samples"):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_a_plain_prompt_is_given_as_it_is_and_rewards_get_texts(model, tmp_path):
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward_ids, reward_len, ground_truth_func, async_reward_func],
        args=arguments(tmp_path, reward_weights=[1.0, 0.5, 10.0, 100.0]),
        train_dataset=Dataset.from_list(PLAIN),
    )
    result = trainer.train()
    samples = lines(tmp_path)
    assert len(samples) == 2 * 2 * 4 and result.metrics["run"] == str(tmp_path)
    assert {sample["prompt"] for sample in samples} <= {row["prompt"] for row in PLAIN}
    for sample in samples:
        text = sample["text"]
        assert sample["reward"] == sample["num_tokens"] + 0.5 * len(text) + 100.0 * bool(text)


def best_of_group(completions, ground_truth, **kwargs):
    """1 for the longest samples of each prompt: a function of TRL gets all samples of a step in one list."""
    size = kwargs["trainer_num_generations"][0]
    assert len(completions) == len(ground_truth) == 2 * size
    rewards = []
    for start in range(0, len(completions), size):
        group = completions[start : start + size]
        rewards += [float(len(text) == max(map(len, group))) for text in group]
    return rewards


def test_a_reward_that_compares_the_samples_of_a_group_gets_them_all(model, tmp_path):
    rows = [{**row, "trainer_num_generations": 4} for row in PLAIN]
    args = arguments(tmp_path, logging_steps=1)
    trainer = GRPOTrainer(model, [best_of_group, reward_len], args, rows)
    trainer.train()
    samples = lines(tmp_path)
    for start in range(0, len(samples), 4):
        lengths = [len(sample["text"]) for sample in samples[start : start + 4]]
        expected = [float(length == max(lengths)) + length for length in lengths]
        assert [sample["reward"] for sample in samples[start : start + 4]] == expected
    best = [sample["reward"] - len(sample["text"]) for sample in samples]
    assert set(best) == {0.0, 1.0}  # each sample alone is the longest
    steps = lines(tmp_path, "metrics")
    assert sum(step["rewards/best_of_group/mean"] for step in steps) / 2 == sum(best) / len(best)
    assert [step["num_failed_reward_groups"] for step in steps] == [0, 0]
    assert (
        trainer.state.log_history[0]["rewards/best_of_group/mean"] == steps[0]["rewards/best_of_group/mean"]
    )


def test_a_conversation_is_one_and_a_function_that_gives_none_abstains(model, tmp_path):
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[format_reward_func, math_reward_func],
        args=arguments(tmp_path),
        train_dataset=MESSAGES,
    )
    trainer.train()
    samples = lines(tmp_path)
    for sample in samples:
        index = int(
            re.fullmatch(r"<\|im_start\|>(\d+)\?<\|im_end\|><\|im_start\|>", sample["prompt"]).group(1)
        )
        expected = (1.0 if len(sample["text"]) % 2 else -1.0) if index % 2 else 0.0
        assert sample["reward"] == expected
    assert len(samples) == 16


def test_one_function_a_lora_config_and_a_saved_adapter(model, tmp_path):
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_len,
        args=arguments(tmp_path / "run"),
        train_dataset=PLAIN,
        peft_config=peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    first = trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    said = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, ["q_proj", "v_proj"])
    tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2 and any(t.any() for name, t in tensors.items() if "lora_B" in name)
    again = trainer.train()
    assert again.metrics["run"] == first.metrics["run"] and len(lines(tmp_path / "run", "metrics")) == 2


@OF_PEFT
def test_the_model_is_saved_into_the_runs_own_folder_where_peft_finds_it(model, tmp_path):
    trainer = GRPOTrainer(model, reward_len, arguments(tmp_path), PLAIN, peft_config=peft.LoraConfig(r=4))
    trainer.train()
    for _ in range(2):  # the second time over the first
        trainer.save_model(trainer.args.output_dir)
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))
    masters = load_file(next((tmp_path / "checkpoints").glob("step-000002")) / "adapter_model.safetensors")
    state = peft.get_peft_model_state_dict(loaded)
    assert state.keys() == masters.keys() and all(torch.equal(state[name], masters[name]) for name in masters)
    assert AutoTokenizer.from_pretrained(tmp_path)("1 + 1")["input_ids"]
    assert not list(tmp_path.glob(".saving-*"))


class Recorder(transformers.TrainerCallback):
    """Writes down every event, with global_step; stops the run at a step, and saves at another."""

    def __init__(self, stop_at=None, save_at=None):
        self.events, self.logs, self.stop_at, self.save_at = [], [], stop_at, save_at

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return functools.partial(self.record, name)
        return super().__getattribute__(name)

    def record(self, name, args, state, control, **given):
        self.events.append((name.removeprefix("on_"), state.global_step))
        self.logs += [given["logs"]] if "logs" in given else []
        if name == "on_step_end" and state.global_step == self.stop_at:
            control.should_training_stop = True
        if name == "on_step_end" and state.global_step == self.save_at:
            control.should_save = True
        return control


def test_callbacks_are_called_as_by_a_trainer_and_the_state_keeps_the_logs(model, tmp_path):
    recorder = Recorder(save_at=1)
    args = arguments(tmp_path, max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4)
    trainer = GRPOTrainer(model, reward_len, args, PLAIN, eval_dataset=PLAIN[:3], callbacks=[recorder])
    output = trainer.train()
    begin_end = [
        ("step_begin", 0),
        ("step_end", 1),
        ("save", 1),
        ("step_begin", 1),
        ("step_end", 2),
        ("log", 2),
    ]
    assert recorder.events[:3] == [("init_end", 0), ("train_begin", 0), ("epoch_begin", 0)]
    assert recorder.events[3:9] == begin_end
    assert recorder.events[9:] == [
        *(("step_begin", 2), ("step_end", 3), ("step_begin", 3), ("step_end", 4), ("log", 4)),
        *(("log", 4), ("evaluate", 4), ("epoch_end", 4), ("save", 4), ("train_end", 4)),
    ]
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()
    history, steps = trainer.state.log_history, lines(tmp_path, "metrics")
    assert [entry["step"] for entry in history] == [2, 4, 4] and "eval_reward" in history[2]
    assert history[1]["reward"] == (steps[2]["reward"] + steps[3]["reward"]) / 2
    assert history[0]["completions/mean_length"] == (steps[0]["mean_tokens"] + steps[1]["mean_tokens"]) / 2
    assert [log["reward"] for log in recorder.logs[:2]] == [entry["reward"] for entry in history[:2]]
    assert output.global_step == 4 and output.training_loss == pytest.approx(
        sum(step["loss"] for step in steps) / 4
    )
    assert trainer.state.epoch == 4 / 6


def test_a_callback_stops_the_run_which_is_saved_and_complete(model, tmp_path):
    recorder = Recorder(stop_at=2)
    args = arguments(tmp_path, max_steps=5, eval_strategy="steps", eval_steps=5)
    trainer = GRPOTrainer(
        model, reward_len, args, PLAIN, eval_dataset=PLAIN[:3], callbacks=[recorder, Recorder]
    )
    output = trainer.train()
    assert output.global_step == 2 and len(lines(tmp_path, "metrics")) == 2
    assert {line["step"] for line in lines(tmp_path, "held_out")} == {0, 2}
    assert recorder.events[-4:] == [("step_end", 2), ("epoch_end", 2), ("save", 2), ("train_end", 2)]
    trainer.save_model()
    assert load_file(tmp_path / "adapter_model.safetensors")
    trainer.remove_callback(recorder)
    count = len(recorder.events)
    assert trainer.train().metrics["run"] == str(tmp_path) and len(recorder.events) == count


def test_a_run_is_resumed_with_its_history(model, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    GRPOTrainer(model, reward_len, arguments(whole, max_steps=4, logging_steps=1), PLAIN).train()
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .* holds no checkpoint"):
        GRPOTrainer(model, reward_len, arguments(parts), PLAIN).train(resume_from_checkpoint=True)

    class Crash(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    args = arguments(parts, max_steps=4, logging_steps=1, save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        GRPOTrainer(model, reward_len, args, PLAIN, callbacks=[Crash]).train()
    trainer = GRPOTrainer(model, reward_len, args, PLAIN, callbacks=[recorder := Recorder()])
    trainer.train(resume_from_checkpoint=str(parts / "checkpoints" / "step-000002"))
    assert recorder.events[1:4] == [("train_begin", 2), ("epoch_begin", 2), ("step_begin", 2)]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4]
    rewards = [[step["reward"] for step in lines(run, "metrics")] for run in (whole, parts)]
    assert rewards[0] == rewards[1]


def test_a_checkpoint_of_another_run_is_where_a_new_one_begins(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    GRPOTrainer(model, reward_len, arguments(first), PLAIN).train()
    newest = first / "checkpoints" / "step-000002"
    trainer = GRPOTrainer(model, reward_len, arguments(second, max_steps=3), PLAIN)
    trainer.train(resume_from_checkpoint=str(newest))
    assert [step["step"] for step in lines(second, "metrics")] == [2]
    with pytest.raises(UserError, match="holds step-000003, from which the run resumes"):
        trainer.train(resume_from_checkpoint=str(newest))
    with pytest.raises(UserError, match=r"manifest\.json: missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_evaluate_gives_the_mean_reward_of_samples_of_the_newest_checkpoint(model, tmp_path):
    args = arguments(tmp_path, num_generations_eval=2)
    trainer = GRPOTrainer(model, reward_codes, args, PLAIN, callbacks=[recorder := Recorder()])
    with pytest.raises(UserError, match="evaluate needs an eval_dataset"):
        trainer.evaluate()
    before = trainer.evaluate(PLAIN[:5])
    assert before["eval_num_prompts"] == 5 and 0 < before["eval_completions/mean_length"] <= 5
    trainer.train()
    after = trainer.evaluate(PLAIN[:5])
    assert after["eval_reward"] != before["eval_reward"]  # the rate is large: other samples
    assert trainer.evaluate(PLAIN[:5])["eval_reward"] == after["eval_reward"]
    assert trainer.state.log_history[-1]["eval_reward"] == after["eval_reward"]
    assert recorder.events[-2:] == [("log", 2), ("evaluate", 2)]
    named = trainer.evaluate({"one": PLAIN[:2], "two": PLAIN[:5]}, metric_key_prefix="test")
    assert named["test_two_reward"] == after["eval_reward"] and named["test_one_num_prompts"] == 2


def test_a_used_folder_is_named_as_output_dir(model, tmp_path):
    GRPOTrainer(model, reward_codes, arguments(tmp_path, max_steps=1), PLAIN).train()
    trainer = GRPOTrainer(model, reward_codes, arguments(tmp_path, max_steps=1, seed=9), PLAIN)
    with pytest.raises(UserError, match=r"existing run has .*; set another output_dir$"):
        trainer.train()


def test_a_calibrated_model_is_what_is_evaluated_and_named(model, tmp_path):
    base = RunConfig(model=ModelConfig(calibrate="gptq"))
    trainer = GRPOTrainer(model, reward_codes, arguments(tmp_path, max_steps=1), PLAIN, base=base)
    with pytest.raises(UserError, match="has no folder base"):
        trainer.evaluate(PLAIN[:5])
    trainer.train()
    assert trainer.evaluate(PLAIN[:5])["eval_num_prompts"] == 5
    trainer.save_model()
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert Path(saved["base_model_name_or_path"]) == tmp_path / "base"


class LocalHub:
    """Takes the place of huggingface_hub.HfApi: keeps what is uploaded in a folder."""

    calls: ClassVar[list] = []

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        self.calls.append(("create", repo_id, private, self.token))
        return types.SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision):
        files = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, commit_message, revision, files))
        return f"https://hub/{repo_id}"


def test_the_adapter_is_pushed_with_a_card_and_nothing_else_of_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", LocalHub)
    monkeypatch.setattr(LocalHub, "calls", [])
    args = arguments(tmp_path / "my-run", push_to_hub=True, hub_token="secret", hub_private_repo=True)
    trainer = GRPOTrainer(model, reward_len, args, PLAIN)
    trainer.train()
    assert trainer.hub_model_id == "my-run"
    trainer.save_model()
    assert trainer.push_to_hub(dataset_name="org/sums", tags="math") == "https://hub/me/my-run"
    create, upload, _, last = LocalHub.calls
    assert create == ("create", "my-run", True, "secret") and upload[2] == "Model save"
    files = last[4]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= files.keys()
    assert not {"samples.jsonl", "run.json"} & files.keys()
    assert (
        b'datasets: ["org/sums"]' in files["README.md"]
        and b'tags: ["math", "grpo", "qerl"]' in files["README.md"]
    )


def test_the_card_of_a_model_whose_weights_were_trained_speaks_of_no_adapter():
    facts = {"base_model": "o/m", "dataset": None, "method": "GRPO", "tags": []}
    whole, adapter = (model_card("name", **facts, base=base) for base in (None, "## Base\n"))
    assert 'library_name: "transformers"' in whole and "adapter" not in whole
    assert 'library_name: "peft"' in adapter and "A LoRA adapter for o/m" in adapter


def tensors_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def test_the_weights_of_a_model_object_are_taken_as_they_are(model, tmp_path):
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(2)
    trainer = GRPOTrainer(changed, reward_len, arguments(tmp_path), PLAIN)
    trainer.train()
    written, first = tensors_of(trainer.config.model.path), tensors_of(model)
    doubled = {name for name in first if not torch.equal(written[name], first[name])}
    assert doubled == {"model.layers.0.mlp.up_proj.weight"}
    same = GRPOTrainer(AutoModelForCausalLM.from_pretrained(model), reward_len, arguments(tmp_path), PLAIN)
    assert same.config.model.path != trainer.config.model.path


@OF_PEFT
def test_a_peft_model_starts_from_its_adapter(model, tmp_path):
    given = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    )
    with pytest.raises(UserError, match="peft_config: the PeftModel has an adapter already"):
        GRPOTrainer(given, reward_len, arguments(tmp_path), PLAIN, peft_config=peft.LoraConfig())
    start = peft.get_peft_model_state_dict(given)
    with torch.no_grad():
        for tensor in start.values():
            tensor.normal_(std=0.02)
    peft.set_peft_model_state_dict(given, start)
    trainer = GRPOTrainer(given, reward_len, arguments(tmp_path, learning_rate=1e-9), PLAIN)
    trainer.train()
    written, first = tensors_of(trainer.config.model.path), tensors_of(model)
    assert written.keys() == first.keys() and all(torch.equal(written[name], first[name]) for name in first)
    trainer.save_model(str(tmp_path / "saved"))
    trained = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert trained.keys() == start.keys()
    assert all(torch.allclose(trained[name], start[name], atol=1e-6) for name in start)


def test_a_processing_class_takes_the_place_of_the_models_tokenizer(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = arguments(tmp_path, max_steps=1)
    assert GRPOTrainer(model, reward_len, args, PLAIN, processing_class=tokenizer).config.model.path == model
    tokenizer.chat_template = "<other>" + tokenizer.chat_template
    trainer = GRPOTrainer(model, reward_len_of_turns, args, MESSAGES, processing_class=tokenizer)
    trainer.train()
    assert all(sample["prompt"].startswith("<other>") for sample in lines(tmp_path))
    again = GRPOTrainer(model, reward_len_of_turns, args, MESSAGES, processing_class=tokenizer)
    assert again.config == trainer.config
    with pytest.raises(UserError, match="processing_class must be a tokenizer, got a dict"):
        GRPOTrainer(model, reward_len, args, PLAIN, processing_class={})


def test_chat_template_kwargs_reach_the_prompt(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "chat_template.jinja"
    path.write_text("{% if not enable_thinking %}<off>{% endif %}" + path.read_text())
    rows = MESSAGES
    args = arguments(tmp_path / "run", max_steps=1, chat_template_kwargs={"enable_thinking": True})
    GRPOTrainer(model=str(folder), reward_funcs=reward_len_of_turns, args=args, train_dataset=rows).train()
    assert not any("<off>" in sample["prompt"] for sample in lines(tmp_path / "run"))
    plain = arguments(tmp_path / "plain", max_steps=1)
    GRPOTrainer(model=str(folder), reward_funcs=reward_len_of_turns, args=plain, train_dataset=rows).train()
    assert all(sample["prompt"].startswith("<off>") for sample in lines(tmp_path / "plain"))
