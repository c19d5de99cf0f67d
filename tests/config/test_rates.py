import dataclasses
import json

import pytest

from qerl.config import AdapterConfig, EngineConfig, ModelConfig, RunConfig
from qerl.config.rates import billions_of, rate_for
from qerl.config.recipes import RECIPES, plain

SMALL = {"hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151_936, "intermediate_size": 4864}
SMALL |= {"num_attention_heads": 14, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5),
        ("Qwen/Qwen3-8B", 8),
        ("smollm2-135m-instruct", 0.135),
        ("Qwen/Qwen3-30B-A3B", 30),
        ("meta-llama/Llama-3.2-1B", 1),
        ("microsoft/phi-4", None),
        ("models/v2b", None),
        ("my.gguf", None),
    ],
)
def test_the_size_is_read_from_the_name(path, billions):
    assert billions_of(path) == billions


def test_the_size_of_a_folder_is_that_of_its_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert billions_of(str(tmp_path)) == pytest.approx(0.494, rel=0.02)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": SMALL}))
    assert billions_of(str(tmp_path)) == pytest.approx(0.494, rel=0.02)
    (tmp_path / "config.json").write_text("{")
    assert billions_of(str(tmp_path)) is None


def _own(path, kind="lora"):
    model = ModelConfig(path=path, format="bf16")
    return dataclasses.replace(plain(), model=model, adapter=AdapterConfig(kind=kind))


def test_lora_of_a_small_model_learns_at_a_higher_rate():
    sizes = ("0.5B", "1.5B", "3B", "7B", "70B")
    rates = [rate_for(_own(name)) for name in (RunConfig().model.path, *(f"owner/model-{s}" for s in sizes))]
    assert [rate and rate[0] for rate in rates] == [5e-4, 5e-5, 5e-5, 1e-5, 1e-5, 1e-5]
    assert rates[0] and rates[0][0] == RECIPES["demo"]().learn.learning_rate
    assert rate_for(_own("owner/model-1B", kind="full")) is None
    assert rate_for(_own("owner/model")) is None


def test_ones_own_rows_are_learned_without_noise_and_the_papers_with_it():
    assert plain().noise.schedule == "none"
    assert RECIPES["gsm8k"]().noise.schedule == RECIPES["demo_long"]().noise.schedule == "exponential"


def test_as_many_samples_run_at_once_as_the_kernels_take():
    engine = EngineConfig()
    assert (engine.max_rows(has_kernels=True), engine.max_rows(has_kernels=False)) == (256, 128)
    assert EngineConfig(exact=True).max_rows(has_kernels=True) == 128
    assert EngineConfig(max_num_seqs=7).max_rows(has_kernels=True) == 7
