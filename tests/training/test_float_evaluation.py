"""evaluate.float: what a run's float model scores before quantization, and what quantization costs."""

import json
import math
import random
import shutil
import statistics
import weakref

import pytest

import tiny_run
from qerl.cli.main import command
from qerl.config import EvalConfig, ModelConfig, RunConfig
from qerl.config.run import RayConfig
from qerl.errors import UserError
from qerl.learner.plan import report
from qerl.tracking.json_lines import read_lines
from qerl.training import float_evaluation
from qerl.training.float_evaluation import FLOAT, prices
from qerl.training.rollouts.evaluation import Scores

DICE = """
class Guess:
    async def reset(self, row):
        self.turns = 0

    async def step(self, completion):
        self.turns += 1
        return "Again.", float(len(completion) % 2), self.turns == 2
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def finish(files, out, *more):
    given = [*tiny_run.options(files, out), "--num-steps", "2", "--json", *more]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def evaluations(out):
    return json.loads((out / "evaluations.json").read_text())


@pytest.fixture(scope="module")
def both(files, tmp_path_factory):
    """(a run with evaluate.float, its result, the evaluations of the same run in BF16)."""
    out = tmp_path_factory.mktemp("runs")
    result = finish(files, out / "float", "--evaluate.float", "--evaluate.num-prompts", "8")
    finish(files, out / "bf16", "--model.format", "bf16", "--evaluate.num-prompts", "8")
    return out / "float", result, evaluations(out / "bf16")


def test_the_float_models_figures_are_those_of_a_run_in_bf16(both):
    out, result, exact = both
    figures = evaluations(out)[FLOAT]
    shared = {name: value for name, value in figures.items() if "price" not in name}
    assert shared == exact["before"]
    assert result["accuracy_float"] == exact["before"]["accuracy"]
    price = exact["before"]["accuracy"] - evaluations(out)["before"]["accuracy"]
    assert math.isclose(result["accuracy_price"], price, abs_tol=1e-12)


def test_the_price_is_logged_with_the_first_step_and_shown(both):
    out, _, _ = both
    first, second = read_lines(out / "metrics.jsonl")
    figures = evaluations(out)[FLOAT]
    assert {f"eval_float_{name}": value for name, value in figures.items()}.items() <= first.items()
    assert not any(name.startswith("eval_float") for name in second)
    assert "Float model's accuracy" in (out / "report.html").read_text()
    texts = [json.loads(line)["text"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum("of the float weights" in text and "nvfp4 costs" in text for text in texts) == 1


def test_figures_after_a_single_step_are_those_of_the_quantized_model(files, tmp_path):
    """Its line has the float model's too."""
    given = "--num-steps", "1", "--evaluate.every", "1", "--noise.schedule", "none"
    finish(files, tmp_path, "--evaluate.float", *given)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    after = evaluations(tmp_path)["after"]
    assert after.keys() == evaluations(tmp_path)["before"].keys()
    assert after["reward"] == line["eval_reward"] and "eval_float_reward" in line


def test_the_float_model_is_freed_before_the_quantized_one_is_loaded(files, tmp_path, monkeypatch):
    loaded, load = [], float_evaluation.load_sampler

    def watched(config, tokenizer, *report):
        decoder, engine = load(config, tokenizer, *report)
        loaded.append(weakref.ref(decoder))
        return decoder, engine

    monkeypatch.setattr(float_evaluation, "load_sampler", watched)
    from qerl.training import session

    def after(config, tokenizer, *report):
        assert len(loaded) == 1 and loaded[0]() is None
        return load(config, tokenizer, *report)

    monkeypatch.setattr(session, "load_sampler", after)
    finish(files, tmp_path / "run", "--evaluate.float")
    assert len(loaded) == 1


def test_a_run_that_has_the_figures_does_not_measure_again(files, tmp_path, monkeypatch):
    out, more = tmp_path / "run", ("--evaluate.float",)
    finish(files, out, *more)
    before = evaluations(out)
    monkeypatch.setattr(float_evaluation, "load_sampler", None)
    assert finish(files, out, *more, "--num-steps", "3")["accuracy_float"] == before[FLOAT]["accuracy"]
    assert evaluations(out)[FLOAT] == before[FLOAT]


