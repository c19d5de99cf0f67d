"""An environment that gives the prompt and the reward: no data set, no reward function."""

from trl import GRPOConfig, GRPOTrainer


class Riddle:
    def reset(self, **kwargs) -> str:
        self.answered = False
        return "Answer the riddle."

    async def answer(self, text: str) -> str:
        """Answer it.

        Args:
            text: The answer.
        """
        self.answered = True
        return "thanks"

    async def get_reward(self) -> float:
        return float(self.answered)


args = GRPOConfig("riddle", max_steps=2, max_completion_length=8, temperature=0.9, top_k=20, report_to="none")
trainer = GRPOTrainer("Qwen/Qwen3-0.6B", args=args, environment_factory=Riddle)
trainer.train()
