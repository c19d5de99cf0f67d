import os
import struct
import time

import gguf
import numpy as np
import pytest
import torch

from models.checkpoints import byte_tokens, halves_to_pairs, tiny, write_gguf
from qerl.errors import UserError
from qerl.models.checkpoint import gguf_file
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.state_dict import tensor_shapes
from qerl.models.families import from_hf_config


def open_tiny(tmp_path, family="llama", *, kinds=None, changes=None, **model_changes):
    model = tiny(family, **model_changes)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, kinds=kinds, changes=changes)
    return model, GgufFile(file)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back_under_its_name_and_in_its_order(tmp_path, family):
    model, file = open_tiny(tmp_path, family)
    truth = model.state_dict()
    assert set(file.shapes) == set(truth)
    for name, value in truth.items():
        assert file.shapes[name] == value.shape
        assert torch.equal(file.read(name), value), name


def test_biases_of_a_llama_are_reordered_like_its_weights(tmp_path):
    model, file = open_tiny(tmp_path, attention_bias=True)
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(file.read(name), model.state_dict()[name])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_quantized_tensor_reads_as_the_gguf_package_decodes_it(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    model, file = open_tiny(tmp_path, kinds={"_proj": kind})
    for part, heads in (("up_proj", None), ("q_proj", 4)):
        name = next(name for name in file.shapes if part in name)
        stored = model.state_dict()[name]
        stored = stored if heads is None else halves_to_pairs(stored, heads)
        decoded = torch.from_numpy(gguf.dequantize(gguf.quantize(stored.numpy(), kind), kind))
        got = file.read(name)
        assert torch.equal(got if heads is None else halves_to_pairs(got, heads), decoded)


def test_tensors_are_decoded_on_the_device_that_is_asked_for(tmp_path, device):
    kinds = {"up_proj": "Q8_0", "down_proj": "Q4_0", "v_proj": "Q5_1"}
    model = tiny()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, kinds={part: gguf.GGMLQuantizationType[name] for part, name in kinds.items()})
    there, here = GgufFile(file, device), GgufFile(file)
    for name in here.shapes:
        assert here.read(name).device.type == "cpu"
        assert there.read(name).device.type == device.type
        assert torch.equal(there.read(name).cpu(), here.read(name)), name


def test_a_tensor_of_many_chunks_is_whole(tmp_path, monkeypatch):
    _, file = open_tiny(tmp_path, kinds={"_proj": gguf.GGMLQuantizationType.Q8_0})
    whole = {name: file.read(name) for name in file.shapes}
    monkeypatch.setattr(gguf_file, "_CPU_CHUNK_BYTES", 100)
    for name, tensor in whole.items():
        assert torch.equal(file.read(name), tensor), name


def aged(file, seconds):
    """Set the time of the file's last change back."""
    then = time.time_ns() - seconds * 1_000_000_000
    os.utime(file, ns=(then, then))


def test_decoding_waits_for_no_other_thread_and_leaves_their_number(tmp_path, monkeypatch):
    _, file = open_tiny(tmp_path)
    used, decode = [], gguf_file.decode_blocks
    monkeypatch.setattr(
        gguf_file, "decode_blocks", lambda *a: used.append(torch.get_num_threads()) or decode(*a)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in file.shapes:
            file.read(name)
        assert used and set(used) == {1} and torch.get_num_threads() == 2
        os.truncate(file.path, os.path.getsize(file.path) - 64)
        with pytest.raises(UserError, match="truncated"):
            for name in file.shapes:
                file.read(name)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_file_is_parsed_once_until_it_changes(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), vocabulary={"tokens": byte_tokens()})
    aged(file, 100)
    tokens = GgufFile(file).metadata["tokenizer.ggml.tokens"]
    assert GgufFile(file).metadata["tokenizer.ggml.tokens"] is tokens
    renamed = byte_tokens()
    renamed[-1] = renamed[-1][::-1] if len(renamed[-1]) > 1 else "#"
    write_gguf(file, tiny(), vocabulary={"tokens": renamed})
    aged(file, 50)
    assert GgufFile(file).metadata["tokenizer.ggml.tokens"] == renamed


