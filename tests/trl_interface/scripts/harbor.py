"""One object gives data, environment and reward; the factory is a partial function, prompts are empty."""

import argparse
import asyncio
from functools import partial

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class Shell:
    def __init__(self, environment_type="docker"):
        self.environment_type, self.reward = environment_type, 0.0

    def _run(self, coroutine):
        return asyncio.run(coroutine)

    def reset(self, task_dir=None, **kwargs) -> str:
        self.reward = 0.0
        return self._run(self._instruction(task_dir))

    async def _instruction(self, task_dir):
        return f"Answer the question in {task_dir}."

    def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: The command.

        Returns:
            What it prints.
        """
        self.reward = 1.0
        return self._run(self._instruction(command))


def outcome(environments=None, environment_reward=None, **_):
    return [float(env.reward) for env in environments]


class Spec:
    def __init__(self, num_tasks, environment_type):
        prompt = [{"role": "user", "content": ""}]
        rows = {"prompt": [prompt] * num_tasks, "task_dir": [f"tasks/{i}" for i in range(num_tasks)]}
        rows["gold_answer"] = [None] * num_tasks
        self.train_dataset = Dataset.from_dict(rows)
        self.environment_factory = partial(Shell, environment_type=environment_type)
        self.reward_funcs = outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-4B")
    parser.add_argument("--env", dest="environment_type", default="docker")
    parser.add_argument("--num-tasks", type=int, default=6)
    parser.add_argument("--vllm-mode", choices=("colocate", "server"), default="colocate")
    parser.add_argument("--report-to", default="none")
    args = parser.parse_args()
    spec = Spec(args.num_tasks, args.environment_type)
    config = dict(  # noqa: C408 (as TRL writes it)
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=64,
        max_steps=2,
        max_tool_calling_iterations=25,
        chat_template_kwargs={"enable_thinking": False},
        log_completions=True,
        use_vllm=True,
        vllm_mode=args.vllm_mode,
        report_to=[s for s in args.report_to.split(",") if s != "none"] or "none",
        vllm_gpu_memory_utilization=0.3,
    )
    trainer = GRPOTrainer(
        model=args.model,
        args=GRPOConfig(**config),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    )
    trainer.train()


if __name__ == "__main__":
    main()
