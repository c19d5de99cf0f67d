"""Pack the samples of many groups into batches without padding; each prompt is computed once for its samples.

A group whose prompt is p0 p1 p2 and whose samples are a0 a1 a2 and b0 becomes one tree of five rows:

    row            0    1    2    3    4          branch_tokens (2, 0): a sample's last token is only
    token          p0   p1   p2   a0   a1         predicted, so it has no row
    position       0    1    2    3    4
    predicts                 a0   a1   a2         source_rows_C = 2 3 4 2
                             b0                   targets_C     = a0 a1 a2 b0

C counts the sampled tokens of a batch; their values lie in [C] tensors, sample after sample. Tokens of an
environment have rows and predict the next token, but are not predicted: they are not among the C. The order
is that of the groups and their samples. A group is split only if it alone exceeds the budget: each part then
recomputes the prompt, and the first part fills the previous batch: 64 samples of 1,024 tokens in groups of
eight make ten batches, not sixteen of which half have a single sample. The batches are of about one size: in
a small one the GPU waits for the host.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from qerl.algo.segment import Segments
from qerl.kernels.attention.tree_attention import TreeLayout
from qerl.kernels.head.token_mask import TokenMask
from qerl.kernels.runtime.gpu_memory import sent
from qerl.types import Group, Prompt, Sample, TeacherLogprobs, Tree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """hidden_TD[source_rows_C] are the rows that predict targets_C."""

    tokens_T: Tensor
    positions_T: Tensor
    trees: list[Tree]
    members: list[tuple[int, list[int]]]
    """By tree: its prompt's index, and its branches' sample_index."""
    layout: TreeLayout
    """The trees in the form that attention takes, the same for every layer and pass."""
    source_rows_C: Tensor
    targets_C: Tensor
    sampler_logprobs_C: Tensor
    advantages_C: Tensor
    weights_C: Tensor
    """Factor of each token's loss in the sum."""
    routes_T: Tensor | None
    """uint8 [T, bytes of a row]: the experts that the sampler's rows went to (Sample.routes); None if some
    sample has none."""
    spans: Segments
    """Which of the C tokens belong to one sample; no sample is in two batches."""
    is_sampled_C: Tensor
    """False for tokens that no policy sampled: their sampler_logprobs_C mean nothing."""
    mask: TokenMask | None = None
    """The tokens that grammars allowed in place of the C tokens; None: every token."""
    teacher: TeacherLogprobs | None = None
    """Logprobs of all C tokens, on the decoder's device; None without a teacher."""

    @property
    def num_samples(self) -> int:
        return sum(len(tree.branch_tokens) for tree in self.trees)


@dataclasses.dataclass(slots=True)
class _Branches:
    """The samples of one prompt in one batch, with the weights of their tokens."""

    prompt: Prompt
    samples: list[tuple[Sample, float]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.tokens_T) + sum(len(sample.tokens_T) - 1 for sample, _ in self.samples)


