"""Adapters by row of one pass against passes with one adapter at a time."""

import pytest
import torch

from models import tiny
from qerl.errors import UserError
from qerl.models.adapter_bank import AdapterBank


@pytest.mark.parametrize("family", ("Llama", "Qwen3"))
@torch.no_grad()
def test_a_row_has_the_result_of_its_own_adapter(family, rng):
    decoder = tiny.tiny(family)
    linears = [linear for name, linear in decoder.linears() if not name.endswith("o_proj")]
    bank, scaling = AdapterBank(torch.float32, decoder.device), (0.5, 2.0)
    adapters = []
    for rank, scale in zip((3, 5), scaling, strict=True):
        adapters.append(
            {
                linear: (
                    torch.randn(rank, linear.in_width, generator=rng) / 8,
                    torch.randn(linear.out_width, rank, generator=rng) / 8,
                )
                for linear in linears
            }
        )
        bank.add(adapters[-1], scale)
    x_TK = torch.randn(6, linears[0].in_width, generator=rng)
    rows_T = torch.tensor([2, 0, 1, 1, 2, 0], dtype=torch.int32)
    rows = bank.at(rows_T)
    y_TN = rows.add(linears[0].frozen(x_TK), x_TK, linears[0])
    tokens_T = torch.randint(60, (6,), generator=rng)
    alone = {0: tiny.logits_of(decoder, tokens_T)}
    expected = {0: linears[0].frozen(x_TK)}
    for number, (adapter, scale) in enumerate(zip(adapters, scaling, strict=True), 1):
        for linear, (a_RK, b_NR) in adapter.items():
            linear.add_adapter(a_RK, b_NR, scale)
        expected[number] = linears[0](x_TK)
        alone[number] = tiny.logits_of(decoder, tokens_T)
    for row, number in enumerate(rows_T.tolist()):
        assert torch.allclose(y_TN[row], expected[number][row], atol=1e-5)
    decoder.adapter_bank = bank
    for number, logits_TV in alone.items():
        same_TV = tiny.logits_of(decoder, tokens_T, rows_T=torch.full((6,), number, dtype=torch.int32))
        assert torch.allclose(same_TV, logits_TV, atol=1e-4)


def test_a_number_that_is_free_again_is_the_next_ones_and_no_other_is_added_beyond_the_limit(rng):
    linear = torch.nn.Identity()

    def add(bank, value, rank=2):
        return bank.add({linear: (torch.full((rank, 4), value), torch.ones(3, rank))}, 1.0)

    bank = AdapterBank(torch.float32, torch.device("cpu"), max_adapters=2, max_rank=2)
    assert [add(bank, 1.0), add(bank, 2.0)] == [1, 2] and bank.num_free == 0
    before = bank.take()
    with pytest.raises(UserError, match="2 adapters are in use"):
        add(bank, 3.0)
    bank.remove(1)
    assert add(bank, 3.0) == 1 and bank.take()[1] not in before.values()
    x_TK, rows_T = torch.ones(2, 4), torch.tensor([1, 2], dtype=torch.int32)
    assert bank.at(rows_T).add(torch.zeros(2, 3), x_TK, linear)[:, 0].tolist() == [24.0, 16.0]
    bank.clear()
    assert bank.num_free == 2
    for value, rank, message in ((torch.nan, 2, "not finite"), (1.0, 3, "rank is above 2")):
        with pytest.raises(UserError, match=message):
            add(bank, value, rank)
