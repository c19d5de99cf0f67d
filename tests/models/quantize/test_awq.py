"""Activation-aware folding: it changes no function, and its quantization errs less than plain rounding."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_run
from models.checkpoints import save_tiny
from qerl.config.options import QuantizeOptions
from qerl.errors import UserError
from qerl.formats import FORMATS
from qerl.formats.block_scale import least_squares
from qerl.models.checkpoint.encoding import default_scales, encode_weights
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import linear_groups
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.families import from_hf_config
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized
from qerl.models.quantize.awq import (
    ScaledCheckpoint,
    awq,
    channel_scales,
    collect_inputs,
    run_sequences,
    search_scales,
)
from qerl.models.quantize.quantize import quantize

FAMILIES = {
    "llama": {},
    "mistral": {"num_key_value_heads": 4},  # every head has a v of its own
    "qwen2": {},  # biases of q, k and v
    "qwen3": {},  # normed heads
}
FORMATS_OF_FAMILIES = (*((family, "nvfp4") for family in FAMILIES), ("llama", "mxfp4"))
TEXT = [[(7 * i + i * i) % 300 + 1 for i in range(start, start + 40)] for start in (0, 13, 90)]


def decoder(checkpoint, *, format="bf16", scales=default_scales):
    return build_decoder(
        checkpoint,
        format=format,
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=False,
        scales=scales,
    )


class Exact:
    """In place of a format: the float weight itself, so that folding alone is seen."""

    def __init__(self, weight_NK):
        self.weight, self.alpha, self.shape = weight_NK.float(), torch.ones(()), tuple(weight_NK.shape)

    def operand(self, dtype):
        return self.weight.to(dtype)


def exact_decoder(checkpoint):
    """With unrounded weights."""
    found = decoder(checkpoint)
    for name, linear in found.linears():
        linear.load_weight(Exact(checkpoint.read(f"model.{name}.weight")))
    return found


def fold(checkpoint, format="nvfp4", scales=default_scales, sequences=TEXT):
    inputs = collect_inputs(exact_decoder(checkpoint), sequences)
    encode = lambda weights: encode_weights(weights, FORMATS[format], scales)  # noqa: E731
    return awq(checkpoint, from_hf_config(checkpoint.config), inputs, encode)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param, **FAMILIES[request.param])
    return SafetensorsFolder(folder)


def test_a_folded_model_computes_the_same_before_it_is_quantized(checkpoint):
    folded = fold(checkpoint)
    a, b = (run_sequences(exact_decoder(one), TEXT) for one in (checkpoint, folded))
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    changed = [name for name in checkpoint.shapes if not folded.read(name).equal(checkpoint.read(name))]
    assert {name.split(".")[-2] for name in changed} >= {"input_layernorm", "q_proj", "v_proj", "o_proj"}
    assert {name.split(".")[-2] for name in changed} >= {"post_attention_layernorm", "up_proj", "down_proj"}


def test_a_folded_norm_is_stored_in_bfloat16_without_rounding(checkpoint):
    folded = fold(checkpoint)
    name = "model.layers.0.input_layernorm.weight"
    read = folded.read(name)
    assert not read.equal(checkpoint.read(name))
    torch.testing.assert_close(read.bfloat16().float(), read, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("checkpoint", "format", "scales"),
    [(*each, least_squares) for each in FORMATS_OF_FAMILIES] + [(*FORMATS_OF_FAMILIES[0], default_scales)],
    indirect=["checkpoint"],
)
def test_each_group_errs_no_more_than_with_plain_rounding(checkpoint, format, scales):
    """By the sum that is searched; before o's and down's factors rescale rows of v and up."""
    inputs = collect_inputs(exact_decoder(checkpoint), TEXT)
    encode = lambda weights: encode_weights(weights, FORMATS[format], scales)  # noqa: E731
    better = 0
    for group in linear_groups(from_hf_config(checkpoint.config)):
        found = inputs[group[0]]
        weights = [checkpoint.read(f"{linear}.weight").float() for linear in group]

        def error(s_K, weights=weights, found=found):
            packed = encode([w * s_K for w in weights])
            return sum(
                ((p.decode() / s_K - w) @ found.rows_SK.T).square().sum()
                for p, w in zip(packed, weights, strict=True)
            )

        ours = error(search_scales(weights, found.mean_K, found.rows_SK, encode))
        plain = error(torch.ones_like(found.mean_K))
        assert ours <= plain
        better += bool(ours < plain)
    assert better > 2


def test_the_inputs_are_those_of_the_linears(checkpoint):
    found = collect_inputs(exact_decoder(checkpoint), TEXT)
    model, seen = exact_decoder(checkpoint), []
    hook = model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    for tokens in TEXT:
        run_sequences(model, [tokens])
    hook.remove()
    ours = found["model.layers.1.mlp.down_proj"]
    torch.testing.assert_close(ours.mean_K, torch.cat(seen).abs().mean(0))
    assert torch.equal(ours.rows_SK, torch.cat(seen))  # 120 rows: all are kept


def test_of_a_long_text_rows_are_kept_evenly(checkpoint):
    found = collect_inputs(exact_decoder(checkpoint), [TEXT[0] * 3] * 10)["model.layers.0.mlp.down_proj"]
    assert len(found.rows_SK) == 512  # of 1,200, every second


def test_factors_are_worked_by_hand():
    # sqrt of 1 4 16: 1 2 4, over sqrt(4 * 1) = 2
    assert channel_scales(torch.tensor([1.0, 4.0, 16.0]), 0.5).tolist() == [0.5, 1.0, 2.0]
    assert channel_scales(torch.tensor([1.0, 4.0, 16.0]), 0.0).tolist() == [1.0, 1.0, 1.0]
    assert channel_scales(torch.tensor([0.0, 1.0]), 1.0).isfinite().all()
    assert channel_scales(torch.zeros(3), 1.0).tolist() == [1.0, 1.0, 1.0]


def test_a_text_without_tokens_is_refused(checkpoint):
    with pytest.raises(UserError, match="text is empty"):
        collect_inputs(exact_decoder(checkpoint), [])


@pytest.mark.parametrize(("checkpoint", "format"), FORMATS_OF_FAMILIES, indirect=["checkpoint"])
def test_what_is_written_is_what_a_folded_checkpoint_decodes_to(checkpoint, tmp_path, format):
    made = []

    def folding(found):
        made.append(fold(found, format, least_squares))
        return made[0]

    write_quantized(
        str(checkpoint.path), tmp_path / "packed", format=format, scales=least_squares, fold=folding
    )
    quantized = locate(str(tmp_path / "packed")).open()
    packed, (folded,) = SafetensorsFolder(tmp_path / "packed"), made
    for group in linear_groups(from_hf_config(packed.config)):
        together = encode_weights(
            [folded.read(f"{linear}.weight") for linear in group], FORMATS[format], least_squares
        )
        for linear, expected in zip(group, together, strict=True):
            read = quantized.packed(linear)
            assert torch.equal(read.decode(), expected.decode())
    if format == "nvfp4":
        q, k = (packed.read(f"model.layers.0.self_attn.{n}_proj.weight_global_scale") for n in "qk")
        assert torch.equal(q, k)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_transformers_decompresses_calibrated_weights_to_the_same(tmp_path, format):
    save_tiny(tmp_path / "float", "llama")
    write_quantized(
        str(tmp_path / "float"),
        tmp_path / "packed",
        format=format,
        scales=least_squares,
        fold=lambda found: fold(found, format, least_squares),
    )
    packed = SafetensorsFolder(tmp_path / "packed")
    quantized = locate(str(tmp_path / "packed")).open()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))
    for group in linear_groups(from_hf_config(packed.config)):
        for linear in group:
            ours = quantized.packed(linear).decode()
            theirs = model.get_submodule(linear).weight.float()
            torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)


def test_the_command_writes_what_its_options_say(tmp_path):
    tiny_run.write_model(tmp_path / "float")
    (tmp_path / "text.txt").write_text("What is 4 + 9? It is 13. " * 20)
    written = {}
    for scales, calibrate in (("plain", "none"), ("mse", "none"), ("plain", "awq"), ("mse", "awq")):
        out = tmp_path / f"{scales}-{calibrate}"
        texts = {"data": tmp_path / "text.txt", "sequences": 3, "sequence_tokens": 100}
        quantize(
            QuantizeOptions(
                model=str(tmp_path / "float"),
                out=out,
                scales=scales,
                calibrate=calibrate,
                **(texts if calibrate == "awq" else {}),
            )
        )
        written[out.name] = SafetensorsFolder(out)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    scales = [found.read(name).view(torch.uint8) for found in written.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(scales) for b in scales[:i])
    norms = [found.read("model.layers.0.input_layernorm.weight").float() for found in written.values()]
    assert torch.equal(norms[0], norms[1]) and not torch.equal(norms[0], norms[2])


def test_a_text_that_is_none_is_refused(tmp_path):
    tiny_run.write_model(tmp_path / "float")
    for content, says in ((b"", "is empty"), (b"\xff\xfe", "cannot be read as text")):
        (tmp_path / "text.txt").write_bytes(content)
        options = QuantizeOptions(
            model=str(tmp_path / "float"),
            out=tmp_path / "out",
            calibrate="awq",
            data=tmp_path / "text.txt",
        )
        with pytest.raises(UserError, match=says):
            quantize(options)
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_a_real_layer_the_output_errs_less_than_with_plain_rounding(smollm2):
    """SmolLM2's first layer, on another text than the calibration's."""
    errors = real_errors(locate(str(smollm2)).open(), "nvfp4", num_layers=1)
    assert errors["awq"] < 0.97 * errors["plain"]


def real_errors(checkpoint, format, num_layers):
    checkpoint.config = checkpoint.config | {"num_hidden_layers": num_layers}
    shapes = checkpoint.shapes
    checkpoint.shapes = {
        n: s for n, s in shapes.items() if ".layers." not in n or int(n.split(".")[2]) < num_layers
    }
    tokenizer = load_tokenizer(str(checkpoint.path))
    words = "The quick brown fox counts 17 + 25 sheep while the old king reads a letter about 3 ships. "
    tokens = tokenizer(words * 12 + "What is 4 + 9? Answer with just the number. 13")["input_ids"]
    other = tokenizer("How many times does the letter b appear in the word rabbit? Twice, I think: 2.")
    model = exact_decoder(checkpoint)
    inputs, test = collect_inputs(model, [tokens]), collect_inputs(model, [other["input_ids"]])
    encode = lambda weights: encode_weights(weights, FORMATS[format])  # noqa: E731
    folded = awq(checkpoint, from_hf_config(checkpoint.config), inputs, encode)
    found = {}
    for name, source in (("plain", ScaledCheckpoint(checkpoint, {})), ("awq", folded)):
        total = 0.0
        for group in linear_groups(from_hf_config(checkpoint.config)):
            packed = encode([source.read(f"{linear}.weight").float() for linear in group])
            for linear, weight in zip(group, packed, strict=True):
                plain_NK = checkpoint.read(f"{linear}.weight").float()
                x_SK = test[group[0]].rows_SK
                s_K, s_N = source.columns(f"{linear}.weight"), source.rows(f"{linear}.weight")
                error_SN = x_SK @ (weight.decode() / s_N[:, None] / s_K - plain_NK).T
                total += (error_SN.norm() / (x_SK @ plain_NK.T).norm()).item() ** 2
        found[name] = total**0.5
    return found
