"""signals_itself.py NUMBER NUM_STEPS COMMAND...: `qerl COMMAND...`, which sends itself the signal of this
number in its step after this many, before the step learns. Signals from outside may come too late."""

import os
import sys

from qerl.cli.main import main
from qerl.tracking.step_log import Stopwatch


def signal_in_step(number: int, num_steps: int) -> None:
    span, num_learned = Stopwatch.span, 0

    def signalling(stopwatch: Stopwatch, name: str):
        nonlocal num_learned
        if name == "learn":
            if num_learned == num_steps:
                os.kill(os.getpid(), number)
            num_learned += 1
        return span(stopwatch, name)

    Stopwatch.span = signalling


if __name__ == "__main__":
    number, num_steps, *arguments = sys.argv[1:]
    signal_in_step(int(number), int(num_steps))
    sys.argv = ["qerl", *arguments]
    main()
