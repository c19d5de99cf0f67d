"""The learner: updates the adapter from samples and their advantages.

    loss = sum_t weight_t * (importance_t * clipped_t + kl_coefficient * k3_t)

over the sampled tokens t of one update. The weights are made for the whole update before it is packed, so
its split into micro-batches, the sharing of prompts and the order of samples leave the gradient as it is
(tests/learn/test_equivalence.py). With one update a step there is one forward and backward, which the entropy
and the mismatch with the sampler are read from too; with more, a pass before the first update fixes the
learner's old logprobs. A group without any advantage has no gradient and gets no backward.
"""

import torch
from torch import Tensor

from qerl.algo.importance import IMPORTANCE
from qerl.algo.kl import k3
from qerl.algo.loss import LOSSES
from qerl.config import RunConfig
from qerl.kernels.attention import packed_attention
from qerl.kernels.logprob import chunked_logprob
from qerl.learner.pack import PackedBatch
from qerl.learner.rate import learning_rate
from qerl.learner.reading import Lesson, Reading, Update, sampling_metrics, update_metrics
from qerl.learner.share import Share, split
from qerl.model.adapter import adapter_off, adapter_tensors, load_adapter, publish
from qerl.model.decoder import Decoder
from qerl.types import Group

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's own names


class Learner:
    """Owns the optimizer; the decoder and its adapter are the engine's too."""

    def __init__(self, decoder: Decoder, config: RunConfig):
        self.config = config
        self.version = 0
        """Updates planned so far, those skipped included: schedules and resumption count by it."""
        self.decoder = decoder
        self._masters = adapter_tensors(decoder)
        assert self._masters, "the decoder has no adapter"
        self._loss = LOSSES[config.algo.loss]
        self._importance = IMPORTANCE[config.algo.importance]
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=config.learn.learning_rate,
            betas=config.learn.betas,
            weight_decay=config.learn.weight_decay,
            fused=True,
        )

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Learns from samples that have a reward; the advantages are set. A step with nothing to learn
        changes no weight, and counts its updates all the same."""
        shares = split(groups, self.config, device=self.decoder.device)
        reads_ahead = len(shares) * self.config.learn.passes_per_step > 1
        silent = [self._read(batch) for share in shares for batch in share.silent]
        before = [[self._read(b) if reads_ahead else None for b in share.teaching] for share in shares]
        updates = [
            self._update(share, old)
            for _ in range(self.config.learn.passes_per_step)
            for share, old in zip(shares, before, strict=True)
        ]
        taught = [lesson.before for update in updates[: len(shares)] for lesson in update.lessons]
        return {
            "trained_samples": sum(share.num_samples for share in shares),
            **sampling_metrics(silent + taught),
            **update_metrics(updates),
        }

    def _update(self, share: Share, before: list[Reading | None]) -> Update:
        rate = learning_rate(self.version, num_updates=self.config.num_updates, learn=self.config.learn)
        self.version += 1
        lessons = [self._learn(batch, old) for batch, old in zip(share.teaching, before, strict=True)]
        grad_norm = self._apply(rate) if lessons else None
        return Update(lessons=lessons, grad_norm=grad_norm, learning_rate=rate)

    def _learn(self, batch: PackedBatch, before: Reading | None) -> Lesson:
        """Adds the batch's gradient to the masters'. Without `before`, this very pass is the first."""
        algo = self.config.algo
        logprob_C, entropy_C = self._forward(batch)
        before = before or self._reading(batch, logprob_C.detach(), entropy_C)
        sampler_C = batch.sampler_logprobs_C
        old_C, importance_C = self._importance(before.logprob_C, sampler_C, algo.importance_cap)
        uncapped_C = self._importance(before.logprob_C, sampler_C, float("inf"))[1]
        clipped_C, was_clipped_C = self._loss.objective(
            logprob_C, old_C, batch.advantages_C, algo.clip_low, algo.clip_high
        )
        loss_C = importance_C * clipped_C
        kl_C = None if before.reference_C is None else k3(logprob_C, before.reference_C)
        if kl_C is not None:
            loss_C = loss_C + algo.kl_coefficient * kl_C
        loss = (batch.weights_C * loss_C).sum()
        loss.backward()
        return Lesson(
            before=before,
            loss=loss.detach(),
            ratio_C=(logprob_C.detach() - old_C).exp(),
            was_clipped_C=was_clipped_C,
            importance_C=importance_C,
            was_capped_C=importance_C < uncapped_C,
            kl_C=None if kl_C is None else kl_C.detach(),
        )

    def _apply(self, rate: float) -> float | None:
        """Clips, updates, publishes; the norm before clipping. None: it was not finite, nothing was done."""
        masters = list(self._masters.values())
        grads = [master.grad for master in masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        is_finite = bool(norm.isfinite())
        if is_finite:
            torch.nn.utils.clip_grads_with_norm_(masters, self.config.learn.max_grad_norm, norm)
            for settings in self._optimizer.param_groups:
                settings["lr"] = rate
            self._optimizer.step()
            publish(self.decoder)
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item() if is_finite else None

    def _forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(logprob_C, entropy_C) of the sampled tokens under the model as it now is."""

        def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            return packed_attention(q_TNH, k_TKH, v_TKH, batch.layout)

        hidden_TD = self.decoder(batch.tokens_T, batch.positions_T, attend)
        # fp32 before the gather: a prompt's last row sums one gradient for each of its samples.
        return chunked_logprob(
            hidden_TD.float()[batch.source_rows_C],
            self.decoder.lm_head.weight,
            batch.targets_C,
            temperature=self.config.sample.temperature,
            chunk_tokens=self.config.learn.logprob_chunk_tokens,
        )

    @torch.no_grad()
    def _read(self, batch: PackedBatch) -> Reading:
        return self._reading(batch, *self._forward(batch))

    @torch.no_grad()
    def _reading(self, batch: PackedBatch, logprob_C: Tensor, entropy_C: Tensor) -> Reading:
        reference_C = None
        if self.config.algo.kl_coefficient > 0:
            with adapter_off(self.decoder):
                reference_C = self._forward(batch)[0]
        return Reading(batch=batch, logprob_C=logprob_C, entropy_C=entropy_C, reference_C=reference_C)

    def adapter_state(self) -> dict[str, Tensor]:
        """The masters themselves, by PEFT's names."""
        return {name: master.detach() for name, master in self._masters.items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments, as `<adapter tensor>.<moment>`; empty before the first update."""
        return {
            f"{name}.{moment}": self._optimizer.state[master][moment]
            for name, master in self._masters.items()
            for moment in _MOMENTS
            if master in self._optimizer.state
        }

    def load(self, adapter: dict[str, Tensor], optimizer: dict[str, Tensor], version: int) -> None:
        """Takes the place of the learner whose states these were, bit for bit."""
        load_adapter(self.decoder, adapter)
        self._optimizer.state.clear()
        for name, master in self._masters.items():
            if f"{name}.step" in optimizer:
                self._optimizer.state[master] = {
                    moment: optimizer[f"{name}.{moment}"].to(master.device, copy=True) for moment in _MOMENTS
                }
        self.version = version
