"""A Ray cluster of this machine that runs of several tests join."""

import fcntl
import logging
import os
import time
from pathlib import Path

import tiny_run

OF_A_RUN = {
    "RAY_worker_niceness": "0",  # Ray's 15 leaves its workers little of a busy machine
    "RAY_TMPDIR": "/tmp",  # Ray writes for a while after the tests, whose folder is removed
    "RAY_prestart_worker_first_driver": "0",  # no idle workers
}
ENVIRONMENT = OF_A_RUN | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a local cluster wants a token by default, and what joins has none
}
NUM_CPUS = 8  # more than any run asks for, also while the samplers of a killed one end


def shared_address(file: Path) -> str:
    """Return the cluster's address, which stands in the file. The first of several pytest processes starts
    it, and it ends with the process that has started them, or with the only one."""
    with file.open("a+") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        written.seek(0)
        address = written.read()
        if not address:
            address = _start(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
            written.write(address)
            written.flush()
        fcntl.flock(written, fcntl.LOCK_UN)  # the forked process has the file too
    return address


def _start(owner: int) -> str:
    def work() -> None:
        import ray

        os.closerange(3, 1 << 16)  # xdist waits 20 s for a process whose pipes another one has
        os.environ.update(tiny_run.child_variables() | ENVIRONMENT)
        ray.init(address="local", include_dashboard=False, num_cpus=NUM_CPUS, logging_level=logging.ERROR)
        print(ray.get_runtime_context().gcs_address)
        while Path(f"/proc/{owner}").exists():
            time.sleep(0.5)
        ray.shutdown()

    process, end_s = tiny_run.Forked(work), time.monotonic() + 120
    while not process.written.endswith("\n"):
        assert process.poll() is None and time.monotonic() < end_s, process.communicate()
        time.sleep(0.01)
    return process.written.strip()
