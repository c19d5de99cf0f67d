"""A ball to catch on a server that the script may start itself; TRL's RichProgressCallback."""

import argparse

from datasets import Dataset
from services import Ball
from trl import GRPOConfig, GRPOTrainer, RichProgressCallback


def reward_from_env(environments, **kwargs):
    return [max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--dataset-size", type=int, default=8)
    parser.add_argument("--vllm-mode", choices=["colocate", "server"], default="colocate")
    parser.add_argument("--vllm-server-url", default="http://localhost:8000")
    args = parser.parse_args()
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Catch."}]] * args.dataset_size})

    class Catch:
        COLUMNS = 5
        number = 0

        def __init__(self):
            Catch.number += 1
            self.client = Ball(base_url=f"ball-{Catch.number}")
            self.reward, self.done = 0.0, False

        @staticmethod
        def _text(state):
            return " ".join(str(i) for i, value in enumerate(state) if value == 1.0)

        def reset(self, **kwargs) -> str:
            result = self.client.reset()
            self.reward, self.done = 0.0, result.observation.done
            return self._text(result.observation.info_state)

        def _act(self, action: int) -> str:
            if self.done:
                raise ValueError("Episode is done.")
            result = self.client.step(action)
            self.reward, self.done = result.reward or 0.0, result.observation.done
            return self._text(result.observation.info_state)

        def move(self, direction: str) -> str:
            """Move the paddle.

            Args:
                direction: Either "left" or "right".

            Returns:
                What is seen.
            """
            if direction not in ("left", "right"):
                raise ValueError(f"Invalid direction {direction!r}")
            return self._act({"left": 0, "right": 2}[direction])

        def stay(self) -> str:
            """Do nothing.

            Returns:
                What is seen.
            """
            return self._act(1)

    training_args = GRPOConfig(
        output_dir=f"{args.model.split('/')[-1]}-GRPO-Catch",
        use_vllm=True,
        vllm_mode=args.vllm_mode,
        vllm_server_base_url=args.vllm_server_url if args.vllm_mode == "server" else None,
        vllm_gpu_memory_utilization=0.2,
        logging_steps=1,
        log_completions=True,
        report_to="trackio",
        trackio_space_id="catch",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        num_generations=8,
        max_completion_length=48,
        gradient_accumulation_steps=16,
        chat_template_kwargs={"enable_thinking": False},
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward_from_env,
        args=training_args,
        train_dataset=dataset,
        environment_factory=Catch,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
