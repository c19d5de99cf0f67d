"""A model that others wrote: token ids that are none, sizes beyond all memory, files that never end."""

import json
import shutil
from pathlib import Path

import pytest

import tiny_run
from models.checkpoints import tiny, write_gguf
from qerl.errors import UserError
from qerl.models.source import locate
from qerl.models.tokenizer import load_tokenizer, stop_token_ids


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


@pytest.mark.parametrize(("listed", "ids"), [(7, {7}), ([7, 9], {7, 9}), ([7, None], {7}), (None, set())])
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
