"""Answer the page's requests.

/          the page                         /now       run states, GPUs, and a tag that names the content
/update    changed parts and data           /samples   the groups of ?run=0&step=12, ?run=0&prompt=7 or
                                             ?run=0&held_out=1
"""

import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from qerl.tracking.atomic_file import encode
from qerl.tracking.dashboard.follow import RunFollower
from qerl.tracking.dashboard.gpu import GpuMonitor
from qerl.tracking.report import page

POLICY = "; connect-src 'self'"


class LivePage:
    """Reads the files anew for each request; thread-safe."""

    def __init__(self, followers: Sequence[RunFollower]):
        self._followers, self._gpus = followers, GpuMonitor()
        self._lock = threading.Lock()
        self._tag, self._update = "", b""

    def page(self) -> bytes:
        with self._lock:
            parts, data = self._contents(self._refresh())
        style, script = (page.asset(f"dashboard.{kind}", "qerl.tracking.dashboard") for kind in ("css", "js"))
        runs = [follower.run() for follower in self._followers]
        return page.document(runs, parts, data, style=style, script=script, policy=POLICY)

    def now(self) -> bytes:
        with self._lock:
            tag = self._refresh()
            states = [follower.state() for follower in self._followers]
        return encode({"tag": tag, "runs": states, "gpus": self._gpus.now()})

    def update(self) -> bytes:
        with self._lock:
            tag = self._refresh()
            if tag != self._tag:
                parts, data = self._contents(tag)
                self._tag, self._update = tag, encode({"parts": parts, "data": data})
            return self._update

    def samples(self, query: str) -> bytes | None:
        """Return the groups of a run's step, of its prompt in all steps, or of its held-out problems; None if
        there are none."""
        try:
            wanted = {name: int(values[0]) for name, values in parse_qs(query).items()}
            run = wanted["run"]
        except (KeyError, ValueError):
            return None
        if not 0 <= run < len(self._followers) or not wanted.keys() & {"step", "prompt", "held_out"}:
            return None
        follower = self._followers[run]
        with self._lock:
            if "held_out" in wanted:
                groups = follower.held_out()
            elif "step" in wanted:
                groups = follower.groups(wanted["step"])
            else:
                groups = follower.groups_of(str(wanted["prompt"]))
        return encode(groups) if groups else None

    def _refresh(self) -> str:
        for follower in self._followers:
            follower.refresh()
        return "-".join(follower.tag for follower in self._followers)

    def _contents(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        samples = [
            {"groups": [], "steps": follower.steps(), "hasHeldOut": follower.has_held_out}
            for follower in self._followers
        ]
        parts, data = page.contents([follower.run() for follower in self._followers], samples)
        return parts, data | {"isLive": True, "tag": tag}
