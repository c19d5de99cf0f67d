"""Measure what each part of a calibration adds, over one set of samples: `python -m benchmarks calibration`.

An arm is parts joined by "+". The first says what is rounded, the others change GPTQ's settings:

    plain, mse          nearest codes, scales of the largest weight or of the least squared error
    gptq                GPTQ on the task's prompts and the float model's samples, as a run calibrates
    float0.5            targets from half-way to the float model's inputs (GptqSettings.float_share)
    damping0.01         damping of the sum over inputs
    unweighted          scales of the least squared error, not weighted by the inputs
    kept0.03            the linears that rounding hurts most stay in BF16, up to 3 % of the 4-bit bytes
    tokens16384         on the first of the tokens only
    fp32                layers run in float32, not in model.dtype, on a GPU bf16
    nvfp4               on samples of the model that is rounded by `mse`, not of the float model

`gptq` alone has the settings of a run. Each arm prints a line of JSON: KL to the float
weights in nats a token and top-1 agreement, on held-out questions (`kl`; without what all of them begin with)
and on answers of the float model to them (`answer_kl`), seconds, and peak memory. Further lines have the
seconds of loading and sampling by part. After max_s no further arm begins.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.config import EngineConfig, ModelConfig, RunConfig, SampleConfig, TaskConfig
from qerl.config.check import check_positive
from qerl.engine.paged_engine import PagedEngine
from qerl.errors import UserError
from qerl.formats import PackedWeight
from qerl.formats.block_scale import least_squares
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.source import Checkpoint, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import stop_token_ids
from qerl.models.decoder import Decoder
from qerl.models.device import COMPUTE, resolve_device
from qerl.models.loader import build_decoder
from qerl.models.quantize.awq import run_sequences
from qerl.models.quantize.calibration import calibration_tokens, pack_groups
from qerl.models.quantize.gptq import FLOAT, GptqSettings, requantize
from qerl.models.quantize.kept_linears import sensitivities, within_budget
from qerl.models.quantize.quantization_check import prompt_probes
from qerl.models.quantize.quantization_error import Probe, compare_hidden, compared_rows
from qerl.tasks import Task
from qerl.training.calibrated import LoadedLinears, float_decoder
from qerl.training.calibration_samples import SampledGroups, sample_groups
from qerl.training.policy import load_task
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

T = TypeVar("T")
ARMS = (
    *("plain", "mse", "gptq+float0", "gptq", "gptq+kept0.03", "gptq+float0.75", "gptq+float0.25"),
    *("gptq+nvfp4", "gptq+unweighted", "gptq+tokens32768", "gptq+fp32"),
)
_SENSITIVITY_PROMPTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOptions:
    model: str = "smollm2-135m-instruct"
    """The float model: a folder, a .gguf file or a hub id."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    """Task whose training prompts are sampled and whose held-out prompts are measured."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """Of the samples."""

    arms: tuple[str, ...] = ARMS
    """What to measure, in order."""

    num_prompts: int = 64
    """Held-out prompts."""

    tokens: int | None = None
    """Tokens to calibrate on; None: those of a run on this device."""

    max_tokens: int = 256
    """Longest sample."""

    max_s: float = 600.0
    """Seconds after which no further arm begins."""

    def __post_init__(self):
        check_positive(self, "num_prompts", "tokens", "max_tokens", "max_s")
        for arm in self.arms:
            Arm.parse(arm)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Arm.parse("gptq+float0.5+kept0.03")"""

    name: str
    scales: str = "mse"
    settings: GptqSettings | None = None
    """None: nearest codes."""
    kept_share: float = 0.0
    tokens: int | None = None
    sampled_in: str = "bf16"
    runs_in_fp32: bool = False

    @classmethod
    def parse(cls, name: str) -> "Arm":
        first, *parts = name.split("+")
        if first in SCALES and not parts:
            return cls(name=name, scales=first)
        if first != "gptq":
            raise UserError(f"arms: {name} must be plain, mse, or gptq and its parts")
        arm = cls(name=name, settings=dataclasses.replace(FLOAT, select_scales=least_squares))
        for part in parts:
            arm = _with_part(arm, part)
        return arm


def _with_part(arm: Arm, part: str) -> Arm:
    assert arm.settings is not None
    if part == "unweighted":
        return dataclasses.replace(arm, settings=dataclasses.replace(arm.settings, select_scales=_unweighted))
    if part == "nvfp4":
        return dataclasses.replace(arm, sampled_in=part)
    if part == "fp32":
        return dataclasses.replace(arm, runs_in_fp32=True)
    name = part.rstrip("0123456789.")
    value = float(part.removeprefix(name) or "nan")
    fields = {"float": "float_share", "damping": "damping"}
    if name in fields and value >= 0:
        return dataclasses.replace(arm, settings=dataclasses.replace(arm.settings, **{fields[name]: value}))
    if name == "kept" and value > 0:
        return dataclasses.replace(arm, kept_share=value)
    if name == "tokens" and value >= 1:
        return dataclasses.replace(arm, tokens=int(value))
    raise UserError(f"arms: {arm.name} has an unknown part: {part}")


