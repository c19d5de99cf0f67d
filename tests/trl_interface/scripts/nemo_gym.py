"""Rollouts of an agent server: fields of the script's own in a subclass of GRPOConfig, and rollout_func."""

from dataclasses import dataclass

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


@dataclass
class GymConfig(GRPOConfig):
    agent_servers: dict[str, str] | None = None
    request_timeout: float = 10800


def reward_fn(completions, **kwargs):
    return [float(r) for r in kwargs["env_reward"]]


def rollout(prompts, trainer):
    raise AssertionError(trainer.args.agent_servers)


def main():
    name = "Qwen/Qwen3-4B"
    args = GymConfig(
        use_vllm=True,
        vllm_mode="server",
        vllm_server_host="127.0.0.1",
        vllm_server_port=8000,
        gradient_checkpointing=True,
        num_generations_eval=1,
        logging_steps=1,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        mask_truncated_completions=True,
        model_init_kwargs={"torch_dtype": "auto"},
        agent_servers={"a": "http://127.0.0.1"},
        output_dir="gym",
    )
    trainer = GRPOTrainer(
        model=name,
        processing_class=AutoTokenizer.from_pretrained(name, truncation_side="left", padding_side="left"),
        reward_funcs=reward_fn,
        train_dataset=Dataset.from_list([{"prompt": str(i), "metadata": "{}"} for i in range(8)]),
        eval_dataset=None,
        rollout_func=rollout,
        args=args,
    )
    trainer.train(resume_from_checkpoint=None)


if __name__ == "__main__":
    main()
