"""Counts and times of a call of an engine."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Stats:
    """Counts and times of one call of generate."""

    num_tokens: int = 0
    """Sampled tokens."""
    unfused_tokens: int = 0
    """Those drawn from logits in memory where kernels of the head draw others (sampling/row_sampler.py)."""
    prefill_tokens: int = 0
    """Rows of all prefills: prompts, once each, environment tokens, and recomputed tokens."""
    decode_forwards: int = 0
    prefill_forwards: int = 0
    num_preemptions: int = 0
    peak_pages: int = 0
    """Most KV pages in use at once."""
    peak_window_pages: int = 0
    """Likewise, of layers with a window that have pages of their own."""
    reused_tokens: int = 0
    """Positions that were not computed again: those before pivots, once per pivot, of kept prompts, and
    what was carried from an earlier call."""
    generate_s: float = 0.0
    prefill_s: float = 0.0
    """Part of generate_s: scheduling, prefills and first tokens."""
    open_s: float = 0.0
    """Part of generate_s before the first prefill: the KV cache, and compile_s."""
    compile_s: float = 0.0
    """Compiling, in parallel, the first batch's decode kernels that the disk cache does not have."""
    record_s: float = 0.0
    """Part of generate_s: the first step of each number of rows, and the recording of its CUDA graph."""
    finish_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds from the start of decoding at which the host read the last token of each sample, ascending."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s if self.generate_s else 0.0

    def __add__(self, other: "Stats") -> "Stats":
        """Return the stats of both calls, made one after the other."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        peaks = ("peak_pages", "peak_window_pages")
        return Stats(**both | {name: max(getattr(self, name), getattr(other, name)) for name in peaks})
