"""Pack prompts and their samples as rows to run a decoder on; read those of a run, newest first."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.errors import UserError
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import TreeLayout, tree_attention
from qerl.kernels.runtime.gpu_memory import largest_doubling, memory_bytes
from qerl.models.architecture import Architecture
from qerl.models.decoder import Attend
from qerl.models.delta_net import Recur, recur_over
from qerl.tracking.json_lines import decode
from qerl.tracking.sample_files import DAMAGE, sample_lines, segments
from qerl.types import Tree

TokenGroup = tuple[list[int], list[list[int]]]
"""A prompt and its samples."""

_TOKENS, _GPU_TOKENS = 8192, 65_536
_MEMORY_SHARE = 8
"""A pass in float32 may take an eighth of a GPU's memory."""


def calibration_tokens(a: Architecture, device: torch.device) -> int:
    """Return the tokens that GPTQ is calibrated on: 8,192, on a GPU as many as its memory allows, up to
    65,536. With these Qwen2.5-Coder-0.5B has a KL of 0.0185 for 0.0255 nats."""
    return planned_tokens(a, memory_bytes(device))


def planned_tokens(a: Architecture, gpu_bytes: float) -> int:
    """Return calibration_tokens of a GPU with this memory."""
    row_bytes = 4 * (4 * a.ff_width + 12 * a.width)
    return largest_doubling(_TOKENS, min(_GPU_TOKENS, gpu_bytes / _MEMORY_SHARE / row_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    tokens_T: Tensor
    positions_T: Tensor
    attend: Attend
    recur: Recur


def read_calibration(
    file: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, device: torch.device
) -> Calibration:
    """Return about max_tokens rows of a run's samples.jsonl, of as many of its newest prompts as they have
    place for."""
    groups = _with_few_samples(tokenize_groups(file, tokenizer, max_tokens), max_tokens)
    if not groups:
        raise UserError(f"{file}: holds no samples, which calibration needs")
    return pack_groups(groups, max_tokens=max_tokens, device=device)


def _with_few_samples(groups: Iterable[TokenGroup], max_tokens: int) -> list[TokenGroup]:
    """Return the first groups with as few samples each, the newest, as max_tokens need: one answer to each
    of 17 prompts of GSM8K kept more of a merged adapter than 8 to each of 4 (KL 0.0006 for 0.0012)."""
    read, num_tokens = list[TokenGroup](), 0
    for prompt, samples in groups:
        read.append((prompt, samples))
        num_tokens += len(prompt) + len(samples[0])
        if num_tokens >= max_tokens:
            break
    dealt = [(prompt, samples[:1]) for prompt, samples in read]
    for number in range(1, max((len(samples) for _, samples in read), default=0)):
        for (_, few), (_, samples) in zip(dealt, read, strict=True):
            if num_tokens < max_tokens:
                few += samples[number : number + 1]
                num_tokens += sum(map(len, samples[number : number + 1]))
    return dealt


def pack_groups(groups: Iterable[TokenGroup], *, max_tokens: int, device: torch.device) -> Calibration:
    """Return about max_tokens rows: each prompt once, followed by its distinct samples."""
    tokens: list[int] = []
    positions: list[int] = []
    trees: list[Tree] = []
    for prompt, samples in groups:
        start = len(tokens)
        for first, part in [(0, prompt), *((len(prompt), sample) for sample in samples)]:
            tokens += part
            positions += range(first, first + len(part))
        trees.append(Tree(start=start, prompt_tokens=len(prompt), branch_tokens=tuple(map(len, samples))))
        if len(tokens) >= max_tokens:
            break
    layout = TreeLayout.of(trees, device)

    def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions) -> Tensor:
        return tree_attention(q_TNH, k_TKH, v_TKH, layout, options)

    tokens_T, positions_T = (torch.tensor(values, device=device) for values in (tokens, positions))
    return Calibration(tokens_T, positions_T, attend, recur_over(trees, device))


def tokenize_groups(file: Path, tokenizer: PreTrainedTokenizerBase, max_lines: int) -> Iterator[TokenGroup]:
    """Yield each prompt and its distinct samples, from the last lines of the file to the first."""
    ends_by_text: dict[str, dict[str, bool]] = {}
    for record in _last_records(file, max_lines):
        ends_by_text.setdefault(record["prompt"], {})[record["text"]] = record["finish"] == "stop"
    eos: Any = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    is_plain = tokenizer.chat_template is None  # its first special token is then not in the text
    for prompt, ends in ends_by_text.items():
        encoded = (
            tokenizer.encode(text, add_special_tokens=False) + end * is_ended
            for text, is_ended in ends.items()
        )
        if samples := [tokens for tokens in encoded if tokens]:
            yield tokenizer.encode(prompt, add_special_tokens=is_plain), samples


def _last_records(file: Path, max_lines: int) -> list[dict[str, Any]]:
    """Return the last lines' records, newest first, without damaged lines; of a run also compressed ones."""
    older = segments(file.parent) if file.name == "samples.jsonl" else []
    newest: list[bytes] = []
    try:
        for path in (file, *(segment.path for segment in reversed(older))):
            if len(newest) < max_lines:
                newest += reversed(collections.deque(sample_lines(path), maxlen=max_lines - len(newest)))
    except (OSError, *DAMAGE) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read: {reason}") from error
    return [record for line in newest if (record := decode(line)) is not None]
