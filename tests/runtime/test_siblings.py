"""Ranks of one parent find rank 0 by a file that only they can read, and are not misled by what
dead processes left.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.runtime import private, siblings
from tests.refused import refused

SOON = timedelta(seconds=0.05)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return private.user_directory()


def _dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def _file(home: Path, pid: int, port: int = 1, started: int | None = None) -> Path:
    return home / f"port-{pid}-{private.start_time(pid) if started is None else started}-{port}-job"


def test_published_found_withdrawn() -> None:
    siblings.publish("job", 4711)
    assert siblings.find("job", SOON) == 4711
    siblings.publish("job", 4712)
    assert siblings.find("job", SOON) == 4712
    siblings.withdraw("job")
    with refused("rank-0-not-found", LockstepError, seconds=0.05):
        siblings.find("job", SOON)


def test_whoever_looks_first_waits() -> None:
    found: list[int] = []
    other = threading.Thread(
        target=lambda: found.append(siblings.find("job", timedelta(seconds=20)))
    )
    other.start()
    siblings.publish("job", 4711)
    other.join()
    assert found == [4711]


@pytest.mark.parametrize("old", ["dead", "reused pid", "garbage"])
def test_stale_files_are_ignored_and_removed(home: Path, old: str) -> None:
    {
        "dead": _file(home, _dead_process(), started=5),
        "reused pid": _file(home, os.getppid(), started=1),
        "garbage": home / "port-x-y-z-job",
    }[old].touch()
    with refused("rank-0-not-found", LockstepError):
        siblings.find("job", SOON)
    siblings.publish("job", 4711)
    assert siblings.find("job", SOON) == 4711
    assert len([*home.iterdir()]) == 1


def test_publishing_keeps_what_the_living_have_left(home: Path) -> None:
    living = home / _file(home, os.getppid(), port=99).name.replace("job", "other")
    living.touch()
    siblings.publish("job", 4711)
    assert siblings.find("other", SOON) == 99


def test_only_the_owner_withdraws(home: Path) -> None:
    _file(home, os.getppid()).touch()
    siblings.withdraw("job")
    assert siblings.find("job", SOON) == 1


def test_the_directory_is_private(home: Path) -> None:
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(0o755)
    with refused("directory-not-private", LockstepError, path=str(home)):
        siblings.publish("job", 1)


def test_the_key_is_the_parents_unless_a_launcher_names_the_job() -> None:
    code = "import os; from lockstep.runtime import siblings; print(siblings.key(os.environ))"
    keys = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert keys == [f"{os.getpid()}-{private.start_time(os.getpid())}"] * 2
    assert siblings.key({}) != keys[0]
    one, same, other = ({"PMIX_NAMESPACE": name} for name in ("a", "a", "../b"))
    assert siblings.key(one) == siblings.key(same) != siblings.key(other)
    assert "/" not in siblings.key(other)
