"""The routes /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /health and /metrics.

Bodies are parsed in a thread of their own, one after the other: a long one must not hold up other streams.
Access is checked before the body is read, except for /health: by the API key, or without one by the Host
and Origin headers. A page in a browser can send requests to a loopback address, but only under its own host
name (tracking/loopback.py), with its own origin, or as plain text, and all are refused. Starlette's
TrustedHostMiddleware knows neither 127.0.0.0/8 nor OpenAI's error format.
"""

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from qerl.errors import UserError
from qerl.serve.batcher import Batcher, BusyError, CancelledRequestError, OverdueRequestError, PendingRequest
from qerl.serve.fields import AdapterBody, ApiError, unknown_model
from qerl.serve.gate import Gate, error_body
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.metrics import CONTENT_TYPE, ServerMetrics
from qerl.serve.request import CompletionRequest, RequestParser
from qerl.serve.response import ApiResponse, ChatResponse, CompletionResponse, event
from qerl.serve.responses import ResponsesBody, ResponsesResponse
from qerl.serve.stream import TokenStream
from qerl.tracking.loopback import names_this_machine
from qerl.types import Sample, TokenLogprob

_NUM_GRAMMAR_THREADS = 4
StreamItem = tuple[int, TokenLogprob, Sample | None] | Exception
StreamQueue = asyncio.Queue[StreamItem]
"""(choice, token, the sample if that token ended it), or the failure of the request."""


Parsed = TypeVar("Parsed")
Answer = Callable[[Request], Awaitable[Response]]


