"""Adapters of a mixture: merged with the same logits, and refused where PEFT could not read them."""

import dataclasses

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conftest import rms_error
from export.test_export import decoder_of, exported, refusal, run_of
from models.family_rows import oracle
from models.family_rows import save as save_oracle
from models.tiny import logits_of
from qerl.config import AdapterConfig
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized
from qerl.models.peft.adapter import adapter_tensors, add_adapter, load_adapter
from qerl.models.peft.peft_reader import adapter_config, read_adapter

TOKENS_T = torch.arange(40) * 7 % 61
EXPERTS = AdapterConfig(rank=4, alpha=8.0, experts="per_expert", expert_rank=2)
ROUTER = AdapterConfig(rank=4, alpha=8.0, router=True)


def save(folder, family):
    save_oracle(oracle(family, vocab_size=320), folder)


@pytest.mark.parametrize("family", ["Olmoe", "GraniteMoe", "GptOss"])
def test_adapters_of_the_router_are_refused_for_peft_and_merged(tmp_path, family):
    _, config, decoder = run_of(tmp_path, family, format="bf16", adapter=ROUTER, save=save)
    said = refusal(lambda: exported(tmp_path, config, "peft"))
    assert said.endswith("adapter.router is not written in PEFT's layout; use --as merged")
    assert not (tmp_path / "peft").exists()
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged", dtype="fp32"))
    with torch.no_grad():
        theirs_TV = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(theirs_TV, logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following rank_pattern")  # PEFT 0.21 looks for linears only
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", ["per_expert", "shared_a", "shared_b"])
@pytest.mark.parametrize("family", ["Olmoe", "GraniteMoe", "GptOss"])
def test_peft_loads_experts_adapters_with_the_same_logits_and_training_continues_from_them(
    tmp_path, family, kind
):
    adapter = dataclasses.replace(EXPERTS, experts=kind)
    _, config, decoder = run_of(tmp_path, family, format="bf16", adapter=adapter, save=save)
    out = exported(tmp_path, config, "peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        plain_TV = base(TOKENS_T[None]).logits[0]
        theirs_TV = PeftModel.from_pretrained(base, out)(TOKENS_T[None]).logits[0]
    assert not torch.allclose(theirs_TV, plain_TV, atol=1e-2)
    torch.testing.assert_close(theirs_TV, logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    again = adapter_config(str(out))
    assert (again.experts, again.expert_rank, again.rank) == ("per_expert", 2, 4)
    other = decoder_of(dataclasses.replace(config, adapter=again))
    add_adapter(other, again, seed=3)
    load_adapter(other, read_adapter(str(out), again))
    torch.testing.assert_close(logits_of(other, TOKENS_T), logits_of(decoder, TOKENS_T), rtol=1e-5, atol=1e-5)
    same = decoder_of(config)
    add_adapter(same, adapter, seed=3)
    load_adapter(same, read_adapter(str(out), dataclasses.replace(again, experts=kind)))
    for name, master in adapter_tensors(decoder).items():
        assert torch.equal(adapter_tensors(same)[name], master)


@pytest.mark.filterwarnings("ignore")  # transformers and compressed-tensors on what a CPU lacks
@pytest.mark.parametrize(
    ("family", "format"), [("GptOss", "mxfp4"), ("Olmoe", "nvfp4"), ("Qwen3Moe", "mxfp4")]
)
def test_merged_experts_in_4_bits_keep_what_was_learned(tmp_path, family, format):
    """Closer to the policy than rounding the merged weights to the nearest codes is."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"moe_intermediate_size": 64} if family == "Qwen3Moe" else {}

    def save_wide(folder, name):
        save_oracle(oracle(name, vocab_size=320, **sizes), folder)

    _, config, decoder = run_of(tmp_path, family, format=format, adapter=EXPERTS, save=save_wide)
    ours = load(exported(tmp_path, config, format), format)
    write_quantized(str(exported(tmp_path, config, "merged")), tmp_path / "nearest", format=format)
    tokens_T = torch.tensor(load_tokenizer(config.model.path).encode("3 plus 1 is what, and why?"))
    truth, plain = logits_of(decoder, tokens_T), logits_of(load(tmp_path / "nearest", format), tokens_T)
    assert rms_error(logits_of(ours, tokens_T), truth) < 0.8 * rms_error(plain, truth)
    if family == "GptOss":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / format, dtype=torch.float32)
        with torch.no_grad():
            theirs_TV = model(TOKENS_T[None]).logits[0]
        torch.testing.assert_close(theirs_TV, logits_of(ours, TOKENS_T), rtol=1e-3, atol=1e-3)


WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def save_in_bf16(folder, family):
    """Save a model whose linears fit in blocks of 32, in 16 bits."""
    sizes = WIDE | ({"moe_intermediate_size": 64} if family == "Qwen3Moe" else {})
    save_oracle(oracle(family, vocab_size=320, **sizes), folder)


@pytest.mark.filterwarnings("ignore")  # transformers and compressed-tensors on what a CPU lacks
@pytest.mark.parametrize(
    ("family", "format"), [("Olmoe", "nvfp4"), ("Qwen3Moe", "mxfp4"), ("GptOss", "mxfp4")]
)
def test_experts_of_a_base_in_16_bits_are_rounded_for_their_outputs(tmp_path, family, format):
    """Such a base has no grid of its own to keep; the gain over the nearest codes is GPTQ's alone. Both take
    the policy's routes, since one that flips errs more than all of the rounding."""
    _, config, decoder = run_of(tmp_path, family, format="bf16", adapter=EXPERTS, save=save_in_bf16)
    write_quantized(str(exported(tmp_path, config, "merged")), tmp_path / "nearest", format=format)
    rounded = load(exported(tmp_path, config, format), format), load(tmp_path / "nearest", format)
    routes, errors = {}, []
    text = " ".join(f"{i} plus {2 * i} is what, and why?" for i in range(5))
    tokens_T = torch.tensor(load_tokenizer(config.model.path).encode(text))
    truth = logits_of(decoder, tokens_T, lambda layer, ids_TK: routes.setdefault(layer, ids_TK))
    for each in rounded:
        errors.append(rms_error(logits_of(each, tokens_T, lambda layer, _: routes[layer]), truth))
    assert errors[0] < 0.6 * errors[1], errors


def load(folder, format):
    cpu = torch.device("cpu")
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=cpu, resident=False)
