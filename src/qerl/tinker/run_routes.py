"""The routes of Tinker's API about training runs, sessions and checkpoints, and the download of their files.

A download's URL carries its own permission, as clients fetch it without the API's headers: the time until
which it is valid, and an HMAC of that time and the file under a secret of this process.
"""

import asyncio
import datetime
import hashlib
import hmac
import secrets
import time
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from qerl.errors import require
from qerl.serve.fields import ApiError
from qerl.tinker import bodies
from qerl.tinker.service import NotFoundError, Service

_URL_VALID_S = 3600


class RunRoutes:
    def __init__(self, service: Service):
        self._service, self._secret = service, secrets.token_bytes(32)

    def table(self) -> list[tuple[Any, ...]]:
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        return [
            ("training_runs", self.list_runs, "GET"),
            ("training_runs/{run}", self.show_run, "GET"),
            ("sessions", self.list_sessions, "GET"),
            ("sessions/{session_id}", self.show_session, "GET"),
            ("checkpoints", self.list_checkpoints, "GET"),
            ("training_runs/{run}/checkpoints", self.list_checkpoints, "GET"),
            (checkpoint, self.delete_checkpoint, "DELETE"),
            (f"{checkpoint}/ttl", self.set_ttl, "PUT"),
            (f"{checkpoint}/external_weights_urls", self.sign_urls, "GET"),
        ]

    async def list_runs(self, request: Request) -> Response:
        runs = self._service.runs()
        part, cursor = _page(request, sorted(runs.values(), key=lambda run: run["last_request_time"])[::-1])
        return JSONResponse({"training_runs": part, "cursor": cursor})

    async def show_run(self, request: Request) -> Response:
        run = self._service.runs().get(name := request.path_params["run"])
        if run is None:
            raise NotFoundError(
                f"there is no training run {name[:100]}, or it has ended without a checkpoint"
            )
        return JSONResponse(run)

    async def list_sessions(self, request: Request) -> Response:
        part, _ = _page(request, list(self._service.sessions))
        return JSONResponse({"sessions": part})

    async def show_session(self, request: Request) -> Response:
        session = self._service.session(request.path_params["session_id"])
        return JSONResponse({"training_run_ids": session.models, "sampler_ids": session.samplers})

    async def list_checkpoints(self, request: Request) -> Response:
        part, cursor = _page(request, self._service.checkpoints.listed(request.path_params.get("run")))
        return JSONResponse({"checkpoints": part, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.checkpoints.delete, _path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        limit = self._service.options.max_body_bytes
        body = await bodies.read(request, bodies.Ttl, limit)
        await asyncio.to_thread(self._service.checkpoints.set_ttl, _path(request), body.ttl_seconds)
        return Response(status_code=204)

    async def sign_urls(self, request: Request) -> Response:
        """Return an address for each file."""
        path, expires_s = _path(request), int(time.time()) + _URL_VALID_S
        run, kind, name = (request.path_params[key] for key in ("run", "kind", "name"))
        urls = {}
        for file in self._service.checkpoints.files(path):
            place = quote(f"{run}/{kind}/{name}/{file}")
            signature = self._signature(f"{path}/{file}", expires_s)
            urls[file] = f"{request.base_url}api/v1/files/{place}?expires={expires_s}&signature={signature}"
        expires = datetime.datetime.fromtimestamp(expires_s, datetime.UTC).isoformat()
        return JSONResponse({"urls": urls, "expires": expires})

    async def download(self, request: Request) -> Response:
        """Return a file whose address `sign_urls` has given; a key is not asked for."""
        path, file = _path(request), request.path_params["file"]
        expires = request.query_params.get("expires", "0")
        is_valid = expires.isdecimal() and len(expires) < 12 and time.time() <= int(expires)
        expected = self._signature(f"{path}/{file}", int(expires) if is_valid else 0)
        signature = request.query_params.get("signature", "")
        if not is_valid or not hmac.compare_digest(expected.encode(), signature.encode()):
            raise ApiError(403, "the address has expired or is wrong: ask for external_weights_urls again")
        return FileResponse(self._service.checkpoints.files(path)[file])

    def _signature(self, name: str, expires_s: int) -> str:
        return hmac.new(self._secret, f"{expires_s} {name}".encode(), hashlib.sha256).hexdigest()


def _path(request: Request) -> str:
    run, kind, name = (request.path_params[key] for key in ("run", "kind", "name"))
    return f"tinker://{run}/{kind}/{name}"


def _page(request: Request, entries: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the part of the entries that is asked for, and where it lies."""
    offset, limit = _number(request, "offset", 0), _number(request, "limit", len(entries))
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return entries[offset : offset + limit], cursor


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, str(default))
    require(value.isdecimal() and len(value) < 10, f"{name} must be a number from 0 on, got {value[:50]!r}")
    return int(value)
