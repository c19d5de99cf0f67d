"""qerl.load, the policy and its learner: what they return, and one line for each mistake."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import qerl
import tiny_run
from qerl.algo import loss
from qerl.config import AdapterConfig, AlgoConfig, EngineConfig, LearnConfig, ModelConfig, SampleConfig
from qerl.models.peft.adapter import adapter_tensors

SMALL = {"adapter": AdapterConfig(rank=4), "sample": SampleConfig(max_tokens=5), "max_prompt_tokens": 40}
LEARN = LearnConfig(learning_rate=0.01, warmup_ratio=0.0)


def import_with_load(statement, imports):
    """Code that imports where this statement opens /proc/loadavg."""
    return f"""
import builtins, io, os
read = builtins.open
def opened(path, *args, **kwargs):
    if path != "/proc/loadavg":
        return read(path, *args, **kwargs)
    {statement}
builtins.open = opened
import {imports}
"""


BUSY = 'return io.StringIO(f"{os.cpu_count()}.0 0.1 0.1 3/90 77\\n")'


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP than libgomp there")
@pytest.mark.parametrize(
    ("load", "given", "said"),
    [
        (BUSY, {}, "1000"),
        (BUSY.replace("3/90", "1/90"), {}, "300000"),  # they have ended
        (BUSY.replace("{os.cpu_count()}.0", "{os.cpu_count() * 0.2}"), {}, "300000"),
        (BUSY, {"GOMP_SPINCOUNT": "77"}, "77"),
        (BUSY, {"OMP_WAIT_POLICY": "passive"}, "0"),
        ('raise FileNotFoundError("/proc/loadavg")', {}, "300000"),
    ],
)
def test_torch_s_threads_wait_awake_for_microseconds_beside_busy_programs(load, given, said):
    """libgomp itself says what it has read."""
    names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_DISPLAY_ENV": "verbose", **given}
    command = [sys.executable, "-c", import_with_load(load, "qerl, torch")]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert f"GOMP_SPINCOUNT = '{said}'" in found.stderr


def test_qerl_can_be_imported_where_the_system_has_no_load_average():
    """Then check_platform says what is missing, not a traceback."""
    code = "import os, sys; del os.getloadavg; sys.platform = 'win32'; import qerl"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_run.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def policy(model):
    return qerl.load(model, **SMALL)


def prompts(policy, num=2):
    return [policy.prompt(f"{i} + {i} =", index=i, answer=str(2 * i)) for i in range(num)]


def graded(groups, advantage=lambda index: float(index) - 1.5):
    """Return the groups with rewards and advantages by a sample's index."""
    return [
        dataclasses.replace(
            group,
            samples_G=[
                dataclasses.replace(sample, reward=float(i), advantage=advantage(i))
                for i, sample in enumerate(group.samples_G)
            ],
        )
        for group in groups
    ]


def masters(policy):
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(policy._decoder).items()}


def tokens(groups):
    return [sample.tokens_T for group in groups for sample in group.samples_G]


def test_importing_the_package_imports_no_torch():
    code = "import qerl, sys; assert qerl.Prompt and qerl.Sampling; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_can_be_imported():
    assert all(getattr(qerl, name) is not None for name in qerl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        qerl.lode  # noqa: B018


def test_a_prompt_is_the_template_up_to_the_answer(policy):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    prompt = policy.prompt(messages, index=7, answer="3")
    assert prompt.text == "<|im_start|>Add.<|im_end|><|im_start|>1 + 2<|im_end|><|im_start|>"
    assert prompt.tokens_T == policy.tokenizer(prompt.text)["input_ids"]
    assert (prompt.index, prompt.columns) == (7, {"answer": "3"})
    assert policy.prompt("1 + 2", index=0) == policy.prompt(messages[1:], index=0)


def test_samples_follow_from_seed_step_and_index(policy):
    first, again = (tokens(policy.generate(prompts(policy), num_generations=3, step=1)) for _ in range(2))
    other = tokens(policy.generate(prompts(policy), num_generations=3, step=2))
    assert first == again != other and len(first) == 6
    greedy = dataclasses.replace(policy.sampling, temperature=0.0)
    best = tokens(policy.generate(prompts(policy, 1), num_generations=2, step=1, sampling=greedy))
    assert best[0] == best[1]


def test_noise_acts_within_its_context_only(policy):
    def sampled():
        return policy.generate(prompts(policy), num_generations=2, step=0)

    before = sampled()
    with policy.noise(0.5, step=0, unit="relative"):
        noisy = sampled()
    with policy.noise(0.0, step=0):
        assert sampled() == before
    assert sampled() == before != noisy


def test_a_step_changes_the_adapter_and_publishing_makes_samples_record_it(model):
    policy = qerl.load(model, **SMALL)
    learner = policy.learner(num_steps=3, num_prompts=2, num_generations=4, learn=LEARN)
    before = masters(policy)
    metrics = learner.step(graded(policy.generate(prompts(policy), num_generations=4, step=0)))
    policy.publish(learner.version)
    assert learner.version == 1 and metrics["grad_norm"] > 0 and all(map(math.isfinite, metrics.values()))
    assert all(
        not torch.equal(tensor, before[name]) for name, tensor in masters(policy).items() if "_B" in name
    )
    groups = policy.generate(prompts(policy), num_generations=4, step=1)
    assert {sample.version for group in groups for sample in group.samples_G} == {1}


def test_the_saved_adapter_is_loaded_again(model, tmp_path):
    policy = qerl.load(model, **SMALL)
    groups = policy.generate(prompts(policy), num_generations=4, step=0)
    policy.learner(num_steps=1, num_generations=4, learn=LEARN).step(graded(groups))
    policy.save_adapter(tmp_path / "adapter")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == masters(policy).keys()
    adapter = AdapterConfig(rank=4, init_from=str(tmp_path / "adapter"))
    loaded = masters(qerl.load(model, **SMALL | {"adapter": adapter}))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in masters(policy).items())
    with pytest.raises(qerl.UserError, match="exists already"):
        policy.save_adapter(tmp_path / "adapter")


