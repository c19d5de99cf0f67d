"""The server from its start to its end: key and address are checked before the model is loaded.

An address that other machines reach needs a key. The longest request that the limits allow is tried once, so
that a memory too small for it is said at the start, and later calls find the cache that they need.
"""

import ipaddress
import os
import socket
from pathlib import Path

import uvicorn

from qerl.config import RunConfig
from qerl.config.options import ServeOptions
from qerl.errors import UserError, require
from qerl.serve.app import make_app
from qerl.serve.batcher import Batcher
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.serve.request import RequestParser
from qerl.types import Prompt, Sampling

KEY_NAME = "QERL_API_KEY"
_GRACE_S = 5  # what open streams get when the server ends


def serve(source: str, run: RunConfig | None, options: ServeOptions) -> None:
    """Until a signal ends it."""
    key = find_key(options.api_key_file)
    with _bound(options, has_key=key is not None) as listener:
        model = load_model(source, run, options.model, with_adapter=options.with_adapter)
        try_longest(model, options)
        reader = RequestParser(opened=model, options=options, name=options.name or Path(source).name)
        app = make_app(reader, Batcher(model.engine, max_waiting=options.max_waiting), key=key)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
        )
        host, port = listener.getsockname()[:2]
        print(f"{reader.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        uvicorn.Server(settings).run(sockets=[listener])


def find_key(path: Path | None) -> str | None:
    """Of the file, else of the environment; None if neither is given."""
    try:
        key = os.environ.get(KEY_NAME) if path is None else path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UserError(f"api_key_file {path}: {reason}") from None
    if key is not None:
        where = KEY_NAME if path is None else f"api_key_file {path}"
        is_plain = key.isascii() and key.isprintable() and " " not in key
        require(key != "" and is_plain, f"{where} must hold a key of printable ASCII without spaces")
    return key


def try_longest(model: LoadedModel, options: ServeOptions) -> None:
    """A prompt of one token takes the same memory where prompt and answer together are as long."""
    most = min(options.max_prompt_tokens + options.max_tokens, model.max_positions)
    prompt = Prompt(index=0, text="", tokens_T=[0], messages=None, columns={})
    model.engine.generate(
        [prompt],
        num_samples=1,
        sampling=Sampling(max_tokens=most - 1),
        seed=0,
        step=0,
        watch=lambda *_: True,
    )


def _bound(options: ServeOptions, *, has_key: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"host {options.host}: {error.strerror}") from None
    if not has_key and not all(ipaddress.ip_address(each[4][0]).is_loopback for each in found):
        raise UserError(
            f"host {options.host} is reached from other machines: give --api-key-file or set {KEY_NAME}"
        )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {options.host} port {options.port}: {error.strerror}") from None
    return listener
