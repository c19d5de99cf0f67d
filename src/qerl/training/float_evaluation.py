"""Evaluate the float model on held-out problems before a run, so that the price of quantization is known
(`evaluate.float`).

    price = mean over problems of (float model's figure - quantized model's figure)

Both answer the same problems with the same random numbers, and the standard error is that of the differences.
The float weights are read, sampled from and freed before the quantized ones are made: memory holds one of the
two models at a time. The rewards score both models' samples in the same way, later.
"""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from qerl.algo.estimate import clustered_mean
from qerl.config import RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError
from qerl.learner.checkpoint import find_latest
from qerl.learner.plan.memory import float_config, with_fields
from qerl.models.checkpoint.source import layout_of, locate
from qerl.models.peft.adapter import load_adapter
from qerl.models.peft.peft_reader import read_adapter
from qerl.tracking import Journal, NullJournal
from qerl.tracking.atomic_file import read_object
from qerl.training.policy import load_sampler
from qerl.training.rollouts import evaluation
from qerl.training.rollouts.evaluation import is_correct
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest, Group, Prompt, RolloutEngine

FLOAT = "float"
"""Name of the evaluation in evaluations.json."""
MAX_PROBLEMS = 256


@dataclasses.dataclass(slots=True)
class FloatEvaluation:
    """Samples and figures of a run's float model."""

    samples: list[list[Group]] | None = None
    """With the config's sampling, and greedy; None if the run has measured it before."""
    quantized: list[evaluation.Scores] | None = None
    """The quantized model's scores on all held-out problems, likewise."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def stored_figures(folder: Path, journal: Journal | NullJournal) -> dict[str, float] | None:
    """Return the figures that a run which is at its first step has stored; None if they are to be measured. A
    run that has a checkpoint does not measure them: {}."""
    if find_latest(folder / "checkpoints")[0] is not None:
        return {}
    path = folder / "evaluations.json"
    return read_object(path).get(FLOAT) if journal.is_same_run and path.exists() else None


def sample_float_model(
    config: RunConfig,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts_P: list[Prompt],
    wrap: Callable[[LocalEngine], RolloutEngine],
    answer: Callable[[RolloutEngine, GenerateRequest], list[Group]],
) -> list[list[Group]]:
    """Load the float weights at `path`, with adapter.init_from's adapter, sample and free them. wrap: makes
    of the engine what the run samples with; answer: samples from it. Raise UserError if the checkpoint is
    quantized."""
    if (layout := layout_of(locate(path).open())) is not None:
        raise UserError(
            f"evaluate.float: {path} is quantized already ({layout.name}) and has no float weights;"
            " leave out --evaluate.float"
        )
    decoder, engine = load_sampler(with_fields(float_config(config), "model", path=path), tokenizer)
    if config.adapter.init_from is not None:
        load_adapter(decoder, read_adapter(config.adapter.init_from, config.adapter))
    sampler = wrap(engine)
    sampler.publish(0)
    requests = evaluation.held_out_requests(prompts_P, sampling_of(config), config.seed)
    samples = [answer(sampler, request) for request in requests]
    del decoder, engine, sampler
    _free(config.model.device)
    return samples


def _free(device: str) -> None:
    gc.collect()  # hooks and graphs refer to the model in circles
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def prices(
    exact: Sequence[evaluation.Scores], quantized: Sequence[evaluation.Scores], threshold: float | None
) -> dict[str, float]:
    """Return accuracy_price, greedy_price, reward_price and greedy_reward_price, each with its standard error
    as <name>_error: of accuracy and greedy only with a threshold, of rewards over the problems where neither
    failed. The quantized model may have answered more problems, after those of the float model."""
    figures: dict[str, float | None] = {}
    (accuracy, reward), (greedy, greedy_reward) = (
        _differences(ours, theirs, threshold) for ours, theirs in zip(exact, quantized, strict=True)
    )
    by_name = {"accuracy": accuracy, "greedy": greedy, "reward": reward, "greedy_reward": greedy_reward}
    for name in ("accuracy", "greedy", "reward", "greedy_reward"):
        if by_name[name]:
            figures[f"{name}_price"], figures[f"{name}_price_error"] = clustered_mean(by_name[name])
    return {name: value for name, value in figures.items() if value is not None}


def _differences(
    ours: evaluation.Scores, theirs: evaluation.Scores, threshold: float | None
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the differences of correctness and of reward, a list of one for each problem."""
    pairs = [(a[0], b[0]) for a, b in zip(ours.rewards_P_G, theirs.rewards_P_G, strict=False)]
    reward = [[a - b] for a, b in pairs if a is not None and b is not None]
    if threshold is None:
        return [], reward
    return [[float(is_correct(a, threshold)) - is_correct(b, threshold)] for a, b in pairs], reward


def price_text(figures: dict[str, float], format: str) -> str:
    """Return "nvfp4 costs 0.012 +- 0.020, greedy 0.004 +- 0.010" of the accuracy, or of the reward."""
    pairs = [("accuracy", "greedy"), ("reward", "greedy_reward")]
    names = next((pair for pair in pairs if f"{pair[0]}_price" in figures), ())
    texts = []
    for name, label in zip(names, ("", "greedy "), strict=False):
        if (mean := figures.get(f"{name}_price")) is not None:
            error = figures.get(f"{name}_price_error")
            texts.append(f"{label}{mean:.3f}" + ("" if error is None else f" +- {error:.3f}"))
    return f"{format} costs {', '.join(texts)}" if texts else ""
