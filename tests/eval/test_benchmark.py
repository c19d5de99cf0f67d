"""`qerl eval MODEL BENCHMARK=FILE`: files in the published sets' columns, and a two-layer model."""

import dataclasses
import io
import json
import math
import statistics
from pathlib import Path

import latex2sympy2_extended
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

import tiny_run
from qerl.cli import main
from qerl.errors import UserError
from qerl.eval.benchmark import Benchmark, read_results, result_path, run_benchmark, settings_of
from qerl.eval.catalog import BENCHMARKS, parse_benchmark, parse_benchmarks
from qerl.eval.run import table
from qerl.tasks import majority_vote
from qerl.tasks.majority_vote import VotePool, votes
from qerl.tasks.rows.table import open_rows
from qerl.tasks.worker_pool import WorkerPool
from qerl.tracking.progress import silent
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.types import GenerateRequest, Group, Prompt, Sample, Sampling

assert latex2sympy2_extended  # imported here, so that forked graders need not: 0.7 CPU seconds each

ROWS = {
    "gsm8k": [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(5)
    ],
    "math-500": [
        {
            "problem": f"Halve ${i}$.",
            "solution": rf"It is $\boxed{{\frac{{{i}}}{{2}}}}$.",
            "answer": rf"\frac{{{i}}}{{2}}",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": f"test/prealgebra/{i}.json",
        }
        for i in range(4)
    ],
    "aime24": [
        {
            "id": i,
            "problem": "Find $n$.",
            "solution": "...",
            "answer": f"{i:03}",
            "url": "https://x",
            "year": "2024",
        }
        for i in range(3)
    ],
    "aime25": [{"problem": "Find $n$.", "answer": str(70 + i), "id": str(i)} for i in range(3)],
    "amc23": [{"id": i, "question": "Find $n$.", "answer": 27.0 + i, "url": "https://x"} for i in range(3)],
}
SAMPLED = Sampling(max_tokens=8, temperature=0.6, top_p=0.95)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=1024)


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("".join(",".join(f'"{value}"' for value in line) + "\n" for line in lines))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(monkeypatch, capsys, *arguments):
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["qerl", "eval", *map(str, arguments)])
    try:
        main.main()
    except SystemExit as stop:
        assert stop.code == 2
        first, _, error = capsys.readouterr().err.partition("\n")  # the first line says what is evaluated
        return [], error if first.startswith("eval ") else f"{first}\n{error}"
    output = capsys.readouterr()
    return [json.loads(line) for line in output.out.splitlines()], output.err


SHORT = ("--model.dtype", "fp32", "--max-tokens", 4, "--num-samples", 3)


def test_all_sets_from_files_of_their_columns(monkeypatch, capsys, model, tmp_path):
    monkeypatch.chdir(tmp_path)
    kinds = dict(zip(BENCHMARKS, ("jsonl", "parquet", "json", "csv", "jsonl"), strict=True))
    places = [f"{name}={write(tmp_path / f'{name}.{kinds[name]}', ROWS[name])}" for name in BENCHMARKS]
    results, shown = evaluated(monkeypatch, capsys, model, *places, *SHORT)
    assert [result["set"] for result in results] == list(BENCHMARKS)
    for result in results:
        rows = ROWS[result["set"]]
        saved = json.loads((tmp_path / result["file"]).read_text())
        settings, problems = saved["settings"], saved["problems"]
        assert (settings["temperature"], settings["top_p"], settings["seed"]) == (0.6, 0.95, 0)
        assert (settings["num_samples"], settings["max_tokens"], settings["num_prompts"]) == (3, 4, len(rows))
        assert [str(problem["answer"]) for problem in problems] == [str(row["answer"]) for row in rows]
        assert all(len(problem["rewards"]) == len(problem["votes"]) == 3 for problem in problems)
        assert saved["summary"].items() <= result.items()
        assert result["set"] in shown
    assert "pass@1" in shown and "majority" in shown


