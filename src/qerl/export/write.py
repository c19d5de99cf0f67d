"""Export a run into a folder, which appears only when it is complete.

    peft     the adapter: fp32 masters under PEFT's names, adapter_config.json, the tokenizer and a README.md
    base     the model without the adapter, as the run had it: its codes if `qerl quantize` writes the run's
             format, else what the codes decode to, rounded to --dtype
    merged   a plain model: round(W + scaling * B @ A), summed in float64 from the frozen weight in its format
             and rounded once. Hugging Face's names, which llama.cpp's convert_hf_to_gguf.py reads
    nvfp4    the merged model in compressed-tensors' nvfp4-pack-quantized, rounded for its outputs (gptq.py)
    mxfp4    the same in mxfp4-pack-quantized; of gpt-oss the experts as it is published, all else in BF16

Tensors other than the linears' weights are the checkpoint's, also a head that the run had packed.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from qerl.config import ModelConfig, RunConfig
from qerl.config.options import ExportOptions
from qerl.errors import RunError, UserError
from qerl.export.adapter_card import adapter_card, base_commands, trained_on, written_adapter
from qerl.formats import MXFP4, NVFP4
from qerl.learner.checkpoint import latest_adapter, latest_described_adapter
from qerl.models import hf_writer
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.expert_names import float_tensors
from qerl.models.checkpoint.layouts import without_quantization
from qerl.models.checkpoint.layouts.compressed_tensors import WRITTEN
from qerl.models.checkpoint.source import ModelSource, base_name, locate
from qerl.models.checkpoint.stored_names import language_config, stored_tensors
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.decoder import Decoder
from qerl.models.device import COMPUTE
from qerl.models.expert_writing import can_be_written
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import other_tensors, with_dtype, write_packed
from qerl.models.peft.adapter import add_adapter, load_adapter, merged_expert, merged_weight
from qerl.models.peft.peft_reader import ADAPTER, ADAPTER_CONFIG
from qerl.models.quantize.calibration import calibration_tokens, read_calibration
from qerl.models.quantize.gptq import FLOAT, GptqSettings, requantize
from qerl.models.quantize.merge_note import MergeNote, make_note, write_note
from qerl.models.transformers_backend.backend import backend_of
from qerl.tracking.progress import print_line, work

_KINDS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


def export(config: RunConfig, options: ExportOptions) -> None:
    """Export options.run, whose config is `config`."""
    run, out = options.run, options.out
    hf_writer.check_output_folder(out)
    if options.form == "peft":
        write_peft(run, config, out)
    elif options.form == "base":
        write_base(run, config, out, COMPUTE[options.dtype])
    elif options.form in _KINDS:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        max_tokens = options.calibration_tokens
        write_four_bit(run, config, out, options.form, device=device, max_tokens=max_tokens)
    else:
        write_merged(run, config, out, COMPUTE[options.dtype])


def write_peft(run: Path, config: RunConfig, out: Path) -> None:
    if config.adapter.kind != "lora":
        raise UserError(f"{run}: has no adapter, as adapter.kind is full; use --as merged or --as nvfp4")
    if config.adapter.router:
        raise UserError(f"{run}: adapter.router is not written in PEFT's layout; use --as merged")
    adapter, description = latest_described_adapter(run / "checkpoints")
    description |= {"base_model_name_or_path": base_name(config.model.path)}
    write_adapter(adapter, description, config.model, out, run=run)


def write_adapter(
    adapter: dict[str, Tensor],
    description: dict[str, Any],
    model: ModelConfig,
    out: Path,
    *,
    run: Path | None = None,
) -> None:
    """Write the tensors, PEFT's description of them, the tokenizer of the model and a README.md."""
    with hf_writer.atomic_folder(out) as folder:
        save_file(adapter, folder / ADAPTER, metadata={"format": "pt"})
        (folder / ADAPTER).chmod(0o644)  # safetensors lets only the owner read
        hf_writer.write_json(folder / ADAPTER_CONFIG, description)
        try:
            hf_writer.write_tokenizer(folder, locate(model.path))
        except UserError as error:  # the base is gone; the adapter is the user's work
            print(f"the adapter is exported without a tokenizer: {error}", file=sys.stderr)
        card = adapter_card(out.name, model, run, written_adapter(description, adapter))
        (folder / "README.md").write_text(card, errors="backslashreplace")
    if (base := trained_on(model)) is not None:
        how = "".join(f"; `{command}` writes it" for command in base_commands(model, run)[:1])
        print(f"the adapter was trained on {base}{how} (README.md)", file=sys.stderr)


