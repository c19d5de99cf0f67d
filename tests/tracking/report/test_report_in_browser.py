"""The report in a real browser: its controls move what curve.py drew, without an error."""

import itertools
import json

import pytest

from qerl.tracking.report import write_report
from stored_samples import checked_line
from tracking.dashboard import browser

pytestmark = pytest.mark.skipif(browser.PATH is None, reason="no Chromium (apt-get install chromium)")
NUM_STEPS = 120
FIRST = "document.querySelector('[data-part=charts] svg')"
CURVE = f"{FIRST}.querySelector('.curve:not(.raw, .off)').getAttribute('d')"
PROMPT = (
    "<|im_start|>system\nBe <b>brief</b>.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
AXIS = "document.querySelector('[name=axis][value=\"{}\"]').click()"
DRAWN = """[...document.querySelectorAll('[data-part] svg')].map((svg) => [...svg.querySelectorAll(
  'path, circle, polygon, .break text, .x text')].map((s) => ['d', 'cx', 'points', 'class', 'x'].map((a) =>
  (s.getAttribute(a) ?? '').replace(/\\d+\\.\\d+/g, (n) => Math.round(n))).join(' ') + s.textContent))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def report(tab, tmp_path):
    """A tab with the report of a run whose noise starts after step 40, and whose later steps take longer."""
    steps = [
        {
            "step": i,
            "reward": float(i >= 40),
            "accuracy": float(i >= 40),
            "sigma": 0.01 * (i >= 40),
            "step_s": 60.0 if i < 60 else 180.0,
            "learn_s": 30.0,
            "sampled_tokens": 1000.0,
        }
        for i in range(NUM_STEPS)
    ]
    steps[59] |= {"eval_accuracy": 0.5}
    evaluations = {"before": {"accuracy": 0.0, "greedy": 0.25}, "after": {"accuracy": 1.0, "greedy": 1.0}}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(b"".join(checked_line(json.dumps(step)) for step in steps))
    (folder / "evaluations.json").write_text(json.dumps(evaluations))
    (folder / "run.json").write_text(json.dumps({"config": {"evaluate": {"num_prompts": 64}}}))
    sample = {"step": 3, "prompt_index": 0, "prompt": PROMPT, "text": "3", "reward": 1.0, "answer": "3"}
    (folder / "samples.jsonl").write_bytes(checked_line(json.dumps(sample)))
    write_report([folder], tmp_path / "page.html")
    tab.errors.clear()
    tab.open((tmp_path / "page.html").as_uri())
    yield tab
    assert not tab.errors


def choose(tab, selector, value):
    tab.value(
        f"(() => {{ const input = document.querySelector('{selector}'); input.value = '{value}';"
        " input.dispatchEvent(new Event('input')); })()"
    )


def points(tab):
    """[(x, y)] of each line of the first chart's curve."""
    lines = [line.split() for line in tab.value(CURVE).split("M")[1:]]
    return [[tuple(map(float, pair.split(","))) for pair in line] for line in lines]


def test_the_script_restores_what_the_page_came_with(report):
    before = report.value(DRAWN)
    assert sum(map(len, before)) > 50
    choose(report, "#smoothing", 0)
    report.value(AXIS.format(1))
    assert report.value(DRAWN) != before
    choose(report, "#smoothing", 2)
    report.value(AXIS.format(0))
    assert report.value(DRAWN) == before


def test_the_axis_is_steps_minutes_or_tokens(report):
    def place():
        return points(report)[1][19][0]  # step 60

    assert place() == pytest.approx(50 + 420 * 60 / 120, abs=0.1)
    report.value(AXIS.format(1))
    assert place() == pytest.approx(50 + 420 * 60 / 240, abs=0.1)
    texts = report.value(f"[...{FIRST}.querySelectorAll('.x text')].map((text) => text.textContent)")
    assert texts == ["0", "50", "100", "150", "200", "min"]
    assert report.value(f"{FIRST}.querySelectorAll('circle')[1].getAttribute('cx')") == str(place())
    report.value(AXIS.format(2))
    assert place() == pytest.approx(50 + 420 * 60 / 120, abs=0.1)
    texts = report.value(f"[...{FIRST}.querySelectorAll('.x text')].map((text) => text.textContent)")
    assert texts[1] == "20K" and texts[-1] == "tokens"


@pytest.mark.parametrize("strength", range(1, 5))
def test_no_smoothing_reaches_across_the_start_of_noise(report, strength):
    choose(report, "#smoothing", strength)
    assert [{y for _, y in line} for line in points(report)] == [{206.0}, {points(report)[1][0][1]}]


def test_smoothing_can_be_off(report):
    choose(report, "#smoothing", 0)
    assert len(points(report)) == 1 and report.value(f"{FIRST}.querySelector('.raw')") is None
    assert report.value("document.querySelector('#strength').textContent") == "off"


def test_the_pointer_on_one_chart_shows_its_step_in_all(report):
    box = report.value(f"{FIRST}.getBoundingClientRect().toJSON()")
    x, y = box["left"] + box["width"] / 2, box["top"] + 90
    report.point_at(x, y)
    step = int(
        report.until("document.querySelector('.values')?.textContent").split(",")[0].removeprefix("step ")
    )
    assert 50 < step < 70
    lines = "[...document.querySelectorAll('[data-part=charts] .pointer')]"
    (place,) = {float(px) for px in report.value(f"{lines}.map((line) => line.getAttribute('x1'))")}
    assert place == pytest.approx(50 + 420 * step / 120)
    texts = report.value("[...document.querySelectorAll('.values')].map((box) => box.textContent)")
    assert len(texts) == 3 and "0.01" in texts[1] and "learn 30" in texts[2]


def test_the_keyboard_moves_the_step_and_escape_hides_it(report):
    report.value("document.querySelector('#at').focus()")
    for key, code in (("ArrowLeft", 37), ("ArrowLeft", 37)):
        for kind in ("keyDown", "keyUp"):
            report.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
    where = "document.querySelector('#where').textContent"
    assert report.until(f"{where}.startsWith('step 118') && {where}") == "step 118, 234 min, 118K tokens"
    assert report.value("document.querySelector('#at').ariaValueText").startswith("step 118")
    for kind in ("keyDown", "keyUp"):
        report.send(
            "Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27
        )
    assert report.until(f"{where} === 'none'") and report.value("document.querySelector('.values')") is None


def test_prompts_are_shown_without_template_tokens_and_raw_on_demand(report):
    shown = report.value("[...document.querySelectorAll('.prompt > *')].map((part) => part.textContent)")
    assert shown == ["system", "Be <b>brief</b>.", "user", "How many?", "as the model reads it" + PROMPT]
    assert report.value("document.querySelector('details.raw').open") is False
    assert report.value("document.querySelector('#groups .line').textContent") == "How many?"


@pytest.mark.parametrize(
    ("prompts", "lines"),
    [
        (["1 + 1 = 2\n3 + 4 =", "1 + 1 = 2\n5 + 6 ="], ["3 + 4 =", "5 + 6 ="]),
        (["How many?\n\nAnswer in tags.", "Why so?\n\nAnswer in tags."], ["How many?", "Why so?"]),
        (
            ["Solve this little problem: 3 x", "Solve this little problem: 4 y"],
            ["\u2026 3 x", "\u2026 4 y"],
        ),
        (["What is 3?", "What is 4?"], ["What is 3?", "What is 4?"]),
        (["One alone\nwith two lines"], ["One alone"]),
        ([""], [""]),
    ],
)
def test_a_prompt_is_listed_by_what_the_others_do_not_have(report, prompts, lines):
    assert report.value(f"[...summaries({json.dumps(prompts)}).values()]") == lines


def test_no_value_of_the_results_is_broken_however_short_the_names_of_runs_are(tab, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(checked_line('{"step": 0, "reward": 1.0}'))
        (tmp_path / name / "result.json").write_text('{"accuracy_after": 0.765625}')
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    tab.open((tmp_path / "page.html").as_uri())
    for width in (420, 1280):
        tab.resize(width, 900)
        rows = "[...document.querySelectorAll('[data-part=results] td')].map((cell) => cell.offsetHeight)"
        heights = tab.value(rows)
        assert len(heights) == 2 and max(heights) < 30
    tab.resize(1280, 900)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>"
            "assistant<|end_header_id|>\n\n",
            [["user", "Hi"]],
        ),
        ("<bos><start_of_turn>user\nHi\nthere<end_of_turn>\n<start_of_turn>model\n", [["user", "Hi\nthere"]]),
        ("<s>[INST] Hi [/INST] Hello</s>[INST] Again [/INST]", [["", "Hi"], ["", "Hello"], ["", "Again"]]),
        (
            "<|system|>\nBrief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n",
            [["system", "Brief."], ["user", "Hi"]],
        ),
        ("<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>", [["user", "Hi"]]),
        (
            "user friendly <b>text</b> with 1 < 2 | 3 > 2",
            [["", "user friendly <b>text</b> with 1 < 2 | 3 > 2"]],
        ),
        ("", []),
    ],
)
def test_the_messages_of_a_prompt_are_found_in_every_family(report, prompt, expected):
    assert report.value(f"messages({json.dumps(prompt)})") == expected


