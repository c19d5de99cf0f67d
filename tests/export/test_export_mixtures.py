"""Adapters of a mixture: merged with the same logits, and refused where PEFT could not read them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from export.test_export import exported, refusal, run_of
from models.family_rows import oracle
from models.family_rows import save as save_oracle
from models.tiny import logits_of
from qerl.config import AdapterConfig

TOKENS_T = torch.arange(40) * 7 % 61
EXPERTS = AdapterConfig(rank=4, alpha=8.0, experts="per_expert", expert_rank=2)
ROUTER = AdapterConfig(rank=4, alpha=8.0, router=True)


def save(folder, family):
    save_oracle(oracle(family, vocab_size=320), folder)


@pytest.mark.parametrize("family", ["Olmoe", "GraniteMoe", "GptOss"])
@pytest.mark.parametrize("name", ["experts", "router"])
def test_adapters_that_peft_could_not_read_are_refused_and_merged(tmp_path, name, family):
    adapter = EXPERTS if name == "experts" else ROUTER
    _, config, decoder = run_of(tmp_path, family, format="bf16", adapter=adapter, save=save)
    said = refusal(lambda: exported(tmp_path, config, "peft"))
    assert said.endswith(f"adapter.{name} is not written in PEFT's layout; use --as merged")
    assert not (tmp_path / "peft").exists()
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged", dtype="fp32"))
    with torch.no_grad():
        theirs_TV = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(theirs_TV, logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
