"""The same job by qerl and by TRL, with a tiny model."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_run
from benchmarks.peers import peer
from benchmarks.peers.options import PeerOptions
from benchmarks.peers.trl_peer import StepFigures, TrlPeer, as_folder, rows_of
from qerl.errors import UserError
from qerl.training.policy import load_task
from studies.catalog_real import BASE
from studies.study import with_fields

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL and transformers
NUM_STEPS = 2
TINY = {
    "num_prompts": 2,
    "num_generations": 4,
    "adapter.rank": 4,
    "adapter.alpha": 8.0,
    "model.dtype": "fp32",
    "task.reward_workers": 1,
    "sample.max_tokens": 8,
    "engine.kv_cache_gb": 0.1,
    "learn.learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tiny_run.write_model(folder / "tiny", max_positions=256)
    tiny_run.write_task(folder)
    (folder / "gsm8k").mkdir()
    for split, num in (("train", 12), ("test", 6)):
        rows = [{"question": f"{split} {i}: {i} + 1?", "answer": f"#### {i + 1}"} for i in range(num)]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def base(files):
    return with_fields(BASE, {**TINY, "task.rewards": (f"{files / 'even.py'}:even",)})


def options(files, **changes):
    return PeerOptions(files=files, model="x/tiny", num_steps=NUM_STEPS, microbatch=4, **changes)


@pytest.mark.parametrize("by", ["qerl", "trl"])
def test_a_peer_writes_its_steps_and_what_was_learned_is_measured(by, files, base, tmp_path, monkeypatch):
    measured = []

    def figures(config, adapter):
        measured.append((config, adapter))
        return dict.fromkeys(("greedy", "sampled", "strict_greedy", "strict_sampled", "pass@8", "maj@8"), 0.5)

    monkeypatch.setattr(peer, "test_figures", figures)
    out = tmp_path / "lines.jsonl"
    peer.run_peer(options(files, by=by, out=out), base)
    *steps, run = (json.loads(line) for line in out.read_text().splitlines())
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    for step in steps:
        parts = step["generate_s"] + step["reward_s"] + step["learn_s"]
        assert (
            step["step_s"] == pytest.approx(parts, abs=2e-4) and min(step["generate_s"], step["learn_s"]) > 0
        )
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["generate_s"], rel=1e-2)
        assert 8 <= step["tokens"] <= 8 * 8 and 0 < step["reward"] < 1 and step["memory_gb"] > 0
    assert run["step_s"] == steps[1]["step_s"] and run["greedy"] == 0.5 and run["by"] == by
    ((config, adapter),) = measured
    assert config.model.format == "bf16" and config.noise.schedule == "none"
    learned = {name: float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name}
    assert len(learned) == 14 and min(learned.values()) > 1e-3


def test_trl_gets_qerls_prompts_in_qerls_order(files, base, tmp_path):
    config = peer.peer_config(options(files), base, tmp_path)
    rows = rows_of(config)
    _, task = load_task(config)
    expected = [task.train_prompts(step, config.num_prompts) for step in range(NUM_STEPS)]
    assert [row["prompt"] for row in rows] == [prompt.messages for step in expected for prompt in step]
    assert [row["answer"] for row in rows] == [p.columns["answer"] for step in expected for p in step]


def test_trl_gets_the_jobs_settings(files, base, tmp_path):
    config = peer.peer_config(options(files), base, tmp_path)
    args = TrlPeer(4, generation="trl").grpo_config(config, tmp_path)
    assert args.generation_batch_size == 8 and args.gradient_accumulation_steps == 2
    assert args.steps_per_generation == 2 and args.num_iterations == 1  # one update a step
    assert (args.loss_type, args.epsilon, args.epsilon_high, args.beta) == ("dapo", 0.2, 0.28, 0.0)
    assert (args.temperature, args.top_p, args.top_k) == (1.0, 1.0, 0) and args.scale_rewards == "group"
    assert TrlPeer(4, generation="trl-vllm").grpo_config(config, tmp_path).use_vllm
    with pytest.raises(UserError, match="microbatch must divide 8, got 3"):
        TrlPeer(3, generation="trl").grpo_config(config, tmp_path)


def test_a_gguf_file_is_written_as_a_folder_of_the_same_weights(tmp_path, monkeypatch):
    """The embedded model's: what transformers loads of the folder is what qerl loads of the file."""
    written = []
    monkeypatch.setattr("benchmarks.peers.trl_peer.write_base", lambda *args: written.append(args))
    config = with_fields(BASE, {"model.path": str(tmp_path / "x.gguf"), "model.format": "nvfp4"})
    assert as_folder(config, tmp_path / "model") == tmp_path / "model"
    ((_, changed, folder),) = written
    assert changed.model.format == "bf16" and folder == tmp_path / "model"
    (tmp_path / "there").mkdir()
    config = with_fields(config, {"model.path": str(tmp_path / "there")})
    assert as_folder(config, tmp_path / "model") == tmp_path / "there" and len(written) == 1


def test_the_times_of_a_step_are_its_own(base):
    trainer: Any
    trainer, lines = SimpleNamespace(spent={"generate_s": 0.0, "reward_s": 0.0}), []
    figures = StepFigures(trainer, base, lines.append)
    for step in (1, 2):
        figures.on_step_begin()
        trainer.spent["generate_s"] += 0.25
        figures.on_step_end()
        logs = {"reward": 0.5, "entropy": 1.0, "completions/mean_length": 4.0}
        figures.on_log(None, SimpleNamespace(global_step=step), None, logs)
        figures.on_log(None, SimpleNamespace(global_step=step), None, {"train_runtime": 1.0})
    assert [(line["step"], line["generate_s"], line["tokens"]) for line in lines] == [
        (0, 0.25, 32),
        (1, 0.25, 32),
    ]
