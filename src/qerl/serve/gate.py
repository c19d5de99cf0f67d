"""Check every request before its route, its headers' size and its body's end; count its response."""

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qerl.serve.fields import ApiError
from qerl.serve.metrics import ServerMetrics

_OTHER_PATH = "other"
_FOR_OPERATORS = ("/health", "/metrics")


class Gate:
    """ASGI middleware. h11 limits only headers that arrive in several pieces."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: list[str], max_header_bytes: int):
        self._app, self._metrics = app, metrics
        self._paths, self._max_header_bytes = frozenset(paths), max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else _OTHER_PATH
        status: int | None = None

        async def note_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, note_and_send)
        except asyncio.CancelledError:  # by the end of the server
            error = ApiError(503, "the server is shutting down", code="busy")
            if status is None:
                await _response(error)(scope, receive, note_and_send)
            else:  # a stream
                last = f"data: {json.dumps(error_body(error))}\n\n".encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._metrics.responses.add(path, str(status or 500))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (fault := _framing_fault(scope)) is not None:
            await _response(ApiError(400, fault))(scope, receive, send)
            return
        num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        num_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > self._max_header_bytes:
            error = ApiError(431, f"the headers have more than {self._max_header_bytes} bytes")
            await _response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class BusyApp:
    """Answer while all connections are taken: only /health and /metrics are passed on."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _FOR_OPERATORS:
            await self._app(scope, receive, send)
            return
        error = ApiError(503, "the server is busy: it has no more connections; retry later", code="busy")
        self._metrics.responses.add(_OTHER_PATH, "503")
        await _response(error)(scope, receive, send)


def _framing_fault(scope: Scope) -> str | None:
    """Return why the end of the body is not the same for all that read it, such as a proxy; None if it is."""
    names = {name.lower() for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return None
    if b"content-length" in names:
        return "a request has either a Content-Length or a Transfer-Encoding"
    return "HTTP/1.0 has no Transfer-Encoding" if scope["http_version"] == "1.0" else None


def error_body(error: HTTPException) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": code}}


def _response(error: ApiError) -> JSONResponse:
    """Return a response after which the connection ends."""
    return JSONResponse(error_body(error), error.status_code, {"connection": "close"})
