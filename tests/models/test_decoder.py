import pytest
import torch

from conftest import rms_error
from models.paged_cache import PagedCache
from models.tiny import FAMILIES, forest, logits_of, oracle, packed, ported, tiny
from qerl.config import AdapterConfig
from qerl.kernels.attention.attention import Span
from qerl.models.peft.adapter import adapter_tensors, add_adapter, publish

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TOKENS_T = torch.arange(40) * 7 % 61


def _agrees(model):
    decoder = ported(model)
    theirs_TV = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs_TV, atol=1e-4, rtol=0)
    assert theirs_TV.std() > 1  # or 1e-4 would mean nothing


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tied):
    _agrees(oracle(family, tie_word_embeddings=tied))


@pytest.mark.parametrize("kind", ROPES)
def test_logits_are_those_of_transformers_with_every_rope(kind):
    _agrees(oracle("Llama", rope_parameters=ROPES[kind]))


@pytest.mark.parametrize(
    ("family", "settings"),
    (
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3", {"attention_bias": True}),
        ("Llama", {"num_key_value_heads": 6}),
        ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
        ("Llama", {"head_dim": 8, "hidden_act": "silu"}),
    ),
)
def test_logits_are_those_of_transformers_with_biases_and_odd_heads(family, settings):
    _agrees(oracle(family, **settings))


def test_bf16_loses_no_more_than_transformers_in_bf16():
    model = oracle("Qwen3")
    truth_TV = model.double()(TOKENS_T[None]).logits[0]
    theirs_TV = model.bfloat16()(TOKENS_T[None]).logits[0]
    ours_TV = logits_of(ported(model.float(), compute=torch.bfloat16), TOKENS_T)
    assert ours_TV.dtype == torch.float32
    assert rms_error(ours_TV, truth_TV) <= 1.1 * rms_error(theirs_TV, truth_TV)


def test_in_bf16_the_residual_stream_is_fp32_and_is_not_rounded():
    decoder, streams = tiny(compute=torch.bfloat16), []

    def watched(layer, h_TD, places, layer_index, attend):
        streams.append(layer(h_TD, places, layer_index, attend).clone())
        return streams[-1].clone()

    with torch.no_grad():
        hidden_TD = decoder(TOKENS_T, torch.arange(len(TOKENS_T)), lambda layer, q, k, v, options: q, watched)
    assert hidden_TD.dtype == torch.bfloat16
    for h_TD in streams:
        assert h_TD.dtype == torch.float32
        assert (h_TD != h_TD.bfloat16()).float().mean() > 0.3  # a sum may happen to have eight bits


def test_bf16_logits_are_not_rounded_to_bf16():
    decoder = tiny(compute=torch.bfloat16)
    hidden_TD = torch.randn(9, 48).bfloat16()
    truth_TV = hidden_TD.double() @ decoder.lm_head.weight.double().T
    assert rms_error(decoder.logits(hidden_TD), truth_TV) < 2**-16


@pytest.mark.parametrize("family", ("Llama", "Qwen3"))
def test_decode_over_pages_is_the_packed_forward_at_every_position(family):
    decoder = tiny(family)
    sequences = [TOKENS_T[:21], TOKENS_T[5:26]]
    truth = [logits_of(decoder, tokens_T) for tokens_T in sequences]
    cache = PagedCache(decoder, max_tokens=48)
    tables_BX = torch.stack([cache.table(b, 21, pages_each=6) for b in range(2)])
    tables_BX = torch.nn.functional.pad(tables_BX, (0, 2))
    for position in range(19):
        tokens_B = torch.tensor([sequences[0][position], sequences[1][max(position - 2, 0)]])
        positions_B = torch.tensor([position, max(position - 2, 0)])  # sequences of unequal length
        hidden_BD = decoder(tokens_B, positions_B, cache.decode(tables_BX, positions_B + 1))
        got_BV = decoder.logits(hidden_BD)
        for b in range(2):
            torch.testing.assert_close(got_BV[b], truth[b][positions_B[b]], atol=1e-5, rtol=1e-5)


