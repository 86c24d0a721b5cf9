"""Ranks that are bound to cores: by each launcher, when it may, and with which threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.config.launching import Launch
from lockstep.errors import UsageError
from lockstep.launcher.launch import launch
from lockstep.runtime import binding, cores
from lockstep.world.rendezvous import SharedCores
from tests.cli.command import command
from tests.launcher.conftest import Run
from tests.refused import refused
from tests.runtime.test_binding import tree

CORES = sorted(os.sched_getaffinity(0))[:2]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def two_nodes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make launchers take this host for one of two nodes with a core each, without GPUs and limits."""
    described = {number: (0, str(number)) for number in CORES}
    system = tree(tmp_path_factory.mktemp("devices") / "system", described, list(map(str, CORES)))
    monkeypatch.setattr(binding, "SYSTEM", system)
    monkeypatch.setattr(binding, "GPU_FILES", ())
    monkeypatch.setattr(binding, "quota", lambda: 2.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def _place() -> tuple[list[int], int, int]:
    threads = torch.get_num_threads()
    with lockstep.init():
        assert torch.get_num_threads() == threads
    return sorted(os.sched_getaffinity(0)), threads, binding.host_cores()


def test_functions() -> None:
    host = cores.cores()
    assert launch(_place, workers=2) == [([core], 1, host) for core in CORES]
    unbound = launch(_mask, workers=2, bind="none")
    assert unbound == [sorted(os.sched_getaffinity(0))] * 2
    with refused("unknown-choice", UsageError, name="bind", value="cores"):
        launch(_mask, bind="cores")  # type: ignore[arg-type]


def _mask() -> list[int]:
    return sorted(os.sched_getaffinity(0))


PRINT = "import os; print(os.environ['LOCAL_RANK'], *sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize("cold", [False, True])
def test_scripts(cold: bool, run: Run) -> None:
    code, out, _ = run(PRINT, launch=Launch(cold=cold))
    assert (code, sorted(out.splitlines())) == (0, [f"0 {CORES[0]}", f"1 {CORES[1]}"])


def test_scripts_that_are_not_to_be_bound(run: Run) -> None:
    _, out, _ = run(PRINT, launch=Launch(bind="none"))
    everywhere = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    assert sorted(out.splitlines()) == [f"0 {everywhere}", f"1 {everywhere}"]


def test_hosts_with_gpus_or_slower_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert binding.binding(2).shares == [{core} for core in CORES]
    (binding.SYSTEM.parent / "cpu_atom").mkdir()
    assert "slower" in binding.binding(2).reason
    (binding.SYSTEM.parent / "cpu_atom").rmdir()
    monkeypatch.setattr(binding, "GPU_FILES", [str(tmp_path)])
    assert "GPU" in binding.binding(2).reason


def _threads_of_a_bound_rank() -> list[int]:
    """A rank of two that is bound to two cores, among those of a host that may have more."""
    binding.bind(CORES)
    counts = [torch.get_num_threads(), binding.rank_cores(2)]
    torch.set_num_threads(7)
    SharedCores(2)
    counts.append(torch.get_num_threads())
    reading, writing = os.pipe()
    if os.fork() == 0:  # e.g. a program that starts ranks itself
        os.write(writing, bytes([binding.rank_cores(2)]))
        os._exit(0)
    return [*counts, *os.read(reading, 1)]


def test_a_bound_rank_has_a_thread_for_each_of_its_cores() -> None:
    assert launch(_threads_of_a_bound_rank, workers=1) == [[2, 2, 2, 1]]


@pytest.mark.rest
def test_the_bits_of_an_exact_training_do_not_depend_on_binding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = []
    for bind in ("auto", "none"):
        command(
            *("train", "digits"), workers=2, exact=True, steps=2, bind=bind, run=tmp_path / bind
        )
        out, err = capfd.readouterr()
        assert ("ranks bound to cores" in err) == (bind == "auto")
        results.append(out)
    assert results[0] == results[1]
