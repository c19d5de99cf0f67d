"""A model that others wrote: token ids that are none, sizes beyond all memory, files that never end."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny_run
from models.checkpoints import tiny, write_gguf
from qerl.config import ModelConfig, RunConfig
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.loader import build_decoder
from qerl.tasks.memory_limit import limit_memory
from qerl.training.policy import load_sampler


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(sound, tmp_path):
    """A copy that a test may spoil."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


NO_IDS = ["</s>", 1.5, True, -1, 1 << 31, 10**400, [2, "x"], [[2]], [None, {}], {"id": 2}]


@pytest.mark.parametrize("listed", NO_IDS, ids=lambda listed: repr(listed)[:20])
def test_an_eos_of_the_generation_config_that_is_no_token_id_is_one_line(model, listed):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    said = r"generation_config\.json: eos_token_id must be a token id or a list of them, got .{1,80}$"
    with pytest.raises(UserError, match=said):
        stop_token_ids(load_tokenizer(str(model)), locate(str(model)))


@pytest.mark.parametrize(("listed", "ids"), [(7, {7}), ([7, 9], {7, 9}), ([7, None], {7}), (None, {2})])
def test_eos_tokens_that_are_ids_are_taken(model, listed, ids):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = load_tokenizer(str(model))
    assert stop_token_ids(tokenizer, locate(str(model))) == frozenset([tokenizer.eos_token_id]) | ids


@pytest.mark.parametrize("key", ["eot_token_id", "padding_token_id"])
def test_a_token_id_of_a_gguf_that_is_a_text_is_one_line(tmp_path, key):
    path, changes = tmp_path / "tiny.gguf", {f"tokenizer.ggml.{key}": "</s>"}
    write_gguf(path, tiny(num_hidden_layers=1), vocabulary={}, changes=changes)
    with pytest.raises(UserError, match=rf"tiny\.gguf: tokenizer\.ggml\.{key} (must be a token id|is </s>)"):
        stop_token_ids(load_tokenizer(str(path)), locate(str(path)))


def refusal(work: Callable[[], object]) -> str:
    """The UserError of work that has 60 seconds, 20 of them on a processor, and 1 GB; "" if it ends well."""

    def boxed() -> None:
        limit_memory(1 << 30)  # not addresses: tokenizers makes a thread for each core
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        try:
            work()
        except UserError as error:
            print(error)

    process = tiny_run.Forked(boxed)
    try:
        stdout, stderr = process.communicate(60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert stdout.count("\n") <= 1 and len(stdout) < 1000
    return stdout.rstrip("\n")


def load(model: Path) -> None:
    """Load a model as a run does before it samples."""
    checkpoint = locate(str(model)).open()
    architecture_of(checkpoint)
    stop_token_ids(load_tokenizer(str(model)), locate(str(model)))
    build_decoder(checkpoint, format="bf16", compute=torch.float32, device=torch.device("cpu"), resident=True)


def with_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 65,536"),
        ({"num_hidden_layers": 65_536}, "num_hidden_layers is 65,536, but it has only 20 tensors"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": 10**12}, "vocab_size must be at most 2,147,483,648"),
        ({"vocab_size": 1 << 31, "hidden_size": 1 << 31}, "model.embed_tokens.weight is [272, 64], must be"),
        ({"intermediate_size": 1 << 31}, "is [96, 64], must be [2147483648, 64]"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"hidden_size": -64}, "hidden_size must be a positive integer"),
        ({"num_attention_heads": 10**400}, "num_attention_heads must be at most 2,147,483,648"),
        ({"head_dim": 1 << 31}, "must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"num_labels": 10**9}, ""),
    ],
)
def test_sizes_that_no_file_has_are_refused_before_memory_is_taken(model, changes, said):
    with_config(model, **changes)
    told = refusal(lambda: load(model))
    assert said in told and bool(said) == bool(told)


READ = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


@pytest.mark.parametrize("name", READ)
def test_a_file_of_a_model_that_does_not_end_is_refused(model, name):
    """A fifo without a writer, /dev/zero, and a terabyte without a block on the disk."""
    path = model / name
    for kind in ("fifo", "endless", "huge"):
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        else:
            with path.open("wb") as file:
                file.truncate(1 << 40)
        told = refusal(lambda: load(model))
        assert told.startswith(str(model)), (kind, told)
        assert name in told or told.endswith(("config.json is missing", "none is there")), (kind, told)


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_a_model_that_is_no_file_is_refused(tmp_path, kind, suffix):
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    assert "no such folder or file" in refusal(lambda: load(path))


@pytest.mark.parametrize("header_bytes", [1 << 63, (1 << 64) - 1, 100_000_001, 1 << 30])
def test_a_header_of_safetensors_with_a_huge_length_is_refused_unread(model, header_bytes):
    with (model / "model.safetensors").open("wb") as file:
        file.write(header_bytes.to_bytes(8, "little") + b"{")
        file.truncate(1 << 31)
    assert "its header is incomplete" in refusal(lambda: load(model))


def test_a_tensor_of_safetensors_with_a_huge_shape_is_refused_unread(model):
    """2^62 x 4 bytes overflow 64 bits to 0, which the offsets say."""
    entry = {"dtype": "F32", "shape": [1 << 31, 1 << 31], "data_offsets": [0, 0]}
    text = json.dumps({"model.norm.weight": entry}).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "model.norm.weight: its offsets 0..0 do not fit F32" in refusal(lambda: load(model))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("depth", [300, 100_000])
def test_json_of_a_model_that_nests_deeply_is_refused_or_not_read(model, name, depth):
    sound = (model / name).read_text().rstrip().removesuffix("}")
    (model / name).write_text(f'{sound}, "x": {"[" * depth}{"]" * depth}}}')
    told = refusal(lambda: load(model))
    assert "nests deeper" in told if name == "config.json" else not told or "its tokenizer cannot be" in told


def with_token_id(tokenizer, index):
    tokenizer["model"]["vocab"]["h"] = index


def with_first_token(tokenizer, index):
    special = {"<s>": {"id": "<s>", "ids": [index], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    tokenizer["post_processor"] = post


@pytest.mark.parametrize("change", [with_token_id, with_first_token])
@pytest.mark.parametrize("index", [272, 5000, (1 << 32) - 1])
def test_a_token_that_the_model_does_not_have_is_refused_by_its_name(model, change, index):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    change(tokenizer, index)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = refusal(lambda: sampler_of(model))
    assert f"token {index}" in told and "272" in told and "\n" not in told


def test_a_tokenizer_that_makes_no_token_is_refused(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "makes no token of a text" in refusal(lambda: sampler_of(model))


def sampler_of(model):
    config = RunConfig(model=ModelConfig(path=str(model), dtype="fp32", device="cpu"))
    return load_sampler(config, load_tokenizer(str(model)))
