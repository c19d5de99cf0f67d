"""The processes of one run, which rank each of them has, and what they say to each other.

    torchrun starts them      a process a GPU; RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR say who is who
    gather, from_first        Python values, over gloo: what was sampled, rewards, a few numbers
    add                       tensors to their sums: gradients of what learns, over NCCL between GPUs

Every rank runs the same loop over the same values and so takes the same decisions; only the first writes.
Waiting for a rank that is gone ends in `RankLost`: the closed connection is seen by gloo, and each sum over NCCL,
which sees nothing, comes after a word over gloo. Tests: tests/training/test_distributed.py.
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

from qerl.errors import RunError, UserError

T = TypeVar("T")
_SUM_BYTES = 64_000_000  # of one call of NCCL: a copy of so much is what a sum takes beside the gradients
_PATIENCE = timedelta(hours=2)  # a rank with long samples may be that much later than one with short ones
_TELLING = timedelta(seconds=5)


class RankLost(RunError):
    """Another rank is gone, and did not say why."""


class Ranks:
    """ranks.own([a, b, c]) is [a, c] on the first of two and [b] on the second; woven() puts it together."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self._gathered_bytes = self._added_bytes = 0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def own(self, items: list[T]) -> list[T]:
        """This rank's share: as many as any other's, or one less."""
        return items[self.index :: self.count]

    def interleave(self, parts: list[list[T]]) -> list[T]:
        """All items in their order, from what `own` gave to each rank."""
        num_items = sum(map(len, parts))
        return [parts[i % self.count][i // self.count] for i in range(num_items)]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, to every rank."""
        if self.count == 1:
            return [value]
        packed: list[Any] = [None] * self.count
        with _waiting():
            dist.all_gather_object(packed, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        self._gathered_bytes += sum(map(len, packed))
        return [pickle.loads(data) for data in packed]

    def from_first(self, make: Callable[[], T]) -> T:
        """What it makes on the first rank, where alone it is called."""
        if self.count == 1:
            return make()
        found: list[Any] = [make() if self.is_first else None]
        with _waiting():
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    def add(self, tensors: list[Tensor]) -> None:
        """Each becomes its sum over all ranks: the same bits on every one of them."""
        if self.count == 1:
            return
        self.gather(None)
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            with _waiting():
                dist.all_reduce(flat)
            self._added_bytes += flat.nbytes
            for tensor, sums in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(sums.view_as(tensor))

    def check_same(self, what: str, value: Any) -> None:
        """RunError unless it is the same on every rank."""
        values = self.gather(value)
        if len(set(map(repr, values))) > 1:  # by its letters: nan is nan, and no float has two
            raise RunError(f"the ranks have come apart: {what} is {', '.join(map(str, values))}")

    def take_traffic(self) -> dict[str, float]:
        """Bytes since the last call: of the tensors that each rank put into sums, and of all ranks' values
        that each got; empty for one rank."""
        taken: dict[str, float] = {"added_bytes": self._added_bytes, "gathered_bytes": self._gathered_bytes}
        self._added_bytes = self._gathered_bytes = 0
        return {} if self.count == 1 else taken


ALONE = Ranks(0, 1)


@contextlib.contextmanager
def join_ranks(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The ranks of the run that this process was started for; `device` is ModelConfig's, resolved.

    What ends one rank ends all: the first to fail says why, each host says it once, the rest are silent.
    """
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
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=_PATIENCE)
    ranks = Ranks(index, count)
    ranks.add([torch.zeros(1, device=device)])  # NCCL takes its memory now, before the KV cache is measured
    ranks.take_traffic()
    try:
        yield ranks
    except RankLost as error:
        raise _explained(store, error) if local == 0 else SystemExit(1) from None
    except BaseException as error:
        if _is_told(store, index, error):
            raise SystemExit(error.code if isinstance(error, SystemExit) else 1) from None
        raise
    else:
        dist.destroy_process_group()


def _is_told(store: Store, index: int, error: BaseException) -> bool:
    """Whether another rank has failed for the same reason and tells it; this one's is kept if it is first."""
    reason = f"ended with {error.code}" if isinstance(error, SystemExit) else str(error)
    store.set_timeout(_TELLING)
    try:
        teller, _, told = store.compare_set("failure", "", f"{index} {reason}").decode().partition(" ")
    except RuntimeError:  # gone with the host that held it
        return False
    return told == reason and int(teller) != index


def _explained(store: Store, error: RankLost) -> RankLost:
    """With the other rank's own reason, if it left one."""
    store.set_timeout(_TELLING)
    try:
        index, _, reason = store.get("failure").decode().partition(" ")
    except RuntimeError:
        return error
    return RankLost(f"rank {index} failed: {reason}")


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank is gone ({str(error).splitlines()[0]})") from error


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _SUM_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
