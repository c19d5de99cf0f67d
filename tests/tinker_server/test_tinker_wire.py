"""Protobuf messages, byte by byte; with the client's own code where it is installed."""

import random
import struct

import numpy as np
import pytest

from qerl.tinker.wire import (
    SampledTokens,
    WireError,
    read_pass_request,
    write_pass_result,
    write_sample_result,
)


def text(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


TOKENS = struct.pack("<3i", 5, 6, 7)
TARGETS = text(1, struct.pack("<3q", 6, 7, 8)) + b"\x18\x02" + text(4, b"\x03")
DATUM = text(1, text(1, text(1, TOKENS))) + text(2, text(1, b"target_tokens") + text(2, TARGETS))
CONFIG = text(7, text(1, b"beta") + text(2, b"\x09" + struct.pack("<d", 0.5)))
BODY = text(1, b"run") + b"\x10\x04" + text(3, DATUM) + text(4, b"dro") + CONFIG + b"\x30\x01"


def test_a_request_is_read_field_by_field():
    request = read_pass_request(BODY)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("run", 4, "dro")
    assert request.is_forward_only and request.loss_config == {"beta": 0.5}
    (datum,) = request.data
    assert datum.tokens_T.tolist() == [5, 6, 7] and datum.inputs["target_tokens"].tolist() == [6, 7, 8]


def test_no_bytes_raise_anything_but_a_wire_error():
    generator = random.Random(1)
    for _ in range(3000):
        body = bytearray(BODY)
        for _ in range(generator.randint(1, 4)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        try:
            read_pass_request(bytes(body[: generator.randint(1, len(body))]))
        except WireError as error:
            assert str(error)


def test_results_are_read_by_the_client():
    conversion = pytest.importorskip("tinker.proto.response_conv")
    values = [np.array([-0.5, -1.5], "f4"), np.array([-2.0], "f4")]
    output = conversion.deserialize_forward_backward_output(write_pass_result(values, {"loss:sum": 3.25}))
    assert [each["logprobs"].data for each in output.loss_fn_outputs] == [[-0.5, -1.5], [-2.0]]
    assert output.metrics == {"loss:sum": 3.25}
    sample = SampledTokens(
        tokens_T=[3, 300], logprobs_T=[-1.0, -2.0], stop_reason="length", top_T=[[(3, -1.0)], []]
    )
    body = write_sample_result([sample], prompt_logprobs_T=[None, -4.0], num_top=1)
    result = conversion.deserialize_sample_response(body)
    (sequence,) = result.sequences
    assert sequence.tokens == [3, 300] and sequence.logprobs == [-1.0, -2.0]
    assert sequence.stop_reason == "length" and sequence.topk_logprobs == [[(3, -1.0)], None]
    assert result.prompt_logprobs == [None, -4.0]
