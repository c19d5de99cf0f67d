"""JSON schemas as constraints of the sampled tokens, by llguidance (in the extra `serve`).

The tokenizer is read once. A schema is checked when its request is parsed; each sample then has a matcher.
"""

import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.serve.loaded_model import LoadedModel

# Between two tokens of JSON: nothing, a space, or a new line with up to 40 spaces. Without a bound, a small
# model may write blanks for ever.
_WHITESPACE = r"( |\n {0,40})?"
_MAX_SCHEMA_CHARS = 100_000


class JsonConstraint:
    """A TokenConstraint of the engine."""

    def __init__(self, tokenizer: Any, vocab_size: int, grammar: str):
        import llguidance

        self._matcher, self._vocab_size = llguidance.LLMatcher(tokenizer, grammar, log_level=0), vocab_size

    @property
    def is_complete(self) -> bool:
        """True after the last character, or if the matcher reached a limit of its own."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    def allowed_V(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size)
        return torch.from_numpy(allowed).bool()


class Grammars:
    """Makes grammars for one model."""

    def __init__(self, model: LoadedModel):
        self._model = model

    def of(self, schema: dict[str, Any]) -> Callable[[], JsonConstraint]:
        """Return what makes the constraint of a sample; raise UserError for a schema that is wrong or not
        supported."""
        tokenizer = self._tokenizer
        import llguidance

        if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
            raise UserError(f"the JSON schema has more than {_MAX_SCHEMA_CHARS} characters")
        options, grammar = {"whitespace_pattern": _WHITESPACE}, ""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
            message = llguidance.LLMatcher.validate_grammar(grammar, tokenizer)
        except ValueError as error:
            message = str(error)
        if message and not message.startswith("WARNING"):
            raise UserError(f"the JSON schema is not supported: {message}")
        return functools.partial(JsonConstraint, tokenizer, self._model.engine.vocab_size, grammar)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        if importlib.util.find_spec("llguidance") is None:
            raise UserError("structured output needs llguidance on the server: pip install llguidance")
        from llguidance.hf import from_tokenizer

        engine = self._model.engine
        stop_tokens = sorted(engine.stop_token_ids) or None
        return from_tokenizer(engine.tokenizer, n_vocab=engine.vocab_size, eos_token=stop_tokens)  # type: ignore[arg-type]
