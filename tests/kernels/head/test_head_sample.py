import math

import pytest
import torch

from conftest import rms_error
from qerl.engine.sampling.token_sampling import sample_tokens
from qerl.formats import BF16, FP8, NVFP4
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.head import head_sample as op
from qerl.kernels.head.head_portable import PortableHeadSample
from qerl.kernels.tiles import nvfp4_decode
from qerl.types import Sampling

# Random123's kat_vectors, "philox4x32 10": counter, key, words.
KNOWN_WORDS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_WORDS)
def test_the_generator_gives_the_published_words(counter, key, expected):
    assert op.philox(words(counter), words(key)) == words(expected)


def test_bits_depend_on_key_position_and_vocabulary_index_alone():
    keys, positions = torch.tensor([5, 5, 2**40 + 5]), torch.tensor([7, 8, 7], dtype=torch.int32)
    bits = op.random_bits(keys, positions, 50)
    assert bits.shape == (3, 50) and bits.unique().numel() == 150
    assert torch.equal(op.random_bits(keys[1:2], positions[1:2], 13), bits[1:2, :13])
    word = op.philox(tuple(torch.tensor(n) for n in (3, 7, 0, 0)), (torch.tensor(5), torch.tensor(1 << 8)))
    assert bits[2, 14] == word[2]


def test_the_largest_gumbel_is_precise_and_all_are_finite():
    g = op.gumbels(torch.tensor([0, 2**31, 2**32 - 1]))
    assert g[0] == pytest.approx(math.log(2.0**33), rel=1e-9)
    assert g[1] == pytest.approx(-math.log(math.log(2)), rel=1e-9)
    assert torch.isfinite(g).all()


def chi_square_in_deviations(counts, probabilities):
    expected = probabilities.double() * counts.sum()
    chi = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def test_reference_and_the_engine_draw_from_the_same_distribution(rng):
    num_draws, V = 100_000, 24
    hidden, weight = torch.randn(1, 16, generator=rng), torch.randn(V, 16, generator=rng) * 0.5
    keys = torch.arange(num_draws) * 977
    positions = torch.full((num_draws,), 40, dtype=torch.int32)
    logits = (hidden @ weight.T).expand(num_draws, V)
    uniforms = torch.rand(num_draws, generator=rng, dtype=torch.float64)
    tokens, _ = sample_tokens(logits.contiguous(), Sampling(max_tokens=1, temperature=0.7), uniforms)
    drawn, logprobs, _ = op.reference(hidden.expand(num_draws, 16), weight, keys, positions, 0.7)
    p = (logits[0].double() / 0.7).softmax(0)
    assert abs(chi_square_in_deviations(tokens.bincount(minlength=V), p)) < 5
    assert abs(chi_square_in_deviations(drawn.bincount(minlength=V), p)) < 5
    assert torch.allclose(logprobs, p.log()[drawn])


@pytest.mark.parametrize("D", [64, 128, 576, 2944, 3584, 5120])
@pytest.mark.parametrize("head_format", [0, 1, 2])
def test_every_size_has_a_tile_that_fits(head_format, D):
    if head_format and D % 128:
        return
    for M in (*range(1, 258), 1024):
        tile = op.choose_tile(M, head_format, D)
        assert D % tile.k_block == 0 and tile.stages >= 2 and tile.tokens % tile.reduce_tokens == 0
        assert (tile.shared_bytes + 1024) * tile.ctas_per_sm <= 228 * 1024
        assert tile.threads * tile.ctas_per_sm <= 2048 and tile.threads <= 1024


@pytest.fixture(scope="module")
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


FORMATS = ("bf16", "fp8", "nvfp4")


def make_head(name, V, D, rng):
    """(head, what it multiplies in float64)."""
    weight = (torch.randn(V, D, generator=rng) * 2 / D**0.5).cuda()
    if name == "bf16":
        return BF16(weight.bfloat16()), weight.bfloat16().double()
    if name == "fp8":
        packed = FP8.encode(weight)
        return packed, packed.decode().double()
    packed = NVFP4.encode(weight)
    tiles = nvfp4_decode.pack(packed.codes, packed.scales)
    return op.NVFP4Head(tiles, nvfp4_decode.row_factors(packed.alpha, V)), packed.decode().double()


