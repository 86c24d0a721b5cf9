"""Processes end with the one that started them: on Linux by the kernel, elsewhere because they
ask for their parent.
"""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.ending import wait_gone

# A parent that starts a child; the child says its pid once it is tied, and would then live for ten
# minutes.
_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""
_TIED = """
import os, sys, time
from lockstep.runtime import process_lifetime
{setup}
process_lifetime.die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_child_dies_with_its_parent(platform: str) -> None:
    """With one that is killed, and with one that died first: the pid that it is given is not its
    parent's, so it ends in place of waiting for a signal.
    """
    setup = f"sys.platform = {platform!r}; process_lifetime._POLL_SECONDS = 0.05"
    code = _TIED.format(setup=setup)
    command = [sys.executable, "-c", _PARENT, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_gone([child])
    with subprocess.Popen([sys.executable, "-c", code, "1"]) as orphan:
        try:
            assert orphan.wait(30) == 137
        finally:
            orphan.kill()
