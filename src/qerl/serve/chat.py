"""Chat in the terminal: answer one prompt, or hold a conversation, printing each token as it is sampled.

Ctrl-C stops an answer, and the part that was sampled stays in the conversation. A second Ctrl-C, or Ctrl-D,
ends the program. When the conversation outgrows the model's positions, its oldest exchanges are dropped.
"""

import secrets
import signal
import sys
from typing import TextIO

from qerl.config import RunConfig
from qerl.config.options import GenerateOptions
from qerl.errors import UserError
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.serve.stream import TextStream
from qerl.tasks.rows.prompt import join_messages, render_chat
from qerl.training.signals import StopSignal
from qerl.types import GenerateRequest, Prompt, Sample, Sampling

Message = dict[str, str]

_INPUT_PROMPT = "> "
# Control characters could drive the terminal.
_REMOVED = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def generate(source: str, run: RunConfig | None, prompt: str | None, options: GenerateOptions) -> None:
    """Answer the prompt, or else what stdin holds; start a conversation if stdin is a terminal."""
    is_conversation = prompt is None and sys.stdin.isatty()
    text = sys.stdin.read() if prompt is None and not is_conversation else prompt
    if text is not None and not text.strip():
        raise UserError("the prompt is empty")
    model = load_model(source, run, options.model, with_adapter=options.with_adapter)
    chat = Chat(model, options, sys.stdout)
    if text is None:
        converse(chat)
    elif (stopped_by := chat.answer(text)) is not None:
        raise SystemExit(128 + stopped_by)


class Chat:
    def __init__(self, model: LoadedModel, options: GenerateOptions, out: TextIO):
        self._model, self._options, self._out = model, options, out
        self._messages: list[Message] = (
            [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
        )
        self._num_first = len(self._messages)
        self._seed = secrets.randbits(63) if options.seed is None else options.seed
        self._num_turns = 0
        self._has_noted_limit = False

    def answer(self, text: str) -> int | None:
        """Print the answer and add it to the conversation; return the signal that stopped it, if any."""
        before = self._messages if self._options.chat else self._messages[: self._num_first]
        self._messages, tokens_T = self._fit([*before, {"role": "user", "content": text}])
        stop = StopSignal(lambda line: None)
        with stop.handling(), stop.deferred():
            sample = self._sample(tokens_T, stop)
        self._messages.append({"role": "assistant", "content": sample.text})
        self._num_turns += 1
        return stop.requested

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """Drop the oldest exchanges until an answer fits; return the rest and its tokens."""
        positions, first = self._model.max_positions, self._num_first
        limit = positions - min(self._options.max_tokens, positions // 2)
        remaining = list(messages)
        while True:
            tokens_T = self._render(remaining)
            if len(tokens_T) <= limit or len(remaining) == first + 1:
                break
            del remaining[first : first + 2]
        if len(tokens_T) >= positions:
            raise UserError(f"the prompt has {len(tokens_T)} tokens; the limit is {positions - 1}")
        if len(remaining) < len(messages):
            print(f"(dropped the oldest {(len(messages) - len(remaining)) // 2} exchanges)", file=sys.stderr)
        room, max_tokens = positions - len(tokens_T), self._options.max_tokens
        if room < max_tokens and not self._has_noted_limit:
            self._has_noted_limit = True
            print(f"(max_tokens is {max_tokens}; there is room for {room} after the prompt)", file=sys.stderr)
        return remaining, tokens_T

    def _render(self, messages: list[Message]) -> list[int]:
        tokenizer = self._model.engine.tokenizer
        if self._options.chat:
            return render_chat(tokenizer, messages)[1]
        return join_messages(tokenizer, messages, len(messages))[1]

    def _sample(self, tokens_T: list[int], stop: StopSignal) -> Sample:
        options, stream = self._options, TextStream(self._model, self._options.stop)

        def watch(index: int, sample_index: int, token: int, ended: Sample | None) -> bool:
            piece = stream.add(token, ended)
            self._out.write(piece.translate(_REMOVED) if self._out.isatty() else piece)
            self._out.flush()
            return stop.requested is not None

        request = GenerateRequest(
            [Prompt(index=self._num_turns, text="", tokens_T=tokens_T, messages=None, columns={})],
            num_samples=1,
            sampling=Sampling(
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                stop=options.stop,
            ),
            seed=self._seed,
            step=0,
        )
        (group,) = self._model.engine.generate(request, on_token=watch)
        self._out.write("\n")
        self._out.flush()
        return group.samples_G[0]


def converse(chat: Chat) -> None:
    """Read and answer prompts until Ctrl-D, or Ctrl-C twice in a row."""
    was_stopped = False
    while True:
        try:
            text = input(_INPUT_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if was_stopped:
                raise
            was_stopped = True
            print("\n(press Ctrl-C again or Ctrl-D to quit)", file=sys.stderr)
            continue
        if not text.strip():
            continue
        was_stopped = False
        try:
            stopped_by = chat.answer(text)
        except UserError as error:
            print(f"qerl: {error}", file=sys.stderr)
            continue
        if stopped_by == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        was_stopped = stopped_by is not None
