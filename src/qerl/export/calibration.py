"""A run's own prompts and samples, newest first, as rows that a decoder can be run over."""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.errors import UserError
from qerl.kernels.attention import PackedLayout, packed_attention
from qerl.models.decoder import Attend
from qerl.tracking.atomic_file import decode
from qerl.types import Tree


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    tokens_T: Tensor
    positions_T: Tensor
    attend: Attend


def calibration(
    run: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, device: torch.device
) -> Calibration:
    """About max_tokens rows: the text of each prompt once, and its different samples behind it."""
    tokens: list[int] = []
    positions: list[int] = []
    trees: list[Tree] = []
    for prompt, samples in _tokenized(run / "samples.jsonl", tokenizer, max_tokens):
        start = len(tokens)
        for first, part in [(0, prompt), *((len(prompt), sample) for sample in samples)]:
            tokens += part
            positions += range(first, first + len(part))
        trees.append(Tree(start=start, prompt_tokens=len(prompt), branch_tokens=tuple(map(len, samples))))
        if len(tokens) >= max_tokens:
            break
    if not tokens:
        raise UserError(f"{run / 'samples.jsonl'}: holds no samples, which the rounding is fitted to")
    layout = PackedLayout.of(trees, device)

    def attend(layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        return packed_attention(q_TNH, k_TKH, v_TKH, layout)

    return Calibration(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend)


def _tokenized(
    file: Path, tokenizer: PreTrainedTokenizerBase, max_lines: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Each prompt and its different samples, from the last of the file's lines to earlier ones."""
    samples: dict[str, dict[str, list[int]]] = {}
    eos: Any = tokenizer.eos_token_id
    for record in _last_records(file, max_lines):
        end = [eos] if record["finish"] == "stop" and eos is not None else []
        tokens = _tokens(tokenizer, record["text"], starts=False) + end
        if tokens:
            samples.setdefault(record["prompt"], {})[record["text"]] = tokens
    for prompt, by_text in samples.items():
        yield _tokens(tokenizer, prompt, starts=tokenizer.chat_template is None), list(by_text.values())


def _last_records(file: Path, max_lines: int) -> list[dict[str, Any]]:
    """Newest first; a damaged line is left out."""
    try:
        with file.open("rb") as lines:
            last = collections.deque(lines, maxlen=max_lines)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    return [record for line in reversed(last) if (record := decode(line)) is not None]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, starts: bool) -> list[int]:
    """starts: with the special token that a text without a chat template begins with, if there is one."""
    return tokenizer.encode(text, add_special_tokens=starts)
