"""Processes end with the one that started them: on Linux by the kernel, elsewhere because they
ask for their parent.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest

from tests.ending import alive

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


def test_a_child_dies_with_its_killed_parent() -> None:
    _assert_child_ends(_TIED.format(setup=""))


def test_elsewhere_it_asks_for_its_parent() -> None:
    _assert_child_ends(
        _TIED.format(setup="sys.platform = 'darwin'; process_lifetime._POLL_SECONDS = 0.05")
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_parent_that_died_first_is_noticed(platform: str) -> None:
    """The pid of the parent is not this process's, as after the parent's death: the child ends
    instead of waiting for a signal.
    """
    code = textwrap.dedent(_TIED.format(setup=f"sys.platform = {platform!r}"))
    dead = subprocess.run([sys.executable, "-c", code, "1"], check=False)
    assert dead.returncode == 137


def _assert_child_ends(code: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PARENT), textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _wait_until(lambda: not alive(child))


def _wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
