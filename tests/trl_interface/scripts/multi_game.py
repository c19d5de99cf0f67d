"""Two games behind one environment; a column selects the game, and a reward abstains in the other one."""

import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class Games:
    def reset(self, **kwargs) -> str | None:
        self.active, self.reward, self.done = kwargs.get("env", "guess"), 0.0, False
        return f" ({self.active})"

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: The word.
        """
        if self.active != "guess":
            raise ValueError("guess is not this game")
        self.reward = float(word == "apple")
        return "right" if self.reward else "wrong"

    def stay(self) -> str:
        """Do nothing."""
        self.done = True
        return "done"


def guess_reward(environments, **kwargs):
    return [env.reward if env.active == "guess" else None for env in environments]


def stay_reward(environments, **kwargs):
    return [float(env.done) if env.active == "stay" else None for env in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=8)
    n = parser.parse_args().size
    dataset = Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": f"{name} game {i}"}]
                for name in ("guess", "stay")
                for i in range(n)
            ],
            "env": ["guess"] * n + ["stay"] * n,
        }
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=[guess_reward, stay_reward],
        train_dataset=dataset,
        args=GRPOConfig(
            "games", logging_steps=1, max_completion_length=8, max_steps=2, max_tool_calling_iterations=4
        ),
        environment_factory=Games,
    )
    trainer.train()


if __name__ == "__main__":
    main()
