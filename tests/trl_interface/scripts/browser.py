"""A web page as text, or with --images as picture and text: an update for each sample of a generation."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from datasets import Dataset
from PIL import Image
from services import Page
from trl import GRPOConfig, GRPOTrainer


def reward_completion(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--dataset-size", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--output-dir", default=None)
    parser.add_argument("--vllm-mode", choices=("colocate", "server"), default="colocate")
    parser.add_argument("--vllm-server-url", default="http://localhost:8001")
    parser.add_argument("--project", default=None)
    parser.add_argument("--images", action="store_true")
    args = parser.parse_args()
    system = {"role": "system", "content": "You control a web browser."}
    user = {"role": "user", "content": "Complete the web task."}
    dataset = Dataset.from_dict({"prompt": [[system, user]] * args.dataset_size})

    class Browser:
        def __init__(self):
            self.client = Page(base_url="https://page").sync()
            self.reward, self._done, self._steps = 0.0, False, 0

        def reset(self, **kwargs) -> str:
            self.reward, self._done, self._steps = 0.0, False, 0
            return self._text(self.client.reset(task_name="click-test").observation)

        def click(self, bid: str) -> str | list:
            """Click an element on the page.

            Args:
                bid: The ID of the element.

            Returns:
                The page.
            """
            return self._act(f"click({bid!r})")

        def noop(self) -> str | list:
            """Do nothing.

            Returns:
                The page.
            """
            return self._act("noop()")

        def _act(self, action: str) -> str | list:
            if self._done:
                done = "Episode is done."
                return [{"type": "text", "text": done}] if args.images else done
            self._steps += 1
            result = self.client.step(action)
            self._done = result.done or self._steps >= args.max_steps
            self.reward = 1.0 if result.done and result.reward > 0 else 0.0
            text = self._text(result.observation)
            if not args.images:
                return text
            return [{"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "text", "text": text}]

        def _text(self, seen) -> str:
            return f"Goal: {seen.goal}\n\nPage structure:\n{seen.axtree_txt}"

    timestamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    config = GRPOConfig(
        use_vllm=True,
        vllm_mode=args.vllm_mode,
        vllm_server_base_url=args.vllm_server_url if args.vllm_mode == "server" else None,
        vllm_gpu_memory_utilization=0.4,
        output_dir=str(Path(args.output_dir or f"outputs/browser-{timestamp}")),
        num_train_epochs=1,
        learning_rate=5e-6,
        weight_decay=0.0,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=1,
        warmup_steps=10,
        num_generations=4,
        generation_batch_size=4,
        max_completion_length=96,
        logging_steps=1,
        report_to="trackio",
        trackio_space_id="browser",
        save_strategy="steps",
        save_steps=50,
        save_total_limit=None,
        temperature=0.7,
        top_k=50,
        top_p=None,
        chat_template_kwargs={"enable_thinking": False},
    )
    config.run_name = f"run-{timestamp}"
    config.project = args.project or "group"
    trainer = GRPOTrainer(
        model=args.model_id,
        reward_funcs=[reward_completion],
        train_dataset=dataset,
        args=config,
        environment_factory=Browser,
    )
    trainer.train()


if __name__ == "__main__":
    main()
