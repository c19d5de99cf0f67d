"""`qerl plan sft` and `qerl plan dpo`, held against a learner, its batches, and the passes of a run."""

import dataclasses
import json

import pytest
import torch

import tiny_run
from learner.tiny import ADAPTER, VOCAB, run_config, tiny_decoder
from qerl.cli.main import command
from qerl.config import AlgoConfig, DpoConfig, LearnConfig, RunConfig, SftConfig
from qerl.learner import Learner
from qerl.learner.forward import DecoderForward
from qerl.learner.plan.memory import peak_bytes
from qerl.learner.plan.speed import GPUS
from qerl.learner.plan.stored import (
    RowLengths,
    as_groups,
    estimate_stored_speed,
    format_stored_plan,
    longest_rows,
    stored_parts,
)
from qerl.models.random_weights import shape
from qerl.tracking.json_lines import read_lines
from qerl.types import Group, Prompt, Sample

LOSSES = {"sft": (), "dpo": ("sigmoid",), "kto": ("kto",)}
MEANS = RowLengths(prompt_tokens=9, completion_tokens=5)


def config_of(kind, adapter=ADAPTER, **learn):
    fields = {"max_tokens_per_microbatch": 60, "gradient_checkpointing": "none"} | learn
    base = run_config(learn=fields)
    return dataclasses.replace(
        base,
        num_prompts=5,
        adapter=adapter,
        algo=AlgoConfig(loss_type="nll", importance="none"),
        sft=SftConfig(data="rows", max_length=24),
        dpo=DpoConfig(loss_type=LOSSES[kind]),
    )


def groups_of(config, longest, rng):
    """Rows of the maximum length."""

    def tokens(count):
        return torch.randint(VOCAB, (count,), generator=rng).tolist()

    def sample():
        values = {"logprobs_T": [-1.0] * longest.completion_tokens, "text": "", "finish": "stop"}
        return Sample(
            tokens_T=tokens(longest.completion_tokens), version=0, reward=1.0, advantage=1.0, **values
        )

    prompts = [
        Prompt(index=i, text="", tokens_T=tokens(longest.prompt_tokens), messages=None, columns={})
        for i in range(config.num_prompts)
    ]
    return [
        Group(prompt=prompt, samples_G=[sample() for _ in range(config.num_generations)])
        for prompt in prompts
    ]


@pytest.mark.parametrize(
    "trained", [{}, {"train_norms": True}, {"modules_to_save": ("embed_tokens", "lm_head")}]
)
@pytest.mark.parametrize("kind", LOSSES)
def test_what_a_learner_holds_and_its_largest_batch_are_those_of_the_plan(kind, trained, rng, monkeypatch):
    config = config_of(kind, dataclasses.replace(ADAPTER, **trained))
    decoder, longest = tiny_decoder(adapter=config.adapter), longest_rows(config, MEANS, 24)
    assert longest == RowLengths(prompt_tokens=9, completion_tokens=15)
    grouped = as_groups(config, longest)
    learner, rows, gradients = Learner(decoder, config), [], []
    backward, collect = learner._backward, learner._gradients
    monkeypatch.setattr(
        learner, "_backward", lambda batch, *rest: rows.append(len(batch.tokens_T)) or backward(batch, *rest)
    )
    monkeypatch.setattr(
        learner, "_gradients", lambda masters: gradients.extend(collect(masters)) or gradients
    )
    learner.step(groups_of(grouped, longest, rng))
    moments = [t for name, t in learner.optimizer_state().items() if "exp_avg" in name]
    parts = {part.name: part.num_bytes for part in stored_parts(decoder.architecture, config, longest)}
    assert parts["adapter's masters"] == sum(t.nbytes for t in learner.adapter_state().values())
    assert parts["adapter's gradients"] == sum(t.nbytes for t in gradients)
    assert parts["optimizer's moments"] == sum(t.nbytes for t in moments)
    assert f"activations saved for {max(rows)} rows" in parts
    assert len(rows) > 1 and max(rows) <= 60


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    texts = [{"prompt": f"{i:02} ?", "chosen": "yes!", "rejected": "no.."} for i in range(12)]
    rated = [
        {"prompt": x["prompt"], "completion": x["chosen"], "label": i % 2 == 0} for i, x in enumerate(texts)
    ]
    for name, rows in (("dpo", texts), ("kto", rated)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("kind", "passes"), [("dpo", 2), ("kto", 4)])
