"""What a host gives, from files that are planted: verdicts and their sentences; names, addresses and
interfaces.

Versions and GPUs, as given.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tools.doctor import host
from lockstep.tools.doctor.host import GIB, MIB


@pytest.mark.parametrize(
    ("given", "level", "said"),
    [
        ((8, None, 2, None), "ok", ""),
        ((8, None, 2, "4"), "ok", ""),
        ((8, None, 16, None), "warn", "16 ranks share 8 cores: start at most 8"),
        (
            (8, None, 4, "8"),
            "warn",
            "OMP_NUM_THREADS=8 and 4 ranks want 32 cores of 8: set OMP_NUM_THREADS=2, or unset it",
        ),
        (
            (64, 4.0, 2, None),
            "warn",
            (
                "torch counts 64 cores, but the cgroup allows only the time of 4: set"
                " OMP_NUM_THREADS=2"
            ),
        ),
        ((64, 4.0, 2, "2"), "ok", ""),
        (
            (8, None, 2, "1"),
            "warn",
            "OMP_NUM_THREADS=1 leaves 6 of 8 cores idle: set OMP_NUM_THREADS=4, or unset it",
        ),
        ((2, 0.5, 1, "1"), "ok", ""),
    ],
)
def test_cores_against_threads(
    given: tuple[int, float | None, int, str | None], level: str, said: str
) -> None:
    found = host.cores(*given)
    assert (found.level, found.fix) == (level, said)


def test_the_quota_is_read_from_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "job" / "1").mkdir(parents=True)
    (tmp_path / "of-process").write_text("12:cpu:/old\n0::/job/1\n")
    group = host.cgroup(tmp_path / "of-process", tmp_path)
    assert group == tmp_path / "job" / "1"
    assert host.quota(group / "cpu.max") is None
    (group / "cpu.max").write_text("150000 100000\n")
    assert host.quota(group / "cpu.max") == 1.5
    (group / "cpu.max").write_text("max 100000\n")
    assert host.quota(group / "cpu.max") is None
    assert host.cgroup(tmp_path / "nowhere", tmp_path) == tmp_path


def _memory(folder: Path, free: int, workers: int, **files: str) -> host.Finding:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return host.memory(free, 64 * GIB, folder, workers)


def test_memory_that_is_enough(tmp_path: Path) -> None:
    found = _memory(tmp_path, 32 * GIB, 2, max="max\n")
    assert (found.level, found.value) == ("ok", "32.0 GiB free of 64.0 GiB")


def test_memory_that_the_control_group_does_not_give(tmp_path: Path) -> None:
    found = _memory(tmp_path, 32 * GIB, 2, max=f"{4 * GIB}\n", current=f"{4 * GIB - 200 * MIB}\n")
    assert found.level == "fix"
    assert (
        found.value
        == "32.0 GiB free of 64.0 GiB; the cgroup allows 4.0 GiB, of which 200 MiB are left"
    )
    assert found.fix.startswith(
        "100 MiB for each of 2 ranks is less than the 300 MiB that torch alone takes"
    )


def test_memory_that_is_little_or_has_run_out_before(tmp_path: Path) -> None:
    assert _memory(tmp_path, GIB, 2).fix.startswith("512 MiB for each of 2 ranks is little")
    found = _memory(tmp_path, 32 * GIB, 2, events="low 0\noom 4\noom_kill 3\n")
    assert found.level == "warn"
    assert found.fix.startswith("memory ran out here 3 times before")
    both = _memory(tmp_path, GIB, 2, events="oom_kill 3\n").fix
    assert "ran out here 3 times" in both
    assert "512 MiB for each of 2 ranks" in both


@pytest.mark.parametrize(
    ("size", "free", "level"),
    [(8 * GIB, 8 * GIB, "ok"), (64 * MIB, 64 * MIB, "warn"), (8 * GIB, MIB, "fix")],
)
def test_shared_memory(size: int, free: int, level: str) -> None:
    found = host.shared_memory(size, free)
    assert found.level == level
    assert ("--shm-size=8g" in found.fix) == (level != "ok")


def test_limits() -> None:
    many = {"open files": 65536, "locked memory": 8 * MIB, "processes": 2**62}
    assert host.limits(many, infiniband=False).level == "ok"
    assert (
        host.limits(many, infiniband=False).value
        == "open files 65536, locked memory 8 MiB, processes unlimited"
    )
    pinned = host.limits(many, infiniband=True)
    assert (pinned.level, "ulimit -l unlimited" in pinned.fix) == ("fix", True)
    few = host.limits({**many, "open files": 256, "processes": 100}, infiniband=False)
    assert few.level == "warn"
    assert (
        few.fix
        == "256 open files may not be enough for loader workers and connections: `ulimit -n 65536`; "
        "100 processes and threads of this user may not be enough: `ulimit -u 65536`"
    )
    assert set(host.current_limits()) == set(many)


def test_this_host_can_be_looked_at() -> None:
    assert [found.name for found in host.findings(2)] == [
        "cores",
        "memory",
        "/dev/shm",
        "limits",
    ]


_EVERY = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        (["10.0.0.5"], "ok", ""),
        (["127.0.1.1"], "ok", ""),
        ([], "warn", "this host's name 'node7' does not resolve: add it to /etc/hosts"),
    ],
)
def test_own_name(answer: list[str], level: str, said: str) -> None:
    found = host.own_name("node7", lambda name: answer)
    assert found.level == level
    assert found.fix.startswith(said)


def test_the_interface_that_is_used() -> None:
    assert (
        host.used(_EVERY, "10.0.0.5", None).value
        == "lo 127.0.0.1, eth0 10.0.0.5, ib0 10.1.0.5; used: eth0"
    )
    assert host.used(_EVERY, "127.0.0.1", None).value.endswith("used: lo")
    assert host.used(_EVERY, "10.0.0.5", "eth0").level == "ok"
    assert host.used(_EVERY, "10.0.0.5", "ib0").fix.startswith(
        "GLOO_SOCKET_IFNAME=ib0, but eth0 reaches the peers"
    )
    wrong = host.used(_EVERY, "10.0.0.5", "eth9")
    assert (wrong.level, wrong.fix[:47]) == (
        "fix",
        "GLOO_SOCKET_IFNAME=eth9 names no interface with",
    )


def test_what_is_this_hosts() -> None:
    assert host.interfaces()["lo"] == "127.0.0.1"
    assert host.loopback_port().level == "ok"


def test_names_that_do_not_resolve_have_no_address() -> None:
    assert host.addresses_of("localhost") == ["127.0.0.1"]
    assert host.addresses_of("no such name") == []


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
