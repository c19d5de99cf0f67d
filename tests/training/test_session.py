"""A run from its command: what it writes, and that being stopped or killed anywhere changes nothing of it."""

import datetime
import json
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

import tiny_run
from qerl.cli.main import command
from qerl.cli.result import rounded
from qerl.errors import quantity
from qerl.tracking import Journal, is_timing
from qerl.tracking.json_lines import read_lines
from qerl.training.rollouts import evaluation

FAILS = """def fails(prompts, completions, completion_ids, **columns):
    return [1 / (ids[0] % 3) for ids in completion_ids]
"""

DICE = """import random


class Dice:
    async def reset(self, row):
        pass

    async def step(self, completion):
        return "Again.", random.random(), True
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def start(files, out, *more, recipe="demo_long"):
    return tiny_run.started(*tiny_run.QERL, "train", recipe, *tiny_run.options(files, out), *more)


def finish(files, out, *more, recipe="demo_long"):
    process = start(files, out, *more, recipe=recipe)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout


def wait_for_steps(process, out, num_steps):
    path = out / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < num_steps:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def kill_after(num_steps, files, out, *more, recipe="demo_long"):
    """Kill a run in the step after this many."""
    tiny_run.kill_in_step(num_steps, "train", recipe, *tiny_run.options(files, out), *more)
    assert len(metrics(out)) == num_steps


def metrics(out):
    lines = list(read_lines(out / "metrics.jsonl"))
    return [{key: value for key, value in line.items() if not is_timing(key)} for line in lines]


def adapter(out):
    return load_file(out / "checkpoints" / "step-000006" / "adapter_model.safetensors")


def assert_same_run(a, b):
    assert metrics(a) == metrics(b)
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    assert (a / "evaluations.json").read_text() == (b / "evaluations.json").read_text()
    assert (a / "held_out.jsonl").read_text() == (b / "held_out.jsonl").read_text()
    ours, theirs = adapter(a), adapter(b)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_template_that_asks_for_today_gets_the_day_of_the_runs_start_also_when_resumed(tmp_path):
    files, out = tiny_run.write_files(tmp_path / "files"), tmp_path / "run"
    template = "{{ strftime_now('%d %b %Y') }}" + tiny_run.CHATML
    (files / "chat_template.jinja").write_text(template)
    finish(files, out, "--num-steps", "2")
    facts, today = json.loads((out / "run.json").read_text()), datetime.date.today()
    assert facts["config"]["task"]["chat_template_date"] is None
    facts["start_time"] = "2024-02-29T23:59:59+01:00"
    (out / "run.json").write_text(json.dumps(facts))
    finish(files, out, "--num-steps", "4")
    days = {
        line["step"]: line["prompt"].partition("<|im_start|>")[0]
        for line in read_lines(out / "samples.jsonl")
    }
    assert days == {0: f"{today:%d %b %Y}", 1: f"{today:%d %b %Y}", 2: "29 Feb 2024", 3: "29 Feb 2024"}
    set_day = finish(files, tmp_path / "other", "--num-steps", "1", "--task.chat-template-date", "2020-01-02")
    (line,) = {line["prompt"][:11] for line in read_lines(tmp_path / "other" / "samples.jsonl")}
    assert line == "02 Jan 2020" and set_day


@pytest.fixture(scope="module")
def unbroken(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    return out, finish(files, out)


def test_with_json_the_last_line_is_the_result(files, unbroken):
    out, _ = unbroken
    result = json.loads((out / "result.json").read_text())
    assert json.loads(finish(files, out, "--json").splitlines()[-1]) == rounded(result)
    assert set(result) == {
        "accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "train_s", "run",
        "reward_before", "reward_after", "greedy_reward_before", "greedy_reward_after",
    }  # fmt: skip
    assert result["reward_after"] == result["accuracy_after"]  # of rewards that are 0 or 1
    assert result["run"] == str(out) and result["train_s"] > 0


def test_a_run_leaves_its_record(unbroken):
    out, _ = unbroken
    for name in (
        "run.json",
        "result.json",
        "metrics.jsonl",
        "samples.jsonl",
        "evaluations.json",
        "report.html",
    ):
        assert (out / name).stat().st_size > 0, name
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert len(metrics(out)) == 6
    assert (out / "samples.jsonl").read_text().count("\n") == 6 * 4 * 4


def test_a_run_on_a_gpu_says_what_is_computed_again_and_one_on_a_cpu_has_no_choice(unbroken):
    events = [json.loads(line)["text"] for line in (unbroken[0] / "events.jsonl").read_text().splitlines()]
    said = [text.split(":")[0] for text in events if text.startswith("learn.gradient_checkpointing")]
    assert said == ["learn.gradient_checkpointing is none"] * torch.cuda.is_available()


def test_noise_acts_on_the_sampler_and_shows_as_mismatch(unbroken):
    """3 stages of 2 steps: quiet, sigma_start, sigma_end. Quiet, the policies are one but for rounding."""
    steps = metrics(unbroken[0])
    assert [step["sigma"] for step in steps] == [0, 0, 0.03, 0.03, 0.0015, 0.0015]
    assert max(step["mismatch_abs"] for step in steps[:2]) < 2e-6
    assert min(step["mismatch_abs"] for step in steps[2:]) > 1e-5
    assert steps[2]["mismatch_abs"] > 5 * steps[4]["mismatch_abs"]


def test_killed_and_started_again_a_run_is_the_unbroken_one(files, unbroken, tmp_path):
    """One step after a checkpoint; tests/faults/test_kills.py has other moments."""
    kill_after(3, files, tmp_path / "run")
    finish(files, tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken[0])


@pytest.fixture
def half(files, tmp_path):
    """The folder of a run that was killed after two checkpoints, and their numbers of steps."""
    out = tmp_path / "run"
    with tiny_run.held(files, out, 5):
        process = start(files, out)
        wait_for_steps(process, out, 5)
        while '"checkpoint": 4' not in (out / "events.jsonl").read_text():  # a thread writes it
            time.sleep(0.01)
        process.kill()
        process.communicate()
    # A kill may come before the third newest is removed.
    *_, older, newest = (int(path.name[5:]) for path in sorted((out / "checkpoints").glob("step-*")))
    return out, older, newest


def test_checkpoints_that_are_gone_are_refused_unless_the_user_accepts(files, unbroken, half):
    out, _, newest = half
    shutil.rmtree(out / "checkpoints")
    before = (out / "metrics.jsonl").read_bytes()
    _, stderr = (process := start(files, out)).communicate(timeout=60)
    assert process.returncode == 2 and stderr.count("\n") == 1
    said = f"metrics.jsonl has {len(metrics(out))} steps, but the checkpoint after step {newest} is gone"
    assert said in stderr and "--accept-changes" in stderr and "--out" in stderr
    assert (out / "metrics.jsonl").read_bytes() == before
    assert f"after step {newest} is gone; starting again" in finish(files, out, "--accept-changes")
    assert_same_run(out, unbroken[0])


def test_a_newest_checkpoint_that_is_gone_is_told(files, unbroken, half):
    out, older, newest = half
    shutil.rmtree(out / "checkpoints" / f"step-{newest:06d}")
    said = f"the checkpoint after step {newest} is gone; the one after step {older} is used"
    assert said in finish(files, out)
    assert_same_run(out, unbroken[0])


def test_steps_done_again_after_the_last_evaluation_leave_the_unbroken_run(files, unbroken, tmp_path):
    """Its result is lost and so is its last checkpoint: the evaluation after training is of steps to come."""
    out = tmp_path / "run"
    shutil.copytree(unbroken[0], out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-000006")
    assert "the one after step 4 is used" in finish(files, out)
    assert_same_run(out, unbroken[0])


def test_a_finished_run_without_checkpoints_is_not_given_more_steps_from_the_first_on(
    files, unbroken, tmp_path
):
    """No step follows its last checkpoint, so that only the event tells of it."""
    shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    _, stderr = (process := start(files, tmp_path / "run", "--num-steps", "8")).communicate(timeout=60)
    assert process.returncode == 2 and "the checkpoint after step 6 is gone" in stderr


def test_a_run_killed_before_its_first_checkpoint_starts_again_unasked(files, unbroken, tmp_path):
    out = tmp_path / "run"
    kill_after(2, files, out, "--checkpoint.every", "5")
    assert not list(out.glob("checkpoints/step-*"))
    assert "is gone" not in finish(files, out)
    assert_same_run(out, unbroken[0])


def goes_on(files, tmp_path, *given, recipe):
    """Killed after the third step and continued, the run is the unbroken one, whose metrics these are."""
    finish(files, tmp_path / "whole", *given, recipe=recipe)
    kill_after(3, files, tmp_path / "broken", *given, recipe=recipe)
    finish(files, tmp_path / "broken", *given, recipe=recipe)
    assert_same_run(tmp_path / "broken", tmp_path / "whole")
    return metrics(tmp_path / "whole")


def test_a_steered_sigma_goes_on_where_it_was(files, tmp_path):
    """Killed after the third step, one checkpoint behind it: floor and sigma are the unbroken run's."""
    given = ("--noise.control.warmup-steps", "1", "--noise.control.target", "1e-6")
    steps = goes_on(files, tmp_path, *given, recipe="aqn_kl")
    assert steps[0]["sigma"] == 0.0 and len({step["sigma"] for step in steps[1:]}) == 5
    assert {step["noise_floor"] for step in steps} == {steps[0]["mismatch_kl"]} != {0.0}


