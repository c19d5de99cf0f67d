"""Samples that grow together in one of transformers' caches: same length, one token each at a time.

A row needs no padding and no mask, so that every kind of layer computes it as it does a lone sequence. Rows
of other lengths are in another Lockstep, with a forward pass of its own. A model that returns no cache, or
one of a class of its own (MiniMax's does not reorder its states), computes all tokens again at every step.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qerl.models.transformers_backend.transformers_model import TransformersModel


class Lockstep:
    """A cache of rows, and the tokens that are in it: rows [B, T]."""

    def __init__(self, model: TransformersModel, tokens_BT: Tensor, cache: Any):
        """cache: after tokens_BT; None if the model has none."""
        self.tokens_BT, self._model, self._cache = tokens_BT, model, cache

    @property
    def length(self) -> int:
        return self.tokens_BT.shape[1]

    def copy_of(self, rows: Sequence[int]) -> "Lockstep":
        """Return these rows in this order, some perhaps several times, with a cache of their own."""
        rows_B = torch.tensor(rows, device=self.tokens_BT.device)
        cache = copy.deepcopy(self._cache)
        if cache is not None:
            cache.reorder_cache(rows_B)
        return Lockstep(self._model, self.tokens_BT[rows_B], cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        if len(rows) < len(self.tokens_BT):
            rows_B = torch.tensor(rows, device=self.tokens_BT.device)
            self.tokens_BT = self.tokens_BT[rows_B]
            if self._cache is not None:
                self._cache.reorder_cache(rows_B)

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens to each row; return the logits after the last one, fp32 [B, V]."""
        given = tokens_BT if self._cache is not None else torch.cat((self.tokens_BT, tokens_BT), 1)
        logits_BTV, cache = forward(self._model, given, self._cache, num_logits=1)
        self.tokens_BT, self._cache = torch.cat((self.tokens_BT, tokens_BT), 1), cache
        return logits_BTV[:, -1].float()


def begin(model: TransformersModel, tokens_BT: Tensor, *, num_logits: int) -> tuple[Lockstep, Tensor]:
    """Compute prompts of one length; return them and the logits of their last num_logits positions."""
    logits_BTV, cache = forward(model, tokens_BT, None, num_logits=num_logits)
    return Lockstep(model, tokens_BT, cache), logits_BTV[:, -num_logits:].float()


def forward(
    model: TransformersModel, tokens_BT: Tensor, cache: Any, *, num_logits: int
) -> tuple[Tensor, Any]:
    """Return (logits of at least the last num_logits positions, the cache after the tokens)."""
    taken = inspect.signature(model.model.forward).parameters
    kept = {"logits_to_keep": num_logits} if "logits_to_keep" in taken else {}
    name = "cache" if "cache" in taken else "past_key_values"  # its name before transformers 5.24
    found = model.model(tokens_BT, **{name: cache}, use_cache=True, **kept)
    after = getattr(found, name, None)
    is_known = type(after).__module__ == "transformers.cache_utils" and hasattr(after, "reorder_cache")
    return found.logits, after if is_known else None
