"""Files of every architecture, written as llama.cpp's converter does, against transformers' models."""

import dataclasses
import warnings

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.checkpoints import add_vocabulary
from models.gguf_rows import ROWS, model_of, write_row
from models.tiny import logits_of
from qerl.errors import UserError
from qerl.models.checkpoint.gguf_families import FAMILIES
from qerl.models.checkpoint.gguf_file import TYPES, GgufFile
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import tensor_shapes
from qerl.models.families import from_hf_config
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 27) * 7 % 61


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(row, transformers' model, file), each made once."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def of(name: str):
        if name not in made:
            row = ROWS[name]
            model, file = model_of(row), folder / f"{name}.gguf"
            write_row(file, row, model)
            made[name] = row, model, file
        return made[name]

    return of


def decoder_of(file):
    return build_decoder(GgufFile(file), format="bf16", compute=torch.float32, device=CPU, resident=True)


def test_every_architecture_has_a_row():
    assert {row.arch for row in ROWS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ROWS)
def test_logits_are_those_of_the_model_that_was_written(written, name):
    _, model, file = written(name)
    got, expected = logits_of(decoder_of(file), TOKENS), model(TOKENS[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [name for name in ROWS if name not in ("phi3", "granite4", "mistral3-small")]
)
def test_the_config_describes_the_architecture_of_the_original(written, name):
    """Not of Phi 3's, whose magnitude is in the file; of Granite 4's, which has another list of layers."""
    _, model, file = written(name)
    original = model.config.to_dict() | {"architectures": [type(model).__name__]}
    found, expected = from_hf_config(GgufFile(file).config), from_hf_config(original)
    same = {"family": expected.family, "max_positions": expected.max_positions}
    assert dataclasses.replace(found, **(same if name == "mistral" else {})) == expected
    assert tensor_shapes(found) == GgufFile(file).shapes


READER_SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
READER_SHAPE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA_ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
}
READER_ROWS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "phi3": {"sliding_window": None},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
    | {"final_logit_softcapping": 30.0},  # the reader has no key for these
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_parameters": GEMMA_ROPES},
    "qwen35": ROWS["qwen35"].changes,
}
READER_KEYS = {
    "phi3": {"attention.sliding_window": 0},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"rope.freq_base_swa": 1e4},
}


