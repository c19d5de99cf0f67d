"""One decoder at a time, as a GPU would hold no two of the largest."""

import dataclasses
import gc
import weakref
from functools import partial

import pytest

from bench import test_learn, test_step
from bench.rows import CPU, rows_of
from bench.shapes import TINY
from benchmarks import parity
from qerl.bench import case, learn, step

SHAPE = dataclasses.replace(TINY, vocab_size=128)
PARITY = parity.ParityOptions(
    shape="tiny", batch=3, prompt_tokens=5, max_tokens=24, lora_rank=16, entropies=(4.0,), exacts=(False,)
)
LEARN = dataclasses.replace(test_learn.OPTIONS, recomputes=("none",), micro_batches=(1,))


@pytest.mark.parametrize(
    ("module", "measure", "options"),
    [
        (learn, learn.measure_cases, LEARN),
        (step, partial(step.measure_cases, "step"), test_step.OPTIONS),
        (parity, parity.measure_cases, PARITY),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_decoder_is_gone_before_the_next_is_made(tmp_path, monkeypatch, module, measure, options, fails):
    made, make, work = [], case.random_decoder, module.measure_case

    def one(*arguments, **settings):
        gc.collect()
        assert [decoder() for decoder in made] == [None] * len(made)
        decoder = make(*arguments, **settings)
        made.append(weakref.ref(decoder))
        return decoder

    def breaks(_, decoder, *more):
        if fails:
            raise RuntimeError(f"lacks memory beside {decoder.num_bytes}")
        return work(_, decoder, *more)

    monkeypatch.setattr(case, "random_decoder", one)
    monkeypatch.setattr(module, "measure_case", breaks)
    rows = rows_of(tmp_path, lambda rows: measure(options, SHAPE, CPU, rows))
    assert len(made) == 2 and all(("error" in row) == fails for row in rows)
