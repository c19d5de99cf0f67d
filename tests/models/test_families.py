"""Every family computes what transformers computes: a row each (family_rows.py)."""

import pytest
import torch

from models.family_rows import ROWS, Pairs
from models.tiny import logits_of
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
