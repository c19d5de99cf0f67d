"""Choose the backend that confines the programs of the reward `code` on this machine."""

import dataclasses
from pathlib import Path

from qerl.tasks.code import cgroup
from qerl.tasks.code.backends import BACKENDS
from qerl.tasks.code.runner import Limits, SandboxUnavailable, probe

_LIMITS = Limits(deadline_s=4.0, memory_bytes=1 << 30, output_bytes=1 << 20)


@dataclasses.dataclass(frozen=True, slots=True)
class Sandbox:
    """The backend that works here. str(sandbox) is one line for the log: what it confines, and why a better
    one is skipped, and a cgroup."""

    backend: str
    """bwrap, landlock or unsafe."""
    active: frozenset[str]
    """Which of landlock and seccomp are active in the process."""
    skipped: dict[str, str]
    """The reason why each better backend does not work."""
    cgroup: Path | None
    """Group in which each process gets one of its own."""
    without_cgroup: str
    """The reason why there is no cgroup."""

    def __str__(self) -> str:
        skipped = "".join(f"; {name} skipped: {reason}" for name, reason in self.skipped.items())
        missing = [name for name in ("landlock", "seccomp") if name not in self.active]
        lacks = f", without {' and '.join(missing)}" if missing else ""
        group = f"; each in a cgroup of its own in {self.cgroup}: memory, swap and tasks"
        group = group if self.cgroup else f"; without a cgroup: {self.without_cgroup}"
        confines = f"{BACKENDS[self.backend].confines}{group}{skipped}"
        return f"programs are confined by {self.backend}{lacks}: {confines}"


def choose(limits: Limits = _LIMITS, *, unsafe: bool = False) -> Sandbox:
    """Return the best backend that runs a program here; raise SandboxUnavailable if none does. unsafe: accept
    one that confines with whatever the machine has."""
    skipped: dict[str, str] = {}
    for name in BACKENDS:
        if name == "unsafe" and not unsafe:
            continue
        try:
            active = probe(dataclasses.replace(limits, backend=name))
        except SandboxUnavailable as error:
            skipped[name] = " ".join(str(error).split())
        else:
            group, reason = _cgroup(dataclasses.replace(limits, backend=name))
            return Sandbox(name, frozenset(active), skipped, group, reason)
    raise SandboxUnavailable("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))


def _cgroup(limits: Limits) -> tuple[Path | None, str]:
    """Return the group in which a program could be run in one of its own; None and the reason if none is."""
    try:
        group = cgroup.find()
        probe(dataclasses.replace(limits, cgroup=group))
    except (OSError, SandboxUnavailable) as error:
        return None, " ".join(str(error).split())
    return group, ""
