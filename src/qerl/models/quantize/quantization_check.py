"""Say in one line what quantizing a float checkpoint changed, and warn if it changed too much.

With the note of `export --as merged` (merge_note.py) the line says which share of the learned change is left.
Without one, weights that lie on the format's grid already are the sign of a merge into quantized weights:
NVFP4 moves others by 9.5 %, the demo's merged model by 0.2 %, and undoes what was learned.
"""

import itertools
from collections.abc import Sequence

from qerl.models.checkpoint.notices import is_exact, kinds
from qerl.models.checkpoint.source import Checkpoint, layout_of, locate
from qerl.models.decoder import Decoder
from qerl.models.policy_model import PolicyModel
from qerl.models.quantize.merge_note import MAX_PROBE_TOKENS, MergeNote, read_note
from qerl.models.quantize.quantization_error import Probe, QuantizationError, quantization_error

MIN_KEPT = 0.95
"""Models that kept more had at least 0.95 of the accuracy, others less than 0.8: dev/log/quantization.md."""
MAX_KL = 0.5
"""Nats a token. SmolLM2-135M in NVFP4 shows 0.2 to 0.43, larger models show less."""
CALIBRATE_KL = 0.02
"""Nats a token: Qwen2.5-Coder-0.5B and 1.5B show 0.055 and 0.039 on GSM8K, calibrated 0.013 and 0.011."""
GRID_WEIGHT_ERROR, GRID_KL = 0.02, 0.01
FOUR_BITS = "nvfp4", "mxfp4", "nf4"
ADVICE = (
    "train with --model.calibrate gptq (else: qerl quantize --calibrate gptq), keep the adapter separate"
    " (--init-adapter), or use --model.format fp8 or bf16"
)
CALIBRATE = "--model.calibrate gptq leaves less of it (docs/models.md, What 4 bits cost)"
TEXT = (
    "The river rises in the mountains in the north of the country and flows through three valleys before it"
    " reaches the sea. Water is a chemical compound of hydrogen and oxygen. To compute the area of a circle,"
    " multiply the square of its radius by pi. def add(a, b): return a + b. In 1969, two people walked on the"
    " moon for the first time. She asked him whether he had read the book, and he said that he had not."
)
"""Text to measure on where there is no task."""


def prompt_probes(prompts: Sequence[Sequence[int]], max_tokens: int | None = MAX_PROBE_TOKENS) -> list[Probe]:
    """Return probes of prompts, without what all of them begin with; one is measured as a whole, also where
    the prompts are equal as far as they are measured. max_tokens: of all; None: no limit."""
    alike = (len(set(column)) == 1 for column in zip(*prompts, strict=False))
    shared = sum(itertools.takewhile(bool, alike)) if len(prompts) > 1 else 0
    probes, num_tokens = [], 0
    for tokens in prompts:
        tokens_T = list(tokens[: None if max_tokens is None else max_tokens - num_tokens])
        if len(tokens_T) > shared:
            probes.append(Probe(tokens_T=tokens_T, start=max(shared - 1, 0)))
            num_tokens += len(tokens_T)
    return probes or [Probe(tokens_T=list(prompts[0][:max_tokens]), start=0)]


def check_quantization(
    decoder: PolicyModel,
    path: str,
    format: str,
    prompts: Sequence[Sequence[int]],
    of: str = "the task's prompts",
    advice: str = ADVICE,
    original: Checkpoint | None = None,
    remedy: str = "",
) -> str | None:
    """Return the line about a decoder loaded from `path`; None if it was not quantized at load. `of` says
    whose tokens the prompts are; a warning ends with the advice, a line about a KL above CALIBRATE_KL with
    the remedy. original: the path's checkpoint, if it is open. Codes of a quantized checkpoint that fit the
    format are loaded without a change, so there is no line; others are compared to what they decode to, and
    the line names the layout."""
    if not isinstance(decoder, Decoder):  # the float weights of transformers' model are not kept
        return None
    checkpoint = locate(path).open(decoder.device) if original is None else original
    layout = layout_of(checkpoint)
    if format == "bf16" or (layout is not None and is_exact(layout, format)):
        return None
    if layout is not None:
        remedy = ""  # it takes float weights
        format = f"{format} of {kinds(layout)} in {layout.name}'s layout"
    note = read_note(checkpoint.path, decoder.architecture.vocab_size)
    probes = prompt_probes(prompts) if note is None else note.probes
    return describe(quantization_error(decoder, checkpoint, probes), format, note, of, advice, remedy)


def describe(
    error: QuantizationError,
    format: str,
    note: MergeNote | None,
    of: str,
    advice: str = ADVICE,
    remedy: str = "",
) -> str:
    kl = f"KL to the float weights {error.kl:.3f} nats per token"
    if note is not None:
        kept_share = note.kept_share(error.kl)
        line = (
            f"{format} keeps {kept_share:.0%} of what {note.run} learned: {kl} ({note.base_kl:.3f} of the"
            f" model before training), top-1 agreement {error.agreement:.0%},"
            f" over {error.num_tokens} tokens of its samples"
        )
        return line if kept_share >= MIN_KEPT else f"warning: {line}; {advice}"
    line = f"{format}: {kl}, top-1 agreement {error.agreement:.0%}, over {error.num_tokens} tokens of {of}"
    is_on_grid = format in FOUR_BITS and error.weight_error < GRID_WEIGHT_ERROR
    if is_on_grid and error.kl > GRID_KL:
        line += (
            f"; the float weights are already within {error.weight_error:.1%} of values of {format}: if this"
            " is a merged model, rounding undoes what it learned"
        )
    elif error.kl <= MAX_KL:
        return f"{line}; {remedy}" if remedy and error.kl > CALIBRATE_KL else line
    return f"warning: {line}; {advice}"
