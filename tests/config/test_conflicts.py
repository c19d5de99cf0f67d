"""The table of settings that do not go together."""

import dataclasses

import pytest

from qerl.config import AdapterConfig, LearnConfig, ModelConfig, RayConfig, RunConfig, SampleConfig
from qerl.config.conflicts import CONFLICTS, NEEDS_OUR_DECODER, check_conflicts, holding
from qerl.errors import UserError

PAIRS = [(setting, other) for setting, others in CONFLICTS.items() for other in others]


@pytest.mark.parametrize(("setting", "other"), PAIRS)
def test_every_condition_is_about_fields_that_exist_and_the_defaults_go_together(setting, other):
    assert not (holding(RunConfig(), setting) and holding(RunConfig(), other))


def test_what_holds_of_a_condition_is_named_with_its_value():
    config = RunConfig(
        sample=SampleConfig(top_k=5, min_p=0.5), model=ModelConfig(head_format="fp8", sampler_format="int8")
    )
    assert holding(config, "sample.top_k or sample.top_p or sample.min_p") == "sample.top_k, sample.min_p"
    assert holding(config, "model.head_format not bf16") == "model.head_format fp8"
    assert holding(config, "noise.scope not step") == holding(config, "no sample.top_k") == ""
    assert holding(config, "no ray.address and task.rewards has numeric") == (
        "no ray.address and task.rewards has numeric"
    )
    assert holding(config, "sample.temperature not 1") == "" and holding(RunConfig(), NEEDS_OUR_DECODER) == ""
    assert holding(config.model, "model.format nvfp4", "model") == "model.format nvfp4"
    assert holding(config, NEEDS_OUR_DECODER) == "model.sampler_format int8, model.head_format fp8"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: RunConfig(model=ModelConfig(format="fp8-flow"), learn=LearnConfig(backward="int8")),
            "model.format fp8-flow has its own backward pass: set learn.backward to bf16",
        ),
        (
            lambda: RunConfig(adapter=AdapterConfig(dropout=0.1), learn=LearnConfig(backward="int8")),
            "learn.backward int8 needs adapter.kind lora and adapter.dropout 0: set it to bf16",
        ),
        (
            lambda: RunConfig(model=ModelConfig(calibrate="gptq"), ray=RayConfig(address="auto")),
            "model.calibrate does not work with --ray: run `qerl quantize` first, and set"
            " model.calibrate none",
        ),
        (
            lambda: AdapterConfig(kind="full", init_from="runs/a"),
            "adapter.init_from needs adapter.kind lora, got full",
        ),
    ],
)
def test_a_message_says_what_to_set(make, text):
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value) == text


def test_only_conflicts_of_a_section_are_checked_with_it():
    check_conflicts(ModelConfig(calibrate="gptq"), "model")
    with pytest.raises(UserError, match=r"model\.calibrate gptq needs model\.format nvfp4, got fp8"):
        dataclasses.replace(ModelConfig(calibrate="gptq"), format="fp8")
