"""A training ends with the same bits on the hosts that users have: small temporary folders and shared
memory, a home that cannot be written, a container with one core, another locale, a path with spaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

_CGROUPS = Path("/sys/fs/cgroup")
_MIB_2, _MIB_64 = 2 * 2**20, 64 * 2**20


def train(folder: Path, *before: str, **environment: str) -> Path:
    """Train digits on two ranks with the command, behind the words `before`. Return its run."""
    folder.mkdir(exist_ok=True)
    words = ["train", "digits", "--exact", "--steps", "6", "--workers", "2", "--run", "rün"]
    result = subprocess.run(
        [*before, sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "rün"


def mounted(place: Path, *options: str) -> list[str]:
    """Return the words that run a command with a tmpfs at `place`, which nobody else sees."""
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    script = f"mount -t tmpfs -o {','.join(options)} none '{place}' && exec \"$@\""
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("undisturbed"))


def assert_same_bits(first: Path, second: Path) -> None:
    words = [sys.executable, "-m", "lockstep", "verify", str(first), str(second)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"OMP_NUM_THREADS": "1"}],
    ids=" ".join,
)
def test_under_other_variables(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    assert_same_bits(undisturbed, train(tmp_path, **environment))


def test_in_a_folder_with_spaces_and_other_letters(undisturbed: Path, tmp_path: Path) -> None:
    assert_same_bits(undisturbed, train(tmp_path / "my trainings, für später"))


def test_with_a_temporary_folder_of_2_mib(undisturbed: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    before = mounted(small, f"size={_MIB_2}")
    assert_same_bits(undisturbed, train(tmp_path, *before, TMPDIR=str(small)))


def test_with_shared_memory_of_64_mib(undisturbed: Path, tmp_path: Path) -> None:
    before = mounted(Path("/dev/shm"), f"size={_MIB_64}")
    assert_same_bits(undisturbed, train(tmp_path, *before))


def test_with_a_home_that_cannot_be_written(undisturbed: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    before = mounted(home, "ro")
    assert_same_bits(undisturbed, train(tmp_path, *before, HOME=str(home)))


@pytest.fixture(params=["v1", "v2"])
def one_core(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group whose processes get the time of one core."""
    controller = _CGROUPS / "cpu" if request.param == "v1" else _CGROUPS
    limit = (
        ("cpu.cfs_quota_us", "100000") if request.param == "v1" else ("cpu.max", "100000 100000")
    )
    group = controller / f"lockstep-{os.getpid()}"
    if request.param == "v2" and "cpu" not in _text(_CGROUPS / "cgroup.subtree_control"):
        pytest.skip("this host gives no control group of version 2 a limit of cores")
    if not os.access(controller, os.W_OK):
        pytest.skip(f"this user may not make a control group in {controller}")
    group.mkdir()
    try:
        (group / limit[0]).write_text(limit[1])
        yield group
    finally:
        group.rmdir()


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_in_a_control_group_of_one_core(one_core: Path, undisturbed: Path, tmp_path: Path) -> None:
    script = f'echo $$ > "{one_core}/cgroup.procs" && exec "$@"'
    assert_same_bits(undisturbed, train(tmp_path, "sh", "-c", script, "sh"))
