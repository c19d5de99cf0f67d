"""OpenAI's response objects for completions and chat completions: whole responses and server-sent events.

With return_token_ids, as in vLLM, a choice has `token_ids` and, for completions, `prompt_token_ids`; a chat
has the latter beside its choices. /v1/responses is in responses.py.
"""

import itertools
import json
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase as Tokenizer

from qerl.serve.fields import CompletionBody
from qerl.serve.request import CompletionRequest
from qerl.serve.tools import ParsedCall, ToolCallStream
from qerl.types import Sample, TokenLogprob

Json = dict[str, Any]


class ApiResponse(Protocol):
    """The response to one request."""

    def whole(self, samples: list[Sample]) -> Json: ...

    def start(self) -> list[str]:
        """Return the first events of a stream."""
        ...

    def piece(self, index: int, text: str, tokens: list[TokenLogprob]) -> list[str]:
        """Return the events of a choice's next text and of the tokens since its last piece."""
        ...

    def end_choice(self, index: int, sample: Sample) -> list[str]: ...

    def end(self, num_tokens: int) -> list[str]:
        """Return the last events of a stream, of which all choices have this many tokens."""
        ...


def event(value: Json, name: str | None = None) -> str:
    data = f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
    return data if name is None else f"event: {name}\n{data}"


class Envelope:
    """Common part of responses to completions and chats."""

    def __init__(self, prefix: str, object: str, chunk_object: str, request: CompletionRequest, model: str):
        self._request, self._object, self._chunk_object = request, object, chunk_object
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[Json], num_tokens: int) -> Json:
        return {**self._head, "object": self._object, "choices": choices, "usage": self._usage(num_tokens)}

    def chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self._chunk_object, "choices": choices}

    def end(self, num_tokens: int) -> list[str]:
        done = "data: [DONE]\n\n"
        if not self._request.body.stream_options.include_usage:
            return [done]
        return [event(self.chunk([]) | {"usage": self._usage(num_tokens)}), done]

    def token_ids(self, tokens: list[TokenLogprob]) -> Json:
        is_asked = self._request.body.return_token_ids
        return {"token_ids": [each.token for each in tokens]} if is_asked else {}

    def prompt_token_ids(self, index: int) -> Json:
        if not self._request.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._request.prompts_P[index].tokens_T}

    def _usage(self, num_tokens: int) -> Json:
        """A prompt counts once, however many samples it has."""
        num_prompt = sum(len(prompt.tokens_T) for prompt in self._request.prompts_P)
        total = num_prompt + num_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": total}


class CompletionResponse:
    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer):
        self._request, self._tokenizer = request, tokenizer
        self._envelope = Envelope("cmpl", "text_completion", "text_completion", request, model)
        self._has_answer = request.body.num_answer_tokens != 0  # 0: the engine's one token is left out
        self._num_top = request.body.num_top_logprobs
        body = request.body
        self._with_ids = isinstance(body, CompletionBody) and body.return_tokens_as_token_ids

    def whole(self, samples: list[Sample]) -> Json:
        choices = [self._whole_choice(i, sample) for i, sample in enumerate(samples)]
        num_tokens = sum(map(len, self._request.pending.tokens.values()))
        return self._envelope.whole(choices, num_tokens if self._has_answer else 0)

    def _whole_choice(self, index: int, sample: Sample) -> Json:
        request, body, p = self._request, self._request.body, index // self._request.body.n
        tokens = request.pending.tokens[index] if self._has_answer else []
        text, finish = (sample.text, sample.finish) if self._has_answer else ("", "length")
        all_tokens, prompt_T = list[TokenLogprob | None](tokens), list[int]()
        if request.with_echo:
            prompt = request.prompts_P[p]
            text = (prompt.text or str(self._tokenizer.decode(prompt.tokens_T))) + text
            if request.pending.prompt_logprobs_P is not None:
                prompt_T = prompt.tokens_T
                all_tokens = [None, *request.pending.prompt_logprobs_P[p].tokens, *tokens]
        logprobs = self._logprobs(all_tokens, [*prompt_T, *(each.token for each in tokens)])
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs if body.with_logprobs else None,
            "finish_reason": finish,
            **self._envelope.token_ids(tokens),
            **self._envelope.prompt_token_ids(p),
        }

    def _logprobs(self, tokens: list[TokenLogprob | None], ids: list[int]) -> Json:
        name = _token_id_text if self._with_ids else lambda token: str(self._tokenizer.decode([token]))
        return _completion_logprobs(name, tokens, list(map(name, ids)), self._num_top)

    def start(self) -> list[str]:
        return []

    def piece(self, index: int, text: str, tokens: list[TokenLogprob]) -> list[str]:
        is_asked, ids = self._request.body.with_logprobs, [each.token for each in tokens]
        logprobs = self._logprobs([*tokens], ids) if is_asked else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return [event(self._envelope.chunk([choice | self._envelope.token_ids(tokens)]))]

    def end_choice(self, index: int, sample: Sample) -> list[str]:
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": sample.finish}
        return [event(self._envelope.chunk([choice]))]

    def end(self, num_tokens: int) -> list[str]:
        return self._envelope.end(num_tokens)


