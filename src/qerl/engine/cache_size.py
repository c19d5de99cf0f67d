"""How many pages, and slots for recurrent states, a call of the engine needs, can use and can afford."""

import dataclasses
import math

from qerl.config import EngineConfig
from qerl.engine.live_sample import LiveGroup
from qerl.engine.scheduler import branching_pages, min_group_pages, num_pages, own_pages
from qerl.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    config: EngineConfig
    page_bytes: int
    slot_bytes: int
    """Bytes of a sequence's recurrent states; 0 if no layer has any."""
    max_rows: int
    """Most samples that run at once."""

    def bytes_of(self, num_pages: int, num_slots: int) -> int:
        """Return the bytes of so many pages and slots, and of the slot for unused rows."""
        return num_pages * self.page_bytes + (num_slots + 1) * self.slot_bytes

    def affordable(self, groups: list[LiveGroup], num_bytes: float) -> tuple[int, int]:
        """Return (slots, pages) for these bytes: the slots that can be used at once or as many as half of the
        bytes hold, but at least those of one prompt and one sample; pages for the rest."""
        num_slots = self._useful_slots(groups)
        if num_slots:
            num_slots = max(min(num_slots, int(num_bytes / 2 / self.slot_bytes) - 1), 2)
        return num_slots, int((num_bytes - self.bytes_of(0, num_slots)) / self.page_bytes)

    def _useful_slots(self, groups: list[LiveGroup]) -> int:
        """Return the slots of all prompts and samples that can be live at once."""
        if not self.slot_bytes:
            return 0
        samples = min(self.max_rows, sum(len(group.samples_G) for group in groups))
        return samples + (len(groups) if groups[0].keeps_pages else min(self.max_rows, len(groups)))

    def needed_pages(
        self, groups: list[LiveGroup], prompt_indices: list[int], affordable: int
    ) -> tuple[int, int]:
        """Return (pages that the largest group needs to run at all, most pages that all can use at once)."""
        page_tokens = self.config.block_size
        least = branching = 0
        for group, prompt_index in zip(groups, prompt_indices, strict=True):
            needed = min_group_pages(group.prompt_tokens, group.max_tokens, page_tokens)
            if group.keeps_pages:
                needed = branching_pages(group, page_tokens)
                branching += needed
            if needed > affordable:
                samples = f"{len(group.samples_G)} samples and a branch" if group.keeps_pages else "a sample"
                raise UserError(
                    f"prompt {prompt_index} needs {needed} pages of KV cache"
                    f" ({rounded_up_gb(needed * self.page_bytes)} GB)"
                    f" for its {group.prompt_tokens} tokens and {samples} of {group.max_tokens};"
                    + self._more_memory_hint(affordable, self.bytes_of(needed, self._useful_slots(groups)))
                )
            least = max(least, needed)
        prompts = sorted((num_pages(group.prompt_tokens, page_tokens) for group in groups), reverse=True)
        most_running = min(self.max_rows, sum(len(group.samples_G) for group in groups))
        largest = max(own_pages(group.prompt_tokens, group.max_tokens, page_tokens) for group in groups)
        return least, branching + sum(prompts[: self.max_rows]) + most_running * largest

    def _more_memory_hint(self, affordable: int, needed_bytes: float) -> str:
        config = self.config
        if config.kv_cache_gb is not None:
            gb = rounded_up_gb(needed_bytes)
            return (
                f" engine.kv_cache_gb = {config.kv_cache_gb} allows {affordable} pages:"
                f" raise it to {gb} or more"
            )
        return (
            f" memory allows {affordable} pages: set engine.kv_cache_dtype to fp8, or lower sample.max_tokens"
        )


def rounded_up_gb(num_bytes: float) -> float:
    return math.ceil(num_bytes / 1e5) / 1e4
