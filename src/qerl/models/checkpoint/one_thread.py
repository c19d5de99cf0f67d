"""Run torch's operations on the CPU in the caller's thread: reading is many small ones.

Each on more than 32,768 numbers waits for the last of torch's threads. For the linears of a 0.5B, in seconds:

                            one thread       two while others use the cores, the worst
    decode a GGUF              0.65              19
    check NVFP4 codes          0.008              1.9
    draw new adapters          0.036              0.39

On idle cores both numbers of threads decode the GGUF in 0.4 to 0.5 s.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