def test_a_branching_run_goes_on_where_it_was(files, tmp_path):
    """Killed after the third step, one checkpoint behind it: pivots and branches are the unbroken run's."""
    given = ("--task.rewards", f"{files / 'even.py'}:even_end", "--algo.deep.num-branches", "2")
    steps = goes_on(files, tmp_path, *given, recipe="deep_grpo")
    assert all(0 < step["branch_accuracy"] < 1 and step["branches"] == 2 * step["pivots"] for step in steps)
    assert len({step["pivot_base"] for step in steps[3:]}) == 3  # fitted anew as tries are added
    assert max(step["mismatch_abs"] for step in steps if not step["sigma"]) < 2e-6
    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    branches = sum("prefix_tokens" in line for line in samples)
    assert branches == sum(step["branches"] for step in steps) == len(samples) - 6 * 4 * 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_saves_it(files, unbroken, tmp_path, number, code):
    out = tmp_path / "run"
    with tiny_run.held(files, out, 1):
        process = start(files, out)
        wait_for_steps(process, out, 1)
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in stderr
    num_steps = len(metrics(out))
    assert num_steps in (1, 2) and (out / "checkpoints" / f"step-{num_steps:06d}").is_dir()
    finish(files, out)
    assert_same_run(out, unbroken[0])


