"""Forward and backward passes over a request's sequences: logprobs of targets, gradients of the loss.

Sequences are packed without padding into micro-batches of at most max_rows rows; losses are sums, so the
split does not change the gradient. Gradients reach the client's adapter only when the whole request succeeds.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from qerl.algo.batches import batches
from qerl.algo.segment import Segments
from qerl.config import RunConfig
from qerl.errors import UserError, require
from qerl.kernels.attention.tree_attention import TreeLayout
from qerl.learner.forward import DecoderForward
from qerl.learner.packing import PackedBatch
from qerl.tinker.adapter import AdapterSlot, TrainedAdapter
from qerl.tinker.losses import LossConfig, TinkerLoss, loss_of
from qerl.tinker.wire import Datum, PassRequest
from qerl.types import Tree


@dataclasses.dataclass(frozen=True, slots=True)
class PassResult:
    logprobs_D_T: list[np.ndarray]
    """fp32, of each datum's targets."""
    loss: float
    """Sum over all datums."""


class Passes:
    def __init__(self, slot: AdapterSlot, config: RunConfig, *, max_context_tokens: int):
        self._slot, self._device = slot, slot.decoder.device
        self._forward = DecoderForward(slot.decoder, config)
        self._max_rows, self._max_context_tokens = config.learn.microbatch_tokens, max_context_tokens

    def check(self, request: PassRequest) -> tuple[TinkerLoss, LossConfig]:
        """Raise UserError for a request that cannot be computed."""
        loss, config = loss_of(request.loss_fn, request.loss_config)
        require(len(request.data) > 0, "data: no datum was given")
        for index, datum in enumerate(request.data):
            self._check_datum(datum, request.loss_fn, loss, f"data[{index}]")
        return loss, config

    def run(self, adapter: TrainedAdapter, request: PassRequest) -> PassResult:
        """Compute with the adapter, which the slot holds, and add to its gradients."""
        loss, config = self.check(request)
        logprobs, total = list[np.ndarray](), 0.0
        try:
            for part in batches(request.data, lambda datum: len(datum.tokens_T), self._max_rows):
                with torch.set_grad_enabled(not request.is_forward_only):
                    values, part_loss = self._run_part(part, loss, config)
                if not request.is_forward_only:
                    part_loss.backward()
                logprobs += values
                total += part_loss.item()
            if not request.is_forward_only:
                adapter.add_gradients(self._slot.take_gradients(adapter))
        except torch.OutOfMemoryError:
            raise UserError("not enough memory for these sequences: send shorter ones") from None
        finally:
            self._slot.clear_gradients()
        return PassResult(logprobs, total)

    def _run_part(
        self, part: list[Datum], loss: TinkerLoss, config: LossConfig
    ) -> tuple[list[np.ndarray], Tensor]:
        logprob_C, _ = self._forward(lay_out(part, self._device))
        targets = [datum.inputs["target_tokens"] for datum in part]
        sizes, losses = [each.size for each in targets], list[Tensor]()
        for datum, logprob_T in zip(part, logprob_C.split(sizes), strict=True):
            inputs = {
                name: torch.tensor(datum.inputs[name].ravel(), dtype=torch.float32, device=self._device)
                for name in (*loss.inputs, *loss.optional)
                if name in datum.inputs
            }
            losses.append(loss.objective(logprob_T, inputs, config).sum())
        values = logprob_C.detach().float().cpu().split(sizes)
        shaped = [each.numpy().reshape(t.shape) for each, t in zip(values, targets, strict=True)]
        return shaped, torch.stack(losses).sum()

    def _check_datum(self, datum: Datum, name: str, loss: TinkerLoss, place: str) -> None:
        length, vocab_size = len(datum.tokens_T), self._slot.decoder.vocab_size
        limit = self._max_context_tokens
        require(0 < length <= limit, f"{place}: model_input has {length} tokens; 1 to {limit} are supported")
        required = ("target_tokens", *loss.inputs)
        for key in datum.inputs:
            known = key in required or key in loss.optional
            require(
                known, f"{place}: {name} has no loss_fn_inputs {key[:50]!r}; it reads {', '.join(required)}"
            )
        for key in required:
            require(key in datum.inputs, f"{place}: {name} needs loss_fn_inputs[{key!r}]")
        for key, values in datum.inputs.items():
            same = len(values) == length
            require(same, f"{place}: {key} has {len(values)} elements, model_input has {length} tokens")
            shape = datum.inputs["target_tokens"].shape
            alike = values.shape == shape and (values.ndim == 1 or name == "cross_entropy")
            require(alike, f"{place}: {key} has shape {values.shape}, target_tokens {shape} for {name}")
            if key != "target_tokens":
                require(bool(np.isfinite(values).all()), f"{place}: {key} must be finite numbers")
        for key, tokens in (
            ("model_input", datum.tokens_T),
            ("target_tokens", datum.inputs["target_tokens"]),
        ):
            require(tokens.dtype.kind == "i", f"{place}: {key} must be int64")
            is_known = tokens.min() >= 0 and tokens.max() < vocab_size
            require(bool(is_known), f"{place}: {key} must lie in 0 to {vocab_size - 1}")


def lay_out(data: list[Datum], device: torch.device) -> PackedBatch:
    """Return a batch in which every row predicts its targets, mostly one."""
    lengths = [len(datum.tokens_T) for datum in data]
    starts = [sum(lengths[:index]) for index in range(len(data))]
    trees = [Tree(start=s, prompt_tokens=n, branch_tokens=()) for s, n in zip(starts, lengths, strict=True)]
    targets = [datum.inputs["target_tokens"] for datum in data]
    sizes, rows = [each.size for each in targets], np.arange(sum(lengths))
    per_row = np.concatenate([np.full(n, t.size // n) for n, t in zip(lengths, targets, strict=True)])
    zeros_C = torch.zeros(sum(sizes), device=device)
    return PackedBatch(
        tokens_T=torch.tensor(np.concatenate([datum.tokens_T for datum in data]), device=device),
        positions_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        trees=trees,
        members=[(index, []) for index in range(len(data))],
        layout=TreeLayout.of(trees, device),
        source_rows_C=torch.tensor(rows.repeat(per_row), device=device),
        targets_C=torch.tensor(np.concatenate([t.ravel() for t in targets]).astype(np.int64), device=device),
        sampler_logprobs_C=zeros_C,
        advantages_C=zeros_C,
        weights_C=zeros_C,
        routes_T=None,
        spans=Segments.of(sizes),
        is_sampled_C=torch.zeros(sum(sizes), dtype=torch.bool, device=device),
    )
