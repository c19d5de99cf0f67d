"""The processes that compile JSON schemas and compute masks: a parent with the tokenizer, a fork per grammar.

    to a grammar's process            back
    the schema as JSON                JSON: why it is refused, or null
    choice                            choice, b"m", the mask of its first token
    choice, token                     choice, b"c": its text is complete; or choice, b"n", then
                                      choice, b"m", the mask of the next token
    either                            choice, b"e", why it can have no further token

A choice and a token are unsigned, of 4 bytes, little-endian; a mask has a bit per token. grammar.py runs this
file as a program, which imports nothing of the package: the process is small, and a fork takes a millisecond.
A timer of the kernel ends a process at its limit of processor time, whatever it is doing.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llguidance

# Between two tokens of JSON: nothing, a space, or a new line with up to 40 spaces. Without a bound, a small
# model may write blanks for ever.
_WHITESPACE = r"( |\n {0,40})?"
_MAX_REASON_CHARS = 500


def main(descriptor: int) -> None:
    """Fork a process for each descriptor that comes, until the server hangs up."""
    control = socket.socket(fileno=descriptor)
    num_bytes = int.from_bytes(control.recv(8, socket.MSG_WAITALL))  # no more: the first descriptor follows
    settings = json.loads(control.recv(num_bytes, socket.MSG_WAITALL))
    tokenizer, reason = None, ""
    try:
        tokenizer = llguidance.LLTokenizer(settings["tokenizer"], settings["n_vocab"], settings["eos_token"])
    except Exception as error:  # of the library, for a tokenizer that it cannot read
        reason = f"the tokenizer is not supported: {error}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # collects the forks
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with contextlib.suppress(OSError):  # no process can be made: its pipe is closed, as if it had ended
            if os.fork() == 0:
                try:
                    control.close()
                    _serve(Connection(descriptors[0]), tokenizer, reason, settings["limits"])
                finally:
                    os._exit(0)
        os.close(descriptors[0])


def _serve(pipe: Connection, tokenizer: Any, reason: str, limits: dict[str, Any]) -> None:
    """Main function of a grammar's process."""
    _limit_memory(limits["memory_bytes"])
    schema = pipe.recv_bytes().decode()
    with _limited(limits["compile_cpu_s"]):
        matcher, reason = (None, reason) if reason else _compiled(tokenizer, schema)
    pipe.send_bytes(json.dumps(reason or None).encode())
    choices: dict[bytes, Any] = {}
    num_masks, begin_s = 0, time.process_time()
    while matcher is not None:
        message = pipe.recv_bytes()
        choice, num_masks = message[:4], num_masks + 1
        spent_s = time.process_time() - begin_s
        with _limited(limits["masks_cpu_s"] + limits["token_cpu_s"] * num_masks - spent_s):
            if len(message) == 4:
                choices[choice] = matcher.deep_copy()
            else:
                answer = _accept(choices[choice], int.from_bytes(message[4:], "little"))
                pipe.send_bytes(choice + answer)
                if answer != b"n":
                    continue
            mask = choices[choice].compute_bitmask()
            error = _reason(choices[choice], mask)
        pipe.send_bytes(choice + (b"e" + error.encode() if error else b"m" + mask))


def _compiled(tokenizer: Any, schema: str) -> tuple[Any, str]:
    """Return (matcher, "") or (None, what is wrong)."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        return None, _short(str(error))
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return None, _short(matcher.get_error())
    first = matcher.deep_copy()
    reason = _reason(first, first.compute_bitmask())
    return (None, f"no text satisfies it ({reason})") if reason else (matcher, "")


def _accept(matcher: Any, token: int) -> bytes:
    if not matcher.consume_token(token):
        return b"e" + _short(matcher.get_error()).encode()
    return b"c" if matcher.is_stopped() else b"n"


def _reason(matcher: Any, mask: bytes) -> str:
    """Return why no token can follow; nothing if one can."""
    if matcher.is_error():
        return _short(matcher.get_error())
    return "" if any(mask) else "no token can follow"


def _short(text: str) -> str:
    """Return the first line of a message of the library."""
    return (text.partition("\n")[0] or "unknown error")[:_MAX_REASON_CHARS]


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """End the process once the block has taken this much processor time."""
    if cpu_s <= 0:
        os._exit(0)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory(num_bytes: int) -> None:
    """Limit addresses: a fork has one thread, for which nothing is reserved on any number of cores, as
    tests/serve/test_grammar.py shows."""
    with contextlib.suppress(OSError):  # if memory runs out, this process is ended first
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped_bytes + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]))
