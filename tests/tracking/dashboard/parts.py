"""A run that a journal writes while it is followed, and a server of its page."""

import contextlib
import io
import threading

from rich.console import Console

from qerl.config import RunConfig
from qerl.tracking import Journal
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.dashboard.live import LivePage
from qerl.tracking.dashboard.server import listening
from qerl.types import Group, Prompt, Sample


@contextlib.contextmanager
def run_of(folder, num_steps=10):
    """A journal that has begun."""
    with Journal(folder, num_steps=num_steps, console=Console(file=io.StringIO())) as journal:
        journal.start(RunConfig(out=str(folder), num_steps=num_steps, loggers=()))
        yield journal


def take_step(journal, step, text="three", **metrics):
    prompt = Prompt(
        index=7, text=f"What is {step}? {text}", tokens_T=[5], messages=None, columns={"answer": "3"}
    )
    sample = {"tokens_T": [7], "logprobs_T": [-1.0], "finish": "stop", "version": step, "advantage": 0.5}
    with journal.step(step) as log:
        log.samples([Group(prompt=prompt, samples_G=[Sample(text=text, reward=1.0, **sample)])])
        log.add(reward=0.25 * step, **metrics)


@contextlib.contextmanager
def serving(*folders, port=0):
    """Its address."""
    with listening(port, LivePage([RunFollower(folder, folder.name) for folder in folders])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
