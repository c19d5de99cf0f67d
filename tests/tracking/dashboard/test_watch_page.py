"""The page in a real browser: it updates itself, and no text of a run becomes markup."""

import pytest

from qerl.tracking.report import write_report
from qerl.types import Group, Prompt, Sample
from stored_samples import checked_line
from tracking.dashboard import browser
from tracking.dashboard.parts import run_of, serving, take_step

pytestmark = pytest.mark.skipif(browser.PATH is None, reason="no Chromium (apt-get install chromium)")
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{title}}<!--\u2028\ud800"
POINTS = "document.querySelector('[data-part=charts] .curve').getAttribute('d').split(' ').length"
VALUES = "document.querySelector('.values')?.textContent"
NOW = "document.querySelector('#now').textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def watched(tab, tmp_path):
    """(journal, tab): one step is taken and shown."""
    with run_of(tmp_path / "run") as journal:
        take_step(journal, 0)
        with serving(tmp_path / "run") as address:
            tab.errors.clear()
            tab.open(address)
            tab.until(f"{NOW}.includes('step 1 of 10')")
            yield journal, tab
            tab.open("about:blank")


def test_steps_appear_without_a_reload_and_a_half_line_disturbs_nothing(watched, tmp_path):
    journal, tab = watched
    tab.value("window.isTheSame = true")
    take_step(journal, 1)
    assert tab.until(f"{NOW}.includes('step 2 of 10') && {POINTS}") == 2
    line = checked_line('{"step": 2, "reward": 0.75, "step_s": 1}')
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(line[:17])
        file.flush()
        journal.notice("now there is half a line")
        tab.until("document.querySelector('.notices').textContent.includes('half a line')")
        assert tab.value(POINTS) == 2 and "damaged" not in tab.value("document.body.textContent")
        file.write(line[17:])
    assert tab.until(f"{NOW}.includes('step 3 of 10') && {POINTS}") == 3
    assert "3 of 10" in tab.value("document.querySelector('[data-part=tiles]').textContent")
    journal.finish({"accuracy_after": 0.875})
    tab.until(f"{NOW}.startsWith('complete')")
    tab.until("document.querySelector('[data-part=results]').textContent.includes('0.875')")
    assert tab.value("window.isTheSame") and not tab.errors


def test_where_all_rewards_are_the_same_those_above_0_are_good(watched):
    _, tab = watched  # its one sample has the reward 1
    assert tab.until("minReward === 1 && maxReward === 1")
    shares = [tab.value(f"minReward = maxReward = {reward}, rewardColor({reward})") for reward in (1, 0, -1)]
    assert ["--good) 100%" in shares[0], *("--good) 0%" in share for share in shares[1:])] == [True] * 3


def test_the_newest_samples_are_followed_and_those_of_a_chosen_step_stay(watched):
    journal, tab = watched
    shown = "document.querySelector('#group').textContent"
    assert tab.until(f"{shown}.includes('What is 0?')")
    take_step(journal, 1)
    assert tab.until(f"{shown}.includes('What is 1?')")
    tab.value("document.querySelector('#previous').click(), document.querySelector('#previous').click()")
    assert tab.until(f"{shown}.includes('What is 0?')")
    take_step(journal, 2)
    tab.until(f"{NOW}.includes('step 3 of 10')")
    assert "What is 0?" in tab.value(shown)
    assert tab.value("[...document.querySelectorAll('#step option')].map((o) => o.text)") == [
        "1",
        "2",
        "3",
        "newest",
    ]
    tab.value("document.querySelector('#text').value = 'zzz'; listGroups()")
    assert tab.value("document.querySelector('#count').textContent") == "0 prompts, 0 samples"
    assert not tab.errors


def test_a_prompt_of_a_live_run_is_shown_in_all_steps_and_stays_while_steps_come(watched):
    journal, tab = watched
    take_step(journal, 1, text="four")
    tab.until("document.querySelector('#group').textContent.includes('What is 1?')")
    tab.value("document.querySelector('.about button').click()")
    heads = "[...document.querySelectorAll('#group > .role')].map((head) => head.textContent).join()"
    assert tab.until(heads) == "step 1, reward 1,step 2, reward 1"
    take_step(journal, 2)
    tab.until(f"{NOW}.includes('step 3 of 10')")
    assert tab.value(heads) == "step 1, reward 1,step 2, reward 1" and not tab.errors


def test_held_out_answers_of_a_live_run_are_loaded_when_asked_for(watched):
    journal, tab = watched
    prompt = Prompt(index=3, text="What is 1 + 1?", tokens_T=[5], messages=None, columns={"answer": "2"})
    sample = Sample(tokens_T=[7], logprobs_T=[-1.0], text="two", finish="stop", version=0)
    journal.held_out(0, {"greedy": ([Group(prompt=prompt, samples_G=[sample])], [[1.0]])})
    take_step(journal, 1)
    tab.until("!document.querySelector('#kind').parentElement.hidden")
    tab.value(
        "document.querySelector('#kind').value = 'held',"
        " document.querySelector('#kind').dispatchEvent(new Event('change'))"
    )
    shown = "document.querySelector('#group').textContent"
    assert tab.until(f"{shown}.includes('before training') && {shown}.includes('two')")
    take_step(journal, 2)
    tab.until(f"{NOW}.includes('step 3 of 10')")
    assert tab.value(f"{shown}.includes('two')") and not tab.errors


