"""Render chat templates in a process of their own, within limits of processor time, memory and length.

    this process --messages--> child, forked at a tokenizer's first rendering --text--> this process

A chat template comes with a model and is a program. Its sandbox keeps it from files and attributes, but not
from nested loops over `range`, a macro that calls itself twice, or `"a" * 10**10`, which no check in this
process could stop. The child's limit is processor time, so that a busy machine changes nothing; the kernel
ends it, whatever it is doing. Works in any thread.
"""

import json
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import jinja2.ext
import jinja2.sandbox

from qerl.errors import RunError, UserError
from qerl.tasks.memory_limit import limit_memory
from qerl.tasks.worker_process import OWN_ENDS, ForkedProcess, fork_process, signal_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

# Imported before a fork: after it, a module that another thread was importing cannot be imported.
assert jinja2.ext and jinja2.sandbox

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 10_000_000
_MAX_WALL_S = 600.0  # for a child that is stopped: SIGSTOP takes no processor time
_WATCH_S = 1.0

Messages = Sequence[Mapping[str, Any]]


class TemplateProcess:
    """Renders one tokenizer's messages; the process that made it must be the one that uses it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._template: Any = None
        self._child: tuple[ForkedProcess, Connection] | None = None
        self._end = lambda: None

    def render(
        self, tokenizer: "PreTrainedTokenizerBase", messages: Messages, options: dict[str, Any]
    ) -> str:
        """Return the text; raise UserError if the template fails or exceeds a limit."""
        with self._lock:
            process, pipe = self._running(tokenizer)
            try:
                pipe.send((messages, options))
                if not pipe.poll(_MAX_WALL_S):
                    raise UserError(f"rendering took longer than {_MAX_WALL_S:g} s")
                text, reason = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self._end()
                raise UserError(_reason(process.kill())) from None
            except BaseException:  # a pending answer must not be mistaken for that to the next messages
                self._end()
                raise
        if text is None:
            raise UserError(reason)
        return text

    def _running(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[ForkedProcess, Connection]:
        """Return the child, forked anew if it has ended or knows another template."""
        if self._child and self._template == tokenizer.chat_template and self._child[0].poll() is None:
            return self._child
        self._end()
        pipe, theirs = Pipe()
        OWN_ENDS.add(pipe)
        try:
            with theirs:
                process = fork_process(_serve, theirs, os.getpid(), tokenizer)
        except OSError as error:
            raise RunError(f"cannot start a process for the chat template: {error.strerror}") from error
        self._template, self._child = tokenizer.chat_template, (process, pipe)
        self._end = weakref.finalize(self, _end, os.getpid(), process, pipe)
        return self._child


_PROCESSES: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, TemplateProcess]" = (
    weakref.WeakKeyDictionary()
)


def render_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    *,
    continues_last: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the messages as the tokenizer's chat template renders them, open for the assistant's turn or, if
    continues_last, for the rest of the last message. Raise UserError with the template's reason."""
    process = _PROCESSES.get(tokenizer)
    if process is None or process.owner != os.getpid():  # this process may be a fork of the owner
        process = _PROCESSES[tokenizer] = TemplateProcess()
    options = {"add_generation_prompt": not continues_last, "continue_final_message": continues_last}
    return process.render(tokenizer, messages, {**variables, **options, "tokenize": False})


def _end(owner: int, process: ForkedProcess, pipe: Connection) -> None:
    pipe.close()
    if os.getpid() == owner:
        process.kill()


def _reason(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {MAX_CPU_S:g} s of CPU time"
    return f"its process ended with {signal_name(-code) if code < 0 else f'exit code {code}'}"


def _serve(pipe: Connection, parent: int, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Main function of the child."""
    _set_up(pipe)
    while True:
        if not pipe.poll(_WATCH_S):
            if os.getppid() != parent:
                os._exit(0)
            continue
        try:
            messages, options = pipe.recv()
        except EOFError:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = _rendered(tokenizer, messages, options)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        pipe.send_bytes(json.dumps(answer).encode())


def _rendered(
    tokenizer: "PreTrainedTokenizerBase", messages: Any, options: dict[str, Any]
) -> tuple[str | None, str]:
    """Return (text, "") or (None, what is wrong)."""
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except MemoryError:
        return None, f"it takes more than {MAX_MEMORY_BYTES / 1e9:.1f} GB of memory"
    except Exception as error:  # a template is a program and may raise anything
        return None, " ".join(str(error)[:1000].split())
    assert isinstance(text, str)
    if len(text) > MAX_CHARACTERS:
        return None, f"its text has {len(text):,} characters, the limit is {MAX_CHARACTERS:,}"
    return text, ""


def _set_up(pipe: Connection) -> None:
    """Leave what belongs to the parent: its terminal, files, sockets and signals; set the limits."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if sys.platform == "linux":
        limit_memory(MAX_MEMORY_BYTES)
