"""Adapters by row on a Hopper GPU: samples of several adapters in one batch, whose graphs serve any mix."""

import pytest
import torch

from engine.decode.test_decode_kernels import FACTOR, NEVER, decoder_of, small_prompts
from engine.decode.test_decode_kernels import pytestmark as pytestmark
from engine.decode.test_row_adapters import random_adapter
from engine.parts import engine_of, fp32_copy, packed_logprobs
from qerl.engine.live_batch import LiveRequest
from qerl.models.adapter_bank import AdapterBank
from qerl.types import Sampling

LENGTHS, SCALING = (9, 31, 1, 16, 17, 40), 2.0


@pytest.fixture(scope="module")
def decoder():
    return decoder_of(rank=None)


@pytest.fixture
def bank(decoder):
    decoder.adapter_bank = AdapterBank(torch.bfloat16, decoder.device, max_adapters=4, max_rank=24)
    for seed, rank in enumerate((8, 24, 16)):
        decoder.adapter_bank.add(random_adapter(decoder, rank, seed), SCALING / rank)
    yield decoder.adapter_bank
    decoder.adapter_bank = None


def sampled(engine, numbers, max_tokens=24):
    """A sample of each prompt, by the adapter of its number."""
    found = {}
    with engine.live_batch(128) as batch:
        for i, (prompt, number) in enumerate(zip(small_prompts(*LENGTHS), numbers, strict=True)):

            def on_token(index, token, ended, i=i):
                if ended is not None:
                    found[i] = ended

            how = Sampling(max_tokens=max_tokens, temperature=1.0)
            batch.add(LiveRequest(prompt=prompt, sampling=how, on_token=on_token, table_row=number))
        while len(found) < len(LENGTHS):
            batch.step()
    return [found[i] for i in range(len(LENGTHS))]


@pytest.mark.parametrize("numbers", [(1, 2, 3, 0, 2, 1), (1,) * 6, (0,) * 6])
def test_a_samples_logprobs_are_those_of_the_forward_with_its_adapter(numbers, decoder, bank):
    engine = engine_of(decoder, stop_token_ids=NEVER)
    assert engine.bank_obstacle(bank) is None
    samples = sampled(engine, numbers)
    decoder.adapter_bank, own, packed, exact = None, [], [], []
    for prompt, sample, number in zip(small_prompts(*LENGTHS), samples, numbers, strict=True):
        if number:
            for linear, (a_RK, b_NR) in random_adapter(decoder, (8, 24, 16)[number - 1], number - 1).items():
                linear.add_adapter(a_RK.cuda(), b_NR.cuda(), SCALING / len(a_RK))
        tokens_T = torch.tensor(sample.tokens_T)
        own.append(torch.tensor(sample.logprobs_T))
        for found, model in ((packed, decoder), (exact, fp32_copy(decoder))):
            found.append(packed_logprobs(model, prompt, sample).cpu()[torch.arange(len(tokens_T)), tokens_T])
        for _, linear in decoder.linears():
            linear.lora_A = linear.lora_B = linear.a_work = linear.b_work = None
    own, packed, exact = map(torch.cat, (own, packed, exact))
    assert (own - exact).abs().mean() < FACTOR * (packed - exact).abs().mean()


def test_the_graphs_of_one_mix_serve_another(decoder, bank):
    engine = engine_of(decoder, stop_token_ids=NEVER)
    first = sampled(engine, (1, 2, 3, 0, 2, 1))
    (runner,) = engine._runners._runners.values()
    graphs = dict(runner._graphs)
    second = sampled(engine, (3, 3, 1, 2, 0, 1))
    assert graphs and runner._graphs == graphs
    same = [a.tokens_T == b.tokens_T for a, b in zip(first, second, strict=True)]
    assert same == [False] * 5 + [True]
    bank.remove(1)
    assert bank.add(random_adapter(decoder, 8, 7), SCALING / 8) == 1
    third = sampled(engine, (3, 3, 1, 2, 0, 1))
    assert runner._graphs == graphs
    assert [a.tokens_T == b.tokens_T for a, b in zip(second, third, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]


def test_without_a_bank_steps_are_as_before(decoder):
    """The runner of the bank does not take the place of the other."""
    engine = engine_of(decoder, stop_token_ids=NEVER)
    before = sampled(engine, (0,) * 6)
    decoder.adapter_bank = AdapterBank(torch.bfloat16, decoder.device, max_adapters=1, max_rank=16)
    sampled(engine, (0,) * 6)
    decoder.adapter_bank = None
    again = sampled(engine, (0,) * 6)
    assert [s.tokens_T for s in again] == [s.tokens_T for s in before]
    assert len(engine._runners._runners) == 2
