"""An environment whose state is the reward, LoraConfig() with PEFT's defaults."""

import random

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


class Walk:
    def reset(self, **kwargs) -> str:
        self.at, self.goal = 0, random.randint(1, 3)
        return f" goal={self.goal}"

    def move(self, direction: str) -> str:
        """
        Move one place.

        Args:
            direction: One of "left", "right".

        Returns:
            Where you are.
        """
        self.at += {"left": -1, "right": 1}[direction]
        return f"at={self.at}"


def near(environments, **kwargs):
    return [-abs(environment.at - environment.goal) for environment in environments]


def main():
    dataset = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "Reach the goal."}] for _ in range(20)]}
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-4B",
        train_dataset=dataset,
        reward_funcs=near,
        args=GRPOConfig(
            output_dir="game",
            chat_template_kwargs={"enable_thinking": False},
            logging_steps=1,
            log_completions=True,
            num_completions_to_print=2,
            trackio_space_id="a-game",
            max_completion_length=8,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=2,
        ),
        environment_factory=Walk,
        peft_config=LoraConfig(),
    )
    trainer.train()


if __name__ == "__main__":
    main()
