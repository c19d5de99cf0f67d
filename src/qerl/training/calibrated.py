"""Calibrate a float model before a run: GPTQ on the task's prompts and the model's own samples.

What a model learned shows in its completions: the float model samples them, in bf16, then gptq.py chooses the
codes layer by layer. The result is an NVFP4 checkpoint in the run's folder, base, which takes the place of
model.path: the run trains it, resumes with it, and is exported and evaluated over it. run.json keeps the
model.path that was given.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.config import ModelConfig, RunConfig
from qerl.config.stored import BASE, chosen_calibration, with_stored_base
from qerl.engine.paged_engine import PagedEngine
from qerl.errors import UserError
from qerl.learner.distributed import Ranks
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.source import Checkpoint, layout_of, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import stop_token_ids
from qerl.models.decoder import Decoder
from qerl.models.device import COMPUTE
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_packed
from qerl.models.quantize.calibration import calibration_tokens, pack_groups
from qerl.models.quantize.gptq import FLOAT_DAMPING, SWEEPS, requantize
from qerl.models.quantize.quantization_check import check_quantization
from qerl.tasks import Task
from qerl.training import calibration_cache
from qerl.training.calibration_cache import NOTE
from qerl.training.calibration_choice import choose
from qerl.training.policy import load_task
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

NUM_SAMPLES, MAX_SAMPLE_TOKENS = 4, 256
_MAX_CALLS = 32
_NOTICE_EVERY_S = 15.0


def with_calibrated_base(config: RunConfig, ranks: Ranks, notice: Callable[[str], None]) -> RunConfig:
    """Return the config with the calibrated checkpoint as its model; the first call writes it."""
    if config.model.calibrate == "none":
        return config
    base = Path(config.out) / BASE
    choice = ranks.from_first(
        lambda: chosen_calibration(config, base.parent) or choose(config, NUM_SAMPLES, notice)
    )
    if choice == "none":
        return config
    ranks.from_first(
        lambda: _check_base(config.model, base) if base.exists() else _write_base(config, base, notice)
    )
    return with_stored_base(config, base.parent)


def refuse_calibration(model: ModelConfig) -> None:
    """Raise UserError for a command that has no task's prompts to calibrate on."""
    if model.calibrate != "none":
        raise UserError(
            "model.calibrate is for train; here, write the calibrated model first:"
            f" qerl quantize {model.path} OUT --calibrate gptq --data FILE"
        )


def _check_base(model: ModelConfig, base: Path) -> None:
    """Raise UserError if the folder was made of another model."""
    made_of = read_json(base / NOTE).get("model") if (base / NOTE).is_file() else None
    if made_of != model.path:
        raise UserError(
            f"{base}: was made of {made_of or 'an unknown model'}, not of {model.path};"
            " choose another folder with --out"
        )


def _write_base(config: RunConfig, base: Path, notice: Callable[[str], None]) -> None:
    """Take the calibrated checkpoint from the cache, or make it and keep it there."""
    model, source = config.model, locate(config.model.path)
    name = "model.calibrate gptq"
    checkpoint = source.open()
    if layout_of(checkpoint) is not None:
        raise UserError(f"{model.path}: is quantized already; set --model.calibrate none")
    tokenizer, task = load_task(config)
    max_tokens = calibration_tokens(architecture_of(checkpoint), torch.device(model.device))
    prompts = calibration_cache.calibration_prompts(config, task, _MAX_CALLS, max_tokens)
    settings = {"tokens": max_tokens, "samples": NUM_SAMPLES, "max_sample_tokens": MAX_SAMPLE_TOKENS}
    settings |= {"damping": FLOAT_DAMPING, "sweeps": SWEEPS}
    key = calibration_cache.calibration_key(config, source, prompts, settings)
    if (note := calibration_cache.take(key, base, model.path, notice)) is not None:
        notice(f"{name}: cached by a run with the same settings, where it took {note['seconds']:.0f} s")
        notice(note["line"])
        return
    notice(f"{name}: quantizing {model.path}")
    _calibrate(config, base, tokenizer, task, max_tokens, notice)
    calibration_cache.store(key, base, notice)


