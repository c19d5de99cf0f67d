"""A step leaves nothing behind on the GPU, however many there are. All samples are of one length."""

import pytest
import torch

from alone import IS_ALONE
from engine.decode.test_decode_kernels import NEVER, decoder_of, small_prompts
from engine.parts import engine_of, request_of
from qerl.config import AdapterConfig, LearnConfig, RunConfig, SampleConfig
from qerl.kernels.runtime import gpu_memory
from qerl.learner import Learner
from qerl.training.rollouts.rollout import drop_overlong, sampling_of, with_advantages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recompute", ["none", "offload"])
def test_a_step_takes_no_more_memory_than_the_one_before(recompute):
    decoder, prompts_P = decoder_of(), small_prompts(*[64] * 8)
    config = RunConfig(
        num_prompts=8,
        num_generations=4,
        adapter=AdapterConfig(rank=16),
        sample=SampleConfig(max_tokens=300),
        learn=LearnConfig(gradient_checkpointing=recompute),
    )
    engine, learner = engine_of(decoder, stop_token_ids=NEVER), Learner(decoder, config)
    device, peaks, left, free = decoder.device, [], [], []
    for step in range(22):
        gpu_memory.reset_peaks(device)
        request = request_of(prompts_P, num_samples=4, sampling=sampling_of(config), seed=0, step=step)
        groups = engine.generate(request)
        rewards_P_G = [[0.0, 1.0, 0.0, 1.0]] * len(groups)
        groups = drop_overlong(config, with_advantages(config.algo, config.sample, groups, rewards_P_G))
        assert gpu_memory.peak_bytes(device) > engine.num_bytes
        learner.step(groups)
        engine.publish(learner.version)
        peaks.append(gpu_memory.peak_bytes(device))
        left.append(torch.cuda.memory_allocated())
        free.append(torch.cuda.mem_get_info()[0])
    assert engine.num_bytes > 10e6
    for values in (peaks, left, free) if IS_ALONE else (peaks, left):
        assert len(set(values[2:])) == 1, values
