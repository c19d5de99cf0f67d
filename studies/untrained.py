"""Measure an untrained policy: its entropy, pass@k, and the distance of its weights from the checkpoint's.

    entropy        mean over the sampled tokens, in nats: over states that the policy itself reaches
    first_entropy  of the first token after each prompt: the same states for every arm
    kl             mean KL(checkpoint || policy) over the tokens of prompts and answers, in nats
    weight_error   mean over the linears of |W' - W| / |W|          W' without the factors that AWQ folds
    output_error   mean over the linears of |(W' - W) x| / |W x|    into a neighboring layer

x are the linears' inputs on the prompts, in the checkpoint's own model in bf16. The prompts are those of a
seed's first training step, so seeds vary the problems too. AWQ is calibrated on other text: questions and
answers of reasoning-gym tasks that no study uses.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.algo.batches import batches
from qerl.config import RunConfig, TaskConfig
from qerl.engine import PagedEngine
from qerl.formats import FORMATS, NVFP4
from qerl.formats.block_scale import least_squares
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import tree_attention
from qerl.kernels.head.logprob import chunked_logprob
from qerl.learner.packing import PackedBatch, pack
from qerl.models.checkpoint.encoding import SelectScales, default_scales, encode_weights
from qerl.models.checkpoint.source import Checkpoint, locate
from qerl.models.checkpoint.state_dict import architecture_of, linear_groups, read_float
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.decoder import Decoder
from qerl.models.delta_net import recur_over
from qerl.models.device import COMPUTE, resolve_device
from qerl.models.loader import build_decoder
from qerl.models.quantize.awq import BATCH_TOKENS, ScaledCheckpoint, awq, collect_inputs, run_sequences
from qerl.tasks import RewardPool, Task
from qerl.tasks.reward import format_failures
from qerl.tasks.rows.table import gym_rows
from qerl.training.rollouts.evaluation import EVALUATION_STEP, sample_and_score, sampled_tokens, summarize
from qerl.training.rollouts.rollout import step_request
from qerl.types import Group, Prompt
from studies.gaussian_noise import GaussianNoiseCheckpoint
from studies.study import Job

_CALIBRATION_GYMS = ("gsm_symbolic", "syllogism", "letter_jumble", "time_intervals", "family_relationships")
_CALIBRATION_ROWS = 24
_MOST_PROMPTS = 64
"""Number of prompts for errors and KL."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The checkpoint and the block scales that frozen weights are made from."""

    checkpoint: Checkpoint
    scales: SelectScales = default_scales