def test_a_file_of_ones_own_is_evaluated_whole_by_its_template_column_and_reward(
    monkeypatch, capsys, model, tmp_path
):
    monkeypatch.chdir(tmp_path)
    rows = [{"exercise": f"{i} + 1", "solution": str(i + 1)} for i in range(5)]
    write(tmp_path / "mine.csv", rows)
    given = ["--template", "What is {exercise}?", "--answer-column=solution", "--reward", "exact"]
    (result,), shown = evaluated(monkeypatch, capsys, model, "mine.csv", *SHORT, *given)
    saved = json.loads((tmp_path / result["file"]).read_text())
    assert result["set"] == "mine" and result["num_prompts"] == 5 and "mine" in shown
    assert [problem["answer"] for problem in saved["problems"]] == [row["solution"] for row in rows]
    assert saved["settings"]["temperature"] == 1 and saved["settings"]["rewards"] == ["exact"]
    given[1] = "Is it {exercise}?"
    (other,), _ = evaluated(monkeypatch, capsys, model, "mine.csv", *SHORT, *given)
    assert other["file"] != result["file"]
    _, error = evaluated(monkeypatch, capsys, model, "mine.csv", *SHORT, "--template", "{exercise}")
    assert "task.answer_column: no column 'answer'" in error and "solution" in error
    _, error = evaluated(monkeypatch, capsys, model, "none.jsonl", *SHORT)
    assert "none.jsonl" in error and "no such file" in error


def test_what_is_there_is_not_done_again_and_other_settings_are_another_file(
    monkeypatch, capsys, model, tmp_path
):
    monkeypatch.chdir(tmp_path)
    place = f"aime24={write(tmp_path / 'aime.jsonl', ROWS['aime24'])}"
    (first,), _ = evaluated(monkeypatch, capsys, model, place, *SHORT)
    monkeypatch.setattr(
        "qerl.eval.run.load_trained_sampler", lambda *_: pytest.fail("the model was loaded again")
    )
    (again,), _ = evaluated(monkeypatch, capsys, model, place, *SHORT)
    assert again == first
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (other,), _ = evaluated(monkeypatch, capsys, model, place, *SHORT, "--seed", 1)
    write(tmp_path / "aime.jsonl", ROWS["aime24"][:2])
    (fewer,), _ = evaluated(monkeypatch, capsys, model, place, *SHORT)
    assert len({first["file"], other["file"], fewer["file"]}) == 3 and fewer["num_prompts"] == 2


def train(monkeypatch, model, out, *more):
    given = [*tiny_run.options(model, out), "--num-steps", "2", "--evaluate.num-prompts", "0", *more]
    monkeypatch.setattr("sys.argv", ["qerl", "train", "demo_long", *given])
    main.main()


def settings(result):
    return json.loads(Path(result["file"]).read_text())["settings"]


def test_a_runs_own_rows_are_tried_with_all_of_its_sampling_and_sets_with_none(
    monkeypatch, capsys, model, tmp_path
):
    own = {"top_k": 3, "top_p": 0.9, "min_p": 0.01, "stop": ["x", "yz"]}
    given = ["--sample.top-k", "3", "--sample.top-p", "0.9", "--sample.min-p", "0.01"]
    train(monkeypatch, model, tmp_path / "run", *given, "--sample.stop", "x", "yz")
    (result,), _ = evaluated(monkeypatch, capsys, tmp_path / "run", "--num-prompts", 2)
    assert own.items() <= settings(result).items()
    (result,), _ = evaluated(monkeypatch, capsys, tmp_path / "run", "--num-prompts", 2, "--top-p", 0.8)
    assert (own | {"top_p": 0.8}).items() <= settings(result).items()
    place = f"aime24={write(tmp_path / 'aime.jsonl', ROWS['aime24'])}"
    (result,), _ = evaluated(monkeypatch, capsys, tmp_path / "run", place, *SHORT)
    assert {"top_k": None, "top_p": 0.95, "min_p": None, "stop": []}.items() <= settings(result).items()


def test_rewards_that_are_weighed_otherwise_are_another_file(monkeypatch, capsys, model, tmp_path):
    train(monkeypatch, model, tmp_path / "run", "--task.rewards", "tags")
    given = ("--num-prompts", 2, "--num-samples", 2)
    changes = (
        (),
        ("--task.reward-weights", 2.0),
        ("--task.reward-timeout-s", 5),
        ("--task.code.credit", "all"),
    )
    files = [evaluated(monkeypatch, capsys, tmp_path / "run", *given, *c)[0][0]["file"] for c in changes]
    assert len(set(files)) == 4


