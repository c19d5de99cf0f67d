"""/v1/responses in its plain form: text and function calls, without stored responses or built-in tools.

A body becomes that of a chat, and the one choice of the chat becomes the items of `output`: at most one
message, then the function calls.
"""

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from qerl.serve.fields import ChatBody, Fields, RequestBody, api_error
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.reasoning import AnswerPiece
from qerl.serve.request import CompletionRequest
from qerl.serve.response import event
from qerl.serve.stream import PlacedToken, marked_text
from qerl.serve.tools import ParsedCall
from qerl.types import Sample

Json = dict[str, Any]
_ITEM = "response.output_item"


class ContentPart(Fields):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text"]
    text: str = ""


class InputItem(Fields):
    """A message, a function call of the model, its output, or the model's reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None

    def to_message(self) -> Json:
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments or "{}"}
            call = {"id": self.call_id or "", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": _text(self.output), "tool_call_id": self.call_id}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": _text(self.content)}
        return {"role": self.role, "content": _text(self.content)}


class ResponseTool(Fields):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Fields):
    type: Literal["function"]
    name: str


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseText(Fields):
    format: ResponseFormat = ResponseFormat(schema=None)
    verbosity: Literal["medium"] | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(RequestBody):
    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: ResponseText = ResponseText()
    tools: list[ResponseTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool = "auto"
    parallel_tool_calls: bool = True
    logprobs: Literal[False] | None = None
    top_logprobs: int = Field(0, ge=0, le=0)
    n: int = Field(1, ge=1, le=1)

    def to_chat(self) -> ChatBody:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        format, choice = self.text.format, self.tool_choice
        named = {"type": "function", "function": {"name": getattr(choice, "name", "")}}
        fields: Json = {
            "model": self.model,
            "messages": messages + [item.to_message() for item in self.input],
            "max_tokens": self.max_output_tokens or self.max_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else named,
            "response_format": {"type": format.type},
        }
        if format.type == "json_schema":
            fields["response_format"]["json_schema"] = {"schema": format.json_schema}
        same = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "parallel_tool_calls")
        try:
            return ChatBody.model_validate(fields | self.model_dump(include=set(same)))
        except ValidationError as error:
            raise api_error(error) from None


class ResponsesResponse:
    """The response to one request of /v1/responses."""

    def __init__(self, body: ResponsesBody, request: CompletionRequest, model: str, loaded: LoadedModel):
        self._body, self._request, self._model, self._loaded = body, request, model, loaded
        self._id, self._created = _new_id("resp"), int(time.time())
        self._stream, self._numbers = request.answer_stream(), itertools.count()
        self._message_id, self._text, self._output = _new_id("msg"), "", list[Json]()
        self._is_open, self._reasoning = False, None

    @property
    def num_malformed_calls(self) -> int:
        return self._stream.num_malformed

    def whole(self, samples: list[Sample]) -> Json:
        shown = marked_text(self._loaded, self._request.stop, samples[0], self._request.markers)
        answer = self._stream.whole(shown)
        output = [_reasoning(_new_id("rs"), answer.reasoning)] if answer.reasoning else []
        output += [self._message(answer.text)] if answer.text or not answer.calls else []
        output += [_function_call(call) for call in answer.calls]
        return self._response(samples[0], output, sum(map(len, self._request.pending.tokens.values())))

    def start(self) -> list[str]:
        response = self._response(None, [], 0)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def piece(self, index: int, text: str, tokens: list[PlacedToken]) -> list[str]:
        return self._answer_events(self._stream.add(text))

    def end_choice(self, index: int, sample: Sample) -> list[str]:
        answer, self._last = self._stream.end(), sample
        events = self._reasoning_events(answer.reasoning) + self._text_events(answer.text)
        has_call = bool(answer.calls) or any(item["type"] == "function_call" for item in self._output)
        if not (self._text or has_call):
            events += self._open()
        return events + self._close() + self._close_reasoning() + self._call_events(answer.calls)

    def end(self, num_tokens: int) -> list[str]:
        response = self._response(self._last, self._output, num_tokens)
        return [self._event(f"response.{response['status']}", response=response)]

    def _answer_events(self, answer: AnswerPiece) -> list[str]:
        events = self._reasoning_events(answer.reasoning) + self._text_events(answer.text)
        return events + self._call_events(answer.calls)

    def _reasoning_events(self, text: str) -> list[str]:
        if not text:
            return []
        events = self._close()
        if self._reasoning is None:
            self._reasoning = _reasoning(_new_id("rs"), "")
            item = self._reasoning | {"status": "in_progress", "content": []}
            events += [self._event(f"{_ITEM}.added", output_index=len(self._output), item=item)]
        (part,), place = self._reasoning["content"], self._reasoning_place
        part["text"] += text
        return [*events, self._event("response.reasoning_text.delta", **place, delta=text)]

    @property
    def _reasoning_place(self) -> Json:
        assert self._reasoning is not None
        return {"item_id": self._reasoning["id"], "output_index": len(self._output), "content_index": 0}

    def _close_reasoning(self) -> list[str]:
        """End the reasoning, if it has begun."""
        if (item := self._reasoning) is None:
            return []
        (part,), place = item["content"], self._reasoning_place
        events = [
            self._event("response.reasoning_text.done", **place, text=part["text"]),
            self._event(f"{_ITEM}.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._reasoning = None
        return events

    def _text_events(self, text: str) -> list[str]:
        if not text:
            return []
        events = [] if self._is_open else self._open()
        self._text += text
        return [*events, self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])]

    @property
    def _place(self) -> Json:
        return {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}

    def _open(self) -> list[str]:
        events = self._close_reasoning()
        self._is_open, item = True, self._message("") | {"status": "in_progress", "content": []}
        added = self._event(f"{_ITEM}.added", output_index=len(self._output), item=item)
        return [*events, added, self._event("response.content_part.added", **self._place, part=_part(""))]

    def _close(self) -> list[str]:
        """End the message, if it has begun."""
        if not self._is_open:
            return []
        item = self._message(self._text)
        events = [
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_part(self._text)),
            self._event(f"{_ITEM}.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._is_open, self._text, self._message_id = False, "", _new_id("msg")
        return events

    def _call_events(self, calls: Sequence[ParsedCall]) -> list[str]:
        events = self._close() + self._close_reasoning() if calls else []
        for call in calls:
            item, index = _function_call(call), len(self._output)
            started, arguments = item | {"status": "in_progress", "arguments": ""}, item["arguments"]
            place = {"item_id": item["id"], "output_index": index}
            kind = "response.function_call_arguments"
            events += [
                self._event(f"{_ITEM}.added", output_index=index, item=started),
                self._event(f"{kind}.delta", **place, delta=arguments),
                self._event(f"{kind}.done", **place, name=call.name, arguments=arguments),
                self._event(f"{_ITEM}.done", output_index=index, item=item),
            ]
            self._output.append(item)
        return events

    def _message(self, text: str) -> Json:
        head = {"type": "message", "id": self._message_id, "status": "completed", "role": "assistant"}
        return head | {"content": [_part(text)]}

    def _response(self, sample: Sample | None, output: list[Json], num_tokens: int) -> Json:
        """Return the response object; without a sample it is in progress."""
        body, is_cut = self._body, sample is not None and sample.finish == "length"
        choice = body.tool_choice
        num_prompt = sum(len(prompt.tokens_T) for prompt in self._request.prompts_P)
        usage = {"input_tokens": num_prompt, "input_tokens_details": {"cached_tokens": 0}}
        usage |= {"output_tokens": num_tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if sample is None else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "metadata": {},
            "usage": None if sample is None else usage | {"total_tokens": num_prompt + num_tokens},
        }

    def _event(self, type: str, **fields: Any) -> str:
        return event({"type": type, "sequence_number": next(self._numbers), **fields}, type)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _reasoning(item_id: str, text: str) -> Json:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": item_id, "status": "completed", "summary": [], "content": [part]}


def _text(content: str | list[ContentPart] | None) -> str | None:
    return "".join(part.text for part in content) if isinstance(content, list) else content


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _chat_tool(tool: ResponseTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _function_call(call: ParsedCall) -> Json:
    head = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "status": "completed"}
    return head | {"name": call.name, "arguments": call.arguments}
