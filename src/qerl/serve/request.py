"""Turn the bodies of requests into prompts, sampling parameters and constraints."""

import dataclasses
import functools
import inspect
import secrets
from types import MappingProxyType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from qerl.algo.seeds import mix
from qerl.config.options import ServeOptions
from qerl.engine.sampling.prompt_logprobs import PromptLogprobs
from qerl.errors import UserError
from qerl.serve.adapters import ServedAdapters
from qerl.serve.batcher import PendingRequest
from qerl.serve.fields import ApiError, ChatBody, CompletionBody, RequestBody, unknown_model
from qerl.serve.grammar import Grammar, Grammars
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.marked_text import NO_MARKERS, Markers
from qerl.serve.reasoning import AnswerStream, ReasoningForm, reasoning_of
from qerl.serve.tools import ToolCallStream, call_schema, with_described_tools
from qerl.tasks.call_forms.choice import form_of
from qerl.tasks.call_forms.form import CallForm, Schemas
from qerl.tasks.call_forms.hermes import HERMES
from qerl.tasks.rows.prompt import TooLongError, render_chat
from qerl.types import Prompt, Sampling

# Arguments of the functions that render, `self` too, which are no variables of a template.
_RENDERING = PreTrainedTokenizerBase.apply_chat_template, render_jinja_template, jinja2.Template.render
_RESERVED = {name for each in _RENDERING for name in inspect.signature(each).parameters} | {"messages"}

