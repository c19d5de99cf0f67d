"""The routes: /v1/models, /v1/completions and /v1/chat/completions.

Every request is checked before its body is read: the key, or without one that it is meant for this machine
(a browser's page may send what it likes to a loopback address, but under a foreign Host or as plain text).
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qerl.errors import UserError
from qerl.serve.batcher import Batcher, BusyError, GoneError, PendingRequest
from qerl.serve.reply import CHAT, COMPLETION, ApiResponse, ResponseFormat
from qerl.serve.request import ApiError, CompletionRequest, RequestParser
from qerl.serve.stream import TextStream
from qerl.tracking.loopback import names_this_machine
from qerl.types import Sample

_GONE = ApiError(499, "the client has gone")  # nobody reads it

Seen = tuple[int, int, Sample | None] | Exception


def make_app(reader: RequestParser, desk: Batcher, *, key: str | None) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.open()
        yield
        desk.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(reader, desk)
    check = AccessCheck(key, reader.options.host).check
    created = int(time.time())

    async def models(request: Request) -> Response:
        check(request)
        model = {"id": reader.name, "object": "model", "created": created, "owned_by": "qerl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(request: Request) -> Response:
        check(request)
        return await routes.answer(request, reader.completion, COMPLETION)

    async def chat_completions(request: Request) -> Response:
        check(request)
        return await routes.answer(request, reader.chat, CHAT)

    app.add_api_route("/v1/models", models, response_model=None)
    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _refused_by_framework)
    return app


class AccessCheck:
    """Who may come in."""

    def __init__(self, key: str | None, host: str):
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()
        self._host = host

    def check(self, request: Request) -> None:
        if self._digest is None:
            self._check_host(request.headers.get("host", ""))
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != "bearer":
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_host(self, header: str) -> None:
        if not names_this_machine(header, self._host):
            raise ApiError(
                403, "without an API key, only requests to this machine's own address are answered"
            )


class Routes:
    def __init__(self, reader: RequestParser, desk: Batcher):
        self._reader, self._desk = reader, desk

    async def answer(
        self, request: Request, read: Callable[[bytes], CompletionRequest], form: ResponseFormat
    ) -> Response:
        ask = read(await self._body(request))
        reply = ApiResponse(form, ask, self._reader.name, self._reader.opened.tokenizer)
        job = PendingRequest(prompts_P=ask.prompts_P, num_samples=ask.num_samples, sampling=ask.sampling)
        seen: asyncio.Queue[Seen] = asyncio.Queue()
        if ask.is_stream:
            _send_to(seen, job)
        self._submit(job)
        if ask.is_stream:
            return StreamingResponse(self._events(job, seen, reply, ask), media_type="text/event-stream")
        return JSONResponse(reply.whole(await _samples(request, job)))

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the content type must be application/json")
        most, body = self._reader.options.max_body_bytes, bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise ApiError(413, f"the body has more than {most} bytes")
        except ClientDisconnect:
            raise _GONE from None
        return bytes(body)

    def _submit(self, job: PendingRequest) -> None:
        try:
            self._desk.submit(job)
        except BusyError as error:
            raise ApiError(503, str(error), code="busy") from None

    async def _events(
        self, job: PendingRequest, seen: asyncio.Queue[Seen], reply: ApiResponse, ask: CompletionRequest
    ) -> AsyncIterator[str]:
        stop, opened = ask.sampling.stop, self._reader.opened
        streams = [TextStream(opened, stop) for _ in range(job.num_choices)]
        num_left, num_tokens = job.num_choices, 0
        try:
            for index in range(job.num_choices):
                if (opening := reply.opening(index)) is not None:
                    yield _event(opening)
            while num_left:
                found = await seen.get()
                if isinstance(found, Exception):
                    yield _event(_error(_told(found)))
                    return
                index, token, ended = found
                num_tokens += 1
                if text := streams[index].more(token, ended):
                    yield _event(reply.piece(index, text))
                if ended is not None:
                    num_left -= 1
                    yield _event(reply.ending(index, ended))
            if ask.with_usage:
                yield _event(reply.counts(num_tokens))
            yield "data: [DONE]\n\n"
        finally:
            job.is_gone = True


def _send_to(seen: asyncio.Queue[Seen], job: PendingRequest) -> None:
    """Puts what the desk's thread sees of the job into this loop's queue."""
    loop = asyncio.get_running_loop()

    def put(found: Seen) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever listened
            loop.call_soon_threadsafe(seen.put_nowait, found)

    def end(future: Any) -> None:
        if (error := future.exception()) is not None:
            put(error)

    job.watch = lambda choice, token, ended: put((choice, token, ended))
    job.future.add_done_callback(end)


async def _samples(request: Request, job: PendingRequest) -> list[Sample]:
    """The job's, unless the client goes first."""
    answered = asyncio.wrap_future(job.future)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({answered, left}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise _GONE
        return answered.result()
    except (BusyError, GoneError, UserError) as error:
        raise _told(error) from None
    finally:
        job.is_gone = True
        answered.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    """Ends when the client does; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> ApiError:
    """The engine's own mistakes are not for the client to read."""
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, BusyError | GoneError):
        return ApiError(503, str(error) or "the server ends", code="busy")
    return ApiError(500, "the answer failed; the server's log says why")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _error(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(_error(error), status_code=error.status)


async def _refused_by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_error(ApiError(error.status_code, str(error.detail))), status_code=error.status_code)