def test_a_finished_run_is_not_run_again(files, unbroken):
    out, stdout = unbroken
    before = (out / "metrics.jsonl").read_text()
    (out / "report.html").unlink()  # as a disk that was full in the end leaves it
    assert finish(files, out).splitlines()[-5:] == stdout.splitlines()[-5:]
    assert (out / "metrics.jsonl").read_text() == before
    assert (out / "report.html").exists()


def test_an_environment_that_may_answer_otherwise_is_not_branched(files, tmp_path):
    (tmp_path / "dice.py").write_text(DICE)
    given = ("--task.rewards", f"{tmp_path}/dice.py:Dice")
    process = start(files, tmp_path / "run", *given, recipe="deep_grpo")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    refused = "qerl: algo.branching deep plays an environment's turns again: set `deterministic = True`"
    assert stderr.startswith(refused)


def test_a_reward_that_fails_is_told_once_on_the_console_and_once_in_the_file(files, tmp_path):
    out, given = tmp_path / "run", ("--task.rewards", f"{files / 'fails.py'}:fails", "--num-steps", "2")
    (files / "fails.py").write_text(FAILS)
    stdout, stderr = (process := start(files, out, *given)).communicate(timeout=120)
    assert process.returncode == 0, stderr
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    told = [(event["step"], event["text"]) for event in events if "no reward for" in event["text"]]
    assert [step for step, _ in told] == [None, 0, 1, None]  # both evaluations too
    assert [line for line in stdout.splitlines() if "no reward for" in line] == [text for _, text in told]
    assert "no reward for" not in stderr
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    failed = [sum(s["step"] == step and s["reward"] is None for s in samples) for step in (0, 1)]
    expected = "no reward for {}: raised ZeroDivisionError: fails: division by zero"
    for num_failed, (_, text) in zip(failed, told[1:3], strict=True):
        assert text == f"{expected.format(quantity(num_failed, 'sample'))} (fails.py:2)"


