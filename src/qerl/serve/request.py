"""Bodies of /v1/completions and /v1/chat/completions, checked and made into prompts.

A field that would change the answer and is not known here is refused by name, not passed over; those of
_IGNORED change nothing, and those of _NEUTRAL are taken at the value at which they change nothing.
"""

import dataclasses
import json
import math
import secrets
from typing import Any

from qerl.algo.seeds import mix
from qerl.config.options import ServeOptions
from qerl.errors import UserError
from qerl.serve.loaded_model import LoadedModel
from qerl.tasks.prompt import rendered
from qerl.types import Prompt, Sampling

_COMMON = {"model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_COMPLETION = _COMMON | {"prompt", "logprobs"}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "response_format": {"type": "text"},
}
_MOST_STOPS, _MOST_STOP_CHARACTERS = 4, 100


class ApiError(Exception):
    """What the client is told, with its HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    prompts_P: list[Prompt]
    num_samples: int
    sampling: Sampling
    is_stream: bool
    with_usage: bool
    """Of a stream: a last piece with the counts."""
    with_logprobs: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestParser:
    opened: LoadedModel
    options: ServeOptions
    name: str
    """What requests must call the model."""

    def chat(self, body: bytes) -> CompletionRequest:
        fields = self._fields(body, _CHAT)
        if fields.get("top_logprobs"):
            raise ApiError(
                400, "top_logprobs is not supported, only those of the tokens drawn", param="top_logprobs"
            )
        try:
            pair = rendered(self.opened.tokenizer, self._messages(fields.get("messages")))
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        return self._ask(fields, [pair], name, with_logprobs=_flag(fields, "logprobs"))

    def completion(self, body: bytes) -> CompletionRequest:
        fields = self._fields(body, _COMPLETION)
        if fields.get("logprobs"):
            raise ApiError(
                400, "logprobs must be 0: only those of the tokens drawn are given", param="logprobs"
            )
        given = fields.get("prompt")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "prompt must be a string or a list of strings", param="prompt")
        self._check_choices(len(texts), "prompt")
        pairs = [(text, list(self.opened.tokenizer(text)["input_ids"])) for text in texts]
        return self._ask(fields, pairs, "max_tokens", with_logprobs="logprobs" in fields)

    def _fields(self, body: bytes, known: set[str]) -> dict[str, Any]:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "the body must be a JSON object")
        fields = {name: value for name, value in fields.items() if value is not None}
        for name, value in fields.items():
            if name not in known | _IGNORED and (name not in _NEUTRAL or value != _NEUTRAL[name]):
                raise ApiError(400, f"{name!r} is not supported here", param=name[:100])
        if fields.get("model") != self.name:
            raise ApiError(
                404,
                f"there is no such model here; there is {self.name}",
                param="model",
                code="model_not_found",
            )
        return fields

    def _messages(self, given: Any) -> list[dict[str, str]]:
        if not isinstance(given, list) or not given:
            raise ApiError(400, "messages must be a list with a message or more", param="messages")
        messages = [_message(each, f"messages[{i}]") for i, each in enumerate(given)]
        if self.options.system_prompt is not None and all(each["role"] != "system" for each in messages):
            return [{"role": "system", "content": self.options.system_prompt}, *messages]
        return messages

    def _ask(
        self, fields: dict[str, Any], pairs: list[tuple[str, list[int]]], length: str, *, with_logprobs: bool
    ) -> CompletionRequest:
        num_samples = _integer(fields, "n", 1, 1, self.options.max_samples)
        self._check_choices(len(pairs) * num_samples, "n")
        max_tokens = _integer(fields, length, self.options.max_tokens, 1, self.options.max_tokens)
        for _, tokens_T in pairs:
            self._check_length(len(tokens_T), max_tokens if length in fields else 1)
        is_stream, stream_options = _flag(fields, "stream"), fields.get("stream_options", {})
        if not isinstance(stream_options, dict):
            raise ApiError(400, "stream_options must be an object", param="stream_options")
        if is_stream and with_logprobs:
            raise ApiError(400, "logprobs are not given in a stream", param="logprobs")
        seed = _integer(fields, "seed", secrets.randbits(63), -(1 << 63), (1 << 64) - 1)
        return CompletionRequest(
            prompts_P=[
                Prompt(index=mix(seed, place), text=text, tokens_T=tokens_T, messages=None, columns={})
                for place, (text, tokens_T) in enumerate(pairs)
            ],
            num_samples=num_samples,
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=_number(fields, "temperature", 0.0, 2.0),
                top_p=None if (top_p := _number(fields, "top_p", 1e-6, 1.0)) == 1 else top_p,
                stop=_stop(fields.get("stop", [])),
            ),
            is_stream=is_stream,
            with_usage=_flag(stream_options, "include_usage"),
            with_logprobs=with_logprobs,
        )

    def _check_choices(self, num_choices: int, param: str) -> None:
        if num_choices > self.options.max_samples:
            message = (
                f"at most {self.options.max_samples} answers a request, prompts times n; got {num_choices}"
            )
            raise ApiError(400, message, param=param)

    def _check_length(self, prompt_tokens: int, least_tokens: int) -> None:
        """A request that names no length gets what the positions leave."""
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt is empty", param="prompt")
        most = min(self.options.max_prompt_tokens, self.opened.max_positions - least_tokens)
        if prompt_tokens > most:
            message = f"the prompt has {prompt_tokens} tokens, the most beside this answer are {most}"
            raise ApiError(400, message, code="context_length_exceeded")


def _message(given: Any, where: str) -> dict[str, str]:
    """A role and a text; a content of several text parts is one text."""
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
        message = f"{where} must have a role (system, developer, user, assistant) and a content of text"
        raise ApiError(400, message, param=where)
    return {"role": "system" if role == "developer" else role, "content": content}


def _integer(fields: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ApiError(400, f"{name} must be an integer from {least} to {most}", param=name)
    return value


def _number(fields: dict[str, Any], name: str, least: float, most: float) -> float:
    """1 unless it is given."""
    value = fields.get(name, 1.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name) or False
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", param=name)
    return value


def _stop(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    is_list = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not is_list or not all(isinstance(s, str) and 0 < len(s) <= _MOST_STOP_CHARACTERS for s in stops):
        limits = f"{_MOST_STOPS} of 1 to {_MOST_STOP_CHARACTERS} characters"
        raise ApiError(400, f"stop must be a string or a list of strings, at most {limits}", param="stop")
    return tuple(dict.fromkeys(stops))
