"""A run of every family: sampler and learner agree, and a reward comes out; one of each kind resumes."""

import dataclasses
import math

import pytest

import tiny_run
from models.family_rows import ROWS, oracle
from qerl.config import EngineConfig, LearnConfig, ModelConfig, NoiseConfig, SampleConfig, TaskConfig
from qerl.config.recipes import demo_long
from qerl.tracking.json_lines import read_lines
from qerl.training.observer import NullObserver
from qerl.training.session import train

# The learner sums a state chunk by chunk, the sampler token by token: up to 1.6e-4 apart in fp32.
WITH_STATES = ("Qwen3_5", "Qwen3Next")
EXACT = ("Gemma2", "Olmo3", "Qwen3Next")
# Recurrent states; experts with biases and sinks; exact mode and tied heads; experts beside states.
RESUMED = ("Qwen3_5", "GptOss", "Gemma2", "GraniteMoeHybrid")


class StoppedError(Exception):
    pass


class StopAfter(NullObserver):
    def __init__(self, step):
        self.first_steps, self._step = [], step

    def begin(self, first_step):
        self.first_steps.append(first_step)

    def finished(self, step, is_saved):
        if step == self._step:
            raise StoppedError


def varied(prompts, completions, completion_ids, **columns):
    return [sum(ids) % 5 / 4 for ids in completion_ids]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def config_of(files, family, out, num_steps):
    oracle(family, vocab_size=272).save_pretrained(files)
    base = demo_long()
    return dataclasses.replace(
        base,
        out=str(out),
        num_steps=num_steps,
        num_prompts=2,
        num_generations=4,
        model=ModelConfig(path=str(files), format="nvfp4", device="cpu", dtype="fp32"),
        adapter=dataclasses.replace(base.adapter, rank=4),
        task=TaskConfig(name=str(files / "sums.jsonl"), template="{prompt}", num_held_out=2),
        sample=SampleConfig(max_tokens=12, temperature=2.0),
        noise=NoiseConfig(schedule="none"),
        engine=EngineConfig(exact=family in EXACT, block_size=16),
        learn=LearnConfig(learning_rate=0.01),
        evaluate=dataclasses.replace(base.evaluate, num_prompts=0),
        checkpoint=dataclasses.replace(base.checkpoint, every=1),
        loggers=(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in ROWS if family not in RESUMED])
def test_a_run_of_every_family_learns(files, tmp_path, family):
    """Two steps, so that the second is sampled with what the first has learned."""
    train(config_of(files, family, tmp_path / "run", 2), rewards=[varied])
    assert_learned(tmp_path / "run", family, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", RESUMED)
def test_a_run_of_every_kind_learns_and_resumes(files, tmp_path, family):
    config, observer = config_of(files, family, tmp_path / "run", 3), StopAfter(1)
    with pytest.raises(StoppedError):
        train(config, rewards=[varied], observer=observer)
    train(config, rewards=[varied], observer=observer)
    assert observer.first_steps == [0, 2]
    assert_learned(tmp_path / "run", family, 3)


def assert_learned(out, family, num_steps):
    steps = list(read_lines(out / "metrics.jsonl"))
    assert len(steps) == num_steps and all(metrics["grad_norm"] > 0 for metrics in steps)
    for metrics in steps:
        assert math.isfinite(metrics["reward"])
        assert metrics["mismatch_max"] <= (0 if family in EXACT else 5e-4 if family in WITH_STATES else 1e-4)