def test_the_page_fits_narrow_and_wide_in_light_and_dark(report):
    for width, is_dark in itertools.product((420, 1280), (False, True)):
        report.resize(width, 900)
        report.dark(is_dark)
        choose(report, "#at", 118)
        assert report.value("document.documentElement.scrollWidth") <= width
    report.resize(1280, 900)
    report.dark(False)


@pytest.fixture
def samples(tab, tmp_path):
    """A tab with the report of four steps: in each prompt 7, with 0 to 3 correct samples, and another one."""
    records = [
        {
            "step": step,
            "prompt_index": prompt,
            "prompt": f"What is {prompt}?",
            "text": f"answer {step}.{i}",
            "reward": float(i < step),
            "num_tokens": 10 * (step + 1) if i else 100,
            "finish": "stop" if i else "length",
        }
        for step in range(4)
        for prompt in (7, 20 + step)
        for i in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(checked_line(f'{{"step": {i}}}') for i in range(4)))
    (tmp_path / "samples.jsonl").write_bytes(b"".join(checked_line(json.dumps(each)) for each in records))
    answers = [
        {"step": step, "prompt_index": i, "kind": kind, "prompt": f"Problem {i}", "text": f"{kind} {step}"}
        | {"reward": float(step * i > 0), "num_tokens": 3}
        for step in (0, 4)
        for kind in ("sampled", "greedy")
        for i in range(2)
    ]
    (tmp_path / "held_out.jsonl").write_bytes(b"".join(checked_line(json.dumps(each)) for each in answers))
    write_report([tmp_path], tmp_path / "page.html")
    tab.errors.clear()
    tab.open((tmp_path / "page.html").as_uri())
    yield tab
    assert not tab.errors


