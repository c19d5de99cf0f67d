"""Runners, and with them what they have recorded, outlive calls with longer prompts than before."""

import itertools

import pytest
import torch

from benchmarks import matrix
from engine.parts import drawn, engine_of, prompts_of
from models.tiny import tiny
from qerl.engine.decode.runner import DecodeRunner
from qerl.engine.decode.runner_cache import min_graph_rows
from qerl.kernels.runtime.architectures import ARCHITECTURES
from qerl.models.random_weights import shape

MOST = 12  # tokens of a sample
LENGTHS = (5, 14, 18, 22, 30, 36, 40, 44)


@pytest.fixture(scope="module")
def decoder():
    return tiny()


def runners_of(engine):
    """The runner after each call of ever longer prompts, and all that was sampled."""
    found, samples = [], []
    for length in LENGTHS:
        samples.append(drawn(engine, prompts_of(length, 5), max_tokens=MOST))
        found.append(next(iter(engine._runners._runners.values())))
    return found, samples


def test_a_call_as_long_as_expected_keeps_cache_and_runner(decoder):
    engine = engine_of(decoder, block_size=1)
    engine.expect(max(LENGTHS) + MOST)
    (first, *others), samples = runners_of(engine)
    assert all(runner is first for runner in others)
    assert engine._cache is not None and engine._runners._max_pages == 64
    cache = engine._cache
    drawn(engine, prompts_of(max(LENGTHS), max(LENGTHS)), max_tokens=MOST)
    assert engine._cache is cache
    assert samples == runners_of(engine_of(decoder, block_size=1))[1]


def test_tables_grow_by_a_quarter_at_least_and_no_wider_than_the_models_sequences(decoder):
    engine = engine_of(decoder, block_size=1)
    cache = engine._runners
    widths = [0]
    for pages in range(1, decoder.max_positions + 1):
        if pages > widths[-1]:
            cache._max_pages = widths[-1]
            widths.append(cache._table_pages(pages))
    for before, wide in itertools.pairwise(widths):
        assert wide % 16 == 0 and wide >= min(int(1.25 * before), decoder.max_positions)
    assert widths[-1] - decoder.max_positions in range(16) and len(widths) < decoder.max_positions / 16
    engine.expect(10 * decoder.max_positions)
    cache._max_pages = 0
    assert cache._table_pages(3) == widths[-1]


class Sampler:
    is_capturable = True


class Forward:
    is_capturable = True


def recording(monkeypatch, *, max_rows=64, min_rows=1, uses_graphs=True):
    monkeypatch.setattr(DecodeRunner, "_uses_graphs", uses_graphs)
    sizes = {"max_rows": max_rows, "max_pages": 1, "page_tokens": 16, "max_steps": 1, "min_rows": min_rows}
    cpu = torch.device("cpu")
    return DecodeRunner(Forward(), Sampler(), **sizes, device=cpu, pool=None, min_graph_rows=8)  # type: ignore[arg-type]


def test_up_to_eight_rows_share_a_graph_and_the_last_samples_arrange_nothing_anew(monkeypatch):
    runner = recording(monkeypatch)
    assert [runner._rows(n) for n in (1, 2, 4, 5, 8, 9, 17)] == [8, 8, 8, 8, 8, 16, 24]
    runner._samples_B = [None] * 8  # type: ignore
    assert not any(runner.would_shrink(n) for n in range(1, 9))
    runner._samples_B = [None] * 9  # type: ignore
    assert runner.would_shrink(8)


def test_a_graph_has_no_more_rows_than_the_runner_and_no_fewer_than_exact_mode_asks_for(monkeypatch):
    assert recording(monkeypatch, max_rows=3)._rows(1) == 3
    assert recording(monkeypatch, min_rows=16)._rows(1) == 16


def test_a_step_without_a_graph_has_exactly_the_rows_of_its_samples(monkeypatch):
    runner = recording(monkeypatch, uses_graphs=False)
    assert [runner._rows(n) for n in (1, 3, 8, 9)] == [1, 3, 8, 9]


@pytest.mark.parametrize("is_capturable", [True, False])
def test_a_graph_is_not_replayed_for_rows_whose_sampler_needs_the_host(is_capturable, monkeypatch):
    class Graph:
        def replay(self):
            steps.append("replay")

    steps: list[str] = []
    runner = recording(monkeypatch, uses_graphs=is_capturable)
    monkeypatch.setattr(runner, "_eager_step", lambda num_rows: steps.append("eager"))
    runner._graphs[8] = Graph()  # type: ignore[assignment]
    runner._step(8)
    assert steps == ["replay" if is_capturable else "eager"]


@pytest.mark.parametrize(
    ("model", "is_fast", "rows"),
    [("qwen2.5-7b", True, 8), ("qwen2.5-7b", False, 1), ("gpt-oss-20b", True, 1), ("qwen3.5-9b", True, 8)],
)
def test_pytorchs_products_and_mixtures_keep_graphs_of_fewer_rows(model, is_fast, rows):
    assert min_graph_rows(shape(model), is_fast=is_fast) == rows


def test_on_hopper_products_and_sampling_of_one_row_are_the_code_of_eight():
    card = ARCHITECTURES["sm_90a"]
    one, eight = (
        {
            (variant.file, variant.defines)
            for variant in matrix.decode_variants(shape("qwen2.5-7b"), card, rows, rank=32)
            # attention's number of CTAs depends on the rows; one row's temperature is the batch's
            if variant.file != "decode_attention.cu" and not dict(variant.defines).get("BY_ROW")
        }
        for rows in (1, 8)
    )
    assert one == eight and len(one) >= 6
