"""Every family computes what transformers computes: a row each (family_rows.py)."""

import copy

import pytest
import torch

from conftest import rms_error
from models.family_rows import ROWS, Pairs, adapted, oracle_logprobs, sampled_logprobs
from models.paged_cache import PagedCache
from models.tiny import forest, logits_of
from qerl.kernels.attention import Span
from qerl.models.adapter import adapter_tensors
from qerl.models.families import FAMILIES

TOKENS_T = torch.arange(40) * 7 % 61


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("families"))


def test_every_family_has_a_row():
    assert {f"{family}ForCausalLM" for family in ROWS} == set(FAMILIES)


@pytest.mark.parametrize("family", ROWS)
def test_logits_are_those_of_transformers(pairs, family):
    model, _, decoder = pairs.of(family)
    theirs_TV = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs_TV, atol=1e-4, rtol=0)
    assert theirs_TV.std() > 1  # or 1e-4 would mean nothing


@pytest.mark.parametrize("family", ROWS)
def test_paged_decoding_in_pieces_is_what_transformers_computes(pairs, family):
    """Two chunks of a prompt, then a token at a time, over pages that are out of order."""
    model, _, decoder = pairs.of(family)
    theirs_TV = model(TOKENS_T[None]).logits[0]
    cache = PagedCache(decoder, max_tokens=40)
    table_X = cache.table(0, 40, pages_each=10)
    got = []
    for first, n in ((0, 9), (9, 8)):
        span = Span(start_row=0, num_rows=n, first_position=first, table=table_X)
        positions_T = torch.arange(first, first + n)
        got.append(decoder(TOKENS_T[positions_T], positions_T, cache.prefill([span])))
    for position in range(17, 40):
        at = torch.tensor([position])
        got.append(decoder(TOKENS_T[at], at, cache.decode(table_X[None], at + 1)))
    torch.testing.assert_close(decoder.logits(torch.cat(got)), theirs_TV, atol=1e-4, rtol=0)


PROMPT, BRANCHES = 11, (9, 0, 14)


@pytest.mark.parametrize("family", ROWS)
def test_gradients_of_adapters_are_those_of_transformers(pairs, family):
    """Logprobs of two packed samples of one prompt, and their gradients in every A and B."""
    model, _, decoder = pairs.of(family)
    decoder = adapted(copy.deepcopy(decoder))
    masters = adapter_tensors(decoder)
    tokens_T = torch.cat((TOKENS_T[:PROMPT], TOKENS_T[20:29], TOKENS_T[3:17]))
    samples = [torch.cat((tokens_T[:PROMPT], part)) for part in tokens_T[PROMPT:].split((9, 14))]
    trees = forest((PROMPT, BRANCHES))
    weight_C = torch.randn(23, generator=torch.Generator().manual_seed(7))
    ours_C = sampled_logprobs(decoder, tokens_T, trees)
    with torch.enable_grad():
        theirs_C = torch.cat([oracle_logprobs(model, decoder, tokens_T, PROMPT) for tokens_T in samples])
    torch.testing.assert_close(ours_C, theirs_C, atol=1e-4, rtol=0)
    ours = torch.autograd.grad((ours_C * weight_C).sum(), list(masters.values()))
    theirs = torch.autograd.grad((theirs_C * weight_C).sum(), list(masters.values()))
    for name, got, want in zip(masters, ours, theirs, strict=True):
        assert rms_error(got, want) < 1e-4, name
        assert want.abs().max() > 1e-3, name