def test_a_run_reads_each_row_without_a_gradient_as_often_as_planned(
    kind, passes, files, tmp_path, monkeypatch
):
    """In one epoch: the reference and the policy before an update, kto also completions of other rows."""
    counts, call = {True: 0, False: 0}, DecoderForward.__call__

    def counted(self, batch, *rest):
        counts[torch.is_grad_enabled()] += len(batch.tokens_T)
        return call(self, batch, *rest)

    monkeypatch.setattr(DecoderForward, "__call__", counted)
    given = {"data": files / f"{kind}.jsonl", "model.path": files, "model.dtype": "fp32", "adapter.rank": 4}
    given |= {"out": tmp_path / "run", "batch-size": 4, "eval-fraction": 0.0, "num-eval-samples": 0}
    given |= {"learn.learning-rate": 0.01}
    more = ["--adapter.train-norms", *(["--loss", "kto"] if kind == "kto" else [])]
    command(["dpo", *(part for name, value in given.items() for part in (f"--{name}", str(value))), *more])
    assert counts[False] == passes * counts[True] > 0
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    if kind == "dpo":  # the reference has the norms that the policy began with
        assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and lines[-1]["loss"] < 0.69

    a, config = shape("qwen2.5-7b"), as_groups(config_of(kind), MEANS)
    speed = estimate_stored_speed(GPUS["h100"], a, config, MEANS, num_rows=config.num_prompts)
    without = dataclasses.replace(config, dpo=DpoConfig())
    update = estimate_stored_speed(GPUS["h100"], a, without, MEANS, num_rows=config.num_prompts)
    assert update.reference_s == 0 and speed.num_steps == 1
    reads_s = speed.step_s + speed.reference_s - update.step_s
    assert reads_s == pytest.approx(passes * update.step_s / 2)  # an update is a pass forwards and one back


def test_a_pair_shares_its_prompts_rows_and_a_rated_completion_has_its_own():
    a = shape("qwen2.5-7b")
    times = []
    for kind in ("dpo", "kto"):
        config = as_groups(
            config_of(kind, max_tokens_per_microbatch=8192),
            RowLengths(prompt_tokens=256, completion_tokens=256),
        )
        assert config.num_generations == (2 if kind == "dpo" else 1)
        lengths = RowLengths(prompt_tokens=256, completion_tokens=256)
        without = dataclasses.replace(config, dpo=DpoConfig())
        times.append(estimate_stored_speed(GPUS["rtx-3060"], a, without, lengths, num_rows=5).step_s)
    assert times[0] / times[1] == pytest.approx(3 / 2, rel=0.05)


def test_answers_to_evaluation_rows_have_a_small_cache_or_none():
    a, longest = shape("qwen2.5-7b"), RowLengths(prompt_tokens=256, completion_tokens=768)
    config = config_of("dpo", max_tokens_per_microbatch=8192)
    some, none = (
        stored_parts(a, dataclasses.replace(config, sft=SftConfig(data="rows", num_eval_samples=n)), longest)
        for n in (4, 0)
    )
    cache = {part.name: part.num_bytes for part in some}["KV cache"]
    assert 0 < cache < 1e8 and not any(part.when == "sampling" for part in none)
    assert peak_bytes(some) == peak_bytes(none)  # learning takes more


def test_the_commands_print_the_plan_and_end_with_1_where_nothing_fits(capsys):
    command(["plan", "dpo", "qwen2.5-7b", "--gpu", "rtx-4090", "--num-rows", "640"])
    out = capsys.readouterr().out
    assert "16 rows a step of up to 1024 tokens" in out and "the reference once" in out
    assert "for 40 steps over 640 rows" in out and "fits into 25.2 GB" in out
    command(["plan", "sft", "qwen2.5-7b", "--gpu-gb", "24", "--batch-size", "4", "--adapter.rank", "8"])
    out = capsys.readouterr().out
    assert "4 rows a step of up to 2048 tokens, rank 8" in out and "reference" not in out
    with pytest.raises(SystemExit) as ended:
        command(["plan", "dpo", "qwen2.5-72b", "--gpu-gb", "24"])
    assert ended.value.code == 1 and "does not fit into 24 GB" in capsys.readouterr().out


def test_options_with_which_a_run_fits_are_named():
    config = RunConfig(
        sft=SftConfig(data="rows", max_length=8192), learn=LearnConfig(gradient_checkpointing="none")
    )
    lengths = RowLengths(prompt_tokens=256, completion_tokens=1000)
    text, fits = format_stored_plan("qwen2.5-7b", config, gpu_gb=25.2, lengths=lengths, num_rows=10)
    assert not fits and "it fits with\n  --learn.gradient-checkpointing layer" in text
