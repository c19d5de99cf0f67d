"""Let the kernel switch less often between the processes of the tests (Linux 6.12 and later).

Tests that compute took 49 CPU seconds in one process on two cores, 54 in two and 64 in three: what they read
is no longer in a core's cache after a switch. With slices of 100 ms in place of 3 it was 54 in three. The
processes that they start have them too; an older kernel takes no notice.
"""

import ctypes
import os
import platform
import struct
import sys

SLICE_NS = 50_000_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def lengthen() -> None:
    call = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    fields = 48, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, SLICE_NS, 0, 0
    ctypes.CDLL(None).syscall(call, 0, struct.pack("IIQiIQQQ", *fields), 0)