def fits(name, V, D):
    return name == "bf16" or (D % 128 == 0 and (name == "fp8" or V % 64 == 0))


def rows(M, D, rng):
    hidden = torch.randn(M, D, generator=rng).bfloat16().cuda()
    keys = torch.randint(0, 2**62, (M,), generator=rng).cuda()
    return hidden, keys, torch.randint(0, 5000, (M,), generator=rng, dtype=torch.int32).cuda()


def heat(value):
    return torch.tensor([value], device="cuda")


EXTRA = ((40, 1088, 256), (256, 4160, 3584), (300, 832, 384))


def torch_error(D, rng):
    """Return the error of torch's product of 16-bit operands with fp32 sums and results, so large that it
    does not split k."""
    hidden = torch.randn(256, D, generator=rng).bfloat16().cuda()
    weight = torch.randn(16_640, D, generator=rng).bfloat16().cuda()
    got = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return rms_error(got, hidden.double() @ weight.double().T)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("M", "V", "D"), (*op.CASES, *EXTRA))
def test_logits_are_those_of_float64(name, M, V, D, cuda, rng):
    if not fits(name, V, D):
        V, D = -(-V // 64) * 64, -(-D // 128) * 128
    head, weight = make_head(name, V, D, rng)
    hidden, *_ = rows(M, D, rng)
    got = op.HeadSample(head, M, hidden.device).logits(hidden)
    truth = hidden.double() @ weight.T
    assert got.shape == (M, V) and got.dtype == torch.float32
    assert rms_error(got, truth) <= 1.1 * torch_error(hidden.shape[1], rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("M", [1, 8, 33, 70])
def test_a_head_whose_rows_end_with_zeros_reads_the_hidden_states_before_them(name, M, cuda, rng):
    """gpt-oss's 2,880 elements, in a head of 2,944; also while a graph is recorded."""
    head, _ = make_head(name, 1088, 2944, rng)
    hidden, keys, positions = rows(M, 2944, rng)
    hidden[:, 2880:] = 0
    short = hidden[:, :2880].contiguous()
    kernel = op.HeadSample(head, M, hidden.device)
    assert torch.equal(kernel.logits(short), kernel.logits(hidden))
    want = kernel.draw(hidden, keys, positions, heat(0.7))
    kernel.draw(short, keys, positions, heat(0.7))
    temperature, graph = heat(0.7), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.draw(short, keys, positions, temperature)
    graph.replay()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("M", "V", "D"), (*op.CASES, *EXTRA))
def test_draws_are_those_of_float64_with_the_same_bits(name, temperature, M, V, D, cuda, rng):
    if not fits(name, V, D):
        V, D = -(-V // 64) * 64, -(-D // 128) * 128
    head, weight = make_head(name, V, D, rng)
    hidden, keys, positions = rows(M, D, rng)
    kernel = op.HeadSample(head, M, hidden.device)
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(temperature))
    truth, truth_logprobs, lead = op.reference(hidden, weight, keys, positions, temperature)
    logits = kernel.logits(hidden)
    slack = 2 * (logits - hidden.double() @ weight.T).abs().max() / (temperature or 1) + 1e-5
    differs = tokens.long() != truth
    assert slack < 2e-4 and not (differs & (lead > slack)).any()
    assert (logprobs - truth_logprobs)[~differs].abs().max() < slack
    scaled = logits / temperature if temperature else logits
    assert (logprobs - scaled.log_softmax(1).gather(1, tokens.long()[:, None])[:, 0]).abs().max() < 1e-5
    if temperature == 0:
        assert torch.equal(tokens.long(), logits.argmax(1))


TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", (*FORMATS, "bf16 portable", "fp8 portable"))
@pytest.mark.parametrize("M", [5, 8, 33, 64, 128, 256])
def test_rows_have_temperatures_of_their_own_to_the_bit(name, M, cuda, rng):
    V, D = 9024, 512
    head, weight = make_head(name.split()[0], V, D, rng)
    hidden, keys, positions = rows(M, D, rng)
    kernel = (PortableHeadSample if "portable" in name else op.HeadSample)(head, 256, hidden.device)
    temperatures = torch.tensor([TEMPERATURES[m % 5] for m in range(256)], device="cuda")
    tokens, logprobs = kernel.draw(hidden, keys, positions, temperatures)
    assert torch.equal(kernel.score(hidden, tokens.long(), temperatures), logprobs)
    for first, value in enumerate(TEMPERATURES):
        alone = kernel.draw(hidden, keys, positions, heat(value))
        assert torch.equal(alone[0][first::5], tokens[first::5])
        assert torch.equal(alone[1][first::5], logprobs[first::5])
    truth, _, lead = op.reference(hidden, weight, keys, positions, temperatures[:M])
    assert not ((tokens.long() != truth) & (lead > 1e-3)).any()
    state, stops = make_state(M, rng), torch.full((2,), -1, dtype=torch.int32).cuda()
    drawn = kernel.draw(hidden, state.keys_B, state.positions_B.clone(), temperatures)
    kernel.step(hidden, state, stops, temperatures)
    assert torch.equal(state.drawn_tokens_WB[0], drawn[0])
    assert torch.equal(state.drawn_logprobs_WB[0], drawn[1])


@pytest.mark.gpu
def test_fewer_than_one_draw_in_a_thousand_is_decided_by_rounding(cuda, rng):
    M, V, D = 4096, 1040, 256
    head, weight = make_head("bf16", V, D, rng)
    kernel = op.HeadSample(head, M, torch.device("cuda"))
    num_differing = 0
    for _ in range(4):
        hidden, keys, positions = rows(M, D, rng)
        tokens, _ = kernel.draw(hidden, keys, positions, heat(1.0))
        truth, _, lead = op.reference(hidden, weight, keys, positions, 1.0)
        num_differing += (tokens.long() != truth).sum().item()
        assert not ((tokens.long() != truth) & (lead > 1e-4)).any()
    assert num_differing < 0.001 * 4 * M


@pytest.mark.gpu
def test_200000_draws_have_the_softmax_distribution(cuda, rng):
    M, V, D = 8000, 48, 128
    head, weight = make_head("bf16", V, D, rng)
    kernel = op.HeadSample(head, M, torch.device("cuda"))
    hidden = torch.randn(1, D, generator=rng).bfloat16().cuda().expand(M, D).contiguous()
    counts = torch.zeros(V, dtype=torch.int64, device="cuda")
    for position in range(25):
        keys, positions = torch.arange(M).cuda(), torch.full((M,), position, dtype=torch.int32).cuda()
        counts += kernel.draw(hidden, keys, positions, heat(0.7))[0].bincount(minlength=V)
    p = (hidden[0].double() @ weight.T / 0.7).softmax(0)
    assert counts.sum() == 200_000 and abs(chi_square_in_deviations(counts, p)) < 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_bitwise_the_same_at_every_count_of_rows(name, cuda, rng):
    V, D = 9024, 3584
    head, _ = make_head(name, V, D, rng)
    hidden, keys, positions = rows(256, D, rng)
    kernel = op.HeadSample(head, 300, hidden.device)
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(0.7))
    logits = kernel.logits(hidden)
    for M in (1, 7, 8, 9, 24, 32, *range(33, 256, 16), 64, 128):
        part = hidden[:M].contiguous()
        got = kernel.draw(part, keys[:M], positions[:M], heat(0.7))
        assert torch.equal(got[0], tokens[:M]) and torch.equal(got[1], logprobs[:M])
        assert torch.equal(kernel.logits(part), logits[:M])
    order = torch.randperm(256, generator=rng).cuda()
    got = kernel.draw(hidden[order], keys[order], positions[order], heat(0.7))
    assert torch.equal(got[0], tokens[order]) and torch.equal(got[1], logprobs[order])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 65, 256])
