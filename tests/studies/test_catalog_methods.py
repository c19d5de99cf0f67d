from dataclasses import replace

from qerl.config import RunConfig
from qerl.config.recipes import METHODS
from studies.catalog_methods import PRECISIONS, methods
from studies.study import with_fields


def test_every_method_is_an_arm_as_its_recipe_has_it():
    study = methods()
    arms = {arm.name: arm for arm in study.arms}
    for name, recipe in METHODS.items():
        config: RunConfig = with_fields(study.base, arms[name].fields)
        assert config.algo == recipe().algo, name
        assert config.learn.updates_per_step == recipe().learn.updates_per_step, name
        noise = recipe().noise
        if noise.is_controlled:
            same = {"sigma_end": config.noise.sigma_end, "num_stages": config.noise.num_stages}
            assert config.noise == replace(noise, **same), name
        assert config.noise.scope == noise.scope, name
        if name in PRECISIONS:
            assert config.model == recipe().model, name
            assert config.noise.schedule == noise.schedule == "none", name
    extra = {"rloo", "grpo_24", "no_noise", "bf16", "flash_uncorrected", "jet_uncorrected"}
    assert set(arms) == {*METHODS} | extra


def test_each_is_compared_with_one_that_makes_as_many_updates_under_like_noise():
    study = methods()
    configs = {arm.name: with_fields(study.base, arm.fields) for arm in study.arms}
    compared = {(claim.arm, claim.against) for claim in study.claims}
    assert {arm for pair in compared for arm in pair} == set(configs)
    for arm, against in compared:
        one, other = configs[arm], configs[against]
        assert one.learn == other.learn
        if "noise" not in against and not one.noise.is_controlled:
            assert replace(one.noise, scope=other.noise.scope) == other.noise
