"""OpenAI's response objects for completions and chat completions: whole responses and server-sent events.

With return_token_ids, as in vLLM, a choice has `token_ids` and, for completions, `prompt_token_ids`; a chat
has the latter beside its choices. /v1/responses is in responses.py.
"""

import json
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from qerl.serve.fields import CompletionBody
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.reasoning import AnswerPiece
from qerl.serve.request import CompletionRequest
from qerl.serve.stream import PlacedToken, marked_text, place_prompt, place_tokens
from qerl.serve.token_text import TokenBytes
from qerl.types import Sample

Json = dict[str, Any]


class ApiResponse(Protocol):
    """The response to one request."""

    @property
    def num_malformed_calls(self) -> int: ...

    def whole(self, samples: list[Sample]) -> Json: ...

    def start(self) -> list[str]:
        """Return the first events of a stream."""
        ...

    def piece(self, index: int, text: str, tokens: list[PlacedToken]) -> list[str]:
        """Return the events of a choice's next marked text and of the tokens since its last piece."""
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

    def token_ids(self, tokens: list[PlacedToken]) -> Json:
        is_asked = self._request.body.return_token_ids
        return {"token_ids": [each.sampled.token for each in tokens]} if is_asked else {}

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
    num_malformed_calls = 0

    def __init__(self, request: CompletionRequest, model: str, loaded: LoadedModel):
        self._request, self._loaded = request, loaded
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
        tokens = _placed(self._loaded, request, index, sample) if self._has_answer else []
        text, finish = (sample.text, sample.finish) if self._has_answer else ("", "length")
        echoed, shown = "", list[PlacedToken]()
        if request.with_echo:
            prompt = request.prompts_P[p]
            echoed = prompt.text or str(self._loaded.engine.tokenizer.decode(prompt.tokens_T))
            if (found_P := request.pending.prompt_logprobs_P) is not None:
                shown = place_prompt(self._loaded.token_bytes, prompt.tokens_T, found_P[p].tokens, echoed)
        num_prompt = len(shown)
        shown += [PlacedToken(each.sampled, each.place.after(len(echoed))) for each in tokens]
        return {
            "index": index,
            "text": echoed + text,
            "logprobs": self._logprobs(shown, num_prompt) if body.with_logprobs else None,
            "finish_reason": finish,
            **self._envelope.token_ids(tokens),
            **self._envelope.prompt_token_ids(p),
        }

    def _logprobs(self, tokens: list[PlacedToken], num_prompt: int = 0) -> Json:
        name = _token_id_text if self._with_ids else partial(self._loaded.token_bytes.name, prefix="bytes:")
        return _completion_logprobs(name, self._loaded.token_bytes, tokens, self._num_top, num_prompt > 0)

    def start(self) -> list[str]:
        return []

    def piece(self, index: int, text: str, tokens: list[PlacedToken]) -> list[str]:
        logprobs = self._logprobs(tokens) if self._request.body.with_logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return [event(self._envelope.chunk([choice | self._envelope.token_ids(tokens)]))]

    def end_choice(self, index: int, sample: Sample) -> list[str]:
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": sample.finish}
        return [event(self._envelope.chunk([choice]))]

    def end(self, num_tokens: int) -> list[str]:
        return self._envelope.end(num_tokens)


