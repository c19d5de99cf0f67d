"""Serve the page on 127.0.0.1, read-only, to requests whose Host header names this machine.

From another machine: ssh -L 8080:127.0.0.1:8080 MACHINE.
"""

import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from qerl.errors import UserError
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.dashboard.live import LivePage
from qerl.tracking.loopback import names_this_machine
from qerl.tracking.report.page import run_names
from qerl.tracking.report.read import check_folder, is_run
from qerl.tracking.run_folders import runs_in

_HOST = "127.0.0.1"
_POLL_S = 0.1
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def watch(folders: Sequence[Path], *, port: int, opens_browser: bool, patience_s: float = 60.0) -> None:
    """Serve until Ctrl-C; wait up to `patience_s` seconds for runs that are just starting in
    their folders."""
    names = run_names(folders)
    _wait_for_runs(folders, patience_s)
    live = LivePage([RunFollower(folder, name) for folder, name in zip(folders, names, strict=True)])
    with listening(port, live) as server:
        address = f"http://{_HOST}:{server.server_address[1]}/"
        print(f"{', '.join(names)} at {address}", flush=True)
        if opens_browser:
            threading.Thread(target=_open, args=(address,), daemon=True).start()
        server.serve_forever()


def _wait_for_runs(folders: Sequence[Path], patience_s: float) -> None:
    for folder in folders:
        times = [f.stat().st_mtime for f in folder.glob("*")]
        is_old = bool(times) and max(times) < time.time() - patience_s
        if is_old or not folder.is_dir() or runs_in(folder):
            check_folder(folder)  # nothing is just starting in it
    end = time.monotonic() + patience_s
    if missing := [str(folder) for folder in folders if not is_run(folder)]:
        message = f"waiting up to {patience_s:.0f} s for {', '.join(missing)} to start"
        print(message, file=sys.stderr, flush=True)
    while time.monotonic() < end and not all(map(is_run, folders)):
        time.sleep(_POLL_S)


class DashboardServer(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    live: LivePage

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that disconnects during a response is not an error.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class DashboardHandler(BaseHTTPRequestHandler):
    server: DashboardServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "qerl", ""
    timeout = 60

    def do_GET(self) -> None:
        try:
            answer = self._answer()
        except OSError as error:  # reading the run's files
            answer = 503, "text/plain", f"the run cannot be read: {error.strerror}\n".encode()
        self._send(*answer)

    def _answer(self) -> tuple[int, str, bytes]:
        if not names_this_machine(self.headers.get("Host", "")):
            return 403, "text/plain", b"the Host header must name this machine\n"
        url, live = urlsplit(self.path), self.server.live
        if url.path == "/":
            return 200, "text/html", live.page()
        if url.path == "/favicon.ico":
            return 204, "text/plain", b""
        answers = {"/now": live.now, "/update": live.update, "/samples": lambda: live.samples(url.query)}
        body = answers.get(url.path, lambda: None)()
        if body is None:
            return 404, "text/plain", b"not found\n"
        return 200, "application/json", body

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def listening(port: int, live: LivePage) -> DashboardServer:
    try:
        server = DashboardServer((_HOST, port), DashboardHandler)
    except OSError as error:
        reason = f"{error.strerror}; --port 0 picks a free one"
        raise UserError(f"cannot listen on {_HOST} port {port}: {reason}") from None
    server.live = live
    return server


def _open(address: str) -> None:
    if not webbrowser.open(address):
        print("no browser found; open the address yourself", file=sys.stderr)
