"""Train a small mixture of experts from scratch, then with rewards: `python -m studies mixture`.

    729>  ->  279 or 972       what the checkpoint learns: to sort digits, up or down by chance
    729>  ->  279              what is rewarded

No trained mixture is small enough for a CPU, so one is made: a Qwen3-MoE with 4 experts and random weights
learns from examples by transformers, and stops before it sorts well. Reinforcement learning then starts from
it as from any checkpoint: the base is frozen in NVFP4, attention and every expert get an adapter.
tests/studies/test_small_mixture.py holds that its reward rises.
"""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

import qerl
from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    NoiseConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)
from qerl.config.check import check_positive

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
_TOKENS = [*"0123456789", ">", "<end>"]
_START, _END = 10, 11
_SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": _END,
    "initializer_range": 0.1,
}
_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOptions:
    out: Path = Path("runs/mixture")
    """Folder of the checkpoint, the rows and the run."""

    num_digits: int = 3
    """Number of digits to sort."""

    num_rows: int = 2000
    """Number of problems, of which the last 256 are held out."""

    example_steps: int = 40
    """Steps of 128 examples from which the checkpoint learns."""

    seed: int = 0
    """Seed of the checkpoint, the rows and the run."""

    num_steps: int = 40
    """Training steps with rewards."""

    def __post_init__(self):
        check_positive(self, "num_digits", "num_rows", "example_steps", "num_steps")


def make_checkpoint(folder: Path, options: MixtureOptions) -> Path:
    """Write a Qwen3-MoE that has learned from examples, and its tokenizer."""
    torch.manual_seed(options.seed)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    rng = torch.Generator().manual_seed(options.seed)
    for step in range(options.example_steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 10)
        loss = _loss(model, _examples(128, options.num_digits, rng), options.num_digits)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _examples(num: int, num_digits: int, rng: torch.Generator) -> Tensor:
    """Return rows of digits, >, the digits sorted up or down, and the end."""
    digits = torch.randint(0, 10, (num, num_digits), generator=rng)
    start, end = (torch.full((num, 1), token) for token in (_START, _END))
    up = digits.sort(1).values
    is_up = torch.rand(num, 1, generator=rng) < 0.5
    return torch.cat([digits, start, torch.where(is_up, up, up.flip(1)), end], 1)


def _loss(model: transformers.PreTrainedModel, tokens: Tensor, num_digits: int) -> Tensor:
    """Return the cross entropy of what follows the `>`."""
    logits = model(tokens[:, :-1]).logits[:, num_digits:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, num_digits + 1 :].flatten())


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each digit."""
    vocabulary = {token: index for index, token in enumerate(_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=">"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9>]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = _TEMPLATE
    return fast


def write_rows(file: Path, options: MixtureOptions) -> Path:
    """Write a line for each problem: digits and their ascending order."""
    rng = random.Random(options.seed)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(options.num_rows):
            digits = rng.choices("0123456789", k=options.num_digits)
            row = {"prompt": "".join(digits), "answer": "".join(sorted(digits))}
            lines.write(json.dumps(row) + "\n")
    return file


def run_config(options: MixtureOptions) -> RunConfig:
    """Return the run that starts from the checkpoint and the rows in options.out."""
    return RunConfig(
        out=str(options.out / "run"),
        seed=options.seed,
        num_steps=options.num_steps,
        num_prompts=16,
        num_generations=8,
        model=ModelConfig(path=str(options.out / "model"), format="nvfp4", dtype="fp32"),
        adapter=AdapterConfig(
            rank=8, alpha=16.0, target_modules=ATTENTION, experts="per_expert", expert_rank=4
        ),
        task=TaskConfig(
            name=str(options.out / "rows.jsonl"), template="{prompt}", rewards=("exact",), num_held_out=256
        ),
        sample=SampleConfig(max_tokens=options.num_digits + 1),
        engine=EngineConfig(kv_cache_gb=0.05),
        noise=NoiseConfig(schedule="exponential", sigma_start=2e-2, sigma_end=1e-3, unit="relative"),
        algo=AlgoConfig(loss_type="grpo", router_replay=True),
        learn=LearnConfig(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_ratio=0.0),
        evaluate=EvalConfig(num_prompts=256),
        checkpoint=CheckpointConfig(every=options.num_steps),
    )


def train_mixture(options: MixtureOptions) -> dict[str, Any]:
    """Make the checkpoint and the rows, train, and return the run's result. A folder that holds them already
    continues its run."""
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "rows.jsonl").exists():
        make_checkpoint(options.out / "model", options)
        write_rows(options.out / "rows.jsonl", options)
    return qerl.train(run_config(options))
