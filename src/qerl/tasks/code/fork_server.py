"""Fork a process for each program or test: the server's side, which child.py runs once its imports are done.

    request    a packet {"folder": ..., "group": ...} with the descriptors of standard input, output and
               errors, of the exit code, and of the result, the order and, for some modes, the socket
    answer     a packet with a pidfd of the process, or with what failed

The server reaps its processes and writes their exit codes. It ends with the worker, and they end with it.
Their orders stay in files that it never reads: what it held, later processes would find in their memory.
This file imports the standard library only.
"""

import contextlib
import gc
import json
import os
import select
import socket
from typing import NamedTuple

from confine import PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_PDEATHSIG, prctl

NAME = b"qerl-fork"
"""A server's name for `ps -o comm`; its processes keep Python's."""


_Running = dict[int, tuple[int, int]]
"""By pidfd: process, descriptor of its exit code."""


class ForkRequest(NamedTuple):
    folder: str
    group: str | None
    standard: list[int]
    """Descriptors that become 0, 1 and 2."""
    channels: list[int]
    """Result, order and socket, which keep their numbers."""
    server: int
    """Process that forked this one."""


def next_request(control_end: int, worker: int) -> ForkRequest:
    """Serve, and return in each forked process, which must then `enter`. worker: a pidfd."""
    gc.collect()
    gc.freeze()
    name = _renamed(NAME)
    prctl(PR_SET_DUMPABLE, 0)  # its processes, where nothing else confines them, cannot write its memory
    control, poll = socket.socket(fileno=control_end), select.poll()
    running: _Running = {}
    for descriptor in (control_end, worker):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                _reap(descriptor, *running.pop(descriptor))
            elif descriptor == worker:
                os._exit(0)
            elif (request := _forked(control, poll, running)) is not None:
                control.detach()
                _renamed(name)
                return request


def enter(request: ForkRequest) -> None:
    """Leave what is the server's: session, descriptors, folder, control group."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != request.server:
        os._exit(1)
    for number, descriptor in enumerate(request.standard):
        os.dup2(descriptor, number)
    for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *request.channels}:
        with contextlib.suppress(OSError):  # the one of this listing
            os.close(number)
    if request.group is not None:
        group = os.open(request.group, os.O_WRONLY)
        os.write(group, b"0\n")
        os.close(group)
    os.chdir(request.folder)
    os.environ |= {"HOME": request.folder, "TMPDIR": request.folder}


def _forked(control: socket.socket, poll: select.poll, running: _Running) -> ForkRequest | None:
    """Fork for the request that has arrived; return it in the forked process. End with the worker's end."""
    text, descriptors, *_ = socket.recv_fds(control, 1 << 16, 16)
    if not text:
        os._exit(0)
    server, unused = os.getpid(), descriptors
    try:
        standard, (status, *channels), fields = descriptors[:3], descriptors[3:], json.loads(text)
        process = os.fork()
        if process == 0:
            return ForkRequest(**fields, standard=standard, channels=channels, server=server)
        pidfd = _opened(process)
        unused = [*standard, *channels]
    except (OSError, ValueError) as error:  # the descriptors of a request may be more than are free
        control.send(f"{type(error).__name__}: {error}".encode())
    else:
        running[pidfd] = process, status
        poll.register(pidfd, select.POLLIN)
        socket.send_fds(control, [b"1"], [pidfd])
    for descriptor in unused:
        os.close(descriptor)
    return None


def _opened(process: int) -> int:
    """Return a pidfd of a process that this one has forked, or end that process."""
    try:
        return os.pidfd_open(process)
    except OSError:
        os.kill(process, 9)
        os.waitpid(process, 0)
        raise


def _reap(pidfd: int, process: int, status: int) -> None:
    """Write the exit code, unless the worker no longer wants it."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(code).encode())
    os.close(status)
    os.close(pidfd)


def _renamed(name: bytes) -> bytes:
    """Give this process a name and return the one that it had."""
    with open("/proc/self/comm", "rb") as file:
        former = file.read().strip()
    prctl(PR_SET_NAME, name + b"\0")
    return former
