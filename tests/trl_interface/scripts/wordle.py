"""A word game on a server: the reward is the latest one, and a guess after the end is an error."""

from datasets import Dataset
from services import Words
from trl import GRPOConfig, GRPOTrainer

prompt = "Solve the puzzle. Use the tool `guess`."


class Puzzle:
    instances = 0

    def __init__(self):
        Puzzle.instances += 1
        self.client = Words(base_url=f"words-{Puzzle.instances}")

    def reset(self, **kwargs) -> None:
        self.client.reset()
        self.reward, self.before, self.done = -1.0, "", False

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            What the game says.
        """
        if self.done:
            self.reward = -1.0
            raise ValueError("Game over.")
        result = self.client.step(guess)
        said = result.observation.messages[0].content
        new, self.before = said[len(self.before) :], said
        self.reward, self.done = result.reward, result.done
        return new


def reward(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


def main() -> None:
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for _ in range(2)]})
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=reward,
        train_dataset=dataset,
        args=GRPOConfig(
            report_to="trackio",
            trackio_space_id="wordle",
            log_completions=True,
            num_completions_to_print=2,
            logging_steps=1,
            chat_template_kwargs={"enable_thinking": False},
            max_completion_length=64,
        ),
        environment_factory=Puzzle,
    )
    trainer.train()


if __name__ == "__main__":
    main()