@pytest.mark.parametrize("moments", [("before",), ("before", FLOAT)])
def test_a_run_stopped_before_its_first_step_measures_what_it_lacks(files, tmp_path, monkeypatch, moments):
    out, more = tmp_path / "run", ("--evaluate.float",)
    finish(files, out, *more)
    whole, (first, _) = evaluations(out), read_lines(out / "metrics.jsonl")
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "result.json", "report.html"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints")
    (out / "evaluations.json").write_text(json.dumps({moment: whole[moment] for moment in moments}))
    if FLOAT in moments:
        monkeypatch.setattr(float_evaluation, "load_sampler", None)
    finish(files, out, *more)
    again, _ = read_lines(out / "metrics.jsonl")
    assert evaluations(out) == whole
    assert again["eval_float_accuracy_price"] == first["eval_float_accuracy_price"]


def test_an_environment_plays_with_the_float_model(files, tmp_path):
    (tmp_path / "guess.py").write_text(DICE)
    more = ("--task.rewards", f"{tmp_path / 'guess.py'}:Guess", "--sample.max-tokens", "40")
    result = finish(files, tmp_path / "run", *more, "--evaluate.float")
    finish(files, tmp_path / "bf16", *more, "--model.format", "bf16")
    assert result["reward_float"] == evaluations(tmp_path / "bf16")["before"]["reward"]


def test_the_price_pairs_problems_and_leaves_out_rewards_that_failed():
    rng = random.Random(0)
    exact = [[rng.choice([0.0, 0.5, 1.0, None])] for _ in range(50)]
    quantized = [[rng.choice([0.0, 0.5, 1.0, None])] for _ in range(60)]
    tokens = [[1]] * 60
    scores = [Scores(exact, tokens[:50])] * 2, [Scores(quantized, tokens)] * 2
    figures = prices(*scores, 1.0)
    correct = [(a == 1.0) - (b == 1.0) for (a,), (b,) in zip(exact, quantized, strict=False)]
    known = [a - b for (a,), (b,) in zip(exact, quantized, strict=False) if None not in (a, b)]
    for name, values in (("accuracy", correct), ("greedy", correct), ("reward", known)):
        assert math.isclose(figures[f"{name}_price"], statistics.fmean(values))
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert math.isclose(figures[f"{name}_price_error"], error)
    assert set(prices(*scores, None)) == {n for n in figures if "reward" in n}
    failed = [Scores([[None]], [[1]])] * 2
    assert prices(failed, failed, None) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvalConfig(float=True, num_prompts=0), "evaluate.float needs evaluate.num_prompts above 0"),
        (
            lambda: RunConfig(evaluate=EvalConfig(float=True), model=ModelConfig(format="bf16")),
            "evaluate.float needs a quantized model.format, got bf16",
        ),
        (
            lambda: RunConfig(evaluate=EvalConfig(float=True), ray=RayConfig(address="auto")),
            "evaluate.float does not work with an agent, ray.address or sft.data",
        ),
    ],
)
def test_what_has_no_float_model_to_compare_is_refused(make, message):
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value) == message


def test_a_quantized_checkpoint_is_refused_by_name(files, tmp_path):
    command(["quantize", str(files), str(tmp_path / "packed")])
    given = tiny_run.options(files, tmp_path / "run")
    given[given.index("--model.path") + 1] = str(tmp_path / "packed")
    with pytest.raises(UserError, match=r"evaluate\.float: .*packed is quantized already \(.*\) and has no"):
        command(["train", "demo_long", *given, "--evaluate.float"])


def test_the_plan_counts_the_float_model():
    def lines(**evaluate):
        config = RunConfig(evaluate=EvalConfig(**evaluate))
        return report.format_plan("qwen2.5-7b", config, gpu_gb=24, prompt_tokens=64)

    (with_it, fits), (without, fits_without) = lines(float=True), lines()
    assert "evaluation in BF16" in with_it and "evaluation in BF16" not in without
    assert fits_without and fits == ("fits into" in with_it)
    need = next(float(line.split()[3]) for line in with_it.splitlines() if line.startswith("evaluation in"))
    assert 15.2 < need < 30, need  # 7.6 G weights of two bytes, and the KV cache
