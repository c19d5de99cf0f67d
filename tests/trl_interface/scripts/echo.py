"""An environment with a method step and a reward of its own, read by a reward function; no main."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

texts = ["Echo hello.", "Echo goodbye.", "Say it again."]
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def reward_func(completions, environments, **kwargs):
    return [environment.get_reward() for environment in environments]


class Echo:
    def reset(self) -> None:
        self.reward = 0.0

    def step(self, message: str) -> str:
        """
        Echo the message.

        Args:
            message: The message to echo.

        Returns:
            The message.
        """
        self.reward = float(len(message))
        return message

    def get_reward(self) -> float:
        """
        Return the reward of the latest message.

        Returns:
            The reward.
        """
        return self.reward


class Rows(Echo):
    def reset(self, **row) -> None:
        self.reward = 0.0


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=dataset,
    reward_funcs=reward_func,
    args=GRPOConfig(
        output_dir="echo",
        chat_template_kwargs={"enable_thinking": False},
        log_completions=True,
        logging_steps=2,
        num_completions_to_print=1,
        max_completion_length=8,
        max_steps=2,
    ),
    environment_factory=Rows,
)
trainer.train()
