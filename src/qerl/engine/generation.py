"""One call's samples, drawn to their ends.

    rearrange  pauses, enters and admits samples, and computes what they need (prefill.py)
    converse   asks how the samples go on whose turns have ended, once nobody else can run
    advance    a burst of decode steps for the running samples (runner.py), and the tokens of the one before

A token's randomness is a function of (seed, step, prompt.index, sample_index, its number in the sample); in a
branch, of (seed, step, prompt.index, the sample's index, branch index, its number in the branch). What it
becomes does not depend on the batch, the pages, the bursts or the pauses (tests/engine/test_engine.py,
test_branch.py).
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from qerl.engine.decode_runner import Burst, DecodeRunner
from qerl.engine.detokenizer import Detokenizer
from qerl.engine.kv_cache import KVCache
from qerl.engine.prefill import Prefill, PrefillRun
from qerl.engine.scheduler import LiveGroup, LiveSample, Scheduler
from qerl.engine.teacher_forcing import TeacherForcing
from qerl.errors import UserError
from qerl.types import Conversation, Prompt, Turn

# Rows of one first draw: logits of 64 tokens at V 152,064 take 39 MB in fp32.
_FIRST_DRAWS = 64


@dataclasses.dataclass(slots=True)
class Stats:
    """What one call of generate did."""

    num_tokens: int = 0
    """Sampled."""
    prefill_tokens: int = 0
    """Rows of all prefills: each prompt once, as many as an environment said, and what paused samples had to
    compute again."""
    decode_forwards: int = 0
    prefill_forwards: int = 0
    pauses: int = 0
    peak_pages: int = 0
    """Most KV pages in use at once."""
    reused_tokens: int = 0
    """Positions of prompts and samples that branches began on: once for each pivot, none of them computed."""
    generate_s: float = 0.0
    prefill_s: float = 0.0
    """Of them: reading and rearranging, prefills and first draws."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s if self.generate_s else 0.0

    def __add__(self, other: "Stats") -> "Stats":
        """Of one and then the other."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        return Stats(**both | {"peak_pages": max(self.peak_pages, other.peak_pages)})


class Generation:
    def __init__(
        self,
        cache: KVCache,
        scheduler: Scheduler,
        prefill: Prefill | TeacherForcing,
        runner: DecodeRunner,
        prompts_P: list[Prompt],
        text: Detokenizer,
        *,
        stop_token_ids: frozenset[int],
        num_ahead: int,
        seed: int,
        step: int,
        watch: Callable[[LiveSample], bool] | None,
        conversation: Conversation | None,
    ):
        self.stats = Stats()
        self._cache, self._scheduler, self._prefill, self._runner = cache, scheduler, prefill, runner
        self._prompts_P, self._text, self._stop_token_ids = prompts_P, text, stop_token_ids
        self._num_ahead = num_ahead  # bursts that may run before the one ahead of them is read
        self._seed, self._step, self._watch = seed, step, watch
        self._conversation = conversation
        self._needs_rearranging = True

    def branch(self, groups: list[LiveGroup]) -> None:
        """What the next run draws: branches of samples that the one before has drawn."""
        self._scheduler.branch(groups)
        self.stats.reused_tokens += sum(group.prompt_tokens for group in groups)

    def run(self) -> None:
        start_s, scheduler, runner = time.perf_counter(), self._scheduler, self._runner
        runner.num_steps = 0
        while not scheduler.is_done:
            num_steps = 0
            if not self._needs_rearranging:
                num_steps = scheduler.room(self._steps_left(), runner.num_ahead)
            if num_steps > 0:
                self._advance(num_steps)
            elif runner.num_unread:
                self._read()
            else:
                self._rearrange()
        self.stats.pauses = scheduler.num_pauses
        self.stats.decode_forwards += runner.num_steps
        self.stats.prefill_tokens = self._prefill.num_tokens
        self.stats.prefill_forwards = self._prefill.num_forwards
        self.stats.generate_s += time.perf_counter() - start_s

    def _steps_left(self) -> int:
        """How far the next burst may go: until all running samples are sure to have ended, at most."""
        left = [s.max_tokens - len(s.tokens_T) for s in self._scheduler.running]
        return min(max(left, default=0) - self._runner.num_ahead, self._runner.max_steps)

    def _advance(self, num_steps: int) -> None:
        runner, scheduler = self._runner, self._scheduler
        runner.allocate(scheduler.allocate(runner.num_ahead + num_steps))
        self._note_pages()
        runner.launch(num_steps)
        while runner.num_unread > self._num_ahead:
            self._read()

    def _rearrange(self) -> None:
        """All tokens are known here."""
        start_s, scheduler = time.perf_counter(), self._scheduler
        scheduler.allocate()
        self._schedule(scheduler.schedule())
        admitted = scheduler.admit()
        if admitted:
            self._start(admitted)
            self._schedule(scheduler.schedule())
        assert scheduler.running or admitted or scheduler.resting, "no sample can go on"
        self._note_pages()
        running = scheduler.running
        self._runner.arrange(running, [self._key(s) for s in running])
        self._needs_rearranging = not running
        self.stats.prefill_s += time.perf_counter() - start_s
        if not (running or admitted):
            self._converse(list(scheduler.resting))

    def _converse(self, samples: list[LiveSample]) -> None:
        """Gives them the tokens that they go on with; the others end."""
        assert self._conversation is not None
        answers = self._conversation.answer([self._turn(s) for s in samples])
        over, going_on = [], []
        for s, given_T in zip(samples, answers, strict=True):
            if given_T is None:
                over.append(s)
                continue
            start = len(s.tokens_T)
            assert 0 < len(given_T) < s.group.max_tokens - start
            s.environment_spans.append(range(start, start + len(given_T)))
            s.tokens_T += given_T
            s.finish, s.max_tokens = None, s.group.max_tokens
            self._limit_turn(s)
            going_on.append(s)
        self._scheduler.finish(over)
        self._scheduler.resume(going_on)

    def _turn(self, s: LiveSample) -> Turn:
        assert s.finish is not None
        tokens_T = list(s.turn_T)
        return Turn(
            index=s.group.index,
            sample_index=s.sample_index,
            tokens_T=tokens_T,
            text=self._text.of(tokens_T[:-1] if tokens_T[-1] in self._stop_token_ids else tokens_T),
            finish=s.finish,
            num_left=s.group.max_tokens - len(s.tokens_T),
        )

    def _limit_turn(self, s: LiveSample) -> None:
        """From here on."""
        most = None if self._conversation is None else self._conversation.turn_tokens
        if most is not None:
            s.max_tokens = min(len(s.tokens_T) + most, s.group.max_tokens)

    def _end(self, samples: list[LiveSample]) -> None:
        """Their turns are over, and without a conversation so are they."""
        (self._scheduler.finish if self._conversation is None else self._scheduler.park)(samples)

    def _start(self, groups: list[LiveGroup]) -> None:
        """Computes the prompts, and draws the first token of all their samples."""
        hidden_PD = self._prefill(
            [PrefillRun(self._prompts_P[g.index].tokens_T, 0, g.pages, g.noise_row) for g in groups]
        )
        pairs = [(row, s) for row, group in enumerate(groups) for s in group.samples_G]
        for _, s in pairs:
            self._limit_turn(s)
        size = min(_FIRST_DRAWS, self._runner.max_rows)
        for first in range(0, len(pairs), size):
            rows, samples = zip(*pairs[first : first + size], strict=True)
            self._draw(hidden_PD[torch.tensor(rows, device=hidden_PD.device)], list(samples))

    def _draw(self, hidden_MD: Tensor, samples: list[LiveSample]) -> None:
        """The first token of each."""
        device = hidden_MD.device
        keys_M = torch.tensor([self._key(s) for s in samples], device=device)
        positions = [s.group.prompt_tokens - 1 for s in samples]
        positions_M = torch.tensor(positions, dtype=torch.int32, device=device)
        drawn = self._runner.first(hidden_MD, keys_M, positions_M)
        for s, token, logprob in zip(samples, *(values.tolist() for values in drawn), strict=True):
            self._append(s, token, logprob)
        self._end([s for s in samples if s.finish is not None])

    def _schedule(self, scheduled: list[LiveSample]) -> None:
        """Copies the prompt's partial page for each; computes again what a resumed one had cached."""
        page_tokens = self._cache.page_tokens
        partial = [s for s in scheduled if s.group.prompt_tokens % page_tokens and not s.num_cached]
        if partial:
            places = [s.group.prompt_tokens // page_tokens for s in partial]
            targets = [s.pages[place] for s, place in zip(partial, places, strict=True)]
            self._cache.copy_pages([s.group.pages[-1] for s in partial], targets)
        resumed = [s for s in scheduled if len(s.tokens_T) > 1]
        if resumed:
            self._prefill([self._uncached(s) for s in resumed])

    @staticmethod
    def _uncached(s: LiveSample) -> PrefillRun:
        """All but its newest token, from where its pages end."""
        first = s.num_cached or s.group.prompt_tokens
        return PrefillRun(s.tokens_T[first - s.group.prompt_tokens : -1], first, s.pages, s.noise_row)

    def _read(self) -> None:
        """Takes over the oldest unread burst, and lets those go that it finished."""
        ended, cut = self._taken(self._runner.read())
        if cut:  # the device does not know: it goes on writing to their pages until the next arrangement
            self._needs_rearranging = True
            while self._runner.num_unread:
                ended += self._taken(self._runner.read())[0]
        self._end(ended)
        if ended:
            num_left = len(self._scheduler.running)
            is_better = self._scheduler.has_others or self._runner.would_shrink(num_left)
            self._needs_rearranging = self._needs_rearranging or not num_left or is_better

    def _taken(self, burst: Burst) -> tuple[list[LiveSample], bool]:
        """(who ended in this burst, whether one of them ended where the device did not see it)."""
        ended, is_cut = [], False
        columns = zip(burst.samples_B, burst.tokens_WB.T.tolist(), burst.logprobs_WB.T.tolist(), strict=True)
        for s, tokens_W, logprobs_W in columns:
            if s.finish is not None:
                continue
            for token, logprob in zip(tokens_W, logprobs_W, strict=True):
                self._append(s, token, logprob)
                if s.finish is not None:
                    ended.append(s)
                    is_cut |= s.finish == "stop" and token not in self._stop_token_ids
                    break
        return ended, is_cut

    def _append(self, s: LiveSample, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            index = self._prompts_P[s.group.index].index
            raise UserError(
                f"prompt {index}: the model's logits after {s.num_positions} tokens are not finite"
            )
        s.tokens_T.append(token)
        s.logprobs_T.append(logprob)
        s.finish = self._finish(s)
        if self._watch is not None and self._watch(s) and s.finish is None:
            s.finish = "stop"
        self.stats.num_tokens += 1

    def _finish(self, s: LiveSample) -> Literal["stop", "length"] | None:
        if s.tokens_T[-1] in self._stop_token_ids or self._text.has_stop(s.turn_T):
            return "stop"
        return "length" if len(s.tokens_T) == s.max_tokens else None

    def _key(self, s: LiveSample) -> int:
        prompt_index = self._prompts_P[s.group.index].index
        coordinates = (self._seed, self._step, prompt_index, *s.group.path, s.sample_index)
        return self._runner.draw.key(coordinates, s.group.prompt_tokens)

    def _note_pages(self) -> None:
        self.stats.peak_pages = max(self.stats.peak_pages, self._scheduler.pages.num_used)
