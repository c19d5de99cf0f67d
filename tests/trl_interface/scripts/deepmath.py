"""DeepMath with TRL's own accuracy reward and nothing but defaults."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=think_format_reward,
    args=GRPOConfig(
        output_dir="deepmath", max_steps=2, max_completion_length=8, log_completions=True, use_vllm=True
    ),
    train_dataset=dataset,
)
trainer.train()
trainer.save_model()
