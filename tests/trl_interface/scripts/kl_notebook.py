"""A KL penalty, truncated completions masked, Dr. GRPO, DeepSpeed and a vLLM server in the arguments."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def vowels(completions, **kwargs):
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


args = GRPOConfig(
    output_dir="kl",
    run_name="kl-run",
    beta=0.04,
    loss_type="dr_grpo",
    scale_rewards=False,
    mask_truncated_completions=True,
    epsilon_high=0.28,
    num_iterations=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=4,
    warmup_steps=1,
    lr_scheduler_type="cosine",
    deepspeed={"zero_optimization": {"stage": 3}},
    use_vllm=True,
    vllm_mode="server",
    vllm_server_base_url="http://localhost:8000",
    vllm_importance_sampling_mode="token_truncate",
    save_total_limit=1,
    save_steps=2,
)
trainer = GRPOTrainer("Qwen/Qwen2.5-3B", vowels, args, load_dataset("trl-lib/tldr", split="train"))
trainer.train()
print(trainer.accelerator.is_main_process, trainer.state.global_step)