def _calibrate(
    config: RunConfig,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    max_tokens: int,
    notice: Callable[[str], None],
) -> None:
    model, source, begin = config.model, locate(config.model.path), time.perf_counter()
    checkpoint, name = source.open(), "model.calibrate gptq"
    resident = model.operand == "resident"
    sampler = _float_decoder(checkpoint, COMPUTE[model.dtype], model.device, resident=resident)
    groups = _sampled(config, sampler, tokenizer, task, max_tokens)
    sampled = time.perf_counter()
    rows = pack_groups(groups, max_tokens=max_tokens, device=torch.device(model.device))
    loaded = _LoadedLinears(checkpoint, sampler)
    decoder = _float_decoder(loaded, torch.float32, model.device, resident=False)
    requantize(
        decoder,
        rows,
        notice=_progress(name, notice),
        select_scales=SCALES[model.scales],
        damping=FLOAT_DAMPING,
    )
    end = time.perf_counter()
    seconds = f"sampled in {sampled - begin:.1f} s, quantized in {end - sampled:.1f} s"
    notice(f"{name}: {len(rows.tokens_T):,} tokens {seconds}")
    prompts = [prompt.tokens_T for prompt in task.train_prompts(0, config.num_prompts)]
    line = check_quantization(decoder, model.path, "nvfp4 by gptq", prompts, original=loaded)
    assert line is not None  # the checkpoint is not quantized
    notice(line)
    note = {"model": model.path, "calibrate": "gptq", "seconds": end - begin, "line": line}
    write_packed(decoder, source, base, notes={NOTE: note})


def _progress(name: str, notice: Callable[[str], None]) -> Callable[[str], None]:
    """Return a notice of layers that passes on at most one every 15 s, with the seconds so far."""
    begin = noticed = time.monotonic()

    def notice_layer(text: str) -> None:
        nonlocal noticed
        if (now := time.monotonic()) - noticed >= _NOTICE_EVERY_S or not text.startswith("layer "):
            noticed = now
            notice(f"{name}: {text}, {now - begin:.0f} s")

    return notice_layer


def _sampled(
    config: RunConfig, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, task: Task, num_wanted: int
) -> list[tuple[list[int], list[list[int]]]]:
    """Return prompts, each with samples of the float model: num_wanted tokens if the task has as many."""
    stop_ids = stop_token_ids(tokenizer, locate(config.model.path))
    engine = PagedEngine(decoder, tokenizer, config.engine, stop_token_ids=stop_ids)
    max_tokens = min(config.sample.max_tokens, MAX_SAMPLE_TOKENS)
    sampling = dataclasses.replace(sampling_of(config), max_tokens=max_tokens)
    samples_by_prompt: dict[int, tuple[list[int], list[list[int]]]] = {}
    num_tokens = 0
    for prompts_P in calibration_cache.new_prompts(config, task, _MAX_CALLS):
        if num_tokens >= num_wanted:
            break
        request = GenerateRequest(
            prompts_P, num_samples=NUM_SAMPLES, sampling=sampling, seed=config.seed, step=EVALUATION_STEP
        )
        for group in engine.generate(request):
            samples = list(map(list, dict.fromkeys(tuple(sample.tokens_T) for sample in group.samples_G)))
            samples_by_prompt[group.prompt.index] = group.prompt.tokens_T, samples
            num_tokens += len(group.prompt.tokens_T) + sum(map(len, samples))
    return list(samples_by_prompt.values())


def _float_decoder(checkpoint: Checkpoint, compute: torch.dtype, device: str, *, resident: bool) -> Decoder:
    return build_decoder(
        checkpoint, format="bf16", compute=compute, device=torch.device(device), resident=resident
    )


class _LoadedLinears:
    """A checkpoint, but for the linears of a decoder loaded from it in bf16: reading those from a GGUF file
    again takes longer than quantizing them."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder):
        self.path: Path = checkpoint.path
        self.config: dict[str, Any] = checkpoint.config
        self.shapes: dict[str, tuple[int, ...]] = checkpoint.shapes
        self._checkpoint = checkpoint
        self._linears = {f"model.{name}.weight": linear for name, linear in decoder.linears()}

    def read(self, name: str) -> Tensor:
        linear = self._linears.get(name)
        if linear is None or linear.weight is None:
            return self._checkpoint.read(name)
        return linear.weight.operand(torch.bfloat16)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self._checkpoint.read_rows(name, rows)
