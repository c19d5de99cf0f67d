"""A whole run in a few seconds: a model of two narrow layers, a tokenizer with a token a byte, 40 sums."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
QERL = "-c", "from qerl.cli.main import main; main()"
REWARD = """
def even(prompts, completions, completion_ids, **columns):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def even_end(prompts, completions, completion_ids, **columns):
    return [float(ids[-1] % 2 == 0) for ids in completion_ids]
"""


def write_model(
    folder: Path, *, width: int = 64, ff_width: int = 96, vocab_size: int = 272, max_positions: int = 128
) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=ff_width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


def write_task(folder: Path) -> Path:
    rows = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(40)]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "even.py").write_text(REWARD)
    return path


def write_files(folder: Path, *, max_positions: int = 128) -> Path:
    write_model(folder, max_positions=max_positions)
    write_task(folder)
    return folder


def started(*arguments: str) -> "subprocess.Popen[str]":
    """Python with these arguments, in a process of its own that finds this checkout's package."""
    paths = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | own,
    )


def options(folder: Path, out: Path) -> list[str]:
    """What follows `qerl train demo` for the tiny run; the files must lie in `folder`."""
    given = {
        "out": out,
        "num-steps": 6,
        "num-prompts": 4,
        "num-generations": 4,
        "model.path": folder,
        "model.dtype": "fp32",
        "adapter.rank": 4,
        "task.name": folder / "sums.jsonl",
        "task.template": "{prompt}",
        "task.num-held-out": 8,
        "task.rewards": f"{folder / 'even.py'}:even",
        "sample.max-tokens": 5,
        "noise.num-stages": 3,
        "evaluate.num-prompts": 4,
        "checkpoint.every": 2,
        "learn.learning-rate": 0.01,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]
