"""Chat in a real terminal, and `qerl generate`."""

import dataclasses
import fcntl
import io
import os
import pty
import select
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

import tiny_run
from qerl.cli import main
from qerl.config import RunConfig, SampleConfig
from qerl.config.options import GenerateOptions
from qerl.errors import UserError
from qerl.serve.chat import Chat
from serve import parts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def test_a_prompt_is_answered_on_stdout_and_stdin_is_a_prompt_too(files, capsys, monkeypatch):
    given = ["--model.dtype", "fp32", "--max-tokens", "30", "--seed", "4"]
    main.command(["generate", str(files), "hello", *given])
    said = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    main.command(["generate", str(files), *given])
    assert capsys.readouterr().out == said and len(said) > 5 and said.endswith("\n")
    main.command(["generate", str(files), "hello", *given[:-1], "5"])
    assert capsys.readouterr().out != said
    main.command(["generate", str(files), "hello", *given, "--system-prompt", "x"])
    assert capsys.readouterr().out != said


def test_a_run_answers_with_what_it_learned(files, tmp_path, capsys):
    run = tmp_path / "run"
    main.command(["train", "demo_long", *tiny_run.options(files, run), "--learn.learning-rate", "1"])
    capsys.readouterr()
    said = []
    for given in ([], ["--no-with-adapter"]):
        main.command(["generate", str(run), "hello", "--seed", "0", "--max-tokens", "30", *given])
        said.append(capsys.readouterr().out)
    main.command(
        ["generate", str(files), "hello", "--model.dtype", "fp32", "--seed", "0", "--max-tokens", "30"]
    )
    assert said[0] != said[1] == capsys.readouterr().out


def test_a_run_on_plain_texts_continues_the_prompt_as_it_was_trained_to(files, tmp_path, capsys):
    run, given = tmp_path / "run", ["--seed", "0", "--max-tokens", "30"]
    plain = ["--task.chat", "messages", "--sample.stop", "w", "--num-steps", "1"]
    main.command(["train", "demo", *tiny_run.options(files, run), *plain])
    capsys.readouterr()
    main.command(["generate", str(run), "1 + 2 =", *given, "--no-with-adapter"])
    said = capsys.readouterr().out
    model = ["generate", str(files), "1 + 2 =", *given, "--model.dtype", "fp32"]
    main.command([*model, "--no-chat", "--stop", "w"])
    assert capsys.readouterr().out == said and "w" not in said
    main.command([*model, "--no-chat"])
    longer = capsys.readouterr().out
    assert longer.startswith(said.removesuffix("\n")) and len(longer) > len(said)
    main.command(model)
    assert capsys.readouterr().out != longer


def test_a_run_gives_its_answers_all_of_its_sampling(monkeypatch):
    sample, given = SampleConfig(max_tokens=9, top_k=5, top_p=0.9, min_p=0.1, stop=("w",)), []
    monkeypatch.setattr("qerl.cli.generate.read_run_config", lambda _: RunConfig(sample=sample))
    monkeypatch.setattr("qerl.cli.generate.check_place", lambda _: None)
    monkeypatch.setattr("qerl.serve.chat.generate", lambda *arguments: given.append(arguments[3]))
    main.command(["generate", "run", "hello"])
    assert all(getattr(given[0], name) == value for name, value in dataclasses.asdict(sample).items())


def test_without_the_chat_template_texts_are_apart(model):
    chat = Chat(model, GenerateOptions(seed=1, max_tokens=4, chat=False), io.StringIO())
    asked = []
    chat._sample = lambda tokens_T, stop, sample=chat._sample: (
        asked.append(tokens_T) or sample(tokens_T, stop)
    )
    for _ in range(2):
        chat.answer("hello")
    plain = model.engine.tokenizer("hello")["input_ids"]
    assert asked == [plain, plain]