def test_a_file_that_was_just_written_is_parsed_each_time(tmp_path):
    """Two writes in a tick of the file system's clock have the same time."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), vocabulary={"tokens": byte_tokens()})
    tokens = GgufFile(file).metadata["tokenizer.ggml.tokens"]
    assert GgufFile(file).metadata["tokenizer.ggml.tokens"] is not tokens


def test_what_a_reader_changes_in_its_metadata_no_other_reader_sees(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny())
    aged(file, 100)
    GgufFile(file).metadata.clear()
    assert GgufFile(file).metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_config_describes_the_same_architecture_as_the_original(tmp_path, family, tied):
    model, file = open_tiny(tmp_path, family, tie_word_embeddings=tied)
    original = model.config.to_dict() | {"architectures": [type(model).__name__]}
    assert from_hf_config(file.config) == from_hf_config(original)
    assert tensor_shapes(from_hf_config(file.config)) == file.shapes


def test_a_scaled_rope_is_read_from_the_metadata(tmp_path):
    changes = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4}
    changes |= {"llama.rope.scaling.original_context_length": 32}
    _, file = open_tiny(tmp_path, changes=changes)
    rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
    assert file.config["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        open_tiny(tmp_path, changes=changes)


def test_another_architecture_is_refused_by_name_whatever_tensors_it_has(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma3n")
    writer.add_tensor("blk.0.post_attention_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UserError, match="'gemma3n' is not supported in GGUF; supported: llama, mistral3, qwen2"
    ):
        GgufFile(tmp_path / "g.gguf")


def test_no_prefix_of_a_file_is_taken_for_a_model(tmp_path):
    vocabulary = {"tokens": byte_tokens()}
    write_gguf(tmp_path / "whole.gguf", tiny(num_hidden_layers=1), vocabulary=vocabulary)
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [*range(0, 3000, 53), *range(3000, len(whole), 9973), len(whole) - 32]:
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(UserError, match=r"cut\.gguf: damaged") as caught:
            GgufFile(cut)
        assert "\n" not in str(caught.value)


def test_flipped_bytes_never_raise_anything_but_a_user_error(tmp_path):
    write_gguf(tmp_path / "whole.gguf", tiny(num_hidden_layers=1), vocabulary={"tokens": byte_tokens()})
    whole = (tmp_path / "whole.gguf").read_bytes()
    flipped = tmp_path / "flipped.gguf"
    num_refused = 0
    for at in range(4, 6000, 13):
        flipped.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            from_hf_config(GgufFile(flipped).config)
        except UserError:
            num_refused += 1
    assert num_refused > 100


def text(value):
    return struct.pack("<Q", len(value)) + value


HUGE = 1 << 60
LLAMA = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
EMBED = text(b"token_embd.weight")
DATA = bytes(5000)
LIES = {  # (tensors, keys, what follows the counts)
    "tensors": (HUGE, 1, LLAMA),
    "keys": (0, 2**64 - 1, LLAMA),
    "key's length": (0, 1, struct.pack("<Q", 1 << 40) + b"x"),
    "text's length": (0, 1, text(b"general.architecture") + struct.pack("<IQ", 8, 1 << 40)),
    "numbers": (0, 2, LLAMA + text(b"a") + struct.pack("<IIQ", 9, 10, HUGE)),
    "texts": (0, 2, LLAMA + text(b"a") + struct.pack("<IIQ", 9, 8, 2**64 - 1) + DATA),
    "axes": (1, 1, LLAMA + EMBED + struct.pack("<I", 2**32 - 1) + DATA),
    "offset": (1, 1, LLAMA + EMBED + struct.pack("<IQQIQ", 2, 32, 32, 0, HUGE) + DATA),
    "offset around": (1, 1, LLAMA + EMBED + struct.pack("<IQQIQ", 2, 32, 32, 0, 2**64 - 4096) + DATA),
    "shape": (1, 1, LLAMA + EMBED + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + DATA),
    "a key twice": (0, 2, LLAMA + LLAMA),
    "a tensor twice": (2, 1, LLAMA + 2 * (EMBED + struct.pack("<IQQIQ", 2, 32, 32, 0, 0)) + DATA),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_at_once(tmp_path, name):
    num_tensors, num_keys, rest = LIES[name]
    file = tmp_path / "lies.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest)
    begin_s = time.process_time()
    with pytest.raises(UserError, match=r"lies\.gguf: damaged, or not a GGUF file: "):
        GgufFile(file)
    assert time.process_time() - begin_s < 1.0