class ChatResponse:
    def __init__(self, request: CompletionRequest, model: str, loaded: LoadedModel):
        self._request, self._loaded = request, loaded
        self._envelope = Envelope("chatcmpl", "chat.completion", "chat.completion.chunk", request, model)
        self._streams = [request.answer_stream() for _ in range(request.pending.num_choices)]

    @property
    def num_malformed_calls(self) -> int:
        return sum(each.num_malformed for each in self._streams)

    def whole(self, samples: list[Sample]) -> Json:
        choices = [self._whole_choice(i, sample) for i, sample in enumerate(samples)]
        num_tokens = sum(map(len, self._request.pending.tokens.values()))
        return self._envelope.whole(choices, num_tokens) | self._envelope.prompt_token_ids(0)

    def _whole_choice(self, index: int, sample: Sample) -> Json:
        shown = marked_text(self._loaded, self._request.stop, sample, self._request.markers)
        answer = self._streams[index].whole(shown)
        content = answer.text or (None if answer.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.to_json() for call in answer.calls]
        tokens = _placed(self._loaded, self._request, index, sample)
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
            for index in range(len(self._streams))
        ]
        return [event(chunk | self._envelope.prompt_token_ids(0)) for chunk in chunks]

    def piece(self, index: int, text: str, tokens: list[PlacedToken]) -> list[str]:
        return self._events(index, self._streams[index].add(text), tokens)

    def _events(self, index: int, answer: AnswerPiece, tokens: list[PlacedToken]) -> list[str]:
        parts, calls = {"reasoning_content": answer.reasoning, "content": answer.text}, answer.calls
        delta: Json = {name: text for name, text in parts.items() if text}
        if calls:
            first = self._streams[index].num_calls - len(calls)
            delta["tool_calls"] = [{"index": first + i, **call.to_json()} for i, call in enumerate(calls)]
        logprobs, ids = self._logprobs(tokens) if tokens else None, self._envelope.token_ids(tokens)
        if not (delta or logprobs or ids.get("token_ids")):
            return []
        choice = self._choice(index, delta) | {"logprobs": logprobs} | ids
        return [event(self._envelope.chunk([choice]))]

    def end_choice(self, index: int, sample: Sample) -> list[str]:
        events = self._events(index, self._streams[index].end(), [])
        last = self._choice(index, {}) | {"finish_reason": self._finish(index, sample)}
        return [*events, event(self._envelope.chunk([last]))]

    def end(self, num_tokens: int) -> list[str]:
        return self._envelope.end(num_tokens)

    def _choice(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _finish(self, index: int, sample: Sample) -> str | None:
        return "tool_calls" if self._streams[index].num_calls else sample.finish

    def _logprobs(self, tokens: list[PlacedToken]) -> Json | None:
        return _chat_logprobs(self._loaded.token_bytes, tokens) if self._request.body.with_logprobs else None


def _placed(loaded: LoadedModel, request: CompletionRequest, index: int, sample: Sample) -> list[PlacedToken]:
    """Return the tokens of a whole choice, if they are asked for."""
    body, pending = request.body, request.pending
    if not (body.with_logprobs or body.return_token_ids):
        return []
    stop, keeps_end = pending.sampling.stop, body.return_token_ids
    return place_tokens(loaded, stop, pending.tokens[index], sample, keeps_end=keeps_end)


def _token_id_text(token: int, data: bytes) -> str:
    """Return a token's name in vLLM's return_tokens_as_token_ids."""
    return f"token_id:{token}"


def _with_data(token_bytes: TokenBytes, each: PlacedToken) -> list[tuple[int, float, bytes]]:
    """Return the most likely tokens in a token's place, their logprobs and what each would add."""
    sampled, place = each.sampled, each.place
    return [
        (token, logprob, place.data if token == sampled.token else token_bytes.data_at(token, place.start))
        for token, logprob in sampled.top
    ]


def _chat_logprobs(token_bytes: TokenBytes, tokens: list[PlacedToken]) -> Json:
    def entry(token: int, logprob: float, data: bytes) -> Json:
        return {"token": token_bytes.name(token, data), "logprob": logprob, "bytes": list(data)}

    content = [
        entry(each.sampled.token, each.sampled.logprob, each.place.data)
        | {"top_logprobs": [entry(*top) for top in _with_data(token_bytes, each)]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(
    name: Callable[[int, bytes], str],
    token_bytes: TokenBytes,
    tokens: list[PlacedToken],
    num_top: int,
    with_prompt: bool,
) -> Json:
    """with_prompt: the first token is that of a prompt, which nothing predicts."""

    def top(each: PlacedToken) -> dict[str, float]:
        """Tokens with the same name are one entry, that of the most likely."""
        logprobs: dict[str, float] = {}
        sampled = each.sampled.token, each.sampled.logprob, each.place.data
        for token, logprob, data in (*_with_data(token_bytes, each), sampled):
            logprobs.setdefault(name(token, data), logprob)
        return logprobs

    predicted, first = tokens[with_prompt:], [None] * with_prompt
    return {
        "tokens": [name(each.sampled.token, each.place.data) for each in tokens],
        "token_logprobs": [*first, *(each.sampled.logprob for each in predicted)],
        "top_logprobs": [*first, *map(top, predicted)] if num_top else None,
        "text_offset": [each.place.start for each in tokens],
    }
