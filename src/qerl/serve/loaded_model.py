"""Load a model, or the newest checkpoint of a run, for sampling."""

import dataclasses
import functools
from functools import partial
from pathlib import Path

from rich.console import Console

from qerl.config import ModelConfig, NoiseConfig, RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.models.device import resolve_device
from qerl.serve.token_text import TokenBytes
from qerl.tracking.progress import print_line, work
from qerl.training.calibrated import refuse_calibration
from qerl.training.policy import load_tokenizer_and_limit, load_trained_sampler


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    engine: LocalEngine
    max_positions: int
    """Longest prompt and answer together, in tokens."""

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.engine.tokenizer)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.engine.tokenizer.get_vocab()))


def load_model(source: str, run: RunConfig | None, model: ModelConfig, *, with_adapter: bool) -> LoadedModel:
    """Load `source`: a model, or the folder of a run, of which `run` is the config. A bar on a terminal, or a
    line every ten seconds, shows how far it is."""
    if run is None:
        refuse_calibration(model)
    config = run or RunConfig(noise=NoiseConfig(schedule="none"))
    engine = dataclasses.replace(config.engine, exact=False)  # a LiveBatch has no exact prefill
    config = dataclasses.replace(config, model=resolve_device(model), engine=engine)
    tokenizer, _ = load_tokenizer_and_limit(config)
    checkpoints = Path(source) / "checkpoints" if run is not None and with_adapter else None
    console = Console(stderr=True)
    with work(console, config.model.loading, begins=False) as report:
        engine = load_trained_sampler(config, tokenizer, checkpoints, partial(print_line, console), report)
    return LoadedModel(engine, engine.max_positions)
