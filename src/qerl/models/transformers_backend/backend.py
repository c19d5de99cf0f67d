"""Choose whose code runs a model: our decoder, where families/ describes it, or transformers' own.

model.backend qerl          our decoder, or an error
model.backend transformers  transformers' class, whatever it is
model.backend auto          our decoder for a model that families/ describes, else transformers
"""

import importlib.metadata
from typing import Any, Literal

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

from qerl.config import ModelConfig
from qerl.errors import UserError
from qerl.models.checkpoint.source import ModelSource, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.families import obstacle
from qerl.models.families.reader import short_text

_POSITIONS = "max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"
_UNLIMITED = 1 << 20  # of models without positions, such as those with recurrent states only


def backend_of(model: ModelConfig) -> Literal["qerl", "transformers"]:
    """Return whose code runs the model; raise UserError if transformers is asked for and does not have it."""
    source = locate(model.path)
    if model.backend == "qerl" or (model.backend == "auto" and source.is_gguf):
        return "qerl"
    if source.is_gguf:
        raise UserError(
            f"{source.path}: the transformers backend reads folders of safetensors; set model.backend to qerl"
        )
    config = source.open().config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if model.backend == "auto" and (obstacle(config) is None or not _is_known(name)):
        return "qerl"  # which says what it supports if the name is unknown
    if not _is_known(name):
        version = importlib.metadata.version("transformers")
        raise UserError(
            f"{source.path}: transformers {version} has no language model {short_text(str(name), str)}:"
            " pip install -U transformers, or another model"
        )
    return "transformers"


def max_positions_of(model: ModelConfig) -> int:
    """Return the longest sequence of the model, in tokens."""
    source = locate(model.path)
    if backend_of(model) == "qerl":
        return architecture_of(source.open()).max_positions
    return language_limits(transformers_config(source))[0]


def transformers_config(source: ModelSource) -> PreTrainedConfig:
    """Read config.json into transformers' class; no code of the checkpoint is run."""
    try:
        return AutoConfig.from_pretrained(str(source.path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged config raises errors of many types
        reason = first_line(error)
        raise UserError(f"{source.path}: transformers cannot read config.json: {reason}") from error


def language_limits(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return (longest sequence, width, vocabulary) of a config.

    With longrope the original length is the longest: transformers has other frequencies for a whole batch
    once one of its sequences is longer, so a sample would depend on those beside it.
    """
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in _POSITIONS)
    positions = next((n for n in limits if isinstance(n, int) and n > 0), _UNLIMITED)
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") == "longrope":
            positions = min(positions, settings.get("original_max_position_embeddings", positions))
    return positions, text.hidden_size, text.vocab_size


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _is_known(name: Any) -> bool:
    """True if transformers has this class, and it is a language model, perhaps of images too."""
    text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {*text.values(), *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    return isinstance(name, str) and name in known and hasattr(transformers, name)