def test_an_answer_that_cannot_have_its_tokens_is_told_once(model, capsys):
    chat = Chat(model, GenerateOptions(seed=1, max_tokens=100_000), io.StringIO())
    limit = model.max_positions
    for _ in range(2):
        chat.answer("x" * (limit // 2))
    told = capsys.readouterr().err
    assert told.count("max_tokens is 100000") == 1 and "there is room for " in told
    Chat(model, GenerateOptions(seed=1, max_tokens=20), io.StringIO()).answer("hello")
    assert capsys.readouterr().err == ""


def test_an_answer_of_the_most_likely_tokens_alone_is_greedy(model):
    answers = []
    for how in ({"temperature": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {}):
        Chat(model, GenerateOptions(seed=1, max_tokens=20, **how), out := io.StringIO()).answer("hello")
        answers.append(out.getvalue())
    assert answers[0] == answers[1] == answers[2] != answers[3]


def test_an_answer_is_written_token_by_token(model):
    class Out(io.StringIO):
        def flush(self):
            lengths.append(len(self.getvalue()))

    lengths = []
    Chat(model, GenerateOptions(seed=1, max_tokens=40), Out()).answer("hello")
    assert len(lengths) == 41 and len(set(lengths)) > 15


def test_an_answer_is_part_of_the_next_prompt_until_there_is_no_room(model, capsys):
    out = io.StringIO()
    chat = Chat(model, GenerateOptions(seed=1, max_tokens=300, system_prompt="s"), out)
    for turn in range(5):
        chat.answer(f"{turn}" * 150)
    messages = chat._messages
    assert messages[0]["content"] == "s" and messages[-2]["content"] == "4" * 150
    assert 3 < len(messages) < 11 and "dropped" in capsys.readouterr().err
    with pytest.raises(UserError, match="2003 tokens"):
        chat.answer("x" * 1997)
    assert messages[-1]["role"] == "assistant"


class Terminal:
    """`qerl generate` in a pseudo-terminal."""

    def __init__(self, folder, *given):
        self._end, inner = pty.openpty()

        def work():
            fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
            for number in range(3):
                os.dup2(inner, number)
            os.close(inner)
            os.close(self._end)
            sys.stdin, sys.stdout, sys.stderr = (_opened(number) for number in range(3))
            sys.argv = ["qerl", "generate", str(folder), "--model.dtype", "fp32", *given]
            main.main()

        self.process = tiny_run.Forked(work)
        os.close(inner)
        self.shown = ""

    def type(self, text):
        os.write(self._end, text.encode())

    def wait_for(self, text, *, most_s=60):
        """Wait until the text is shown, and return everything shown by then."""
        end_s = time.monotonic() + most_s
        while text not in self.shown:
            assert time.monotonic() < end_s, self.shown
            self._read()
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait_until_it_asks(self, text="> ", *, most_s=60):
        """Asleep in its read, too: between prompt and read a Ctrl-C is not seen before the next key, and a
        Ctrl-D may be lost."""
        self.wait_for(text, most_s=most_s)
        while "State:\tS" not in Path(f"/proc/{self.process.pid}/status").read_text():
            time.sleep(0.01)

    def _read(self):
        if select.select([self._end], [], [], 0.2)[0]:
            self.shown += os.read(self._end, 4096).decode(errors="replace")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def _opened(number):
    return open(number, "w" if number else "r", buffering=1, closefd=False)


@pytest.fixture
def long_model(tmp_path):
    return tiny_run.write_model(tmp_path / "long", max_positions=20_000)


def test_ctrl_c_ends_an_answer_twice_the_program(long_model):
    terminal = Terminal(long_model, "--max-tokens", "15000", "--seed", "1")
    try:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        while len(terminal.shown) < 20:
            terminal._read()
        terminal.type("\x03")
        terminal.wait_until_it_asks("\r\n> ", most_s=10)
        terminal.type("\x03")
        assert terminal.process.wait(timeout=10) == 130
    finally:
        terminal.close()


def test_ctrl_d_ends(long_model):
    terminal = Terminal(long_model, "--max-tokens", "5")
    try:
        terminal.wait_until_it_asks()
        terminal.type("\x03")
        terminal.wait_until_it_asks("again or Ctrl-D to quit)\r\n> ")
        terminal.type("one\n")
        terminal.wait_for("one\r\n")
        terminal.wait_until_it_asks("\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=10) == 0
    finally:
        terminal.close()


def test_a_second_ctrl_c_ends_the_program_within_an_answer(long_model):
    given = ("generate", str(long_model), "hello", "--max-tokens", "15000", "--model.dtype", "fp32")
    given += ("--seed", "1")  # whose answer is long

    def work():
        sys.argv = ["qerl", *given]
        main.main()

    process = tiny_run.Forked(work)
    try:
        parts.wait_for(lambda: len(process.written) >= 5)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
