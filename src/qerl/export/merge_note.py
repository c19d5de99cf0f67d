"""Measure, on a run's own samples, how far its training and the merge move the predictions."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

from qerl.config import AdapterConfig, ModelConfig
from qerl.models.checkpoint.source import Checkpoint, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.decoder import Decoder
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import adapter_off
from qerl.models.quantize.calibration import tokenize_groups
from qerl.models.quantize.merge_note import MAX_PROBE_TOKENS, MergeNote
from qerl.models.quantize.quantization_error import Probe, quantization_error


def make_note(
    run: Path, model: ModelConfig, adapter: AdapterConfig, policy: Decoder, merged: Checkpoint
) -> MergeNote | None:
    """Return the note for a run's merged model; None if the run has no samples to measure on."""
    probes = tuple(run_probes(run, model.path))
    if not probes:
        return None
    is_full = adapter.kind == "full"
    base = _load_base(model, policy) if is_full else policy
    with contextlib.nullcontext() if is_full else adapter_off(base):
        base_kl = quantization_error(base, merged, probes).kl
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


def _load_base(model: ModelConfig, policy: Decoder) -> Decoder:
    return build_decoder(
        locate(model.path).open(),
        format=model.format,
        compute=policy.compute,
        device=policy.device,
        resident=False,
    )