def test_how_a_run_learned_does_not_keep_it_from_a_set(monkeypatch, capsys, model, tmp_path):
    """Exact mode takes no top_p, a penalty over the last 4 tokens no samples of 3."""
    shaped = ("--algo.overlong", "shape", "--algo.overlong-buffer", "4")
    train(monkeypatch, model, tmp_path / "run", "--engine.exact", *shaped)
    place = f"aime24={write(tmp_path / 'aime.jsonl', ROWS['aime24'])}"
    short = ("--max-tokens", 3, "--num-samples", 2)
    (result,), _ = evaluated(monkeypatch, capsys, tmp_path / "run", place, *short)
    assert settings(result)["top_p"] == 0.95 and result["num_prompts"] == 3


def test_a_runs_results_lie_in_its_folder(monkeypatch, capsys, model, tmp_path):
    out = tmp_path / "run"
    monkeypatch.setattr(
        "sys.argv", ["qerl", "train", "demo_long", *tiny_run.options(model, out), "--num-steps", "3"]
    )
    main.main()
    place = f"math-500={write(tmp_path / 'math.jsonl', ROWS['math-500'])}"
    (result,), _ = evaluated(monkeypatch, capsys, out, place, "--max-tokens", 4, "--num-samples", 2)
    assert result["file"].startswith(f"{out}/eval/math-500-")
    learned = json.loads((out / result["file"]).read_text())["settings"]["checkpoint"]
    (bare,), _ = evaluated(
        monkeypatch, capsys, out, place, "--max-tokens", 4, "--num-samples", 2, "--no-with-adapter"
    )
    assert bare["file"] != result["file"] and learned is not None


def test_why_rewards_failed_is_told_once(monkeypatch, capsys, model, tmp_path):
    code = "def fails(completion_ids):\n    return [1 / (completion_ids[0][0] % 3)]\n"
    (tmp_path / "fails.py").write_text(code)
    more = ("--task.name", model / "sums.jsonl", "--task.template", "{prompt}", "--task.num-held-out", 4)
    more += ("--task.rewards", f"{tmp_path / 'fails.py'}:fails", "--out", tmp_path / "out")
    results, shown = evaluated(monkeypatch, capsys, model, *more, *SHORT)
    assert shown.count("no reward for") == 1 and results[0]["num_failed_rewards"] > 0, shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["aime2"], ["unknown benchmark aime2", "did you mean aime25 or aime24 or amc23?"]),
        (["mine.txt"], ["unknown benchmark mine.txt", "math-500", "BENCHMARK=FILE"]),
        (["aime24="], ["aime24= needs a file"]),
        (["aime24", "--reward", "exact"], ["--task.rewards is for a file of your own"]),
        (["aime24=none.jsonl"], ["none.jsonl", "no such file"]),
        (["aime24=empty.jsonl"], ["empty.jsonl", "has no rows"]),
        (["aime24=text.jsonl"], ["'problem'", "there are: text, answer"]),
        (["math-500=unanswered.jsonl"], ["task.answer_column", "'answer'", "there are: level"]),
        (["gsm8k=ragged.csv"], ["ragged.csv", "line 3"]),
        (["gsm8k=gsm8k.jsonl", "--num-samples", "0"], ["num_samples must be positive, got 0"]),
        (["gsm8k=gsm8k.jsonl", "--max-tokens", "1000"], ["row 1", "tokens", "max_tokens"]),
        (["gsm8k=gsm8k.jsonl", "--max-tokens", "4096"], ["max_tokens is 4096", "1024 positions"]),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, model, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "ragged.csv").write_text("question,answer\na,1\nb,2,3\n")
    write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"])
    write(tmp_path / "text.jsonl", [{"text": "Find $n$.", "answer": "1"}])
    write(tmp_path / "unanswered.jsonl", [{"problem": "Find $n$.", "level": 1}])
    results, error = evaluated(monkeypatch, capsys, model, arguments[0], "--max-tokens", 4, *arguments[1:])
    error = error.removeprefix(f"eval {model}: {' '.join(arguments[:1])}\n")  # printed before the work begins
    assert not results and error.startswith("qerl: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error


def test_a_set_from_two_places_is_refused():
    assert list(parse_benchmarks(["aime25", "aime24=a.jsonl"])) == ["aime25", "aime24"]
    with pytest.raises(UserError, match="benchmark aime24 is given twice"):
        parse_benchmarks(["aime24", "aime25", "aime24=a.jsonl"])


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, capsys, model):
    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach 'math-ai/aime25' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    results, error = evaluated(monkeypatch, capsys, model, "aime25", "--max-tokens", 4)
    assert not results and error.count("\n") == 1
    assert "math-ai/aime25" in error and ".jsonl" in error