def test_what_was_compiled_before_the_first_step_is_told_once(files, tmp_path):
    code = """
from qerl.cli.main import main
from qerl.kernels.runtime.compile_tally import CompileReport, CompileTally

CompileTally.report = lambda tally: CompileReport(
    num_kernels=3, num_compiled=2, compile_s=1.26, waited_s=0.5
)
main()
"""
    (tmp_path / "told.py").write_text(code)
    options = tiny_run.options(files, tmp_path / "run")
    process = tiny_run.started(str(tmp_path / "told.py"), "train", "demo_long", *options)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.count("compiled 2 kernels in 1.3 s, 1 were in the disk cache; the run waited 0.5 s") == 1


def test_samples_longer_than_the_model_are_refused(files, tmp_path):
    process = start(files, tmp_path / "run", "--sample.max-tokens", "128")
    _, stderr = process.communicate(timeout=60)
    line = "sample.max_tokens is 128, but the model has only 128 positions, prompt included: lower it"
    assert stderr == f"qerl: {line}\n"


def test_too_few_rows_are_told_before_the_first_evaluation(files, tmp_path):
    row = json.dumps({"prompt": "1 + 2 =", "answer": "3"})
    (tmp_path / "same.jsonl").write_text(f"{row}\n" * 20)
    given = "--task.name", str(tmp_path / "same.jsonl"), "--task.num-held-out", "4"
    stdout, stderr = (process := start(files, tmp_path / "run", *given)).communicate(timeout=60)
    assert process.returncode == 2 and "has only 0 training rows" in stderr
    assert "held-out accuracy before" not in stdout


def test_another_config_in_the_same_folder_is_refused(files, unbroken):
    process = start(files, unbroken[0], "--seed", "1")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.startswith("qerl: ") and "seed = 0, not 1" in stderr and stderr.count("\n") == 1


def test_a_full_disk_at_a_checkpoint_keeps_the_last_good_one(files, tmp_path):
    """The limit on a file's size stands in for the disk: the second checkpoint, made larger, does not fit."""
    out = tmp_path / "run"
    kill_after(2, files, out, "--checkpoint.every", "1")
    largest = max(path.stat().st_size for path in out.glob("checkpoints/*/*"))
    newest = max(path.name for path in out.glob("checkpoints/step-??????"))
    code = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest - 1}, {largest - 1}));"
        f"from qerl.cli.main import main; main()"
    )
    (script := tmp_path / "limited").write_text(code)
    more = (*tiny_run.options(files, out), "--checkpoint.every", "1")
    process = tiny_run.started(str(script), "train", "demo_long", *more)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "cannot write the checkpoint" in stderr
    assert "Traceback" not in stderr
    assert newest in [path.name for path in (out / "checkpoints").iterdir()]
    finish(files, out, "--checkpoint.every", "1")


@pytest.mark.parametrize(("per", "draws"), [("step", 1), ("group", 4), ("sample", 4)])
def test_in_exact_mode_the_learner_reads_the_samplers_logprobs_to_the_bit(per, draws, files, tmp_path):
    exact = ("--engine.exact", "--engine.max-num-seqs", "16", "--noise.scope", per, "--num-steps", "3")
    finish(files, tmp_path / "both", *exact, "--noise.noise-in", "both")
    finish(files, tmp_path / "sampler", *exact)
    both, sampler = metrics(tmp_path / "both"), metrics(tmp_path / "sampler")
    for step in both:
        assert step["mismatch_max"] == 0 < step["own_mismatch_max"] and step["ratio_mean"] == 1
    assert [step["mismatch_max"] > 0 for step in sampler] == [step["sigma"] > 0 for step in sampler]
    assert {step["sigma"] > 0 for step in sampler} == {True, False}
    assert [step["noise_draws"] for step in both] == [draws * (step["sigma"] > 0) for step in both]


def test_a_step_has_the_mean_of_each_of_several_rewards_and_not_those_of_its_evaluation(files, tmp_path):
    given = ["--task.rewards", f"{files / 'even.py'}:even", "numeric", "--task.reward-weights", "1", "0.5"]
    given += ["--num-steps", "2", "--evaluate.every", "1", "--noise.num-stages", "2"]
    finish(files, tmp_path / "run", *given)
    for step in metrics(tmp_path / "run"):
        means = step["rewards/even/mean"], step["rewards/numeric/mean"]
        assert means[0] + 0.5 * means[1] == pytest.approx(step["reward"])


