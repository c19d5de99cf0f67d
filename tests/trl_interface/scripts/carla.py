"""A simulator with one connection an address: addresses come from an iterator, calls are coroutines that the
environment runs itself, and an update takes 16 generations of as many samples as there are addresses."""

import argparse
import asyncio

from datasets import Dataset
from services import Road
from trl import GRPOConfig, GRPOTrainer


def run(loop, result):
    if asyncio.iscoroutine(result):
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(result)
    return result


class Drive:
    urls = None

    def __init__(self):
        self.client = Road(base_url=next(Drive.urls), connect_timeout_s=30)
        self.loop = asyncio.new_event_loop()

    def _advance(self):
        for _ in range(3):
            result = run(self.loop, self.client.step("observe"))
        self.reward = result.reward
        return f"Speed: {result.observation.speed_kmh:.1f} km/h."

    def reset(self, **kwargs) -> str | None:
        result = run(self.loop, self.client.reset(scenario_name="crossing"))
        self.reward = 0.0
        return f"{len(result.observation.nearby_actors)} ahead."

    def observe(self) -> str:
        """
        Look at the scene.

        Returns:
            The scene.
        """
        return self._advance()

    def lane_change(self, direction: str) -> str:
        """
        Change the lane.

        Args:
            direction: Either "left" or "right".

        Returns:
            The scene.
        """
        run(self.loop, self.client.step("lane_change", direction=direction))
        return self._advance()


def reward_func(environments, **kwargs):
    return [environment.reward for environment in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--env-urls", nargs="+", default=["road-1"])
    parser.add_argument("--trackio-space-id", default="a-road")
    parser.add_argument("--hub-model-id", default=None)
    parser.add_argument("--run-name", default=None)
    args = parser.parse_args()
    Drive.urls = iter(args.env_urls)
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Drive."}] for _ in range(32)]})
    trainer = GRPOTrainer(
        model=args.model,
        train_dataset=dataset,
        reward_funcs=reward_func,
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False},
            log_completions=True,
            logging_steps=2,
            num_completions_to_print=1,
            max_completion_length=32,
            per_device_train_batch_size=len(args.env_urls),
            steps_per_generation=1,
            num_generations=len(args.env_urls),
            gradient_accumulation_steps=16,
            max_steps=2,
            push_to_hub=args.hub_model_id is not None,
            hub_model_id=args.hub_model_id,
            run_name=args.run_name,
            report_to="trackio",
            trackio_space_id=args.trackio_space_id,
        ),
        environment_factory=Drive,
    )
    trainer.train()


if __name__ == "__main__":
    main()
