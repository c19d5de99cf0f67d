"""Bodies of /v1/completions and /v1/chat/completions, and errors in OpenAI's format.

A field that would change the answer and is not supported is an error. Fields of _IGNORED do not change the
answer, fields of _NEUTRAL are accepted at the value that does not, and null means absent.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from qerl.config.options import ServeOptions
from qerl.tasks.rows.values import depth_of

_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "best_of": 1,
    "suffix": "",
    "tools": [],
    "functions": [],
    "modalities": ["text"],
    "stop_token_ids": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include": [],
    "truncation": "disabled",
    "background": False,
    "reasoning": {},
}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MAX_TOP_LOGPROBS = 20
_MAX_DEPTH = 100  # what parses JSON schemas and templates recurses


class ApiError(HTTPException):
    """An error response: HTTP status, message, and OpenAI's `param` and `code`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.param, self.code = param, code


def unknown_model(known: tuple[str, ...]) -> ApiError:
    message = f"unknown model; this server has {', '.join(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list")
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    is_tokens = isinstance(value, list) and all(type(each) is int for each in value)
    return [value] if isinstance(value, str) or (is_tokens and value) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _or_none(value: Any) -> Any:
    """vLLM's clients write 0 or -1 for no top_k."""
    return None if value in (0, -1) and type(value) is int else value


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


class Fields(BaseModel, strict=True, allow_inf_nan=False):
    """Takes values of exactly the declared types."""


class TextPart(Fields):
    type: Literal["text", "refusal"]
    text: str = ""


class FunctionCall(Fields):
    name: str = Field(min_length=1)
    arguments: str = "{}"

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as an object, which templates write as JSON."""
        try:
            arguments = json.loads(self.arguments or "{}")
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Fields):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        has_other = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not has_other:
            raise ValueError("content is missing")
        return self

    def render_chat(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(p.text for p in self.content or [])}
        if self.tool_calls:
            calls = [(call.id, call.function.for_template()) for call in self.tool_calls]
            message["tool_calls"] = [{"id": i, "type": "function", "function": each} for i, each in calls]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message | {name: value for name, value in optional.items() if value is not None}


class FunctionSpec(Fields):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": fields | {"parameters": self.schema_of_arguments}}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Fields):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=100)]


class AdapterBody(Fields, extra="forbid"):
    """The body of a request that loads or unloads an adapter, as vLLM has it."""

    lora_name: str
    lora_path: str | None = None
    """Folder of a PEFT adapter, only to load it."""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        try:
            _check_json(content)
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise api_error(error) from None


class RequestBody(Fields, extra="forbid"):
    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: Annotated[int | None, Field(ge=1, lt=1 << 31), BeforeValidator(_or_none)] = None
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[list[StopString], Field(max_length=16), BeforeValidator(_as_list)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Any = None
    response_format: TextFormat | None = None
    return_token_ids: bool = False

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def num_top_logprobs(self) -> int:
        return 0

    @property
    def num_answer_tokens(self) -> int | None:
        """Maximum length of the answer, if the request sets one."""
        return self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        dropped = _IGNORED | {name for name, value in _NEUTRAL.items() if fields.get(name) == value}
        if isinstance(bias := fields.get("logit_bias"), dict) and all(map(_is_zero, bias.values())):
            dropped.add("logit_bias")
        return {name: value for name, value in fields.items() if value is not None and name not in dropped}

    @classmethod
    def parse(cls, content: bytes, models: tuple[str, ...] | None, options: ServeOptions) -> Self:
        """models: the names of which the body must give one; None: any."""
        try:
            _check_json(content)
            body = cls.model_validate_json(content)
        except ValidationError as error:
            raise api_error(error) from None
        if models is not None and body.model not in models:
            raise unknown_model(models)
        limits = {"n": options.max_samples} | dict.fromkeys(_LENGTHS, options.max_tokens)
        for name, limit in limits.items():
            if (getattr(body, name, None) or 1) > limit:
                raise ApiError(400, f"{name}: must be at most {limit}", param=name)
        return body


class ChatBody(RequestBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int = Field(0, ge=0, le=_MAX_TOP_LOGPROBS)
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs

    @property
    def num_answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.tool_choice not in ("none", "auto") and not self.offered_tools:
            raise ValueError("tool_choice names no function of tools")
        if self.is_forced_call and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("tool_choice and response_format exclude each other")
        return self

    @property
    def is_forced_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def offered_tools(self) -> list[FunctionSpec]:
        """The functions that the answer may call."""
        functions, choice = [tool.function for tool in self.tools], self.tool_choice
        if isinstance(choice, NamedTool):
            return [each for each in functions if each.name == choice.function.name]
        return [] if choice == "none" else functions

    @property
    def offered_schemas(self) -> dict[str, dict[str, Any]]:
        """By name, the schemas of the arguments of the functions that the answer may call."""
        return {each.name: each.schema_of_arguments for each in self.offered_tools}


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(RequestBody):
    prompt: Annotated[list[str] | list[TokenIds], Field(min_length=1), BeforeValidator(_as_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo")
        if self.echo and self.stream:
            raise ValueError("echo is not supported in a stream")
        return self

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0


def _check_json(content: bytes) -> None:
    """Raise ApiError unless it can be written as UTF-8 JSON again: no lone surrogates, no NaN; and unless it
    means one thing: no key twice in an object."""
    try:
        value = json.loads(content, object_pairs_hook=_object)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:
        raise ApiError(400, "body: must be UTF-8 text without lone surrogates") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: invalid JSON: {error}") from None
    if depth_of(value) > _MAX_DEPTH:
        raise ApiError(400, f"body: lists and objects are nested more than {_MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {ascii(key)[:50]} appears twice")
        fields[key] = value
    return fields


def api_error(error: ValidationError) -> ApiError:
    """Name the first wrong field, as in `messages[0].role: Input should be 'system', 'user' or ...`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    path = path.removeprefix(".")[:100]
    message = "not supported here" if first["type"] == "extra_forbidden" else first["msg"]
    param = path.partition(".")[0]
    param = param if param.startswith("messages") else param.partition("[")[0]
    return ApiError(400, f"{path or 'body'}: {message.removeprefix('Value error, ')}", param=param or None)
