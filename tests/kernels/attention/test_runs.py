import pytest
import torch

from conftest import rms_error
from kernels.attention.test_flash_attention import (  # noqa: F401
    imitated,
    operands_of,
    options_of,
    trees_of,
    value_and_gradients,
)
from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.kernels.attention import runs as op
from qerl.kernels.attention.attention import PackedLayout, packed_attention
from qerl.kernels.attention.tree_attention import TreeLayout, flash_over_runs, reference, tree_attention
from qerl.kernels.runtime import row_kernel

RAGGED = ((256, (3074, 900, 460, 400, 300)), (64, (700,)))


def _runs(shapes, device="cpu"):
    return TreeLayout.of(trees_of(shapes)[0], device).runs


def test_runs_and_their_keys_are_as_described():
    runs = _runs(((2, (2, 0, 1)), (1, ())))
    assert runs.ends.queries.tolist() == [0, 2, 4, 5, 6]
    assert runs.ends.keys.tolist() == [0, 2, 6, 9, 10]
    assert runs.key_rows_R.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5]
    assert [x.tolist() for x in runs._places] == [[0, 2, 6, 1, 3, 7, 4, 5, 8, 9], [0, 3, 6, 7, 8, 9, 10]]


def _check_sums(device, rng):
    runs = _runs(((3, (2,) * 40), (300, (5, 1))), device)
    d = [torch.randn(len(runs.key_rows_R), 2, 8, generator=rng).to(device, torch.bfloat16) for _ in range(2)]
    for x, summed in zip(d, runs.summed(*d), strict=True):
        exact = torch.zeros(runs.num_rows, 2, 8, dtype=torch.float64, device=device)
        exact.index_add_(0, runs.key_rows_R, x.double())
        assert summed.dtype == torch.bfloat16
        assert rms_error(summed, exact) <= 1.1 * rms_error(exact.bfloat16(), exact)


def test_a_rows_gradient_is_summed_in_fp32(rng):
    _check_sums("cpu", rng)


def test_the_kernel_sums_as_it_is_defined(rng, tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs g++")
    monkeypatch.setattr(row_kernel, "on_gpu", lambda x: True)
    row_kernel.kernel.cache_clear()
    with on_cpu(row_kernel, tmp_path):
        _check_sums("cpu", rng)
    row_kernel.kernel.cache_clear()


@pytest.mark.gpu
def test_on_a_gpu_a_rows_gradient_is_summed_in_fp32(rng, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    _check_sums(device, rng)


@pytest.mark.parametrize("num_heads", [9, 12, 14, 28, 64])
@pytest.mark.parametrize("shapes", [RAGGED, ((8192, ()),), ((300, (4000,)), (10, (90, 1, 4000)))])
def test_parts_see_what_their_runs_saw_and_make_few_copies(shapes, num_heads):
    whole = list(_runs(shapes).runs)
    parts = op.split(whole, num_heads, 132)
    assert sum(part.num_keys for part in parts) <= op._MAX_COPIES * parts[-1].rows.stop
    assert [row for part in parts for row in part.rows] == list(range(parts[-1].rows.stop))
    for run in whole:
        keys = [row for rows in run.before for row in rows] + list(run.rows)
        for part in (part for part in parts if part.rows.start in run.rows):
            seen = [row for rows in (*part.before, part.rows) for row in rows]
            assert seen == keys[: len(keys) - run.rows.stop + part.rows.stop]


def test_long_runs_among_short_ones_are_split_to_half_a_share():
    whole = list(_runs(((256, (3074, 1500, 1200, 900, 600)), (64, (400,)))).runs)
    share = sum(run.cost for run in whole) * 28 / 132
    assert max(run.cost for run in whole) > 2 * share
    parts = op.split(whole, 28, 132)
    assert max(part.cost for part in parts) <= 1.25 * share / 2
    assert [part for part in parts if part in whole] == [run for run in whole if run.cost <= share / 2]


def test_a_run_within_the_limit_stays_whole():
    (run,) = _runs(((250, ()),)).runs
    assert op.parts_of(run, 1.1 * run.cost) == [run]
    assert len(op.parts_of(run, 0.6 * run.cost)) == 2


@pytest.mark.parametrize(
    ("shapes", "num_heads"),
    [
        (((256, (1024,) * 7),), 28),  # of one length
        (((1, (2047,)),) * 4, 28),
        (((256, (1500, 20)),), 28),  # few rows
        (((32_000, (3000,)),), 28),  # many
        (((8192, ()),), 12),  # eleven blocks of threads for each head already
        (((8192, ()),), 44),  # three
        (((16_384, ()),), 14),  # too many copies
    ],
)
def test_other_runs_stay_whole(shapes, num_heads):
    whole = list(_runs(shapes).runs)
    assert op.split(whole, num_heads, 132) is whole


def test_fewer_copies_are_made_of_one_long_run():
    (run,) = _runs(((16_384, ()),)).runs
    half = op.parts_of(run, run.cost * 28 / 132 / 2)
    assert sum(part.num_keys for part in half) > 4 * 16_384
    assert 3 * 16_384 < sum(part.num_keys for part in op.split([run], 28, 132)) < 4 * 16_384


@pytest.mark.parametrize("has_sinks", [False, True])
def test_gradients_of_parts_are_those_of_the_runs(has_sinks, imitated, rng):  # noqa: F811
    case = (6, 2, 32, ((5, (200, 0, 9)), (140, (150,)), (1, (1, 300))))
    trees, operands, do = operands_of(case, torch.float64, rng)
    options = options_of("scale", has_sinks, case[0])
    layout = TreeLayout.of(trees)
    parts = [part for run in layout.runs.runs for part in op.parts_of(run, 9000)]
    assert len(parts) == len(layout.runs.runs) + 2
    layout._split_runs[case[0]] = op.Runs.of(parts, "cpu")
    got = value_and_gradients(lambda q, k, v: flash_over_runs(q, k, v, layout, options), operands, do)
    truth = value_and_gradients(lambda q, k, v: reference(q, k, v, trees, options), operands, do)
    for ours, theirs in zip(got, truth, strict=True):
        assert rms_error(ours, theirs) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [RAGGED, ((1, (4095,)),)])
def test_on_a_gpu_split_runs_lose_no_more_than_plain_operations(shapes, device, rng, monkeypatch):
    """The parts' gradients of keys are rounded before they are added."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr("qerl.kernels.attention.tree_attention.is_for_flash_4", lambda *_: False)
    trees, operands, do = operands_of((28, 4, 128, shapes), torch.bfloat16, rng, device)
    layout, whole = TreeLayout.of(trees, device), TreeLayout.of(trees, device)
    assert len(layout.split_runs(28).key_rows_R) > len(layout.runs.key_rows_R)
    whole._split_runs[28] = whole.runs
    packed = PackedLayout.of(trees, device)

    def plain(q, k, v):
        return packed_attention(q, k, v, packed)

    truth = value_and_gradients(plain, [x.float() for x in operands], do)
    eager = value_and_gradients(plain, operands, do)
    ours, again, of_whole = (
        value_and_gradients(lambda q, k, v, layout=layout: tree_attention(q, k, v, layout), operands, do)
        for layout in (layout, layout, whole)
    )
    assert torch.equal(ours[0], of_whole[0])
    for got, same, theirs, true in zip(ours, again, eager, truth, strict=True):
        assert torch.equal(got, same)
        assert rms_error(got, true) <= 1.5 * rms_error(theirs, true) + 2**-9
