"""No process outlives the process that started it: no rank outlives its launcher, no loader worker
its rank.

A killed launcher runs no clean-up, so the child must notice. On Linux the kernel kills the child
(PR_SET_PDEATHSIG); elsewhere a thread checks the parent's pid once a second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

PARENT = "LOCKSTEP_PARENT"
"""Environment variable: the pid of the process that started this rank. Only Lockstep's own launcher
sets it.
"""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# the exit status that a shell shows after SIGKILL, which the kernel sends on Linux
_EXIT = 128 + signal.SIGKILL
_POLL_SECONDS = 1.0


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process (SIGKILL) as soon as the process `parent` has ended.

    Args:
        parent: the pid of this process's parent, as the parent itself knows it. To read it here
            would be too late: after the parent's death the system shows init instead.

    On Linux the kernel sends the signal when the parent's *thread* that started this process ends:
    start ranks from a thread that stays. Does not reach processes that this one starts; they call
    it themselves.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
        _leave_if_orphaned(parent)
    else:
        threading.Thread(
            target=_poll_parent, args=(parent,), name="lockstep-parent", daemon=True
        ).start()


def die_with_maker() -> None:
    """End this process when the process that created it ends.

    With a fork server, the kernel knows the fork server as the parent, not the creator. For
    processes of multiprocessing. A thread does it, so it cannot end native code that never releases
    the interpreter.
    """
    threading.Thread(target=_wait_for_maker, name="lockstep-parent", daemon=True).start()


def heed_parent_only() -> None:
    """Ignore a scheduler's signals in a loader worker. SIGTERM and SIGUSR1 reach every process of a
    job, but only the rank decides what to do.

    SIGTERM then ends this process only if its parent sent it. On systems that do not tell the
    sender, SIGTERM keeps its effect.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        # threads that start later inherit the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_wait_for_parent, name="lockstep-signals", daemon=True).start()


def _wait_for_parent() -> None:
    while sys.platform == "linux":
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getppid():
            os._exit(128 + signal.SIGTERM)


def _leave_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:  # the parent ended before the prctl call
        os._exit(_EXIT)


def _wait_for_maker() -> None:
    maker = multiprocessing.parent_process()
    if maker is not None:
        maker.join()
        os._exit(_EXIT)


def _poll_parent(parent: int) -> None:
    while True:
        _leave_if_orphaned(parent)
        time.sleep(_POLL_SECONDS)
