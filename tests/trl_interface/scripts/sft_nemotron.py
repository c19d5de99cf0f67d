"""SFT of chats whose messages have a field of their own, merged before training; LoRA of named modules."""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(  # noqa: C408 (as TRL writes it)
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    def merge(row):
        messages = []
        for message in row["messages"]:
            thinking = message.get("thinking")
            content = (
                f"<think>\n{thinking}\n</think>\n{message['content']}" if thinking else message["content"]
            )
            messages.append({"role": message["role"], "content": content})
        row["messages"] = messages
        return row

    dataset = dataset.map(merge)
    evaluates = training_args.eval_strategy != "no" and script_args.dataset_test_split in dataset
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args, _ = parser.parse_args_and_config(return_remaining_strings=True)
    main(script_args, training_args, model_args)
