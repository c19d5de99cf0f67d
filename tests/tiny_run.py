"""A whole run in a few seconds: a model of two narrow layers, a tokenizer with a token a byte, 40 sums."""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qerl.cli import main
from qerl.config import RunConfig
from qerl.training import session

assert session  # imported here, so that a forked run need not

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
QERL = "-c", "from qerl.cli.main import main; main()"
REWARD = """
import json
import time
from pathlib import Path


def hold():
    while True:
        try:
            held = json.loads(Path(__file__).with_name("hold.json").read_text())
            if len(Path(held["metrics"]).read_text().splitlines()) < held["num_steps"]:
                return
        except FileNotFoundError:
            return
        time.sleep(0.005)


def even(prompts, completions, completion_ids, **columns):
    hold()
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def even_end(prompts, completions, completion_ids, **columns):
    hold()
    return [float(ids[-1] % 2 == 0) for ids in completion_ids]
"""


def write_model(
    folder: Path, *, width: int = 64, ff_width: int = 96, vocab_size: int = 272, max_positions: int = 128
) -> Path:
    # Here, as modelling code takes seconds to import: of each process that a test starts.
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=ff_width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


def write_task(folder: Path) -> Path:
    rows = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(40)]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "even.py").write_text(REWARD)
    return path


def write_files(folder: Path, *, max_positions: int = 128) -> Path:
    write_model(folder, max_positions=max_positions)
    write_task(folder)
    return folder


@contextlib.contextmanager
def held(files: Path, out: Path, num_steps: int) -> Iterator[None]:
    """Let the rewards of `files` wait once the run in `out` has recorded this many steps: to the block's end,
    or for the 10 s that a reward may take."""
    path = files / "hold.json"
    path.write_text(json.dumps({"metrics": str(out / "metrics.jsonl"), "num_steps": num_steps}))
    try:
        yield
    finally:
        path.unlink()


class Forked:
    """A forked process, which has torch imported, with the part of subprocess.Popen that the tests use."""

    def __init__(self, work: Callable[[], object]):
        folder = Path(tempfile.mkdtemp(prefix="qerl-forked-"))
        weakref.finalize(self, _remove, folder, os.getpid()).atexit = False
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._out.touch()
        self._work = work
        self.returncode: int | None = None
        self._start()

    @functools.cached_property
    def pid(self) -> int:
        return forked(self._work, self._out, self._err)

    def _start(self) -> None:
        assert self.pid

    @property
    def written(self) -> str:
        """Its stdout so far."""
        return self._out.read_text()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}: {self._err.read_text()}", timeout)
            time.sleep(0.005)
        return code

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Deferred(Forked):
    """A run that is forked when something is asked of it before its end, and else done in this process: one
    that is forked takes 0.15 of its 0.45 CPU seconds more, for pages that it has to copy."""

    def _start(self) -> None:
        """Wait until it is asked for."""

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        if self.returncode is None and "pid" not in vars(self):
            self.returncode = done_here(self._work, self._out, self._err, timeout)
        return super().communicate(timeout)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the object too
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _imported() -> None:
    """Import and cache in this process what each forked run would: TensorBoard, and the options' docstrings,
    which tyro reads. They take 0.4 of the 1.6 CPU seconds of a run."""
    importlib.import_module("torch.utils.tensorboard")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        tyro.cli(RunConfig, args=["--help"])
    gc.collect()
    gc.freeze()


def rehearse() -> None:
    """Do a whole run in this process: each run forked from it then takes 0.05 of its 0.47 CPU seconds less,
    as it finds the pages of code and data that the run had touched."""
    _imported()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = write_files(Path(name))
        main.command(["train", "demo_long", *options(folder, folder / "run")])


def forked(work: Callable[[], object], stdout: Path, stderr: Path) -> int:
    """Run work() in a forked process with a session of its own; return its process id."""
    _imported()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where this process has threads
        pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        gc.freeze()  # what the tests before have made is not this run's to look at
        os.setsid()
        sys.stdout, sys.stderr = _redirected(1, stdout), _redirected(2, stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it
        torch.set_num_threads(1)
        code = _exit_code(work)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def done_here(work: Callable[[], object], stdout: Path, stderr: Path, timeout_s: float = 120.0) -> int:
    """Run work() in this process, with what it may change of it put back; return its exit code."""
    _imported()
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM
    handlers = {number: signal.getsignal(number) for number in numbers}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _time_out)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        with (
            stdout.open("a", buffering=1) as out,
            stderr.open("a", buffering=1) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ),
            mock.patch.multiple(sys, argv=list(sys.argv), path=list(sys.path)),
        ):
            return _exit_code(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _time_out(number: int, frame: object) -> None:
    raise TimeoutError("the run took longer than the test allows")


def _exit_code(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _redirected(number: int, path: Path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    return open(number, "w", buffering=1, closefd=False)


def started(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str] | Forked":
    """Run `qerl`, a script or a module's main() in a forked process, or `qerl` in this one (Deferred); with a
    GPU, in a new one. Ray leaves threads behind, and what is forked beside them waits for ever."""
    own = child_variables() | (environment or {})
    if torch.cuda.is_available():
        return launched(*arguments, environment=own)

    def work() -> None:
        os.environ.update(own)
        if arguments[: len(QERL)] == QERL:
            sys.argv = ["qerl", *arguments[len(QERL) :]]
            main.main()
        elif arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            importlib.import_module(arguments[1]).main()
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")

    is_deferred = arguments[: len(QERL)] == QERL and environment is None and "--ray" not in arguments
    return Deferred(work) if is_deferred else Forked(work)


def signals_itself(
    number: int, num_steps: int, *arguments: str, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str] | Forked":
    """Start `qerl` with these arguments; it sends itself the signal in its step after this many."""
    script = Path(__file__).with_name("signals_itself.py")
    return started(str(script), str(int(number)), str(num_steps), *arguments, environment=environment)


def kill_in_step(num_steps: int, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run `qerl` with these arguments until it kills itself in its step after this many."""
    process = signals_itself(signal.SIGKILL, num_steps, *arguments, environment=environment)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, stderr


def child_variables() -> dict[str, str]:
    """Return the variables with which a process finds this checkout's package and uses one thread."""
    paths = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


def launched(
    *arguments: str, environment: Mapping[str, str] | None = None, start_new_session: bool = False
) -> "subprocess.Popen[str]":
    """Start Python with these arguments in a process of its own."""
    own = child_variables() | (environment or {})
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | own,
        start_new_session=start_new_session,
    )


def options(folder: Path, out: Path) -> list[str]:
    """Return the options of `qerl train demo_long` for the tiny run; the files must lie in `folder`."""
    given = {
        "out": out,
        "num-steps": 6,
        "num-prompts": 4,
        "num-generations": 4,
        "model.path": folder,
        "model.dtype": "fp32",
        "adapter.rank": 4,
        "task.name": folder / "sums.jsonl",
        "task.template": "{prompt}",
        "task.num-held-out": 8,
        "task.rewards": f"{folder / 'even.py'}:even",
        "task.reward-workers": 1,
        "sample.max-tokens": 5,
        "noise.num-stages": 3,
        "evaluate.num-prompts": 4,
        "evaluate.success-threshold": 1.0,
        "checkpoint.every": 2,
        "learn.learning-rate": 0.01,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]
