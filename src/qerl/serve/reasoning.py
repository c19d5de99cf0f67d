"""Split a marked answer into its reasoning and the rest, in which calls are looked for.

    think      <think> reasoning </think> rest; the prompt may have opened it
    harmony    <|channel|>analysis<|message|> reasoning <|end|>; the other channels are the rest

Reasoning is text, also where it has a call. What is decided stays when more text follows, so that pieces of
any length give the reasoning of the whole: tests/serve/test_reasoning.py.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol

from qerl.serve.marked_text import Markers, spelled, unmarked
from qerl.serve.tools import ParsedCall, ToolCallStream, num_shared
from qerl.tasks.call_forms.choice import template_text
from qerl.tasks.call_forms.harmony import TO

_OPEN, _CLOSE = "<think>", "</think>"
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>"
_MAX_HEADER = 300  # characters
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class Splitter(Protocol):
    def add(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        """Return the reasoning, and the marked text beside it, that this marked text completes."""
        ...


class ThinkSplitter:
    """The reasoning is the beginning; the lines' ends around it are not part of anything."""

    def __init__(self, markers: Markers, prompt: str):
        self._open, self._close = markers.mark(_OPEN), markers.mark(_CLOSE)
        self._pending, self._has_begun = "", False
        self._is_inside = prompt.rstrip().endswith(_OPEN)
        self._is_first = True  # nothing but ends of lines of this part was seen

    def add(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        self._pending += text
        if not self._has_begun:
            start = self._pending.lstrip()
            if self._open.startswith(start) and start != self._open and not is_end:
                return "", ""
            self._has_begun, is_opened = True, start.startswith(self._open)
            if is_opened:
                self._pending = start[len(self._open) :]
            self._is_inside |= is_opened
            self._is_first = self._is_inside
        return self._reasoning(is_end=is_end), self._rest()

    def _reasoning(self, *, is_end: bool) -> str:
        if not self._is_inside:
            return ""
        whole, close, rest = self._pending.partition(self._close)
        num_held = 0 if close or is_end else num_shared(whole, self._close)
        part = whole[: len(whole) - num_held].rstrip("\n")
        if close or is_end:
            self._pending, self._is_inside = rest, False
        else:
            self._pending = whole[len(part) :]
        reasoning = part.lstrip("\n") if self._is_first else part
        self._is_first = bool(close) or (self._is_first and not reasoning)
        return unmarked(reasoning)

    def _rest(self) -> str:
        if self._is_inside:
            return ""
        rest, self._pending = self._pending.lstrip("\n") if self._is_first else self._pending, ""
        self._is_first &= not rest
        return rest


class HarmonySplitter:
    """A call is given on in one form: <|channel|>commentary to=functions.NAME <|message|>{...}."""

    def __init__(self, markers: Markers, prompt: str):
        self._markers, self._message = markers, markers.mark(_MESSAGE)
        self._starts = markers.mark(_START), markers.mark(_CHANNEL), "to="
        self._ends = tuple(map(markers.mark, (*_ENDS, _START, _CHANNEL)))
        self._num_dropped = len(_ENDS)
        self._pending, self._is_header, self._is_reasoning = "", True, False
        self._has_sent = {True: False, False: False}  # reasoning, rest
        self._separator = ""

    def add(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        self._pending += text
        out = {True: "", False: ""}
        while self._pending:
            if self._is_header and not self._read_header(out, is_end=is_end):
                break
            place, end = min(
                ((at, each) for each in self._ends if (at := self._pending.find(each)) >= 0),
                default=(None, ""),
            )
            held = max(num_shared(self._pending, each) for each in self._ends)
            stop = place if place is not None else len(self._pending) - (0 if is_end else held)
            self._send(out, self._pending[:stop])
            if place is None:
                self._pending = self._pending[stop:]
                break
            is_dropped = end in self._ends[: self._num_dropped]
            self._pending, self._is_header = self._pending[stop + (len(end) if is_dropped else 0) :], True
        return unmarked(out[True]), out[False]

    def _read_header(self, out: dict[bool, str], *, is_end: bool) -> bool:
        """Read up to the message; False if that is not there yet."""
        start, limit = self._pending.lstrip(), _MAX_HEADER + len(self._message)
        at = self._pending.find(self._message, 0, limit)
        is_start = start.startswith(self._starts)
        if is_start and at >= 0:
            header, self._pending = self._pending[:at], self._pending[at + len(self._message) :]
            self._begin(out, spelled(header))
            return True
        if is_end and is_start:
            self._pending = ""
            return False
        may_start = is_start or any(each.startswith(start) for each in self._starts)
        if may_start and not is_end and len(self._pending) < limit:
            return False
        self._begin(out, "")
        return True

    def _begin(self, out: dict[bool, str], header: str) -> None:
        recipient = _RECIPIENT.search(header)
        self._is_header = False
        self._is_reasoning = recipient is None and _ANALYSIS.search(header) is not None
        self._separator = "\n" if self._has_sent[self._is_reasoning] and recipient is None else ""
        if recipient is not None:
            name = f"{_CHANNEL}{TO}{recipient[1]} {_MESSAGE}"
            out[False] += self._markers.mark(name)

    def _send(self, out: dict[bool, str], text: str) -> None:
        if text:
            out[self._is_reasoning] += self._separator + text
            self._separator, self._has_sent[self._is_reasoning] = "", True


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningForm:
    controls: tuple[str, ...]
    splitter: Callable[[Markers, str], Splitter]


THINK = ReasoningForm((_OPEN, _CLOSE), ThinkSplitter)
HARMONY_REASONING = ReasoningForm((_START, _CHANNEL, _MESSAGE, *_ENDS), HarmonySplitter)
_FORMS = {"none": None, "think": THINK, "harmony": HARMONY_REASONING}


def reasoning_of(chat_template: Any, name: str = "auto") -> ReasoningForm | None:
    """Return the form with this name; auto: the form that the template shows, None if it shows none."""
    if name == "auto":
        text = template_text(chat_template)
        name = "harmony" if _CHANNEL in text else "think" if _CLOSE in text else "none"
    return _FORMS[name]


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPiece:
    reasoning: str = ""
    text: str = ""
    calls: tuple[ParsedCall, ...] = ()


class AnswerStream:
    """Splits the marked text of one answer into reasoning, text and calls."""

    def __init__(self, splitter: Splitter | None, calls: ToolCallStream):
        self._splitter, self._calls = splitter, calls

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def num_malformed(self) -> int:
        return self._calls.num_malformed

    def add(self, text: str) -> AnswerPiece:
        """Return what this piece completes."""
        reasoning, rest = ("", text) if self._splitter is None else self._splitter.add(text)
        out, calls = self._calls.add(rest)
        return AnswerPiece(reasoning, out, tuple(calls))

    def end(self) -> AnswerPiece:
        """Return what is left once the answer is complete."""
        reasoning, rest = ("", "") if self._splitter is None else self._splitter.add("", is_end=True)
        (before, calls), (after, last) = self._calls.add(rest), self._calls.end()
        return AnswerPiece(reasoning, before + after, (*calls, *last))

    def whole(self, text: str) -> AnswerPiece:
        """Return the parts of a whole answer."""
        first, last = self.add(text), self.end()
        reasoning = first.reasoning + last.reasoning
        return AnswerPiece(reasoning, first.text + last.text, first.calls + last.calls)
