"""Start the server: check the API key and the address, load the model, and serve until a signal.

An address that other machines can reach needs an API key. The KV cache for
the longest request that the limits allow is made at the start, so that too little memory is an error then.
"""

import ipaddress
import os
import socket
import sys
from pathlib import Path

from starlette.applications import Starlette

from qerl.config import RunConfig
from qerl.config.options import ServeOptions
from qerl.errors import UserError, require
from qerl.serve.adapters import ServedAdapters
from qerl.serve.app import make_app
from qerl.serve.batcher import Batcher
from qerl.serve.connections import ApiServer
from qerl.serve.gate import BusyApp
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.serve.request import RequestParser
from qerl.tasks.chat_tokens import allow_special_tokens

KEY_VARIABLE = "QERL_API_KEY"


def serve(source: str, run: RunConfig | None, options: ServeOptions) -> None:
    """Serve the model or run `source`, of which `run` is the config, until a signal ends the process."""
    key = read_api_key(options.api_key_file)
    with listen(options, has_key=key is not None) as listener:
        model = load_model(source, run, options.model, with_adapter=options.with_adapter)
        allow_special_tokens(model.engine.tokenizer, options.allow_special_tokens)
        adapters = make_adapters(model, options)  # before the KV cache takes the free memory
        batcher = make_batcher(model, options)
        name = options.name or Path(source).name
        parser = RequestParser(model=model, options=options, name=name, adapters=adapters)
        server = make_server(make_app(parser, batcher, api_key=key), options)
        run_server(server, listener, parser.name, "/v1")


def run_server(server: ApiServer, listener: socket.socket, name: str, path: str = "") -> None:
    """Print where the server listens, and serve until a signal."""
    host, port = listener.getsockname()[:2]
    listener.listen()  # a client that reads the line may connect at once
    print(f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}{path}", flush=True)
    server.run(sockets=[listener])


def make_server(app: Starlette, options: ServeOptions) -> ApiServer:
    metrics = app.state.metrics
    return ApiServer(app, BusyApp(app, metrics), options, metrics, stop_requests=app.state.stop_requests)


def read_api_key(path: Path | None) -> str | None:
    """Return the key in the file, or else in the environment; None if there is neither."""
    try:
        key = os.environ.get(KEY_VARIABLE) if path is None else path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(f"api_key_file {path}: {reason}") from None
    if key is not None:
        where = KEY_VARIABLE if path is None else f"api_key_file {path}"
        is_plain = key.isascii() and key.isprintable() and " " not in key
        require(key != "" and is_plain, f"{where} must contain a key of printable ASCII without spaces")
    return key


def make_batcher(model: LoadedModel, options: ServeOptions) -> Batcher:
    """Return a batcher for the longest requests that the limits allow, once their KV cache is allocated."""
    max_positions = min(options.max_prompt_tokens + options.max_tokens, model.max_positions)
    with model.engine.live_batch(max_positions):
        pass
    return Batcher(model.engine, max_waiting=options.max_waiting, max_positions=max_positions)


def make_adapters(model: LoadedModel, options: ServeOptions) -> ServedAdapters | None:
    """Return the place of adapters that requests name; None without a folder of them."""
    if options.adapter_folder is None:
        return None
    require(options.adapter_folder.is_dir(), f"adapter_folder {options.adapter_folder}: no such folder")
    same = options.model.sampler_format is None
    require(same, "adapter_folder: not with model.sampler_format, whose weights have no adapters by row")
    limits = options.max_adapters, options.max_lora_rank
    adapters = ServedAdapters(model.engine.model, options.adapter_folder, *limits)
    obstacle = model.engine.bank_obstacle(adapters.bank)
    if obstacle is not None and model.engine.model.device.type != "cpu":
        print(f"adapters by request run on PyTorch's operations: {obstacle}", file=sys.stderr)
    return adapters


def listen(options: ServeOptions, *, has_key: bool) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"host {options.host}: {error.strerror}") from None
    if not has_key and not all(ipaddress.ip_address(each[4][0]).is_loopback for each in addresses):
        raise UserError(
            f"host {options.host} is reachable from other machines: give --api-key-file or set {KEY_VARIABLE}"
        )
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {options.host} port {options.port}: {error.strerror}") from None
    return listener
