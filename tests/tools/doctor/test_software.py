"""Versions and GPUs, as given."""

from __future__ import annotations

import pytest

from lockstep.tools.doctor import host

_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12\n"


@pytest.mark.parametrize(
    ("found", "wanted", "level"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", "ok"),
        ("2.14.1", "<2.14,>=2.11", "fix"),
        ("2.9.0", ">=2.11,<2.14", "fix"),
        ("2.14.0a0+gitabc", ">=2.11,<2.14", "fix"),
        ("3.11.7", ">=3.11", "ok"),
        ("3.10.2", ">=3.11", "fix"),
        ("2.99", "", "ok"),
    ],
)
def test_versions(found: str, wanted: str, level: str) -> None:
    finding = host.version("torch", found, wanted)
    assert finding.level == level
    if level == "fix":
        assert finding.fix.startswith(f"torch {found} is outside {wanted}")


@pytest.mark.parametrize(
    ("given", "level", "value"),
    [
        (([], None, "", ""), "ok", "none"),
        (
            (["H200", "H200", "L4"], "12.8", _DRIVER, "2.27.3"),
            "ok",
            "2 x H200, 1 x L4; driver 570.86.15, CUDA 12.8, NCCL 2.27.3",
        ),
        (([], None, _DRIVER, ""), "warn", "none that torch sees; driver 570.86.15"),
        (([], "12.8", _DRIVER, ""), "fix", "none that torch sees; driver 570.86.15"),
    ],
)
def test_gpus(given: tuple[list[str], str | None, str, str], level: str, value: str) -> None:
    found = host.graphics(*given)
    assert (found.level, found.value) == (level, value)


def test_systems() -> None:
    assert host.system("linux", "x86_64").level == "ok"
    assert "shared memory" in host.system("linux", "aarch64").fix
    assert "darwin is not tested" in host.system("darwin", "arm64").fix


def test_this_installation_can_be_looked_at() -> None:
    assert [found.name for found in host.installation()] == [
        "Python",
        "torch",
        "system",
        "backends",
        "GPUs",
    ]
    assert all(found.level == "ok" for found in host.installation()[:2])
