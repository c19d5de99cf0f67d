"""The fused kernels are chosen for the models that they compute, and for no others."""

from types import SimpleNamespace

import pytest
import torch

from models.family_rows import ROWS, oracle
from qerl.engine.decode.kernel_forward import kernel_obstacle
from qerl.engine.decode.runner_cache import kernel_head
from qerl.formats import BF16
from qerl.models.families import from_hf_config
from qerl.models.lm_head import LMHead
from qerl.models.random_weights import SHAPES

WIDE = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
OBSTACLES = {
    "Gemma4": "norms of values and heads that differ by layer",
    "Qwen3Next": "Gated DeltaNet",
    "Qwen3_5": "Gated DeltaNet",
}
"""Parts that the kernels do not compute; every other family's layers they do."""
MIXTURES = ("GptOss", "GraniteMoe", "Olmoe", "Qwen3Moe")
HEADS: dict[str, dict] = {
    family: {"head_dim": 64}
    for family in ROWS
    if family not in ("Phi3", "Olmo2", "Olmo3", "Granite", "GraniteMoe", "GraniteMoeHybrid", "Olmoe")
}
HEADS["GraniteMoeHybrid"] = {"shared_intermediate_size": 320}
HEADS["Qwen3Moe"] |= {"moe_intermediate_size": 64}
HEADS["Phi3"] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def obstacle(architecture, rank=16):
    return kernel_obstacle(architecture, "portable", torch.bfloat16, ranks={0, rank}, page_tokens=16)


def architecture_of(family, **changes):
    config = oracle(family, **(WIDE | {"num_hidden_layers": 4} | changes)).config.to_dict()
    text = "Gemma3" if family == "Gemma3" else family
    return from_hf_config(config | {"architectures": [f"{text}ForCausalLM"]})


@pytest.mark.parametrize("family", ROWS)
def test_the_decode_kernels_say_what_they_do_not_compute(family):
    part = OBSTACLES.get(family)
    said = obstacle(architecture_of(family, **HEADS.get(family, {})))
    assert said is None if part is None else (said or "").startswith(f"they do not compute {part}"), said


def test_the_decode_kernels_take_every_rank_up_to_128():
    assert not any(obstacle(SHAPES["qwen2.5-0.5b"], rank) for rank in range(129))
    assert obstacle(SHAPES["qwen2.5-0.5b"], 129) == "they take ranks up to 128, here 129"


def test_phi_4_has_plain_layers_that_are_stored_in_another_way():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    architecture = architecture_of("Phi3", sliding_window=None, rope_parameters=rope)
    assert architecture.stored_linears and obstacle(architecture) is None


def test_the_sampling_kernels_take_factors_and_caps_of_logits():
    def head_of(**settings):
        head = LMHead(torch.ones(64, 64, dtype=torch.bfloat16), **settings)
        parts = {"lm_head": head, "compute": torch.bfloat16, "device": torch.device("cuda")}
        return kernel_head(SimpleNamespace(**parts), "portable")  # type: ignore[arg-type]

    options = ({}, {"scale": 0.5}, {"softcap": 30.0}, {"scale": 0.5, "softcap": 30.0})
    assert all(isinstance(head_of(**each), BF16) for each in options)
