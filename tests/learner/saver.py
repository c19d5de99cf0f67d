"""python -m learner.saver FOLDER MS...: saves without end in FOLDER/MS, killed MS after its first save.

One process for each MS, forked from one that has imported torch and built the learner.
"""

import os
import signal
import sys
import time
from pathlib import Path

import once
from learner.tiny import tiny_learner
from qerl.learner import checkpoint


def save(folder, learner, *, next_step, keep, extra=None):
    """Write the state before next_step; return the checkpoint's folder."""
    return checkpoint.write(folder, checkpoint.snapshot(learner, next_step=next_step, extra=extra), keep=keep)


def mark(learner, value: float) -> None:
    """Every weight becomes `value`, so that a checkpoint put together from two steps is seen."""
    for tensor in learner.adapter_state().values():
        tensor.fill_(value)


def save_without_end(folder: Path, learner) -> None:
    next_step, os.fsync = 0, once.flush  # most of a save is waiting for the disk: kills come in the middle
    while True:
        next_step += 1
        mark(learner, next_step)
        save(folder, learner, next_step=next_step, keep=2, extra={"marked": next_step})


def kill_one(folder: Path, learner, delay_ms: int) -> None:
    process = os.fork()
    if process == 0:
        save_without_end(folder, learner)
    while not list(folder.glob("step-*")):
        time.sleep(0.001)
    time.sleep(delay_ms / 1000)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


if __name__ == "__main__":
    learner = tiny_learner()
    for delay_ms in sys.argv[2:]:
        kill_one(Path(sys.argv[1]) / delay_ms, learner, int(delay_ms))
