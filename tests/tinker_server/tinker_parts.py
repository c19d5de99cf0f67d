"""A server of a tiny model for Tinker's API on a free port."""

import contextlib
import socket
import threading
import time
from pathlib import Path

from qerl.config import ModelConfig
from qerl.config.options import TinkerOptions
from qerl.serve.server import make_server
from qerl.tinker.server import load_app, serve_options


@contextlib.contextmanager
def serving(model: Path, folder: Path, *, key: str | None = None, **settings):
    """The address of a server. folder: of its checkpoints."""
    options = TinkerOptions(
        model=ModelConfig(path=str(model), dtype="fp32"),
        checkpoints=folder,
        name="tiny",
        max_rank=8,
        **settings,
    )
    app, limits = load_app(str(model), options, api_key=key), serve_options(options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
