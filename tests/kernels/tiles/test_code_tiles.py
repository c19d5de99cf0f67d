"""NF4, FP8 and INT8 in tiles: codes and scales come back, and the operand is the format's bit for bit."""

import ctypes
import itertools
import re
import shutil
import subprocess

import pytest
import torch

from conftest import rms_error
from kernels.tiles.test_nvfp4_decode import low_ranks
from kernels.tiles.test_portable_product import with_u
from qerl.formats import FP8, INT8, NF4
from qerl.formats.nf4 import LEVELS
from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED
from qerl.kernels.runtime.nvrtc import sources
from qerl.kernels.tiles import nvfp4_decode, tile_layout, tile_unpack
from qerl.kernels.tiles.portable_product import CASES, PortableProduct
from qerl.kernels.tiles.portable_tile import rule
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.packed.packed_linear import tile_group

FORMATS = (NF4, FP8, INT8)
by_name = pytest.mark.parametrize("kind", FORMATS, ids=lambda f: f.name)


def weights(kind, N, K, rng, device, count=1):
    """Rows of different sizes, so that a scale of another row would be found."""
    spread = torch.exp2(torch.randint(-6, 3, (N, 1), generator=rng).float())
    return [kind.encode((torch.randn(N, K, generator=rng) * spread).to(device)) for _ in range(count)]


