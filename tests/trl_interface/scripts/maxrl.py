"""Advantages over the group's mean reward; a binary reward; splits by name."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


def accuracy(completions, answer, **kwargs):
    return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=False)]


def with_prompt(row):
    messages = [{"role": "system", "content": "Solve."}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"]}


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    training_args.scale_rewards = "mean"
    training_args.multi_objective_aggregation = "sum_then_normalize"
    splits = load_dataset(script_args.dataset_name or "openai/gsm8k")
    train = splits["train"].map(with_prompt, remove_columns=splits["train"].column_names)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train,
        eval_dataset=splits["test"].map(with_prompt),
        reward_funcs=accuracy,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