def test_old_lines_of_progress_are_folded_away_and_stay_open_once_opened(watched):
    journal, tab = watched
    for i in range(60):
        journal.notice(f"line {i} of progress")
    notices = "document.querySelector('.notices')"
    tab.until(f"{notices}.textContent.includes('line 59')")
    first = tab.value(f"{notices}.querySelector('li').textContent")
    assert first.endswith("line 59 of progress") and tab.value(f"{notices}.children.length") == 2
    assert tab.value(f"{notices}.querySelector('summary').textContent") == "49 earlier lines"
    assert tab.value(f"{notices}.querySelector('details').open") is False
    tab.value(f"{notices}.querySelector('summary').click()")
    journal.notice("one more")
    tab.until(f"{notices}.querySelector('li').textContent.endsWith('one more')")
    assert tab.value(f"{notices}.querySelector('details').open") is True


def test_nothing_that_a_run_says_becomes_markup(watched):
    journal, tab = watched
    take_step(journal, 1, text=HOSTILE, **{HOSTILE: 1.0})
    journal.notice(HOSTILE)
    tab.until("document.querySelector('#group pre').textContent.includes('onerror')")
    tab.until("document.querySelector('.notices').textContent.includes('onerror')")
    assert HOSTILE.replace("\ud800", "") in tab.value(
        "document.querySelector('.cards pre').textContent"
    ).replace("\ufffd", "")
    assert "onerror" in tab.value("document.querySelector('[data-part=others]').textContent")
    assert tab.value("document.querySelectorAll('img, iframe, object').length") == 0
    assert tab.value("document.querySelectorAll('script').length") == 2 and not tab.errors


def test_a_run_that_is_switched_off_stays_off_and_the_pointer_stays_on_its_step(watched):
    journal, tab = watched
    take_step(journal, 1)
    tab.until(f"{NOW}.includes('step 2 of 10')")
    x, y = tab.value(
        "(() => { const b = document.querySelector('[data-part=charts] svg').getBoundingClientRect();"
        " return [b.left + b.width * 0.9, b.top + b.height / 2]; })()"
    )
    tab.point_at(x, y)
    text = tab.until(VALUES)
    assert text.startswith("step 2") and text.endswith("0.25")
    take_step(journal, 2)
    assert tab.until(f"{VALUES}.startsWith('step 3') && {VALUES}").endswith("0.5")
    tab.value("document.querySelector('[data-toggle]').click()")
    take_step(journal, 3)
    tab.until(f"{NOW}.includes('step 4 of 10')")
    tab.until(f"{POINTS} === 4")
    assert tab.value("document.querySelector('[data-part=charts] g.run').classList.contains('off')")


def test_gpus_are_shown_where_there_are_any(watched, tmp_path, monkeypatch):
    _, tab = watched
    assert tab.value("document.querySelector('#gpus').hidden")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, NVIDIA H200, 97, 71500, 143771, 612.34, 61'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with serving(tmp_path / "run") as address:
        tab.open(address)
        text = tab.until(
            "!document.querySelector('#gpus').hidden && document.querySelector('#gpus').textContent"
        )
    for part in ("GPU 0, NVIDIA H200", "612 W, 61", "97 %", "75.0 of 151 GB"):
        assert part in text


def test_a_written_report_is_the_same_page_without_a_server(tab, tmp_path):
    with run_of(tmp_path / "run") as journal:
        for step in range(3):
            take_step(journal, step)
    write_report([tmp_path / "run"], tmp_path / "page.html")
    tab.errors.clear()
    tab.open((tmp_path / "page.html").as_uri())
    shown = "document.querySelector('#group').textContent"
    assert "What is 2?" in tab.value(shown) and tab.value(POINTS) == 3
    tab.value("document.querySelector('#previous').click()")
    assert "What is 1?" in tab.value(shown)
    assert tab.value("document.querySelector('#step').options[0].text") == "all"
    assert tab.value("document.querySelector('#now')") is None and not tab.errors


def test_a_lost_server_is_reported_and_found_again(tab, tmp_path):
    with run_of(tmp_path / "run") as journal:
        with serving(tmp_path / "run") as address:
            tab.open(address)
            tab.until(f"{NOW}.includes('step 0 of 10')")
        tab.until(f"{NOW}.includes('does not answer')")
        take_step(journal, 0)
        with serving(tmp_path / "run", port=int(address.rpartition(":")[2])):
            tab.until(f"{NOW}.includes('step 1 of 10')")
            tab.open("about:blank")
