"""`qerl quantize`: quantize a float checkpoint, optionally calibrated on a text (AWQ, GPTQ).

The text is cut into sequences, whose inputs to each linear determine the factors that awq.py folds in. The
float model runs once for that, in bf16 or fp32 as the device allows, and is freed before the search.
"""

import dataclasses
import sys
from functools import partial

import torch
from rich.console import Console

from qerl.config import ModelConfig
from qerl.config.options import QuantizeOptions
from qerl.errors import UserError
from qerl.formats import FORMATS
from qerl.models.checkpoint.encoding import SCALES, SelectScales, encode_weights
from qerl.models.checkpoint.source import Checkpoint, layout_of, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.decoder import Decoder
from qerl.models.device import COMPUTE, resolve_device
from qerl.models.hf_writer import check_output_folder
from qerl.models.layer_spec import check_dense
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_packed, write_quantized
from qerl.models.quantize.awq import ScaledCheckpoint, awq, collect_inputs
from qerl.models.quantize.calibration import calibration_tokens, pack_groups, read_calibration
from qerl.models.quantize.gptq import FLOAT, requantize
from qerl.models.quantize.kept_linears import (
    budget_share,
    describe,
    named_linears,
    sensitivities,
    within_budget,
)
from qerl.models.quantize.quantization_check import TEXT, check_quantization, prompt_probes
from qerl.tracking.progress import print_line, work


def quantize(options: QuantizeOptions) -> None:
    scales = SCALES[options.block_scales]
    if options.calibrate == "gptq":
        _write_gptq(options)
    else:
        fold = None
        if options.calibrate == "awq":
            fold = partial(_fold, sequences=_sequences(options), format=options.format, scales=scales)
        bf16_linears = _bf16_linears(options, scales)
        write_quantized(
            options.model,
            options.out,
            format=options.format,
            scales=scales,
            fold=fold,
            bf16_linears=bf16_linears,
        )
    if (line := _check(options)) is not None:
        print(line, file=sys.stderr)


def _bf16_linears(options: QuantizeOptions, scales: SelectScales) -> tuple[str, ...]:
    """Return the linears of --keep-bf16; a budget is spent on those that a built-in text finds sensitive."""
    if not options.keep_bf16:
        return ()
    check_output_folder(options.out)
    checkpoint = locate(options.model).open()
    if layout_of(checkpoint) is not None:
        raise UserError(f"{options.model}: is quantized already")
    architecture = architecture_of(checkpoint)
    check_dense(architecture, "--keep-bf16")
    share = budget_share(options.keep_bf16)
    if share is None:
        return named_linears(architecture, options.keep_bf16)
    probes = prompt_probes([list(load_tokenizer(options.model)(TEXT)["input_ids"])])
    decoder = _load(checkpoint, resolve_device(ModelConfig(format="bf16")))
    with work(Console(stderr=True), "measuring what rounding each linear costs") as report:
        groups = sensitivities(decoder, checkpoint, probes, options.format, scales, report)
    chosen = within_budget(groups, share)
    print(describe(chosen, groups), file=sys.stderr)
    return tuple(name for group in chosen for name in group.names)


def _write_gptq(options: QuantizeOptions) -> None:
    """Calibrate on a text, or on the prompts and samples of a run's samples.jsonl."""
    check_output_folder(options.out)
    source, model = locate(options.model), resolve_device(ModelConfig())
    device = torch.device(model.device)
    checkpoint = source.open(device)
    if layout_of(checkpoint) is not None:
        raise UserError(f"{options.model}: is quantized already")
    assert options.data is not None
    max_tokens = calibration_tokens(architecture_of(checkpoint), device)
    if options.data.suffix == ".jsonl":
        tokenizer = load_tokenizer(options.model)
        rows = read_calibration(options.data, tokenizer, max_tokens=max_tokens, device=device)
    else:
        groups = [(tokens, []) for tokens in _sequences(options)]
        rows = pack_groups(groups, max_tokens=max_tokens, device=device)
    compute = COMPUTE[model.dtype]
    decoder = build_decoder(checkpoint, format="bf16", compute=compute, device=device, resident=False)
    console = Console(stderr=True)
    settings = dataclasses.replace(FLOAT, select_scales=SCALES[options.block_scales])
    with work(console, "gptq: quantizing") as report:
        requantize(decoder, rows, settings, notice=partial(print_line, console, name="gptq"), report=report)
    write_packed(decoder, source, options.out)


def _check(options: QuantizeOptions) -> str | None:
    """Return the line on what the written weights changed."""
    model = resolve_device(ModelConfig(path=str(options.out), format=options.format))
    decoder = _load(locate(model.path).open(torch.device(model.device)), model)
    text = list(load_tokenizer(options.model)(TEXT)["input_ids"])
    return check_quantization(decoder, options.model, model.format, [text], "a built-in text")


def _load(checkpoint: Checkpoint, model: ModelConfig) -> Decoder:
    return build_decoder(
        checkpoint,
        format=model.format,
        compute=COMPUTE[model.dtype],
        device=torch.device(model.device),
        resident=model.operand == "resident",
    )


def _sequences(options: QuantizeOptions) -> list[list[int]]:
    assert options.data is not None
    try:
        text = options.data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{options.data}: cannot be read as text: {error}") from None
    tokens = list(load_tokenizer(options.model)(text)["input_ids"])
    if not tokens:
        raise UserError(f"{options.data}: is empty")
    length = options.sequence_tokens
    return [tokens[at : at + length] for at in range(0, len(tokens), length)][: options.sequences]


def _fold(
    checkpoint: Checkpoint, *, sequences: list[list[int]], format: str, scales: SelectScales
) -> ScaledCheckpoint:
    architecture, model = architecture_of(checkpoint), resolve_device(ModelConfig(format="bf16"))
    longest = architecture.max_positions
    decoder = _load(checkpoint, model)
    inputs = collect_inputs(decoder, [tokens[:longest] for tokens in sequences])
    del decoder
    kind = FORMATS[format]
    return awq(checkpoint, architecture, inputs, lambda weights: encode_weights(weights, kind, scales))
