"""Accept connections and end those that take too long, so that no client can keep the others out.

    phase    from                               to                        deadline
    head     the connection, the first byte     the last header           header_timeout_s
    body     the last header                    the end of the body       body_timeout_s
    answer   the end of the body                the end of the answer     send_timeout_s for what is ready
    idle     the end of the answer              the next request          keep_alive_timeout_s (uvicorn's)

At max_connections a new connection replaces the one that has waited longest for its request to be complete.
Where all of them have complete requests, a few more are let in, and answered by the app for a busy server.
When descriptors run out, asyncio's own accept loop logs a traceback for each of 2,048 tries; this one logs a
line, frees a descriptor and waits.
"""

import asyncio
import contextlib
import errno
import json
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qerl.config.options import ServeOptions
from qerl.serve.log_limit import log_config
from qerl.serve.metrics import ServerMetrics

_ACCEPT_RETRY_S = 0.5
_BACKLOG = 2048
_NUM_RESERVED = 16  # connections beyond the maximum, for health and metrics
_NUM_OTHER_FILES = 128  # descriptors that are no connections
_SHUTDOWN_TIMEOUT_S = 5  # for requests that are running when the server ends
_LAST_WORDS_S = 2  # beyond that, for the errors to the others
_ABORT_S = 0.2  # for the last of them
_MAX_CHECK_PERIOD_S = 1.0
_REFUSALS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}

_logger = logging.getLogger("uvicorn.error")


class ServingProtocol(H11Protocol):
    """uvicorn's connection, with a phase that can be overdue."""

    def __init__(self, server: "ApiServer", app: Any):
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.app = app
        self._options, self._metrics = server.options, server.metrics
        self._phase, self._num_answers = "head", 0
        self.phase_began_s = self._all_sent_s = time.monotonic()

    @property
    def waits_for_request(self) -> bool:
        return self._phase != "answer" and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_phase()

    def on_response_complete(self) -> None:
        self._num_answers += 1
        super().on_response_complete()
        self._note_phase()

    def _note_phase(self) -> None:
        if self.conn.their_state is h11.IDLE:
            phase = "head" if self.conn.trailing_data[0] or not self._num_answers else "idle"
        else:
            phase = "body" if self.conn.their_state is h11.SEND_BODY else "answer"
        if phase != self._phase:
            self._phase, self.phase_began_s = phase, time.monotonic()

    def end_if_overdue(self) -> None:
        now_s, options = time.monotonic(), self._options
        if self.transport.get_write_buffer_size() == 0:
            self._all_sent_s = now_s
        if now_s - self._all_sent_s > options.send_timeout_s:
            self._metrics.closed.add("send_timeout")
            self.transport.abort()
        elif not self.transport.is_closing():
            limits_s = {"head": options.header_timeout_s, "body": options.body_timeout_s}
            if now_s - self.phase_began_s > limits_s.get(self._phase, float("inf")):
                self.refuse(408, f"the request's {self._phase} took too long", f"{self._phase}_timeout")

    def send_400_response(self, msg: str) -> None:
        """Refuse what uvicorn could not read; h11 has a status of its own for headers that are too long."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        message = f"the headers have more than {self._options.max_header_bytes} bytes"
        self.refuse(status, message if status == 431 else "this is no HTTP request", "bad_request")

    def refuse(self, status: int, message: str, reason: str) -> None:
        """End the connection, with a response unless one has begun."""
        self._metrics.closed.add(reason)
        cycle = self.cycle
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._metrics.responses.add("-", str(status))
            self.transport.write(_refusal(status, message))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


class ApiServer(uvicorn.Server):
    """uvicorn's server with an accept loop and deadlines of its own."""

    def __init__(
        self,
        app: Any,
        busy_app: Any,
        options: ServeOptions,
        metrics: ServerMetrics,
        *,
        stop_requests: Callable[[], None],
    ):
        """stop_requests: reject the requests that are not complete; called when the server ends."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=log_config(),
            log_level="warning",
            access_log=False,
            h11_max_incomplete_event_size=options.max_header_bytes,
            timeout_keep_alive=cast(int, options.keep_alive_timeout_s),  # call_later takes any number
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S + _LAST_WORDS_S,
        )
        super().__init__(config)
        self.options, self.metrics, self._busy_app = options, metrics, busy_app
        self._stop_requests = stop_requests
        num_files = max(raise_open_file_limit() - _NUM_OTHER_FILES, _NUM_RESERVED)
        self._max_connections = min(options.max_connections, num_files)
        self._tasks = list[asyncio.Task[None]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        connections = self.server_state.connections
        metrics.add_read("qerl_http_connections", "Open connections.", lambda: len(connections))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP, of a terminal that is gone, ends the server as SIGTERM does, unless nohup ignores it."""
        is_main = threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            if not is_main or (former := signal.getsignal(signal.SIGHUP)) is signal.SIG_IGN:
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, former)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let requests end; at a second Ctrl-C reject them. uvicorn would cancel them without an answer."""
        if self.should_exit and sig == signal.SIGINT and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_requests)
            self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS_S, self._end_connections)
        else:
            super().handle_exit(sig, frame)

    def _end_connections(self) -> None:
        """Answer what is not complete with an error (gate.py), and close all connections."""
        for task in self.server_state.tasks:
            task.cancel()
        for each in self._connections():
            asyncio.get_running_loop().call_later(_ABORT_S, each.transport.abort)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=[])
        for listener in sockets or []:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._start(self._accept(listener))
        self._start(self._check_deadlines())

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """End the server, instead of keeping one that nobody can reach."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("the server ends: it can accept no more connections", exc_info=error)
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asyncio.get_running_loop().call_later(_SHUTDOWN_TIMEOUT_S, self._stop_requests)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self.metrics.accept_errors.add()
                _logger.error("cannot accept connections: %s", error.strerror)
                await asyncio.sleep(0 if self._end_longest_wait() else _ACCEPT_RETRY_S)
            else:
                await self._open(connection)

    async def _open(self, connection: socket.socket) -> None:
        connections, limit = self.server_state.connections, self._max_connections
        if len(connections) >= limit and self._end_longest_wait():
            await asyncio.sleep(0)  # the ended connection leaves at the loop's next turn
        if len(connections) >= limit + _NUM_RESERVED:
            self.metrics.closed.add("refused")
            connection.close()
            return
        app = self.config.loaded_app if len(connections) < limit else self._busy_app
        protocol = ServingProtocol(self, app)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has gone
            connection.close()

    def _end_longest_wait(self) -> bool:
        """End the connection that has waited longest for its request to be complete; False without any."""
        waiting = [each for each in self._connections() if each.waits_for_request]
        if not waiting:
            return False
        longest = min(waiting, key=lambda each: each.phase_began_s)
        self.metrics.closed.add("replaced")
        longest.transport.abort()
        return True

    async def _check_deadlines(self) -> None:
        options = self.options
        shortest_s = min(options.header_timeout_s, options.body_timeout_s, options.send_timeout_s)
        while True:
            await asyncio.sleep(min(shortest_s / 4, _MAX_CHECK_PERIOD_S))
            for each in self._connections():
                each.end_if_overdue()

    def _connections(self) -> list[ServingProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, ServingProtocol)]


def raise_open_file_limit() -> int:
    """Raise this process's limit of open files as far as it may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _refusal(status: int, message: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} {_REFUSALS.get(status, '')}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
