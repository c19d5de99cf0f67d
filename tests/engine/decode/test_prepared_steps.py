"""A runner says how long the rows of its next steps are, and attention's chunks follow from that."""

import pytest
import torch

from engine.parts import drawn, engine_of, prompts_of
from models.tiny import tiny
from qerl.engine.decode.forward import TorchForward
from qerl.kernels.attention import decode_attention as op
from qerl.kernels.attention.decode_state import DecodeState


def test_before_each_burst_the_forward_pass_learns_the_rows_lengths(monkeypatch):
    told, first_steps = [], []
    monkeypatch.setattr(TorchForward, "prepare", lambda self, state, *rest: told.append(rest))
    run = TorchForward._run

    def noted(self, state, num_rows, recur_on):
        if len(first_steps) < len(told):  # the first step of a burst
            first_steps.append((state.positions_B[:num_rows] + 1).tolist())
        return run(self, state, num_rows, recur_on)

    monkeypatch.setattr(TorchForward, "_run", noted)
    drawn(engine_of(tiny()), prompts_of(5, 9), max_tokens=20)
    assert len(told) == len(first_steps) > 1
    for (lengths_B, num_rows), found_B in zip(told, first_steps, strict=True):
        assert len(found_B) == num_rows and any(found_B)
        live_B = found_B[: len(lengths_B)]
        assert live_B == [length if found else 0 for found, length in zip(live_B, lengths_B, strict=True)]


@pytest.mark.parametrize(("num_rows", "chunk"), [(32, 1), (33, 256), (80, 384)])
def test_more_than_32_rows_have_chunks_by_their_lengths(num_rows, chunk, monkeypatch):
    gpu = type("Gpu", (), {"multi_processor_count": 132, "shared_memory_per_multiprocessor": 228 * 1024})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    kernel = op.DecodeAttention(28, 4, 128, 16, torch.float8_e4m3fn, 80, 512, torch.device("cpu"))
    state, lengths_B = DecodeState.empty(80, 512, 1, "cpu"), [1700, 300] * (num_rows // 2)
    state.chunk_1.fill_(1)
    kernel.set_chunk(state, lengths_B, num_rows)
    assert state.chunk_1.item() == chunk
    state.chunk_1.fill_(1)
    fixed = op.DecodeAttention(28, 4, 128, 16, torch.bfloat16, 80, 512, torch.device("cpu"), chunk=128)
    fixed.set_chunk(state, lengths_B, num_rows)
    assert state.chunk_1.item() == 1
