"""Sequence-level ratios, two updates a rollout, ModelConfig's quantization in model_init_kwargs."""

from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import think_format_reward

SYSTEM = "Think within <think></think> tags, then answer."


def same_text(completions, solution, **kwargs):
    return [float(c[0]["content"].strip() == s.strip()) for c, s in zip(completions, solution, strict=True)]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    quantization = get_quantization_config(model_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "device_map": {"": 0} if quantization is not None else None,
        "quantization_config": quantization,
    }
    train, test = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:50%]", "test"])

    def conversation(row):
        return {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]
        }

    train = train.map(conversation).remove_columns(["problem"])
    test = test.map(conversation).remove_columns(["problem"])
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, same_text],
        train_dataset=train,
        eval_dataset=test,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
