"""SFT of tool calls as JSON in a chat: QLoRA, a model object in NF4, halves to train and to evaluate."""

import json
import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import get_json_schema
from trl import SFTConfig, SFTTrainer

os.environ.setdefault("TRACKIO_SPACE_ID", "trl-trackio")


def search(query: str) -> str:
    """
    Search documents.

    Args:
        query: query string
    """
    return "found"


SYSTEM = "Answer with a call of a tool:\n" + json.dumps([get_json_schema(search)["function"]], indent=2)


def conversation(row):
    call = json.dumps({"name": row["tool_name"], "arguments": json.loads(row["tool_arguments"])})
    roles = ("system", SYSTEM), ("user", row["user_content"]), ("assistant", call)
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def main():
    name, output_dir = "CohereLabs/tiny-aya-global", "tools-SFT"
    dataset = load_dataset("bebechien/SimpleToolCalling", split="train")
    dataset = dataset.map(conversation, remove_columns=dataset.features, batched=False)
    dataset = dataset.train_test_split(test_size=0.5, shuffle=True)
    model = AutoModelForCausalLM.from_pretrained(
        name,
        attn_implementation="sdpa",
        dtype=torch.float16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.float16,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        ),
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    training_args = SFTConfig(
        output_dir=output_dir,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        num_train_epochs=3,
        learning_rate=2e-4,
        optim="paged_adamw_8bit",
        logging_steps=1,
        report_to="trackio",
        max_length=1024,
        use_liger_kernel=True,
        activation_offloading=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        push_to_hub=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        peft_config=LoraConfig(r=32, lora_alpha=32, target_modules=targets),
    )
    trainer.train()
    trainer.save_model(output_dir)
    trainer.push_to_hub(dataset_name="bebechien/SimpleToolCalling")


if __name__ == "__main__":
    main()
