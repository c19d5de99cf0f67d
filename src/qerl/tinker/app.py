"""The routes of Tinker's API, as the client tinker 0.38.0 calls them.

Requests that compute return a request_id at once; /retrieve_future waits for the result up to 20 s, then
answers 408, upon which the client asks again. Errors are {"detail": ...} with a status, those of results
{"error", "category"}.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qerl.errors import RunError, UserError, require
from qerl.serve.app import AccessCheck, no_response
from qerl.serve.fields import ApiError
from qerl.serve.gate import Gate
from qerl.serve.metrics import ServerMetrics
from qerl.tinker import bodies
from qerl.tinker.adapter import AdamSettings, AdapterSpec
from qerl.tinker.checkpoints import encryption
from qerl.tinker.requests import GoneError
from qerl.tinker.run_routes import RunRoutes
from qerl.tinker.sampling import SampleWork, ServedSampler
from qerl.tinker.service import FullError, NotFoundError, Result, Service, TrainedModel
from qerl.tinker.wire import WireError, read_pass_request, write_pass_result
from qerl.types import Sampling

_LONG_POLL_S, _SWEEP_S = 20.0, 5.0
_NO_UNEMBEDDING = (
    "qerl has no adapter of the unembedding: train_unembed, which is True by default, is read as False"
)
Body = TypeVar("Body", bound=BaseModel)
Answer = Callable[[Request], Awaitable[Response]]


def make_app(
    service: Service, *, api_key: str | None, stop_ids: frozenset[int], tokenizer_id: str
) -> Starlette:
    """stop_ids: tokens that end a sample where its request names no others."""
    metrics, routes = ServerMetrics(), TinkerRoutes(service, stop_ids, tokenizer_id)
    run_routes = RunRoutes(service)
    access = AccessCheck(None, service.options.host)
    digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        sweeper = asyncio.create_task(_sweep(service))
        yield
        sweeper.cancel()
        await asyncio.to_thread(service.worker.close)
        service.snapshots.close()

    def route(path: str, answer: Answer, *methods: str, is_signed: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            if not is_signed or digest is None:
                await _check_access(request, access, digest)
            try:
                return await answer(request)
            except (UserError, RunError, WireError) as error:
                known = {NotFoundError: 404, GoneError: 410, FullError: 429, RunError: 500}
                status = known.get(type(error), 400)
                return JSONResponse({"detail": str(error)}, status)

        return Route(f"/api/v1/{path}", endpoint, methods=list(methods or ["POST"]))

    handlers: dict[Any, Any] = {
        HTTPException: _error_response,
        ClientDisconnect: no_response,
        Exception: _failure_response,
    }
    app = Starlette(
        lifespan=lifespan,
        routes=[
            *(route(path, *how) for path, *how in routes.table() + run_routes.table()),
            route("files/{run}/{kind}/{name}/{file}", run_routes.download, "GET", is_signed=True),
        ],
        exception_handlers=handlers,
    )
    app.state.metrics, app.state.stop_requests = metrics, service.worker.close
    paths = [getattr(each, "path", "") for each in app.router.routes]
    app.add_middleware(Gate, metrics=metrics, paths=paths, max_header_bytes=16_384)
    return app


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(min(_SWEEP_S, service.options.session_timeout_s / 2))
        service.drop_old()


async def _check_access(request: Request, access: AccessCheck, digest: bytes | None) -> None:
    if digest is None:
        await access.check(request)
        return
    key = request.headers.get("x-api-key", "")
    if not hmac.compare_digest(hashlib.sha256(key.encode()).digest(), digest):
        raise ApiError(401, "the API key is missing or wrong")


async def _error_response(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code)


async def _failure_response(request: Request, error: Exception) -> Response:
    """Answer where a route failed; uvicorn logs the traceback."""
    return JSONResponse({"detail": "the request failed; see the server's log"}, 500)


class TinkerRoutes:
    def __init__(self, service: Service, stop_ids: frozenset[int], tokenizer_id: str):
        self._service, self._stop_ids, self._tokenizer_id = service, stop_ids, tokenizer_id

    def table(self) -> list[tuple[Any, ...]]:
        """Return (path, function, method), the method POST where there is none."""
        return [
            ("healthz", self.health, "GET"),
            ("client/config", self.client_config),
            ("client/dynamic_config", self.dynamic_config),
            ("telemetry", self.telemetry),
            ("get_server_capabilities", self.capabilities, "GET"),
            ("create_session", self.create_session),
            ("session_heartbeat", self.heartbeat),
            ("sessions/{session_id}/finish", self.finish_session),
            ("create_model", self.create_model),
            ("get_info", self.get_info),
            ("unload_model", self.unload_model),
            ("forward_backward", self.forward_backward),
            ("optim_step", self.optim_step),
            ("save_weights", self.save_weights),
            ("save_weights_for_sampler", self.save_for_sampler),
            ("save_weights_external", self.save_external),
            ("load_weights", self.load_weights),
            ("weights_info", self.weights_info),
            ("create_sampling_session", self.create_sampler),
            ("samplers/{sampler_id}", self.show_sampler, "GET"),
            ("asample", self.sample),
            ("retrieve_future", self.retrieve_future),
            ("cancel_future", self.cancel_future),
        ]

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        chunk_bytes = min(5_000_000, self._service.options.max_body_bytes // 2)
        flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "proto_compress_fwdbwd": False}
        return JSONResponse(flags | {"fwdbwd_max_chunk_bytes_count": chunk_bytes})

    async def dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        await self._content(request)
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, request: Request) -> Response:
        about = {
            "max_context_length": self._service.max_context_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [{"model_name": n, **about} for n in self._service.names]})

    async def create_session(self, request: Request) -> Response:
        await self._body(request, bodies.CreateSession)
        session_id = self._service.create_session()
        return JSONResponse(
            {"type": "create_session", "session_id": session_id, "info_message": _NO_UNEMBEDDING}
        )

    async def heartbeat(self, request: Request) -> Response:
        self._service.session((await self._body(request, bodies.OfSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        self._service.end_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def create_model(self, request: Request) -> Response:
        body = await self._body(request, bodies.CreateModel)
        self._service.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        self._service.sigma_of(body.user_metadata)
        lora = body.lora_config
        seed = secrets.randbits(62) if lora.seed is None else lora.seed
        which = {"train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
        spec = AdapterSpec(rank=lora.rank, seed=seed, **which)
        spec.config(self._service.slot.decoder)  # refuses an adapter of nothing

        def make(model: TrainedModel) -> Result:
            self._service.make_adapter(model, spec)
            return {"type": "create_model", "model_id": model.model_id}

        owner = body.session_id, body.model_seq_id
        return _promise(self._service.create_model(*owner, make, body.user_metadata))

    async def get_info(self, request: Request) -> Response:
        model = self._service.model((await self._body(request, bodies.OfModel)).model_id)
        name = self._service.names[0]
        data = {
            "arch": self._service.slot.decoder.family,
            "model_name": name,
            "tokenizer_id": self._tokenizer_id,
        }
        about = {"model_id": model.model_id, "model_data": data, "model_name": name}
        rank = model.made.spec.rank
        return JSONResponse({"type": "get_info", **about, "is_lora": True, "lora_rank": rank})

    async def unload_model(self, request: Request) -> Response:
        loop, service = asyncio.get_running_loop(), self._service
        model = service.model((await self._body(request, bodies.OfModel)).model_id)

        def work() -> Result:
            loop.call_soon_threadsafe(service.unload, model.model_id)
            return {"type": "unload_model", "model_id": model.model_id}

        return _promise(service.submit(model, None, work))

    async def forward_backward(self, request: Request) -> Response:
        body = await asyncio.to_thread(read_pass_request, await self._content(request))
        model, passes = self._service.model(body.model_id), self._service.passes

        def work() -> Result:
            result = passes.run(self._service.hold(model), body)
            return write_pass_result(result.logprobs_D_T, {"loss:sum": result.loss})

        return _promise(self._service.submit(model, body.seq_id, work))

    async def optim_step(self, request: Request) -> Response:
        body = await self._body(request, bodies.OptimStep)
        known = {field.name for field in dataclasses.fields(AdamSettings)}
        if unknown := sorted(body.adam_params.keys() - known):
            raise UserError(f"adam_params: unknown entry {unknown[0][:50]!r}")
        model, settings = self._service.model(body.model_id), AdamSettings(**body.adam_params)

        def work() -> Result:
            norm = self._service.adapter(model).update(settings)
            return {"type": "optim_step", "metrics": {"grad_norm": norm}}

        return _promise(self._service.submit(model, body.seq_id, work))

    async def save_weights(self, request: Request) -> Response:
        body = await self._body(request, bodies.SaveWeights)
        model, name = self._service.model(body.model_id), body.path or secrets.token_hex(4)
        how = {"ttl_s": body.ttl_seconds, "overwrite": body.overwrite, "user_metadata": body.user_metadata}

        def work() -> Result:
            return {
                "type": "save_weights",
                "path": self._service.save(model, "weights", name, has_moments=True, **how),
            }

        return _promise(self._service.submit(model, body.seq_id, work))

    async def save_for_sampler(self, request: Request) -> Response:
        body = await self._body(request, bodies.SaveForSampler)
        model, kind = self._service.model(body.model_id), "save_weights_for_sampler"
        if body.path is None:
            require(body.sampling_session_seq_id is not None, "path or sampling_session_seq_id must be given")
            return _promise(self._keep_for_sampler(model, body))
        name, how = body.path, {"ttl_s": body.ttl_seconds, "user_metadata": body.user_metadata}

        def work() -> Result:
            path = self._service.save(model, "sampler_weights", name, has_moments=False, **how)
            return {"type": kind, "path": path}

        return _promise(self._service.submit(model, body.seq_id, work))

    def _keep_for_sampler(self, model: TrainedModel, body: bodies.SaveForSampler) -> str:
        """Make a sampler of the weights as they will be then; they are kept in memory only."""
        loop, service = asyncio.get_running_loop(), self._service
        sampler_id = f"{model.session_id}:sample:{body.sampling_session_seq_id}:{secrets.token_hex(3)}"

        async def enter(snapshot: int, rank: int) -> None:
            sigma = service.sigma_of(model.user_metadata)
            service.add_sampler(sampler_id, sampler(model.session_id, None, snapshot, rank, sigma))

        def work() -> Result:
            snapshot = service.snapshots.add(model.made.snapshot())
            try:
                asyncio.run_coroutine_threadsafe(enter(snapshot, model.made.spec.rank), loop).result()
            except UserError:  # its session has ended
                service.snapshots.drop(snapshot)
                raise
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return service.submit(model, body.seq_id, work)

    async def save_external(self, request: Request) -> Response:
        body = await self._body(request, bodies.SaveExternal)
        model, name, kind = self._service.model(body.model_id), body.path, "external_weights"
        encrypt = encryption(body.age_encryption_recipients)

        def work() -> Result:
            how = {"ttl_s": body.ttl_seconds, "encrypt": encrypt}
            path = self._service.save(model, kind, name, has_moments=False, **how)
            return {"type": "save_weights_external", "path": path}

        return _promise(self._service.submit(model, body.seq_id, work))

    async def load_weights(self, request: Request) -> Response:
        body, service = await self._body(request, bodies.LoadWeights), self._service
        service.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        service.sigma_of(body.user_metadata)
        spec, tensors, moments = await asyncio.to_thread(service.stored, body.path)
        moments = moments if body.optimizer else None
        result = {"type": "load_weights", "path": body.path}

        def load(model: TrainedModel) -> Result:
            service.adapter(model).load(tensors, moments)
            return result

        if body.model_id is not None:
            model = service.model(body.model_id)
            return _promise(service.submit(model, body.seq_id, lambda: load(model)))

        def make(model: TrainedModel) -> Result:
            service.make_adapter(model, spec)
            return load(model)

        is_whole = body.session_id is not None and body.model_seq_id is not None
        require(is_whole, "model_id, or session_id and model_seq_id must be given")
        assert body.session_id is not None and body.model_seq_id is not None
        return _promise(service.create_model(body.session_id, body.model_seq_id, make, body.user_metadata))

    async def weights_info(self, request: Request) -> Response:
        info = self._service.checkpoints.info((await self._body(request, bodies.OfPath)).tinker_path)
        about = {key: info[key] for key in ("base_model", "train_mlp", "train_attn")}
        return JSONResponse({**about, "is_lora": True, "lora_rank": info["rank"], "train_unembed": False})

    async def create_sampler(self, request: Request) -> Response:
        body, service = await self._body(request, bodies.CreateSampler), self._service
        service.check_base(body.base_model)
        named = body.base_model is not None or body.model_path is not None
        require(named, "base_model or model_path must be given")
        service.session(body.session_id)
        rank, snapshot, metadata = 1, None, None
        if body.model_path is not None:
            spec, tensors, _ = await asyncio.to_thread(service.stored, body.model_path)
            metadata = service.checkpoints.info(body.model_path).get("run_metadata")
            rank = spec.rank
            snapshot = await asyncio.to_thread(service.snapshots.add, tensors)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}:{secrets.token_hex(3)}"
        about = body.session_id, body.model_path, snapshot, rank
        sigma = 0.0 if snapshot is None else service.sigma_of(metadata)
        service.add_sampler(sampler_id, sampler(*about, sigma))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def show_sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        path = self._service.sampler(sampler_id).model_path
        return JSONResponse(
            {"sampler_id": sampler_id, "base_model": self._service.names[0], "model_path": path}
        )

    async def sample(self, request: Request) -> Response:
        body = await self._body(request, bodies.SampleBody)
        work = self._sample_work(body, self._service.sampler(body.sampling_session_id))
        request_id = self._service.sample(body.sampling_session_id, body.seq_id, work)
        names = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": names})

    def _sample_work(self, body: bodies.SampleBody, sampler: ServedSampler) -> SampleWork:
        wrong = [chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"]
        require(not wrong, f"prompt: only text is supported, got {wrong[:1]}")
        tokens_T = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        limit, vocab_size = self._service.max_context_tokens, self._service.engine.vocab_size
        require(
            0 < len(tokens_T) < limit, f"prompt: has {len(tokens_T)} tokens; 1 to {limit - 1} are supported"
        )
        require(max(tokens_T) < vocab_size, f"prompt: tokens must be below {vocab_size}")
        max_samples, settings = self._service.options.max_samples, body.sampling_params
        is_allowed = body.num_samples <= max_samples
        require(is_allowed, f"num_samples: at most {max_samples}, got {body.num_samples}")
        stops = [settings.stop] if isinstance(settings.stop, str) else settings.stop
        texts = tuple(each for each in stops or () if isinstance(each, str))
        require("" not in texts, "sampling_params.stop: a text must not be empty")
        ids = self._stop_ids if stops is None else frozenset(e for e in stops if isinstance(e, int))
        return SampleWork(
            sampler=sampler,
            tokens_T=tokens_T,
            num_samples=body.num_samples,
            sampling=Sampling(
                max_tokens=min(settings.max_tokens or limit, limit - len(tokens_T)),
                temperature=settings.temperature,
                top_k=settings.top_k if settings.top_k > 0 else None,
                top_p=None if settings.top_p == 1 else settings.top_p,
                stop=texts,
            ),
            stop_token_ids=ids,
            seed=settings.seed,
            has_prompt_logprobs=bool(body.prompt_logprobs),
            num_top_prompt=body.topk_prompt_logprobs,
            num_top=body.topk_sample_logprobs,
        )

    async def retrieve_future(self, request: Request) -> Response:
        request_id = (await self._body(request, bodies.RetrieveFuture)).request_id
        finished = asyncio.wrap_future(self._service.job(request_id).future)
        await asyncio.wait({finished}, timeout=_LONG_POLL_S)
        if not finished.done():
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        self._service.requests.fetched(request_id)
        error = finished.exception()
        if isinstance(error, UserError):
            return JSONResponse({"error": str(error), "category": "user"})
        if isinstance(error, RunError):
            return JSONResponse({"error": str(error), "category": "server"})
        if error is not None:
            return JSONResponse({"error": "the request failed; see the server's log", "category": "server"})
        result = finished.result()
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    async def cancel_future(self, request: Request) -> Response:
        self._service.requests.cancel((await self._body(request, bodies.OfRequest)).request_id)
        return Response(status_code=204)

    async def _content(self, request: Request) -> bytes:
        return await bodies.content(request, self._service.options.max_body_bytes)

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        return await bodies.read(request, kind, self._service.options.max_body_bytes)


def sampler(
    session_id: str, model_path: str | None, snapshot: int | None, rank: int, sigma: float
) -> ServedSampler:
    """Return a sampler with a noise of its own."""
    about = {"session_id": session_id, "model_path": model_path, "snapshot": snapshot, "rank": rank}
    return ServedSampler(**about, sigma=sigma, noise_seed=secrets.randbits(62))


def _promise(request_id: str) -> Response:
    return JSONResponse({"request_id": request_id})


def _check_optimizer(config: dict[str, Any] | None) -> None:
    name = "adamw" if config is None else config.get("type")
    require(name == "adamw", f"optimizer_config: only adamw is supported, got {str(name)[:50]!r}")
