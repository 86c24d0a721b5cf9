"""No process outlives the one that started it: not a rank its launcher, not a loader worker its
rank.

A killed launcher runs no clean-up, so it is the child that must notice. On Linux the kernel does it
(PR_SET_PDEATHSIG); elsewhere a thread asks once a second who the parent is.
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
"""Environment variable: the pid of the process that started this rank. Where it is set,
Lockstep's own launcher did.
"""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_EXIT = 128 + signal.SIGKILL  # what a shell would show for the death that Linux gives
_POLL_SECONDS = 1.0


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process (SIGKILL) as soon as the process `parent` has ended.

    Args:
        parent: the pid of this process's parent, as known to the parent itself. Asked for here it
            would be too late: a parent that has already died was replaced by init.

    On Linux the signal follows the parent's *thread* that started this process: start ranks from a
    thread that stays. Does not reach processes that this one starts; they call it themselves.
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
    """End this process as soon as the one that had it made has ended: the parent that the kernel
    knows is a fork server where that made it.

    For processes of multiprocessing. A thread sees to it, so native code that never lets the
    interpreter go is not ended.
    """
    threading.Thread(target=_wait_for_maker, name="lockstep-parent", daemon=True).start()


def heed_parent_only() -> None:
    """For a loader worker: a scheduler's SIGTERM and SIGUSR1 reach every process of a job, and it
    is the rank that must decide.

    SIGTERM then ends this process only if its parent has sent it. Where the system does not say who
    has, it stays as it is.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        # in every thread that is started from now on too
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_wait_for_parent, name="lockstep-signals", daemon=True).start()


def _wait_for_parent() -> None:
    while sys.platform == "linux":
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getppid():
            os._exit(128 + signal.SIGTERM)


def _leave_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:  # it ended before the kernel was told
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