def test_every_set_names_columns_that_its_rows_have(tmp_path):
    for name, task in BENCHMARKS.items():
        place = write(tmp_path / f"{name}.jsonl", ROWS[name])
        assert parse_benchmark(f"{name}={place}") == (name, dataclasses.replace(task, name=str(place)))
        rows, _ = open_rows(parse_benchmark(f"{name}={place}")[1])
        assert rows.prompt_column == task.prompt_column and task.answer_column in rows.columns


class Texts:
    """An engine whose sample g of prompt p is texts[p][g], cut where it ends in dots; greedy is the last."""

    def __init__(self, texts_P_G):
        self.texts_P_G, self.asked = texts_P_G, []

    def generate(self, request, *, on_burst=None):
        prompts_P, num_samples = request.prompts_P, request.num_samples
        self.asked += [(prompt.index, num_samples) for prompt in prompts_P]
        first = -1 if request.sampling.temperature == 0 else 0
        return [
            Group(prompt=p, samples_G=[sample(t) for t in self.texts_P_G[p.index][first:][:num_samples]])
            for p in prompts_P
        ]

    def publish(self, version):
        raise AssertionError("evaluation changes no weights")


def exact(groups):
    """1 where the text's number is the answer; None for the text "fail"."""
    return [
        [
            None if s.text == "fail" else float(s.text.strip(".") == g.prompt.columns["answer"])
            for s in g.samples_G
        ]
        for g in groups
    ]


def sample(text):
    finish = "length" if text.endswith("..") else "stop"
    return Sample(tokens_T=[1] * len(text), logprobs_T=[0.0] * len(text), text=text, finish=finish, version=0)


TEXTS = [["7", "8", "7", "6..", "7"], ["1", "2", "2", "3", "1"], ["4", "fail", "5", "4", "5"]]


def problems():
    return [
        Prompt(index=i, text=f"problem {i}", tokens_T=[1], messages=None, columns={"answer": answer})
        for i, answer in enumerate(("7", "1", "4"))
    ]


def benchmark(*, prompts=None, num_samples=4, **changes):
    count_votes = lambda texts_P_G: [votes("numeric", texts_G) for texts_G in texts_P_G]  # noqa: E731
    request = GenerateRequest(
        prompts or problems(), num_samples=num_samples, sampling=SAMPLED, seed=0, step=EVALUATION_STEP
    )
    given = {"count_votes": count_votes, "success_threshold": 1.0, **changes}
    return Benchmark(name="sums", request=request, answer_column="answer", score=exact, **given)


def test_the_figures_of_three_problems_worked_by_hand(tmp_path):
    # right: 2, 1 and 2 of 4; the majority is 7 (right), 2 (wrong), 4 (right); greedy 7, 1, 5
    got = run_benchmark(benchmark(), lambda: Texts(TEXTS), tmp_path / "sums.json", {}, silent)
    mean = (1 / 2 + 1 / 4 + 1 / 2) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in (1 / 2, 1 / 4, 1 / 2)) / 2)
    assert got == {
        "pass@1": pytest.approx(mean),
        "pass@1_error": pytest.approx(spread / math.sqrt(3)),
        "pass@2": pytest.approx((5 / 6 + 1 / 2 + 5 / 6) / 3),
        "pass@4": pytest.approx(1.0),
        "majority": pytest.approx(2 / 3),
        "greedy": pytest.approx(2 / 3),
        "greedy_error": pytest.approx(1 / 3),
        "reward": pytest.approx((1 / 2 + 1 / 4 + 2 / 3) / 3),  # of the samples that have one
        "reward_error": pytest.approx(statistics.stdev((1 / 2, 1 / 4, 2 / 3)) / math.sqrt(3)),
        "greedy_reward": pytest.approx(2 / 3),
        "num_prompts": 3,
        "num_samples": 4,
        "mean_tokens": pytest.approx(17 / 12),
        "cut_fraction": pytest.approx(1 / 12),
        "num_failed_rewards": 1,
    }


