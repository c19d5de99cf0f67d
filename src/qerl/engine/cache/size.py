"""Count the pages and recurrent states' slots that a call of the engine needs, can use and can afford."""

import dataclasses
import math

import torch

from qerl.config import EngineConfig
from qerl.cost.cache import page_bytes
from qerl.engine.schedule.cache_space import Space
from qerl.engine.schedule.live_sample import LiveGroup
from qerl.engine.schedule.page_pool import num_pages, own_pages
from qerl.engine.schedule.window_pages import Window, windowed_layers
from qerl.errors import UserError
from qerl.models.architecture import Architecture


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    config: EngineConfig
    page_bytes: int
    slot_bytes: int
    """Bytes of a sequence's recurrent states; 0 if no layer has any."""
    max_rows: int
    """Maximum number of samples that run at once."""
    window: Window | None = None
    """None unless layers with a window have their own pages; page_bytes then counts the other layers only."""
    window_page_bytes: int = 0

    @classmethod
    def of(cls, a: Architecture, config: EngineConfig, kv_dtype: torch.dtype, **others: int) -> "CacheSize":
        """others: slot_bytes and max_rows. With config.exact all layers use the same pages: a prefill then
        computes decode steps, which read pages only."""
        window = None if config.exact else Window.of(a, config.block_size)
        windowed = page_bytes(a, config.block_size, kv_dtype, () if window is None else windowed_layers(a))
        every = page_bytes(a, config.block_size, kv_dtype)
        return cls(
            config=config, page_bytes=every - windowed, window=window, window_page_bytes=windowed, **others
        )

    def bytes_of(self, space: Space) -> int:
        """Return the bytes of these pages and slots, and of the slot for unused rows."""
        return self.bytes_of_pages(space) + (space.slots + 1) * self.slot_bytes

    def bytes_of_pages(self, space: Space) -> int:
        return space.pages * self.page_bytes + space.windowed * self.window_page_bytes

    def affordable(self, groups: list[LiveGroup], num_bytes: float) -> tuple[int, float]:
        """Return (slots, bytes left for pages): the slots that can be used at once, or those that half of the
        bytes hold, but at least those of one prompt and one sample."""
        num_slots = self._useful_slots(groups)
        if num_slots:
            num_slots = max(min(num_slots, int(num_bytes / 2 / self.slot_bytes) - 1), 2)
        return num_slots, num_bytes - self.bytes_of(Space(slots=num_slots))

    def choose(self, left_bytes: float, required: Space, useful: Space) -> Space:
        """Return the useful pages, or as many as the bytes hold: the same share of both kinds, so that both
        hold as many samples, but at least the required ones."""
        share = left_bytes / max(self.bytes_of_pages(useful), 1)
        if share >= 1:
            return useful
        if self.window is None:
            return Space(int(left_bytes / self.page_bytes))
        windowed = max(required.windowed, int(share * useful.windowed))
        if self.page_bytes == 0:
            return Space(useful.pages, windowed)
        pages = max(required.pages, int((left_bytes - windowed * self.window_page_bytes) / self.page_bytes))
        windowed = min(windowed, int((left_bytes - pages * self.page_bytes) / self.window_page_bytes))
        return Space(min(pages, useful.pages), windowed)

    def _useful_slots(self, groups: list[LiveGroup]) -> int:
        """Return the slots of all prompts and samples that can be live at once."""
        if not self.slot_bytes:
            return 0
        samples = min(self.max_rows, sum(len(group.samples_G) for group in groups))
        return samples + (len(groups) if groups[0].keeps_pages else min(self.max_rows, len(groups)))

    def needed_pages(self, groups: list[LiveGroup], left_bytes: float) -> tuple[Space, Space]:
        """Return (pages without which the largest group cannot run, maximum pages that all use at once)."""
        required, branching = Space(), Space()
        for group in groups:
            needed = self.group_pages(group)
            if group.keeps_pages:
                branching += needed
            required = required.at_least(needed)
            if (num_bytes := self.bytes_of_pages(required)) > left_bytes:
                pages = f"{required.pages}" + (f" and {required.windowed}" if required.windowed else "")
                samples = f"{len(group.samples_G)} samples and a branch" if group.keeps_pages else "a sample"
                raise UserError(
                    f"prompt {group.prompt.index} needs {pages} pages of KV cache ({rounded_up_gb(num_bytes)}"
                    f" GB) for its {group.prompt_tokens} tokens and {samples} of {group.max_tokens};"
                    + self._more_memory_hint(left_bytes, required + Space(slots=self._useful_slots(groups)))
                )
        page_tokens, window = self.config.block_size, self.window
        prompts = [group.prompt_tokens for group in groups]
        longest = max(own_pages(group.prompt_tokens, group.max_tokens, page_tokens) for group in groups)
        pages = self._max_used(groups, [num_pages(P, page_tokens) for P in prompts], longest)
        if window is None:
            return required, branching + Space(pages)
        each = window.running_pages(longest)
        windowed = self._max_used(groups, [window.prompt_pages(P) for P in prompts], each)
        return required, branching + Space(pages, windowed)

    def _max_used(self, groups: list[LiveGroup], prompt_pages: list[int], sample_pages: int) -> int:
        max_running = min(self.max_rows, sum(len(group.samples_G) for group in groups))
        return sum(sorted(prompt_pages, reverse=True)[: self.max_rows]) + max_running * sample_pages

    def group_pages(self, group: LiveGroup) -> Space:
        """Return the pages of a prompt and one of its samples; of all its samples and one branch if the group
        keeps its pages."""
        P, page_tokens, window = group.prompt_tokens, self.config.block_size, self.window
        each = own_pages(P, group.max_tokens, page_tokens)
        num_samples = len(group.samples_G) + 1 if group.keeps_pages else 1
        pages = num_pages(P, page_tokens) + num_samples * each
        if window is None:
            return Space(pages)
        windowed = num_samples * each if group.keeps_pages else window.sample_pages(each)
        return Space(pages, window.prompt_pages(P) + windowed)

    def _more_memory_hint(self, left_bytes: float, needed: Space) -> str:
        config = self.config
        affordable = int(left_bytes / (self.page_bytes + self.window_page_bytes))
        if config.kv_cache_gb is not None:
            gb = rounded_up_gb(self.bytes_of(needed))
            return (
                f" engine.kv_cache_gb = {config.kv_cache_gb} allows {affordable} pages:"
                f" raise it to {gb} or more"
            )
        return (
            f" memory allows {affordable} pages: set engine.kv_cache_dtype to fp8, or lower sample.max_tokens"
        )


def rounded_up_gb(num_bytes: float) -> float:
    return math.ceil(num_bytes / 1e5) / 1e4
