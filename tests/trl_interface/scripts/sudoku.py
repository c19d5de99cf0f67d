"""A board on a server: rewards are properties of the environment, which are no tools; LoRA on request."""

import argparse
from datetime import datetime
from pathlib import Path

from datasets import Dataset
from services import Words
from trl import GRPOConfig, GRPOTrainer, RichProgressCallback


def reward_valid(environments, **kwargs):
    return [env.valid_reward for env in environments]


def reward_progress(environments, **kwargs):
    return [env.progress_reward for env in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="Qwen/Qwen3-1.7B")
    parser.add_argument("--dataset-size", type=int, default=64)
    parser.add_argument("--use-lora", action="store_true", default=False)
    parser.add_argument("--lora-r", type=int, default=8)
    parser.add_argument("--lora-alpha", type=int, default=16)
    parser.add_argument("--save-total-limit", type=int, default=None)
    parser.add_argument("--output-dir", default=None)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--gradient-checkpointing", action="store_true", default=True)
    args = parser.parse_args()
    system = {"role": "system", "content": "You play."}
    user = {"role": "user", "content": "Play like an expert."}
    dataset = Dataset.from_dict({"prompt": [[system, user]] * args.dataset_size})

    class Board:
        count = 0

        def __init__(self):
            Board.count += 1
            self.client = Words(base_url=f"board-{Board.count}")
            self._restart()

        def _restart(self):
            self._scores, self._done = [], False

        def reset(self, **kwargs) -> str:
            self._restart()
            result = self.client.reset()
            self._done = result.done
            return f"Board:\n{result.observation.messages[0].content}"

        def place(self, row: int, col: int, number: int) -> str:
            """Place a number.

            Args:
                row: Row number (1-9).
                col: Column number (1-9).
                number: Number to place (1-9).

            Returns:
                The board.
            """
            if self._done:
                raise ValueError("Game is over.")
            result = self.client.step(f"[{row} {col} {number}]")
            self._scores.append(float(result.reward or 0.0))
            self._done = result.done
            return result.observation.messages[0].content[-8:]

        @property
        def valid_reward(self) -> float:
            return sum(self._scores) / len(self._scores) if self._scores else 0.0

        @property
        def progress_reward(self) -> float:
            return len(self._scores) / 81

    timestamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    output_dir = Path(args.output_dir or f"outputs/sudoku-{timestamp}")
    config = GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_server_base_url=None,
        vllm_gpu_memory_utilization=0.2,
        output_dir=str(output_dir),
        num_train_epochs=1,
        learning_rate=5e-6,
        weight_decay=0.0,
        gradient_accumulation_steps=64,
        per_device_train_batch_size=1,
        warmup_steps=20,
        num_generations=2,
        max_completion_length=32,
        logging_steps=1,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=args.save_total_limit,
        temperature=0.8,
        top_k=10,
        top_p=args.top_p,
        report_to="trackio",
        log_completions=True,
        num_completions_to_print=1,
        chat_template_kwargs={"enable_thinking": False},
    )
    config.run_name = f"run-{timestamp}"
    config.project = "group-sudoku"
    config.trackio_space_id = "Sudoku-GRPO"
    config.gradient_checkpointing = args.gradient_checkpointing
    peft_config = None
    if args.use_lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=args.model_id,
        reward_funcs=[reward_valid, reward_progress],
        peft_config=peft_config,
        train_dataset=dataset,
        args=config,
        environment_factory=Board,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
