"""Retry after running out of memory: halve the micro-batch until an update fits.

    out of memory -> release optional memory if any is in use, else halve the rows of the largest batch
                  -> retry the whole update

The failed attempt must not have had any effect; the split does not change the result
(tests/learn/test_equivalence.py). Later steps keep the smaller size.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from qerl.errors import UserError
from qerl.learner.minibatch import MinibatchPart
from qerl.learner.packing import PackedBatch

R = TypeVar("R")


class OomRetry:
    def __init__(self, micro_tokens: int, device: torch.device, notice: Callable[[str], None]):
        self.micro_tokens = micro_tokens
        self._device, self._notice = device, notice

    def run(
        self,
        portion: MinibatchPart,
        work: Callable[[Sequence[PackedBatch]], R],
        spare: Callable[[Sequence[PackedBatch]], str | None] = lambda batches: None,
    ) -> R:
        """Return work(batches of the part). spare: release optional memory and say what, or return None."""
        while True:
            batches = portion.batches(self.micro_tokens)
            try:
                return work(batches)
            except torch.OutOfMemoryError:
                pass  # halve outside of the handler: the error keeps references to tensors
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.synchronize(self._device)  # copies may still write to released memory
                torch.cuda.empty_cache()
            spared = spare(batches)
            if spared is None:
                self._halve(batches)
            else:
                self._notice(f"out of memory in learning: {spared}; retrying the update")

    def _halve(self, batches: Sequence[PackedBatch]) -> None:
        largest = max(len(batch.tokens_T) for batch in batches)
        if all(batch.num_samples == 1 for batch in batches):
            raise UserError(
                f"not enough memory to learn from one sample of {largest} tokens:"
                " set learn.gradient_checkpointing to layer or offload, or lower sample.max_tokens,"
                " adapter.rank or learn.logprob_chunk_tokens"
            )
        before, self.micro_tokens = self.micro_tokens, max(min(self.micro_tokens, largest) // 2, 1)
        self._notice(
            f"out of memory in learning: learn.max_tokens_per_microbatch is now {self.micro_tokens}"
            f" (was {before}); retrying the update"
        )
