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
from qerl.errors import RunError, UserError
from qerl.kernels.runtime.gpu_memory import peak_bytes, reset_peaks
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
from qerl.models.quantize.gptq import FLOAT, SWEEPS, requantize
from qerl.models.quantize.quantization_check import check_quantization
from qerl.tasks import Task
from qerl.tracking.progress import work_lines
from qerl.training import calibration_cache
from qerl.training.calibration_cache import NOTE
from qerl.training.calibration_choice import choose
from qerl.training.calibration_samples import MAX_BATCHES, MAX_SAMPLE_TOKENS, NUM_SAMPLES, sample_groups
from qerl.training.policy import load_task


def with_calibrated_base(config: RunConfig, ranks: Ranks, notice: Callable[[str], None]) -> RunConfig:
    """Return the config with the calibrated checkpoint as its model; the first call writes it."""
    if config.model.calibrate == "none":
        return config
    base = Path(config.out) / BASE
    choice = ranks.from_first(lambda: chosen_calibration(config, base.parent) or choose(config, notice))
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
    prompts = calibration_cache.calibration_prompts(config, task, MAX_BATCHES, max_tokens)
    settings = {"tokens": max_tokens, "samples": NUM_SAMPLES, "max_sample_tokens": MAX_SAMPLE_TOKENS}
    settings |= {"sweeps": SWEEPS, "damping": FLOAT.damping, "float_share": FLOAT.float_share}
    key = calibration_cache.calibration_key(config, source, prompts, settings)
    notice(f"{name}: block scales {model.block_scales} (model.scales)")
    if (note := calibration_cache.take(key, base, model.path, notice)) is not None:
        notice(f"{name}: cached by a run with the same settings, where it took {note['seconds']:.0f} s")
        notice(note["line"])
        return
    notice(f"{name}: quantizing {model.path}")
    try:
        _calibrate(config, base, tokenizer, task, max_tokens, notice)
    except torch.OutOfMemoryError:
        raise RunError(
            f"{name}: needs more memory than the GPU has free (`qerl plan` says how much); set"
            " --model.calibrate none, or give a model that `qerl quantize --calibrate gptq` wrote elsewhere"
        ) from None
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
    device, name = torch.device(model.device), "model.calibrate gptq"
    checkpoint = source.open(device)
    resident = model.operand == "resident"
    sampler = float_decoder(checkpoint, COMPUTE[model.dtype], model.device, resident=resident)
    loaded_s = time.perf_counter()
    stop_ids = stop_token_ids(tokenizer, source)
    engine = PagedEngine(sampler, tokenizer, config.engine, stop_token_ids=stop_ids)
    groups, stats, num_calls = sample_groups(config, engine, task, max_tokens)
    sampled_s = time.perf_counter()
    del engine  # and its cache
    if on_gpu := device.type == "cuda":
        reset_peaks(device)
    rows = pack_groups(groups, max_tokens=max_tokens, device=device)
    loaded = LoadedLinears(checkpoint, sampler)
    # In bf16 a GPU takes a third of float32's time, for the same KL.
    decoder = float_decoder(loaded, COMPUTE[model.dtype], model.device, resident=False)
    settings = dataclasses.replace(FLOAT, select_scales=SCALES[model.block_scales])
    with work_lines(notice, f"{name}: quantizing", begins=False) as report:
        requantize(decoder, rows, settings, notice=lambda text: notice(f"{name}: {text}"), report=report)
    end_s = time.perf_counter()
    peak = f" with at most {peak_bytes(device) / 1e9:.1f} GB" if on_gpu else ""
    notice(
        f"{name}: {len(rows.tokens_T):,} tokens; loaded in {loaded_s - begin:.1f} s, sampled in"
        f" {sampled_s - loaded_s:.1f} s ({num_calls} calls, {stats.compile_s:.1f} s to compile,"
        f" {stats.record_s:.1f} s to record graphs), quantized in {end_s - sampled_s:.1f} s{peak}"
    )
    prompts = [prompt.tokens_T for prompt in task.train_prompts(0, config.num_prompts)]
    line = check_quantization(decoder, model.path, "nvfp4 by gptq", prompts, original=loaded)
    assert line is not None  # the checkpoint is not quantized
    notice(line)
    note = {"model": model.path, "calibrate": "gptq", "seconds": end_s - begin, "line": line}
    write_packed(decoder, source, base, notes={NOTE: note})


def float_decoder(checkpoint: Checkpoint, compute: torch.dtype, device: str, *, resident: bool) -> Decoder:
    return build_decoder(
        checkpoint, format="bf16", compute=compute, device=torch.device(device), resident=resident
    )


class LoadedLinears:
    """A checkpoint, but for the linears of a decoder loaded from it in bf16, which are not read again."""

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
