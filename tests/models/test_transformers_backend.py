"""Models that transformers' own code runs, with our linears in them."""

import pytest
import torch

from models.any_family import ROWS, load, oracle


@pytest.mark.parametrize("family", ROWS)
def test_logits_are_those_of_transformers(tmp_path, family):
    model = oracle(family)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 270, (2, 20), generator=torch.Generator().manual_seed(1))
    found = load(tmp_path)
    assert len(list(found.linears())) > 0
    torch.testing.assert_close(found.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