@pytest.mark.parametrize("layout", [TileLayout.NF4, TileLayout.FP8, TileLayout.INT8])
def test_codes_and_scales_come_back(layout, rng):
    N, K = 192, 320
    codes = torch.randint(0, 16 if layout is TileLayout.NF4 else 256, (N, K), generator=rng).to(torch.uint8)
    scales = None
    if layout is not TileLayout.INT8:
        rows = (
            torch.arange(N)
            if layout is TileLayout.NF4
            else torch.arange(N) // 64 * 2 + torch.arange(N) // 8 % 2
        )
        scales = torch.rand(N, K // 64, generator=rng)[rows]
    tiles = tile_layout.pack(codes, scales, layout)
    assert tiles.shape == (3, 5, layout.tile_bytes)
    got_codes, got_scales = tile_layout.unpack(tiles, layout)
    assert torch.equal(got_codes, codes)
    assert (got_scales is None) == (scales is None)
    assert got_scales is None or scales is None or torch.equal(got_scales, scales)


@by_name
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("rows", (UnpackRows.ALL, UnpackRows.GATE_UP), ids=lambda r: r.name)
def test_the_operand_is_the_formats_bit_for_bit(kind, dtype, rows, device, rng):
    parts = weights(kind, 448, 320, rng, device, 2)
    group = tile_group(parts, rows)
    truth = torch.cat([part.operand(dtype) for part in parts])
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(group.operand(dtype).view(bits), truth.view(bits))
    wide = torch.full((896, 384), 7.0, dtype=dtype, device=device)
    assert torch.equal(group.operand(dtype, wide[:, :320]), truth) and (wide[:, 320:] == 7).all()
    each = [(UnpackRows.GATE, UnpackRows.UP)[i] for i in (0, 1)] if rows is UnpackRows.GATE_UP else []
    for part, own in zip(parts, each, strict=False):
        got = tile_unpack.unpack(group.tiles, own, dtype, group.layout)
        assert torch.equal(got.view(bits), part.operand(dtype).view(bits))


@pytest.mark.parametrize("kind", (FP8, INT8), ids=lambda f: f.name)
def test_every_code_decodes_to_its_value(kind, device):
    """Subnormal E4M3 codes and the signs of zeros among them."""
    code = torch.arange(256, dtype=torch.uint8).repeat(64).view(64, 256)
    if kind is FP8:
        code[(code & 0x7F) == 0x7F] = 0  # NaN
        weight = FP8(code.view(torch.float8_e4m3fn).to(device), torch.tensor([[0.3, 1e-40]], device=device))
    else:
        weight = INT8(code.view(torch.int8).to(device), torch.ones(64, device=device))
    got = tile_group([weight], UnpackRows.ALL).operand(torch.bfloat16)
    assert torch.equal(got.view(torch.int16), weight.operand(torch.bfloat16).view(torch.int16))


def test_the_kernels_levels_are_the_formats():
    source = sources()["tile_block.cuh"]
    table = re.findall(r"LEVELS\[16\] = \{(.*?)\}", source, re.S)[0]
    assert tuple(map(float, table.replace("f", "").split(","))) == LEVELS


def test_a_words_bits_are_shifted_to_its_values():
    """By the kernels' own operations on E4M3, with an arithmetic shift."""
    word = torch.arange(256, dtype=torch.int64)
    for byte in range(4):
        top = ((word << (8 * byte)) << (24 - 8 * byte)).to(torch.int32)
        value = ((top >> 4) & (0x87F00000 - (1 << 32))).view(torch.float32) * 2.0**120
        truth = word.to(torch.uint8).view(torch.float8_e4m3fn).float()
        is_number = ~truth.isnan()
        assert torch.equal(value[is_number], truth[is_number])


CPU_HEADERS = {
    "types.cuh": """
        #include <cstring>
        typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32;
        struct uint4 { u32 x, y, z, w; }; struct float2 { float x, y; };
        #define __device__
        #define __forceinline__ inline
        #define __constant__ static const
        inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
        inline float __int_as_float(int v) { return __uint_as_float(u32(v)); }
        inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
        inline float __fmul_rn(float a, float b) { return a * b; }
        inline float __fadd_rn(float a, float b) { return a + b; }
        inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
          u8 from[8]; u32 v = 0; memcpy(from, &a, 4), memcpy(from + 4, &b, 4);
          for (int i = 0; i < 4; i++) v |= u32(from[selector >> 4 * i & 7]) << 8 * i;
          return v;
        }""",
    "bfloat16.cuh": """
        #include "types.cuh"
        inline u32 rounded(float f) { u32 v = __float_as_uint(f); return v + 0x7FFF + (v >> 16 & 1) >> 16; }
        inline u32 pack2(float low, float high) { return rounded(high) << 16 | rounded(low); }
        inline u32 add_pairs(u32 a, u32 b) {
          const u32 top = 0xFFFF0000u;
          const float low = __uint_as_float(a << 16) + __uint_as_float(b << 16);
          return pack2(low, __uint_as_float(a & top) + __uint_as_float(b & top));
        }""",
    "lanes.cpp": """
        #include "types.cuh"
        u32 __shfl_sync(u32, u32, u32, int);
        #include "tile_block.cuh"
        u32 __shfl_sync(u32, u32, u32 lane, int width) { return decoding_constant(lane % width); }
        extern "C" void decode_tile(const u8* tile, u32* out) {  // [4 blocks, 32 lanes, 4 j, 4]
          for (int block = 0; block < 4; block++)
            for (int lane = 0; lane < 32; lane++) {
              Block b; b.load(tile, block, lane);
              for (int j = 0; j < 4; j++) {
                u32 a[4]; b.decode16(j, decoding_constant(lane), a); memcpy(out, a, 16), out += 4;
              }
            }
        }""",
}
"""Stand-ins with which the CUDA source runs on a CPU, lane by lane."""


@by_name
def test_the_kernels_source_decodes_each_lanes_words_to_its_part_of_the_operand(kind, tmp_path, rng):
    """The CUDA source itself, compiled for a CPU, against the operand of mma.sync's rows and k."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    for name, text in CPU_HEADERS.items():
        (tmp_path / name).write_text("#pragma once\n" + text if name.endswith("h") else text)
    (tmp_path / "tile_block.cuh").write_text(sources()["tile_block.cuh"])
    parts = weights(kind, 64, 192, rng, torch.device("cpu"), 2)
    group = tile_group(parts, UnpackRows.GATE_UP)  # rows g and g + 8 have scales of their own
    flags = ["-shared", "-fPIC", "-w", "-ffp-contract=off", f"-DFORMAT={group.layout.define}"]
    subprocess.run([compiler, *flags, "-o", "lanes.so", "lanes.cpp"], cwd=tmp_path, check=True)
    decode_tile = ctypes.CDLL(str(tmp_path / "lanes.so")).decode_tile
    # warp, row half, g; j, k half, t, pair  ->  warp, g, t, j, k half, row half, pair
    order = nvfp4_decode.swiglu_order(64, torch.device("cpu"))
    truth = torch.cat([part.operand(torch.bfloat16) for part in parts])[order]
    truth = truth.view(torch.int16).view(2, 64, 3, 64)
    for row, column in itertools.product(range(2), range(3)):
        words = torch.full((4 * 32 * 4 * 4,), 7, dtype=torch.int32)
        tile = group.tiles[row, column].contiguous()
        decode_tile(ctypes.c_void_p(tile.data_ptr()), ctypes.c_void_p(words.data_ptr()))
        own = truth[row, :, column].reshape(4, 2, 8, 4, 2, 4, 2).permute(0, 2, 5, 3, 4, 1, 6)
        assert torch.equal(words.view(torch.int16), own.flatten())


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("layout", TileLayout)
@pytest.mark.parametrize(("N", "K"), CASES)
def test_the_rule_fits_every_card(name, layout, N, K):
    card = ARCHITECTURES[name]
    tiles = [rule(M, N, K, card, layout) for M in range(1, 257)]
    for tile in tiles:
        assert tile.layout is layout and K % tile.k_block == 0 and tile.stages >= 3
        assert tile.shared_bytes <= card.shared_bytes
        assert card.resident_ctas(tile.threads, 1, tile.shared_bytes) >= tile.ctas_per_sm
    assert len({(t.rows, t.k_block, t.ctas_per_sm) for t in tiles[:32]}) == 1


@pytest.fixture
def kernels_of():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def make(layout, card=None):
        choose = None if card is None else lambda M, N, K: rule(M, N, K, ARCHITECTURES[card], layout)
        return PortableProduct(torch.device("cuda"), choose, layout)

    return make


def truth_of(x, weight, u, b, *extra):
    y = (x.double() @ weight.operand(torch.bfloat16).double().T) * weight.alpha.double()
    y = y + u.double() @ b.double().T
    for term in extra:
        y = y if term is None else y + term.double()
    return y


def torch_of(x, weight, u, b, *extra):
    y = (x @ weight.operand(torch.bfloat16).T).float() * weight.alpha
    y = y.bfloat16() + u @ b.T
    for term in extra:
        y = y if term is None else y + term
    return y


@pytest.mark.gpu
@by_name
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 64, 64), (8, 192, 576), (17, 3584, 1024), (64, 4608, 3584), (200, 640, 3584)]
)
def test_no_less_exact_than_torch(kind, M, N, K, kernels_of, rng):
    device = torch.device("cuda")
    (weight,) = weights(kind, N, K, rng, device)
    x = torch.randn(M, K, generator=rng).bfloat16().to(device)
    a, b = (torch.randn(s, generator=rng).bfloat16().to(device) * 0.1 for s in ((32, K), (N, 32)))
    bias, residual = torch.randn(N, device=device), torch.randn(M, N, device=device)
    group = tile_group([weight], UnpackRows.ALL)
    kernels = kernels_of(group.layout)
    exact_u, plain_u = low_ranks(x, a)
    for extra in ((None, None), (bias, None), (bias, residual)):
        run = {"adapter": with_u(a, b, x), "bias_N": extra[0], "residual_MN": extra[1]}
        got = kernels.linear(x, group.tiles, group.factors_N, **run)
        truth, plain = truth_of(x, weight, exact_u, b, *extra), torch_of(x, weight, plain_u, b, *extra)
        assert rms_error(got, truth) <= 1.1 * rms_error(plain, truth)
        assert all(torch.equal(kernels.linear(x, group.tiles, group.factors_N, **run), got) for _ in range(5))
    assert (kernels.workspace == -1).all()


@pytest.mark.gpu
@by_name
def test_every_token_count_is_right_and_up_to_32_rows_do_not_depend_on_the_batch(kind, kernels_of, rng):
    device, N, K = torch.device("cuda"), 1152, 1024
    (weight,) = weights(kind, N, K, rng, device)
    x = torch.randn(256, K, generator=rng).bfloat16().to(device)
    group = tile_group([weight], UnpackRows.ALL)
    kernels, none = kernels_of(group.layout), torch.zeros(256, 1, device=device)
    nothing = torch.zeros(N, 1, device=device)
    truth = truth_of(x, weight, none, nothing)
    plain = ((x @ weight.operand(torch.bfloat16).T).float() * weight.alpha).bfloat16()
    whole = kernels.linear(x[:32].contiguous(), group.tiles, group.factors_N)
    for M in range(1, 257):
        got = kernels.linear(x[:M].contiguous(), group.tiles, group.factors_N)
        assert rms_error(got, truth[:M]) <= 1.1 * rms_error(plain[:M], truth[:M])
        assert M > 32 or torch.equal(got, whole[:M])


@pytest.mark.gpu
@by_name
@pytest.mark.parametrize("card", TESTED)
@pytest.mark.parametrize("M", [8, 64, 128])
def test_the_tiles_of_every_card_compute_the_same_numbers(kind, card, M, kernels_of, rng):
    device, F, K = torch.device("cuda"), 1536, 576
    parts = weights(kind, F, K, rng, device, 2)
    x = torch.randn(M, K, generator=rng).bfloat16().to(device) * 0.02
    group = tile_group(parts, UnpackRows.GATE_UP)
    got = kernels_of(group.layout, card).swiglu(x, group.tiles, group.factors_N)
    gate, up = ((x.double() @ w.operand(torch.bfloat16).double().T) * w.alpha.double() for w in parts)
    plain = [((x @ w.operand(torch.bfloat16).T).float() * w.alpha).bfloat16() for w in parts]
    truth = torch.nn.functional.silu(gate) * up
    other = torch.nn.functional.silu(plain[0]) * plain[1]
    assert rms_error(got, truth) <= 1.1 * rms_error(other, truth)
