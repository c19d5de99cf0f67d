"""The ranks of a run, forked, with the environment and the store that torchrun gives them."""

import subprocess

from torch.distributed import TCPStore

import tiny_run


class StartedRanks:
    """Processes that meet as one run, with the part of subprocess.Popen that the tests use."""

    def __init__(self, count: int, *arguments: str):
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(count)}
        meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.processes: list[subprocess.Popen[str] | tiny_run.Forked] = [
            tiny_run.started(*arguments, environment=meeting | {"RANK": str(index), "LOCAL_RANK": str(index)})
            for index in range(count)
        ]

    @property
    def returncode(self) -> int | None:
        """That of the first rank that failed, or 0; None while one runs."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Return the output of all ranks, rank after rank."""
        stdouts, stderrs = zip(
            *(process.communicate(timeout=timeout) for process in self.processes), strict=True
        )
        return "".join(stdouts), "".join(stderrs)
