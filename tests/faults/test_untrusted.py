"""Input from others: code that is never run, templates that are boxed in, files that may hold anything.

The loaders of models are fuzzed in tests/models/test_fuzz.py; here are rows, a run's own files and adapters.
`python tests/faults/test_untrusted.py 20000` tries so many inputs of each kind.
"""

import ast
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_run
from faults import runs
from material import tokenizer
from qerl.cli import main
from qerl.config import AdapterConfig, TaskConfig
from qerl.config.stored import read_config_file
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.peft.peft_reader import adapter_config, read_adapter
from qerl.tasks import Task
from qerl.tasks.rows.prompt import render_chat
from qerl.tracking.atomic_file import read_object
from qerl.tracking.json_lines import JsonLines, decode
from qerl.tracking.report.read import read_run
from stored_samples import checked_line

EXAMPLES = int(sys.argv[1]) if __name__ == "__main__" else 60
quick = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SRC = Path(main.__file__).parents[1]
TOKENIZER = tokenizer()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "x"]), JSON | st.sampled_from(["user", "assistant"]), max_size=3
    )
    | JSON,
    max_size=3,
)
ROWS = st.dictionaries(
    st.sampled_from(["prompt", "answer", "question", "messages"]), JSON | MESSAGES | st.text(), max_size=4
)


def one_line(work):
    """Return the work's result, or None if it refused in one line of a readable length."""
    try:
        return work()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, error
        return None


def folder():
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def tasked(name: str, content: bytes) -> None:
    with folder() as place:
        path = Path(place) / name
        path.write_bytes(content)
        config = TaskConfig(name=str(path), template="{question}", num_held_out=1)

        def work():
            task = Task(config, TOKENIZER, seed=0, max_prompt_tokens=64)
            return task.train_prompts(0, 1)

        one_line(work)


@quick
@given(st.lists(ROWS | JSON, max_size=4))
def test_any_rows_of_json_are_prompts_or_a_user_error(rows):
    tasked("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    tasked("rows.json", json.dumps(rows).encode())


@quick
@given(st.binary(max_size=200), st.sampled_from(["jsonl", "json", "csv", "parquet"]))
def test_any_bytes_in_place_of_rows_are_a_user_error(content, suffix):
    tasked(f"rows.{suffix}", content)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_that_nest_too_deeply_are_refused(suffix):
    tasked(f"rows.{suffix}", b"[" * 200_000)


CONFIGS = st.dictionaries(
    st.sampled_from(["model", "task", "seed", "num_steps", "noise", "learn", "x"]), JSON | ROWS, max_size=4
)


@quick
@given(st.dictionaries(st.just("config"), CONFIGS | JSON, max_size=1) | JSON, st.binary(max_size=20))
def test_any_run_json_is_a_config_or_a_user_error(facts, tail):
    with folder() as place:
        path = Path(place) / "run.json"
        for content in (json.dumps(facts).encode(), json.dumps(facts).encode() + tail):
            path.write_bytes(content)
            one_line(lambda: read_config_file(path))
            one_line(lambda: read_object(path))


RECORD = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())
LINE = RECORD | ROWS.map(lambda row: checked_line(json.dumps({"step": 0, **row}))[:-1])


@quick
@given(st.lists(LINE, max_size=4), st.lists(RECORD, min_size=3, max_size=3))
def test_a_report_takes_any_bytes_in_a_runs_files(lines, objects):
    with folder() as place:
        for name in ("metrics", "samples", "held_out"):
            (Path(place) / f"{name}.jsonl").write_bytes(b"\n".join(lines))
        for name, content in zip(("run", "result", "evaluations"), objects, strict=True):
            (Path(place) / f"{name}.json").write_bytes(content)
        one_line(lambda: read_run(Path(place), "x", max_samples=3))
        kept = JsonLines(Path(place) / "metrics.jsonl")
        one_line(lambda: kept.cut(1))
        kept.close()


@quick
@given(JSON | st.dictionaries(st.sampled_from(["r", "peft_type", "lora_alpha", "target_modules"]), JSON))
def test_any_adapter_config_is_an_adapter_or_a_user_error(config):
    with folder() as place:
        (Path(place) / "adapter_config.json").write_text(json.dumps(config))
        (Path(place) / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        one_line(lambda: read_adapter(place, AdapterConfig()))
        one_line(lambda: adapter_config(place))


def test_a_line_that_nests_too_deeply_is_a_damaged_line():
    assert decode(b"[" * 200_000) is decode(checked_line('{"a": ' + "[" * 200_000)) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages['x'].y.z }}",
        "{% set x = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_reaches_nothing_and_its_errors_are_one_line(template):
    made = tokenizer(template)
    assert one_line(lambda: render_chat(made, [{"role": "user", "content": "x"}])) in (None, ("", []))


# The sandbox's processes run a sample's code and its test; ranks and workers are the run's own.
OWN_PROCESSES = (
    "child.py",
    "test_process.py",
    "test_items.py",
    "distributed.py",
    "worker_process.py",
    "ray_worker.py",
)


def test_no_line_of_the_source_trusts_remote_code_nor_unpickles():
    """Every from_pretrained says trust_remote_code=False; nothing from outside is unpickled or evaluated."""
    asked = 0
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = ast.unparse(node.func)
            keywords = {k.arg: k.value for k in node.keywords}
            if name == "from_pretrained":
                asked += 1
                assert ast.unparse(keywords["trust_remote_code"]) == "False", path
            elif "trust_remote_code" in keywords:
                assert ast.unparse(keywords["trust_remote_code"]) == "False", path
            if path.name not in OWN_PROCESSES:
                assert owner not in ("torch.load", "pickle.load", "pickle.loads", "eval", "exec"), path
            assert name not in ("extractall", "unpack_archive"), path
    assert asked


EVIL = "from pathlib import Path\nPath({mark!r}).touch()\n"


def test_code_that_comes_with_a_model_or_a_data_set_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    mark = tmp_path / "was-run"
    model = tiny_run.write_files(tmp_path)
    for name in ("evil.py", "tokenization_evil.py", "modeling_evil.py", "setup.py"):
        (model / name).write_text(EVIL.format(mark=str(mark)))
    for name, names in (
        ("config.json", {"AutoConfig": "evil.C", "AutoModelForCausalLM": "modeling_evil.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.T", None]}),
    ):
        config = json.loads((model / name).read_text()) | {"auto_map": names}
        if name == "tokenizer_config.json":
            config["tokenizer_class"] = "T"
        (model / name).write_text(json.dumps(config))
    one_line(lambda: load_tokenizer(str(locate(str(model)).path)))
    run = runs.start(model, tmp_path / "run", "--num-steps", "1", "--noise.num-stages", "1")
    assert run.wait() in (0, 2) and "Traceback" not in run.said, run.said

    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(model / "sums.jsonl", data / "train.jsonl")
    (data / "data.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    config = TaskConfig(name=str(data), template="{question}", prompt_column="prompt", num_held_out=1)
    one_line(lambda: Task(config, TOKENIZER, seed=0, max_prompt_tokens=64))
    assert not mark.exists()


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and hasattr(test, "hypothesis"):
            test()
            print(name, EXAMPLES, flush=True)
