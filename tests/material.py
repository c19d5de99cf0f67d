"""Shared by tests of tasks: a byte tokenizer, files of rows, groups."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qerl.types import Group, Prompt, Sample

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, START, END = 256, 257, 258
SUMS = (
    ("min_terms", 2),
    ("max_terms", 2),
    ("min_digits", 1),
    ("max_digits", 2),
    ("operators", "+"),
    ("allow_parentheses", False),
)


def tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A token a byte, and three special ones; it puts <bos> before any text unless told not to."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<bos>", "<|im_start|>", "<|im_end|>")]
    )
    bytes_only.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<bos>", eos_token="<|im_end|>")
    made.chat_template = chat_template
    return made


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sample(text: str) -> Sample:
    return Sample(tokens_T=list(text.encode()) or [0], logprobs_T=[0.0], text=text, finish="stop", version=0)


def group(*texts: str, messages: list[dict] | None = None, **columns) -> Group:
    prompt = Prompt(index=0, text="What is 1 + 2?", tokens_T=[1], messages=messages, columns=columns)
    return Group(prompt=prompt, samples_G=[sample(text) for text in texts])
