"""CISPO with rewards scaled by the batch and a cosine schedule, resumed from its checkpoint."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def digits(completions, **kwargs):
    return [float(sum(letter.isdigit() for letter in completion)) for completion in completions]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    rows = load_dataset("trl-lib/tldr", split="train")
    training_args.scale_rewards = "batch"
    trainer = GRPOTrainer(
        model_args.model_name_or_path, digits, training_args, rows, peft_config=get_peft_config(model_args)
    )
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    metrics = trainer.evaluate(rows.select(range(3)))
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
