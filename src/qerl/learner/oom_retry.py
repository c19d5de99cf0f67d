"""How many packed tokens one forward and backward takes: halved whenever the memory does not suffice.

    out of memory -> what can be spared is given up, if anything was taken of that; else
                     half the rows of the largest batch, never more than half of before -> all over again

What was begun is dropped, so nothing of it may have taken effect; the split does not change what is learned
(tests/learn/test_equivalence.py). The smaller size stays for the steps that follow.
"""

import gc
from collections.abc import Callable
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
        work: Callable[[list[PackedBatch]], R],
        spare: Callable[[list[PackedBatch]], str | None] = lambda batches: None,
    ) -> R:
        """What `work` returns for the portion's batches. spare: gives up something but them that `work` took
        for these batches, and says what; None: it took nothing of the kind."""
        while True:
            batches = portion.batches(self.micro_tokens)
            try:
                return work(batches)
            except torch.OutOfMemoryError:
                pass  # not halved here: what the error refers to is freed first
            self._free()
            spared = spare(batches)
            if spared is None:
                self._halve(batches)
            else:
                self._notice(f"out of memory in learning: {spared}; the update is begun again")

    def _free(self) -> None:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self._device)  # copies may still be writing to what was dropped
            torch.cuda.empty_cache()

    def _halve(self, batches: list[PackedBatch]) -> None:
        largest = max(len(batch.tokens_T) for batch in batches)
        if all(batch.num_samples == 1 for batch in batches):
            raise UserError(
                f"learning from one sample of {largest} tokens takes more memory than there is:"
                " set learn.gradient_checkpointing to layer or offload, or lower sample.max_tokens, adapter.rank or"
                " learn.logprob_chunk_tokens"
            )
        before, self.micro_tokens = self.micro_tokens, max(min(self.micro_tokens, largest) // 2, 1)
        self._notice(
            f"out of memory in learning: learn.max_tokens_per_microbatch is {self.micro_tokens} from here on"
            f" ({before} before); the update is begun again"
        )