def test_one_prompt_is_shown_across_its_steps_and_a_click_leads_back(samples):
    shown, button = "document.querySelector('#group').textContent", "document.querySelector('.about button')"
    assert samples.value(f"{button}.textContent") == "in all steps"
    samples.value(f"{button}.click()")
    heads = "[...document.querySelectorAll('#group > .role')].map((head) => head.textContent)"
    expected = ["step 1, reward 0", "step 2, reward 0.33", "step 3, reward 0.67", "step 4, reward 1"]
    assert samples.until(f"{heads}.length && {heads}") == expected
    assert [f"answer {step}.2" in samples.value(shown) for step in range(4)] == [True] * 4
    choose(samples, "#text", "answer 2")
    assert samples.value(heads) == ["step 3, reward 0.67"]
    choose(samples, "#text", "")
    samples.value(f"{button}.click()")
    assert "answer 3.0" in samples.value(shown) and "answer 2.0" not in samples.value(shown)
    samples.value("document.querySelectorAll('#groups button')[1].click()")
    assert samples.value(button) is None  # that prompt is in no other step


def test_lengths_are_a_histogram_with_those_that_were_cut_off_on_top(samples):
    caption = "document.querySelector('#lengths figcaption').textContent"
    assert samples.value(caption) == "Lengths of these samples: median 40, longest 100 tokens; 33 % cut off"
    bar = "[bar.getAttribute('class'), +bar.getAttribute('height')]"
    bars = f"[...document.querySelectorAll('#lengths rect')].map((bar) => {bar})"
    assert samples.value(bars) == [["ended", 70.0], ["cut", 35.0]]
    samples.value(
        "document.querySelector('#step').value = '',"
        " document.querySelector('#step').dispatchEvent(new Event('change'))"
    )
    assert [kind for kind, _ in samples.value(bars)] == [*["ended"] * 4, "cut"]
    choose(samples, "#text", "no such text")
    assert samples.value("document.querySelector('#lengths').hidden")


def test_held_out_answers_before_and_after_stand_side_by_side_the_changed_ones_first(samples):
    choose_kind = (
        "document.querySelector('#kind').value = '{}',"
        " document.querySelector('#kind').dispatchEvent(new Event('change'))"
    )
    samples.value(choose_kind.format("held"))
    rows = "[...document.querySelectorAll('#groups button')].map((row) => row.textContent)"
    assert samples.value(rows) == ["Problem 1problem 1, greedy +1", "Problem 0problem 0, greedy 0"]
    card = "[...row.querySelectorAll('header span, pre')].map((part) => part.textContent)"
    cards = f"[...document.querySelectorAll('#group .cards')].map((row) => {card})"
    shown = [
        [f"reward {reward}", when, "3 tokens", f"{kind} {step}"]
        for kind in ("greedy", "sampled")
        for reward, when, step in ((0, "before training", 0), (1, "after step 4", 4))
    ]
    assert samples.value(cards) == [shown[0] + shown[1], shown[2] + shown[3]]
    tops = "[...document.querySelectorAll('#group .cards')[0].children].map((card) => card.offsetTop)"
    assert len(set(samples.value(tops))) == 1  # side by side
    assert samples.value("document.querySelector('#step').parentElement.hidden")
    samples.value(choose_kind.format(""))
    assert samples.value("document.querySelectorAll('#groups button').length") == 2
    assert not samples.value("document.querySelector('#step').parentElement.hidden")


def test_without_held_out_answers_there_is_no_choice_of_them(report):
    assert report.value("document.querySelector('#kind').parentElement.hidden")
