"""QLoRA as in a notebook: BitsAndBytesConfig, statistics, a push, the adapter loaded again."""

import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

name, output_dir = "Qwen/Qwen2-7B-Instruct", "qlora"
train_dataset = load_dataset("AI-MO/NuminaMath-TIR", split="train[:50%]")
train_dataset = train_dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
train_dataset = train_dataset.remove_columns(["problem"])

training_args = GRPOConfig(
    output_dir=output_dir,
    learning_rate=2e-5,
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=8,
    optim="paged_adamw_8bit",
    fp16=True,
    use_liger_kernel=True,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    logging_steps=1,
    report_to="none",
    push_to_hub=True,
    model_init_kwargs={
        "dtype": torch.float32,
        "device_map": "auto",
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype="float16",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        ),
    },
)
trainer = GRPOTrainer(
    model=name,
    reward_funcs=[think_format_reward],
    args=training_args,
    train_dataset=train_dataset,
    peft_config=LoraConfig(
        r=32, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj"]
    ),
)
stats = trainer.train()
print(f"{stats.metrics['train_runtime']} seconds, {trainer.state.log_history[-1]['reward']}")
trainer.save_model(output_dir)
trainer.push_to_hub(dataset_name="AI-MO/NuminaMath-TIR")

base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
tuned = PeftModel.from_pretrained(base, output_dir)
tokens = AutoTokenizer.from_pretrained(output_dir)("1 + 1 =", return_tensors="pt")
print(tuned.generate(**tokens, max_new_tokens=3).shape)
