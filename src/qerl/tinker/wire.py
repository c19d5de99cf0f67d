"""Read and write the protobuf messages of Tinker's API: requests and results of passes, results of samples.

    message   fields, each a varint tag = number * 8 + kind, then its value
    kind      0 varint    1 eight bytes    2 a varint length and as many bytes    5 four bytes

Tensors are little-endian bytes with a dtype. The numbers below are those of tinker_public.proto, as the
client tinker 0.38.0 sends and reads them. The messages have few fields, so that neither protobuf's package
nor generated code is needed.
"""

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), 3: np.dtype("<i4")}
_NO_LOGPROB = -99999.0  # of a place without a token in a table of the most likely ones
_STOP_REASONS = {"stop": 0, "length": 1}
_MAX_DATA = 10_000  # sequences of a request; the client sends at most 1,024
_MAX_FIELDS = 1_000_000  # a second's work: 16 MB may be 8 million


class WireError(ValueError):
    """Bytes that are not the message that was expected; the text is for the client."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """A sequence to learn from: inputs["target_tokens"][t] is predicted after tokens_T[: t + 1]."""

    tokens_T: np.ndarray
    inputs: dict[str, np.ndarray]
    """Arrays of the loss by name: target_tokens, weights, logprobs, advantages. [T]; for cross_entropy also
    [T, K], several targets per position."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A forward pass, and a backward pass unless is_forward_only."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float | str]
    is_forward_only: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    tokens_T: list[int]
    logprobs_T: list[float]
    stop_reason: str
    """stop or length."""
    top_T: list[Sequence[tuple[int, float]]] | None = None
    """The most likely tokens with their logprobs, in place of each token; None: not asked for."""


def read_pass_request(body: bytes) -> PassRequest:
    """Raise WireError for bytes that are not a ForwardBackwardRequest, and for unsupported content."""
    strings, seq_id, is_forward_only = {1: "", 4: ""}, 0, False
    data: list[Datum] = []
    config: dict[str, float | str] = {}
    budget = _Budget(_MAX_FIELDS)
    for number, value in _fields(body, budget):
        if number in strings:
            strings[number] = _text(value)
        elif number == 2:
            seq_id = _int(value)
        elif number == 3:
            if len(data) == _MAX_DATA:
                raise WireError(f"the body has more than {_MAX_DATA} sequences")
            data.append(_datum(_bytes(value), len(data), budget))
        elif number == 5:
            key, each = _entry(value, budget)
            config.setdefault(key, _double(each))
        elif number == 6:
            is_forward_only = bool(_int(value))
        elif number == 7:
            key, each = _entry(value, budget)
            config[key] = _config_value(each, budget)
    return PassRequest(
        model_id=strings[1],
        seq_id=seq_id,
        data=data,
        loss_fn=strings[4],
        loss_config=config,
        is_forward_only=is_forward_only,
    )