def test_prefill_in_chunks_is_prefill_in_one_piece():
    decoder = tiny("Qwen2")
    truth = [logits_of(decoder, TOKENS_T[:23]), logits_of(decoder, TOKENS_T[9:20])]
    cache = PagedCache(decoder, max_tokens=48)
    tables = [cache.table(0, 23, pages_each=6), cache.table(1, 11, pages_each=6)]

    def chunk(*parts):
        """Parts (sequence, first position, rows), one after the other in one forward."""
        spans, tokens, positions, row = [], [], [], 0
        for b, first, n in parts:
            spans.append(Span(start_row=row, num_rows=n, first_position=first, table=tables[b]))
            tokens.append((TOKENS_T[:23], TOKENS_T[9:20])[b][first : first + n])
            positions.append(torch.arange(first, first + n))
            row += n
        hidden_TD = decoder(torch.cat(tokens), torch.cat(positions), cache.prefill(spans))
        return decoder.logits(hidden_TD).split([n for *_, n in parts])

    got = [*chunk((0, 0, 9)), *chunk((0, 9, 5), (1, 0, 4)), *chunk((1, 4, 7), (0, 14, 9))]
    torch.testing.assert_close(torch.cat((got[0], got[1], got[4])), truth[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat((got[2], got[3])), truth[1], atol=1e-5, rtol=1e-5)


def _with_live_adapter(family="Qwen3"):
    decoder = tiny(family)
    add_adapter(decoder, AdapterConfig(rank=4, alpha=8.0), seed=3)
    rng = torch.Generator().manual_seed(4)
    for master in adapter_tensors(decoder).values():
        master.data.copy_(torch.randn(master.shape, generator=rng) * 0.1)
    publish(decoder)
    return decoder


def test_packed_trees_are_their_branches_alone_in_value_and_gradient():
    decoder = _with_live_adapter()
    masters = list(adapter_tensors(decoder).values())
    prompt, branches = TOKENS_T[:7], (TOKENS_T[20:25], TOKENS_T[8:9], TOKENS_T[12:12], TOKENS_T[30:33])
    other = TOKENS_T[3:14]
    weight_D = torch.randn(48, generator=torch.Generator().manual_seed(5))

    trees = forest((11, ()), (7, tuple(len(b) for b in branches)))
    positions_T, attend = packed(trees)
    hidden_TD = decoder(torch.cat((other, prompt, *branches)), positions_T, attend)
    loss = (hidden_TD @ weight_D).tanh()
    together = torch.autograd.grad(loss[:11].sum() + loss[18:].sum(), masters)

    def alone(tokens_T):
        positions_T, attend = packed(forest((len(tokens_T), ())))
        return decoder(tokens_T, positions_T, attend)

    separate = [alone(other), *(alone(torch.cat((prompt, b)))[7:] for b in branches)]
    torch.testing.assert_close(hidden_TD[:11], separate[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden_TD[18:], torch.cat(separate[1:]), atol=1e-5, rtol=1e-4)
    apart = torch.autograd.grad((torch.cat(separate) @ weight_D).tanh().sum(), masters)
    for got, want in zip(together, apart, strict=True):
        assert rms_error(got, want) < 1e-5


def test_only_the_adapter_is_a_parameter():
    assert not list(tiny().parameters())
    decoder = _with_live_adapter()
    assert {id(p) for p in decoder.parameters()} == {id(p) for p in adapter_tensors(decoder).values()}


def test_a_tied_head_is_the_embedding_and_counted_once():
    tied, untied = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.num_bytes - tied.num_bytes == 61 * 48 * 4


def test_resident_operands_change_memory_and_no_number():
    decoder = tiny()
    packed_logits, packed_bytes = logits_of(decoder, TOKENS_T), decoder.num_bytes
    decoder.make_resident()
    weights = sum(m.in_width * m.out_width for _, m in decoder.linears())
    assert decoder.num_bytes - packed_bytes == 4 * weights
    assert torch.equal(logits_of(decoder, TOKENS_T), packed_logits)


def test_names_are_those_of_hugging_face():
    model = oracle("Qwen3")
    ours = {name for name, _ in ported(model).named_buffers() if not name.endswith("noise")}
    ours |= {f"{name}.weight" for name, _ in ported(model).linears()}
    assert ours == {name.removeprefix("model.") for name in model.state_dict()}