def test_a_loss_of_your_own_is_an_entry_of_losses(policy, monkeypatch):
    monkeypatch.setitem(loss.LOSSES, "mine", loss.LOSSES["nll"])
    groups = graded(policy.generate(prompts(policy), num_generations=4, step=0))
    start, losses = masters(policy), []
    for name in ("mine", "nll"):
        learner = policy.learner(num_steps=1, num_generations=4, algo=AlgoConfig(loss_type=name), learn=LEARN)
        losses.append(learner.step(groups)["loss"])
        with torch.no_grad():
            for each, master in adapter_tensors(policy._decoder).items():
                master.copy_(start[each])
        policy.publish(0)
    assert losses[0] == losses[1] != 0


def test_in_exact_mode_sampler_and_learner_agree(model):
    policy = qerl.load(
        ModelConfig(path=model, dtype="fp32"), engine=EngineConfig(exact=True, max_num_seqs=8), **SMALL
    )
    groups = policy.generate(prompts(policy), num_generations=4, step=0)
    assert policy.learner(num_steps=1, num_generations=4).step(graded(groups))["mismatch_max"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "smollm3"}, "smollm3: no such folder or file"),
        ({"format": "nvfp5"}, r"model.format must be one of nvfp4.*, got 'nvfp5'; did you mean"),
        ({"calibrate": "gptq"}, "model.calibrate is for train"),
        ({"adapter": AdapterConfig(kind="full")}, "adapter.kind full"),
        ({"adapter": AdapterConfig(rank=10_000)}, "adapter.rank must be at most"),
        ({"sample": SampleConfig(max_tokens=500)}, "sample.max_tokens is 500, but the model has only 128"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be positive"),
    ],
)
def test_load_refuses_in_one_line(model, given, message):
    section = {name: value for name, value in given.items() if name in ("format", "calibrate")}
    others = {name: value for name, value in given.items() if name not in ("format", "calibrate", "model")}
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load(ModelConfig(path=given.get("model", model), **section), **SMALL | others)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.prompt("1" * 50, index=3), "prompt 3 has 53 tokens, max_prompt_tokens is 40"),
        (lambda p: p.prompt([], index=3), "prompt 3: messages is not a list of messages"),
        (lambda p: p.prompt([{"role": "user"}], index=3), "prompt 3: message 1 has no content"),
        (lambda p: p.generate([], num_generations=0, step=0), "num_generations must be positive, got 0"),
        (lambda p: p.noise(-0.1, step=0), "sigma must be a number from 0 on, got -0.1"),
        (lambda p: p.noise(0.1, step=0, unit="rms"), "unit must be absolute or relative, got 'rms'"),
        (lambda p: p.learner(num_steps=0), "num_steps must be positive"),
        (lambda p: p.learner(num_steps=1, num_generations=1), "num_generations must be at least 2"),
        (
            lambda p: p.learner(num_steps=1, algo=AlgoConfig(loss_type="dap")),
            "algo.loss_type must be one of .*, got 'dap'; did you mean dapo",
        ),
        (
            lambda p: p.learner(num_steps=1, algo=AlgoConfig(dynamic_sampling=True)),
            "algo.dynamic_sampling is for qerl.train only",
        ),
    ],
)
def test_the_policy_refuses_in_one_line(policy, call, message):
    with pytest.raises(qerl.UserError, match=message):
        call(policy)


def test_the_learner_refuses_groups_that_nothing_can_be_learned_from(policy):
    learner, before = policy.learner(num_steps=1), masters(policy)
    groups = policy.generate(prompts(policy), num_generations=2, step=0)
    for given, message in (
        ([], "call generate first"),
        (groups, "no sample has a reward"),
        (graded(groups, lambda index: math.nan), "an advantage must be a finite number, got nan"),
    ):
        with pytest.raises(qerl.UserError, match=message):
            learner.step(given)
    assert learner.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in masters(policy).items())
