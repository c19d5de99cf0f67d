"""Samples in OpenAI's words: whole answers, and the pieces of a stream, for either route."""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.serve.request import CompletionRequest
from qerl.types import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponseFormat:
    """What a route's answers look like."""

    prefix: str
    whole_object: str
    piece_object: str
    whole: Callable[[str], dict[str, Any]]
    """The part of a choice that holds its text."""
    piece: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None
    """Of a choice's first piece, before any text."""
    ending: dict[str, Any]
    """Of its last, after all."""
    logprobs: Callable[[Sample, PreTrainedTokenizerBase], dict[str, Any]]


def _chat_logprobs(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(_token_texts(sample, tokenizer), sample.logprobs_T, strict=True)
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    texts = _token_texts(sample, tokenizer)
    offsets = [0, *itertools.accumulate(map(len, texts))][:-1]
    return {
        "tokens": texts,
        "token_logprobs": sample.logprobs_T,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _token_texts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.decode([token])) for token in sample.tokens_T]


CHAT = ResponseFormat(
    prefix="chatcmpl",
    whole_object="chat.completion",
    piece_object="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    ending={"delta": {}},
    logprobs=_chat_logprobs,
)
COMPLETION = ResponseFormat(
    prefix="cmpl",
    whole_object="text_completion",
    piece_object="text_completion",
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    opening=None,
    ending={"text": ""},
    logprobs=_completion_logprobs,
)


class ApiResponse:
    """To one request."""

    def __init__(
        self, form: ResponseFormat, ask: CompletionRequest, model: str, tokenizer: PreTrainedTokenizerBase
    ):
        self._form, self._ask, self._tokenizer = form, ask, tokenizer
        self._head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, samples: list[Sample]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._form.whole(sample.text),
                "logprobs": self._form.logprobs(sample, self._tokenizer) if self._ask.with_logprobs else None,
                "finish_reason": sample.finish,
            }
            for index, sample in enumerate(samples)
        ]
        usage = self._usage(sum(len(sample.tokens_T) for sample in samples))
        return {**self._head, "object": self._form.whole_object, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        opening = self._form.opening
        return None if opening is None else self._piece([self._choice(index, opening, None)])

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._piece([self._choice(index, self._form.piece(text), None)])

    def ending(self, index: int, sample: Sample) -> dict[str, Any]:
        return self._piece([self._choice(index, self._form.ending, sample.finish)])

    def counts(self, num_tokens: int) -> dict[str, Any]:
        return self._piece([]) | {"usage": self._usage(num_tokens)}

    def _choice(self, index: int, part: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, **part, "logprobs": None, "finish_reason": finish}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._form.piece_object, "choices": choices}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        """A prompt counts once, however many answers it gets."""
        num_prompt_tokens = sum(len(prompt.tokens_T) for prompt in self._ask.prompts_P)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
