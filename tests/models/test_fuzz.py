"""Damaged files give what they hold or a UserError of one line, never another exception.

`python tests/models/test_fuzz.py 100000` tries so many inputs of each kind.
"""

import json
import math
import struct
import sys
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from models.checkpoints import tiny, write_gguf
from models.published import CONFIGS
from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.gguf_file import GgufFile
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.families import from_hf_config

EXAMPLES = int(sys.argv[1]) if __name__ == "__main__" else 300
quick = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

NUMBERS = st.integers() | st.integers(0, 8) | st.floats() | st.sampled_from([2**31, 2**63, 10**40, 1e308])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["4096", "silu", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_KEYS = st.sampled_from(
    [
        *("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast"),
        *("beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
        "original_max_position_embeddings",
    ]
)
ROPE = st.dictionaries(
    ROPE_KEYS, JSON | st.sampled_from(["default", "linear", "llama3", "yarn", 1.0, 2, 8.0, True]), max_size=6
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config} | {"rope_parameters", "partial_rotary_factor"}
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), JSON | ROPE, max_size=4)


def only_user_errors(work):
    """Return the work's result, or None if it refused in one line of a readable length."""
    try:
        return work()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, error
        return None


@quick
@given(st.sampled_from(sorted(CONFIGS)), CHANGES, st.sets(st.sampled_from(KEYS), max_size=2))
def test_any_config_json_is_an_architecture_or_a_user_error(name, changes, left_out):
    config = {key: value for key, value in (CONFIGS[name] | changes).items() if key not in left_out}
    got = only_user_errors(lambda: from_hf_config(config))
    if got is None:
        return
    assert isinstance(got, Architecture)
    counts = (got.num_layers, got.width, got.num_heads, got.num_kv_heads, got.head_size, got.ff_width)
    assert all(
        type(count) is int and 0 < count <= 2**31 for count in (*counts, got.vocab_size, got.max_positions)
    )
    assert got.num_heads % got.num_kv_heads == 0 and got.head_size % 2 == 0
    assert 0 < got.norm_eps < math.inf and 0 < got.rope.theta < math.inf and 0 < got.rope.factor < math.inf


@quick
@given(JSON)
def test_any_json_object_at_all_is_no_crash(value):
    only_user_errors(lambda: from_hf_config(value if isinstance(value, dict) else {"architectures": value}))


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "Q4"]) | JSON,
        "shape": st.lists(st.integers(0, 4) | JSON, max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 64) | JSON, min_size=2, max_size=2) | JSON,
    },
)
HEADERS = st.dictionaries(st.text(max_size=12) | st.just("__metadata__"), ENTRY | JSON, max_size=4)


def opened_safetensors(content: bytes):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(content)

        def work():
            file = SafetensorsFolder(Path(folder))
            return {name: file.read(name) for name in file.shapes}

        return only_user_errors(work)


@quick
@given(HEADERS, st.binary(max_size=64))
def test_any_safetensors_header_is_tensors_or_a_user_error(header, data):
    text = json.dumps(header).encode()
    opened_safetensors(struct.pack("<Q", len(text)) + text + data)


@quick
@given(st.binary(max_size=200))
def test_any_bytes_in_place_of_safetensors_are_no_crash(content):
    opened_safetensors(content)
    opened_safetensors(struct.pack("<Q", max(0, len(content) - 8)) + content)


def test_a_header_that_nests_too_deeply_is_refused():
    text = b"[" * 200_000
    assert opened_safetensors(struct.pack("<Q", len(text)) + text) is None


@cache
def sound_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "tiny.gguf", tiny("llama"))
        return (Path(folder) / "tiny.gguf").read_bytes()


def opened_gguf(content: bytes):
    with tempfile.NamedTemporaryFile(
        suffix=".gguf", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as file:
        file.write(content)
        file.flush()
        return only_user_errors(lambda: from_hf_config(GgufFile(Path(file.name)).config))


EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=4)


@quick
@given(EDITS, st.none() | st.floats(0, 1))
def test_any_damage_to_a_gguf_is_a_config_or_a_user_error(edits, cut):
    """Most of the edits fall into the metadata, which are a small part of the file."""
    content = bytearray(sound_gguf())
    for place, new in edits:
        at = int(place**3 * len(content))
        content[at : at + len(new)] = new
    opened_gguf(bytes(content if cut is None else content[: int(cut * len(content))]))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


KINDS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
VALUES = st.one_of(
    st.tuples(st.just(8), st.binary(max_size=8).map(_string)),
    *(
        st.tuples(st.just(kind), st.binary(min_size=(size := struct.calcsize(f"<{letter}")), max_size=size))
        for kind, letter in KINDS.items()
    ),
    st.tuples(st.just(9), st.just(struct.pack("<IQI", 4, 1, 7))),
)


GGUF_KEYS = [
    *("general.architecture", "general.alignment", "split.count", "llama.expert_count", "llama.block_count"),
    *("llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv"),
    *("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.context_length"),
    *("llama.rope.dimension_count", "llama.attention.key_length", "llama.rope.scaling.type"),
    *("llama.rope.scaling.factor", "llama.feed_forward_length", "tokenizer.ggml.eos_token_id"),
]


@quick
@given(st.data())
def test_any_value_of_a_gguf_key_is_a_config_or_a_user_error(data):
    """A key that is there already is given another type and value: the later one counts."""
    content = sound_gguf()
    num_tensors, num_keys = struct.unpack_from("<QQ", content, 8)
    key = data.draw(st.sampled_from(GGUF_KEYS)).encode()
    kind, value = data.draw(VALUES)
    end = _end_of_metadata(content, num_keys)
    added = _string(key) + struct.pack("<I", kind) + value
    counts = struct.pack("<QQ", num_tensors, num_keys + 1)
    opened_gguf(content[:8] + counts + content[24:end] + added + content[end:] + bytes(64))


@cache
def _end_of_metadata(content: bytes, num_keys: int) -> int:
    import io

    from qerl.models.checkpoint.gguf_file import GgufCursor

    cursor = GgufCursor(io.BytesIO(content), len(content))
    cursor.take(24)
    for _ in range(num_keys):
        cursor.string()
        cursor.value(cursor.number("I"))
    return cursor.offset


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and hasattr(test, "hypothesis"):
            test()
            print(name, EXAMPLES, flush=True)