def _plain(checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    return Source(checkpoint=checkpoint)


def _mse(checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    return Source(checkpoint=checkpoint, scales=least_squares)


def _gaussian(checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    noised = GaussianNoiseCheckpoint(checkpoint, architecture_of(checkpoint), NVFP4, config.seed)
    return Source(checkpoint=noised)


def _awq(checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    return _folded(checkpoint, config, tokenizer, default_scales)


def _awq_mse(checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    return _folded(checkpoint, config, tokenizer, least_squares)


def _folded(
    checkpoint: Checkpoint, config: RunConfig, tokenizer: PreTrainedTokenizerBase, scales: SelectScales
) -> Source:
    kind = FORMATS[config.model.format]
    inputs = collect_inputs(
        _decoder(Source(checkpoint=checkpoint), config, "bf16"), calibration_text(tokenizer)
    )
    folded = awq(
        checkpoint,
        architecture_of(checkpoint),
        inputs,
        lambda weights: encode_weights(weights, kind, scales),
    )
    return Source(checkpoint=folded, scales=scales)


WEIGHTS: dict[str, Callable[[Checkpoint, RunConfig, PreTrainedTokenizerBase], Source]] = {
    "plain": _plain,
    "mse": _mse,
    "awq": _awq,
    "awq+mse": _awq_mse,
    "gaussian": _gaussian,
}
"""Makers of an arm's frozen weights; gaussian adds noise with the energy of NVFP4's rounding error."""


def calibration_text(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return a sequence of tokens for each row."""
    texts = []
    for gym in _CALIBRATION_GYMS:
        rows = gym_rows(TaskConfig(gym=gym, num_rows=_CALIBRATION_ROWS))
        texts += [f"{row['question']}\n{row['answer']}" for row in map(rows.get, range(rows.num_rows))]
    return [list(tokenizer(text)["input_ids"])[:512] for text in texts]


def measure_untrained(job: Job) -> dict[str, Any]:
    """Measure one policy; the seed sets the problems, the samples' random numbers and the Gaussian noise."""
    config = dataclasses.replace(job.config, model=resolve_device(job.config.model))
    source = locate(config.model.path)
    checkpoint, tokenizer = source.open(), load_tokenizer(config.model.path)
    max_prompt_tokens = architecture_of(checkpoint).max_positions - config.sample.max_tokens
    task = Task(config.task, tokenizer, seed=config.seed, max_prompt_tokens=max_prompt_tokens)
    prompts = task.train_prompts(0, config.evaluate.num_prompts)
    with RewardPool(config.task) as pool:
        made = WEIGHTS[job.weights](checkpoint, config, tokenizer)
        decoder = _decoder(made, config, config.model.format)
        stop_ids = stop_token_ids(tokenizer, source)
        engine = PagedEngine(decoder, tokenizer, config.engine, stop_token_ids=stop_ids)
        request = step_request(config, prompts, EVALUATION_STEP)
        groups, rewards_P_G = sample_and_score(engine, pool.score, request)
        for text in format_failures(pool.take_failures()):
            print(f"{job.study}, {job.task}, {job.arm}, seed {job.seed}: {text}", file=sys.stderr)
    tokens_P_G = list(map(sampled_tokens, groups))
    evaluation = summarize(rewards_P_G, tokens_P_G, pool.success_threshold(config.evaluate.success_threshold))
    entropy, first_entropy = entropies(decoder, groups, config)
    errors = distances(checkpoint, made.checkpoint, decoder, prompts[:_MOST_PROMPTS], config, tokenizer)
    return {
        "final": {
            "entropy": entropy,
            "first_entropy": first_entropy,
            **{f"pass@{k}": value for k, value in evaluation.pass_at_k.items()},
            **errors,
            "mean_tokens": evaluation.mean_tokens,
        },
        "curve": [{"k": k, "pass": value} for k, value in evaluation.pass_at_k.items()],
    }


def _decoder(made: Source, config: RunConfig, format: str) -> Decoder:
    model = config.model
    return build_decoder(
        made.checkpoint,
        format=format,
        compute=COMPUTE[model.dtype],
        device=torch.device(model.device),
        resident=model.operand == "resident",
        head=model.head_format,
        scales=made.scales if format == model.format else default_scales,
    )


@torch.no_grad()
def entropies(decoder: Decoder, groups: list[Group], config: RunConfig) -> tuple[float, float]:
    """Return the mean entropy over all sampled tokens, and over the first token of each prompt."""
    weighted = [(group, [1.0] * len(group.samples_G)) for group in groups]
    batches = pack(weighted, max_tokens=config.learn.microbatch_tokens, device=decoder.device)
    entropy_C = torch.cat([_entropy_of(decoder, batch, config) for batch in batches]).cpu()
    lengths = [[len(sample.tokens_T) for sample in group.samples_G] for group in groups]
    starts = itertools.accumulate((sum(lengths_G) for lengths_G in lengths), initial=0)
    firsts = list(starts)[:-1]
    return entropy_C.mean().item(), entropy_C[firsts].mean().item()


def _entropy_of(decoder: Decoder, batch: PackedBatch, config: RunConfig) -> Tensor:
    def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions) -> Tensor:
        return tree_attention(q_TNH, k_TKH, v_TKH, batch.layout, options)

    head = decoder.lm_head
    return chunked_logprob(
        decoder(batch.tokens_T, batch.positions_T, attend, recur=recur_over(batch.trees, decoder.device)),
        head.sliced_operand(),
        batch.targets_C,
        rows_C=batch.source_rows_C,
        temperature=config.sample.temperature / head.alpha,
        chunk_tokens=config.learn.logprob_chunk_tokens,
    )[1]


@torch.no_grad()
def distances(
    original: Checkpoint,
    made: Checkpoint,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float]:
    """Return kl, weight_error and output_error."""
    answers = [str(prompt.columns.get(config.task.answer_column, "")) for prompt in prompts]
    texts = [
        [*prompt.tokens_T, *tokenizer(answer, add_special_tokens=False)["input_ids"]]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    reference = _decoder(Source(checkpoint=original), config, "bf16")
    kl, num_tokens = 0.0, 0
    for batch in batches(texts, len, BATCH_TOKENS):
        ours_TD, theirs_TD = (run_sequences(one, batch) for one in (decoder, reference))
        for rows in torch.arange(len(ours_TD)).split(config.learn.logprob_chunk_tokens):
            ours = decoder.logits(ours_TD[rows]).log_softmax(-1)
            theirs = reference.logits(theirs_TD[rows]).log_softmax(-1)
            kl += (theirs.exp() * (theirs - ours)).sum().item()
        num_tokens += len(ours_TD)
    inputs = collect_inputs(reference, texts)
    linears = {f"model.{name}": linear for name, linear in decoder.linears()}
    weight_errors, output_errors = [], []
    for group in linear_groups(decoder.architecture):
        x_SK = inputs[group[0]].rows_SK
        for name in group:
            packed = linears[name].weight
            assert packed is not None
            weight_NK = read_float(original, f"{name}.weight").float().to(x_SK.device)
            error_NK = _unfolded(packed.decode(), made, f"{name}.weight") - weight_NK
            weight_errors.append((error_NK.norm() / weight_NK.norm()).item())
            output_errors.append(((x_SK @ error_NK.T).norm() / (x_SK @ weight_NK.T).norm()).item())
    return {
        "kl": kl / num_tokens,
        "weight_error": fmean(weight_errors),
        "output_error": fmean(output_errors),
    }


def _unfolded(weight_NK: Tensor, made: Checkpoint, name: str) -> Tensor:
    """Return the weight without the factors that a neighboring layer undoes."""
    if not isinstance(made, ScaledCheckpoint):
        return weight_NK
    rows_N, columns_K = made.rows(name).to(weight_NK.device), made.columns(name).to(weight_NK.device)
    return weight_NK / rows_N[:, None] / columns_K