def write_base(run: Path, config: RunConfig, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model on which the adapter was trained."""
    if backend_of(config.model) == "transformers":
        from qerl.export.transformers_merged import write_transformers_merged  # takes seconds to import

        write_transformers_merged(run, config, out, dtype, has_adapter=False)
        return
    decoder, source = load_fp32_base(config, torch.device("cpu")), locate(config.model.path)
    if config.model.format in WRITTEN and can_be_written(decoder.architecture, config.model.format):
        write_packed(decoder, source, out, format=config.model.format)
    else:
        _write_plain(decoder, source, out, dtype, note=lambda folder: None)


def write_merged(run: Path, config: RunConfig, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    if backend_of(config.model) == "transformers":
        from qerl.export.transformers_merged import write_transformers_merged  # takes seconds to import

        write_transformers_merged(run, config, out, dtype)
        return
    decoder, source = load_fp32_policy(run, config, torch.device("cpu")), locate(config.model.path)
    _write_plain(
        decoder,
        source,
        out,
        dtype,
        note=lambda folder: make_note(run, config.model, config.adapter, decoder, locate(str(folder)).open()),
    )


def _write_plain(
    decoder: Decoder,
    source: ModelSource,
    out: Path,
    dtype: torch.dtype,
    *,
    note: Callable[[Path], MergeNote | None],
) -> None:
    """Write the decoder's weights, with their adapters, and what `note` returns for the folder."""
    with hf_writer.atomic_folder(out) as folder:
        tensors = stored_tensors(decoder.architecture, _merged_tensors(decoder, dtype), dtype)
        hf_writer.write_shards(folder, tensors)
        hf_config = without_quantization(language_config(source.open().config))
        hf_writer.write_json(folder / "config.json", with_dtype(hf_config, dtype))
        hf_writer.write_tokenizer(folder, source)
        if (made := note(folder)) is not None:
            write_note(folder, made)


def write_four_bit(
    run: Path, config: RunConfig, out: Path, format: str, *, device: torch.device, max_tokens: int | None
) -> None:
    """max_tokens: tokens to calibrate on, about; None: as many as the device allows."""
    if backend_of(config.model) == "transformers":
        reason = "transformers' code runs its model (model.backend)"
        raise UserError(f"{run}: {reason}; use --as merged or --as peft")
    decoder, source = load_fp32_policy(run, config, device), locate(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    max_tokens = max_tokens or calibration_tokens(decoder.architecture, device)
    rows = read_calibration(run / "samples.jsonl", tokenizer, max_tokens=max_tokens, device=device)
    settings = four_bit_settings(config.model.format, format)
    console = Console(stderr=True)
    notice = partial(print_line, console, name=format)
    try:
        with work(console, f"{format}: quantizing") as report:
            requantize(decoder, rows, settings, notice=notice, report=report)
    except torch.OutOfMemoryError:
        few = f"{max_tokens:,} tokens need more memory than the GPU has free"
        raise RunError(f"{run}: {few}; give fewer --calibration-tokens") from None
    write_packed(decoder, source, out, format=format)


def four_bit_settings(held: str, format: str) -> GptqSettings:
    """Return the settings of a merge into a format over weights held in another or the same one. Those of
    another lose far more to rounding than the adapter changes, as a float model's do."""
    return dataclasses.replace(GptqSettings() if held == format else FLOAT, kind=_KINDS[format])


def load_fp32_policy(run: Path, config: RunConfig, device: torch.device) -> Decoder:
    """Load the run's model, in the run's format, with the adapter of its newest checkpoint."""
    learned, decoder = latest_adapter(run / "checkpoints"), load_fp32_base(config, device)
    add_adapter(decoder, config.adapter, seed=config.seed)
    load_adapter(decoder, learned)
    return decoder


def load_fp32_base(config: RunConfig, device: torch.device) -> Decoder:
    """Load the run's model, in the run's format."""
    model = config.model
    with work(Console(stderr=True), model.loading) as report:
        return build_decoder(
            locate(model.path).open(device),
            format=model.format,
            compute=torch.float32,
            device=device,
            resident=False,
            scales=SCALES[model.block_scales],
            report=report,
        )


def _merged_tensors(decoder: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    yield from other_tensors(decoder, dtype)
    for name, linear in decoder.linears():
        yield f"model.{name}.weight", merged_weight(linear).to(dtype)
    for name, experts in decoder.expert_linears():
        at = f"model.{name.removesuffix(experts.spec.name)}"
        weights = (merged_expert(experts, e).to(dtype) for e in range(experts.spec.num_experts))
        bias_EN = None if experts.bias is None else experts.bias.to(dtype)
        yield from float_tensors(decoder.architecture, at, experts.spec, weights, bias_EN)
