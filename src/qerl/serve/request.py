"""Parse the bodies of /v1/completions and /v1/chat/completions into prompts and sampling parameters.

A field that would change the answer and is not supported is an error. Fields of _IGNORED do not change the
answer, fields of _NEUTRAL are accepted at the value that does not, and null means absent.
"""

import dataclasses
import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from qerl.algo.seeds import mix
from qerl.config.options import ServeOptions
from qerl.errors import UserError
from qerl.serve.loaded_model import LoadedModel
from qerl.tasks.prompt import render_chat
from qerl.types import Prompt, Sampling

_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "response_format": {"type": "text"},
}
_LENGTHS = ("max_tokens", "max_completion_tokens")


class ApiError(HTTPException):
    """An error response: HTTP status, message, and OpenAI's `param` and `code`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.param, self.code = param, code


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list")
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Fields(BaseModel, strict=True, allow_inf_nan=False):
    """Takes values of exactly the declared types."""


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class ChatMessage(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]

    def render_chat(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class StreamOptions(_Fields):
    include_usage: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=100)]


class RequestBody(_Fields, extra="forbid"):
    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(_as_list)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Any = None

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
        return {name: value for name, value in kept.items() if value != _NEUTRAL.get(name)}

    @classmethod
    def parse(cls, content: bytes, model: str, options: ServeOptions) -> Self:
        try:
            body = cls.model_validate_json(content)
        except ValidationError as error:
            raise _api_error(error) from None
        if body.model != model:
            message = f"there is no such model here; there is {model}"
            raise ApiError(404, message, param="model", code="model_not_found")
        limits = {"n": options.max_samples} | dict.fromkeys(_LENGTHS, options.max_tokens)
        for name, limit in limits.items():
            if (getattr(body, name, None) or 1) > limit:
                raise ApiError(400, f"{name}: must be at most {limit}", param=name)
        return body


class ChatBody(RequestBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None


class CompletionBody(RequestBody):
    prompt: Annotated[list[str], Field(min_length=1), BeforeValidator(_as_list)]
    logprobs: int | None = Field(None, ge=0, le=0)
    """0: only the log probabilities of the sampled tokens are returned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    body: RequestBody
    prompts_P: list[Prompt]
    sampling: Sampling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestParser:
    model: LoadedModel
    options: ServeOptions
    name: str
    """The model's name in requests."""

    def chat(self, content: bytes) -> CompletionRequest:
        body = ChatBody.parse(content, self.name, self.options)
        messages = [message.render_chat() for message in body.messages]
        if self.options.system_prompt is not None and all(each["role"] != "system" for each in messages):
            messages.insert(0, {"role": "system", "content": self.options.system_prompt})
        try:
            prompt = render_chat(self.model.tokenizer, messages)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        return self._request(body, [prompt], body.max_completion_tokens or body.max_tokens)

    def completion(self, content: bytes) -> CompletionRequest:
        body = CompletionBody.parse(content, self.name, self.options)
        self._check_num_choices(len(body.prompt), "prompt")
        prompts = [(text, list(self.model.tokenizer(text)["input_ids"])) for text in body.prompt]
        return self._request(body, prompts, body.max_tokens)

    def _request(
        self, body: RequestBody, prompts: list[tuple[str, list[int]]], max_tokens: int | None
    ) -> CompletionRequest:
        self._check_num_choices(len(prompts) * body.n, "n")
        for _, tokens_T in prompts:
            self._check_length(len(tokens_T), max_tokens or 1)
        if body.stream and body.with_logprobs:
            raise ApiError(400, "logprobs are not supported in a stream", param="logprobs")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return CompletionRequest(
            body=body,
            prompts_P=[
                Prompt(index=mix(seed, i), text=text, tokens_T=tokens_T, messages=None, columns={})
                for i, (text, tokens_T) in enumerate(prompts)
            ],
            sampling=Sampling(
                max_tokens=max_tokens or self.options.max_tokens,
                temperature=body.temperature,
                top_p=None if body.top_p == 1 else body.top_p,
                stop=tuple(dict.fromkeys(body.stop)),
            ),
        )

    def _check_num_choices(self, num_choices: int, param: str) -> None:
        limit = self.options.max_samples
        if num_choices > limit:
            message = f"at most {limit} choices per request (prompts times n), got {num_choices}"
            raise ApiError(400, message, param=param)

    def _check_length(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raise ApiError unless the prompt and this many tokens fit; an answer without max_tokens may be cut
        short by the model's positions."""
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt is empty", param="prompt")
        limit = min(self.options.max_prompt_tokens, self.model.max_positions - answer_tokens)
        if prompt_tokens > limit:
            message = f"the prompt has {prompt_tokens} tokens; the limit for this request is {limit}"
            raise ApiError(400, message, code="context_length_exceeded")


def _api_error(error: ValidationError) -> ApiError:
    """Name the first wrong field, as in `messages[0].role: Input should be 'system', 'user' or ...`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    path = path.removeprefix(".")[:100]
    message = "not supported here" if first["type"] == "extra_forbidden" else first["msg"]
    param = path.partition(".")[0] if path.startswith("messages") else path.partition("[")[0]
    return ApiError(400, f"{path or 'body'}: {message.removeprefix('Value error, ')}", param=param or None)
