"""A run's folder that others wrote: numbers beyond all sizes, names of no kind, files that are none."""

import json
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qerl.config.stored import read_run_config
from qerl.errors import UserError
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.dashboard.live import LivePage
from qerl.tracking.dashboard.server import listening
from qerl.tracking.json_lines import decode
from qerl.tracking.report import page
from qerl.tracking.report.page import write_report
from stored_samples import checked_line

HUGE = 10**400
STEP = {"reward": 0.5, "accuracy": 0.5, "sigma": 0.0, "step_s": 1.0, "wall_time": 1e9}


def write(folder: Path, name: str, *records: object) -> None:
    texts = [json.dumps(record) for record in records]
    lines = map(checked_line, texts) if name.endswith(".jsonl") else (text.encode() for text in texts)
    (folder / name).write_bytes(b"".join(lines))


def run_of(folder: Path, *metrics: dict[str, object], num_steps: object = 3) -> Path:
    write(folder, "metrics.jsonl", *metrics)
    write(folder, "run.json", {"config": {"num_steps": num_steps, "seed": HUGE}, "commit": HUGE})
    write(
        folder,
        "evaluations.json",
        {f"after_{'9' * 5000}_steps": {"accuracy": HUGE}, "after": {"reward": HUGE}},
    )
    write(
        folder, "events.jsonl", *({"text": "x", "wall_time": at} for at in (1e300, -1e300, HUGE, 1e18, None))
    )
    write(
        folder,
        "samples.jsonl",
        *(
            {"step": step, "reward": HUGE, "num_tokens": -HUGE, "prompt_index": HUGE}
            for step in (0, HUGE, -1, True)
        ),
    )
    return folder


def shown(folder: Path) -> str:
    """The report, after every page of the dashboard has been made as well."""
    follower = RunFollower(folder, "run")
    live = LivePage([follower])
    assert live.page() and live.now() and live.update() and live.samples(f"run=0&step={HUGE}") is None
    write_report([folder], folder / "report.html")
    text = (folder / "report.html").read_text()
    assert not [svg for svg in re.findall("<svg.*?</svg>", text) if re.search(r"\b(nan|inf)\b", svg)]
    return text


@pytest.mark.parametrize(
    "attack",
    [
        {"reward": HUGE, "step_s": HUGE, "tokens_per_s": -HUGE, "memory_gb": HUGE},
        {"reward": 1.7e308, "step_s": 1.7e308, "sampled_tokens": 1.7e308, "rollout_s": 1e308},
        {"reward": -1.7e308, "entropy": 5e-324, "memory_gb": 1e308, "eval_reward_error": 1e200},
        {"wall_time": 1e300, "step_s": -1e99},
        {"wall_time": -1e300, "reward": 1e-323, "grad_norm": 1e-310},
        {
            "pass_at_\u00b2": 0.5,
            "pass_at_007": 0.5,
            f"pass_at_{'9' * 5000}": 1.0,
            "pass_at_": 1,
            "pass_at_-4": 1,
        },
        {"\ud800": 1.0, "</script>": 2.0, "": 3.0, "\x00": 4.0, "a" * 10_000: 5.0},
    ],
)
def test_no_metric_of_a_step_breaks_the_report_or_the_dashboard(tmp_path, attack):
    steps = [{"step": step, **STEP, **(attack if step else {})} for step in range(3)]
    assert "Reward" in shown(run_of(tmp_path, *steps))


@pytest.mark.parametrize("step", [HUGE, -1, 10**15, True, 1.0, None])
def test_a_line_whose_step_is_no_count_is_damaged(tmp_path, step):
    text = shown(run_of(tmp_path, {"step": 0, **STEP}, {**STEP, "step": step}))
    assert "metrics.jsonl: skipped 1 damaged line" in text and "<small>of 3</small>" in text


@pytest.mark.parametrize("num_steps", [HUGE, -3, 1e300, "x" * 100, [[1]]])
def test_any_number_of_planned_steps_is_shown(tmp_path, num_steps):
    shown(run_of(tmp_path, {"step": 0, **STEP}, num_steps=num_steps))