class ChatResponse:
    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer):
        self._request, self._tokenizer = request, tokenizer
        self._envelope = Envelope("chatcmpl", "chat.completion", "chat.completion.chunk", request, model)
        self._calls = [request.tool_call_stream() for _ in range(request.pending.num_choices)]

    def whole(self, samples: list[Sample]) -> Json:
        choices = [self._whole_choice(i, sample) for i, sample in enumerate(samples)]
        num_tokens = sum(map(len, self._request.pending.tokens.values()))
        return self._envelope.whole(choices, num_tokens) | self._envelope.prompt_token_ids(0)

    def _whole_choice(self, index: int, sample: Sample) -> Json:
        text, calls = split_calls(self._calls[index], sample.text)
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        tokens = self._request.pending.tokens[index]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finish(index, sample),
            **self._envelope.token_ids(tokens),
        }

    def start(self) -> list[str]:
        chunks = [
            self._envelope.chunk([self._choice(index, {"role": "assistant", "content": ""})])
            for index in range(len(self._calls))
        ]
        return [event(chunk | self._envelope.prompt_token_ids(0)) for chunk in chunks]

    def piece(self, index: int, text: str, tokens: list[TokenLogprob]) -> list[str]:
        return self._events(index, *self._calls[index].add(text), tokens)

    def _events(
        self, index: int, text: str, calls: list[ParsedCall], tokens: list[TokenLogprob]
    ) -> list[str]:
        delta: Json = {"content": text} if text else {}
        if calls:
            first = self._calls[index].num_calls - len(calls)
            delta["tool_calls"] = [{"index": first + i, **call.to_json()} for i, call in enumerate(calls)]
        logprobs, ids = self._logprobs(tokens) if tokens else None, self._envelope.token_ids(tokens)
        if not (delta or logprobs or ids.get("token_ids")):
            return []
        choice = self._choice(index, delta) | {"logprobs": logprobs} | ids
        return [event(self._envelope.chunk([choice]))]

    def end_choice(self, index: int, sample: Sample) -> list[str]:
        events = self._events(index, *self._calls[index].end(), [])
        last = self._choice(index, {}) | {"finish_reason": self._finish(index, sample)}
        return [*events, event(self._envelope.chunk([last]))]

    def end(self, num_tokens: int) -> list[str]:
        return self._envelope.end(num_tokens)

    def _choice(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _finish(self, index: int, sample: Sample) -> str | None:
        return "tool_calls" if self._calls[index].num_calls else sample.finish

    def _logprobs(self, tokens: list[TokenLogprob]) -> Json | None:
        return _chat_logprobs(self._tokenizer, tokens) if self._request.body.with_logprobs else None


def split_calls(stream: ToolCallStream, text: str) -> tuple[str, list[ParsedCall]]:
    """Return the text and the calls of a whole answer."""
    (before, calls), (after, last) = stream.add(text), stream.end()
    return before + after, calls + last


def _token_id_text(token: int) -> str:
    """Return a token's name in vLLM's return_tokens_as_token_ids."""
    return f"token_id:{token}"


def _chat_logprobs(tokenizer: Tokenizer, tokens: list[TokenLogprob]) -> Json:
    def entry(token: int, logprob: float) -> Json:
        text = str(tokenizer.decode([token]))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(
    name: Callable[[int], str], tokens: list[TokenLogprob | None], texts: list[str], num_top: int
) -> Json:
    """name: of a token among the most likely ones. texts: of the tokens. None: the first token of a prompt,
    which nothing predicts."""

    def top(each: TokenLogprob) -> dict[str, float]:
        """Tokens with the same name are one entry, that of the most likely."""
        logprobs: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            logprobs.setdefault(name(token), logprob)
        return logprobs

    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else each.logprob for each in tokens],
        "top_logprobs": [None if each is None else top(each) for each in tokens] if num_top else None,
        "text_offset": [0, *itertools.accumulate(map(len, texts))][:-1],
    }
