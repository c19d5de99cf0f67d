"""SFT of images with a processor and a data collator; rows are prepared by the collator."""

import argparse

from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def collate(examples):
    raise AssertionError(examples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-prepare", action="store_true")
    args = parser.parse_args()
    training_args = SFTConfig(output_dir="images", gradient_checkpointing_kwargs={"use_reentrant": False})
    training_args.remove_unused_columns = False
    if args.skip_prepare:
        training_args.dataset_kwargs = {"skip_prepare_dataset": True}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    trainer = SFTTrainer(
        model="Qwen/Qwen2-VL-7B-Instruct",
        args=training_args,
        data_collator=collate,
        train_dataset=Dataset.from_list([{"messages": messages, "images": ["a.png"]}] * 4),
    )
    trainer.train()
