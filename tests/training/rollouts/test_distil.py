"""`qerl distil`: the student comes nearer to its teacher, whatever that is and whatever the loss."""

import contextlib
import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import tiny_run
from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_decoder
from qerl.cli.main import command
from qerl.config import AdapterConfig, DistilConfig, LearnConfig, NoiseConfig, RunConfig
from qerl.errors import UserError
from qerl.learner import Learner
from qerl.learner.forward import head_of, packed_hidden
from qerl.learner.minibatch import MinibatchPart
from qerl.learner.plan.memory import memory_parts
from qerl.learner.plan.shapes import read_architecture
from qerl.models.packed_writer import write_quantized
from qerl.models.peft.adapter import OtherAdapter, adapter_tensors
from qerl.training.rollouts.distil import with_teacher_logprobs
from qerl.training.rollouts.teacher import LocalTeacher
from training.ranks import StartedRanks
from training.test_session import metrics

STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The tiny model, its task, and a run whose adapter is the teacher: it ends answers at once."""
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    rows = [{"prompt": f"{i} + {i} =", "completion": "xyz"} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {
        "data": folder / "rows.jsonl",
        "model.path": folder,
        "model.dtype": "fp32",
        "adapter.rank": 2,
        "out": folder / "teacher",
        "batch-size": 8,
        "max-steps": 8,
        "eval-max-tokens": 3,
        "learn.learning-rate": 0.05,
    }
    command(["sft", *(part for name, value in sft.items() for part in (f"--{name}", str(value)))])
    return folder


def options(files, out, *more):
    given = tiny_run.options(files, out)
    place = given.index("--noise.num-stages")
    teacher = ["--teacher", str(files / "teacher"), "--learn.warmup-ratio", "0"]
    return [*given[:place], *given[place + 2 :], *teacher, *more]


def distilled(files, out, *more):
    command(["distil", "demo_long", *options(files, out, *more)])
    return metrics(out)


def test_the_kl_to_the_teacher_falls(files, tmp_path):
    out = tmp_path / "run"
    steps = distilled(files, out, "--num-steps", "10")
    assert steps[-1]["teacher_kl"] < 0.5 * steps[0]["teacher_kl"]
    found = json.loads((out / "evaluations.json").read_text())
    assert set(found) == {"before", "teacher", "after"} and found["teacher"]["reward"] is not None
    assert "KL to the teacher" in (out / "report.html").read_text()


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
def test_every_divergence_falls(files, tmp_path, loss):
    steps = distilled(files, tmp_path, "--distil.loss", loss, "--num-steps", "8")
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert all(step["num_failed_teacher"] == 0 for step in steps)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(files, tmp_path):
    adapter = next((files / "teacher" / "checkpoints").iterdir())
    first = distilled(
        files,
        tmp_path,
        "--init-adapter",
        str(adapter),
        "--adapter.rank",
        "2",
        "--num-steps",
        "1",
        "--distil.loss",
        "forward_kl",
    )[0]
    assert abs(first["loss"]) < 1e-6 and abs(first["teacher_kl"]) < 1e-5


def test_rows_replace_their_share_of_the_samples_without_a_reward(files, tmp_path):
    shared = "--distil.loss", "jsd", "--distil.data", str(files / "rows.jsonl"), "--task.rewards"
    half = distilled(files, tmp_path / "half", *shared, "--distil.off-policy-share", "0.5")
    whole = distilled(files, tmp_path / "whole", *shared, "--distil.off-policy-share", "1")
    assert half[0]["trained_samples"] == whole[0]["trained_samples"] == 16
    assert "reward" not in half[0] and half[0]["mismatch_abs"] < 0.01 and half[-1]["loss"] < half[0]["loss"]
    assert "mismatch_abs" not in whole[0] and whole[-1]["loss"] < whole[0]["loss"]


def test_a_run_is_not_resumed_with_other_weights_of_its_teacher(files, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(files / "teacher" / "checkpoints" / "step-000008", teacher)
    more = "--teacher", str(teacher), "--learn.lr-scheduler-type", "constant", "--num-steps"
    distilled(files, tmp_path / "run", *more, "1")
    weights = load_file(teacher / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, teacher / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"began with another teacher .*/teacher \(\w{8}, now \w{8}\)"):
        distilled(files, tmp_path / "run", *more, "2")
    assert len(distilled(files, tmp_path / "run", *more, "2", "--accept-changes")) == 2
    sources = json.loads((tmp_path / "run" / "run.json").read_text())["sources"]
    assert [name for name in sources if name.startswith("teacher ")] == [f"teacher {teacher}"]


def test_edited_rows_to_imitate_are_refused_by_their_name(files, tmp_path):
    (tmp_path / "mine.jsonl").write_text((files / "rows.jsonl").read_text())
    shared = "--distil.loss", "jsd", "--distil.data", str(tmp_path / "mine.jsonl"), "--task.rewards"
    more = *shared, "--distil.off-policy-share", "1", "--num-steps", "1"
    distilled(files, tmp_path / "run", *more)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 24)
    with pytest.raises(UserError, match=r"other rows of mine\.jsonl"):
        distilled(files, tmp_path / "run", *more)


def test_another_data_set_to_imitate_is_refused_by_its_name(files, tmp_path):
    """One that `datasets` opens: a folder of data files here, a name of the hub elsewhere."""
    folder, rows = tmp_path / "chats", (files / "rows.jsonl").read_text()
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows)
    shared = "--distil.loss", "jsd", "--distil.data", str(folder), "--task.rewards"
    more = *shared, "--distil.off-policy-share", "1", "--num-steps"
    distilled(files, tmp_path / "run", *more, "1")
    distilled(files, tmp_path / "run", *more, "2")  # the same rows go on
    (folder / "train.jsonl").write_text(rows.replace("a", "b"))
    with pytest.raises(UserError, match=r"another data set .*chats \(train\) .*--accept-changes"):
        distilled(files, tmp_path / "run", *more, "3")
    sources = json.loads((tmp_path / "run" / "run.json").read_text())["sources"]
    assert [name for name in sources if name.startswith("data set ")] == [f"data set {folder} (train)"]


def test_a_run_that_is_resumed_ends_as_the_unbroken_one(files, tmp_path):
    more = "--distil.loss", "jsd", "--learn.lr-scheduler-type", "constant"
    whole = distilled(files, tmp_path / "whole", *more)
    distilled(files, tmp_path / "run", *more, "--num-steps", "2")
    resumed = distilled(files, tmp_path / "run", *more)
    assert resumed == whole and len(whole) == STEPS


def test_another_model_in_its_own_format_teaches(files, tmp_path):
    tiny_run.write_model(tmp_path / "large", width=128)
    other = "--distil.teacher", str(tmp_path / "large"), "--distil.format", "bf16"
    given = options(files, tmp_path / "run", "--distil.loss", "forward_kl", "--num-steps", "4")
    place = given.index("--teacher")
    command(["distil", "demo_long", *given[:place], *given[place + 2 :], *other])
    steps = metrics(tmp_path / "run")
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_what_quantizing_a_teacher_changed_is_said_once(files, tmp_path):
    """A teacher that is the student's base, with or without an adapter, is told with the student."""
    tiny_run.write_model(tmp_path / "large", width=128)
    lines = {}
    for name, path in ("own", tmp_path / "large"), ("shared", files / "teacher"), ("base", files):
        for num_steps in "1", "2":  # the second goes on
            distilled(files, tmp_path / name, "--teacher", str(path), "--num-steps", num_steps)
        events = (tmp_path / name / "events.jsonl").read_text().splitlines()
        lines[name] = [text for e in events if "KL to the float" in (text := json.loads(e).get("text", ""))]
    assert [len(lines[name]) for name in ("own", "shared", "base")] == [2, 1, 1]
    student, teacher = lines["own"]
    assert student.startswith("nvfp4: KL") and teacher.startswith(f"teacher {tmp_path / 'large'}: nvfp4: KL")


