"""Refuse what a model that transformers runs cannot do, one line for each setting that asks for it."""

from qerl.config import RunConfig
from qerl.errors import UserError
from qerl.models.transformers_backend.backend import backend_of


def check_backend(config: RunConfig) -> None:
    """Raise UserError if transformers is to run the model and a setting needs our own decoder."""
    if backend_of(config.model) == "qerl":
        return
    setting = next((name for name, needs in _needs_decoder(config).items() if needs), None)
    if setting is not None:
        raise UserError(
            f"{setting} needs the package's own decoder, but transformers' code runs this model"
            " (model.backend): set it back to its default"
        )


def _needs_decoder(config: RunConfig) -> dict[str, bool]:
    """Return, for each setting, whether it asks for what transformers' code does not do."""
    model, engine, learn = config.model, config.engine, config.learn
    return {
        f"model.calibrate {model.calibrate}": model.calibrate != "none",
        f"model.sampler_format {model.sampler_format}": model.sampler_format is not None,
        f"model.head_format {model.head_format}": model.head_format != "bf16",
        "engine.exact": engine.exact,
        f"engine.kv_cache_dtype {engine.kv_cache_dtype}": engine.kv_cache_dtype != "auto",
        "engine.decode_steps_per_sync": engine.decode_steps_per_sync is not None,
        "rollout.keep_kv_cache": config.rollout.keep_kv_cache,
        f"algo.branching {config.algo.branching}": config.algo.branching != "none",
        f"noise.scope {config.noise.scope}": config.noise.scope != "step",
        f"learn.gradient_checkpointing {learn.gradient_checkpointing}": (
            learn.gradient_checkpointing == "offload"
        ),
        f"learn.backward {learn.backward}": learn.backward != "bf16",
        "adapter.router": config.adapter.router,
        f"adapter.experts {config.adapter.experts}": config.adapter.experts != "none",
        "distil.teacher": config.distil.is_on,
        "ray.address": config.ray.address is not None,
    }
