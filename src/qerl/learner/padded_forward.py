"""The learner's forward pass of a model that transformers runs: one padded row for each sample.

    a packed tree p0 p1 p2 | a0 a1 | b0     ->     p0 p1 p2 a0 a1          its prompt is computed for each of
                                                   p0 p1 p2 b0 .           its samples, not once

Rows are padded on the right. A causal model's tokens do not depend on what follows them, so no mask is
needed, and every kind of layer (windows, convolutions, recurrent states) sees a sequence without gaps. Logits
are computed from the first position on that any row learns from.
"""

import inspect
from itertools import accumulate

import torch
from torch import Tensor, nn

from qerl.config import LearnConfig
from qerl.learner.packing import PackedBatch
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.transformers_backend.transformers_model import TransformersModel


class TransformersForward:
    def __init__(self, model: TransformersModel, learn: LearnConfig, temperature: float):
        self._model, self._temperature = model, temperature
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.model.forward).parameters
        if learn.gradient_checkpointing == "layer":
            model.checkpoint_layers()

    def __call__(self, batch: PackedBatch, linear_pass: LinearPass = PLAIN) -> tuple[Tensor, Tensor]:
        """Return (logprob_C, entropy_C) of the sampled tokens."""
        tokens_ST, samples_C, positions_C = _padded(batch)
        first = int(positions_C.min()) if self._keeps_logits else 0
        options = {"logits_to_keep": tokens_ST.shape[1] - first} if self._keeps_logits else {}
        with self._model.running.within(linear_pass):
            logits_STV = self._model.model(tokens_ST, use_cache=False, **options).logits
        logits_CV = logits_STV[samples_C, positions_C - first].float()
        if batch.mask is not None:
            batch.mask.fill_(logits_CV, 0)
        logits_CV = logits_CV / self._temperature
        logprobs_CV = logits_CV.log_softmax(-1)
        logprob_C = logprobs_CV.gather(1, batch.targets_C[:, None])[:, 0]
        known_CV = logprobs_CV.detach()
        return logprob_C, -(known_CV.exp() * known_CV).nan_to_num(0.0).sum(-1)


def _padded(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [samples, longest], and each predicted token's sample and the position before it."""
    rows: list[Tensor] = []
    starts: list[int] = []  # of each sample's branch, in the packed rows
    prompts: list[int] = []
    for tree in batch.trees:
        prompt_T = batch.tokens_T[tree.start : tree.start + tree.prompt_tokens]
        ends = accumulate(tree.branch_tokens, initial=tree.start + tree.prompt_tokens)
        for start, length in zip(ends, tree.branch_tokens, strict=False):
            rows.append(torch.cat((prompt_T, batch.tokens_T[start : start + length])))
            starts.append(start)
            prompts.append(tree.prompt_tokens)
    device, lengths_S = batch.tokens_T.device, batch.spans.lengths_S
    samples_C = torch.arange(len(rows), device=device).repeat_interleave(lengths_S)
    starts_C, prompts_C = (torch.tensor(x, device=device)[samples_C] for x in (starts, prompts))
    # a row before the branch is the prompt's last one, whose position the sample's first token follows
    positions_C = prompts_C + (batch.source_rows_C - starts_C).clamp(min=-1)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), samples_C, positions_C