def write_pass_result(logprobs_D_T: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput with the logprobs of each datum's targets, fp32, in their shape."""
    runs = itertools.groupby(logprobs_D_T, lambda each: each.shape[1:])
    records = [_field(2, _record(list(run), shape)) for shape, run in runs]
    entries = [_field(3, _field(1, name) + _field(2, float(value))) for name, value in metrics.items()]
    return _field(1, "ArrayRecord") + b"".join(records) + b"".join(entries)


def _record(arrays_D: Sequence[np.ndarray], trailing_shape: tuple[int, ...]) -> bytes:
    """Return an ArrayRecord of arrays that differ in their first dimension only."""
    offsets = np.cumsum([0, *(4 * each.size for each in arrays_D)], dtype="<i8")
    flat = np.concatenate([each.ravel() for each in arrays_D]).astype("<f4")
    batched = _field(1, flat.tobytes()) + _field(2, offsets.tobytes()) + _field(3, _FLOAT32)
    batched += b"".join(_field(4, size) for size in trailing_shape)
    return _field(2, _field(1, "logprobs") + _field(2, batched)) + _field(3, len(arrays_D))


def write_sample_result(
    sequences: Sequence[SampledTokens],
    *,
    prompt_logprobs_T: Sequence[float | None] | None = None,
    prompt_top_T: Sequence[Sequence[tuple[int, float]]] | None = None,
    num_top_prompt: int = 0,
    num_top: int = 0,
) -> bytes:
    """Return a SampleResponse. prompt_logprobs_T: None where nothing predicts a token; None as a whole: not
    asked for. num_top: columns of the tables of most likely tokens."""
    parts = [_field(1, _sequence(each, num_top)) for each in sequences]
    if prompt_logprobs_T is not None:
        values = [float("nan") if each is None else each for each in prompt_logprobs_T]
        parts.append(_field(2, np.array(values, dtype="<f4").tobytes()))
    if prompt_top_T is not None:
        parts.append(_field(3, _top_table(prompt_top_T, num_top_prompt)))
    return b"".join(parts)


def _sequence(sample: SampledTokens, num_top: int) -> bytes:
    tokens, logprobs = np.array(sample.tokens_T, dtype="<i4"), np.array(sample.logprobs_T, dtype="<f4")
    parts = [_field(1, _STOP_REASONS[sample.stop_reason]), _field(2, tokens.tobytes())]
    parts.append(_field(3, logprobs.tobytes()))
    if sample.top_T is not None:
        parts.append(_field(4, _top_table(sample.top_T, num_top)))
    return b"".join(parts)


def _top_table(top_T: Sequence[Sequence[tuple[int, float]]], num_top: int) -> bytes:
    tokens, logprobs = (
        np.zeros((len(top_T), num_top), "<i4"),
        np.full((len(top_T), num_top), _NO_LOGPROB, "<f4"),
    )
    for row, pairs in enumerate(top_T):
        for column, (token, logprob) in enumerate(pairs):
            tokens[row, column], logprobs[row, column] = token, logprob
    table = _field(1, tokens.tobytes()) + _field(2, logprobs.tobytes())
    return table + _field(3, num_top) + _field(4, len(top_T))


def _datum(message: bytes, index: int, budget: "_Budget") -> Datum:
    chunks: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in _fields(message, budget):
        if number == 1:
            chunks.append(_chunk(_bytes(value), index, budget))
        elif number == 2:
            name, each = _entry(value, budget)
            place = f"data[{index}].loss_fn_inputs[{name[:50]!r}]"
            inputs[name] = _tensor(_bytes(each), place, budget)
    return Datum(np.concatenate([*chunks, np.empty(0, "<i4")]).astype(np.int64), inputs)


def _chunk(message: bytes, index: int, budget: "_Budget") -> np.ndarray:
    for number, value in _fields(message, budget):
        if number != 1:
            raise WireError(f"data[{index}].model_input: only text is supported, got an image or audio")
        for inner, tokens in _fields(_bytes(value), budget):
            if inner == 1:
                return _array(_bytes(tokens), np.dtype("<i4"), f"data[{index}].model_input")
    return np.empty(0, "<i4")


def _tensor(message: bytes, place: str, budget: "_Budget") -> np.ndarray:
    dense, dtype, shape = b"", 0, list[int]()
    for number, value in _fields(message, budget):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            raise WireError(f"{place}: a sparse tensor; only dense ones are supported")
        elif number == 3:
            dtype = _int(value)
        elif number == 4:
            shape += list(itertools.islice(_varints(value), 3)) if isinstance(value, bytes) else [_int(value)]
    if dtype not in _DTYPES:
        raise WireError(f"{place}: must be float32 or int64")
    array = _array(dense, _DTYPES[dtype], place)
    if len(shape) < 2:
        return array
    if len(shape) > 2 or math.prod(shape) != len(array) or len(array) == 0:
        raise WireError(f"{place}: {len(array)} elements of shape {shape[:5]}; must be [T] or [T, targets]")
    return array.reshape(shape)


def _array(content: bytes, dtype: np.dtype, place: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise WireError(f"{place}: {len(content)} bytes are no whole number of elements")
    return np.frombuffer(content, dtype)


_Value = int | bytes
"""A varint; or the bytes of a field of any other kind."""


@dataclasses.dataclass(slots=True)
class _Budget:
    """Counts the fields that a body may still have."""

    num_fields: int

    def take(self) -> None:
        self.num_fields -= 1
        if self.num_fields < 0:
            raise WireError(f"the body has more than {_MAX_FIELDS} fields")


def _fields(message: bytes, budget: _Budget) -> Iterator[tuple[int, _Value]]:
    at = 0
    while at < len(message):
        budget.take()
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise WireError(f"the body is no protobuf message: field {number} is of kind {kind}")
        if at + length > len(message):
            raise WireError(f"the body is cut off in field {number}")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise WireError("the body is cut off in a number")
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise WireError("the body is no protobuf message: a number has more than 10 bytes")


def _varints(content: bytes) -> Iterator[int]:
    at = 0
    while at < len(content):
        value, at = _varint(content, at)
        yield value


def _entry(value: _Value, budget: _Budget) -> tuple[str, _Value]:
    """Return the key and the value of an entry of a map."""
    key, inner = "", b""
    for number, each in _fields(_bytes(value), budget):
        if number == 1:
            key = _text(each)
        elif number == 2:
            inner = each
    return key, inner


def _config_value(value: _Value, budget: _Budget) -> float | str:
    for number, each in _fields(_bytes(value), budget):
        return _double(each) if number == 1 else _text(each)
    return 0.0


def _int(value: _Value) -> int:
    if not isinstance(value, int):
        raise WireError("the body has bytes where a number is expected")
    return value


def _bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise WireError("the body has a number where bytes are expected")
    return value


def _double(value: _Value) -> float:
    content = _bytes(value)
    if not content:  # 0.0 may be left out
        return 0.0
    if len(content) != 8:
        raise WireError(f"the body has {len(content)} bytes where a double is expected")
    return struct.unpack("<d", content)[0]


def _text(value: _Value) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise WireError("the body has a text that is not UTF-8") from None


def _field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value)
    if isinstance(value, float):
        return _number(number << 3 | _EIGHT_BYTES) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _number(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
