import json

import pytest
import torch

import tiny_run
from learner.plain import causal
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.loader import build_decoder
from qerl.models.quantize import calibration
from qerl.models.quantize.calibration import calibration_tokens, read_calibration
from qerl.models.random_weights import shape
from stored_samples import checked_line

CPU = torch.device("cpu")
ROWS = [("ab ", "old", "length"), ("ab ", "cd", "stop"), ("ab ", "cd", "stop"), ("longer ", "e", "length")]


@pytest.fixture
def run(tmp_path):
    tiny_run.write_model(tmp_path)
    lines = [checked_line(json.dumps({"prompt": p, "text": t, "finish": f})) for p, t, f in ROWS]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines) + b'{"torn')
    return tmp_path


def rows_of(run, max_tokens):
    samples = run / "samples.jsonl"
    return read_calibration(samples, load_tokenizer(str(run)), max_tokens=max_tokens, device=CPU)


def test_the_newest_prompts_come_first_each_once_with_its_different_samples(run):
    tokenizer = load_tokenizer(str(run))
    assert tokenizer.decode(rows_of(run, 100).tokens_T) == "longer eab cd<|im_end|>old"
    assert tokenizer.decode(rows_of(run, 5).tokens_T) == "longer e"


def test_more_prompts_come_before_more_samples_of_one(run):
    """8 + 5 tokens are both prompts with a sample each; further samples are dealt until there are enough."""
    tokenizer = load_tokenizer(str(run))
    lines = [checked_line(json.dumps({"prompt": p, "text": t, "finish": f})) for p, t, f in ROWS]
    second = checked_line(json.dumps({"prompt": "longer ", "text": "f", "finish": "length"}))
    (run / "samples.jsonl").write_bytes(b"".join([*lines, second]))
    assert tokenizer.decode(rows_of(run, 13).tokens_T) == "longer fab cd<|im_end|>"
    assert tokenizer.decode(rows_of(run, 15).tokens_T) == "longer feab cd<|im_end|>"
    assert tokenizer.decode(rows_of(run, 16).tokens_T) == "longer feab cd<|im_end|>old"


@torch.no_grad()
def test_each_row_computes_what_it_does_in_its_own_sequence(run):
    decoder = build_decoder(
        locate(str(run)).open(), format="bf16", compute=torch.float32, device=CPU, resident=True
    )
    rows = rows_of(run, 100)
    packed_TD = decoder(rows.tokens_T, rows.positions_T, rows.attend)
    a, b = [*range(8, 11), 11, 12, 13], [*range(8, 11), *range(14, 17)]  # ab cd<|im_end|>, ab old
    for sequence in ([*range(8)], a, b):
        alone_TD = decoder(rows.tokens_T[sequence], torch.arange(len(sequence)), causal)
        torch.testing.assert_close(packed_TD[sequence], alone_TD, rtol=1e-4, atol=1e-5)


def test_a_run_without_samples_is_refused(run):
    (run / "samples.jsonl").unlink()
    with pytest.raises(UserError, match=r"samples\.jsonl: cannot be read: No such file"):
        rows_of(run, 100)


@pytest.mark.parametrize(("gb", "tokens"), [(0, 8192), (8, 8192), (24, 8192), (48, 16_384), (141, 65_536)])
def test_a_calibration_has_the_tokens_whose_pass_takes_an_eighth_of_the_memory(monkeypatch, gb, tokens):
    monkeypatch.setattr(calibration, "memory_bytes", lambda device: gb * 1e9)
    assert calibration_tokens(shape("qwen2.5-1.5b"), CPU) == tokens
