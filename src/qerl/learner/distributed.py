"""The processes (ranks) of one run and their collectives, over torch.distributed.

    torchrun                  starts one process per GPU, with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR
    gather, from_first        Python values over gloo: samples, rewards, a few numbers
    add                       all-reduce of tensors: gradients, over NCCL between GPUs

Every rank runs the same loop over the same values and so takes the same decisions; only the first one writes.
Waiting for a lost rank raises `RankLost`: gloo notices the closed connection of one that has ended,
heartbeat.py one that is frozen, and each NCCL sum, which would hang, follows an exchange over gloo. Tests:
tests/training/test_distributed.py, tests/faults/test_ranks.py.
"""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from qerl.algo.batches import batches
from qerl.errors import RunError, UserError
from qerl.learner.heartbeat import Heartbeat, RankLost, cut, open_connections

T = TypeVar("T")
_SUM_BYTES = 64_000_000  # per all-reduce: the copy that a sum needs besides the gradients
_COLLECTIVE_TIMEOUT = timedelta(hours=2)  # a rank with long samples may be this much slower than the others
_REPORT_TIMEOUT = timedelta(seconds=5)


class Ranks:
    """Ranks of a run: share([a, b, c]) is [a, c] on the first of two and [b] on the second; interleave()
    merges."""

    def __init__(self, index: int, count: int, heartbeat: Heartbeat | None = None):
        self.index, self.count, self._heartbeat = index, count, heartbeat
        self._gathered_bytes = self._added_bytes = 0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, items: list[T]) -> list[T]:
        """Return this rank's share: every ranks-th item."""
        return items[self.index :: self.count]

    def interleave(self, parts: list[list[T]]) -> list[T]:
        """Merge what `share` gave to each rank, in the original order."""
        num_items = sum(map(len, parts))
        return [parts[i % self.count][i // self.count] for i in range(num_items)]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, on every rank."""
        if self.count == 1:
            return [value]
        packed = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        self._wait(lambda: dist.all_gather(sizes, torch.tensor([len(packed)]), async_op=True))
        num_bytes = [int(size) for size in sizes]
        texts = [torch.empty(max(num_bytes), dtype=torch.uint8) for _ in num_bytes]
        padded = torch.frombuffer(bytearray(packed.ljust(max(num_bytes), b"\0")), dtype=torch.uint8)
        self._wait(lambda: dist.all_gather(texts, padded, async_op=True))
        self._gathered_bytes += sum(num_bytes)
        return [
            pickle.loads(text[:size].numpy().tobytes()) for text, size in zip(texts, num_bytes, strict=True)
        ]

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank only and return its result on every rank."""
        if self.count == 1:
            return make()
        packed = pickle.dumps(make(), protocol=pickle.HIGHEST_PROTOCOL) if self.is_first else b""
        size = torch.tensor([len(packed)])
        self._wait(lambda: dist.broadcast(size, src=0, async_op=True))
        text = torch.frombuffer(bytearray(packed or int(size)), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(text, src=0, async_op=True))
        return pickle.loads(text.numpy().tobytes())

    def add(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, bitwise equal on every rank."""
        if self.count == 1:
            return
        self.gather(None)
        for bucket in batches(tensors, lambda tensor: tensor.nbytes, _SUM_BYTES):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            if flat.is_cuda:
                dist.all_reduce(flat)
            else:
                self._wait(lambda flat=flat: dist.all_reduce(flat, async_op=True))
            self._added_bytes += flat.nbytes
            for tensor, sums in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(sums.view_as(tensor))

    def check_same(self, what: str, value: Any) -> None:
        """Raise RunError unless the value is equal on every rank."""
        values = self.gather(value)
        if len(set(map(repr, values))) > 1:  # compared by repr: nan equals nan
            raise RunError(f"ranks diverged: {what} is {', '.join(map(str, values))}")

    def _wait(self, start: Callable[[], Any]) -> None:
        """Wait for a collective. Raise RankLost if a rank that takes part is lost or silent."""
        try:
            work = start()
            assert self._heartbeat is not None
            interval, num_beats = timedelta(seconds=self._heartbeat.interval_s), 0
            while not _is_done(work, interval):
                num_beats = self._heartbeat.check(num_beats_before=num_beats)
        except RankLost:
            raise
        except RuntimeError as error:
            raise RankLost(f"another rank is lost ({str(error).splitlines()[0]})") from error

    def take_traffic(self) -> dict[str, float]:
        """Return the bytes since the last call: of the tensors each rank put into sums, and of all gathered
        values; empty for a single rank."""
        taken: dict[str, float] = {"added_bytes": self._added_bytes, "gathered_bytes": self._gathered_bytes}
        self._added_bytes = self._gathered_bytes = 0
        return {} if self.count == 1 else taken


ALONE = Ranks(0, 1)


@contextlib.contextmanager
def join_ranks(
    device: str, environment: Mapping[str, str] = os.environ, *, timeout_s: float = 600.0
) -> Iterator[Ranks]:
    """Join the ranks that torchrun started; `device` is ModelConfig's, resolved.

    A failure of one rank ends all: the first one reports the reason, once per host. A rank that is silent for
    timeout_s has failed."""
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    try:
        index, count, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except KeyError as missing:
        raise UserError(f"WORLD_SIZE is set, but not {missing.args[0]}: start it with torchrun") from None
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun started rank {local} on this host, which has {torch.cuda.device_count()} GPUs:"
                " lower --nproc-per-node"
            )
        torch.cuda.set_device(local)
    store, *_ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    connections = open_connections()
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=_COLLECTIVE_TIMEOUT)
    connections = open_connections() - connections
    heartbeat = Heartbeat(store, index, count, timeout_s)
    ranks = Ranks(index, count, heartbeat)
    ranks.add([torch.zeros(1, device=device)])  # NCCL allocates now, before the KV cache is sized
    ranks.take_traffic()
    try:
        yield ranks
    except RankLost as error:
        heartbeat.stop()
        cut(connections)
        raise _with_reason(store, error) if local == 0 else SystemExit(1) from None
    except BaseException as error:
        if _is_reported(store, index, error):
            raise SystemExit(error.code if isinstance(error, SystemExit) else 1) from None
        raise
    else:
        heartbeat.stop()
        dist.destroy_process_group()


def _is_reported(store: Store, index: int, error: BaseException) -> bool:
    """Return True if another rank has reported the same reason; the first reason is stored."""
    reason = f"ended with {error.code}" if isinstance(error, SystemExit) else str(error)
    store.set_timeout(_REPORT_TIMEOUT)
    try:
        reporter, _, reported = store.compare_set("failure", "", f"{index} {reason}").decode().partition(" ")
    except RuntimeError:  # the host that held the store is gone
        return False
    return reported == reason and int(reporter) != index


def _with_reason(store: Store, error: RankLost) -> RankLost:
    """Return the error with the other rank's own reason, if it left one."""
    store.set_timeout(_REPORT_TIMEOUT)
    try:
        index, _, reason = store.get("failure").decode().partition(" ")
    except RuntimeError:
        return error
    return RankLost(f"rank {index} failed: {reason}")


def _is_done(work: Any, interval: timedelta) -> bool:
    """Wait this long for a collective; return False if it is still running."""
    try:
        work.wait(interval)
    except RuntimeError:
        if work.is_completed():  # it has failed
            raise
        return False
    return True