NUMBERS = st.integers(-HUGE, HUGE) | st.floats() | st.none() | st.booleans() | st.text(max_size=3)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["reward", "accuracy", "sigma", "step_s", "wall_time", "learn_s", "eval_reward"]),
            NUMBERS,
        ),
        min_size=1,
        max_size=4,
    )
)
@example(steps=[{"step_s": -1, "learn_s": -1.0}])
def test_any_numbers_are_drawn_or_left_out(tmp_path_factory, steps):
    shown(run_of(tmp_path_factory.mktemp("run"), *({"step": i, **step} for i, step in enumerate(steps))))


@pytest.mark.parametrize("kind", ["folder", "fifo", "endless"])
@pytest.mark.parametrize("name", ["run.json", "evaluations.json", "result.json"])
def test_a_folder_a_fifo_or_a_device_in_place_of_a_file_is_a_notice(tmp_path, name, kind):
    run_of(tmp_path, {"step": 0, **STEP})
    replace(tmp_path / name, kind)
    assert f"{name}: skipped, the file is damaged" in shown(tmp_path)
    if name == "run.json":
        with pytest.raises(UserError, match=r"run\.json: cannot be read: not a regular file$"):
            read_run_config(str(tmp_path))


@pytest.mark.parametrize("kind", ["folder", "fifo", "endless"])
def test_a_folder_a_fifo_or_a_device_in_place_of_held_out_answers_is_one_line(tmp_path, kind):
    run_of(tmp_path, {"step": 0, **STEP})
    replace(tmp_path / "held_out.jsonl", kind)
    with pytest.raises(UserError, match=r"held_out\.jsonl: cannot be read: not a regular file$"):
        write_report([tmp_path], tmp_path / "report.html")


@pytest.mark.parametrize("kind", ["folder", "fifo", "endless"])
def test_a_folder_a_fifo_or_a_device_in_place_of_samples_is_one_line(tmp_path, kind):
    run_of(tmp_path, {"step": 0, **STEP})
    live = LivePage([RunFollower(tmp_path, "run")])
    replace(tmp_path / "samples.jsonl", kind)
    with pytest.raises(UserError, match=r"samples\.jsonl: cannot be read: not a regular file$"):
        write_report([tmp_path], tmp_path / "report.html")
    with listening(0, live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/now")
        server.shutdown()
    assert refused.value.code == 503
    assert refused.value.read() == b"the run cannot be read: not a regular file\n"
    with pytest.raises(UserError, match=r"samples\.jsonl: cannot be read: not a regular file$"):
        RunFollower(tmp_path, "run")


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "endless": lambda: path.symlink_to("/dev/zero")}[
        kind
    ]()


def test_a_run_json_of_gigabytes_is_refused_unread(tmp_path):
    run_of(tmp_path, {"step": 0, **STEP})
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(1 << 40)  # no block of it is on the disk
    assert "run.json: skipped" in shown(tmp_path)
    with pytest.raises(UserError, match=r"it has 1,099,511,627,776 bytes, the limit is 10,000,000$"):
        read_run_config(str(tmp_path))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_nests_deeply_is_damaged_though_it_can_be_parsed(tmp_path, opening):
    closing = "]" if opening == "[" else "}"
    deep = opening * 300 + "1" + closing * 300
    assert decode(checked_line(f'{{"step": 0, "x": {deep}}}')) is None
    assert decode(checked_line(f'{{"step": 0, "x": [{", ".join(["[1]"] * 300)}]}}')) is not None
    run_of(tmp_path, {"step": 0, **STEP})
    (tmp_path / "run.json").write_text(f'{{"config": {deep}}}')
    assert "run.json: skipped" in shown(tmp_path)
    with pytest.raises(UserError, match="nests deeper than 100"):
        read_run_config(str(tmp_path))


def test_the_page_names_no_measure_that_is_none(tmp_path):
    run_of(tmp_path, {"step": 0, **STEP, "pass_at_\u00b2": 0.5, "pass_at_4": 0.5, "pass_at_2": 0.4})
    text = shown(tmp_path)
    assert "Pass@2" in text and "Pass@4" in text and "Pass@\u00b2" not in text
    assert page.asset("page.js") in text
