"""OpenAI's response objects: whole responses and stream chunks, for completions and chat completions."""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from qerl.serve.request import CompletionRequest
from qerl.types import Sample

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponseFormat:
    """The differences between the two routes' responses."""

    id_prefix: str
    object: str
    chunk_object: str
    text: Callable[[str], Json]
    """The part of a choice that holds its text."""
    text_delta: Callable[[str], Json]
    """The same in a stream chunk."""
    first_delta: Json | None
    """Sent before any text of a choice."""
    last_delta: Json
    logprobs: Callable[[Sample, Tokenizer], Json]


def _chat_logprobs(sample: Sample, tokenizer: Tokenizer) -> Json:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(_token_texts(sample, tokenizer), sample.logprobs_T, strict=True)
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(sample: Sample, tokenizer: Tokenizer) -> Json:
    texts = _token_texts(sample, tokenizer)
    return {
        "tokens": texts,
        "token_logprobs": sample.logprobs_T,
        "top_logprobs": None,
        "text_offset": [0, *itertools.accumulate(map(len, texts))][:-1],
    }


def _token_texts(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer.decode([token])) for token in sample.tokens_T]


CHAT = ResponseFormat(
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    text_delta=lambda text: {"delta": {"content": text}},
    first_delta={"delta": {"role": "assistant", "content": ""}},
    last_delta={"delta": {}},
    logprobs=_chat_logprobs,
)
COMPLETION = ResponseFormat(
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    text=lambda text: {"text": text},
    text_delta=lambda text: {"text": text},
    first_delta=None,
    last_delta={"text": ""},
    logprobs=_completion_logprobs,
)


class ApiResponse:
    """The response to one request, whole or in chunks."""

    def __init__(self, format: ResponseFormat, request: CompletionRequest, model: str, tokenizer: Tokenizer):
        self._format, self._request, self._tokenizer = format, request, tokenizer
        response_id = f"{format.id_prefix}-{uuid.uuid4().hex}"
        self._head = {"id": response_id, "created": int(time.time()), "model": model}

    def whole(self, samples: list[Sample]) -> Json:
        choices = [
            _choice(index, self._format.text(sample.text), sample.finish, self._logprobs(sample))
            for index, sample in enumerate(samples)
        ]
        usage = self._usage(sum(len(sample.tokens_T) for sample in samples))
        return {**self._head, "object": self._format.object, "choices": choices, "usage": usage}

    def first_chunks(self, num_choices: int) -> list[Json]:
        delta = self._format.first_delta
        return [] if delta is None else [self._chunk([_choice(i, delta)]) for i in range(num_choices)]

    def text_chunk(self, index: int, text: str) -> Json:
        return self._chunk([_choice(index, self._format.text_delta(text))])

    def last_chunk(self, index: int, sample: Sample) -> Json:
        return self._chunk([_choice(index, self._format.last_delta, sample.finish)])

    def usage_chunk(self, num_tokens: int) -> Json:
        return self._chunk([]) | {"usage": self._usage(num_tokens)}

    def _logprobs(self, sample: Sample) -> Json | None:
        return self._format.logprobs(sample, self._tokenizer) if self._request.body.with_logprobs else None

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self._format.chunk_object, "choices": choices}

    def _usage(self, num_tokens: int) -> Json:
        """A prompt counts once, however many samples it has."""
        prompt_tokens = sum(len(prompt.tokens_T) for prompt in self._request.prompts_P)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": prompt_tokens + num_tokens,
        }


def _choice(index: int, text: Json, finish: str | None = None, logprobs: Json | None = None) -> Json:
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish}
