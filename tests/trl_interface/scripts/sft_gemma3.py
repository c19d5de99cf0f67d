"""SFT of texts with a model object of a class for images and text, without LoRA; a push."""

import os

from datasets import load_dataset
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

os.environ.setdefault("TRACKIO_SPACE_ID", "trl-trackio")


def main():
    train_dataset = load_dataset("open-r1/codeforces-cots", split="train").remove_columns("prompt")
    name = "google/gemma-3-12b-it"
    model = AutoModelForImageTextToText.from_pretrained(name, attn_implementation="eager")
    training_args = SFTConfig(
        output_dir=f"{name}-codeforces-SFT",
        bf16=True,
        use_liger_kernel=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_length=256,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        dataset_num_proc=32,
        num_train_epochs=1,
    )
    trainer = SFTTrainer(args=training_args, model=model, train_dataset=train_dataset)
    trainer.train()
    trainer.push_to_hub(dataset_name="open-r1/codeforces-cots")


if __name__ == "__main__":
    main()