def test_ties_at_temperature_zero_go_to_the_lowest_index(M, cuda, rng):
    weight = torch.randn(16, 128, generator=rng).repeat(65, 1).bfloat16().cuda()
    hidden, keys, positions = rows(M, 128, rng)
    kernel = op.HeadSample(BF16(weight), M, hidden.device)
    tokens, _ = kernel.draw(hidden, keys, positions, heat(0.0))
    assert torch.equal(tokens.long(), (hidden.double() @ weight[:16].double().T).argmax(1))


def make_state(M, rng, *, steps=24, width=None):
    state = DecodeState.empty(width or M, 1, steps, "cuda")
    _, keys, positions = rows(M, 64, rng)
    state.keys_B[:M], state.positions_B[:M] = keys, positions
    state.ends_B.fill_(10_000)
    state.drawn_tokens_WB.fill_(-7)
    state.drawn_logprobs_WB.fill_(-7.0)
    return state


def first_rows(state, M):
    values = {}
    for name in DecodeState.__slots__:
        tensor = getattr(state, name)
        values[name] = tensor if name == "place_1" else tensor[:, :M] if name.endswith("WB") else tensor[:M]
    return DecodeState(**values)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 7, 8, 64, 65, 256])
def test_a_step_moves_the_state_on(name, M, cuda, rng):
    V, D = 1088, 256
    head, _ = make_head(name, V, D, rng)
    hidden, *_ = rows(M, D, rng)
    kernel = op.HeadSample(head, 256, hidden.device)
    whole = make_state(M, rng, width=256)
    state = first_rows(whole, M)
    state.place_1.fill_(3)
    state.positions_B[M // 2 :: 5] = -1
    hidden[M // 2 :: 5] = float("nan")  # what a dead row holds is nobody's business
    before = state.positions_B.clone()
    tokens, logprobs = kernel.draw(hidden, state.keys_B, before, heat(0.7))
    alive = before >= 0
    if M > 1:
        state.ends_B[1] = before[1] + 1
    stops = torch.tensor([tokens[0].item(), -1, -1], dtype=torch.int32).cuda()
    state.tokens_B.fill_(11)
    kernel.step(hidden, state, stops, heat(0.7))
    has_ended = (tokens == tokens[0]) | (before + 1 == state.ends_B)
    moved = torch.where(has_ended, -1, before + 1)
    assert torch.equal(state.positions_B, torch.where(alive, moved, -1))
    assert torch.equal(state.tokens_B, torch.where(alive, tokens, 11))
    assert torch.equal(state.drawn_tokens_WB[3], torch.where(alive, tokens, 0))
    assert torch.equal(state.drawn_logprobs_WB[3], torch.where(alive, logprobs, 0.0))
    assert state.place_1.item() == 4
    rest = torch.ones_like(whole.drawn_tokens_WB, dtype=torch.bool)
    rest[3, :M] = False
    assert (whole.drawn_tokens_WB[rest] == -7).all() and (whole.drawn_logprobs_WB[rest] == -7).all()
    assert (whole.positions_B[M:] == -1).all() and (whole.tokens_B[M:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("poison_value", [float("nan"), float("inf")])
@pytest.mark.parametrize("M", [5, 64, 140])
def test_a_row_that_is_not_finite_ends_with_a_nan_logprob_and_leaves_the_others(M, poison_value, cuda, rng):
    head, _ = make_head("bf16", 1040, 192, rng)
    hidden, *_ = rows(M, 192, rng)
    kernel = op.HeadSample(head, M, hidden.device)
    state, stops = make_state(M, rng), torch.full((2,), -1, dtype=torch.int32).cuda()
    before = state.positions_B.clone()
    good_tokens, good_logprobs = kernel.draw(hidden, state.keys_B, before, heat(1.0))
    hidden[3, 17] = poison_value
    kernel.step(hidden, state, stops, heat(1.0))
    others = torch.arange(M, device="cuda") != 3
    assert state.drawn_logprobs_WB[0, 3].isnan() and state.positions_B[3] == -1
    assert 0 <= state.drawn_tokens_WB[0, 3] < 1040
    assert torch.equal(state.drawn_tokens_WB[0][others], good_tokens[others])
    assert torch.equal(state.drawn_logprobs_WB[0][others], good_logprobs[others])
    assert torch.equal(state.positions_B[others], before[others] + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [8, 64, 256])
def test_20_graph_replays_equal_20_eager_steps(name, M, cuda, rng):
    V, D = 9024, 512
    head, _ = make_head(name, V, D, rng)
    table = torch.randn(V, D, generator=rng).bfloat16().cuda()
    kernel = op.HeadSample(head, M, torch.device("cuda"))
    temperature, stops = heat(1.0), torch.arange(0, 300, dtype=torch.int32).cuda()
    eager = make_state(M, rng)
    recorded = DecodeState(**{name: getattr(eager, name).clone() for name in DecodeState.__slots__})

    def step(state):
        kernel.step(table[state.tokens_B.long()], state, stops, temperature)

    for _ in range(20):
        step(eager)
    spare = make_state(M, rng)
    step(spare)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(recorded)
    for _ in range(20):
        graph.replay()
    for name in DecodeState.__slots__:
        assert torch.equal(getattr(eager, name), getattr(recorded, name)), name
    assert eager.place_1.item() == 20 and (eager.positions_B == -1).any()


@pytest.fixture
def portable():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return PortableHeadSample


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("M", "V", "D"), [(1, 1008, 128), (65, 2064, 384), (140, 9024, 3584), (256, 640, 1024)]
)
def test_the_portable_kernel_draws_the_same(name, temperature, M, V, D, portable, rng):
    head, weight = make_head(name, V, D, rng)
    hidden, keys, positions = rows(M, D, rng)
    kernel = portable(head, 300, hidden.device)
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(temperature))
    truth, truth_logprobs, lead = op.reference(hidden, weight, keys, positions, temperature)
    logits = kernel.logits(hidden)
    assert rms_error(logits, hidden.double() @ weight.T) <= 1.1 * torch_error(hidden.shape[1], rng)
    slack = 2 * (logits - hidden.double() @ weight.T).abs().max() / (temperature or 1) + 1e-5
    differs = tokens.long() != truth
    assert slack < 2e-4 and not (differs & (lead > slack)).any()
    assert (logprobs - truth_logprobs)[~differs].abs().max() < slack
    part = kernel.draw(hidden[: M // 2 + 1], keys, positions, heat(temperature))
    assert torch.equal(part[0], tokens[: M // 2 + 1]) and torch.equal(part[1], logprobs[: M // 2 + 1])


@pytest.mark.gpu
def test_the_portable_step_moves_the_state_on_as_the_other(portable, cuda, rng):
    M, V, D = 70, 1040, 256
    head, _ = make_head("bf16", V, D, rng)
    hidden, *_ = rows(M, D, rng)
    hidden[9, 3] = float("nan")
    states = [make_state(M, torch.Generator().manual_seed(1)) for _ in range(2)]
    stops = torch.arange(0, 100, dtype=torch.int32).cuda()
    kernels = (op.HeadSample(head, M, hidden.device), portable(head, M, hidden.device))
    for state, kernel in zip(states, kernels, strict=True):
        state.positions_B[5::7] = -1
        for _ in range(3):
            kernel.step(hidden, state, stops, heat(1.0))
    for name in ("tokens_B", "positions_B", "drawn_tokens_WB", "place_1"):
        first, second = (getattr(state, name) for state in states)
        if name == "drawn_tokens_WB":
            first[0, 9] = second[0, 9] = 0  # a row of NaNs has no best token
        if name == "tokens_B":
            first[9] = second[9] = 0
        assert torch.equal(first, second), name
    logprobs = [state.drawn_logprobs_WB for state in states]
    assert torch.allclose(*logprobs, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 8, 33, 128, 256])
def test_the_score_of_a_drawn_token_is_its_logprob_to_the_bit(name, M, cuda, rng):
    V, D = 9024, 3584
    head, _ = make_head(name, V, D, rng)
    hidden, keys, positions = rows(M, D, rng)
    kernel = op.HeadSample(head, 300, hidden.device)
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(0.7))
    assert torch.equal(kernel.score(hidden, tokens.long(), heat(0.7)), logprobs)
    others = torch.randint(0, V, (M,), generator=rng).cuda()
    truth = (kernel.logits(hidden).double() / 0.7).log_softmax(1).gather(1, others[:, None])[:, 0]
    assert (kernel.score(hidden, others, heat(0.7)) - truth).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_the_portable_score_of_a_drawn_token_is_its_logprob_to_the_bit(name, portable, rng):
    head, _ = make_head(name, 2064, 384, rng)
    hidden, keys, positions = rows(65, 384, rng)
    kernel = portable(head, 300, hidden.device)
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(0.7))
    assert torch.equal(kernel.score(hidden, tokens.long(), heat(0.7)), logprobs)
    others = torch.randint(0, 2064, (65,), generator=rng).cuda()
    truth = (kernel.logits(hidden).double() / 0.7).log_softmax(1).gather(1, others[:, None])[:, 0]
    assert (kernel.score(hidden, others, heat(0.7)) - truth).abs().max() < 1e-4
