"""Train the job of peer.py by TRL's GRPOTrainer, set to be fast.

    all samples of a step are generated in one batch with a KV cache: one that grows (TRL's default), one of
    fixed size, for which transformers compiles the decode step on a GPU, by its continuous batching,
    or by vLLM, which gets the merged weights before each step; that is part of generate_s
    FlashAttention 2 if it is installed, else PyTorch's attention, with which continuous batching is slow
    no recomputation of activations (TRL's default is to recompute), the microbatch that is asked for,
    fused AdamW, no reference model, no pass over the samples for old log-probabilities, nothing saved
    BF16 autocast with fp32 masters of the adapter, as qerl has them. With continuous batching TRL casts the
    adapter to BF16 before it samples, so that its masters are in BF16

It is given the rows in qerl's order and qerl's own function as reward.
"""

import gc
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from qerl.config import AdapterConfig, RunConfig
from qerl.errors import require
from qerl.export.write import write_base
from qerl.models.peft.peft_reader import read_adapter
from qerl.tasks.reward import resolve
from qerl.tracking.journal import memory_gb
from qerl.training.policy import load_task
from studies.study import with_fields

GENERATION: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-static": {"cache_implementation": "static"},
    "trl-continuous": {"use_transformers_continuous_batching": True},
    "trl-vllm": {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_correction": False,
    },
}
"""Fields of GRPOConfig by the name of the peer."""


class TrlPeer:
    def __init__(self, microbatch: int, *, generation: str):
        """microbatch: samples in a pass. generation: a name in GENERATION."""
        self.microbatch, self.generation = microbatch, GENERATION[generation]

    def train(self, config: RunConfig, add: Callable[[dict[str, Any]], None]) -> dict[str, Tensor]:
        """Train, give each step's figures to `add`, and return the adapter."""
        out = Path(config.out)
        model = as_folder(config, out / "model")
        trainer = TimedTrainer(
            model=str(model),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=[resolve(name, config.task) for name in config.task.rewards],
            args=self.grpo_config(config, out / "trl"),
            train_dataset=Dataset.from_list(rows_of(config)),
            peft_config=lora_config(config.adapter),
        )
        trainer.add_callback(StepFigures(trainer, config, add))
        trainer.train()
        trainer.save_model(str(out / "adapter"))
        del trainer
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return read_adapter(str(out / "adapter"), config.adapter)

    def grpo_config(self, config: RunConfig, out: Path) -> GRPOConfig:
        learn, algo, num_samples = config.learn, config.algo, config.num_prompts * config.num_generations
        microbatch = min(self.microbatch, num_samples)
        require(num_samples % microbatch == 0, f"microbatch must divide {num_samples}, got {microbatch}")
        on_cpu = config.model.device == "cpu"
        flash = importlib.util.find_spec("flash_attn") is not None and not on_cpu
        return GRPOConfig(
            output_dir=str(out),
            model_init_kwargs={
                "dtype": "bfloat16",
                "attn_implementation": "flash_attention_2" if flash else "sdpa",
            },
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=num_samples // microbatch,
            num_generations=config.num_generations,
            max_completion_length=config.sample.max_tokens,
            temperature=config.sample.temperature,
            max_steps=config.num_steps,
            learning_rate=learn.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=learn.betas[0],
            adam_beta2=learn.betas[1],
            adam_epsilon=learn.adam_epsilon,
            weight_decay=learn.weight_decay,
            max_grad_norm=learn.max_grad_norm,
            optim="adamw_torch_fused",
            loss_type=algo.loss_type,
            epsilon=algo.epsilon,
            epsilon_high=algo.epsilon_high,
            beta=algo.beta,
            gradient_checkpointing=False,
            bf16=True,
            shuffle_dataset=False,
            **self.generation,
            seed=config.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=on_cpu,
        )


class TimedTrainer(GRPOTrainer):
    """TRL logs the time of a step only: measure sampling and rewards too."""

    def __init__(self, **arguments: Any):
        self.spent = {"generate_s": 0.0, "reward_s": 0.0}
        super().__init__(**arguments)

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        return self._timed("generate_s", super()._generate_single_turn, *arguments, **named)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        return self._timed("reward_s", super()._calculate_rewards, *arguments, **named)

    def _timed(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        begin = now()
        result = function(*arguments, **named)
        self.spent[name] += now() - begin
        return result


class StepFigures(TrainerCallback):
    def __init__(self, trainer: TimedTrainer, config: RunConfig, add: Callable[[dict[str, Any]], None]):
        self._trainer, self._add = trainer, add
        self._num_samples = config.num_prompts * config.num_generations
        self._begin_s = self._step_s = 0.0

    def on_step_begin(self, *arguments: Any, **named: Any) -> None:
        self._begin_s = now()
        self._trainer.spent = dict.fromkeys(self._trainer.spent, 0.0)

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self._step_s = now() - self._begin_s

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if "reward" not in logs:
            return
        generate_s, reward_s = self._trainer.spent["generate_s"], self._trainer.spent["reward_s"]
        tokens = round(logs["completions/mean_length"] * self._num_samples)
        self._add(
            {
                "step": state.global_step - 1,
                "step_s": round(self._step_s, 4),
                "generate_s": round(generate_s, 4),
                "reward_s": round(reward_s, 4),
                "learn_s": round(self._step_s - generate_s - reward_s, 4),
                "tokens": tokens,
                "tokens_per_s": round(tokens / generate_s, 1),
                "reward": logs["reward"],
                "entropy": logs["entropy"],
                "memory_gb": round(memory_gb(), 3),
            }
        )


def now() -> float:
    """Return the time at which the GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def as_folder(config: RunConfig, folder: Path) -> Path:
    """Return the model as a folder that transformers reads; a GGUF file is written as one, in BF16."""
    if Path(config.model.path).is_dir():
        return Path(config.model.path)
    write_base(folder, with_fields(config, {"model.format": "bf16"}), folder)
    return folder


def rows_of(config: RunConfig) -> list[dict[str, Any]]:
    """Return the prompts of all steps, in qerl's order, with the column that the reward reads."""
    tokenizer, task = load_task(config)
    prompts = [p for step in range(config.num_steps) for p in task.train_prompts(step, config.num_prompts)]
    rows, column = [], config.task.answer_column
    for prompt in prompts:
        assert prompt.messages is not None
        tokens = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        assert tokens == prompt.tokens_T, "TRL would give the model another prompt"
        rows.append({"prompt": prompt.messages, column: prompt.columns[column]})
    return rows


def lora_config(adapter: AdapterConfig) -> LoraConfig:
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.target_modules),
        task_type="CAUSAL_LM",
    )
