"""The learner: update the adapter from samples and their advantages.

    loss = sum_t weight_t * (importance_t * policy_t + beta * k3_t)

over the sampled tokens t of one update. Weights are computed for the whole update before packing, so the
gradient does not depend on the split into micro-batches, on shared prompts or on the samples' order
(tests/learn/test_equivalence.py). With one update per step a single forward and backward pass also gives the
entropy and the mismatch with the sampler; with several updates, a pass before the first one computes the
learner's old logprobs. A group without any advantage has no gradient and no backward pass.

If memory allows, the base model's operands are unpacked once per update instead of twice per micro-batch:
bitwise equal (tests/learner/test_held.py), and freed before the engine samples.

In distillation the teacher's logprob less the learner's before the update is each token's advantage, or the
loss is a divergence from the teacher's outcomes (algo/distillation.py), token by token, instead of policy_t.

In exact mode the values of the logprobs come from the sampler's forward pass, `score`, before every update;
their gradient, the entropy and the KL to the reference come from the learner's own kernels.

With several ranks each learns from its part of the groups. Gradients are summed before clipping, so that
every rank makes the same update to its copy of the masters (tests/training/test_distributed.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qerl.algo.distillation import MIN_LOGPROB, divergence_of
from qerl.algo.importance import correct
from qerl.algo.kl import KL_RATIOS, k3
from qerl.algo.loss import LOSSES
from qerl.config import AlgoConfig, RunConfig
from qerl.errors import RunError, require
from qerl.kernels.head.divergence import chunked_divergence
from qerl.learner.distributed import ALONE, Ranks
from qerl.learner.forward import DecoderForward, forward_of
from qerl.learner.lr_schedule import learning_rate
from qerl.learner.metrics import (
    BatchMetrics,
    MinibatchMetrics,
    Update,
    added,
    divided,
    read_step,
    regrouped,
    sampling_metrics,
    update_metrics,
)
from qerl.learner.minibatch import Minibatch, MinibatchPart, split
from qerl.learner.oom_retry import OomRetry
from qerl.learner.optimizer import load_state, new_optimizer, state_of, step_if
from qerl.learner.packing import PackedBatch
from qerl.models.device import best_kernels
from qerl.models.linear_pass import LinearPass
from qerl.models.peft.adapter import adapter_off, adapter_tensors, dropout_of, load_adapter, publish
from qerl.models.policy_model import PolicyModel
from qerl.models.trained_weight import weight_shifts
from qerl.types import Group

_UNCORRECTED = AlgoConfig(importance="none")
_DROPOUT = 4  # keeps these seeds apart from those of other draws


class Learner:
    """Owns the optimizer; shares the decoder and its adapter with the engine."""

    def __init__(
        self,
        decoder: PolicyModel,
        config: RunConfig,
        *,
        notice: Callable[[str], None] = lambda line: None,
        score: Callable[[list[Group]], Tensor] | None = None,
        ranks: Ranks = ALONE,
        holds_operands: bool = False,
    ):
        """notice: receives a line about what was done when memory ran out. holds_operands: True if memory
        suffices for the unpacked operands of all layers. score: returns fp32 logprobs of the groups' sampled
        tokens, computed by the sampler's forward pass; only in exact mode."""
        self.config = config
        self.version = 0
        """Number of planned updates so far, skipped ones included: schedules and resumption use it."""
        self.num_applied = 0
        """Number of times that the adapter has changed."""
        self.decoder = decoder
        self._num_nonfinite = 0
        self._score, self._ranks = score, ranks
        self.holds_operands = holds_operands
        """False once memory has not sufficed."""
        self._masters = adapter_tensors(decoder)
        assert self._masters, "the decoder has no adapter"
        if config.learn.backward == "int8":
            is_hopper = best_kernels(decoder.device) == "hopper"
            require(is_hopper, "learn.backward int8 needs a Hopper GPU (H100, H200): set it to bf16")
            is_bf16 = decoder.compute == torch.bfloat16
            require(is_bf16, "learn.backward int8 needs model.dtype bf16: set one or the other")
        self._linear_pass = LinearPass(backward=config.learn.backward)
        self._loss = LOSSES[config.algo.loss_type]
        self._optimizer = new_optimizer(self._masters, config.learn)
        self._forward = forward_of(decoder, config)
        self._oom_retry = OomRetry(config.learn.microbatch_tokens, decoder.device, notice)

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Learn from the samples that have a reward, with their advantages. A step with nothing to learn
        changes no weight but counts its updates. Every rank receives all groups."""
        shares = split(groups, self.config, device=self.decoder.device, ranks=self._ranks)
        reads_ahead = len(shares) * self.config.learn.num_iterations > 1
        others = [
            dataclasses.replace(reading, weight=share.read_weight)
            for share in shares
            for reading in self._read(share.without_gradient)
        ]
        before = [self._read(share.with_gradient) if reads_ahead else None for share in shares]
        updates = [
            self._update(share, old)
            for _ in range(self.config.learn.num_iterations)
            for share, old in zip(shares, before, strict=True)
        ]
        learned = [result.before for update in updates[: len(shares)] for result in update.results]
        tallies, updates = read_step(others + learned, updates)
        self._count(updates)
        tallies = added(self._ranks.gather(tallies))
        if self._ranks.count > 1:
            norm = torch.nn.utils.get_total_norm([master.detach() for master in self._masters.values()])
            self._ranks.check_same("the adapter's norm", norm.item())
        return {
            "trained_samples": sum(share.num_samples for share in shares),
            "micro_tokens": self.micro_tokens,
            "lora_dropout": self.config.adapter.dropout,
            **{name: shift.item() for name, shift in weight_shifts(self.decoder).items()},
            **sampling_metrics(tallies),
            **update_metrics(updates, tallies),
        }

    def read(self, groups: list[Group]) -> list[BatchMetrics]:
        """Return the learner's values for the tokens of this rank's share of groups. Nothing is updated."""
        (share,) = split(groups, self.config, device=self.decoder.device, ranks=self._ranks)
        return self._read(share.with_gradient)

    @property
    def micro_tokens(self) -> int:
        """config.learn.microbatch_tokens, that of a run that is resumed, or a smaller size that fitted."""
        return self._oom_retry.micro_tokens

    def _update(self, share: Minibatch, before: list[BatchMetrics] | None) -> Update:
        rate = learning_rate(self.version, num_updates=self.config.num_updates, learn=self.config.learn)
        self.version += 1
        exact_C = self._exact(share.with_gradient)
        results = self._oom_retry.run(
            share.with_gradient,
            lambda batches: self._learn_all(batches, exact_C, before),
            self._release_operands,
        )
        norm = self._apply(rate) if share.has_gradient else None
        return Update(results=results, norm=norm, grad_norm=None, learning_rate=rate)

    def _count(self, updates: list[Update]) -> None:
        for update in [update for update in updates if not update.is_skipped]:
            is_applied = update.grad_norm is not None
            self.num_applied += is_applied
            self._num_nonfinite = 0 if is_applied else self._num_nonfinite + 1
            if self._num_nonfinite >= self.config.learn.max_nonfinite_updates:
                raise RunError(
                    f"training diverged: {self._num_nonfinite} updates in a row had a non-finite gradient"
                    " (limit: learn.max_nonfinite_updates); see mismatch_max and grad_norm of earlier steps"
                    " in metrics.jsonl, and try a lower learn.learning_rate"
                )

    def _exact(self, part: MinibatchPart) -> Tensor | None:
        """Score the tokens with the sampler's forward pass; None outside of exact mode."""
        if self._score is None or not any(group.samples_G for group in part.groups):
            return None
        return self._score(part.groups)

    def _learn_all(
        self, batches: Sequence[PackedBatch], exact_C: Tensor | None, before: list[BatchMetrics] | None
    ) -> list[MinibatchMetrics]:
        """Compute the gradient of all batches into the masters' grad, replacing what was there."""
        self._optimizer.zero_grad(set_to_none=True)
        known = [None] * len(batches) if before is None else regrouped(before, batches)
        exact = divided(exact_C, batches)
        learn = self._backward_divergence if self.config.distil.is_divergence else self._backward
        plain = self._linear_pass
        with plain.holding() if self._is_holding(batches) else contextlib.nullcontext(plain) as linear_pass:
            return [
                learn(*each, self._with_dropout(linear_pass, index))
                for index, each in enumerate(zip(batches, exact, known, strict=True))
            ]

    def _is_holding(self, batches: Sequence[PackedBatch]) -> bool:
        return self.holds_operands and len(batches) > 1

    def _release_operands(self, batches: Sequence[PackedBatch]) -> str | None:
        if not self._is_holding(batches):
            return None
        self.holds_operands = False
        return "operands are now unpacked for each product"

    def _with_dropout(self, linear_pass: LinearPass, index: int) -> LinearPass:
        """Return the pass with the masks of the update's batch of this index."""
        at = self.config.seed, _DROPOUT, self.version, index
        dropout = dropout_of(self.decoder, self.config.adapter.dropout, *at)
        return dataclasses.replace(linear_pass, dropout=dropout)

    def _backward(
        self, batch: PackedBatch, exact_C: Tensor | None, before: BatchMetrics | None, linear_pass: LinearPass
    ) -> MinibatchMetrics:
        """Add the batch's gradient to the masters' grad. Without `before` this pass also gives the first
        logprobs."""
        algo = self.config.algo
        own_C, entropy_C = self._forward(batch, linear_pass)
        # own_C - own_C.detach() is 0, so the value is exact_C to the bit
        logprob_C = own_C if exact_C is None else exact_C + (own_C - own_C.detach())
        before = before or self._reading(batch, exact_C, own_C.detach(), entropy_C, linear_pass)
        correction = correct(before.logprob_C, batch.sampler_logprobs_C, batch.spans, algo)
        advantages_C = batch.advantages_C
        if batch.teacher is not None:  # distillation: minus the reverse KL, token by token
            advantages_C = batch.teacher.logprob_C - before.logprob_C
        policy_C, held_C = self._loss.objective(logprob_C, correction.old_T, advantages_C, batch.spans, algo)
        loss_C = correction.weight_T * policy_C
        kl_C = None if before.reference_C is None else k3(own_C, before.reference_C)
        if kl_C is not None:
            ratio_C = KL_RATIOS[algo.kl_estimator](logprob_C, correction.old_T)
            loss_C = loss_C + algo.beta * ratio_C * kl_C
        loss = (batch.weights_C * loss_C).sum()
        loss.backward()
        return MinibatchMetrics(
            before=before,
            loss=loss.detach(),
            ratio_C=(logprob_C.detach() - correction.old_T).exp(),
            held_C=held_C.detach(),
            correction=correction,
            kl_C=None if kl_C is None else kl_C.detach(),
        )

    def _apply(self, rate: float) -> Tensor:
        """Sum over ranks, clip, update unless the norm is not finite, publish; return the norm before
        clipping. The host does not wait for the gradients: it launches all of it while they are computed."""
        masters = list(self._masters.values())
        norm = torch.nn.utils.get_total_norm(self._gradients(masters))
        torch.nn.utils.clip_grads_with_norm_(masters, self.config.learn.max_grad_norm, norm)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate
        step_if(self._optimizer, norm.isfinite())
        publish(self.decoder)
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _gradients(self, masters: list[torch.nn.Parameter]) -> list[Tensor]:
        """Return the gradients of the whole update, summed over all ranks."""
        for master in masters:
            if master.grad is None and self._ranks.count > 1:  # this rank had nothing to learn
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in masters if master.grad is not None]
        self._ranks.add(grads)
        return grads

    def _backward_divergence(
        self, batch: PackedBatch, exact_C: Tensor | None, known: BatchMetrics | None, linear_pass: LinearPass
    ) -> MinibatchMetrics:
        """Add the gradient of the divergence from the teacher, whose tokens need no correction."""
        forward = self._forward
        assert batch.teacher is not None and isinstance(forward, DecoderForward)
        ids_CK, outcomes_CX = batch.teacher.ids_CK, batch.teacher.outcomes_CX
        assert ids_CK is not None and outcomes_CX is not None
        divergence_C, own_C, entropy_C = chunked_divergence(
            forward.hidden(batch, linear_pass),
            batch.source_rows_C,
            batch.targets_C,
            ids_CK,
            outcomes_CX,
            divergence_of(self.config.distil),
            forward.head(),
            min_logprob=MIN_LOGPROB,
        )
        before = known or self._reading(batch, exact_C, own_C, entropy_C, linear_pass)
        loss = (batch.weights_C * divergence_C).sum()
        loss.backward()
        return MinibatchMetrics(
            before=before,
            loss=loss.detach(),
            ratio_C=torch.ones_like(own_C),
            held_C=torch.zeros_like(own_C),
            correction=correct(own_C, own_C, batch.spans, _UNCORRECTED),
            kl_C=None,
        )

    @torch.no_grad()
    def _read(self, part: MinibatchPart) -> list[BatchMetrics]:
        exact_C = self._exact(part)

        def read_all(batches: Sequence[PackedBatch]) -> list[BatchMetrics]:
            pairs, plain = zip(batches, divided(exact_C, batches), strict=True), self._linear_pass
            return [self._reading(batch, each, *self._forward(batch, plain), plain) for batch, each in pairs]

        return self._oom_retry.run(part, read_all)

    @torch.no_grad()
    def _reading(
        self,
        batch: PackedBatch,
        exact_C: Tensor | None,
        own_C: Tensor,
        entropy_C: Tensor,
        linear_pass: LinearPass,
    ) -> BatchMetrics:
        reference_C, forward = None, self._forward
        routing = forward.routing() if isinstance(forward, DecoderForward) else None
        if self.config.algo.beta > 0:
            with adapter_off(self.decoder):
                reference_C = self._forward(batch, linear_pass)[0]
        return BatchMetrics(
            batch=batch,
            logprob_C=own_C if exact_C is None else exact_C,
            entropy_C=entropy_C,
            reference_C=reference_C,
            own_C=None if exact_C is None else own_C,
            routing=routing,
        )

    def adapter_state(self) -> dict[str, Tensor]:
        """Return the masters themselves, by PEFT's names."""
        return {name: master.detach() for name, master in self._masters.items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return AdamW's moments as `<adapter tensor>.<moment>`; empty before the first update."""
        return state_of(self._optimizer, self._masters)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
        """Return what `load` takes, in host memory."""
        states = self.adapter_state(), self.optimizer_state()
        adapter, optimizer = ({name: x.cpu() for name, x in state.items()} for state in states)
        return adapter, optimizer, self.version, self.micro_tokens

    def load(
        self, adapter: dict[str, Tensor], optimizer: dict[str, Tensor], version: int, micro_tokens: int
    ) -> None:
        """Restore the state that `state` returned, bit for bit; micro-batches grow no larger than planned."""
        load_adapter(self.decoder, adapter)
        load_state(self._optimizer, self._masters, optimizer)
        self.version = version
        self._oom_retry.micro_tokens = min(micro_tokens, self.micro_tokens)