def test_own_rewards_have_a_held_out_mean_and_no_accuracy(files, tmp_path):
    """The README's own example ended with accuracy 0.0."""
    (files / "size.py").write_text(
        "def size(completion_ids, **columns):\n    return [-float(len(set(ids))) for ids in completion_ids]\n"
    )
    given = ["--task.rewards", f"{files / 'size.py'}:size", "--num-steps", "2", "--evaluate.every", "1"]
    given += ["--evaluate.success-threshold", "None", "--noise.num-stages", "2"]
    stdout = finish(files, tmp_path / "run", *given)
    figures = json.loads((tmp_path / "run" / "evaluations.json").read_text())
    names = {"reward", "greedy_reward", "reward_error", "greedy_reward_error", "num_prompts"}
    assert {moment: set(values) for moment, values in figures.items()} == {"before": names, "after": names}
    assert -5 <= figures["before"]["reward"] < 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["reward_after"] == figures["after"]["reward"]
    answers = list(read_lines(tmp_path / "run" / "held_out.jsonl"))
    assert {line["step"] for line in answers} == {0, 1, 2}
    greedy = [line["reward"] for line in answers if (line["step"], line["kind"]) == (0, "greedy")]
    assert sum(greedy) / len(greedy) == pytest.approx(figures["before"]["greedy_reward"])
    steps = metrics(tmp_path / "run")
    assert steps[-1]["eval_reward"] == figures["after"]["reward"] and "accuracy" not in stdout
    assert steps[-1]["eval_reward_error"] == figures["after"]["reward_error"]
    assert not [key for step in steps for key in step if "accuracy" in key or key.startswith("pass_at")]
    assert "Held-out reward" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture
def asked(monkeypatch):
    """The temperatures of the evaluations that the sampler is asked for."""
    temperatures, sample = [], evaluation.sample

    def counted(engine, request, report):
        temperatures.append(request.sampling.temperature)
        return sample(engine, request, report)

    monkeypatch.setattr(evaluation, "sample", counted)
    return temperatures


def test_the_last_steps_evaluation_is_that_after_training(files, unbroken, tmp_path, asked, monkeypatch):
    """Before training and after 3 and 6 steps, sampled and greedy; the figures are those of a run that
    evaluates once its steps are done."""
    expected, out = [], tmp_path / "run"
    monkeypatch.setattr(Journal, "expect", lambda journal, *, end_s: expected.append(end_s))
    command(["train", "demo_long", *tiny_run.options(files, out), "--evaluate.every", "3"])
    assert asked == [1.0, 0.0] * 3 and not expected
    for name in ("evaluations.json", "samples.jsonl"):
        assert (out / name).read_text() == (unbroken[0] / name).read_text()
    steps = [line["step"] for line in read_lines(out / "held_out.jsonl")]
    assert {step: steps.count(step) for step in steps} == {0: 8, 3: 8, 6: 8}
    ours, theirs = (json.loads((each / "result.json").read_text()) for each in (out, unbroken[0]))
    assert {k: v for k, v in ours.items() if "_before" in k or "_after" in k}.items() <= theirs.items()
    told = [json.loads(each)["text"] for each in (out / "events.jsonl").read_text().splitlines()]
    (line,) = (text for text in told if text.startswith("held-out accuracy after training: "))
    assert line in unbroken[1].splitlines()
    assert "Held-out accuracy" in (out / "report.html").read_text()


def test_an_evaluation_that_ends_a_run_is_timed_where_it_is_one(files, tmp_path, asked, monkeypatch):
    expected = []
    monkeypatch.setattr(Journal, "expect", lambda journal, *, end_s: expected.append(end_s))
    given = "--num-steps", "3", "--evaluate.every", "2"
    command(["train", "demo_long", *tiny_run.options(files, tmp_path / "run"), *given])
    assert asked == [1.0, 0.0] * 3 and len(expected) == 1 and expected[0] > 0


def lose_the_end(out):
    """Leave of a complete run what a kill between its last step and its end would. Return its figures."""
    for name in ("result.json", "report.html"):
        (out / name).unlink()
    figures = json.loads((out / "evaluations.json").read_text())
    (out / "evaluations.json").write_text(json.dumps({"before": figures["before"]}))
    return figures


