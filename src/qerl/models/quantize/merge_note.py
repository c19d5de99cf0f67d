"""The note beside a merged model: what was merged into which model, and how far that moved the predictions.

`export --as merged` makes it, measured on the run's own samples. Loading the model in 4 bits reads it,
measures the KL on its tokens, and reports

    kept share = 1 - KL(merged || quantized) / KL(merged || base)

The demo's run showed that this share of the gain in accuracy remains: dev/log/quantization.md.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from qerl.config import AdapterConfig, ModelConfig
from qerl.errors import UserError
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.model_folder import read_json
from qerl.models.checkpoint.source import Checkpoint, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.decoder import Decoder
from qerl.models.hf_writer import write_json
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import adapter_off
from qerl.models.quantize.calibration import tokenize_groups
from qerl.models.quantize.quantization_error import Probe, quantization_error

NOTE = "qerl_merge.json"
MAX_PROBE_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergeNote:
    """MergeNote(run="runs/demo", base="smollm2-135m-instruct", base_format="nvfp4", adapter={"rank": 32},
    base_kl=0.88, merged_kl=0.0002, probes=(Probe(...),))"""

    run: str
    base: str
    base_format: str
    adapter: dict[str, Any]
    """The run's AdapterConfig."""
    base_kl: float
    """KL(merged || base) on the probes, nats a token."""
    merged_kl: float
    """KL(merged || adapter apart): what rounding to the merged model's dtype loses."""
    probes: tuple[Probe, ...]
    """Prompts and samples of the run, at most MAX_PROBE_TOKENS tokens."""

    def kept_share(self, kl: float) -> float:
        """Return the share of the learned change that a model at this KL from the merged one keeps."""
        return min(max(1 - kl / self.base_kl, 0.0), 1.0) if self.base_kl > 0 else 1.0


def write_note(folder: Path, note: MergeNote) -> None:
    write_json(folder / NOTE, dataclasses.asdict(note))


def read_note(path: Path, vocab_size: int) -> MergeNote | None:
    """Return the note of a model's folder; None if it has none."""
    if not (path / NOTE).is_file():
        return None
    values = read_json(path / NOTE)
    try:
        probes = tuple(Probe(**probe) for probe in values.pop("probes"))
        note = MergeNote(probes=probes, **values)
        is_valid = (
            all(_is_valid(probe, vocab_size) for probe in probes) and note.base_kl >= 0 <= note.merged_kl
        )
    except (KeyError, TypeError, AttributeError):
        is_valid, note = False, None
    if not is_valid or not note or not note.probes:
        raise UserError(f"{path / NOTE}: is damaged; delete it, or export the model again")
    return note


def _is_valid(probe: Probe, vocab_size: int) -> bool:
    tokens_T = probe.tokens_T
    are_known = all(type(token) is int and 0 <= token < vocab_size for token in tokens_T)
    return are_known and 0 <= probe.start < len(tokens_T) <= MAX_PROBE_TOKENS


def make_note(
    run: Path, model: ModelConfig, adapter: AdapterConfig, policy: Decoder, merged: Checkpoint
) -> MergeNote | None:
    """Return the note for a run's merged model; None if the run has no samples to measure on."""
    probes = tuple(run_probes(run, model.path))
    if not probes:
        return None
    if adapter.kind == "full":
        source = locate(model.path).open(policy.device)
        like = {"compute": policy.compute, "device": policy.device, "scales": SCALES[model.block_scales]}
        base = build_decoder(source, format=model.format, resident=False, **like)
        base_kl = quantization_error(base, merged, probes).kl
    else:
        with adapter_off(policy):
            base_kl = quantization_error(policy, merged, probes).kl
    return MergeNote(
        run=str(run),
        base=model.path,
        base_format=model.format,
        adapter=dataclasses.asdict(adapter),
        base_kl=base_kl,
        merged_kl=quantization_error(policy, merged, probes).kl,
        probes=probes,
    )


def run_probes(run: Path, model: str) -> list[Probe]:
    """Return the run's newest prompts, each with one of its samples, MAX_PROBE_TOKENS tokens at most."""
    if not (run / "samples.jsonl").is_file():
        return []
    groups = tokenize_groups(run / "samples.jsonl", load_tokenizer(model), max_lines=MAX_PROBE_TOKENS)
    probes = [_probe(prompt, samples[0]) for prompt, samples in groups if prompt]
    totals = itertools.accumulate(len(probe.tokens_T) for probe in probes)
    return [probe for probe, total in zip(probes, totals, strict=True) if total <= MAX_PROBE_TOKENS]


def _probe(prompt: list[int], sample: list[int]) -> Probe:
    """Return what predicts the sample's tokens; a long prompt loses its start, a long sample its end."""
    prompt, sample = prompt[-MAX_PROBE_TOKENS // 2 :], sample[: MAX_PROBE_TOKENS // 2]
    return Probe(tokens_T=prompt + sample[:-1], start=len(prompt) - 1)