class PackedBatches(Sequence[PackedBatch]):
    """Batches that are laid out when they are first read: a GPU still computes the ones before."""

    def __init__(self, batches: list[list[_Branches]], device: torch.device):
        self._batches, self._device = batches, device
        self._laid_out: dict[int, PackedBatch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> PackedBatch:  # type: ignore[override]
        place = range(len(self))[index]
        if place not in self._laid_out:
            self._laid_out[place] = _lay_out(self._batches[place], self._device)
        return self._laid_out[place]


def pack(
    weighted_P: list[tuple[Group, list[float]]], *, max_tokens: int, device: torch.device
) -> PackedBatches:
    """Return batches of at most max_tokens rows, unless a single prompt and sample is longer, and of about
    as many rows each: as few batches as filling one after the other takes.

    Each group comes with the weights of its samples' tokens; samples of weight 0 are left out."""
    filled = _Filler(max_tokens, weighted_P)
    evened = _Filler(max_tokens, weighted_P, like=filled)
    batches = filled.batches if len(evened.batches) > len(filled.batches) else evened.batches
    return PackedBatches(batches, device)


class _Filler:
    """Fills one batch after the other: to max_tokens rows, or to what is then left for each of as many
    batches as `like` has."""

    def __init__(
        self, max_tokens: int, weighted_P: list[tuple[Group, list[float]]], like: "_Filler | None" = None
    ):
        self.batches: list[list[_Branches]] = []
        self.num_rows = self.longest = 0
        self._max_tokens, self._like, self._space = max_tokens, like, 0
        for group, weights_G in weighted_P:
            pairs = [pair for pair in zip(group.samples_G, weights_G, strict=True) if pair[1] != 0]
            whole = _Branches(group.prompt, pairs)
            if pairs and whole.num_tokens <= max_tokens:
                self._put(whole)
            else:
                self._split(whole)

    def _split(self, whole: _Branches) -> None:
        """Put the samples in runs that each fit a batch; the first run fills the present one if any sample
        does."""
        run = None
        for sample, weight in whole.samples:
            rows = len(sample.tokens_T) - 1
            if run is None or rows > self._space:
                run = _Branches(whole.prompt, [(sample, weight)])
                self._put(run)
            else:
                run.samples.append((sample, weight))
                self._take(rows)

    def _put(self, branches: _Branches) -> None:
        if branches.num_tokens > self._space:
            self._space = self._limit()
            self.batches.append([])
        self.batches[-1].append(branches)
        self._take(branches.num_tokens)

    def _take(self, rows: int) -> None:
        self._space -= rows
        self.num_rows += rows
        self.longest = max(self.longest, rows)

    def _limit(self) -> int:
        """Return the next batch's limit: the mean of those to come and half of the longest piece."""
        if self._like is None or len(self.batches) >= len(self._like.batches):
            return self._max_tokens
        mean = (self._like.num_rows - self.num_rows) // (len(self._like.batches) - len(self.batches))
        return min(self._max_tokens, mean + self._like.longest // 2)


def _lay_out(batch: list[_Branches], device: torch.device) -> PackedBatch:
    tokens_T = array("q")
    positions: list[Tensor] = []
    trees: list[Tree] = []
    source_rows: list[Tensor] = []
    for branches in batch:
        prompt_T = branches.prompt.tokens_T
        assert prompt_T, "a prompt without tokens has no row to predict from"
        start, prompt_end = len(tokens_T), len(prompt_T)
        tokens_T.extend(prompt_T)
        positions.append(torch.arange(prompt_end))
        for sample, _ in branches.samples:
            first, length = len(tokens_T), len(sample.tokens_T)
            rows_T = torch.arange(first - 1, first - 1 + length)
            rows_T[0] = start + prompt_end - 1
            source_rows.append(rows_T[sample.sampled_indices] if sample.environment_spans else rows_T)
            assert len(source_rows[-1]) == len(sample.logprobs_T) > 0
            positions.append(torch.arange(prompt_end, prompt_end + length - 1))
            tokens_T.extend(sample.tokens_T[:-1])
        lengths = tuple(len(sample.tokens_T) - 1 for sample, _ in branches.samples)
        trees.append(Tree(start=start, prompt_tokens=prompt_end, branch_tokens=lengths))
    samples = [pair for branches in batch for pair in branches.samples]
    lengths_S = [len(sample.logprobs_T) for sample, _ in samples]

    def per_token(values_S: list, dtype: torch.dtype) -> Tensor:
        repeated_C = torch.tensor(values_S, dtype=dtype).repeat_interleave(torch.tensor(lengths_S))
        return sent(repeated_C, device)

    return PackedBatch(
        tokens_T=_tensor(tokens_T, device),
        positions_T=sent(torch.cat(positions), device),
        trees=trees,
        members=[(b.prompt.index, [s.sample_index for s, _ in b.samples]) for b in batch],
        layout=TreeLayout.of(trees, device),
        source_rows_C=sent(torch.cat(source_rows), device),
        targets_C=_tensor(array("q", chain.from_iterable(_sampled_tokens(s) for s, _ in samples)), device),
        sampler_logprobs_C=_tensor(array("f", chain.from_iterable(s.logprobs_T for s, _ in samples)), device),
        advantages_C=per_token([s.advantage for s, _ in samples], torch.float32),
        weights_C=per_token([weight for _, weight in samples], torch.float32),
        routes_T=_routes(batch, device),
        spans=_spans(lengths_S, device),
        is_sampled_C=per_token([not s.is_demonstration for s, _ in samples], torch.bool),
        mask=TokenMask.joined([s.allowed for s, _ in samples], lengths_S, device),
        teacher=_joined([sample.teacher for sample, _ in samples], device),
    )


def _spans(lengths: list[int], device: torch.device) -> Segments:
    spans = Segments.of(lengths)
    lengths_S, places_T = sent(spans.lengths_S, device), sent(spans.places_T, device)
    return Segments(lengths_S=lengths_S, longest=spans.longest, places_T=places_T)


def _joined(parts: list[TeacherLogprobs | None], device: torch.device) -> TeacherLogprobs | None:
    """Return the samples' teacher logprobs as one; None if a sample has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    ids = [part.ids_CK for part in known if part.ids_CK is not None]
    outcomes = [part.outcomes_CX for part in known if part.outcomes_CX is not None]
    return TeacherLogprobs(
        sent(torch.cat([part.logprob_C for part in known]), device),
        sent(torch.cat(ids), device) if ids else None,
        sent(torch.cat(outcomes), device) if outcomes else None,
    )


def _routes(batch: list[_Branches], device: torch.device) -> Tensor | None:
    """Return the rows of the prompts, as their first samples have them, and of the samples."""
    rows: list[bytes] = []
    for branches in batch:
        num_prompt = len(branches.prompt.tokens_T)
        for index, (sample, _) in enumerate(branches.samples):
            if sample.routes is None:
                return None
            row_bytes, rest = divmod(len(sample.routes), num_prompt + len(sample.tokens_T) - 1)
            assert rest == 0, "routes of another number of rows"
            rows.append(sample.routes[0 if index == 0 else num_prompt * row_bytes :])
    whole = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    num_rows = sum(branches.num_tokens for branches in batch)
    return sent(whole.view(num_rows, -1), device)


def _sampled_tokens(sample: Sample) -> list[int]:
    if not sample.environment_spans:
        return sample.tokens_T
    return [sample.tokens_T[index] for index in sample.sampled_indices]


def _tensor(values: array, device: torch.device) -> Tensor:
    """torch.tensor takes four times as long for a list, and waits for the copy."""
    dtype = {"q": torch.int64, "f": torch.float32}[values.typecode]
    return sent(torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype), device)
