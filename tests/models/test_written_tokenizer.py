"""The tokenizer of a written folder has the tokens of the original, and its warning of transformers, if any.

Of a Mistral that transformers 4 saved, transformers 5 says that the tokenizer's pattern is wrong, whatever
it is.
"""

import json
import logging
import shutil

import pytest
import transformers
from transformers import AutoTokenizer

from models.checkpoints import byte_tokens, save_tiny, tiny, write_gguf
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.packed_writer import write_quantized

TEXTS = (
    *(
        "12345 + 67890 = 80,235.50",
        "I'm sure they've DON'T it'll we'd",
        "你好，世界！123年 日本語テスト",
        "한국어 ไทย",
    ),
    *(
        "def f(x):\n\treturn x**2  # y\n\n\n",
        "🙂👩‍👩‍👧 naïve café",
        "HelloWorld camelCase ABCdef",
        "  a\r\n b\u00a0c  ",
    ),
)
WORDS = [f"word{i}" for i in range(100_001)]  # transformers looks at vocabularies of more than 100,000 alone


@pytest.fixture
def warnings_of():
    """The function returns how often transformers warns of the pattern when it loads a folder's tokenizer."""
    lines, logger = [], transformers.utils.logging.get_logger("transformers")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)  # another test may have set a higher one

    def count(folder):
        lines.clear()
        AutoTokenizer.from_pretrained(folder)
        return sum("incorrect regex pattern" in line for line in lines)

    yield count
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def mistral_gguf(tmp_path_factory):
    tokens = [*byte_tokens(), *WORDS]
    model = tiny("mistral", vocab_size=len(tokens))
    model.config.model_type = "mistral3"
    file = tmp_path_factory.mktemp("gguf") / "mistral.gguf"
    write_gguf(file, model, vocabulary={"pre": "tekken", "tokens": tokens})
    return file


def test_a_folder_written_from_a_mistral_gguf_has_its_tokens_and_no_warning(
    mistral_gguf, tmp_path, warnings_of
):
    write_quantized(str(mistral_gguf), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mistral"
    assert warnings_of(tmp_path / "out") == 0
    ours, written = load_tokenizer(str(mistral_gguf)), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert written(text)["input_ids"] == ours(text)["input_ids"], text
    del config["transformers_version"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert warnings_of(tmp_path / "out") == 1, "transformers no longer warns: this file can go"


@pytest.mark.parametrize(
    ("family", "version"),
    [
        *(("mistral", version) for version in ("5.24.0", "4.51.0", None)),
        *(("qwen2", "4.51.0"), ("llama", None)),
    ],
)
def test_a_folder_written_from_a_folder_has_its_tokens_and_its_warning(
    mistral_gguf, tmp_path, warnings_of, family, version
):
    tokenizer = load_tokenizer(str(mistral_gguf))
    save_tiny(tmp_path / "model", family, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"transformers_version": version}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    write_quantized(str(tmp_path / "model"), tmp_path / "out")
    warned = warnings_of(tmp_path / "model")
    assert warnings_of(tmp_path / "out") == warned == (family == "mistral" and version != "5.24.0")
    written = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert written(text)["input_ids"] == tokenizer(text)["input_ids"], text
    shutil.rmtree(tmp_path / "out")
