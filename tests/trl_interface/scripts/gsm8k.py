"""GSM8K with TRL's parser: a reward of the script's own, evaluation, the saved adapter pushed."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def last_number(text):
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else None


def correct(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(last_number(text) == gold) for text, gold in zip(texts, answer, strict=True)]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    data = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    data = data.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "answer": row["answer"].split("####")[-1].strip(),
        }
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=correct,
        train_dataset=data[script_args.dataset_train_split],
        eval_dataset=data[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
