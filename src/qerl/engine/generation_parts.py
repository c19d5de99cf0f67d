"""Interfaces of the caches, the prefill and the runner that a Generation uses: the paged ones of our decoder
(kv_cache.py, prefill.py, decode_runner.py), or those of transformers' model (transformers_engine.py)."""

from typing import Protocol

from torch import Tensor

from qerl.engine.cache.state_cache import StateCache
from qerl.engine.decode.runner import Burst
from qerl.engine.prefill.prefill import PrefillChunk
from qerl.engine.sampling.sampler import Sampler
from qerl.engine.schedule.carried_cache import CachedSpan, CarriedCache
from qerl.engine.schedule.live_sample import LiveSample


class SampleCaches(Protocol):
    @property
    def states(self) -> StateCache | None:
        """Recurrent states in slots that the scheduler gives; None if there are none."""
        ...

    def copy_partial_pages(self, copies: list[tuple[int, list[int], list[int]]]) -> None:
        """For each (num_positions, source pages, target pages), copy the page that is filled partly."""
        ...

    def copy_partial_window(self, copies: list[tuple[int, dict[int, int], dict[int, int]]]) -> None:
        """Likewise, of the pages of layers with a window, where they have pages of their own."""
        ...

    def read_routes(self, pages: list[int], num_positions: int) -> bytes | None:
        """Return the experts of the first positions in these pages, as in Sample; None: not recorded."""
        ...

    def carry(self, spans: list[CachedSpan]) -> list[CarriedCache | None]:
        """Return copies of what these spans hold in host memory; None: they are computed again."""
        ...

    def restore(self, carried: CarriedCache, span: CachedSpan) -> None:
        """Write what a span of the same positions held."""
        ...


class PromptForward(Protocol):
    num_tokens: int
    """Rows of all forwards."""
    num_forwards: int

    def __call__(self, chunks: list[PrefillChunk]) -> Tensor:
        """Compute the chunks; return what the sampler takes, of their last rows."""
        ...


class StepRunner(Protocol):
    """See decode_runner.py."""

    num_steps: int
    record_s: float
    sampler: Sampler

    @property
    def max_rows(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def max_unread_bursts(self) -> int: ...
    @property
    def num_unread_steps(self) -> int: ...
    @property
    def num_unread_bursts(self) -> int: ...
    def would_shrink(self, num_samples: int) -> bool: ...
    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]: ...
    def set_batch(self, samples_B: list[LiveSample], keys_B: list[int]) -> None: ...
    def update_pages(self, samples: list[LiveSample]) -> None: ...
    def launch(self, num_steps: int) -> None: ...
    def read(self) -> Burst: ...