_NUM_END_TOKENS = 32  # of a prompt, more than <think> and blanks have


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    body: RequestBody
    pending: PendingRequest
    grammar: Grammar | None = None
    """Grammar of the answers, to be compiled before they are sampled."""
    functions: Schemas = dataclasses.field(default_factory=dict)
    """Functions whose calls are looked for in the answers, with the schemas of their arguments."""
    call_form: CallForm = HERMES
    reasoning: ReasoningForm | None = None
    prompt_end: str = ""
    """The last tokens of the prompt as text, which may open the reasoning."""
    markers: Markers = NO_MARKERS
    """Control tokens that are visible to what parses the answers."""

    @property
    def grammar_param(self) -> str:
        """Return the name of the body's field."""
        return "tools" if isinstance(self.body, ChatBody) and self.body.is_forced_call else "response_format"

    @property
    def prompts_P(self) -> list[Prompt]:
        return self.pending.prompts_P

    @property
    def stop(self) -> tuple[str, ...]:
        return self.pending.sampling.stop

    @property
    def with_echo(self) -> bool:
        return isinstance(self.body, CompletionBody) and self.body.echo

    def answer_stream(self) -> AnswerStream:
        """Return what splits the marked text of one answer into reasoning, text and calls."""
        is_parallel = isinstance(self.body, ChatBody) and self.body.parallel_tool_calls
        prompt_T = self.prompts_P[0].tokens_T
        calls = ToolCallStream(
            self.functions,
            is_parallel=is_parallel,
            prompt_T=prompt_T,
            form=self.call_form,
            markers=self.markers,
        )
        reasoning = self.reasoning
        return AnswerStream(reasoning and reasoning.splitter(self.markers, self.prompt_end), calls)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestParser:
    model: LoadedModel
    options: ServeOptions
    name: str
    """The model's name in requests."""

    @functools.cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.model)

    adapters: ServedAdapters | None = None
    """Adapters that requests may name in the model's place; None: none."""

    @property
    def known_names(self) -> tuple[str, ...] | None:
        """The models of which requests must name one; None: any."""
        return (self.name, *(() if self.adapters is None else self.adapters.names))

    def chat(self, content: bytes) -> CompletionRequest:
        return self.chat_of(ChatBody.parse(content, self.known_names, self.options))

    def chat_of(self, body: ChatBody) -> CompletionRequest:
        messages = [message.render_chat() for message in body.messages]
        if self.options.system_prompt is not None and all(each["role"] != "system" for each in messages):
            messages.insert(0, {"role": "system", "content": self.options.system_prompt})
        return self._chat_request(body, messages)

    def _chat_request(self, body: ChatBody, messages: list[dict[str, Any]]) -> CompletionRequest:
        return self._request(body, [self._rendered(body, messages)], body.offered_schemas)

    def completion(self, content: bytes) -> CompletionRequest:
        body = CompletionBody.parse(content, self.known_names, self.options)
        self._check_num_choices(len(body.prompt), "prompt")
        return self._request(body, [self._tokenized(each) for each in body.prompt])

    def _rendered(self, body: ChatBody, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        variables = dict(body.chat_template_kwargs)
        if wrong := [name for name in variables if name in _RESERVED or not name.isidentifier()]:
            message = f"chat_template_kwargs: {wrong[0][:50]!r} is not a variable of a template"
            raise ApiError(400, message, param="chat_template_kwargs")
        render = functools.partial(render_chat, self.model.engine.tokenizer, max_chars=self._max_prompt_chars)
        try:
            plain = render(messages, variables)
            if not body.offered_tools:
                return plain
            tools = [tool.function.for_template() for tool in body.tools]
            prompt = render(messages, variables | {"tools": tools})
            if prompt == plain:  # the template has no place for tools
                prompt = render(with_described_tools(messages, tools), variables)
            return prompt
        except TooLongError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from None
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _tokenized(self, prompt: str | list[int]) -> tuple[str, list[int]]:
        engine = self.model.engine
        if isinstance(prompt, str):
            if len(prompt) > (limit := self._max_prompt_chars):
                message = f"the prompt has {len(prompt):,} characters; the limit is {limit:,}"
                raise ApiError(400, message, code="context_length_exceeded")
            return prompt, list(engine.tokenizer(prompt)["input_ids"])
        if max(prompt) >= engine.vocab_size:
            message = f"prompt: token {max(prompt)} is not in the vocabulary of {engine.vocab_size}"
            raise ApiError(400, message[:200], param="prompt")
        return "", prompt

    def _request(
        self,
        body: RequestBody,
        prompts: list[tuple[str, list[int]]],
        functions: Schemas = MappingProxyType({}),
    ) -> CompletionRequest:
        self._check_num_choices(len(prompts) * body.n, "n")
        for _, tokens_T in prompts:
            self._check_length(len(tokens_T), body.num_answer_tokens or 1)
        seed, grammar = self._seed(body, prompts), self._grammar(body)
        pending = PendingRequest(
            prompts_P=[
                Prompt(index=mix(seed, i), text=text, tokens_T=tokens_T, messages=None, columns={})
                for i, (text, tokens_T) in enumerate(prompts)
            ],
            num_samples=body.n,
            sampling=self._sampling(body),
            constraint=None if grammar is None else grammar.choice,
            num_top_logprobs=body.num_top_logprobs,
        )
        if self.adapters is not None and body.model != self.name:
            row = self.adapters.row(body.model, pending.future)
            if row is None:  # it was unloaded just now
                raise unknown_model((self.name, *self.adapters.names))
            pending.table_row = row
        if isinstance(body, CompletionBody) and body.echo and body.with_logprobs:
            pending.prompt_logprobs_P = [PromptLogprobs(body.num_top_logprobs) for _ in prompts]
        is_forced = isinstance(body, ChatBody) and body.is_forced_call  # the grammar's form is Hermes
        tokenizer, options = self.model.engine.tokenizer, self.options
        template = tokenizer.chat_template
        form = HERMES if is_forced else form_of(template, options.tool_call_parser)
        has_reasoning = isinstance(body, ChatBody) and grammar is None  # a grammar begins at the first token
        reasoning = reasoning_of(template, options.reasoning_parser) if has_reasoning else None
        controls = (*(form.controls if functions else ()), *(reasoning.controls if reasoning else ()))
        return CompletionRequest(
            body=body,
            pending=pending,
            grammar=grammar,
            functions=functions,
            call_form=form,
            reasoning=reasoning,
            prompt_end=str(tokenizer.decode(prompts[-1][1][-_NUM_END_TOKENS:])) if reasoning else "",
            markers=Markers.of(self.model.token_bytes, controls),
        )

    def _seed(self, body: RequestBody, prompts: list[tuple[str, list[int]]]) -> int:
        return secrets.randbits(63) if body.seed is None else body.seed

    def _sampling(self, body: RequestBody) -> Sampling:
        max_tokens = self.options.max_tokens if body.num_answer_tokens is None else body.num_answer_tokens
        return Sampling(
            max_tokens=max(max_tokens, 1),
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=None if body.top_p == 1 else body.top_p,
            min_p=body.min_p or None,
            stop=tuple(dict.fromkeys(body.stop)),
        )

    def _grammar(self, body: RequestBody) -> Grammar | None:
        schema, param = None, "response_format"
        if body.response_format is not None:
            schema = body.response_format.schema_of_text
        try:
            if isinstance(body, ChatBody) and body.is_forced_call:
                param = "tools"
                schema = call_schema([(each.name, each.schema_of_arguments) for each in body.offered_tools])
            return None if schema is None else self.grammars.of(schema)
        except UserError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def _check_num_choices(self, num_choices: int, param: str) -> None:
        limit = self.options.max_samples
        if num_choices > limit:
            message = f"at most {limit} choices per request (prompts times n), got {num_choices}"
            raise ApiError(400, message, param=param)

    @property
    def _max_prompt_chars(self) -> int:
        """More characters are more tokens than a prompt may have, whatever they are."""
        return min(self.options.max_prompt_tokens, self.model.max_positions) * self.model.max_token_chars

    def _check_length(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raise ApiError unless the prompt and this many tokens fit; an answer without max_tokens may be cut
        short by the model's positions."""
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt is empty", param="prompt")
        limit = min(self.options.max_prompt_tokens, self.model.max_positions - answer_tokens)
        if prompt_tokens > limit:
            message = f"the prompt has {prompt_tokens} tokens; the limit for this request is {limit}"
            raise ApiError(400, message, code="context_length_exceeded")