def test_without_a_threshold_there_is_a_mean_reward_and_no_accuracy(tmp_path):
    bare = benchmark(success_threshold=None, count_votes=None)
    got = run_benchmark(bare, lambda: Texts(TEXTS), tmp_path / "sums.json", {}, silent)
    assert got["reward"] == pytest.approx((1 / 2 + 1 / 4 + 2 / 3) / 3) and got["greedy_reward"] == 2 / 3
    assert not [key for key in got if key.startswith(("pass@", "majority")) or key == "greedy"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([{"set": "sums", **got}]))
    heading, row = console.export_text().splitlines()
    assert " ".join(heading.split()) == "benchmark samples reward greedy reward tokens cut"
    assert " ".join(row.split()) == "sums 3 x 4 0.472 0.667 1 8.3"


def test_a_broken_evaluation_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr("qerl.eval.benchmark._SAMPLES_PER_BATCH", 4)
    whole, path = tmp_path / "whole.json", tmp_path / "broken.json"
    settings = settings_of(benchmark(), {})
    run_benchmark(benchmark(), lambda: Texts(TEXTS), whole, settings, silent)

    def stop_after_two(name):
        if "problems 3 to 3 of 3" in name:
            raise KeyboardInterrupt
        return silent(name)

    with pytest.raises(KeyboardInterrupt):
        run_benchmark(benchmark(), lambda: Texts(TEXTS), path, settings, stop_after_two)
    assert len(read_results(path)) == 2 and json.loads(path.read_text())["summary"] is None
    engine = Texts(TEXTS)
    run_benchmark(benchmark(), lambda: engine, path, settings, silent)
    assert engine.asked == [(2, 4), (2, 1)]
    assert path.read_bytes() == whole.read_bytes()


def test_a_damaged_file_of_results_is_begun_anew(tmp_path):
    path = tmp_path / "sums.json"
    path.write_text('{"problems": [{"index"')
    run_benchmark(benchmark(), lambda: Texts(TEXTS), path, {}, silent)
    assert len(read_results(path)) == 3


def test_another_problem_or_answer_is_another_file(tmp_path):
    paths = {result_path(tmp_path, settings_of(benchmark(), {}))}
    for changed in ({"text": "problem 9"}, {"columns": {"answer": "9"}}):
        prompts = [dataclasses.replace(problems()[0], **changed), *problems()[1:]]
        paths.add(result_path(tmp_path, settings_of(benchmark(prompts=prompts), {})))
    paths.add(result_path(tmp_path, settings_of(benchmark(num_samples=3), {})))
    paths.add(result_path(tmp_path, settings_of(benchmark(), {"model": "other"})))
    assert len(paths) == 5 and all(path.name.startswith("sums-") for path in paths)


def test_the_table_has_a_row_a_set_and_a_dash_for_what_means_nothing(tmp_path):
    results = [
        {"set": "sums", **run_benchmark(benchmark(), lambda: Texts(TEXTS), tmp_path / "a.json", {}, silent)},
        {
            "set": "bare",
            **run_benchmark(
                benchmark(count_votes=None), lambda: Texts(TEXTS), tmp_path / "b.json", {}, silent
            ),
        },
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(results))
    heading, sums, bare = console.export_text().splitlines()
    assert heading.split() == [
        "benchmark",
        "samples",
        "pass@1",
        "@2",
        "@4",
        "majority",
        "greedy",
        "tokens",
        "cut",
    ]
    assert " ".join(sums.split()) == "sums 3 x 4 41.7 +- 8.3 72.2 100.0 66.7 66.7 1 8.3"
    assert bare.split()[9] == "-"


def test_votes_for_equal_answers_are_for_the_first_of_them():
    texts = ["It is 0.5.", r"\boxed{\frac12}", "3", "", "1/2"]
    assert votes("math", texts) == ["0.5", "0.5", "3", None, "0.5"]
    assert votes("exact", ["a", " a ", "b", ""]) == ["a", "a", "b", None]
    assert votes("numeric", ["1,000", "so 1000.0", "none"]) == ["1000", "1000", None]


def test_votes_are_counted_in_processes(monkeypatch):
    monkeypatch.setattr(majority_vote, "WorkerPool", WorkerPool)  # conftest.py's counts in this process
    with VotePool(num_workers=1) as counted:
        assert counted.count("numeric", [["7", "7.0"], ["x", "2"]]) == [["7", "7"], [None, "2"]]
