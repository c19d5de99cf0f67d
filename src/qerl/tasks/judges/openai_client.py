"""A small client of OpenAI-compatible endpoints: JSON over HTTP, a deadline, retries with growing pauses.

The key is only taken from an environment variable, and sent to the endpoint's own address: redirects are
refused. It is in no error. Errors of the connection, timeouts, 408, 409, 429 and 5xx are tried again after
0.5, 1, 2, ... seconds, or after what Retry-After says; other answers are final.
"""

import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qerl.errors import UserError, printable, redact

_MAX_ANSWER_BYTES = 256 << 20
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_NO_CONNECTION = (ConnectionRefusedError, socket.gaierror)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
Json = dict[str, Any]


class RequestFailed(Exception):
    """RequestFailed("timed out", "no answer within 60 s")"""

    def __init__(self, cause: str, message: str, *, is_free: bool = False):
        """is_free: no endpoint charges for the last try, as nothing was computed."""
        message = printable(redact(message))[:300]
        super().__init__(cause, message)
        self.cause, self.message, self.is_free = cause, message, is_free


def longest_request_s(timeout_s: float, retries: int) -> float:
    """Return a time after which no request is open: a try may wait for a connection and between bytes."""
    return (retries + 1) * 4 * timeout_s + retries * _MAX_PAUSE_S


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class OpenAIClient:
    def __init__(self, url: str, *, key_variable: str, timeout_s: float, retries: int):
        """url: up to and including /v1. key_variable: of the environment; without it no key is sent."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise UserError(
                "an endpoint must be a URL such as http://127.0.0.1:8000/v1, without a user or password"
            )
        self.url = url.rstrip("/")
        key = os.environ.get(key_variable, "").strip()
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(f"{key_variable} must be a key of printable ASCII without spaces")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s, self._retries = timeout_s, retries
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in _LOOPBACK else []
        self._opener = urllib.request.build_opener(_NoRedirect(), *proxies)

    def post(self, path: str, body: Json, again: Callable[[], None] = lambda: None) -> Json:
        """Return the JSON object of the answer; raise RequestFailed after the last try. again: is called
        before another try if the last one may be charged."""
        return self._request(path, json.dumps(body).encode(), again)

    def first_model(self) -> str:
        """Return the name of the first model that the endpoint lists."""
        models = self._request("models", None, lambda: None).get("data")
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise RequestFailed("not an answer", f"{self.url}/models lists no model")
        return first["id"]

    def _request(self, path: str, data: bytes | None, again: Callable[[], None]) -> Json:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                return self._try(path, data)
            except urllib.error.HTTPError as error:
                failed = _http_failure(error)
                is_last |= error.code not in _AGAIN
                pause_s = max(pause_s, _retry_after_s(error))
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    failed = RequestFailed("timed out", f"{self.url}: no answer within {self._timeout_s:g} s")
                else:
                    text = f"{self.url}: {reason or type(error).__name__}"
                    failed = RequestFailed("not reachable", text, is_free=isinstance(reason, _NO_CONNECTION))
            if is_last:
                raise failed
            if not failed.is_free:
                again()
            time.sleep(min(pause_s, _MAX_PAUSE_S))
            pause_s *= 2
        raise AssertionError

    def _try(self, path: str, data: bytes | None) -> Json:
        end_s = time.monotonic() + self._timeout_s
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers=self._headers)
        received = bytearray()
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            while chunk := answer.read1(1 << 16):
                received += chunk
                if time.monotonic() > end_s:  # a byte now and then would keep the socket from timing out
                    raise TimeoutError
                if len(received) > _MAX_ANSWER_BYTES:
                    raise RequestFailed("not an answer", f"{self.url}: more than {_MAX_ANSWER_BYTES} bytes")
        try:
            value = json.loads(received)
        except (ValueError, RecursionError) as error:
            raise RequestFailed("not JSON", f"{self.url}: {error}") from None
        if not isinstance(value, dict):
            raise RequestFailed("not an answer", f"{self.url}: a JSON {type(value).__name__}, not an object")
        return value


def _http_failure(error: urllib.error.HTTPError) -> RequestFailed:
    """Say what the endpoint says, in OpenAI's form of an error or in another."""
    text = ""
    with suppress(OSError, http.client.HTTPException):
        text = error.read(4096).decode("utf-8", errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return RequestFailed(f"HTTP {error.code}", text or str(error.reason), is_free=True)


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    text = (error.headers or {}).get("Retry-After") or ""
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