@pytest.mark.parametrize("name", READER_ROWS)
def test_logits_are_those_of_transformers_own_reader(tmp_path, name):
    row = ROWS[name]
    keys = {key: value for key, value in row.keys.items() if name == "qwen35" or "rope." not in key}
    changes = row.changes | READER_SHAPE | READER_ROWS[name]
    row = dataclasses.replace(
        row, changes=changes, keys=keys | READER_KEYS.get(name, {}), extra=lambda config: {}
    )
    tokens = [f"token {index}" for index in range(61)]  # some readers count them
    write_row(tmp_path / "tiny.gguf", row, model_of(row), vocabulary=lambda w: w.add_token_list(tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"attn_implementation": "eager", "dtype": torch.float32, "pad_token_id": 0}
        reader = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", **settings)
    expected = reader(TOKENS[None]).logits[0].detach()
    assert expected.std() > 0.1
    got = logits_of(decoder_of(tmp_path / "tiny.gguf"), TOKENS)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


NORMAL = np.random.default_rng(0).normal(size=(61, 256)).astype(np.float32)
QUANTIZABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
FROM_BYTES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
FROM_BYTES += ["IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"]


def test_every_type_that_is_supported_is_tested():
    assert {"F32", *QUANTIZABLE, *FROM_BYTES} == set(TYPES)


def finite_bytes(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return bytes that stand for finite weights: random codes with small float16 scales."""
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (61, 256 // block_weights * block_bytes), np.uint8)
    return raw & 0x3F if kind.name in ("IQ1_M", "MXFP4") else np.where(raw == 0x7C, 0x11, raw) & 0xBB


@pytest.mark.parametrize("name", [*QUANTIZABLE, *FROM_BYTES])
def test_every_type_is_decoded_as_the_gguf_package_does(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quantize(NORMAL, kind) if name in QUANTIZABLE else finite_bytes(kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen3")
    for key, value in BARE_KEYS.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    finish(writer)
    expected = gguf.dequantize(raw, kind)
    assert np.isfinite(expected).all() and expected.std() > 0
    assert torch.equal(
        GgufFile(tmp_path / "one.gguf").read("model.embed_tokens.weight"), torch.from_numpy(expected)
    )


BARE_KEYS = {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 64}
BARE_KEYS |= {"attention.head_count": 4}


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SQUARE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("name", ["llama", "phi3", "glm4"])
def test_linears_of_a_quantized_file_hold_what_gguf_decodes(tmp_path, name):
    """Rows of q | k | v and of gate | up, and rows in pairs, are taken from the decoded tensor."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": None}
    changes = SQUARE | plain | {"head_dim": 32}
    row = dataclasses.replace(ROWS[name], changes=changes, keys={}, extra=lambda config: {})
    model, q8 = model_of(row), gguf.GGMLQuantizationType.Q8_0
    kinds = {"_norm": gguf.GGMLQuantizationType.F32, ".weight": q8}
    files = [tmp_path / "q8.gguf", tmp_path / "f32.gguf"]
    for file in files:
        write_row(file, row, model, kinds=kinds, as_float=file is files[1])
    coarse, fine = map(GgufFile, files)
    assert files[0].stat().st_size < files[1].stat().st_size / 2
    for each in coarse.shapes:
        assert torch.equal(coarse.read(each), fine.read(each)), each


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen35", "llama3"])
def test_a_quantized_copy_is_the_same_model(tmp_path, name):
    """write_quantized joins what the class stores as one, and takes 1 from Gemma's norms without a loss."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 320}
    sizes |= {"head_dim": 16} if name == "gemma3" else {}
    sizes |= {"llama3": {"head_dim": 32}, "phi3": {"num_attention_heads": 8}}.get(name, {})
    row = dataclasses.replace(ROWS[name], changes=ROWS[name].changes | sizes)
    write_row(tmp_path / "a.gguf", row, model_of(row), vocabulary=add_vocabulary)
    write_quantized(str(tmp_path / "a.gguf"), tmp_path / "nvfp4")
    found = [
        logits_of(
            build_decoder(each, format="nvfp4", compute=torch.float32, device=CPU, resident=False), TOKENS
        )
        for each in (GgufFile(tmp_path / "a.gguf"), locate(str(tmp_path / "nvfp4")).open())
    ]
    assert torch.equal(*found)


CHANGED_KEYS = {
    "embedding_length_per_layer_input": (
        16,
        "per-layer embeddings .* not supported in GGUF; use the model",
    ),
    "attention.shared_kv_layers": (2, "layers that share keys and values are not supported in GGUF"),
    "expert_count": (8, "mixture of experts"),
    "attention.head_count": ("four", "head_count must be one positive number"),
    "attention.key_length": (0, "key_length must be one positive number"),
    "block_count": (1 << 30, "too few for 1,073,741,824 layers"),
    "nextn_predict_layers": (4, "nextn_predict_layers must be less than 4"),
    "rope.dimension_count": (8, "partial rotary embedding is not supported in llama"),
    "feed_forward_length": (81, "mlp.gate_proj.weight is .* must be"),
}


@pytest.mark.parametrize("key", CHANGED_KEYS)
def test_a_key_that_does_not_fit_is_one_line(tmp_path, key):
    value, says = CHANGED_KEYS[key]
    row = dataclasses.replace(ROWS["llama"], keys={key: value})
    write_row(tmp_path / "odd.gguf", row, model_of(ROWS["llama"]))
    with pytest.raises(UserError, match=says) as caught:
        decoder_of(tmp_path / "odd.gguf")
    assert "\n" not in str(caught.value)


def test_files_that_llama_cpp_cannot_write_have_no_row():
    """Of Qwen3-Next it knows the mixtures only: the architecture's list lacks the tensors of a dense MLP."""
    tensors = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3NEXT]
    assert gguf.MODEL_TENSOR.FFN_UP not in tensors and gguf.MODEL_TENSOR.FFN_UP_EXP in tensors
    assert not any("ministral" in name for name in gguf.MODEL_ARCH_NAMES.values())


def test_divisors_that_are_not_llama_3s_are_refused(tmp_path):
    row = dataclasses.replace(
        ROWS["llama"], extra=lambda config: {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    )
    write_row(tmp_path / "odd.gguf", row, model_of(row))
    with pytest.raises(UserError, match="rope_freqs holds divisors that are not Llama 3's"):
        GgufFile(tmp_path / "odd.gguf")


def test_a_type_that_is_not_decoded_is_refused_with_the_list(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor(
        "token_embd.weight", np.ones((4, 40), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_1
    )
    finish(writer)
    with pytest.raises(
        UserError, match=r"token_embd.weight is of ggml type Q8_1; supported: F32, F16, BF16, Q4_0"
    ):
        GgufFile(tmp_path / "odd.gguf")


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "phi3"])
def test_flipped_bytes_load_or_are_one_line(written, tmp_path, name):
    _, _, file = written(name)
    whole, flipped = file.read_bytes(), tmp_path / "flipped.gguf"
    header = GgufFile(file)._entries["token_embd.weight"].begin
    num_refused = 0
    for at in range(4, header, max(1, header // 120)):
        flipped.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            decoder_of(flipped)
        except UserError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > 20


def test_no_prefix_of_a_file_loads(written, tmp_path):
    _, _, file = written("phi3")
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for num_bytes in range(0, len(whole) - 31, len(whole) // 60):
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(UserError, match="damaged"):
            GgufFile(cut)
