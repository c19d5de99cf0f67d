"""Chat templates that do not end or take all memory, and the process that renders them."""

import gc
import os
import signal
import stat
import threading
import time

import pytest

import tiny_run
from material import CHATML, tokenizer
from processes import has_ended, is_running
from qerl.errors import UserError
from qerl.tasks import template_process
from qerl.tasks.rows.prompt import render_chat
from qerl.tasks.worker_process import OWN_ENDS, fork_process

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
DOUBLING = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
)
NESTED = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
NO_END, NO_ROOM = "takes more than 0.3 s of CPU time", "takes more than 0.1 GB of memory"


def refusal(made):
    with pytest.raises(UserError, match="the tokenizer's chat template rejects messages of user") as refused:
        render_chat(made, MESSAGES)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    return str(refused.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED, NO_END),
        (DOUBLING[0], NO_END),
        ("{{ 7 ** (7 ** 12) }}", NO_END),
        (DOUBLING[1], NO_ROOM),
        ("{{ 'a' * 10**10 }}", NO_ROOM),
        ("{{ 'a' * (10**7 + 1) }}", "its text has 10,000,001 characters, the limit is 10,000,000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
    ],
)
def test_a_template_that_does_not_end_is_refused_and_the_next_one_is_rendered(monkeypatch, template, said):
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.3 if said == NO_END else 60.0)
    monkeypatch.setattr(template_process, "MAX_MEMORY_BYTES", 100_000_000)
    made = tokenizer(template)
    assert said in refusal(made)
    made.chat_template = "{{ messages[0].content }}"
    assert render_chat(made, MESSAGES)[0] == MESSAGES[0]["content"]


def test_the_limit_holds_in_any_thread_and_an_honest_rendering_beside_it_goes_on(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.3)
    told, hostile, honest = [], tokenizer(NESTED), tokenizer()
    thread = threading.Thread(target=lambda: told.append(refusal(hostile)))
    thread.start()
    while thread.is_alive():
        assert "2 + 2" in render_chat(honest, MESSAGES)[0]
    assert told and NO_END in told[0]


def test_all_renderings_of_a_tokenizer_share_one_process_which_ends_with_it():
    made = tokenizer(CHATML + "{% if messages[1] %}{{ raise_exception('one alone') }}{% endif %}")
    texts = {render_chat(made, MESSAGES)[0]}
    pid = child_of(made)
    with pytest.raises(UserError, match="rejects messages of user, user: one alone"):
        render_chat(made, MESSAGES * 2)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)  # what a terminal or a scheduler sends to all; the parent decides
    texts.add(render_chat(made, MESSAGES)[0])
    assert len(texts) == 1 and child_of(made) == pid
    del made
    gc.collect()
    assert not is_running(pid)


def test_a_child_that_was_killed_is_replaced():
    made = tokenizer()
    text = render_chat(made, MESSAGES)
    os.kill(child_of(made), signal.SIGKILL)
    os.waitid(os.P_PID, child_of(made), os.WEXITED | os.WNOWAIT)
    assert render_chat(made, MESSAGES) == text


def test_a_fork_renders_in_a_child_of_its_own_and_leaves_that_of_the_other(tmp_path):
    made = tokenizer()
    render_chat(made, MESSAGES)
    pid = child_of(made)

    def work():
        render_chat(made, MESSAGES)
        print(child_of(made))

    process = tiny_run.Forked(work)
    stdout, stderr = process.communicate(60)
    assert process.returncode == 0, stderr
    assert int(stdout) != pid and has_ended(int(stdout))
    assert "2 + 2" in render_chat(made, MESSAGES)[0] and child_of(made) == pid


def test_a_fork_cannot_write_to_the_child():
    """A job that writes to every socket it finds must not end it: the run would leave a row out."""
    made = tokenizer()
    text = render_chat(made, MESSAGES)
    ends = [end.fileno() for end in OWN_ENDS if not getattr(end, "closed", False)]
    sockets = list(filter(is_socket, ends))
    assert sockets
    process = fork_process(lambda: os._exit(any(map(is_socket, sockets))))
    assert os.waitpid(process.pid, 0)[1] == 0
    assert render_chat(made, MESSAGES) == text


def is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_the_child_of_a_killed_process_ends(tmp_path):
    def work():
        made = tokenizer()
        render_chat(made, MESSAGES)
        print(child_of(made), flush=True)
        time.sleep(600)

    process = tiny_run.Forked(work)
    end = time.monotonic() + 60
    while not process.written.endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert has_ended(int(process.written))


def test_a_rendering_is_that_of_transformers():
    template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{{ tools | tojson }}"
        "{% if add_generation_prompt %}<|assistant|>{{ mood }}{% endif %}"
    )
    made = tokenizer(template)
    tools = [{"type": "function", "function": {"name": "f\ud800"}}]
    answered = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    for messages, how in (
        (MESSAGES, {"add_generation_prompt": True}),
        (answered, {"continue_final_message": True}),
    ):
        variables = {"tools": tools, "mood": None}
        expected = made.apply_chat_template(messages, tokenize=False, **how, **variables)
        continues = "continue_final_message" in how
        found = template_process.render_template(
            made, messages, continues_last=continues, variables=variables
        )
        assert found == expected


def child_of(made) -> int:
    """The process id of the child that renders for the tokenizer."""
    child = template_process._PROCESSES[made]._child
    assert child is not None
    return child[0].pid
