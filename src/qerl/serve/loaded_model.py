"""Load a model, or the newest checkpoint of a run, for sampling."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qerl.config import ModelConfig, NoiseConfig, RunConfig
from qerl.engine.sampling_engine import SamplingEngine
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import stop_token_ids
from qerl.models.device import resolve_device
from qerl.training.calibrated import refuse_calibration
from qerl.training.policy import load_tokenizer_and_limit, load_trained_sampler


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    engine: SamplingEngine
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: frozenset[int]
    max_positions: int
    """Longest prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's LM head, of which the tokenizer may know fewer."""
        return self.engine.vocab_size


def load_model(source: str, run: RunConfig | None, model: ModelConfig, *, with_adapter: bool) -> LoadedModel:
    """Load `source`: a model, or the folder of a run, of which `run` is the config."""
    if run is None:
        refuse_calibration(model)
    config = run or RunConfig(noise=NoiseConfig(schedule="none"))
    engine = dataclasses.replace(config.engine, exact=False)  # a LiveBatch has no exact prefill
    config = dataclasses.replace(config, model=resolve_device(model), engine=engine)
    tokenizer, max_prompt_tokens = load_tokenizer_and_limit(config)
    checkpoints = Path(source) / "checkpoints" if run is not None and with_adapter else None
    return LoadedModel(
        engine=load_trained_sampler(config, tokenizer, checkpoints, partial(print, file=sys.stderr)),
        tokenizer=tokenizer,
        stop_tokens=stop_token_ids(tokenizer, locate(config.model.path)),
        max_positions=max_prompt_tokens + config.sample.max_tokens,
    )
