"""What a process tells of itself: imports nearly nothing, since fresh processes import it."""

from __future__ import annotations

import json
import os
import sys


def of_itself(descriptor: int) -> None:
    """Whether it was forked and is no fresh interpreter, the numbers of its open files, and where its streams lead."""
    numbers = [int(number) for number in os.listdir("/proc/self/fd")]
    # less that of the listing
    opened = sorted(number for number in numbers if os.path.exists(f"/proc/self/fd/{number}"))
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    os.write(descriptor, json.dumps(["fresh" not in sys.orig_argv, opened, streams]).encode())
