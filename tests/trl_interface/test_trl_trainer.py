"""Reward functions of TRL's documentation, and TRL's config, through qerl's GRPOTrainer."""

import asyncio
import json
import re
import shutil

import peft
import pytest
from datasets import Dataset
from safetensors.torch import load_file

import tiny_run
from qerl.trl import GRPOConfig, GRPOTrainer


# The reward functions of TRL's page on GRPO (huggingface.co/docs/trl/grpo_trainer, "Using a custom reward
# function"), with the name completion_ids that its trainer passes.
def reward_ids(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def reward_len(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]


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
    assert len(samples) == 2 * 2 * 4 and result["run"] == str(tmp_path)
    assert {sample["prompt"] for sample in samples} <= {row["prompt"] for row in PLAIN}
    for sample in samples:
        text = sample["text"]
        assert sample["reward"] == sample["num_tokens"] + 0.5 * len(text) + 100.0 * bool(text)


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
    assert trainer.train() == first and len(lines(tmp_path / "run", "metrics")) == 2


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
