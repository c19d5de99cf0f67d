"""Requests by id, with their results until these are old.

    fetched results     60 s longer, in which a client may ask again for an answer that was lost on its way
    others              session_timeout_s longer
    above max_bytes     the oldest results go first, fetched ones before others

What was dropped, or never was, is a GoneError: the client sends a sample again, and reports anything else.
"""

import time
from collections.abc import Mapping

from qerl.errors import UserError
from qerl.tinker.worker import Job

_FETCHED_KEPT_S = 60.0


class GoneError(UserError):
    """Something that was there and is no longer."""


class Requests:
    def __init__(self, *, kept_s: float, max_bytes: int):
        self._jobs: dict[str, Job] = {}
        self._fetched_s: dict[str, float] = {}
        self._kept_s, self._max_bytes = kept_s, max_bytes

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request_id: str, job: Job) -> None:
        self._jobs[request_id] = job

    def job(self, request_id: str) -> Job:
        if request_id not in self._jobs:
            raise GoneError(f"there is no request {request_id[:100]}, or its result is no longer kept")
        return self._jobs[request_id]

    def fetched(self, request_id: str) -> None:
        """Note that the result was sent; it is not kept for long from now on."""
        self._fetched_s.setdefault(request_id, time.monotonic())

    def cancel(self, request_id: str) -> None:
        """Stop the request's samples, if it is one for samples."""
        if request_id in self._jobs:
            self._jobs[request_id].is_cancelled = True

    def end(self, owner: str) -> None:
        """Cancel and forget the requests of a session, a training client or a sampler."""
        for request_id in [each for each in self._jobs if each.startswith(f"{owner}:")]:
            self.cancel(request_id)
            self._drop(request_id)

    def drop_old(self) -> None:
        now_s, done = time.monotonic(), {key: job for key, job in self._jobs.items() if job.future.done()}
        for request_id, job in done.items():
            fetched_s = self._fetched_s.get(request_id)
            ends_s = job.done_s + self._kept_s if fetched_s is None else fetched_s + _FETCHED_KEPT_S
            if ends_s < now_s:
                self._drop(request_id)
        self._drop_excess({key: job for key, job in done.items() if key in self._jobs})

    def _drop_excess(self, done: Mapping[str, Job]) -> None:
        sizes = {request_id: _num_bytes(job) for request_id, job in done.items()}
        excess = sum(sizes.values()) - self._max_bytes
        for request_id in sorted(sizes, key=lambda key: (key not in self._fetched_s, done[key].done_s)):
            if excess <= 0:
                return
            excess -= sizes[request_id]
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._jobs[request_id]
        self._fetched_s.pop(request_id, None)


def _num_bytes(job: Job) -> int:
    result = None if job.future.exception() else job.future.result()
    return len(result) if isinstance(result, bytes) else 0
