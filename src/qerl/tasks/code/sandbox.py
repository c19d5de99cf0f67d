"""Choose the backend that confines the programs of the reward `code` on this machine."""

import dataclasses

from qerl.tasks.code.backends import BACKENDS
from qerl.tasks.code.runner import Limits, SandboxUnavailable, probe

_LIMITS = Limits(deadline_s=4.0, memory_bytes=1 << 30, output_bytes=1 << 20)


@dataclasses.dataclass(frozen=True, slots=True)
class Sandbox:
    """The backend that works here. str(sandbox) is one line for the log: what it confines, and why a better
    one is skipped."""

    backend: str
    """bwrap, landlock or unsafe."""
    active: frozenset[str]
    """Which of landlock and seccomp are active in the process."""
    skipped: dict[str, str]
    """Why each better backend does not work."""

    def __str__(self) -> str:
        skipped = "".join(f"; {name} skipped: {reason}" for name, reason in self.skipped.items())
        missing = [name for name in ("landlock", "seccomp") if name not in self.active]
        lacks = f", without {' and '.join(missing)}" if missing else ""
        return f"programs are confined by {self.backend}{lacks}: {BACKENDS[self.backend].confines}{skipped}"


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
            return Sandbox(name, frozenset(active), skipped)
    raise SandboxUnavailable("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
