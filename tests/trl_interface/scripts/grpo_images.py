"""Questions with images: a column of pictures, two reward functions, arguments of a model."""

from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward


def accuracy(completions, solution, **kwargs):
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    prompt = [{"role": "user", "content": "What is it?"}]
    rows = [{"prompt": prompt, "image": Image.new("RGB", (8, 8)), "solution": "x"}] * 8
    dataset = Dataset.from_list(rows).train_test_split(test_size=2, seed=42)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy],
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