def test_what_a_teachers_checkpoint_drops_is_said_at_the_start_and_strict_makes_it_an_error(files, tmp_path):
    """Its codes are those of the student's format; only its activations are asked for in 4 bits."""
    shutil.copytree(files, tmp_path / "w4a4", ignore=shutil.ignore_patterns("teacher"))
    write_quantized(str(files), tmp_path / "packed")
    for file in (tmp_path / "packed").iterdir():
        shutil.copy(file, tmp_path / "w4a4")
    config = json.loads((tmp_path / "w4a4" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = group["weights"] | {"dynamic": "local"}
    (tmp_path / "w4a4" / "config.json").write_text(json.dumps(config))
    given = "--teacher", str(tmp_path / "w4a4"), "--num-steps", "1"
    distilled(files, tmp_path / "run", *given)
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    texts = [json.loads(event).get("text", "") for event in events]
    (line,) = [text for text in texts if "activations" in text]
    assert line.startswith(f"{tmp_path / 'w4a4'}: ") and "dropped" in line
    with pytest.raises(UserError, match=r"strict: .*w4a4: .*activations to 4 bits"):
        distilled(files, tmp_path / "strict", *given, "--strict")


def test_a_teacher_with_another_vocabulary_is_refused(files, tmp_path):
    other = tiny_run.write_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match=r"another vocabulary.*'unheard' is 258 there and none here"):
        distilled(files, tmp_path / "run", "--teacher", str(other))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--noise.schedule", "constant"), "noise.schedule none"),
        (("--distil.off-policy-share", "0.5"), "off_policy_share needs distil.loss"),
        (("--distil.off-policy-share", "0.5", "--distil.loss", "jsd"), "needs distil.data"),
        (("--algo.loss-type", "gspo"), "gspo_token"),
        (("--teacher", "http://127.0.0.1:9", "--sample.temperature", "0.5"), "temperature 1"),
        (("--teacher", "ftp://x"), "ftp://x"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(files, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        distilled(files, tmp_path / "run", *more)


def test_two_ranks_end_as_one(files, tmp_path):
    more = "--distil.loss", "jsd", "--num-steps", "2"
    one = distilled(files, tmp_path / "one", *more)
    ranks = StartedRanks(2, *tiny_run.QERL, "distil", "demo_long", *options(files, tmp_path / "two", *more))
    _, errors = ranks.communicate()
    assert ranks.returncode == 0, errors
    for a, b in zip(one, metrics(tmp_path / "two"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["teacher_kl"] == pytest.approx(
            b["teacher_kl"], rel=1e-3, abs=1e-5
        )


def test_an_adapter_is_worn_and_taken_off(rng):
    decoder, other = tiny_decoder(fresh=True), tiny_decoder(adapter=AdapterConfig(rank=6, alpha=3.0))
    config = run_config(distil=DistilConfig(teacher="x", loss="jsd"), noise=NoiseConfig(schedule="none"))
    active = OtherAdapter(decoder, AdapterConfig(rank=6, alpha=3.0), adapter_tensors(other)).active
    groups, before = random_groups(3, 2, vocab=VOCAB, rng=rng), adapter_tensors(decoder)
    own = LocalTeacher(_plain(other), config, other, None, print).score(groups)
    shared = LocalTeacher(active, config, decoder, None, print).score(groups)
    for a, b in zip(itertools.chain(*own), itertools.chain(*shared), strict=True):
        torch.testing.assert_close(a.logprob_C, b.logprob_C)
        torch.testing.assert_close(a.outcomes_CX, b.outcomes_CX)
    after = adapter_tensors(decoder)
    assert all(after[name] is master for name, master in before.items()) and after.keys() == before.keys()


def _plain(decoder):
    return lambda: contextlib.nullcontext(decoder)


def test_the_policy_gradient_is_that_of_the_reverse_kl(rng):
    """The learner's gradient is that of sum_t w_t sg(log p - log q) log p."""
    config = run_config(distil=DistilConfig(teacher="x"), noise=NoiseConfig(schedule="none"))
    decoder, other = tiny_decoder(), tiny_decoder(adapter=AdapterConfig(rank=6, alpha=3.0))
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng)
    taught, learner = taught_by(groups, other, config), Learner(decoder, config)
    readings = learner.read(taught)
    gap = torch.cat([r.logprob_C - r.batch.teacher.logprob_C for r in readings])
    # the same step with these numbers as advantages of samples of one token each
    first = learner.step(taught)
    assert first["teacher_kl"] == pytest.approx(gap.mean().item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(plain_norm(taught, config, gap), rel=1e-4)


def plain_norm(groups, config, gap):
    """The norm of the gradient of sum_t w_t (-advantage_t) log p_t, with the weights that correct the sampler
    held constant, by autograd over the plain forward pass."""
    decoder = tiny_decoder()
    batches = MinibatchPart([(g, [1.0] * len(g.samples_G)) for g in groups], decoder.device).batches(4096)
    start, loss, total = 0, torch.zeros(()), sum(len(s.logprobs_T) for g in groups for s in g.samples_G)
    for batch in batches:
        hidden_TD, head = packed_hidden(decoder, batch), head_of(decoder, temperature=1.0, chunk_tokens=64)
        logits_CV = hidden_TD[batch.source_rows_C] @ head.operand_VD.T / head.temperature
        logprob_C = logits_CV.log_softmax(-1).gather(1, batch.targets_C[:, None]).squeeze(1)
        gap_C = gap[start : start + len(logprob_C)]
        weight_C = (logprob_C.detach() - batch.sampler_logprobs_C).exp().clamp(max=2.0)
        loss = loss + (weight_C * gap_C * logprob_C).sum() / total
        start += len(logprob_C)
    gradients = torch.autograd.grad(loss, list(adapter_tensors(decoder).values()))
    return torch.nn.utils.get_total_norm(list(gradients)).item()


def taught_by(groups, decoder, config):
    found = LocalTeacher(_plain(decoder), config, decoder, None, print).score(groups)
    return [with_teacher_logprobs(*pair) for pair in zip(groups, found, strict=True)]


def test_the_plan_counts_the_teacher():
    settings = {"noise": NoiseConfig(schedule="none"), "learn": LearnConfig(gradient_checkpointing="layer")}
    config = RunConfig(distil=DistilConfig(teacher="qwen2.5-7b"), **settings)
    small = read_architecture("qwen2.5-1.5b")
    parts = {part.name: part for part in memory_parts(small, config, 64)}
    assert 4.5e9 < parts["teacher's weights"].num_bytes < 7e9 and parts["teacher's pass"].num_bytes > 0
    assert parts["teacher's pass"].when == "teaching" and parts["teacher's adapter"].num_bytes == 0
    assert "teacher's weights" not in {part.name for part in memory_parts(small, RunConfig(**settings), 64)}
