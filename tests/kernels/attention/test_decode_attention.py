import dataclasses

import pytest
import torch

from conftest import rms_error
from qerl.kernels.attention import decode_attention as op
from qerl.kernels.attention import fp8_pages
from qerl.kernels.attention.attention import paged_decode
from qerl.kernels.attention.attention_options import PLAIN
from qerl.kernels.attention.decode_shape import CHUNK, LONG_CHUNKS, choose_shape
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.runtime.architectures import num_sms

C = CHUNK
RAGGED = (1, 15, 16, 17, 0, C - 1, C, C + 1, 33, 1000, 0, 2 * C, 2 * C + 1, 257, 100, 769)
POSITIONS = 2048


def turning_angles(H, positions=POSITIONS):
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, H, 2) / H)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


@dataclasses.dataclass
class Step:
    qkv: torch.Tensor
    angles: torch.Tensor
    cache: op.LayerCache
    state: DecodeState

    def moved(self, device):
        def fields(value):
            return {
                f.name: None if (t := getattr(value, f.name)) is None else t.to(device)
                for f in dataclasses.fields(value)
            }

        cache, state = op.LayerCache(**fields(self.cache)), DecodeState(**fields(self.state))
        return Step(self.qkv.to(device), self.angles.to(device), cache, state)

    def copy(self):
        cache = op.LayerCache(*(t if t is None else t.clone() for t in dataclasses.astuple(self.cache)))
        return dataclasses.replace(self, cache=cache)