def _unweighted(packed: PackedWeight, weight_NK: Tensor, importance_K: Tensor | None = None) -> PackedWeight:
    return least_squares(packed, weight_NK)


def bench_calibration(options: CalibrationOptions) -> None:
    """Print a row of JSON for loading, for sampling and for each arm."""
    model = resolve_device(ModelConfig(path=options.model, format="nvfp4", scales="mse"))
    sample = SampleConfig(max_tokens=options.max_tokens)
    config = RunConfig(model=model, task=options.task, sample=sample, engine=options.engine)
    bench, begin = _Bench(config, options), time.perf_counter()
    for name in options.arms:
        if time.perf_counter() - begin > options.max_s:
            break
        bench.show(bench.measure(Arm.parse(name)) | {"elapsed_s": round(time.perf_counter() - begin, 1)})


class _Bench:
    """One model, its samples, and what the float weights predict on the held-out questions and answers."""

    def __init__(self, config: RunConfig, options: CalibrationOptions):
        self._config, self._options = config, options
        self._device, self._name = torch.device(config.model.device), Path(config.model.path).stem
        self._tokenizer: PreTrainedTokenizerBase
        self._task: Task
        self._tokenizer, self._task = load_task(config)
        load_s, float_model = self._timed(lambda: self._float_model(_Remembered(_opened(config))))
        self._decoder, self._checkpoint = float_model
        self.show({"part": "load", "seconds": load_s})
        self._groups: dict[str, SampledGroups] = {}
        engine = self._sample("bf16", self._decoder)
        self._questions, self._answers = self._probes(engine)
        del engine  # and its cache
        self._exact = self._hidden(self._unrounded(torch.float32))
        self._kept: dict[float, frozenset[str]] = {}

    def show(self, row: dict[str, Any]) -> None:
        print(json.dumps({"bench": "calibration", "model": self._name} | row), flush=True)

    def measure(self, arm: Arm) -> dict[str, Any]:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        groups, kept = self._samples(arm), self._kept_linears(arm.kept_share)
        num_tokens = 0
        if arm.settings is None:
            quantize_s, decoder = self._timed(lambda: self._rounded(arm.scales, torch.float32))
        else:
            wanted = arm.tokens or self._num_tokens
            rows = pack_groups(groups, max_tokens=wanted, device=self._device)
            decoder = self._unrounded(
                torch.float32 if arm.runs_in_fp32 else COMPUTE[self._config.model.dtype]
            )
            decoder.architecture = dataclasses.replace(decoder.architecture, bf16_linears=kept)
            settings, num_tokens = arm.settings, len(rows.tokens_T)
            quantize_s, _ = self._timed(lambda: requantize(decoder, rows, settings, notice=lambda text: None))
        peak = torch.cuda.max_memory_allocated() / 1e9 if self._device.type == "cuda" else None
        error_s, errors = self._timed(lambda: self._errors(self._in_float32(decoder)))
        sizes = {"linears_bytes": sum(linear.num_bytes for _, linear in decoder.linears()), "peak_gb": peak}
        seconds = {"quantize_s": quantize_s, "error_s": error_s}
        return {"part": "arm", "arm": arm.name, "tokens": num_tokens} | errors | seconds | sizes

    def _timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Return the seconds of a call and what it returns."""
        begin = time.perf_counter()
        result = call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return round(time.perf_counter() - begin, 2), result

    def _float_model(self, checkpoint: Checkpoint) -> tuple[Decoder, Checkpoint]:
        model = self._config.model
        resident = model.operand == "resident"
        decoder = float_decoder(checkpoint, COMPUTE[model.dtype], model.device, resident=resident)
        return decoder, LoadedLinears(checkpoint, decoder)

    def _unrounded(self, compute: torch.dtype) -> Decoder:
        return float_decoder(self._checkpoint, compute, self._config.model.device, resident=False)

    def _rounded(self, scales: str, compute: torch.dtype) -> Decoder:
        place: dict[str, Any] = {"compute": compute, "device": self._device, "resident": False}
        return build_decoder(self._checkpoint, format="nvfp4", scales=SCALES[scales], **place)

    def _in_float32(self, decoder: Decoder) -> Decoder:
        """Return a decoder with the same weights and norms: errors are those of rounding alone."""
        if decoder.compute == torch.float32:
            return decoder
        copy = self._unrounded(torch.float32)
        for (_, to), (_, linear) in zip(copy.linears(), decoder.linears(), strict=True):
            assert linear.weight is not None
            to.load_weight(linear.weight)
        for name, buffer in copy.named_buffers():
            if name.endswith("norm.weight"):
                buffer.copy_(decoder.get_buffer(name))
        return copy

    @property
    def _num_tokens(self) -> int:
        return self._options.tokens or calibration_tokens(architecture_of(self._checkpoint), self._device)

    def _samples(self, arm: Arm) -> SampledGroups:
        if arm.sampled_in not in self._groups:
            self._sample(arm.sampled_in, self._rounded("mse", COMPUTE[self._config.model.dtype]))
        return self._groups[arm.sampled_in]

    def _sample(self, name: str, decoder: Decoder) -> PagedEngine:
        stop_ids = stop_token_ids(self._tokenizer, locate(self._config.model.path))
        engine = PagedEngine(decoder, self._tokenizer, self._config.engine, stop_token_ids=stop_ids)
        sample_s, (groups, stats, num_calls) = self._timed(
            lambda: sample_groups(self._config, engine, self._task, self._num_tokens)
        )
        self._groups[name] = groups
        parts = ("open_s", "compile_s", "prefill_s", "record_s", "generate_s")
        row = {part: round(getattr(stats, part), 2) for part in parts}
        row |= {"num_calls": num_calls, "num_steps": stats.decode_forwards, "num_prompts": len(groups)}
        self.show({"part": "samples", "weights": name, "seconds": sample_s} | row)
        return engine

    def _probes(self, engine: PagedEngine) -> tuple[list[Probe], list[Probe]]:
        """Return the held-out questions, and the float model's answers to them."""
        prompts = self._task.held_out(self._options.num_prompts)
        questions = prompt_probes([prompt.tokens_T for prompt in prompts], max_tokens=None)
        request = GenerateRequest(
            prompts,
            num_samples=1,
            sampling=sampling_of(self._config),
            seed=self._config.seed,
            step=EVALUATION_STEP,
        )
        answers = [
            Probe(
                tokens_T=group.prompt.tokens_T + group.samples_G[0].tokens_T,
                start=len(group.prompt.tokens_T) - 1,
            )
            for group in engine.generate(request)
        ]
        return questions, answers

    @torch.no_grad()
    def _hidden(self, decoder: Decoder) -> list[Tensor]:
        """Return the hidden states of the compared rows of questions and answers."""
        return [
            run_sequences(decoder, [probe.tokens_T for probe in probes])[
                compared_rows(probes).to(self._device)
            ]
            for probes in (self._questions, self._answers)
        ]

    def _errors(self, decoder: Decoder) -> dict[str, float]:
        row: dict[str, float] = {}
        both = zip(("", "answer_"), self._exact, self._hidden(decoder), strict=True)
        for prefix, exact_TD, hidden_TD in both:
            with torch.no_grad():
                kl, agreement = compare_hidden(decoder, exact_TD, hidden_TD)
            row |= {f"{prefix}kl": kl, f"{prefix}agreement": agreement, f"{prefix}num_tokens": len(exact_TD)}
        return row

    def _kept_linears(self, share: float) -> frozenset[str]:
        if share and share not in self._kept:
            groups = self._groups["bf16"][:_SENSITIVITY_PROMPTS]
            probes = [Probe(tokens_T=prompt + samples[0], start=0) for prompt, samples in groups]
            seconds, measured = self._timed(
                lambda: sensitivities(self._decoder, self._checkpoint, probes, "nvfp4", SCALES["mse"])
            )
            chosen = within_budget(measured, share)
            names = [name.removeprefix("model.") for group in chosen for name in group.names]
            self.show({"part": "kept", "share": share, "seconds": seconds, "linears": names})
            self._kept[share] = frozenset(names)
        return self._kept.get(share, frozenset())


def _opened(config: RunConfig) -> Checkpoint:
    return locate(config.model.path).open()


class _Remembered:
    """A checkpoint that reads each tensor but the linears' once; every arm is built of it."""

    def __init__(self, checkpoint: Checkpoint):
        self.path, self.config, self.shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
        self._checkpoint, self._tensors = checkpoint, dict[str, Tensor]()

    def read(self, name: str) -> Tensor:
        if name.endswith("_proj.weight"):
            return self._checkpoint.read(name)
        if name not in self._tensors:
            self._tensors[name] = self._checkpoint.read(name)
        return self._tensors[name]

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self._checkpoint.read_rows(name, rows)
