"""Notice a rank that is frozen: its process exists and its connections are open, but nothing runs in it.

Each rank counts up its own key of the ranks' store, in a thread of its own, ten times in timeout_s, and reads
the others' keys. A rank whose key stands still for ten of this rank's own beats is silent. Beats are counted
and not seconds: after a pause of the whole machine, all ranks go on.
"""

import os
import socket
import stat
import threading
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from qerl.errors import RunError

_NUM_BEATS = 10


class RankLost(RunError):
    """Another rank is lost and left no reason."""


class Heartbeat:
    def __init__(self, store: Store, index: int, count: int, timeout_s: float):
        self.interval_s = timeout_s / _NUM_BEATS
        self._index, self._timeout_s = index, timeout_s
        self._store: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._heard: dict[int, tuple[bytes, int]] = {i: (b"", 0) for i in range(count) if i != index}
        """Last value of each other rank, and the number of beats since it changed."""
        self._num_beats = self._num_waited = 0
        self._lost: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self, *, num_beats_before: int) -> int:
        """Raise RankLost if a rank, or the ranks' store, is silent. Call it every interval_s.
        num_beats_before: the value of the last call, 0 at first."""
        self._num_waited = 0 if self._num_beats != num_beats_before else self._num_waited + 1
        if self._lost is None and self._num_waited > 2 * _NUM_BEATS:
            self._lost = "the ranks' store does not answer"
        if self._lost is not None:
            raise RankLost(f"{self._lost} for {self._timeout_s:g} s (rank_timeout_s): another rank is lost")
        return self._num_beats

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(self.interval_s)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.interval_s):
                self._beat()
        except RuntimeError as error:
            if not self._stopped.is_set():
                self._lost = f"the ranks' store cannot be reached ({str(error).splitlines()[0]})"

    def _beat(self) -> None:
        self._store.set(f"heartbeat/{self._index}", str(self._num_beats + 1))
        for index, (value, num_same) in self._heard.items():
            key = f"heartbeat/{index}"
            now = self._store.get(key) if self._store.check([key]) else b""
            self._heard[index] = (now, num_same + 1 if now == value else 0)
        silent = [f"rank {index}" for index, (_, n) in self._heard.items() if n >= _NUM_BEATS]
        self._lost = f"{', '.join(silent)}: silent" if silent else None
        self._num_beats += 1


def open_connections() -> set[int]:
    """Return the descriptors of this process's connected sockets."""
    connected = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()
                connected.add(descriptor)
        except OSError:  # closed meanwhile, or it listens
            continue
    return connected


def cut(connections: set[int]) -> None:
    """End what waits for a frozen rank, which would otherwise keep this process from exiting."""
    for descriptor in connections:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
