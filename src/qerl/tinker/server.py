"""Start the server: load the model with one adapter's place, and serve until a signal."""

import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from starlette.applications import Starlette

from qerl.config import AdapterConfig, NoiseConfig, RunConfig, SampleConfig
from qerl.config.options import ServeOptions, TinkerOptions
from qerl.errors import UserError, require
from qerl.learner.distributed import ALONE
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import stop_token_ids
from qerl.models.decoder import Decoder
from qerl.models.device import resolve_device
from qerl.serve.server import listen, make_server, read_api_key, run_server
from qerl.tinker.adapter import ALPHA, AdapterSlot
from qerl.tinker.app import make_app
from qerl.tinker.passes import Passes
from qerl.tinker.service import Service
from qerl.tracking.progress import work
from qerl.training.calibrated import refuse_calibration
from qerl.training.planned_learner import planned_config
from qerl.training.policy import load_sampler, load_tokenizer_and_limit

_KEY_PREFIX = "tml-"  # the client refuses others


def serve(source: str, options: TinkerOptions) -> None:
    """Serve the model `source` until a signal ends the process."""
    key = read_api_key(options.api_key_file)
    require(
        key is None or key.startswith(_KEY_PREFIX),
        f"the API key must begin with {_KEY_PREFIX}, as clients demand",
    )
    limits = serve_options(options)
    with listen(limits, has_key=key is not None) as listener:
        app = load_app(source, options, api_key=key)
        run_server(make_server(app, limits), listener, source)


def serve_options(options: TinkerOptions) -> ServeOptions:
    """Return the limits on connections as the server takes them."""
    return ServeOptions(
        host=options.host,
        port=options.port,
        max_body_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
    )


def load_app(source: str, options: TinkerOptions, *, api_key: str | None = None) -> Starlette:
    """Load the model; return the app."""
    refuse_calibration(options.model)
    config = RunConfig(
        model=resolve_device(options.model),
        adapter=AdapterConfig(rank=options.max_rank, alpha=ALPHA),
        sample=SampleConfig(max_tokens=1),
        noise=NoiseConfig(schedule="none"),
    )
    tokenizer, _ = load_tokenizer_and_limit(config)
    with work(Console(stderr=True), config.model.loading, begins=False) as report:
        decoder, engine = load_sampler(config, tokenizer, report, stop_ids=frozenset())
    if not isinstance(decoder, Decoder):
        raise UserError(f"tinker needs a model that qerl's own decoder runs, which {decoder.family} is not")
    limit, notice = min(options.max_context_tokens, engine.max_positions), partial(print, file=sys.stderr)
    config, _ = planned_config(decoder, config, limit - 1, notice=notice, ranks=ALONE)
    slot = AdapterSlot(decoder, engine, options.max_rank, options.shared_adapters)
    names = tuple(dict.fromkeys((options.name or Path(source).name, source)))
    service = Service(slot, engine, Passes(slot, config, max_context_tokens=limit), options, names)
    model = locate(config.model.path)
    tokenizer_id = str(model.path) if model.path.is_dir() else source
    return make_app(
        service, api_key=api_key, stop_ids=stop_token_ids(tokenizer, model), tokenizer_id=tokenizer_id
    )
