"""The routes /v1/models, /v1/completions, /v1/chat/completions and /v1/responses.

Access is checked before the body is read: by the API key, or without one by the Host header. A page in a
browser can send requests to a loopback address, but only under its own host name (tracking/loopback.py) or as
plain text, and both are refused. Starlette's TrustedHostMiddleware knows neither 127.0.0.0/8 nor OpenAI's
error format.
"""

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qerl.errors import UserError
from qerl.serve.batcher import Batcher, BusyError, CancelledRequestError, PendingRequest
from qerl.serve.fields import ApiError
from qerl.serve.request import CompletionRequest, RequestParser
from qerl.serve.response import ApiResponse, ChatResponse, CompletionResponse, event
from qerl.serve.responses import ResponsesBody, ResponsesResponse
from qerl.serve.stream import TextStream
from qerl.tracking.loopback import names_this_machine
from qerl.types import Sample, TokenLogprob

StreamItem = tuple[int, TokenLogprob, Sample | None] | Exception
StreamQueue = asyncio.Queue[StreamItem]
"""(choice, token, the sample if that token ended it), or the failure of the request."""


def make_app(parser: RequestParser, batcher: Batcher, *, api_key: str | None) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.close()

    routes = Routes(parser, batcher)
    app = FastAPI(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(AccessCheck(api_key, parser.options.host).check)],
        exception_handlers={HTTPException: _error_response, ClientDisconnect: _no_response},
    )
    app.add_api_route("/v1/models", routes.models, response_model=None)
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", routes.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", routes.responses, methods=["POST"], response_model=None)
    return app


class AccessCheck:
    """Requires the API key, or where there is none, a Host header that names this machine."""

    def __init__(self, api_key: str | None, host: str):
        self._digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self._host = host

    async def check(self, request: Request) -> None:
        if self._digest is None:
            if not names_this_machine(request.headers.get("host", ""), self._host):
                raise ApiError(403, "the Host header must name this machine when no API key is set")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != "bearer":
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


class Routes:
    def __init__(self, parser: RequestParser, batcher: Batcher):
        self._parser, self._batcher, self._created = parser, batcher, int(time.time())
        self._names = parser.name, parser.model.tokenizer

    async def models(self, request: Request) -> Response:
        model = {"id": self._parser.name, "object": "model", "created": self._created, "owned_by": "qerl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        asked = self._parser.completion(await self._body(request))
        return await self._answer(request, asked, CompletionResponse(asked, *self._names))

    async def chat_completions(self, request: Request) -> Response:
        asked = self._parser.chat(await self._body(request))
        return await self._answer(request, asked, ChatResponse(asked, *self._names))

    async def responses(self, request: Request) -> Response:
        body = ResponsesBody.parse(await self._body(request), self._parser.name, self._parser.options)
        asked = self._parser.chat_of(body.to_chat())
        return await self._answer(request, asked, ResponsesResponse(body, asked, *self._names))

    async def _answer(self, http: Request, asked: CompletionRequest, response: ApiResponse) -> Response:
        pending = asked.pending
        items = _token_queue(pending) if asked.body.stream else None
        try:
            self._batcher.submit(pending)
        except BusyError as error:
            raise _api_error(error) from None
        if items is None:
            return JSONResponse(response.whole(await _samples(http, pending)))
        events = self._events(asked, items, response)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _body(self, http: Request) -> bytes:
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the content type must be application/json")
        max_bytes, body = self._parser.options.max_body_bytes, bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > max_bytes:
                raise ApiError(413, f"the body has more than {max_bytes} bytes")
        return bytes(body)

    async def _events(
        self, asked: CompletionRequest, items: StreamQueue, response: ApiResponse
    ) -> AsyncIterator[str]:
        pending, is_each_sent = asked.pending, asked.body.with_logprobs or asked.body.return_token_ids
        streams = [TextStream(self._parser.model, pending.sampling.stop) for _ in range(pending.num_choices)]
        num_running, num_tokens = pending.num_choices, 0
        try:
            for each in response.start():
                yield each
            while num_running:
                item = await items.get()
                if isinstance(item, Exception):
                    yield event(_error_body(_api_error(item)))
                    return
                choice, token, ended = item
                num_tokens += 1
                if (text := streams[choice].add(token.token, ended)) or is_each_sent:
                    for each in response.piece(choice, text, [token]):
                        yield each
                if ended is not None:
                    num_running -= 1
                    for each in response.end_choice(choice, ended):
                        yield each
            for each in response.end(num_tokens):
                yield each
        finally:
            pending.is_cancelled = True


def _token_queue(pending: PendingRequest) -> StreamQueue:
    """Return a queue of this event loop that gets what the batcher's thread reports of the request."""
    loop, items = asyncio.get_running_loop(), StreamQueue()

    def put(item: StreamItem) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody listens
            loop.call_soon_threadsafe(items.put_nowait, item)

    def put_error(future: Future[list[Sample]]) -> None:
        if isinstance(error := future.exception(), Exception):
            put(error)

    pending.on_token = lambda choice, token, ended: put((choice, token, ended))
    pending.future.add_done_callback(put_error)
    return items


async def _samples(http: Request, pending: PendingRequest) -> list[Sample]:
    """Return the samples of the request, which is cancelled if the client disconnects first."""
    finished = asyncio.wrap_future(pending.future)
    disconnected = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({finished, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            raise ClientDisconnect
        return finished.result()
    except (BusyError, CancelledRequestError, UserError) as error:
        raise _api_error(error) from None
    finally:
        pending.is_cancelled = True
        finished.cancel()
        disconnected.cancel()


async def _disconnected(http: Request) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _api_error(error: Exception) -> ApiError:
    """Return the client's view of a failure; internal errors are not shown."""
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, BusyError | CancelledRequestError):
        return ApiError(503, str(error), code="busy")
    return ApiError(500, "the request failed; see the server's log")


def _error_body(error: HTTPException) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": code}}


async def _error_response(http: Request, error: HTTPException) -> Response:
    return JSONResponse(_error_body(error), status_code=error.status_code)


async def _no_response(http: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nginx's code for a client that closed the connection