def step(lengths, N, K, H, rng, *, page_tokens=16, kv_dtype=torch.bfloat16, groups=(), shared=0):
    """Rows of these lengths (0: empty), shuffled pages, NaN wherever no token was stored.

    groups: (rows) whose first `shared` positions are the same pages.
    """
    B, X = len(lengths), -(-max(max(lengths), 1) // page_tokens)
    state = DecodeState.empty(B, X, 1, "cpu")
    num_pages = B * X + 3
    state.tables_BX.copy_(torch.randperm(num_pages, generator=rng)[: B * X].view(B, X))
    state.positions_B.copy_(torch.tensor(lengths) - 1)
    for rows in groups:
        rows = sorted(rows)
        for row in rows:
            state.tables_BX[row, : shared // page_tokens] = state.tables_BX[rows[0], : shared // page_tokens]
    k, v = (torch.randn(num_pages * page_tokens, K, H, generator=rng).bfloat16() for _ in range(2))
    stored = torch.zeros(num_pages * page_tokens, dtype=torch.bool)
    for b, length in enumerate(lengths):
        at = torch.arange(max(length - 1, 0))
        stored[state.tables_BX[b].long()[at // page_tokens] * page_tokens + at % page_tokens] = True
    for rows in groups:
        at = torch.arange(shared)
        stored[state.tables_BX[rows[0]].long()[at // page_tokens] * page_tokens + at % page_tokens] = True
    shape = (num_pages, page_tokens, K, H)
    qkv = torch.randn(B, (N + 2 * K) * H, generator=rng).bfloat16() * 2
    if kv_dtype == torch.bfloat16:
        k[~stored], v[~stored] = float("nan"), float("nan")
        cache = op.LayerCache(k.view(shape), v.view(shape))
    else:
        (k, k_scales), (v, v_scales) = fp8_pages.to_fp8(k), fp8_pages.to_fp8(v)
        for codes, scales in ((k, k_scales), (v, v_scales)):
            codes.view(torch.uint8)[~stored], scales[~stored] = 0x7F, float("nan")
        by_head = (scales.view(shape[:3]).transpose(1, 2).contiguous() for scales in (k_scales, v_scales))
        cache = op.LayerCache(k.view(shape), v.view(shape), *by_head)
    return Step(qkv, turning_angles(H), cache, state)


def plain(step, norms=None, options=PLAIN, is_gated=False, is_interleaved=False):
    """Compute it in torch's 16 bits: `paged_decode` of a cache that has this step's token."""
    K, positions = step.cache.k.shape[2], step.state.positions_B[: len(step.qkv)]
    op.reference(step.qkv, step.angles, step.cache, step.state, norms, options, is_gated, is_interleaved)
    k, v = (
        (pages.float() if scales is None else fp8_pages.from_fp8(pages, scales.mT)).nan_to_num(0).bfloat16()
        for pages, scales in ((step.cache.k, step.cache.k_scales), (step.cache.v, step.cache.v_scales))
    )
    at, H = positions.clamp(min=0), step.cache.k.shape[3]
    q, _, _, gate = op.split_heads(step.qkv, step.angles, at, K, H, norms, is_gated, is_interleaved)
    o = paged_decode(q, k, v, step.state.tables_BX[: len(q)].long(), at + 1, options)
    o = o if gate is None else o * gate.sigmoid()
    return o.flatten(1) * (positions >= 0)[:, None]


def random_norms(H, rng):
    return (torch.rand(H, generator=rng) + 0.5, torch.rand(H, generator=rng) + 0.5, 1e-6)


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_reference_agrees_with_paged_decode(kv_dtype, has_norms, rng):
    case = step((1, 15, 16, 17, 0, 40), 6, 2, 64, rng, kv_dtype=kv_dtype)
    norms = random_norms(64, rng) if has_norms else None
    truth = op.reference(case.qkv, case.angles, case.cache, case.state, norms)
    assert truth.isfinite().all() and not truth[4].any()
    assert rms_error(plain(case, norms), truth) < 0.01


def test_an_fp8_head_keeps_its_largest_element_and_loses_at_most_a_sixteenth_of_any(rng):
    x = torch.randn(50, 3, 64, generator=rng) * torch.logspace(-6, 6, 50)[:, None, None]
    x[7, 1] = 0
    codes, scales = fp8_pages.to_fp8(x.bfloat16())
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales[7, 1] == 1
    back, x = fp8_pages.from_fp8(codes, scales), x.bfloat16().float()
    assert torch.allclose(back.abs().amax(-1), x.abs().amax(-1), rtol=1e-6)
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, scales[..., None] * 2**-10)).all()


def test_a_code_comes_back_from_its_own_scale():
    codes = torch.tensor([0x7E, 0x01, 0x08, 0x38, 0xFE, 0x81, 0x00, 0x77], dtype=torch.uint8)
    codes = codes.view(torch.float8_e4m3fn).view(1, 1, 8)
    again, scales = fp8_pages.to_fp8(fp8_pages.from_fp8(codes, torch.full((1, 1), 0.25)))
    assert torch.equal(bits(again), bits(codes)) and scales.item() == 0.25


def test_other_shapes_are_refused():
    assert op.supports(28, 4, 128, 16) and op.supports(16, 1, 64, 48) and op.supports(8, 1, 256, 16, 64)
    assert not op.supports(16, 1, 256, 16) and not op.supports(8, 4, 256, 16, 48)
    assert not op.supports(28, 4, 96, 16) and not op.supports(28, 3, 128, 16)
    assert not op.supports(17, 1, 128, 16) and not op.supports(28, 4, 128, 8)


@pytest.fixture(scope="module")
def made():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kernels = {}

    def make(N, K, H, page_tokens=16, kv_dtype=torch.bfloat16, rows=64, pages=POSITIONS // 16, **flags):
        key = (N, K, H, page_tokens, kv_dtype, rows, pages)
        at = (key, *flags.items())
        if at not in kernels:
            kernels[at] = op.DecodeAttention(*key, torch.device("cuda"), **flags)
        return kernels[at]

    return make


def rows_of_several_keys(case, options):
    """Of an FP8 cache; all rows of a bfloat16 one.

    The kernel rounds weight times scale where torch rounds scale times value. The weight of a row's only key
    is 1, which torch does not round.
    """
    keys_B = case.state.positions_B[: len(case.qkv)] + 1
    keys_B = keys_B if options.window is None else keys_B.clamp(max=options.window)
    return (keys_B > 1) | (case.cache.k_scales is None)


def check(kernel, case, norms=None, options=PLAIN, is_interleaved=False):
    """o against float64, and every byte of the cache."""
    case = case.moved("cuda")
    norms = norms and (norms[0].cuda(), norms[1].cuda(), norms[2])
    truth_case, plain_case = case.copy(), case.copy()
    how = norms, options, False, is_interleaved
    truth = op.reference(case.qkv, case.angles, truth_case.cache, case.state, *how)
    got = kernel.attend(case.qkv, case.angles, case.cache, case.state, norms, options)
    torchs = plain(plain_case, *how)
    fair = rows_of_several_keys(case, options)
    if fair.any():
        assert rms_error(got[fair], truth[fair]) <= 1.1 * rms_error(torchs[fair], truth[fair])
    for row, position in enumerate(case.state.positions_B.tolist()):
        if position >= 0:
            assert rms_error(got[row], truth[row]) < 0.01, row
        else:
            assert not got[row].any()
    assert (kernel.workspace == -1).all()
    for mine, theirs in zip(
        dataclasses.astuple(case.cache), dataclasses.astuple(truth_case.cache), strict=True
    ):
        assert mine is None or torch.equal(bits(mine), bits(theirs))
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("N", "K", "H"), op.CASES)
def test_no_less_exact_than_torch_and_the_cache_has_the_same_bits(N, K, H, kv_dtype, made, rng):
    check(made(N, K, H, 16, kv_dtype), step(RAGGED, N, K, H, rng, kv_dtype=kv_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2e-5, 3000.0])
def test_fp8_values_may_be_small_or_large(size, made, rng):
    case = step(RAGGED, 28, 4, 128, rng, kv_dtype=torch.float8_e4m3fn)
    case.cache.v_scales.mul_(size)
    case.qkv[:, -4 * 128 :] *= size
    check(made(28, 4, 128, kv_dtype=torch.float8_e4m3fn), case)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_tokens", [32, 48, 256])
def test_pages_may_be_of_any_16_tokens(page_tokens, kv_dtype, made, rng):
    case = step(RAGGED, 28, 4, 128, rng, page_tokens=page_tokens, kv_dtype=kv_dtype)
    check(made(28, 4, 128, page_tokens, kv_dtype), case)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("chunk", [LONG_CHUNKS[0], 320, LONG_CHUNKS[-1]])
def test_many_rows_have_chunks_of_as_many_positions_as_the_state_says(chunk, kv_dtype, made, rng):
    lengths = (*RAGGED * 4, *(n * chunk + more for n in (1, 2, 3) for more in (-1, 0, 1)), 0, 1023)
    case = step(lengths, 28, 4, 128, rng, kv_dtype=kv_dtype)
    case.state.chunk_1.fill_(chunk)
    check(made(28, 4, 128, 16, kv_dtype, rows=80), case)


def test_chunks_are_such_that_all_ctas_have_about_as_much_to_do():
    """On an H200, FP8: 1,056 CTAs."""

    def chunk(lengths):
        shape = choose_shape(len(lengths), 4, 8192, True, num_sms=132)
        assert shape.is_variable and shape.chunk == 512
        return shape.best_chunk(lengths, 4, num_sms=132)

    assert chunk([40] * 40) == 192  # a row is one chunk in any case
    assert chunk([4352] * 64) == 384  # 2,304 units of 512 are 2.2 a CTA, 3,072 are 2.9
    assert chunk([8000] * 64) == 512
    assert chunk([300, 700, 900, 1700] * 32) == 256
    few = choose_shape(40, 4, 656, True, num_sms=132)
    assert (few.chunk, few.ctas_per_sm, few.is_variable) == (256, 3, False)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
def test_heads_may_be_normed(H, made, rng):
    """In bfloat16 only: the norm's sum may round differently, which a cast to FP8 would show."""
    case, norms = step(RAGGED, 8, 2, H, rng).moved("cuda"), random_norms(H, rng)
    norms = (norms[0].cuda(), norms[1].cuda(), norms[2])
    truth_case, plain_case = case.copy(), case.copy()
    truth = op.reference(case.qkv, case.angles, truth_case.cache, case.state, norms)
    got = made(8, 2, H).attend(case.qkv, case.angles, case.cache, case.state, norms=norms)
    assert rms_error(got, truth) <= 1.1 * rms_error(plain(plain_case, norms), truth)
    mine, theirs = case.cache.k.view(torch.int16).int(), truth_case.cache.k.view(torch.int16).int()
    assert (mine != theirs).float().mean() < 1e-3 and (mine - theirs).abs().max() <= 1
    assert torch.equal(bits(case.cache.v), bits(truth_case.cache.v))


GROUPS = ((0, 2, 5, 9, 11, 12), (3, 4), (6, 7, 8, 13, 14))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shared", [16, C - 16, C, 2 * C, 3 * C + 48])
@pytest.mark.parametrize(("N", "K", "H"), [(28, 4, 128), (6, 2, 64), (32, 2, 128)])
def test_rows_may_share_pages(N, K, H, shared, kv_dtype, made, rng):
    lengths = [shared + n for n in (1, 2, 0, 700, 15, 17, 128, 129, 5, 64, 1, 300, 40, 1, 1, 200)]
    for ended in (2, 3, 9):  # a member, the first of a group, the last but two
        lengths[ended] = 0
    case = step(lengths, N, K, H, rng, kv_dtype=kv_dtype, groups=GROUPS, shared=shared)
    check(made(N, K, H, 16, kv_dtype), case)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("most", [32, 64])
def test_a_row_depends_on_that_row_alone(most, kv_dtype, made, rng):
    """In batches of up to 32 rows, and in larger ones that have the same chunks."""
    kernel = made(28, 4, 128, 16, kv_dtype)
    case = step(RAGGED * (most // 16), 28, 4, 128, rng, kv_dtype=kv_dtype).moved("cuda")
    whole = kernel.attend(case.qkv, case.angles, case.cache, case.state)
    batches = (1, 3, 10)
    if most > 32:
        positions, is_fp8 = 16 * case.state.tables_BX.shape[1], kv_dtype != torch.bfloat16
        shapes = [choose_shape(B, 4, positions, is_fp8, num_sms(case.qkv.device)) for B in range(most + 1)]
        same = [B for B in range(33, most) if shapes[B].chunk == shapes[most].chunk]
        batches = (same[0], same[-1])
    for B in batches:
        part = kernel.attend(case.qkv[:B].contiguous(), case.angles, case.cache, case.state)
        assert torch.equal(part, whole[:B])
    order = torch.randperm(most, generator=rng).cuda()
    state = dataclasses.replace(
        case.state, tables_BX=case.state.tables_BX[order], positions_B=case.state.positions_B[order]
    )
    assert torch.equal(kernel.attend(case.qkv[order], case.angles, case.cache, state), whole[order])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("N", "K", "H"), op.CASES)
def test_chunks_that_many_ctas_add_up_have_the_bits_of_one(N, K, H, kv_dtype, made, rng, monkeypatch):
    """tests/kernels/attention/test_decode_attention_rows.py shows it on a CPU, where one CTA does all."""
    case = step((*RAGGED, 2000, 1500), N, K, H, rng, kv_dtype=kv_dtype).moved("cuda")
    many = made(N, K, H, kv_dtype=kv_dtype)
    outputs = [many.attend(case.qkv, case.angles, case.cache, case.state) for _ in range(3)]
    assert torch.equal(many.workspace, torch.full_like(many.workspace, -1))
    monkeypatch.setattr(
        op, "choose_shape", lambda *given: dataclasses.replace(choose_shape(*given), has_few_rows=False)
    )
    one = op.DecodeAttention(N, K, H, 16, kv_dtype, 64, POSITIONS // 16, torch.device("cuda"))
    expected = one.attend(case.qkv, case.angles, case.cache, case.state)
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_replayed_graph_with_a_changing_state_equals_eager(kv_dtype, made, rng):
    kernel = made(28, 4, 128, 16, kv_dtype)
    lengths = [300 + n for n in (1, 2, 0, 90, 15, 17, 128, 129, 5, 64, 1, 300, 40, 1, 1, 200)]
    case = step([*lengths, 640], 28, 4, 128, rng, kv_dtype=kv_dtype, groups=GROUPS, shared=256).moved("cuda")
    case.qkv = case.qkv[:16].contiguous()
    eager_case = case.copy()
    graph = torch.cuda.CUDAGraph()
    kernel.attend(case.qkv, case.angles, case.copy().cache, case.state)  # compiles
    before = case.copy().cache
    with torch.cuda.graph(graph):
        out = kernel.attend(case.qkv, case.angles, case.cache, case.state)
    for now, then in zip(dataclasses.astuple(case.cache), dataclasses.astuple(before), strict=True):
        assert now is None or torch.equal(bits(now), bits(then))  # recording runs nothing
    for i in range(12):
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        eager = kernel.attend(case.qkv, case.angles, eager_case.cache, case.state)
        assert torch.equal(got, eager) and got.isfinite().all()
        case.state.positions_B.add_((case.state.positions_B >= 0).int())
        case.state.positions_B[i] = -1
        case.qkv.copy_(case.qkv.roll(1, 0))


@pytest.mark.gpu
def test_a_long_context_is_right_and_an_empty_batch_gives_zeros(made, rng):
    lengths = (32768, 5, 0, 20000)
    case = step(lengths, 7, 1, 128, rng)
    case.angles = turning_angles(128, 32768)
    kernel = made(7, 1, 128, rows=4, pages=2048)
    check(kernel, case)
    case = case.moved("cuda")
    case.state.positions_B.fill_(-1)
    assert not kernel.attend(case.qkv, case.angles, case.cache, case.state).any()


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_one_sequence_together_are_the_rows_one_by_one(kv_dtype, has_norms, made, rng):
    N, K, H, T = 28, 4, 128, 300
    case = step((T,) * T, N, K, H, rng, kv_dtype=kv_dtype).moved("cuda")
    norms = None
    if has_norms:
        q_norm, k_norm, eps = random_norms(H, rng)
        norms = q_norm.cuda(), k_norm.cuda(), eps
    state = case.state
    state.tables_BX[:] = state.tables_BX[0]
    state.positions_B[:] = torch.arange(T)
    kernel = made(N, K, H, kv_dtype=kv_dtype, rows=128)
    one, together = case.copy(), case.copy()
    expected = []
    for t in range(T):  # alone in a launch of as many rows
        start, alone = t // 128 * 128, torch.full_like(state.positions_B, -1)
        alone[t] = t
        row = dataclasses.replace(state, positions_B=alone[start:], tables_BX=state.tables_BX[start:])
        rows = one.qkv[start : start + 128]
        expected.append(
            kernel.attend(rows, one.angles, one.cache, row, norms=norms)[t - start : t - start + 1]
        )
    got = [
        kernel.attend_together(
            case.qkv[start : start + 128],
            case.angles,
            together.cache,
            dataclasses.replace(
                state, positions_B=state.positions_B[start:], tables_BX=state.tables_BX[start:]
            ),
            norms=norms,
        )
        for start in range(0, T, 128)
    ]
    assert torch.equal(torch.cat(got), torch.cat(expected))
    for a, b in zip(dataclasses.astuple(one.cache), dataclasses.astuple(together.cache), strict=True):
        assert a is None or torch.equal(bits(a), bits(b))
