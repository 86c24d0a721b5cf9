"""An ordinary user, without a home, starts everything; another user of the host cannot take part.

A hardened kernel refuses an ordinary user what it lets root do, so these run as other users.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

USER, OTHER = 65533, 65534
# The session's interpreter may lie in a folder that only root can enter; the system's does not.
PYTHONS = [sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"]


def _start(
    user: int, folder: Path, *words: str, python: str | None = None
) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
    }
    return subprocess.Popen(
        [python or _python(folder), *words],
        cwd=folder,
        env=environment,
        user=user,
        group=user,
        extra_groups=[],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _done(user: int, folder: Path, words: Sequence[str]) -> str:
    process = _start(user, folder, *words)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return out


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the user's, into which others may look."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process as another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, USER, USER)
        yield folder


@cache
def _python(folder: Path) -> str:
    """An interpreter that an ordinary user can start, and that finds torch and Lockstep."""
    for python in filter(os.path.exists, PYTHONS):
        with suppress(PermissionError):
            words = ("-c", "import torch, lockstep")
            probe = _start(USER, folder, *words, python=python)
            probe.communicate()
            if probe.returncode == 0:
                return python
    pytest.skip("an ordinary user cannot read this Python, or what is installed for it")


_SCRIPT = """
import time
from pathlib import Path
import torch, lockstep, lockstep.collectives

with lockstep.init() as world:
    if world.rank == 0:
        Path("ready").touch()
    while not Path("attacked").exists():
        time.sleep(0.01)
    tensor = torch.tensor([7.0 ** world.rank])
    lockstep.collectives.all_reduce(tensor)
    print(world.rank, tensor.item())
"""
# Another user looks for the store by every name, and tries to write to it.
_ATTACK = """
import sys
from pathlib import Path

home = Path(sys.argv[1])
for attempt in (lambda: [*home.iterdir()], lambda: (home / sys.argv[2]).open("r+b")):
    try:
        print("reached", attempt())
    except PermissionError:
        print("refused")
"""


def test_another_user_cannot_reach_the_store_of_init(folder: Path) -> None:
    (folder / "script.py").write_text(_SCRIPT)
    run = _start(USER, folder, "-m", "lockstep", "run", "--workers", "2", "script.py")
    while not (folder / "ready").exists():
        assert run.poll() is None, run.communicate()
    home = folder / f"lockstep-{USER}"
    (store,) = home.glob("run-*/store")
    name = str(store.relative_to(home))
    assert _done(OTHER, folder, ["-c", _ATTACK, str(home), name]) == "refused\nrefused\n"
    assert "reached" in _done(USER, folder, ["-c", _ATTACK, str(home), name])
    (folder / "attacked").touch()
    out, err = run.communicate()
    assert (run.returncode, sorted(out.splitlines())) == (0, ["[0] 0 8.0", "[1] 1 8.0"]), err
    assert not store.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--workers", "2", "--steps", "2", "--run", "first"],
        ["evaluate", "digits", "--run", "first"],
        ["doctor"],
    ],
    ids=lambda words: str(words[0]),
)
def test_an_ordinary_user_without_a_home_uses_every_command(
    folder: Path, words: Sequence[str]
) -> None:
    if words[0] == "evaluate":
        training = ["train", "digits", "--workers", "1", "--steps", "2", "--run", "first"]
        _done(USER, folder, ["-m", "lockstep", *training])
    _done(USER, folder, ["-m", "lockstep", *words])
