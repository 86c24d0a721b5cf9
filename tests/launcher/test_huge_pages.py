"""Ranks that a launcher starts get the memory of large tensors in huge pages: there are few page
faults, where each step makes large tensors anew.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.launcher.commands import python

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GLIBC = platform.libc_ver()


def _given() -> bool:
    if not _POLICY.exists() or "[madvise]" not in _POLICY.read_text():
        return False
    return _GLIBC[0] == "glibc" and tuple(map(int, _GLIBC[1].split("."))) >= (2, 35)


pytestmark = pytest.mark.skipif(
    not _given(), reason="this kernel gives huge pages always, or never, or glibc does not ask"
)

_PAGES, _ROUNDS = 16384, 5  # of 64 MiB
_FAULTS = f"""
import resource, torch
torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({_ROUNDS}):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(tmp_path: Path, *start: str, **variables: str) -> int:
    script = tmp_path / "faults.py"
    script.write_text(_FAULTS)
    done = python(*start, str(script), **variables)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("options", [(), pytest.param(("--cold",), marks=pytest.mark.rest)])
def test_a_rank_has_few(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert _faults(tmp_path, "-m", "lockstep", "run", *options) < _ROUNDS * _PAGES // 16


@pytest.mark.rest
def test_a_plain_process_has_a_fault_for_every_page_and_what_the_user_says_of_glibc_stands(
    tmp_path: Path,
) -> None:
    assert _faults(tmp_path) > _ROUNDS * _PAGES // 2  # else the others show nothing
    tunables = "glibc.malloc.perturb=0"
    faults = _faults(tmp_path, "-m", "lockstep", "run", GLIBC_TUNABLES=tunables)
    assert faults > _ROUNDS * _PAGES // 2
