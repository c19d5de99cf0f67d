"""JSON schemas as constraints of the sampled tokens, by llguidance (in the extra `serve`).

A schema of 40 characters can take a minute of processor time and 500 MB (`multipleOf` of a large number), and
no check in a process of its own could stop that: each grammar has a process (grammar_worker.py) with
limits of both. It computes the mask of the next token while the model computes the logits.
"""

import contextlib
import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qerl.errors import UserError
from qerl.serve.batcher import BusyError
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.schema_loops import find_loop
from qerl.tasks.worker_process import OWN_ENDS

MAX_GRAMMARS = 64  # of 256 MB at most each, and of 5 MB usually
MAX_MEMORY_BYTES = 256 << 20
COMPILE_CPU_S = 2.0
MASKS_CPU_S, TOKEN_CPU_S = 1.0, 0.01
"""Processor time of all masks of a grammar: so much at first, and more for each token."""
_MAX_SCHEMA_CHARS = 100_000
_MAX_WAIT_S = 30.0  # for a process that is stopped: SIGSTOP takes no processor time
_END_TIMEOUT_S = 5.0
_WORKER = Path(__file__).with_name("grammar_worker.py")


class Grammar:
    """The grammar of one request, in a process of its own from `compile` to `close`."""

    def __init__(self, owner: "Grammars", schema: str):
        self._owner, self._schema = owner, schema
        self._pipe: Connection | None = None
        self._num_choices = 0
        self._masks: dict[int, bytes] = {}

    def compile(self) -> None:
        """Start the process and wait for it; raise UserError for a schema that is wrong or takes too much."""
        self._pipe = self._owner.open(self)
        self._send(self._schema.encode())
        if (reason := json.loads(self._receive())) is not None:
            raise UserError(f"the JSON schema is not supported: {reason}")

    def choice(self) -> "JsonConstraint":
        """Return the constraint of one more choice."""
        number, self._num_choices = self._num_choices, self._num_choices + 1
        self._send(number.to_bytes(4, "little"))
        return JsonConstraint(self, number, self._owner.vocab_size)

    def accept(self, choice: int, token: int) -> bool:
        """Take a token of this choice; return True if its text is complete."""
        self._send(choice.to_bytes(4, "little") + token.to_bytes(4, "little"))
        self._masks.pop(choice, None)
        while (answer := self._answer()) == b"m":  # of another choice
            pass
        return answer == b"c"

    def mask(self, choice: int) -> bytes:
        while choice not in self._masks:
            self._answer()
        return self._masks[choice]

    def close(self) -> None:
        """End the process. The engine's thread may be waiting for it, so its descriptor stays open."""
        self._owner.open_grammars.discard(self)
        if self._pipe is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def _answer(self) -> bytes:
        """Return the kind of the next answer; keep it if it is a mask."""
        answer = self._receive()
        kind = answer[4:5]
        if kind == b"m":
            self._masks[int.from_bytes(answer[:4], "little")] = answer[5:]
        elif kind == b"e":
            raise UserError(f"the answer cannot go on within the JSON schema: {answer[5:].decode()}")
        return kind

    def _send(self, message: bytes) -> None:
        assert self._pipe is not None, "compile first"
        with contextlib.suppress(OSError):  # it has ended, as the next answer tells
            self._pipe.send_bytes(message)

    def _receive(self) -> bytes:
        assert self._pipe is not None, "compile first"
        try:
            if self._pipe.poll(_MAX_WAIT_S):
                return self._pipe.recv_bytes()
        except (EOFError, OSError):
            pass
        cpu_s = f"{COMPILE_CPU_S:g} s of processor time, or {MASKS_CPU_S:g} s and {TOKEN_CPU_S:g} s per token"
        limits = f"{cpu_s} for its masks, or {MAX_MEMORY_BYTES >> 20} MB of memory"
        raise UserError(f"the JSON schema takes more than {limits}: simplify it")


class JsonConstraint:
    """A TokenConstraint of the engine."""

    def __init__(self, grammar: Grammar, choice: int, vocab_size: int):
        self._grammar, self._choice, self._vocab_size = grammar, choice, vocab_size
        self.is_complete = False

    def accept(self, token: int) -> None:
        self.is_complete = self._grammar.accept(self._choice, token)

    def allowed_V(self) -> Tensor:
        bits = np.frombuffer(self._grammar.mask(self._choice), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size)
        return torch.from_numpy(allowed).bool()


class Grammars:
    """Makes the grammars of one model, and the parent of their processes when the first is compiled."""

    def __init__(self, model: LoadedModel):
        self._model, self.vocab_size = model, model.engine.vocab_size
        self.open_grammars = weakref.WeakSet[Grammar]()
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end = lambda: None

    def of(self, schema: dict[str, Any]) -> Grammar:
        """Return the grammar, not compiled; raise UserError for a schema that is too long, or has a loop."""
        if importlib.util.find_spec("llguidance") is None:
            raise UserError("structured output needs llguidance on the server: pip install llguidance")
        text = json.dumps(schema)
        if len(text) > _MAX_SCHEMA_CHARS:
            raise UserError(f"the JSON schema has more than {_MAX_SCHEMA_CHARS} characters")
        if (reference := find_loop(schema)) is not None:
            raise UserError(f"the JSON schema has a $ref that no value can end: {reference[:100]!r}")
        return Grammar(self, text)

    def open(self, grammar: Grammar) -> Connection:
        """Start a grammar's process and return the pipe to it."""
        with self._lock:
            if len(self.open_grammars) >= MAX_GRAMMARS:
                raise BusyError(f"{MAX_GRAMMARS} JSON schemas are in use; retry later")
            ours, theirs = Pipe()
            with theirs:
                if not self._has_sent(theirs):
                    self._start()
                    self._has_sent(theirs)
            OWN_ENDS.add(ours)
            self.open_grammars.add(grammar)
            return ours

    def _has_sent(self, pipe: Connection) -> bool:
        """Send the parent of the processes this end of a pipe; return False if it has ended."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [b"g"], [pipe.fileno()])
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._end()
        settings = json.dumps(self._settings()).encode()
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_WORKER), str(theirs.fileno())]
        null = subprocess.DEVNULL
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=null,
                stdout=null,
                stderr=null,
            )
        OWN_ENDS.add(self._control)
        self._end = weakref.finalize(self, _end, process, self._control)
        with contextlib.suppress(OSError):  # it has ended
            self._control.sendall(len(settings).to_bytes(8) + settings)

    def _settings(self) -> dict[str, Any]:
        engine = self._model.engine
        if not isinstance(engine.tokenizer, PreTrainedTokenizerFast):
            raise UserError("structured output needs a fast tokenizer (tokenizer.json)")
        backend = copy.copy(engine.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        stop_tokens = sorted(engine.stop_token_ids) or engine.tokenizer.eos_token_id
        return {
            "tokenizer": backend.to_str(),
            "n_vocab": engine.vocab_size,
            "eos_token": stop_tokens,
            "limits": {
                "memory_bytes": MAX_MEMORY_BYTES,
                "compile_cpu_s": COMPILE_CPU_S,
                "masks_cpu_s": MASKS_CPU_S,
                "token_cpu_s": TOKEN_CPU_S,
            },
        }


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