def make_app(
    parser: RequestParser,
    batcher: Batcher,
    *,
    api_key: str | None,
    check: Callable[[Request], Awaitable[None]] | None = None,
) -> Starlette:
    """Return the app; its state has the server's metrics, and what ends the requests that are running.

    check: used instead of the check of api_key. It raises ApiError to refuse a request, and may set in
    `request.state` a parser, which then parses that request, and a turn, which is locked meanwhile."""
    metrics = ServerMetrics()
    routes = Routes(parser, batcher, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.close()
        routes.close()

    refuse = check or AccessCheck(api_key, parser.options.host).check

    def checked(path: str, answer: Answer, method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            await refuse(request)
            return await answer(request)

        return Route(path, endpoint, methods=[method])

    handlers: dict[Any, Any] = {  # each takes the error that it is for, which Starlette's type cannot say
        HTTPException: _error_response,
        ClientDisconnect: no_response,
        Exception: _failure_response,
    }
    app = Starlette(
        lifespan=lifespan,
        routes=[
            checked("/v1/models", routes.models),
            checked("/v1/models/{name:path}", routes.model),
            checked("/v1/completions", routes.completions, "POST"),
            checked("/v1/chat/completions", routes.chat_completions, "POST"),
            checked("/v1/responses", routes.responses, "POST"),
            checked("/v1/load_lora_adapter", routes.load_adapter, "POST"),
            checked("/v1/unload_lora_adapter", routes.unload_adapter, "POST"),
            checked("/metrics", routes.show_metrics),
            Route("/health", routes.health),
        ],
        exception_handlers=handlers,
    )
    app.state.metrics = metrics
    app.state.stop_requests = batcher.stop
    _show_engine(metrics, batcher)
    paths = [getattr(route, "path", "") for route in app.router.routes]
    app.add_middleware(Gate, metrics=metrics, paths=paths, max_header_bytes=parser.options.max_header_bytes)
    return app


def _show_engine(metrics: ServerMetrics, batcher: Batcher) -> None:
    """Show what the batcher counts."""
    show = metrics.add_read
    show("qerl_engine_up", "1 while the engine's thread lives.", lambda: int(not batcher.has_died))
    show("qerl_requests_running", "Requests that have a token, not the last.", lambda: batcher.num_running)
    show("qerl_requests_waiting", "Requests without a token.", lambda: batcher.num_waiting)
    show("qerl_prompt_tokens_total", "Prompt tokens of requests.", lambda: batcher.num_prompt_tokens)
    show("qerl_generated_tokens_total", "Tokens sampled.", lambda: batcher.num_generated_tokens)
    show("qerl_unfused_tokens_total", "Drawn outside the kernels.", lambda: batcher.num_unfused_tokens)
    show("qerl_malformed_tool_calls_total", "Calls that are text.", lambda: metrics.num_malformed_calls)
    show("qerl_kv_pages_used", "Pages of KV cache in use.", lambda: batcher.kv_pages[0])
    show("qerl_kv_pages", "Pages of KV cache.", lambda: batcher.kv_pages[1])


class AccessCheck:
    """Requires the API key, or where there is none, a Host header, and an Origin if any, of this machine."""

    def __init__(self, api_key: str | None, host: str):
        self._digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self._host = host

    async def check(self, request: Request) -> None:
        if self._digest is None:
            headers = request.headers
            if not names_this_machine(headers.get("host", ""), self._host):
                raise ApiError(403, "the Host header must name this machine when no API key is set")
            site = headers.get("origin", "null" if headers.get("sec-fetch-site") == "cross-site" else None)
            if site is not None and not names_this_machine(site.partition("//")[2], self._host):
                raise ApiError(403, "pages of other sites are refused when no API key is set")
            return
        if not has_key(request, self._digest):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def has_key(request: Request, digest: bytes) -> bool:
    """True if the request bears the API key of this SHA-256; takes as long for any other key."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(hashlib.sha256(key.strip().encode()).digest(), digest)
    return is_right and scheme.lower() == "bearer"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body; raise ApiError 413 as soon as it has more bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes")
    return bytes(body)


class Routes:
    def __init__(self, parser: RequestParser, batcher: Batcher, metrics: ServerMetrics):
        self._metrics = metrics
        self._parser, self._batcher, self._created = parser, batcher, int(time.time())
        self._parse_thread = ThreadPoolExecutor(1, "parser")
        self._write_thread = ThreadPoolExecutor(1, "writer")  # names of a million tokens take seconds
        self._grammar_threads = ThreadPoolExecutor(_NUM_GRAMMAR_THREADS, "grammar")

    def close(self) -> None:
        for threads in (self._parse_thread, self._write_thread, self._grammar_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def health(self, request: Request) -> Response:
        if self._batcher.has_died:
            return JSONResponse({"status": "the engine has died; see the server's log"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        names = self._parser.known_names or (self._parser.name,)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name, known = request.path_params["name"], self._parser_of(request).known_names
        if known is not None and name not in known:
            raise unknown_model(known)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "qerl"}

    async def completions(self, request: Request) -> Response:
        parsed = await self._parsed(request, self._parser_of(request).completion)
        return await self._answer(request, parsed, CompletionResponse(parsed, *self._names_of(parsed)))

    async def chat_completions(self, request: Request) -> Response:
        parsed = await self._parsed(request, self._parser_of(request).chat)
        return await self._answer(request, parsed, ChatResponse(parsed, *self._names_of(parsed)))

    async def responses(self, request: Request) -> Response:
        parser = self._parser_of(request)

        def parse(content: bytes) -> tuple[ResponsesBody, CompletionRequest]:
            body = ResponsesBody.parse(content, parser.known_names, parser.options)
            return body, parser.chat_of(body.to_chat())

        body, parsed = await self._parsed(request, parse)
        response = ResponsesResponse(body, parsed, *self._names_of(parsed))
        return await self._answer(request, parsed, response)

    def _names_of(self, parsed: CompletionRequest) -> tuple[str, LoadedModel]:
        """Return the name in the response, and the model."""
        name = self._parser.name if parsed.pending.table_row == 0 else parsed.body.model
        return name or self._parser.name, self._parser.model

    async def load_adapter(self, request: Request) -> Response:
        body = await self._parsed(request, AdapterBody.parse)
        if self._parser.adapters is None:
            raise ApiError(403, "the server was started without --adapter-folder", code="no_adapters")
        if body.lora_path is None:
            raise ApiError(400, "lora_path must be given", param="lora_path")
        if body.lora_name == self._parser.name:
            raise ApiError(400, f"lora_name: {body.lora_name} is the model", param="lora_name")
        try:
            await asyncio.to_thread(self._parser.adapters.load, body.lora_name, body.lora_path)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        body = await self._parsed(request, AdapterBody.parse)
        if self._parser.adapters is None or not self._parser.adapters.unload(body.lora_name):
            message = f"there is no adapter {body.lora_name[:150]!r}"
            raise ApiError(404, message, param="lora_name", code="adapter_not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _parser_of(self, request: Request) -> RequestParser:
        return getattr(request.state, "parser", self._parser)

    async def _parsed(self, request: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        content = await self._body(request)
        async with getattr(request.state, "turn", contextlib.nullcontext()):
            return await asyncio.get_running_loop().run_in_executor(self._parse_thread, parse, content)

    async def _answer(self, http: Request, parsed: CompletionRequest, response: ApiResponse) -> Response:
        pending = parsed.pending
        items = _token_queue(pending) if parsed.body.stream else None
        try:
            await self._compile(parsed)
            self._batcher.submit(pending)
        except BaseException as error:  # whatever it is: an adapter or an episode counts its open requests
            pending.future.cancel()
            if parsed.grammar is not None:
                parsed.grammar.close()
            if isinstance(error, ApiError | BusyError):
                raise _api_error(error) from None
            raise
        if items is not None:
            return EventStream(self._events(parsed, items, response), lambda: self._end(parsed, response))
        try:
            samples = await _samples(http, pending)
            write = lambda: JSONResponse(response.whole(samples))  # noqa: E731
            return await asyncio.get_running_loop().run_in_executor(self._write_thread, write)
        finally:
            self._end(parsed, response)

    async def _compile(self, parsed: CompletionRequest) -> None:
        """Compile the grammar, if any; few at once, which leaves processors to the engine."""
        if parsed.grammar is None or parsed.pending.recorded is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._grammar_threads, parsed.grammar.compile)
        except UserError as error:
            raise ApiError(400, f"{parsed.grammar_param}: {error}", param=parsed.grammar_param) from None

    def _end(self, parsed: CompletionRequest, response: ApiResponse) -> None:
        """Free the request's place if it is not complete, and count it."""
        pending = parsed.pending
        self._batcher.cancel(pending)
        if parsed.grammar is not None:
            parsed.grammar.close()
        self._metrics.num_malformed_calls += response.num_malformed_calls
        if pending.first_token_s is not None:
            self._metrics.first_token.observe(pending.first_token_s - pending.entered_s)
        self._metrics.duration.observe(time.monotonic() - pending.entered_s)

    async def _body(self, http: Request) -> bytes:
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the content type must be application/json")
        max_bytes = self._parser.options.max_body_bytes
        length = http.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes")
        return await read_body(http, max_bytes)

    async def _events(
        self, parsed: CompletionRequest, items: StreamQueue, response: ApiResponse
    ) -> AsyncIterator[str]:
        pending, is_each_sent = parsed.pending, parsed.body.with_logprobs or parsed.body.return_token_ids
        keeps_end, markers = parsed.body.return_token_ids, parsed.markers
        streams = [
            TokenStream(self._parser.model, parsed.stop, keeps_end=keeps_end, markers=markers)
            for _ in range(pending.num_choices)
        ]
        num_running, num_tokens = pending.num_choices, 0
        for each in response.start():
            yield each
        while num_running:
            item = await items.get()
            if isinstance(item, Exception):
                yield event(error_body(_api_error(item)))
                return
            choice, token, ended = item
            num_tokens += 1
            text, tokens = streams[choice].add(token, ended)
            if text or (tokens and is_each_sent):
                for each in response.piece(choice, text, tokens):
                    yield each
            if ended is not None:
                num_running -= 1
                for each in response.end_choice(choice, ended):
                    yield each
        for each in response.end(num_tokens):
            yield each


class EventStream(StreamingResponse):
    """Server-sent events; on_end is called at their end, even if the client had left before the first."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _token_queue(pending: PendingRequest) -> StreamQueue:
    """Return a queue of this event loop that gets what the batcher's thread reports of the request."""
    loop, items = asyncio.get_running_loop(), StreamQueue()

    def put(item: StreamItem) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody listens
            loop.call_soon_threadsafe(items.put_nowait, item)

    def put_error(future: Future[list[Sample]]) -> None:
        if not future.cancelled() and isinstance(error := future.exception(), Exception):
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
        finished.cancel()
        disconnected.cancel()


async def _disconnected(http: Request) -> None:
    """Wait until the client disconnects; the body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _api_error(error: Exception) -> ApiError:
    """Return the client's view of a failure; internal errors are not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, OverdueRequestError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, BusyError | CancelledRequestError):
        return ApiError(503, str(error), code="busy")
    return ApiError(500, "the request failed; see the server's log")


async def _error_response(http: Request, error: HTTPException) -> Response:
    return JSONResponse(error_body(error), status_code=error.status_code)


async def _failure_response(http: Request, error: Exception) -> Response:
    """Answer where a handler failed; uvicorn logs the traceback."""
    return JSONResponse(error_body(_api_error(error)), status_code=500)


async def no_response(http: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nginx's code for a client that closed the connection
