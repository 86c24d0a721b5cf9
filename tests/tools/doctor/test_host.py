"""What a host gives, from planted files: cores, memory, limits, names, interfaces, versions, GPUs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.runtime.binding import Binding
from lockstep.tools.doctor import host
from lockstep.tools.doctor.host import GIB, MIB


@pytest.mark.parametrize(
    ("given", "level", "said"),
    [
        ((8, math.inf, 2, None), "ok", ""),
        ((8, math.inf, 2, "4"), "ok", ""),
        ((8, math.inf, 16, None), "warn", "16 ranks share 8 cores: start at most 8"),
        ((8, math.inf, 4, "8"), "warn", "4 ranks want 32 cores of 8: set OMP_NUM_THREADS=2"),
        ((64, 4.0, 2, None), "ok", ""),
        ((64, 4.0, 2, "2"), "ok", ""),
        ((8, math.inf, 2, "1"), "warn", "leaves 6 of 8 cores idle: set OMP_NUM_THREADS=4"),
        ((2, 0.5, 1, "1"), "ok", ""),
    ],
)
def test_cores_against_threads(
    given: tuple[int, float, int, str | None], level: str, said: str
) -> None:
    found = host.cores(*given)
    assert (found.level, bool(found.fix)) == (level, bool(said))
    assert said in found.fix


def test_binding() -> None:
    cores = [frozenset({number, number + 4}) for number in range(4)]
    nodes = [cores[:2], cores[2:]]
    found = host.bound(Binding(nodes=nodes, shares=[{0, 1, 4, 5}, {2, 3, 6, 7}]))
    assert (found.name, found.level) == ("binding", "ok")
    assert found.value == "2 nodes, 4 physical cores; cores of rank 0: 0-1,4-5, of rank 1: 2-3,6-7"
    found = host.bound(Binding(nodes=nodes[:1], reason="OMP_PLACES is set"))
    assert found.value == "1 node, 2 physical cores; ranks are not bound: OMP_PLACES is set"


@pytest.mark.parametrize(
    ("free", "files", "level", "said"),
    [
        (32 * GIB, {"max": "max\n"}, "ok", [""]),
        (
            32 * GIB,
            {"max": f"{4 * GIB}\n", "current": f"{4 * GIB - 200 * MIB}\n"},
            "fix",
            ["100 MiB for each of 2 ranks is less than the 300 MiB that torch alone takes"],
        ),
        (GIB, {}, "warn", ["512 MiB for each of 2 ranks is little"]),
        (32 * GIB, {"events": "low 0\noom 4\noom_kill 3\n"}, "warn", ["ran out here 3 times"]),
        (GIB, {"events": "oom_kill 3\n"}, "warn", ["out here 3 times", "512 MiB for each of 2"]),
    ],
)
def test_memory(
    free: int, files: dict[str, str], level: str, said: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    found = host.memory(free, 64 * GIB, tmp_path, 2)
    assert found.level == level
    assert [words for words in said if words not in found.fix] == []
    assert found.value.startswith(f"{free // GIB}.0 GiB free of 64.0 GiB")
    assert ("the cgroup allows 4.0 GiB, of which 200 MiB are left" in found.value) == (
        "current" in files
    )


def test_shared_memory() -> None:
    cases = ((8 * GIB, 8 * GIB, "ok"), (64 * MIB, 64 * MIB, "warn"), (8 * GIB, MIB, "fix"))
    for size, free, level in cases:
        found = host.shared_memory(size, free)
        assert (found.level, "--shm-size=8g" in found.fix) == (level, level != "ok")


def test_limits() -> None:
    many = {"open files": 65536, "locked memory": 8 * MIB, "processes": 2**62}
    well = host.limits(many, infiniband=False)
    assert well.level == "ok"
    pinned = host.limits(many, infiniband=True)
    assert (pinned.level, "ulimit -l unlimited" in pinned.fix) == ("fix", True)
    few = host.limits({**many, "open files": 256, "processes": 100}, infiniband=False)
    assert few.level == "warn"
    assert few.fix.startswith("256 open files may not be enough")
    assert "`ulimit -n 65536`; 100 processes and threads" in few.fix
    assert "`ulimit -u 65536`" in few.fix
    assert set(host.current_limits()) == set(many)


def test_this_host_and_this_installation_can_be_looked_at() -> None:
    assert [found.name for found in host.findings(2)] == [
        *("cores", "binding", "memory", "/dev/shm", "limits")
    ]
    python, torch, *others = host.installation()
    assert (python.level, torch.level) == ("ok", "ok")
    assert [found.name for found in (python, torch, *others)] == [
        *("Python", "torch", "system", "backends", "GPUs")
    ]
    assert host.interfaces()["lo"] == "127.0.0.1"
    assert host.loopback_port().level == "ok"
    assert host.addresses_of("localhost") == ["127.0.0.1"]
    assert host.addresses_of("no such name") == []


_EVERY = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}


def test_own_name() -> None:
    assert host.own_name("node7", lambda name: ["10.0.0.5"]).level == "ok"
    assert host.own_name("node7", lambda name: ["127.0.1.1"]).level == "ok"
    unknown = host.own_name("node7", lambda name: [])
    assert unknown.level == "warn"
    assert "'node7' does not resolve: add it to /etc/hosts" in unknown.fix


def test_the_interface_that_is_used() -> None:
    used = host.used(_EVERY, "10.0.0.5", None).value
    assert used == "lo 127.0.0.1, eth0 10.0.0.5, ib0 10.1.0.5; used: eth0"
    assert host.used(_EVERY, "127.0.0.1", None).value.endswith("used: lo")
    assert host.used(_EVERY, "10.0.0.5", "eth0").level == "ok"
    other, wrong = (host.used(_EVERY, "10.0.0.5", name) for name in ("ib0", "eth9"))
    assert other.fix.startswith("GLOO_SOCKET_IFNAME=ib0, but eth0 reaches the peers")
    assert wrong.level == "fix"
    assert wrong.fix.startswith("GLOO_SOCKET_IFNAME=eth9 names no interface with")


_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12\n"


def test_versions() -> None:
    for version, wanted, level in (
        ("2.13.0+cpu", ">=2.11,<2.14", "ok"),
        ("2.14.1", "<2.14,>=2.11", "fix"),
        ("2.9.0", ">=2.11,<2.14", "fix"),
        ("2.14.0a0+gitabc", ">=2.11,<2.14", "fix"),
        ("3.11.7", ">=3.11", "ok"),
        ("2.99", "", "ok"),
    ):
        assert host.version("torch", version, wanted).level == level, version


def test_gpus() -> None:
    three = host.graphics(["H200", "H200", "L4"], "12.8", _DRIVER, "2.27.3")
    assert three.level == "ok"
    assert three.value == "2 x H200, 1 x L4; driver 570.86.15, CUDA 12.8, NCCL 2.27.3"
    assert host.graphics([], None, "", "").level == "ok"
    assert host.graphics([], None, _DRIVER, "").level == "warn"
    assert host.graphics([], "12.8", _DRIVER, "").level == "fix"


def test_systems() -> None:
    assert host.system("linux", "x86_64").level == "ok"
    assert "shared memory" in host.system("linux", "aarch64").fix
    assert "darwin is not tested" in host.system("darwin", "arm64").fix
