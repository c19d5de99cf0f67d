"""Units of decode attention: each of them once, shared out evenly however ragged the rows are."""

import struct

import pytest
import torch

from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.runtime.nvrtc import addresses

K, CHUNK = 2, 128
LIST = r"""
#include "decode_attention_units.cuh"
// Write (row, chunk, head, position, tiles) of each unit of each CTA to p.out.
extern "C" void list_units(const Parameters& p) {
  int* to = (int*)p.out + (size_t)blockIdx.x * p.max_chunks * 5;
  const Rows rows(p, p.positions);
  Place at = first_place(p, rows);
  Unit u = find_unit(p, rows, at, blockIdx.x);
  for (; u.tiles; u = find_unit(p, rows, at, u.index + gridDim.x), to += 5)
    if (threadIdx.x == 0) to[0] = u.row, to[1] = u.chunk, to[2] = u.head, to[3] = u.position, to[4] = u.tiles;
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    if not has_compiler():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cuda")
    copy_sources(folder)
    (folder / "list_units.cu").write_text(LIST)
    return folder


def units_of(sources, lengths, grid, window=None, *, has_few_rows=False, chunk=None):
    """Return [(row, chunk, head, position, tiles)] of each CTA. chunk: its positions, if they vary."""
    most = 2000
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    tables = torch.zeros(len(lengths), 512, dtype=torch.int32)
    out = torch.full((grid, most, 5), -1, dtype=torch.int32)
    size = torch.tensor([chunk or 0], dtype=torch.int32)
    parts = addresses(*[None] * 6, positions, tables, None, None, out, None, None, size)
    numbers = 0.0, 1.0, len(lengths), 512, most
    given = struct.pack("14Q2f3i4x", *parts, *numbers)
    defines = {"H": 128, "GROUP": 4, "KV_HEADS": K, "PAGE": 16, "CHUNK": CHUNK, "FP8": 0}
    defines |= {"FEW_ROWS": int(has_few_rows)} | ({} if chunk is None else {"VARIABLE": 1, "CHUNK": 512})
    if window is not None:
        defines |= {"WINDOW": 1}
        given = struct.pack("14Q2f3iif4xQ", *parts, *numbers, window, 0.0, 0)
    kernel = CpuKernel("list_units.cu", "list_units", defines | {"Operands": "Parameters"}, sources)
    kernel.launch(grid=grid, block_threads=32, parameters=(given,))
    return [[tuple(unit) for unit in cta if unit[0] >= 0] for cta in out.tolist()]


def ragged(rows):
    rng = torch.Generator().manual_seed(rows)
    return [0 if i % 7 == 3 else int(n) for i, n in enumerate(torch.randint(1, 1500, (rows,), generator=rng))]


@pytest.mark.parametrize("lengths", [[1], [0, 0], [0, 129], [512] * 40, ragged(5), ragged(33), ragged(70)])
def test_every_unit_is_found_once_and_shared_out_evenly(lengths, sources):
    assert_shared_out(units_of(sources, lengths, grid=13), lengths)


FEW = [[1], [0, 0], [0, 129], [512] * 32, ragged(5), ragged(17), ragged(32), [8191, 0, 5000, 130]]


@pytest.mark.parametrize("lengths", FEW)
def test_units_of_few_rows_are_the_same(lengths, sources):
    """Up to 64 places, two to a lane."""
    assert_shared_out(units_of(sources, lengths, grid=13, has_few_rows=True), lengths)


@pytest.mark.parametrize("chunk", [64, 192, 320, 512])
@pytest.mark.parametrize("lengths", [[1], [0, 320, 321], [512, 513] * 20, ragged(33), ragged(70)])
def test_chunks_have_as_many_positions_as_is_said(lengths, chunk, sources):
    assert_shared_out(units_of(sources, lengths, grid=13, chunk=chunk), lengths, chunk)


def assert_shared_out(each, lengths, size=CHUNK):
    expected = [
        (row, chunk, head, length - 1, -(-min(size, length - chunk * size) // 32))
        for chunk in range(64)
        for row, length in enumerate(lengths)
        for head in range(K)
        if length > chunk * size
    ]
    assert [each[i % 13][i // 13] for i in range(len(expected))] == expected
    assert sum(map(len, each)) == len(expected)


@pytest.mark.parametrize(("rows", "size"), [(30, None), (40, None), (40, 192)])
def test_rows_with_a_window_have_the_chunks_that_it_reaches(rows, size, sources):
    lengths, window = ragged(rows), 300
    each = units_of(sources, lengths, grid=5, window=window, has_few_rows=rows <= 32, chunk=size)
    found, size = sorted(unit[:3] for cta in each for unit in cta), size or CHUNK
    assert found == [
        (row, chunk, head)
        for row, length in enumerate(lengths)
        for chunk in range(max(length - window, 0) // size, -(-length // size))
        for head in range(K)
    ]