@pytest.fixture(scope="module")
def evaluated(files, tmp_path_factory):
    """The folder of a run with an evaluation after its last step, and its options."""
    out = tmp_path_factory.mktemp("evaluated") / "run"
    finish(files, out, "--evaluate.every", "3")
    return out, ["train", "demo_long", *tiny_run.options(files, out), "--evaluate.every", "3"]


def test_a_run_killed_after_its_last_step_has_the_figures_of_that_step(evaluated, tmp_path, asked):
    out, options = evaluated
    shutil.copytree(out, tmp_path / "whole")
    lose_the_end(out)
    command(options)
    assert not asked and (out / "result.json").exists() and (out / "report.html").exists()
    assert_same_run(out, tmp_path / "whole")


def test_figures_whose_line_is_lost_are_measured_again(evaluated, asked):
    """The last line that is left has figures too, after 3 steps."""
    out, options = evaluated
    figures, lines = lose_the_end(out), (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:3]))
    command(options)
    assert asked == [1.0, 0.0] and json.loads((out / "evaluations.json").read_text()) == figures


def test_figures_of_former_rewards_are_not_those_after_training(files, tmp_path, asked):
    out = tmp_path / "run"
    (tmp_path / "even.py").write_text((files / "even.py").read_text())
    options = ["train", "demo_long", *tiny_run.options(files, out), "--num-steps", "2"]
    options += ["--evaluate.every", "2", "--noise.num-stages", "2"]
    options += ["--task.rewards", f"{tmp_path / 'even.py'}:even"]
    command(options)
    former = json.loads((out / "evaluations.json").read_text())["after"]
    (tmp_path / "even.py").write_text((files / "even.py").read_text().replace("% 2 == 0", "% 2 == 1"))
    asked.clear()
    for more in ("--accept-changes",), ():  # the second time its rewards are those of the run
        lose_the_end(out)
        command([*options, *more])
    assert asked == [1.0, 0.0] * 2
    after = json.loads((out / "evaluations.json").read_text())["after"]
    assert after["accuracy"] == pytest.approx(1 - former["accuracy"])


def test_what_is_skipped_is_said_once_at_the_start_and_strict_makes_it_an_error(files, tmp_path):
    rows = [
        {"prompt": f"{i} + 1 =" + " long" * 40 * (i in (1, 2)), "answer": None if i == 3 else "1"}
        for i in range(40)
    ]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--task.name", str(tmp_path / "odd.jsonl"), "--task.rewards", "numeric", "--num-steps", "2"]
    given += ["--noise.num-stages", "2", "--task.num-held-out", "4"]
    stdout = finish(files, tmp_path / "run", *given)
    (line,) = [line for line in stdout.splitlines() if "odd.jsonl: of 40 rows" in line]
    assert "2 longer than 123 tokens" in line and "1 without answer" in line
    assert stdout.index(line) < stdout.index("held-out accuracy before")
    _, stderr = (process := start(files, tmp_path / "strict", *given, "--strict")).communicate(timeout=60)
    assert process.returncode == 2 and stderr.startswith("qerl: strict: ") and "1 without answer" in stderr


def test_a_wrong_answer_column_is_told_before_the_model_is_loaded(files, tmp_path, monkeypatch):
    def loads(*given):
        raise SystemExit("the model was loaded")

    monkeypatch.setattr("qerl.training.session.load_sampler", loads)
    given = "--task.rewards", "numeric", "--task.answer-column", "solution"
    _, stderr = (process := start(files, tmp_path / "run", *given)).communicate(timeout=60)
    assert process.returncode == 2
    assert stderr == "qerl: task.answer_column: no column 'solution' (there are: answer)\n"


def test_an_evaluation_of_fewer_problems_than_asked_is_said_before_it_begins(files, tmp_path):
    stdout = finish(files, tmp_path / "run", "--num-steps", "2", "--evaluate.num-prompts", "1319")
    said = stdout.index("evaluate.num_prompts is 1,319, but there are only 8 rows to evaluate on")
    assert said < stdout.index("answering held-out problems")
    figures = json.loads((tmp_path / "run" / "evaluations.json").read_text())
    assert figures["after"]["num_prompts"] == 8
