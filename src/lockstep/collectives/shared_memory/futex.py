"""Sleep until a word of shared memory changes, and wake who sleeps: the kernel's futex, for which
Python has no function.

A sleeper says what it saw; the kernel looks again before it puts it to sleep, so no change is
missed. x86-64 Linux, like all of this room.
"""

from __future__ import annotations

import ctypes

# numbers of the system call and of its operations (include/uapi/linux/futex.h), between processes
_FUTEX, _WAIT, _WAKE = 202, 0, 1
_EVERYBODY = 2**31 - 1
_LOW = 2**32 - 1  # a futex is the lower half of a word


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall


def sleep(address: int, seen: int, seconds: float) -> None:
    """Return when the word at `address` is woken, no longer holds `seen`, or the time is over; a
    signal may end it early.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _call(
        _FUTEX,
        ctypes.c_void_p(address),
        _WAIT,
        ctypes.c_uint32(seen & _LOW),
        ctypes.byref(limit),
        None,
        0,
    )


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    _call(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
